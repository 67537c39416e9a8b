// Strangers take handshakes and sessions and give nothing back. Honest peers must still come
// through.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "attack/victim.h"
#include "base/internals.h"
#include "rpc/raw_datagrams.h"

namespace attack_test {
namespace {

/// Streams of a flood, on both sides of this machine.
void raise_descriptor_limit() {
  rlimit files{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  files.rlim_cur = files.rlim_max;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
}

Config victim_config() {
  Config c = rpc_test::rpc_config();
  c.connections.maximum = 256;
  c.connections.handshakes = 64;
  c.queues.receive_depth = 1024;
  c.queues.completion_depth = 16384;
  c.memory.receive_bytes = 16u << 20;
  return c;
}

class AttackByFlood : public testing::Test {
 protected:
  void SetUp() override {
    raise_descriptor_limit();
    victim_ = std::make_unique<Victim>(victim_config());
    attacker_ = std::make_unique<Node>(small_config());
    auto made = attacker_->engine.prepare({});
    ASSERT_TRUE(made) << made.error().message();
    ASSERT_TRUE(until({attacker_.get()}, [&] { return made->endpoint().has_value(); }));
    // A device that is there, so that the victim has no reason to refuse.
    mine_ = *made->endpoint();
    datagrams_ =
        std::make_unique<rpc_test::RawDatagrams>(*spinwire::detail::core_of(attacker_->engine));
  }
  void TearDown() override {
    datagrams_.reset();
    (void)victim_->stop();
  }

  [[nodiscard]] wire::Frame hello() const { return wire::encode(wire::Hello{mine_}); }
  [[nodiscard]] wire::Frame open_session(std::uint32_t name) const {
    return wire::encode(wire::OpenSession{datagrams_->end(name)});
  }

  /// Connects time after time, each within connections.connect_timeout.
  void expect_connects(int count) {
    Node client(rpc_test::rpc_config());
    std::vector<double> ms;
    for (int i = 0; i < count; ++i) {
      const auto begun = std::chrono::steady_clock::now();
      Connection c = client.begin(victim_->address());
      ASSERT_TRUE(until({&client}, [&] { return c.ready() || !client.closed.empty(); }));
      ASSERT_TRUE(c.ready()) << "connect " << i << ": " << client.closed.back().message();
      ms.push_back(
          std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begun)
              .count());
      EXPECT_EQ(c.close(), Status::ok);
      ASSERT_TRUE(until({&client}, [&] { return !client.closed.empty(); }));
      client.closed.clear();
    }
    std::sort(ms.begin(), ms.end());
    RecordProperty("longest_ms", std::to_string(ms.back()));
    EXPECT_LT(ms.back(), 2500.0 * slowness());
    std::printf("connects under attack: median %.1f ms, longest %.1f ms\n", ms[ms.size() / 2],
                ms.back());
  }

  void expect_sessions(int count) {
    Node client(rpc_test::rpc_config());
    for (int i = 0; i < count; ++i) {
      auto session = client.engine.open_session(victim_->address(), {});
      ASSERT_TRUE(session) << session.error().message();
      ASSERT_TRUE(
          until({&client}, [&] { return session->state() != spinwire::SessionState::opening; }));
      ASSERT_TRUE(session->ready()) << "session " << i;
      Status ended = Status::system;
      const auto word = std::byte{7};
      EXPECT_EQ(
          session->call(kEcho, {&word, 1}, [&](const spinwire::Reply& r) { ended = r.status(); }),
          Status::ok);
      EXPECT_TRUE(until({&client}, [&] { return ended != Status::system; }));
      EXPECT_EQ(ended, Status::ok);
      EXPECT_EQ(session->close(), Status::ok);
    }
  }

  std::unique_ptr<Victim> victim_;
  std::unique_ptr<Node> attacker_;
  spinwire::Endpoint mine_;
  std::unique_ptr<rpc_test::RawDatagrams> datagrams_;
};

TEST_F(AttackByFlood, SixHundredHellosAndThenSilence) {
  std::vector<Stream> streams;
  for (int i = 0; i < 600; ++i) streams.emplace_back(victim_->address()).send(hello());
  expect_connects(20);
}

TEST_F(AttackByFlood, TwoThousandHandshakesInEveryState) {
  std::vector<Stream> streams;
  for (std::uint32_t i = 0; i < 2000; ++i) {
    const Stream& s = streams.emplace_back(victim_->address());
    if (i % 4 == 1) s.send_part(hello(), 1 + i % 70);
    if (i % 4 == 2) s.send(hello());
    if (i % 4 == 3) s.send(open_session(i));
  }
  expect_connects(20);
}

TEST_F(AttackByFlood, SessionsThatAreConfirmedAndNeverUsed) {
  // Sixteen times as many as the victim serves.
  for (std::uint32_t i = 1; i <= 1024; ++i) {
    const Stream s(victim_->address());
    s.send(open_session(i));
    std::uint64_t token = 0;
    ASSERT_TRUE(until({}, [&] { return (token = datagrams_->challenge(i)) != 0; }));
    s.send(wire::encode(wire::PathResponse{token}));
    const auto opened = s.receive();
    const auto* answer = opened ? std::get_if<wire::SessionOpened>(&opened->body) : nullptr;
    if (answer != nullptr) s.send(wire::encode(wire::Ready{answer->end.incarnation}));
    if (i % 128 == 0) expect_sessions(1);
  }
  expect_sessions(20);
}

}  // namespace
}  // namespace attack_test
