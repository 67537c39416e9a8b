// Which peers spinwire-stat calls silent, and which sessions blocked. The tests move the time.
#include <gtest/gtest.h>

#include <cstdint>
#include <initializer_list>
#include <string>

#include "engine/engine_core.h"
#include "engine/raw_ends.h"
#include "observe/engine_folder.h"
#include "rpc/rpc_ends.h"
#include "softverbs/faults/fault_plan.h"
#include "tools/programs.h"
#include "tools/stat_client.h"

namespace stat_silence_test {
namespace {

using namespace rpc_test;  // NOLINT: the names of a test namespace

using observe_test::EngineFolder;
using spinwire::SessionBlocker;
using stat_test::has;

constexpr Nanoseconds kKeepalive = 20ms;

class ToolsStatSilence : public observe_test::WithEngineFolder {
 protected:
  /// Of all engines; a silent peer is not lost.
  [[nodiscard]] Config watchful(Config c) const {
    c.observability.directory = folder_.path();
    c.connections.keepalive_interval = kKeepalive;
    c.connections.peer_timeout = 1h;
    return c;
  }
  /// Only these nodes poll meanwhile.
  void pass(Nanoseconds time, std::initializer_list<Node*> nodes) {
    const std::uint64_t end = ticks_ + static_cast<std::uint64_t>(time.count());
    while (ticks_ < end) {
      ticks_ += 1'000'000;
      for (int i = 0; i < 4; ++i) {
        for (Node* const node : nodes) (void)node->poll();
      }
    }
  }
  /// What spinwire-stat says of all engines.
  [[nodiscard]] std::string report() const {
    tools_test::Program program(
        {tools_test::bin() + "/spinwire-stat", "--directory", folder_.path(), "--json"});
    EXPECT_EQ(program.wait(), 0) << program.err();
    return program.out();
  }

  const EngineFolder folder_;
  std::uint64_t ticks_ = 1'000'000'000;
};

/// Nothing goes over its connection.
TEST_F(ToolsStatSilence, AnIdleRawPeerIsNotSilent) {
  raw_test::RawPair p(raw_test::raw_settings(), raw_test::raw_settings(), watchful(small_config()),
                      &ticks_);
  pass(50 * kKeepalive, {&p.client, &p.server});
  const std::string text = report();
  EXPECT_TRUE(has(text, p.server.listener.address())) << text;
  EXPECT_FALSE(has(text, "the peer is silent")) << text;
}

/// Its device answers nothing.
TEST_F(ToolsStatSilence, ARawPeerThatHoldsUpOperationsIsSilent) {
  raw_test::RawPair p(raw_test::raw_settings(), raw_test::raw_settings(), watchful(small_config()),
                      &ticks_);
  spinwire::softverbs::FaultPlan plan;
  plan.delay_min = plan.delay_max = 1h;
  ASSERT_TRUE(spinwire::softverbs::set_faults(
      spinwire::detail::core_of(p.client.engine)->context.device->context(), plan));
  ASSERT_EQ(p.a.send_raw(p.data(8, 1).slice()), Status::ok);
  pass(50 * kKeepalive, {&p.client, &p.server});
  EXPECT_TRUE(has(report(), "the peer is silent: connection ")) << report();
}

TEST_F(ToolsStatSilence, AServerThatIsHeardOverAConnectionIsNotSilent) {
  Calls c(watchful(over(RpcTransport::connection)), &ticks_);
  pass(50 * kKeepalive, {&c.client, &c.server});
  EXPECT_LE(c.session.snapshot().since_last_heard, 2 * kKeepalive);
  const std::string text = report();
  EXPECT_TRUE(has(text, c.server.listener.address())) << text;
  EXPECT_FALSE(has(text, "the peer is silent")) << text;
  pass(50 * kKeepalive, {&c.client});
  EXPECT_GE(c.session.snapshot().since_last_heard, 49 * kKeepalive);
  EXPECT_TRUE(has(report(), "the peer is silent: connection ")) << report();
}

TEST_F(ToolsStatSilence, AServerThatAnswersNoPingsIsSilent) {
  Calls c(watchful(over(RpcTransport::datagram)), &ticks_);
  pass(50 * kKeepalive, {&c.client, &c.server});
  EXPECT_FALSE(has(report(), "the peer is silent")) << report();
  pass(50 * kKeepalive, {&c.client});
  EXPECT_TRUE(has(report(), "the peer is silent: session ")) << report();
}

class ToolsStatWithoutRow : public ToolsStatSilence {};

/// The only row is that of the first session.
TEST_F(ToolsStatWithoutRow, ABlockedSessionWithoutARowIsFound) {
  Config config = watchful(over(RpcTransport::datagram));
  config.observability.rows = 1;
  Calls c(config, &ticks_);
  const Session first = c.session;
  c.session = c.open(1);
  ASSERT_TRUE(c.until([&] { return c.session.ready(); }));
  ASSERT_EQ(c.begin(kLater, filled(8, 1)), Status::ok);
  pass(5 * kKeepalive, {&c.client, &c.server});
  EXPECT_EQ(first.snapshot().blocked_by, SessionBlocker::nothing);
  EXPECT_TRUE(has(report(), "window full: 1 session without a row (observability.rows)"))
      << report();
  ASSERT_EQ(c.later.at(0).call.reply(std::span<const std::byte>()), Status::ok);
  pass(5 * kKeepalive, {&c.client, &c.server});
  EXPECT_FALSE(has(report(), "without a row")) << report();
}

}  // namespace
}  // namespace stat_silence_test
