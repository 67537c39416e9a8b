// The stall detector: slow callbacks and polls, and times without a poll.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "engine/harness.h"
#include "observe/engine_folder.h"
#include "rpc/rpc_ends.h"

namespace observe_test {
namespace {

using engine_test::Pair;
using rpc_test::Calls;
using std::chrono::milliseconds;

constexpr std::uint64_t kMillisecond = 1'000'000;
constexpr std::uint64_t kStart = 1'000'000'000;

Config watched(const EngineFolder& folder, Config c = engine_test::small_config()) {
  c.observability.directory = folder.path();
  c.observability.longest_poll = c.observability.longest_callback = milliseconds(10);
  c.observability.longest_pause = milliseconds(100);
  return c;
}

/// The last engine of the folder that was opened: the client's in a Pair.
EngineReading read_last(const EngineFolder& folder) {
  auto reading = read_engine(folder.engines().back());
  EXPECT_TRUE(reading) << reading.error().message();
  return reading ? std::move(*reading) : EngineReading{};
}
/// "KIND TEXT" of the stalls that its recorder has.
std::vector<std::string> stalls(const EngineFolder& folder) {
  std::vector<std::string> found;
  for (const EngineEvent& event : read_last(folder).events) {
    if (event.kind.starts_with("slow") || event.kind == "pause")
      found.push_back(event.kind + " " + event.text);
  }
  return found;
}
using Texts = std::vector<std::string>;

/// A client whose message handler takes `handler_time`, by a clock that the test moves.
struct SlowClient {
  explicit SlowClient(const Config& config) : pair(config, &ticks) {
    ticks += 1;  // what came before was at another time
    (void)pair.client.engine.poll();
    pair.client.on_message = [this](Connection, engine_test::Message&) { ticks += handler_time; };
  }
  /// Has the client handle a message; the poll after that one begins `pause` later.
  void handle_message(std::uint64_t pause) {
    const Buffer b = pair.server.filled(8, 1);
    EXPECT_EQ(pair.ends.server.send(b), Status::ok);
    const std::uint64_t before = pair.client.messages;
    EXPECT_TRUE(engine_test::until({}, [&] {
      (void)pair.server.poll();
      (void)pair.client.engine.poll();
      return pair.client.messages != before;
    }));
    ticks += pause;
    (void)pair.client.engine.poll();
  }
  /// Writes the metrics, and returns one.
  double metric(const EngineFolder& folder, std::string_view name) {
    for (int i = 0; i < 2; ++i) (void)pair.client.engine.poll_control();
    return number(read_last(folder), "engine", 0, name);
  }

