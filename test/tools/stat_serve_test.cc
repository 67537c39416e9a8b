// spinwire-stat as a server on loopback, and what it says of files that are damaged or half
// written.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/inotify.h>
#include <sys/stat.h>

#include <array>
#include <cstring>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "observe/engine_folder.h"
#include "observe/page_layout.h"
#include "tools/programs.h"
#include "tools/stat_client.h"

namespace stat_test {
namespace {

using observe_test::EngineFolder;
using tools_test::Outcome;
using tools_test::Program;
using tools_test::Words;

class ToolsStatServe : public observe_test::WithEngineFolder {};
class ToolsStatRows : public observe_test::WithEngineFolder {};

const std::string kRequest = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";

/// spinwire-stat, as it serves the engines of a folder.
class Serving {
 public:
  explicit Serving(const std::string& directory)
      : program_({tools_test::bin() + "/spinwire-stat", "--directory", directory, "--serve",
                  "127.0.0.1:0"}),
        port_(
            static_cast<std::uint16_t>(std::stoi(program_.wait_for("serving http://127.0.0.1:")))) {
  }
  [[nodiscard]] std::uint16_t port() const { return port_; }
  void signal(int number) const { program_.signal(number); }
  /// What it answers to a request for the metrics with these lines.
  [[nodiscard]] std::string metrics(const std::string& lines = "Host: localhost\r\n") const {
    return ask(port_, "GET /metrics HTTP/1.1\r\n" + lines + "\r\n");
  }

 private:
  Program program_;
  std::uint16_t port_;
};

TEST_F(ToolsStatServe, ServesOnlyRequestsThatNameThisHost) {
  const EngineFolder folder;
  const Serving server(folder.path());
  const std::string port = ":" + std::to_string(server.port());
  for (const std::string& host :
       {std::string("127.0.0.1"), "127.0.0.1" + port, "localhost" + port, std::string("LocalHost"),
        "[::1]" + port, std::string("[::1]"), std::string("  localhost  ")})
    EXPECT_TRUE(server.metrics("A: b\r\nhost:" + host + "\r\n").starts_with("HTTP/1.1 200 "))
        << host;
  for (const std::string& lines :
       {std::string(), std::string("Host: evil.example\r\n"), "Host: evil.example" + port + "\r\n",
        std::string("Host:\r\n"), std::string("Host: localhost.evil.example\r\n"),
        std::string("Host: localhost\r\nHost: evil.example\r\n"),
        std::string("X-Host: localhost\r\n")})
    EXPECT_TRUE(server.metrics(lines).starts_with("HTTP/1.1 403 ")) << lines;
}

TEST_F(ToolsStatServe, ASilentClientDelaysNoOther) {
  const EngineFolder folder;
  const Serving server(folder.path());
  const int silent = connect_to(server.port());
  EXPECT_TRUE(server.metrics().starts_with("HTTP/1.1 200 "));
  char byte = 0;
  EXPECT_EQ(::recv(silent, &byte, 1, MSG_DONTWAIT), -1) << "the silent client still has its time";
  // More clients than it serves: the oldest gives way.
  std::vector<int> more;
  for (int i = 0; i < 40; ++i) more.push_back(connect_to(server.port()));
  EXPECT_TRUE(server.metrics().starts_with("HTTP/1.1 200 "));
  EXPECT_EQ(::recv(silent, &byte, 1, MSG_DONTWAIT), 0);
  for (const int fd : more) ::close(fd);
  ::close(silent);
}

/// Whether the folder was listed since the last call.
bool was_listed(int watch) {
  std::array<char, 4096> events{};
  return ::read(watch, events.data(), events.size()) > 0;
}

TEST_F(ToolsStatServe, ReadsTheEnginesOnceForManyClients) {
  const EngineFolder folder;
  const Serving server(folder.path());
  const int watch = ::inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
  ASSERT_GE(::inotify_add_watch(watch, folder.path().c_str(), IN_OPEN | IN_ONLYDIR), 0);
  constexpr std::size_t kClients = 8;
  std::size_t listings = kClients, all_listings = 0;
  // On a busy machine the requests may be too far apart.
  for (int tries = 0; listings == kClients && tries < 20; ++tries) {
    listings = 0;
    for (std::size_t i = 0; i < kClients; ++i) {
      EXPECT_TRUE(server.metrics().starts_with("HTTP/1.1 200 "));
      listings += was_listed(watch) ? 1 : 0;
    }
    all_listings += listings;
  }
  EXPECT_GE(all_listings, 1u);
  EXPECT_LT(listings, kClients);
  ::close(watch);
}

// The kernel holds them until the server has time.
TEST_F(ToolsStatServe, ManyClientsMayConnectAtOnce) {
  const EngineFolder folder;
  const Serving server(folder.path());
  server.signal(SIGSTOP);
  std::vector<int> clients;
  for (int i = 0; i < 30; ++i) {
    const int fd = begin_to_connect(server.port());
    pollfd polled{fd, POLLOUT, 0};
    ASSERT_EQ(::poll(&polled, 1, 10000), 1) << i;
    clients.push_back(fd);
  }
  server.signal(SIGCONT);
  for (const int fd : clients) EXPECT_TRUE(answer_on(fd, kRequest).starts_with("HTTP/1.1 200 "));
}

TEST_F(ToolsStatServe, SaysWhyItServesNoMetrics) {
  std::optional<EngineFolder> folder(std::in_place);
  const Serving server(folder->path());
  EXPECT_TRUE(server.metrics().starts_with("HTTP/1.1 200 "));
  const std::string path = folder->path();
  folder.reset();
  // At first it may have the last metrics yet.
  std::string answer;
  const auto end = tools_test::Clock::now() + tools_test::kLimit;
  do answer = server.metrics();
  while (answer.starts_with("HTTP/1.1 200 ") && tools_test::Clock::now() < end);
  EXPECT_TRUE(answer.starts_with("HTTP/1.1 500 ")) << answer;
  EXPECT_TRUE(has(answer, path)) << answer;
}

/// A file of this process with two connections, the first of which is being written.
class HalfWritten {
 public:
  HalfWritten() {
    auto made = observe_test::PageFile::create(observe_test::options_in(folder_));
    EXPECT_TRUE(made) << made.error().message();
    file_ = std::move(*made);
    using namespace spinwire::observe;  // NOLINT: names of the writer
    RowWords row{};
    for (const std::uint32_t place : {0u, 1u}) {
      spinwire::ConnectionSnapshot snapshot;
      snapshot.blocked_by = spinwire::Blocker::credit;
      const std::size_t words =
          fill_connection_row(row, {place == 0 ? "torn" : "whole", "peer", "key"}, snapshot);
      file_.write(Table::connection, place, row, words);
    }
    const auto bytes = observe_test::bytes_of(file_.path());
    FileHeader header;
    TableDescriptor table;
    std::memcpy(&header, bytes.data(), sizeof header);
    std::memcpy(&table, bytes.data() + header.tables_offset + 2 * sizeof table, sizeof table);
    put(table.rows_offset, 1);
  }
  /// Writes bytes over those of the file.
  void put(std::uint64_t offset, std::uint64_t word) const {
    EXPECT_EQ(::chmod(file_.path().c_str(), 0600), 0);
    std::fstream out(file_.path(), std::ios::in | std::ios::out | std::ios::binary);
    out.seekp(static_cast<std::streamoff>(offset));
    out.write(reinterpret_cast<const char*>(&word), sizeof word);
  }
  [[nodiscard]] std::string stat(Words words) const {
    words.insert(words.end(), {"--directory", folder_.path()});
    const Outcome ran = tools_test::run("spinwire-stat", words);
    EXPECT_EQ(ran.code, 0) << ran.err;
    return ran.out;
  }
  [[nodiscard]] const EngineFolder& folder() const { return folder_; }

