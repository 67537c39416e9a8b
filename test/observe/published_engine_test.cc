// What engines show of themselves: in their files, and in snapshots.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <string>
#include <vector>

#include "engine/harness.h"
#include "observe/engine_folder.h"
#include "rpc/rpc_ends.h"

namespace observe_test {
namespace {

using engine_test::Node;
using engine_test::Pair;
using engine_test::Post;
using rpc_test::Calls;

/// Sends messages as soon as there is credit.
void send(Pair& p, const Buffer& b, int count) {
  for (int i = 0; i < count; ++i)
    ASSERT_TRUE(p.until([&] { return p.ends.client.send(b) == Status::ok; }));
}

/// The file of an engine that has a row with such a label.
EngineReading find_reading(const EngineFolder& folder, std::string_view table,
                           std::string_view column, std::string_view value) {
  for (const EngineFile& file : folder.engines()) {
    auto reading = read_engine(file);
    EXPECT_TRUE(reading) << reading.error().message();
    const MetricTable* const found = reading ? reading->find(table) : nullptr;
    if (found == nullptr) continue;
    for (const MetricRow& row : found->rows) {
      if (found->text(row, column) == value) return std::move(*reading);
    }
  }
  return {};
}

class ObserveEngine : public WithEngineFolder {};

TEST_F(ObserveEngine, ShowsCountersPoolsAndConnections) {
  const EngineFolder folder;
  {
    Pair p(shown_in(folder));
    const Buffer b = p.client.filled(100, 1);
    send(p, b, 5);
    EngineReading reading;
    const std::string server = p.server.listener.address();
    ASSERT_TRUE(p.until([&] {
      reading = find_reading(folder, "connection", "peer", server);
      return !reading.tables.empty() &&
             number(reading, "engine", 0, "spinwire_messages_sent_total") == 5 &&
             number(reading, "connection", 0, "spinwire_connection_messages_sent_total") == 5;
    }));
    EXPECT_TRUE(reading.file.is_alive);
    EXPECT_EQ(reading.device, p.client.engine.device_name());
    EXPECT_EQ(text(reading, "connection", 0, "spinwire_connection_state"), "ready");
    EXPECT_EQ(text(reading, "connection", 0, "spinwire_connection_blocked_by"), "nothing");
    EXPECT_EQ(number(reading, "connection", 0, "spinwire_connection_sent_bytes_total"), 500);
    EXPECT_GT(number(reading, "connection", 0, "spinwire_connection_age_seconds"), 0);
    EXPECT_EQ(number(reading, "engine", 0, "spinwire_connections"), 1);
    EXPECT_EQ(number(reading, "engine", 0, "spinwire_connections_connected_total"), 1);
    ASSERT_EQ(reading.find("pool")->rows.size(), 4u);
    EXPECT_EQ(text(reading, "pool", 0, "pool"), "send");
    EXPECT_EQ(number(reading, "pool", 0, "spinwire_pool_bytes"),
              static_cast<double>(p.client.engine.memory_stats(Pool::send).pool_bytes));
    EXPECT_GT(reading.written_at, reading.opened_at - std::chrono::seconds(1));
    // The row goes with its connection.
    ASSERT_EQ(p.ends.client.close(), Status::ok);
    ASSERT_TRUE(
        p.until([&] { return find_reading(folder, "connection", "peer", server).tables.empty(); }));
  }
  EXPECT_EQ(folder.files(), 0u);
}

TEST_F(ObserveEngine, NamesWhatBlocksAConnectionAndForHowLong) {
  const EngineFolder folder;
  std::uint64_t ticks = 1'000'000'000;
  Pair p(shown_in(folder), &ticks);
  Connection c = p.ends.client;
  const Buffer b = p.client.filled(8, 1);
  while (c.send(b, {}, Post::automatic) == Status::ok) {
  }
  const std::string server = p.server.listener.address();
  const auto reading_after_steps = [&] {
    for (int i = 0; i < 4; ++i) (void)p.client.engine.poll_control();
    return find_reading(folder, "connection", "peer", server);
  };
  EngineReading reading = reading_after_steps();
  EXPECT_EQ(text(reading, "connection", 0, "spinwire_connection_blocked_by"), "credit");
  EXPECT_EQ(number(reading, "connection", 0, "spinwire_connection_send_credits"), 0);
  EXPECT_EQ(number(reading, "engine", 0, "spinwire_connections_lacking_credit"), 1);
  ticks += 30'000'000;
  (void)p.client.poll();
  reading = reading_after_steps();
  EXPECT_NEAR(number(reading, "connection", 0, "spinwire_connection_blocked_seconds"), 0.03, 1e-6);
  ASSERT_TRUE(p.until([&] { return c.snapshot().blocked_by == Blocker::nothing; }));
  reading = reading_after_steps();
  EXPECT_EQ(number(reading, "connection", 0, "spinwire_connection_blocked_seconds"), 0);
  EXPECT_EQ(number(reading, "engine", 0, "spinwire_connections_lacking_credit"), 0);
}

TEST_F(ObserveEngine, ShowsSessionsOfBothEnds) {
  const EngineFolder folder;
  Calls calls(shown_in(folder, rpc_test::rpc_config()));
  // The first call makes the server reserve receives for the whole window.
  ASSERT_EQ(calls.begin(rpc_test::kEcho, {}), Status::ok);
  ASSERT_TRUE(calls.until([&] { return calls.ended[0].times == 1; }));
  for (int i = 0; i < 3; ++i) ASSERT_EQ(calls.begin(rpc_test::kLater, {}), Status::ok);
  ASSERT_TRUE(calls.until([&] { return calls.later.size() == 3; }));
  const std::string server = calls.server.listener.address();
  EngineReading reading;
  ASSERT_TRUE(calls.until([&] {
    reading = find_reading(folder, "session", "peer", server);
    return !reading.tables.empty() &&
           number(reading, "session", 0, "spinwire_session_calls_total") == 4 &&
           number(reading, "engine", 0, "spinwire_rpc_calls_total") == 4;
  }));
  EXPECT_EQ(text(reading, "session", 0, "spinwire_session_state"), "ready");
  EXPECT_EQ(number(reading, "session", 0, "spinwire_session_in_flight") +
                number(reading, "session", 0, "spinwire_session_long_calls"),
            3);
  EXPECT_EQ(number(reading, "session", 0, "spinwire_session_window"),
            calls.client.engine.config().rpc.window);
  ASSERT_TRUE(calls.until([&] {
    for (const EngineFile& file : folder.engines()) {
      const auto served = read_engine(file);
      if (served && !served->find("served_session")->rows.empty())
        return number(*served, "served_session", 0, "spinwire_served_session_calls") == 3;
    }
    return false;
  }));
  for (auto& each : calls.later)
    EXPECT_EQ(each.call.reply(std::span<const std::byte>()), Status::ok);
  ASSERT_TRUE(calls.until([&] { return calls.ended[3].times == 1; }));
}

TEST_F(ObserveEngine, MoreSubjectsThanRowsAreStillCounted) {
  const EngineFolder folder;
  Config config = shown_in(folder);
  config.observability.rows = 2;
  Pair p(config);
  const std::string server = p.server.listener.address();
  std::vector<engine_test::Ends> more;
  for (int i = 0; i < 4; ++i) more.push_back(engine_test::connect(p.client, p.server));
  const Buffer b = p.client.filled(8, 1);
  for (engine_test::Ends& each : more) ASSERT_EQ(each.client.send(b), Status::ok);
  EngineReading reading;
  ASSERT_TRUE(p.until([&] {
    reading = find_reading(folder, "connection", "peer", server);
    return !reading.tables.empty() &&
           number(reading, "engine", 0, "spinwire_messages_sent_total") == 4;
  }));
  EXPECT_EQ(reading.find("connection")->rows.size(), 2u);
  EXPECT_EQ(number(reading, "engine", 0, "spinwire_connections"), 5);
}

TEST_F(ObserveEngine, OpensWithoutItsFile) {
  static std::string said;
  said.clear();
  set_log([](LogLevel, std::string_view message) { said += message; });
  Config config = engine_test::small_config();
  config.observability.directory = "/proc";
  {
    const auto engine = Engine::open(config);
    EXPECT_TRUE(engine);
  }
  EXPECT_NE(said.find("spinwire-stat"), std::string::npos) << said;
  said.clear();
  config.observability.directory.clear();
  EXPECT_TRUE(Engine::open(config));
  set_log({});
  EXPECT_EQ(said.find("spinwire-stat"), std::string::npos) << said;
}

TEST_F(ObserveEngine, OverwrittenFilesDoNoHarm) {
  const EngineFolder folder;
  Pair p(shown_in(folder));
  for (const EngineFile& file : folder.engines()) {
    const auto size = bytes_of(file.path).size();
    ASSERT_EQ(::chmod(file.path.c_str(), 0600), 0);
    std::fstream all(file.path, std::ios::in | std::ios::out | std::ios::binary);
    all << std::string(size, '\xff');
  }
  Buffer b = p.client.filled(8, 1);
  send(p, b, 100);
  ASSERT_TRUE(p.until([&] { return p.server.messages == 100; }));
  b.reset();
  p.finish();
}

TEST_F(ObserveEngine, AKilledProcessLeavesItsLastState) {
  const EngineFolder folder;
  engine_test::Child child([&](int, int out) {
    Pair p(shown_in(folder));
    const Buffer b = p.client.filled(8, 1);
    send(p, b, 7);
    const std::string server = p.server.listener.address();
    const auto is_shown = [&] {
      const auto reading = find_reading(folder, "connection", "peer", server);
      return !reading.tables.empty() &&
             number(reading, "connection", 0, "spinwire_connection_messages_sent_total") == 7;
    };
    if (!p.until(is_shown)) return 2;
    engine_test::write_line(out, "shown");
    for (;;) p.settle();
  });
  ASSERT_EQ(child.line(), "shown");
  EXPECT_EQ(folder.engines().size(), 2u);
  child.kill(SIGKILL);
  std::size_t sent = 0;
  for (const EngineFile& file : folder.engines()) {
    EXPECT_FALSE(file.is_alive);
    const auto reading = read_engine(file);
    ASSERT_TRUE(reading) << reading.error().message();
    sent += static_cast<std::size_t>(
        number(*reading, "connection", 0, "spinwire_connection_messages_sent_total"));
  }
  EXPECT_EQ(sent, 7u);
  EXPECT_EQ(remove_dead_engines(0, folder.path()).value(), 2u);
}

TEST(ObserveSnapshot, OfAnEngineAgreesWithItsStatistics) {
  Pair p;
  const Buffer b = p.client.filled(8, 1);
  send(p, b, 3);
  Engine& engine = p.client.engine;
  ASSERT_TRUE(p.until([&] { return engine.snapshot().stats.messages_sent == 3; }));
  const EngineSnapshot now = engine.snapshot();
  EXPECT_EQ(now.stats.connections, 1u);
  EXPECT_EQ(now.stats.connected, engine.stats().connected);
  EXPECT_EQ(now.connections_by_blocker[static_cast<std::size_t>(Blocker::nothing)], 1u);
  EXPECT_EQ(now.pools[static_cast<std::size_t>(Pool::send)].pool_bytes,
            engine.memory_stats(Pool::send).pool_bytes);
  EXPECT_FALSE(now.draining);
  // What a connection has counted stays when it ends.
  ASSERT_EQ(p.ends.client.close(), Status::ok);
  ASSERT_TRUE(p.until([&] { return engine.stats().connections == 0; }));
  EXPECT_EQ(engine.snapshot().stats.messages_sent, 3u);
  EXPECT_EQ(engine.snapshot().stats.operations, 0u);
  EXPECT_EQ(engine.snapshot().connections_by_blocker, (std::array<std::uint32_t, 6>{}));
  ASSERT_TRUE(engine.drain(std::chrono::seconds(60)));
  EXPECT_EQ(engine.snapshot().draining, engine.draining());
  EXPECT_EQ(Engine().snapshot().stats.polls, 0u);
}

TEST(ObserveSnapshot, OfASessionNamesWhatBlocksIt) {
  Calls calls(rpc_test::rpc_config(), nullptr, 4);
  EXPECT_EQ(calls.session.snapshot().state, SessionState::ready);
  EXPECT_EQ(calls.session.snapshot().blocked_by, SessionBlocker::nothing);
  // The first call makes the server reserve receives for the whole window.
  ASSERT_EQ(calls.begin(rpc_test::kEcho, {}), Status::ok);
  ASSERT_TRUE(calls.until([&] { return calls.ended[0].times == 1; }));
  if (!rpc_test::over_connections()) {
    EXPECT_GT(calls.session.snapshot().srtt.count(), 0);
    EXPECT_EQ(calls.session.snapshot().server_window, 4u);
  }
  for (int i = 0; i < 4; ++i) ASSERT_EQ(calls.begin(rpc_test::kLater, {}), Status::ok);
  ASSERT_TRUE(calls.until([&] { return calls.later.size() == 4; }));
  SessionSnapshot now = calls.session.snapshot();
  EXPECT_EQ(now.blocked_by, SessionBlocker::window);
  EXPECT_EQ(now.in_flight + now.long_calls, 4u);
  EXPECT_EQ(now.calls, 5u);
  EXPECT_EQ(now.window, 4u);
  EXPECT_FALSE(now.backlog_full);
  const std::uint32_t backlog = calls.client.engine.config().rpc.backlog;
  for (std::uint32_t i = 0; i < backlog; ++i)
    ASSERT_EQ(calls.begin(rpc_test::kEcho, {}), Status::ok);
  now = calls.session.snapshot();
  EXPECT_EQ(now.backlog, backlog);
  EXPECT_TRUE(now.backlog_full);
  EXPECT_EQ(calls.begin(rpc_test::kEcho, {}), Status::would_block);
  const std::string described = calls.client.engine.describe();
  EXPECT_NE(described.find("blocked by window"), std::string::npos) << described;
  EXPECT_NE(described.find(calls.server.listener.address()), std::string::npos) << described;
  EXPECT_NE(described.find("pool send"), std::string::npos) << described;
  EXPECT_NE(calls.server.engine.describe().find("4 calls in progress"), std::string::npos)
      << calls.server.engine.describe();
  for (auto& each : calls.later)
    EXPECT_EQ(each.call.reply(std::span<const std::byte>()), Status::ok);
  ASSERT_TRUE(calls.until([&] { return calls.session.snapshot().in_flight == 0; }));
  ASSERT_EQ(calls.session.close(), Status::ok);
  EXPECT_EQ(calls.session.snapshot().blocked_by, SessionBlocker::not_ready);
  EXPECT_EQ(Session().snapshot().state, SessionState::closed);
  EXPECT_EQ(to_string(SessionBlocker::connection), "connection");
  EXPECT_EQ(to_string(static_cast<SessionState>(9)), "unknown");
}

}  // namespace
}  // namespace observe_test
