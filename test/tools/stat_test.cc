// spinwire-stat, as a user runs it: beside a process with engines, and after that was killed.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <termios.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "engine/harness.h"
#include "observe/engine_folder.h"
#include "tools/programs.h"
#include "tools/stat_client.h"
#include "tools/stat_formats.h"
#include "tools/terminal.h"

namespace stat_test {
namespace {

using observe_test::EngineFolder;
using tools_test::InTerminal;
using tools_test::Outcome;
using tools_test::Program;
using tools_test::Words;

/// A process with two connected engines, whose client has used up its credit, until it is killed.
class Blocked {
 public:
  Blocked()
      : child_([&](int, int out) {
          spinwire::Config config = engine_test::small_config();
          config.observability.directory = folder_.path();
          // The server is silent, which is no matter here.
          config.connections.peer_timeout = std::chrono::hours(1);
          config.connections.keepalive_interval = std::chrono::hours(1);
          engine_test::Pair p(config);
          const spinwire::Buffer b = p.client.filled(8, 1);
          const std::string server = p.server.listener.address();
          while (p.ends.client.send(b) == spinwire::Status::ok) {
          }
          engine_test::write_line(out, server);
          // The server's application does not poll any more.
          for (;;) (void)p.client.poll();
          return 0;
        }),
        pid_(child_.pid()),
        server_(child_.line()) {
    // Until the client has written that it is blocked.
    const bool shown =
        engine_test::until({}, [&] { return stat({"--once"}).find(kCause) != std::string::npos; });
    EXPECT_TRUE(shown) << stat({"--once"});
  }
  [[nodiscard]] Words words(const Words& more, bool with_pid = true) const {
    Words all{"--directory", folder_.path()};
    if (with_pid) all.push_back(std::to_string(pid_));
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  /// What spinwire-stat writes about the client's engine.
  [[nodiscard]] std::string stat(Words more) const {
    more.push_back("--engine");
    more.push_back(std::to_string(client_engine()));
    const Outcome ran = tools_test::run("spinwire-stat", words(more));
    EXPECT_EQ(ran.code, 0) << ran.err;
    return ran.out;
  }
  /// The second engine of the process.
  [[nodiscard]] std::uint32_t client_engine() const { return folder_.engines().at(1).engine; }
  void kill() { child_.kill(SIGKILL); }
  [[nodiscard]] const EngineFolder& folder() const { return folder_; }
  [[nodiscard]] const std::string& server() const { return server_; }

  static constexpr std::string_view kCause = "credit used up";

 private:
  EngineFolder folder_;
  engine_test::Child child_;
  pid_t pid_;
  std::string server_;
};

class ToolsStat : public observe_test::WithEngineFolder {};

TEST_F(ToolsStat, NamesTheCauseOnItsFirstScreen) {
  const Blocked blocked;
  const std::string screen = blocked.stat({"--once"});
  EXPECT_TRUE(has(screen, blocked.server())) << screen;
  EXPECT_TRUE(has(screen, "blocked") || has(screen, "BLOCKED BY")) << screen;
  EXPECT_LT(screen.find(Blocked::kCause), screen.find("CONNECTION")) << "causes come first";
  const std::string other = blocked.stat({"--once", "--peer", "no such peer"});
  EXPECT_FALSE(has(other, Blocked::kCause)) << other;
  const Outcome list = tools_test::run("spinwire-stat", blocked.words({}, false));
  EXPECT_EQ(list.code, 0) << list.err;
  EXPECT_TRUE(has(list.out, Blocked::kCause)) << list.out;
  const Outcome all = tools_test::run("spinwire-stat", {"--list"});
  EXPECT_TRUE(has(all.out, "spinwire_connection_blocked_by")) << all.out;
}

TEST_F(ToolsStat, WritesJson) {
  const Blocked blocked;
  for (const Words& words : {Words{"--json"}, Words{"--json", "--list"}}) {
    const Outcome json = tools_test::run("spinwire-stat", blocked.words(words, false));
    EXPECT_EQ(json.code, 0) << json.err;
    EXPECT_TRUE(nlohmann::json::accept(json.out)) << json.out;
  }
  const std::string text = blocked.stat({"--json"});
  EXPECT_TRUE(has(text, "\"spinwire_connection_blocked_by\":\"credit\"")) << text;
  EXPECT_TRUE(has(text, "\"alive\":true")) << text;
}

TEST_F(ToolsStat, WritesPrometheusText) {
  const Blocked blocked;
  const Outcome out = tools_test::run("spinwire-stat", blocked.words({"--prometheus"}, false));
  EXPECT_EQ(out.code, 0) << out.err;
  const PrometheusText text(out.out);
  EXPECT_EQ(text.count("spinwire_up"), 2u);
  EXPECT_EQ(text.count("spinwire_polls_total"), 2u);
  EXPECT_EQ(text.count("spinwire_pool_bytes"), 8u);
  EXPECT_GE(text.count("spinwire_connection_messages_sent_total"), 1u);
  for (const spinwire::Metric& metric : spinwire::metrics()) {
    if (metric.table != "engine") continue;
    EXPECT_EQ(text.count(std::string(metric.name)), 2u) << metric.name;
  }
  // What is exported is in the list, and so in the manual page and the record.
  std::set<std::string> listed;
  for (const spinwire::Metric& metric : spinwire::metrics()) listed.emplace(metric.name);
  for (const std::string& family : text.families()) EXPECT_TRUE(listed.contains(family)) << family;
  const tools_test::Folder folder;
  const std::string file = folder / "metrics.prom";
  const Outcome wrote =
      tools_test::run("spinwire-stat", blocked.words({"--prometheus", "--output", file}, false));
  EXPECT_EQ(wrote.code, 0) << wrote.err;
  EXPECT_EQ(PrometheusText(tools_test::read_file(file)).count("spinwire_up"), 2u);
  EXPECT_EQ(folder.files(), 1u);
}

TEST_F(ToolsStat, ServesPrometheusOnLoopback) {
  const Blocked blocked;
  Words words{tools_test::bin() + "/spinwire-stat"};
  for (const std::string& word : blocked.words({"--serve", "127.0.0.1:0"}, false))
    words.push_back(word);
  Program server(words);
  const std::string address = server.wait_for("serving http://127.0.0.1:");
  const auto port = static_cast<std::uint16_t>(std::stoi(address));
  const std::string answer = ask(port, "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_TRUE(answer.starts_with("HTTP/1.1 200 OK\r\n")) << answer;
  const std::size_t body = answer.find("\r\n\r\n");
  ASSERT_NE(body, std::string::npos);
  EXPECT_TRUE(has(answer, "Content-Length: " + std::to_string(answer.size() - body - 4)));
  EXPECT_EQ(PrometheusText(answer.substr(body + 4)).count("spinwire_up"), 2u);
  const std::string host = " HTTP/1.1\r\nHost: localhost\r\n\r\n";
  EXPECT_TRUE(ask(port, "GET /other" + host).starts_with("HTTP/1.1 404 "));
  EXPECT_TRUE(ask(port, "POST /metrics" + host).starts_with("HTTP/1.1 405 "));
  server.signal(SIGTERM);
  EXPECT_EQ(server.wait(), 0);
  for (const char* other : {"0.0.0.0:0", "10.0.0.1:80", "127.0.0.1", "127.0.0.1:x", "[::]:0"})
    EXPECT_EQ(tools_test::run("spinwire-stat", {"--serve", other}).code, 1) << other;
}

TEST_F(ToolsStat, LiveViewFillsATerminalAndRestoresIt) {
  const Blocked blocked;
  Words words{tools_test::bin() + "/spinwire-stat"};
  for (const std::string& word :
       blocked.words({"--interval", "0.05", "--engine", std::to_string(blocked.client_engine())}))
    words.push_back(word);
  InTerminal terminal(words);
  ASSERT_TRUE(terminal.wait_for(Blocked::kCause, 3)) << terminal.text();
  EXPECT_EQ(terminal.local_modes() & ECHO, 0u) << "keys are not shown";
  terminal.press('q');
  EXPECT_EQ(terminal.wait(), 0);
  const std::string& text = terminal.text();
  EXPECT_TRUE(text.starts_with("\x1b[?1049h")) << "the alternate screen";
  EXPECT_TRUE(has(text, "\x1b[?1049l")) << "the screen as it was before";
  EXPECT_NE(terminal.local_modes() & ECHO, 0u);
  // No screen is higher or wider than the terminal.
  std::size_t at = text.find("\x1b[H");
  for (std::size_t next = 0; at != std::string::npos; at = next) {
    next = text.find("\x1b[H", at + 1);
    const std::string screen = text.substr(at + 3, next - at - 3);
    EXPECT_LT(std::count(screen.begin(), screen.end(), '\n'), 20) << screen;
    std::istringstream lines(screen.substr(0, screen.find("\x1b[J")));
    for (std::string line; std::getline(lines, line);)
      EXPECT_LE(line.substr(0, line.find('\x1b')).size(), 100u) << line;
  }
}

/// Half a number would be read as another one.
TEST_F(ToolsStat, ANarrowTerminalShowsWholeCells) {
  const Blocked blocked;
  Words words{tools_test::bin() + "/spinwire-stat"};
  for (const std::string& word :
       blocked.words({"--interval", "0.05", "--engine", std::to_string(blocked.client_engine())}))
    words.push_back(word);
  InTerminal terminal(words, 80);
  ASSERT_TRUE(terminal.wait_for("CONNECTION ", 2)) << terminal.text();
  terminal.press('q');
  EXPECT_EQ(terminal.wait(), 0);
  const std::string& text = terminal.text();
  for (const char* item : {"  release 0.", "  retransmitted 0", "  refused 0"})
    EXPECT_TRUE(has(text, item)) << item << text;
  const std::size_t at = text.find("CONNECTION ");
  const std::string head = text.substr(at, text.find_first_of("\x1b\r", at) - at);
  EXPECT_TRUE(head.ends_with(" HEARD  >")) << head;
  EXPECT_EQ(head.size(), 80u) << head;
}

TEST_F(ToolsStat, ReadsWhatAKilledProcessLeft) {
  Blocked blocked;
  blocked.kill();
  EXPECT_EQ(blocked.folder().files(), 2u);
  const std::string screen = blocked.stat({"--once"});
  EXPECT_TRUE(has(screen, "the process has died")) << screen;
  EXPECT_TRUE(has(screen, Blocked::kCause)) << screen;
  EXPECT_LT(screen.find("the process has died"), screen.find(Blocked::kCause)) << "the worst first";
  const Outcome text = tools_test::run("spinwire-stat", blocked.words({"--prometheus"}, false));
  EXPECT_EQ(PrometheusText(text.out).count("spinwire_up"), 2u);
  EXPECT_EQ(PrometheusText(text.out).count("spinwire_polls_total"), 0u);
  const Outcome clean = tools_test::run("spinwire-stat", blocked.words({"--clean"}, false));
  EXPECT_EQ(clean.code, 0) << clean.err;
  EXPECT_TRUE(has(clean.out, "removed 2 ")) << clean.out;
  EXPECT_EQ(blocked.folder().files(), 0u);
  EXPECT_EQ(tools_test::run("spinwire-stat", blocked.words({"--once"})).code, 1);
}

TEST_F(ToolsStat, ShowsTheFlightRecorderOfLivingAndDeadProcesses) {
  Blocked blocked;
  const std::string ready = "ready, peer " + blocked.server();
  for (const bool is_dead : {false, true}) {
    if (is_dead) blocked.kill();
    const std::string text = blocked.stat({"--events"});
    EXPECT_TRUE(has(text, is_dead ? "dead" : "running")) << text;
    EXPECT_TRUE(has(text, "opened")) << text;
    EXPECT_TRUE(has(text, ready)) << text;
    EXPECT_LT(text.find("exchanging"), text.find(ready)) << "the oldest come first\n" << text;
    const std::string json = blocked.stat({"--events", "--json"});
    EXPECT_TRUE(nlohmann::json::accept(json)) << json;
    EXPECT_TRUE(has(json, "\"kind\":\"state\"")) << json;
  }
  const Outcome all = tools_test::run("spinwire-stat", blocked.words({"--events"}, false));
  EXPECT_TRUE(has(all.out, ready)) << all.out;
  EXPECT_TRUE(has(blocked.stat({"--events", "--connection", "0"}), ready));
  EXPECT_TRUE(has(blocked.stat({"--events", "--connection", "0-1"}), ready));
  EXPECT_FALSE(has(blocked.stat({"--events", "--connection", "0-2"}), "ready"));
  EXPECT_FALSE(has(blocked.stat({"--events", "--session", "0"}), "ready"));
  EXPECT_EQ(tools_test::run("spinwire-stat", {"--connection", "0"}).code, 2);
}

/// Connections whose indices differ by the number of rings share one, so a busy one displaces the
/// events of another. What is shown belongs to the connection that is asked for, and the last line
/// says that something is missing.
TEST_F(ToolsStat, SaysWhichEventsWereDisplaced) {
  constexpr std::uint32_t kRings = 4;
  const EngineFolder folder;
  observe_test::PageFileOptions options = observe_test::options_in(folder);
  options.events = 16;
  options.event_rings = {1, kRings, 0, 0, 0};
  auto page = observe_test::PageFile::create(options);
  ASSERT_TRUE(page) << page.error().message();
  using spinwire::observe::EventKind;
  using spinwire::observe::EventSubject;
  const spinwire::Clock clock;
  spinwire::observe::Recorder recorder(clock);
  recorder.open(
      page->all_events(),
      {page->events(EventSubject::engine), page->events(EventSubject::connection), {}, {}, {}});
  const auto record = [&](std::uint32_t index, int first, int count) {
    for (int i = first; i < first + count; ++i)
      recorder.record(EventKind::state, EventSubject::connection, index, 1,
                      {"event ", std::to_string(i)});
  };
  const auto stat = [&](Words words) {
    words.insert(words.begin(), {"--directory", folder.path(), "--events"});
    return tools_test::run("spinwire-stat", words).out;
  };
  record(1, 0, 6);
  EXPECT_FALSE(has(stat({}), "displaced")) << "all are there";
  record(1 + kRings, 6, 20);
  const std::string one = stat({"--connection", "1"});
  EXPECT_FALSE(has(one, "connection 5-1")) << one;
  EXPECT_FALSE(has(one, "event 6\n")) << one;
  EXPECT_TRUE(has(one, "Later events have displaced ")) << one;
  EXPECT_TRUE(has(one, " of the engine's 26; the list may lack events of this connection")) << one;
  const std::string other = stat({"--connection", "5"});
  EXPECT_FALSE(has(other, "connection 1-1")) << other;
  EXPECT_TRUE(has(other, "event 25\n")) << other;
  const nlohmann::json all = tools_test::parse_object(stat({"--json"})).at("engines").at(0);
  EXPECT_EQ(all.at("recorded"), 26);
  EXPECT_EQ(all.at("displaced"), 26 - all.at("events").size());
  EXPECT_GT(all.at("displaced"), 0);
}

/// An engine that dies while it writes an event leaves it half written: the list has it, with a
/// question mark.
TEST_F(ToolsStat, AnEventThatIsHalfWrittenWasNotDisplaced) {
  const EngineFolder folder;
  observe_test::PageFileOptions options = observe_test::options_in(folder);
  options.events = 16;
  auto page = observe_test::PageFile::create(options);
  ASSERT_TRUE(page) << page.error().message();
  const spinwire::Clock clock;
  spinwire::observe::Recorder recorder(clock);
  recorder.open(page->all_events(), {});
  for (int i = 0; i < 3; ++i)
    recorder.record(spinwire::observe::EventKind::state, {"event ", std::to_string(i)});
  // The lowest bit of EventRecord::sequence.
  page->all_events().data[sizeof(spinwire::observe::EventRecord)] ^= std::byte{1};
  const Outcome text = tools_test::run("spinwire-stat", {"--directory", folder.path(), "--events"});
  EXPECT_TRUE(has(text.out, "state? ")) << text.out;
  EXPECT_FALSE(has(text.out, "displaced")) << text.out;
  const Outcome json =
      tools_test::run("spinwire-stat", {"--directory", folder.path(), "--events", "--json"});
  const nlohmann::json all = tools_test::parse_object(json.out).at("engines").at(0);
  EXPECT_EQ(all.at("recorded"), 3) << json.out;
  EXPECT_EQ(all.at("displaced"), 0) << json.out;
}

}  // namespace
}  // namespace stat_test
