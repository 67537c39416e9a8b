// Polls in which a server finds calls and messages of several peers at once.
#include <array>
#include <cstdint>

#include "engine/narrow_lanes.h"
#include "rpc/direct_calls.h"
#include "softverbs/lane/line.h"

namespace rpc_mixed_polls_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers

constexpr std::size_t kLong = 32u << 10;  // goes without a work request
constexpr std::uint32_t kBurst = 8;
static_assert(spinwire::softverbs::kLaneData / kLong < kBurst + 2, "a burst fills a lane");

Config mixed_config() {
  Config c = rpc_config();
  c.memory.send_bytes = 24u << 20;
  c.memory.rendezvous_bytes = 8u << 20;
  c.memory.windows = 32;
  c.connections.max_message_bytes = 1u << 20;
  return c;
}

/// A client with a connection and a session. Its messages are numbered.
struct Sender {
  Node node{mixed_config()};
  Ends ends;
  Session session;
  std::uint32_t sent = 0;
  std::uint32_t seen = 0;  ///< by the server
  std::uint32_t replies = 0;

  bool send(std::size_t size) {
    if (ends.client.send(node.filled(size, sent)) != Status::ok) return false;
    ++sent;
    return true;
  }
  void send_burst() {
    for (std::uint32_t i = 0; i < kBurst; ++i) (void)send(kLong);
  }
};

/// Two clients of one server. While the server runs the first call of a poll, both clients send as
/// much as they have room for.
class Mixed {
 public:
  Mixed() {
    for (Sender& s : senders_) s.node.has_on_offer = false;
    server_.has_on_offer = false;
    server_.on_message = [this](Connection c, const Message& m) {
      for (Sender& s : senders_) {
        if (s.ends.server != c) continue;
        EXPECT_TRUE(Node::holds(m.bytes(), s.seen)) << "message " << s.seen;
        ++s.seen;
      }
    };
    EXPECT_TRUE(server_.engine.serve(kEcho, [this](Request& r) {
      if (++calls_ == 1 && strikes_) {
        for (Sender& s : senders_) s.send_burst();
      }
      EXPECT_EQ(r.reply(r.bytes()), Status::ok);
    }));
    server_.listen();
    for (Sender& s : senders_) {
      s.ends = connect(s.node, server_);
      if (sends_directly()) engine_test::narrow_lanes(s.node.engine);
      auto made = s.node.engine.open_session(server_.listener.address(), {});
      EXPECT_TRUE(made);
      if (made) s.session = *made;
      EXPECT_TRUE(until([&] { return s.session.ready(); }));
    }
  }
  template <typename Done>
  bool until(Done&& done) {
    return engine_test::until({&senders_[0].node, &senders_[1].node, &server_}, done);
  }
  /// Each end has credit for two bursts, and all lanes are awake.
  void warm_up() {
    for (Sender& s : senders_) {
      for (int i = 0; i < 400; ++i) EXPECT_TRUE(until([&] { return s.send(32); }));
      EXPECT_TRUE(until([&] { return s.seen == s.sent; }));
    }
  }
  /// Whether one poll of the server found two bursts and two calls.
  bool run() {
    for (Sender& s : senders_) {
      s.send_burst();
      EXPECT_EQ(s.session.call(kEcho, filled(8, 1), [&s](Reply&) { ++s.replies; }), Status::ok);
      EXPECT_EQ(s.node.engine.flush(), Status::ok);
    }
    const std::array<std::uint32_t, 2> burst_end{senders_[0].sent, senders_[1].sent};
    calls_ = 0;
    strikes_ = true;
    (void)server_.poll();
    strikes_ = false;
    const bool both =
        calls_ == 2 && senders_[0].seen == burst_end[0] && senders_[1].seen == burst_end[1];
    EXPECT_TRUE(until([&] {
      return senders_[0].seen == senders_[0].sent && senders_[1].seen == senders_[1].sent &&
             senders_[0].replies + senders_[1].replies == 2;
    }));
    return both;
  }

 private:
  Node server_{mixed_config()};
  std::array<Sender, 2> senders_;
  int calls_ = 0;
  bool strikes_ = false;
};

TEST_F(RpcDirect, MessagesStayUntilAllOfAPollAreReadAlsoBesideCalls) {
  if (!sends_directly()) GTEST_SKIP() << kSoftverbsOnly << "messages without work requests";
  bool found_both = false;
  for (int i = 0; i < 20 && !found_both && !HasFailure(); ++i) {
    Mixed mixed;
    mixed.warm_up();
    found_both = mixed.run();
  }
  EXPECT_TRUE(found_both);
}

}  // namespace
}  // namespace rpc_mixed_polls_test
