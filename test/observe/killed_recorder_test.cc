// The flight recorder of a process that was killed under load: the last events of every connection,
// whatever its state, in a file that is bounded and goes.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "engine/harness.h"
#include "observe/engine_folder.h"
#include "observe/page_file.h"

namespace observe_test {
namespace {

using engine_test::Connection;
using engine_test::ConnectionState;
using engine_test::Node;
using engine_test::Pair;

class ObserveKilledRecorder : public WithEngineFolder {};

/// A process with connections in several states, each of which it names with its index and newest
/// event, as "2 blocked credit". It is under load until it is killed.
class KilledUnderLoad {
 public:
  explicit KilledUnderLoad(const EngineFolder& folder)
      : child_([&](int, int out) { return Process(folder).run(out); }) {
    for (std::string line; (line = child_.line()) != "loaded";) {
      if (line.empty()) {
        ADD_FAILURE() << "the process has failed";
        return;
      }
      newest_[line.substr(0, line.find(' '))] = line.substr(line.find(' ') + 1);
    }
    child_.kill(SIGKILL);
  }
  [[nodiscard]] const std::map<std::string, std::string>& newest() const { return newest_; }

  static constexpr std::uint32_t kConnections = 10;

 private:
  /// The engines of the process. Their time stands still, but for one block.
  struct Process {
    explicit Process(const EngineFolder& folder) : pair(config_in(folder), &ticks) {}
    static Config config_in(const EngineFolder& folder) {
      Config c = shown_in(folder);
      // A blocked or silent connection stays blocked or silent.
      c.connections.peer_timeout = c.connections.keepalive_interval = std::chrono::hours(1);
      return c;
    }

    int run(int out) {
      while (quiet.size() < kConnections) quiet.push_back(connect(pair.client, pair.server).client);
      load_with_churn();
      const Connection blocked = block();
      const Connection ended = quiet.back();
      quiet.pop_back();
      if (ended.index() == 0 || Connection(ended).close() != Status::ok) return 1;
      if (!pair.until([&] { return ended.state() == ConnectionState::closed; })) return 2;
      const Connection waiting = pair.client.begin(silent_address());
      // Each row is written once in so many control steps.
      pair.settle(2000);
      const std::string peer = ", peer " + pair.server.listener.address();
      say(out, pair.ends.client, "state ready" + peer);
      for (const Connection& each : quiet) say(out, each, "state ready" + peer);
      say(out, blocked, "blocked credit");
      say(out, ended, "state closed" + peer);
      say(out, waiting, "state exchanging, peer ");
      engine_test::write_line(out, "loaded");
      for (;;) load();
    }
    static void say(int out, const Connection& c, const std::string& newest) {
      engine_test::write_line(out, std::to_string(c.index()) + ' ' + newest);
    }
    void load() {
      (void)pair.ends.client.send(bytes);
      pair.settle(1);
    }
    /// One connection comes and goes, so that there are many more events than the file keeps.
    void load_with_churn() {
      for (int i = 0; i < 2000; ++i) {
        load();
        if (i % 8 != 0) continue;
        const engine_test::Ends churned = connect(pair.client, pair.server);
        (void)Connection(churned.client).close();
        if (!pair.until([&] { return churned.client.state() == ConnectionState::closed; }))
          std::abort();
      }
    }
    /// A connection whose peer's application does not poll any more.
    Connection block() {
      hung.listen();
      const Connection c = connect(pair.client, hung).client;
      while (Connection(c).send(bytes) == Status::ok) {
      }
      pair.settle(500);
      ticks += 150'000'000;
      pair.settle(500);
      return c;
    }
    /// Of a socket that accepts nothing.
    std::string silent_address() {
      socket_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      sockaddr_in at{};
      at.sin_family = AF_INET;
      at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      socklen_t length = sizeof at;
      if (::bind(socket_, reinterpret_cast<sockaddr*>(&at), length) != 0 ||
          ::listen(socket_, 4) != 0 ||
          ::getsockname(socket_, reinterpret_cast<sockaddr*>(&at), &length) != 0)
        std::abort();
      return "127.0.0.1:" + std::to_string(ntohs(at.sin_port));
    }

    std::uint64_t ticks = 1'000'000'000;
    Pair pair;
    Node hung{engine_test::small_config(), &ticks};
    Buffer bytes = pair.client.filled(8, 1);
    std::vector<Connection> quiet;
    int socket_ = -1;
  };

