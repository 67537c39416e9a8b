// Which connections and sessions of an engine have rows in its file, when there are more than rows.
// The tests move the time.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/internals.h"
#include "engine/engine_core.h"
#include "engine/harness.h"
#include "observe/engine_folder.h"
#include "rpc/rpc_ends.h"

namespace row_places_test {
namespace {

using namespace observe_test;  // NOLINT: the names of a test namespace
using engine_test::Node;
using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::minutes;

constexpr std::uint64_t kStart = 1'000'000'000;
constexpr std::uint64_t kStep = 500'000;  ///< between two writes
/// include/observing.md: a subject that is blocked for 100 ms has a row within two rounds, of
/// 0.25 ms for each subject of its table.
constexpr std::uint64_t steps_until_shown(std::uint64_t subjects) {
  return (100'000'000 + 2 * subjects * 250'000) / kStep + 1;
}

constexpr std::uint32_t kRows = 8, kConnections = 40;

/// A folder, and settings of engines in it with few rows, whose peers are never lost.
class ObserveRowPlaces : public WithEngineFolder {
 protected:
  void SetUp() override {
    WithEngineFolder::SetUp();
    if (std::getenv("SPINWIRE_TEST_OWN_RECEIVES") != nullptr)
      GTEST_SKIP() << "such engines have 16 connections";
  }
  [[nodiscard]] Config settings(std::uint32_t rows, Config c = engine_test::small_config()) const {
    c.observability.directory = folder_.path();
    c.observability.rows = rows;
    c.connections.keepalive_interval = c.connections.peer_timeout = hours(1);
    return c;
  }
  /// The last engine of the folder that was opened.
  [[nodiscard]] EngineReading read() const {
    auto reading = read_engine(folder_.engines().back());
    EXPECT_TRUE(reading) << reading.error().message();
    return reading ? std::move(*reading) : EngineReading{};
  }
  /// The engine alone takes so many control steps that write.
  void step(Node& node, std::uint64_t count = 1) {
    for (std::uint64_t i = 0; i < count; ++i) {
      ticks_ += kStep;
      (void)node.engine.poll();
    }
  }

  EngineFolder folder_;
  std::uint64_t ticks_ = kStart;
};

/// The values of a column, one for each row.
std::vector<std::string> texts(const EngineReading& reading, std::string_view table,
                               std::string_view column) {
  std::vector<std::string> all;
  for (std::size_t i = 0; i < reading.find(table)->rows.size(); ++i)
    all.push_back(text(reading, table, i, column));
  return all;
}
std::size_t blocked(const EngineReading& reading, std::string_view table,
                    std::string_view blocker) {
  const auto all = texts(reading, table, "spinwire_" + std::string(table) + "_blocked_by");
  return static_cast<std::size_t>(std::count(all.begin(), all.end(), blocker));
}
double engine_number(const EngineReading& reading, std::string_view column) {
  return number(reading, "engine", 0, column);
}

/// 40 connections of a client with 8 rows. The last ones are to a server that does not poll.
struct Crowd {
  Crowd(const Config& clients, const std::uint64_t* ticks, std::uint32_t hung_ones)
      : server(engine_test::small_config(), ticks),
        hung(engine_test::small_config(), ticks),
        client(clients, ticks) {
    server.listen();
    hung.listen();
    while (connections.size() < kConnections - hung_ones)
      connections.push_back(engine_test::connect(client, server).client);
    while (connections.size() < kConnections)
      connections.push_back(engine_test::connect(client, hung).client);
  }
  /// Sends until the peer grants no more credit.
  void block(std::size_t i) {
    const Buffer b = client.filled(8, 1);
    while (connections[i].send(b, {}, engine_test::Post::automatic) == Status::ok) {
    }
    EXPECT_EQ(connections[i].snapshot().blocked_by, Blocker::credit);
  }

  Node server, hung, client;
  std::vector<Connection> connections;
};

TEST_F(ObserveRowPlaces, AConnectionThatIsBlockedLateGetsARow) {
  Crowd c(settings(kRows), &ticks_, 1);
  step(c.client, kConnections);
  const auto first = texts(read(), "connection", "connection");
  EXPECT_EQ(first.size(), kRows * 3 / 4);
  c.block(kConnections - 1);
  EngineReading reading;
  std::uint64_t steps = 0;
  do {
    step(c.client);
    reading = read();
  } while (++steps < 1000 && blocked(reading, "connection", "credit") == 0);
  EXPECT_LE(steps, steps_until_shown(kConnections));
  EXPECT_GE(steps * kStep, 100'000'000u) << "short blocks get no row";
  // It is the last row; the healthy ones keep theirs.
  auto now = texts(reading, "connection", "connection");
  ASSERT_EQ(now.size(), first.size() + 1);
  const std::size_t last = now.size() - 1;
  EXPECT_EQ(text(reading, "connection", last, "peer"), c.hung.listener.address());
  EXPECT_GE(number(reading, "connection", last, "spinwire_connection_blocked_seconds"), 0.1);
  EXPECT_EQ(engine_number(reading, "spinwire_connections_without_row_lacking_credit"), 0);
  now.pop_back();
  EXPECT_EQ(now, first);
}

TEST_F(ObserveRowPlaces, RowsDoNotFlap) {
  Crowd c(settings(kRows), &ticks_, 1);
  c.block(kConnections - 1);
  step(c.client, steps_until_shown(kConnections));
  const auto rows = texts(read(), "connection", "connection");
  ASSERT_EQ(rows.size(), kRows * 3 / 4 + 1);
  for (std::size_t i = 0; i < 100; ++i) {
    const std::size_t other = i % (kConnections - 1);
    c.block(other);
    ASSERT_TRUE(engine_test::until({&c.client, &c.server}, [&] {
      return c.connections[other].snapshot().blocked_by == Blocker::nothing;
    }));
    step(c.client, kConnections);  // 8,000 visits in all
    ASSERT_EQ(texts(read(), "connection", "connection"), rows) << i;
  }
}

TEST_F(ObserveRowPlaces, ARowGoesToTheNextInTrouble) {
  Crowd c(settings(kRows), &ticks_, 3);
  for (std::size_t i = kConnections - 3; i < kConnections; ++i) c.block(i);
  step(c.client, steps_until_shown(kConnections));
  constexpr std::string_view kWithout = "spinwire_connections_without_row_lacking_credit";
  EngineReading reading = read();
  EXPECT_EQ(blocked(reading, "connection", "credit"), 2u);
  EXPECT_EQ(engine_number(reading, kWithout), 1);
  EXPECT_EQ(engine_number(reading, "spinwire_connections_lacking_credit"), 3);
  // The first of them ends.
  ASSERT_EQ(c.connections[kConnections - 3].close(), Status::ok);
  ASSERT_TRUE(engine_test::until({&c.client, &c.hung, &c.server}, [&] {
    return c.client.engine.stats().connections == kConnections - 1;
  }));
  c.block(kConnections - 1);  // the server has polled meanwhile
  c.block(kConnections - 2);
  step(c.client, steps_until_shown(kConnections));
  reading = read();
  EXPECT_EQ(blocked(reading, "connection", "credit"), 2u);
  EXPECT_EQ(engine_number(reading, kWithout), 0);
}

/// A short fault gives the whole last quarter to connections that are well afterwards.
TEST_F(ObserveRowPlaces, ARowOfAConnectionThatIsWellIsPassedOn) {
  Crowd c(settings(kRows), &ticks_, 3);
  c.block(kConnections - 3);
  c.block(kConnections - 2);
  step(c.client, steps_until_shown(kConnections));
  ASSERT_EQ(blocked(read(), "connection", "credit"), 2u);
  ASSERT_TRUE(engine_test::until({&c.client, &c.hung}, [&] {
    return c.connections[kConnections - 3].snapshot().blocked_by == Blocker::nothing &&
           c.connections[kConnections - 2].snapshot().blocked_by == Blocker::nothing;
  }));
  c.block(kConnections - 1);
  step(c.client, steps_until_shown(kConnections));
  constexpr std::string_view kWithout = "spinwire_connections_without_row_lacking_credit";
  EngineReading reading = read();
  EXPECT_EQ(blocked(reading, "connection", "credit"), 0u);
  EXPECT_EQ(engine_number(reading, kWithout), 1);
  ticks_ += std::chrono::nanoseconds(minutes(1)).count();
  step(c.client, kConnections);
  reading = read();
  EXPECT_EQ(blocked(reading, "connection", "credit"), 1u);
  EXPECT_EQ(engine_number(reading, kWithout), 0);
  EXPECT_EQ(reading.find("connection")->rows.size(), kRows);
}

/// The events of a connection of this kind.
std::vector<std::string> events_of(const EngineReading& reading, const std::string& id,
                                   std::string_view kind) {
  std::vector<std::string> found;
  for (const EngineEvent& event : reading.events) {
    if (event.id == id && event.kind == kind) found.push_back(event.text);
  }
  return found;
}

/// Takes all operations of an engine, so that each connection lacks one.
struct NoOperations {
  explicit NoOperations(const Node& node)
      : all(spinwire::detail::core_of(node.engine)->context.operations) {
    while (spinwire::agent::Operation* const op = all.acquire()) taken.push_back(op);
  }
  NoOperations(const NoOperations&) = delete;
  NoOperations& operator=(const NoOperations&) = delete;
  ~NoOperations() {
    for (spinwire::agent::Operation* const op : taken)
      all.release(*op, spinwire::agent::OperationKind::send);
  }
  spinwire::agent::OperationPool& all;
  std::vector<spinwire::agent::Operation*> taken;
};

/// A connection that is well has a row of the last quarter. It lacks what the whole engine lacks,
/// which is recorded, and its row goes to another connection before it is visited again.
TEST_F(ObserveRowPlaces, TheEndOfABlockIsRecordedWithoutARow) {
  constexpr std::size_t kOne = kConnections - 3, kHeld = kConnections - 2,
                        kOther = kConnections - 1;
  constexpr std::uint64_t kRound = kConnections / 2;  // two connections a step
  Crowd c(settings(kRows), &ticks_, 3);
  c.block(kOne);
  c.block(kHeld);
  step(c.client, steps_until_shown(kConnections));
  ASSERT_TRUE(engine_test::until({&c.client, &c.hung}, [&] {
    return c.connections[kOne].snapshot().blocked_by == Blocker::nothing;
  }));
  c.block(kHeld);
  ticks_ += std::chrono::nanoseconds(minutes(1)).count();
  step(c.client, 2 * kRound);
  EngineReading reading = read();
  const auto ids = texts(reading, "connection", "connection");
  ASSERT_EQ(ids.size(), kRows);
  std::size_t row = kRows - 2;
  if (text(reading, "connection", row, "spinwire_connection_blocked_by") == "credit") ++row;
  const std::string id = ids[row];
  // Half a round after it was visited, it comes before the other one.
  const auto age = [&] {
    return number(read(), "connection", row, "spinwire_connection_age_seconds");
  };
  for (const double before = age(); age() == before;) step(c.client);
  step(c.client, kRound / 2);
  c.block(kOther);
  {
    const NoOperations none(c.client);
    std::uint64_t steps = 0;
    while (events_of(read(), id, "blocked").size() < 2 && ++steps < 1000) step(c.client);
    step(c.client, kRound);
    reading = read();
    ASSERT_EQ(events_of(reading, id, "blocked"),
              (std::vector<std::string>{"credit", "operations"}));
    EXPECT_EQ(events_of(reading, id, "unblocked").size(), 1u);
    const auto now = texts(reading, "connection", "connection");
    EXPECT_EQ(std::count(now.begin(), now.end(), id), 0) << "the other one has its row";
    EXPECT_EQ(blocked(reading, "connection", "credit"), 2u);
  }
  step(c.client, 2 * kRound);
  EXPECT_EQ(events_of(read(), id, "unblocked").size(), 2u);
}

/// A session is blocked, and later not. The engine's count, that of those without a row, and the
/// rows agree in each reading.
TEST_F(ObserveRowPlaces, CountsOfSessionsAgreeWithTheirRows) {
  rpc_test::Calls c(settings(4, rpc_test::over(spinwire::RpcTransport::datagram)), &ticks_);
  for (int i = 0; i < 7; ++i) {
    c.session = c.open(1);
    ASSERT_TRUE(c.until([&] { return c.session.ready(); }));
  }
  const auto check = [&](std::uint64_t steps) {
    for (std::uint64_t i = 0; i < steps; ++i) {
      step(c.client);
      const EngineReading reading = read();
      ASSERT_EQ(engine_number(reading, "spinwire_rpc_sessions_window_full"),
                static_cast<double>(blocked(reading, "session", "window")) +
                    engine_number(reading, "spinwire_rpc_sessions_without_row_window_full"))
          << i;
    }
  };
  ASSERT_EQ(c.begin(rpc_test::kLater, rpc_test::filled(8, 1)), Status::ok);
  ASSERT_TRUE(c.until([&] { return c.later.size() == 1; }));
  check(steps_until_shown(8));
  const EngineReading reading = read();
  EXPECT_EQ(blocked(reading, "session", "window"), 1u);
  EXPECT_EQ(engine_number(reading, "spinwire_rpc_sessions_window_full"), 1);
  EXPECT_EQ(reading.find("session")->rows.size(), 4u);
  ASSERT_EQ(c.later[0].call.reply(std::span<const std::byte>()), Status::ok);
  for (int i = 0; i < 8; ++i) (void)c.server.poll();
  check(8);
  EXPECT_EQ(blocked(read(), "session", "window"), 0u);
}

/// Seven clients; the last one hangs.
TEST_F(ObserveRowPlaces, ASilentClientsSessionGetsARow) {
  if (rpc_test::over_connections()) GTEST_SKIP() << "the connection's row says it";
  Config config = settings(4, rpc_test::over(spinwire::RpcTransport::datagram));
  config.connections.keepalive_interval = milliseconds(20);
  Node server(config, &ticks_);
  server.listen();
  ASSERT_TRUE(server.engine.serve(
      rpc_test::kEcho, [](spinwire::Request& r) { EXPECT_EQ(r.reply(r.bytes()), Status::ok); }));
  config.observability.directory.clear();
  Node healthy(config, &ticks_), hung(config, &ticks_);
  const auto open_and_call = [&](Node& client) {
    auto session = client.engine.open_session(server.listener.address(), {});
    ASSERT_TRUE(session) << session.error().message();
    ASSERT_TRUE(engine_test::until({&server, &client}, [&] { return session->ready(); }));
    bool ended = false;
    ASSERT_EQ(session->call(rpc_test::kEcho, std::span<const std::byte>(),
                            [&](spinwire::Reply&) { ended = true; }),
              Status::ok);
    ASSERT_TRUE(engine_test::until({&server, &client}, [&] { return ended; }));
  };
  for (int i = 0; i < 6; ++i) open_and_call(healthy);
  step(server, 8);
  const auto first = texts(read(), "served_session", "session");
  EXPECT_EQ(first.size(), 3u);
  open_and_call(hung);
  for (int i = 0; i < 400; ++i) {
    step(server);
    (void)healthy.poll();
  }
  auto now = texts(read(), "served_session", "session");
  ASSERT_EQ(now.size(), 4u);
  EXPECT_GT(number(read(), "served_session", 3, "spinwire_served_session_last_heard_seconds"),
            0.04);
  now.pop_back();
  EXPECT_EQ(now, first);
}

}  // namespace
}  // namespace row_places_test