  std::uint64_t ticks = kStart;
  std::uint64_t handler_time = 0;
  Pair pair;
};

class ObserveStalls : public WithEngineFolder {};

TEST_F(ObserveStalls, ATimeWithoutAPollIsAPause) {
  const EngineFolder folder;
  SlowClient c(watched(folder));
  c.ticks += 99 * kMillisecond;
  (void)c.pair.client.engine.poll();
  EXPECT_EQ(stalls(folder), Texts{});
  c.ticks += 250 * kMillisecond;
  (void)c.pair.client.engine.poll();
  EXPECT_EQ(stalls(folder), Texts{"pause no poll for 250.0 ms"});
  EXPECT_EQ(c.metric(folder, "spinwire_pauses_total"), 1);
  EXPECT_NEAR(c.metric(folder, "spinwire_longest_pause_seconds"), 0.25, 1e-9);
  EXPECT_EQ(c.metric(folder, "spinwire_slow_polls_total"), 0);
}

TEST_F(ObserveStalls, ASlowCallbackIsNamed) {
  const EngineFolder folder;
  SlowClient c(watched(folder));
  c.handler_time = 9 * kMillisecond;
  c.handle_message(0);
  EXPECT_EQ(stalls(folder), Texts{});
  // The first time, the detector cannot tell the callback from what the application did next.
  c.handler_time = 40 * kMillisecond;
  c.handle_message(0);
  EXPECT_EQ(stalls(folder), Texts{"slow 40.0 ms for connection 0-1"});
  // From then on it looks closely.
  c.handler_time = 30 * kMillisecond;
  c.handle_message(0);
  ASSERT_EQ(stalls(folder).size(), 2u);
  EXPECT_EQ(stalls(folder).back(), "slow_callback 30.0 ms for connection 0-1");
  EXPECT_EQ(c.metric(folder, "spinwire_slow_callbacks_total"), 1);
  EXPECT_NEAR(c.metric(folder, "spinwire_longest_callback_seconds"), 0.03, 1e-9);
  EXPECT_EQ(text(read_last(folder), "engine", 0, "spinwire_longest_callback_ran"),
            "connection 0-1");
  EXPECT_EQ(text(read_last(folder), "engine", 0, "spinwire_longest_poll_ran"), "connection 0-1");
}

TEST_F(ObserveStalls, PausesBehindCallbacksAreToldApart) {
  const EngineFolder folder;
  SlowClient c(watched(folder));
  // An application that polls every 20 ms, each time with a message.
  for (int i = 0; i < 200; ++i) c.handle_message(20 * kMillisecond);
  // It was looked at once; then its pauses are known.
  EXPECT_EQ(stalls(folder), Texts{"slow 20.0 ms for connection 0-1"});
  c.handle_message(150 * kMillisecond);
  c.handle_message(150 * kMillisecond);
  ASSERT_EQ(stalls(folder).size(), 3u);
  EXPECT_EQ(stalls(folder)[1], "slow 150.0 ms for connection 0-1");
  EXPECT_EQ(stalls(folder)[2], "pause no poll for 150.0 ms");
}

TEST_F(ObserveStalls, ASlowHandlerIsNamedByItsMethod) {
  const EngineFolder folder;
  std::uint64_t ticks = kStart;
  Calls calls(watched(folder, rpc_test::rpc_config()), &ticks);
  const spinwire::Method slow = 77;
  ASSERT_TRUE(calls.server.engine.serve(slow, [&](spinwire::Request& r) {
    ticks += 40 * kMillisecond;
    EXPECT_EQ(r.reply(std::span<const std::byte>()), Status::ok);
  }));
  (void)calls.call(slow, {});
  ASSERT_TRUE(calls.until([&] { return true; }));
  bool found = false;
  for (const EngineFile& file : folder.engines()) {
    const auto reading = read_engine(file);
    ASSERT_TRUE(reading);
    for (const EngineEvent& event : reading->events)
      found = found || (event.kind == "slow" &&
                        event.text.starts_with("40.0 ms for method 77 of served session 0-"));
  }
  EXPECT_EQ(found, !rpc_test::over_connections());
}

TEST_F(ObserveStalls, ASlowTimerIsFoundInItsControlStep) {
  const EngineFolder folder;
  SlowClient c(watched(folder));
  const auto timer =
      c.pair.client.engine.after(milliseconds(1), [&] { c.ticks += 60 * kMillisecond; });
  ASSERT_TRUE(timer);
  c.ticks += 2 * kMillisecond;
  (void)c.pair.client.engine.poll_control();
  ASSERT_EQ(stalls(folder).size(), 1u);
  EXPECT_TRUE(stalls(folder)[0].starts_with("slow_callback 60.0 ms for timers"))
      << stalls(folder)[0];
  (void)c.pair.client.engine.poll();
  EXPECT_EQ(stalls(folder).size(), 1u) << "the time is counted once";
}

TEST_F(ObserveStalls, AClockThatGoesBackInAControlStepIsNoStall) {
  const EngineFolder folder;
  SlowClient c(watched(folder));
  auto& engine = c.pair.client.engine;
  const auto back = engine.after(milliseconds(1), [&] { c.ticks -= 500 * kMillisecond; });
  bool ran = false;
  const auto next = engine.after(milliseconds(20), [&] { ran = true; });
  ASSERT_TRUE(back && next);
  c.ticks += 2 * kMillisecond;
  (void)engine.poll_control();
  EXPECT_EQ(stalls(folder), Texts{});
  EXPECT_LT(c.metric(folder, "spinwire_longest_callback_seconds"), 1);
  (void)engine.poll();  // notices the step back
  c.ticks += 30 * kMillisecond;
  (void)engine.poll();
  (void)engine.poll_control();
  EXPECT_TRUE(ran) << "time goes on where it was";
}

TEST_F(ObserveStalls, ALongPauseExplainsGapsForAWhileOnly) {
  const EngineFolder folder;
  SlowClient c(watched(folder));
  c.handle_message(20 * kMillisecond);
  c.handle_message(5'000 * kMillisecond);  // while the detector watches
  ASSERT_EQ(stalls(folder).size(), 2u);
  c.handle_message(0);
  c.handle_message(40 * kMillisecond);
  EXPECT_EQ(stalls(folder).size(), 2u) << "may be such a pause";
  for (int i = 0; i < 7000; ++i) {
    c.ticks += 9 * kMillisecond;
    (void)c.pair.server.poll();
    (void)c.pair.client.poll();
  }
  c.handle_message(40 * kMillisecond);
  ASSERT_EQ(stalls(folder).size(), 3u);
  EXPECT_EQ(stalls(folder).back(), "slow 40.0 ms for connection 0-1");
}

TEST_F(ObserveStalls, SleepIsNoPause) {
  const EngineFolder folder;
  SlowClient c(watched(folder));
  ASSERT_TRUE(engine_test::until({}, [&] { return c.pair.client.engine.arm(); }));
  c.ticks += 5000 * kMillisecond;
  (void)c.pair.client.engine.poll();
  EXPECT_EQ(stalls(folder), Texts{});
}

TEST_F(ObserveStalls, LimitsOfZeroRecordNothing) {
  const EngineFolder folder;
  Config config = watched(folder);
  config.observability.longest_poll = config.observability.longest_callback =
      config.observability.longest_pause = Nanoseconds(0);
  SlowClient c(config);
  c.handler_time = 500 * kMillisecond;
  c.handle_message(500 * kMillisecond);
  c.ticks += 500 * kMillisecond;
  (void)c.pair.client.engine.poll();
  EXPECT_EQ(stalls(folder), Texts{});
  EXPECT_EQ(c.metric(folder, "spinwire_pauses_total"), 0);
}

}  // namespace
}  // namespace observe_test