 private:
  EngineFolder folder_;
  observe_test::PageFile file_;
};

TEST_F(ToolsStatRows, MarksRowsThatAreNotWhole) {
  const HalfWritten file;
  const std::string pid = std::to_string(::getpid());
  const std::string prometheus = file.stat({"--prometheus"});
  EXPECT_FALSE(has(prometheus, "connection=\"torn\"")) << prometheus;
  EXPECT_TRUE(has(prometheus, "connection=\"whole\"")) << prometheus;
  const std::string screen = file.stat({pid, "--once"});
  EXPECT_TRUE(has(screen, "\ntorn? ")) << screen;
  EXPECT_TRUE(has(screen, "connection torn? to peer")) << screen;
  EXPECT_TRUE(has(screen, "\nwhole ")) << screen;
  const std::string json = file.stat({pid, "--json"});
  EXPECT_TRUE(has(json, "\"consistent\":false")) << json;
}

TEST_F(ToolsStatRows, SubjectsWithTheSameCauseShareALine) {
  const HalfWritten file;
  const std::string screen = file.stat({std::to_string(::getpid()), "--once"});
  EXPECT_TRUE(has(screen, "! credit used up: connection torn? to peer and 1 other, for "))
      << screen;
  EXPECT_EQ(screen.find("credit used up"), screen.rfind("credit used up")) << screen;
}

TEST_F(ToolsStatRows, LiveViewSaysWhyItCannotReadOn) {
  const HalfWritten file;
  Program view({tools_test::bin() + "/spinwire-stat", std::to_string(::getpid()), "--directory",
                file.folder().path(), "--interval", "0.05"});
  EXPECT_NE(view.wait_for("spinwire-stat  "), "");
  file.put(0, 0);  // no engine's file any more
  EXPECT_EQ(view.wait(), 1);
  EXPECT_TRUE(has(view.err(), "does not begin as an engine's")) << view.err();
  EXPECT_FALSE(has(view.out(), "the engine is closed")) << view.out();
}

}  // namespace
}  // namespace stat_test