  std::map<std::string, std::string> newest_;
  engine_test::Child child_;
};

struct NewestEvent {
  std::string text;  ///< "KIND TEXT"
  std::uint64_t number = 0;
};
/// The newest event of each connection of an engine, by its index.
std::map<std::string, NewestEvent> newest_events(const EngineReading& reading) {
  std::map<std::string, NewestEvent> newest;
  for (const EngineEvent& event : reading.events) {  // the oldest come first
    if (event.subject == "connection")
      newest[event.id.substr(0, event.id.find('-'))] = {event.kind + ' ' + event.text,
                                                        event.number};
  }
  return newest;
}

/// The events of an engine so far. All of them have been in the ring of all subjects, unless the
/// engine has accepted peers.
std::uint64_t events_of(const EngineReading& reading) {
  std::uint64_t newest = 0;
  for (const EngineEvent& event : reading.events) newest = std::max(newest, event.number);
  return newest;
}

TEST_F(ObserveKilledRecorder, HasTheLastEventsOfEveryConnection) {
  const EngineFolder folder;
  const KilledUnderLoad process(folder);
  const auto files = folder.engines();
  ASSERT_EQ(files.size(), 2u);
  for (const EngineFile& file : files) EXPECT_FALSE(file.is_alive);
  const auto client = read_engine(files[1]);
  ASSERT_TRUE(client) << client.error().message();
  const auto newest = newest_events(*client);
  EXPECT_GE(process.newest().size(), KilledUnderLoad::kConnections + 2);
  std::size_t displaced = 0;
  for (const auto& [index, event] : process.newest()) {
    ASSERT_TRUE(newest.contains(index)) << index << ' ' << event;
    const NewestEvent& found = newest.at(index);
    EXPECT_TRUE(found.text.starts_with(event)) << index << ' ' << found.text;
    displaced += found.number + observe::kEventsOfAll <= events_of(*client) ? 1 : 0;
  }
  // The events of the connections that were made before the load are in their own rings only: this
  // host is their source, and its newest events are the ones that the ring of all subjects still
  // has. The engine's own few take the other places. So an event that so many have followed as the
  // ring has places was displaced.
  EXPECT_GE(displaced, KilledUnderLoad::kConnections)
      << "the ring of all subjects still has them, of " << events_of(*client) << " events";
  for (const EngineFile& file : files) {
    const auto reading = read_engine(file);
    ASSERT_TRUE(reading) << reading.error().message();
    const auto events = newest_events(*reading);
    const MetricTable* const table = reading->find("connection");
    EXPECT_GE(table->rows.size(), KilledUnderLoad::kConnections - 1);
    for (const MetricRow& row : table->rows) {
      const std::string id(table->text(row, "connection"));
      EXPECT_TRUE(events.contains(id.substr(0, id.find('-')))) << "a row without events: " << id;
    }
    EXPECT_EQ(reading->events.front().kind, "opened") << "the engine's own events stay";
  }
}

/// A process that opens an engine and is killed.
void die_with_engine(const EngineFolder& folder) {
  engine_test::Child child([&](int, int) {
    const Node node(shown_in(folder));
    return ::raise(SIGKILL);
  });
  EXPECT_EQ(child.wait(), -SIGKILL);
}

TEST_F(ObserveKilledRecorder, WhatIsLeftIsBoundedAndRemoved) {
  const auto size_of = [](const EngineFile& file) { return std::filesystem::file_size(file.path); };
  const EngineFolder folder;
  std::uintmax_t idle_size = 0;
  {
    const Node idle(shown_in(folder));
    idle_size = size_of(folder.engines().at(0));
  }
  EXPECT_LT(idle_size, 2u << 20) << "the guide says 1.5 MB";
  const KilledUnderLoad process(folder);
  const auto left = folder.engines();
  ASSERT_EQ(left.size(), 2u);
  for (const EngineFile& file : left)
    EXPECT_EQ(size_of(file), idle_size) << "load makes no file longer";
  // The next runs leave the newest ones.
  for (std::size_t i = 0; i < observe::kDeadFilesKept; ++i) {
    EXPECT_TRUE(std::filesystem::exists(left[1].path)) << i;
    die_with_engine(folder);
  }
  die_with_engine(folder);
  for (const EngineFile& file : left) EXPECT_FALSE(std::filesystem::exists(file.path));
  EXPECT_EQ(folder.files(), observe::kDeadFilesKept + 1);
  // And on request, all.
  EXPECT_EQ(remove_dead_engines(0, folder.path()).value(), observe::kDeadFilesKept + 1);
  EXPECT_EQ(folder.files(), 0u);
}

}  // namespace
}  // namespace observe_test
