// A holder of the key proves it, says hello and then nothing, again and again. Other holders of the
// key must still come through, and soon.
#include <gtest/gtest.h>

#include <deque>

#include "attack/latencies.h"
#include "attack/victim.h"
#include "control/exchange.h"
#include "control/key_files.h"
#include "control/key_ring.h"

namespace attack_test::greedy_key_holder {
namespace {

constexpr std::uint32_t kHandshakes = 64;

Config keyed(const key_files::KeyFile& file) {
  Config c = rpc_test::rpc_config();
  c.security.key_file = file.path();
  c.connections.maximum = 256;
  c.connections.handshakes = kHandshakes;
  return c;
}

/// Connects from another source than 127.0.0.1.
class FromAnotherAddress : public spinwire::control::Network {
 public:
  spinwire::Result<Listening> listen(const spinwire::control::Address&) override {
    return tl::unexpected(spinwire::Error{Status::unsupported, "listen", "a client", ""});
  }
  spinwire::Result<spinwire::control::Connecting> connect(
      const spinwire::control::Address& remote) override {
    UniqueFd fd(::socket(remote.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const auto from = *spinwire::control::Address::parse("127.0.0.9:0");
    EXPECT_EQ(::bind(fd.get(), from.data(), from.size()), 0);
    // Its end leaves no port in TIME_WAIT.
    const linger hard{1, 0};
    EXPECT_EQ(::setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &hard, sizeof hard), 0);
    const bool begun = ::connect(fd.get(), remote.data(), remote.size()) == 0;
    return spinwire::control::Connecting{std::move(fd), begun || errno == EINPROGRESS ? 0 : errno};
  }
  [[nodiscard]] const std::uint64_t* change_count() const noexcept override { return nullptr; }
};

/// The attacker's handshakes, with a device that is there.
class SilentHandshakes {
 public:
  SilentHandshakes(const std::string& victim, const std::string& key_file_text)
      : victim_(*spinwire::control::Address::parse(victim)),
        keys_(std::move(*spinwire::control::KeyRing::parse(key_file_text, "keys"))),
        attacker_(small_config()) {
    auto made = attacker_.engine.prepare({});
    EXPECT_TRUE(made) << made.error().message();
    EXPECT_TRUE(until({&attacker_}, [&] { return made->endpoint().has_value(); }));
    mine_ = *made->endpoint();
  }

  /// Keeps so many under way, a few at each call: one that the victim has ended begins again.
  void keep(std::size_t count) {
    if (each_.size() < count) begin(each_.emplace_back());
    for (std::size_t i = 0; i < 16; ++i) {
      spinwire::control::Exchange& e = each_[next_++ % each_.size()];
      switch (e.advance()) {
        case spinwire::control::Progress::waiting:
          break;
        case spinwire::control::Progress::frame:
          ++answered_;  // and it is silent from now on
          e.expect(wire::kinds(wire::FrameKind::refuse));
          break;
        default:
          begin(e);
      }
    }
  }
  /// How many hellos were answered: the victim knew that they have the key.
  [[nodiscard]] std::size_t answered() const { return answered_; }

 private:
  void begin(spinwire::control::Exchange& e) {
    const auto expected = wire::kinds(wire::FrameKind::accept, wire::FrameKind::refuse);
    ASSERT_TRUE(e.connect(victim_, expected, &network_, &keys_));
    ASSERT_EQ(e.send(wire::encode(wire::Hello{mine_})), Status::ok);
  }

  spinwire::control::Address victim_;
  spinwire::control::KeyRing keys_;
  FromAnotherAddress network_;
  Node attacker_;
  spinwire::Endpoint mine_;
  std::deque<spinwire::control::Exchange> each_;
  std::size_t next_ = 0;
  std::size_t answered_ = 0;
};

// A silent handshake of a peer that has proved the key lasts for connections.handshake_timeout.
TEST(AttackByAKeyHolder, SilentHandshakesKeepNoOtherHolderOut) {
  const std::string key = key_files::line("2026", 'a');
  const key_files::KeyFile file(key);
  Victim victim(keyed(file));
  SilentHandshakes attacker(victim.address(), key);
  Node client(keyed(file));
  // As many as there are places, and as many in the backlog as the kernel keeps.
  const std::size_t attacking = kHandshakes + 500 / slowness();
  ASSERT_TRUE(until({}, [&] {
    attacker.keep(attacking);
    return victim.handshakes() == kHandshakes && attacker.answered() >= kHandshakes / 2;
  }));
  // The client waits in the backlog, behind the attacker, whose proofs cost the victim time.
  const double most_ms = 4 * kMostMs;
  const auto round = [&](Latencies& latencies) {
    for (int i = 0; i < 20; ++i) {
      client.closed.clear();
      Connection c;
      latencies.measure([] { return true; }, [&] { c = client.begin(victim.address()); },
                        [&] {
                          attacker.keep(attacking);
                          return c.ready() || !client.closed.empty();
                        });
      ASSERT_TRUE(c.ready()) << i << ": "
                             << (client.closed.empty() ? "" : client.closed.back().message());
      EXPECT_EQ(c.close(), Status::ok);
      ASSERT_TRUE(until({&client}, [&] { return !client.closed.empty(); }));
    }
  };
  expect_soon(victim, client, "connects", round, most_ms);
  (void)victim.stop();
}

}  // namespace
}  // namespace attack_test::greedy_key_holder
