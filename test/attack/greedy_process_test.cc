// A process of this host takes all connections and sessions that it can get, and keeps them. Other
// processes must still get theirs, though all come from one address.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "attack/victim.h"

namespace attack_test::greedy_process {
namespace {

constexpr std::uint32_t kMaximum = 16;

Config victim_config() {
  Config c = rpc_test::rpc_config();
  c.connections.maximum = kMaximum;
  c.connections.peer_timeout = kHandshakeLimit;  // processes wait for a processor
  c.rpc.sessions = kMaximum;
  return c;
}

/// A client's sessions and connections, one after the other.
class Client {
 public:
  explicit Client(const Victim& victim) : address_(victim.address()), node_(config()) {}

  /// Empty: it is connected.
  std::string connect() {
    node_.closed.clear();
    const Connection c = node_.begin(address_);
    EXPECT_TRUE(until({&node_}, [&] { return c.ready() || !node_.closed.empty(); }));
    return c.ready() ? "" : node_.closed.back().message();
  }
  /// Empty: a session is open, and has been used.
  std::string open_session() {
    why_.clear();
    spinwire::SessionOptions options;
    options.on_closed = [this](spinwire::Session, const Error& e) { why_ = e.message(); };
    auto made = node_.engine.open_session(address_, options);
    if (!made) return made.error().message();
    EXPECT_TRUE(until({&node_}, [&] { return made->ready() || !why_.empty(); }));
    if (!why_.empty()) return why_;
    Status ended = Status::system;
    const auto word = std::byte{7};
    EXPECT_EQ(made->call(kEcho, {&word, 1}, [&](const spinwire::Reply& r) { ended = r.status(); }),
              Status::ok);
    EXPECT_TRUE(until({&node_}, [&] { return ended != Status::system; }));
    EXPECT_EQ(ended, Status::ok);
    return "";
  }
  /// Takes what it can. Returns why it got no more.
  std::string take_all(std::string (Client::*take)()) {
    std::string why;
    std::uint32_t had = 0;
    for (; had <= kMaximum && why.empty(); ++had) why = (this->*take)();
    EXPECT_GT(had, 2u) << "no attack: " << why;
    return why;
  }
  /// Names this client's device.
  [[nodiscard]] spinwire::Endpoint endpoint() {
    auto made = node_.engine.prepare({});
    EXPECT_TRUE(made) << made.error().message();
    EXPECT_TRUE(until({&node_}, [&] { return made->endpoint().has_value(); }));
    return *made->endpoint();
  }
  void poll() { (void)node_.poll(); }

 private:
  static Config config() {
    Config c = rpc_test::rpc_config();
    c.connections.maximum = c.rpc.sessions = 2 * kMaximum;
    c.connections.peer_timeout = kHandshakeLimit;
    return c;
  }

  std::string address_;
  std::string why_;  ///< of the last session; written until the engine is destroyed
  Node node_;
};

/// Takes all that it can in a process of its own, and keeps it.
class GreedyProcess {
 public:
  GreedyProcess(const Victim& victim, std::string (Client::*take)())
      : child_([&victim, take](int in, int out) {
          Client client(victim);
          std::string why = client.take_all(take);
          std::replace(why.begin(), why.end(), '\n', ' ');
          write_line(out, why);
          while (command(in) != 'q') client.poll();
          return 0;
        }),
        why_(child_.line()) {}

  /// Why it got no more.
  [[nodiscard]] const std::string& why() const { return why_; }
  [[nodiscard]] std::string name() const {
    return "process " + std::to_string(child_.pid()) + " of this host";
  }
  void end() {
    child_.tell('q');
    EXPECT_EQ(child_.wait(), 0) << "see what it has written";
  }

 private:
  Child child_;
  std::string why_;
};

void attack(std::string (Client::*take)()) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "other GIDs name no process";
  Victim victim(victim_config());
  GreedyProcess first(victim, take);
  EXPECT_NE(first.why().find(first.name()), std::string::npos) << first.why();
  GreedyProcess second(victim, take);
  EXPECT_NE(second.why().find(second.name()), std::string::npos) << second.why();
  {
    Client honest(victim);
    EXPECT_EQ((honest.*take)(), "");
  }
  first.end();
  second.end();
  (void)victim.stop();
}

TEST(AttackByGreed, AProcessWithManyConnectionsKeepsNoOtherOut) { attack(&Client::connect); }

// Strangers name a process that is not theirs, and stay half-open until its share is used up.
TEST(AttackByGreed, HellosInItsNameKeepNoProcessOut) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "other GIDs name no process";
  Config config = victim_config();
  config.connections.maximum_per_source = kMaximum / 4;  // as many as may be half-open
  Victim victim(config);
  Client honest(victim);
  const wire::Frame hello = wire::encode(wire::Hello{honest.endpoint()});
  std::vector<Stream> strangers;
  for (std::uint32_t i = 0; i < kMaximum / 4; ++i) {
    strangers.emplace_back(victim.address());
    strangers.back().send(hello);
    ASSERT_TRUE(until({}, [&] { return strangers.back().is_accepted(); }));
  }
  EXPECT_EQ(honest.connect(), "");
  (void)victim.stop();
}

TEST(AttackByGreed, AProcessWithManySessionsKeepsNoOtherOut) { attack(&Client::open_session); }

}  // namespace
}  // namespace attack_test::greedy_process
