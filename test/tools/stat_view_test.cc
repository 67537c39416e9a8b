// spinwire-stat's order of rows, its keys, and the latencies of an interval, on files whose values
// the tests choose.
#include <fmt/core.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <sstream>
#include <string>
#include <vector>

#include "observe/engine_folder.h"
#include "observe/latency.h"
#include "observe/metric_tables.h"
#include "tools/programs.h"
#include "tools/stat_client.h"
#include "tools/terminal.h"

namespace stat_test {
namespace {

using observe_test::EngineFolder;
using tools_test::InTerminal;
using tools_test::Outcome;
using tools_test::Words;
namespace observe = spinwire::observe;

/// The file of an engine of this process, with three connections.
class ChosenFile {
 public:
  ChosenFile() : file_(make()) {
    connection(0, "10.0.0.1:beech", 5);
    connection(1, "10.0.0.2:apple", 70);
    connection(2, "10.0.0.3:cedar", 9);
    latencies_.open();
  }
  /// So many handlers of a method took this time.
  void handlers(int count, spinwire::Nanoseconds time) {
    for (int i = 0; i < count; ++i)
      latencies_.record(observe::TimedWork::handler, spinwire::Method{9}, time);
    const std::uint32_t row = latencies_.next_changed(0);
    file_.write(row, latencies_.publish(row));
  }
  /// A newer engine's file takes the name of this one. So many handlers took this time.
  void replace(int count, spinwire::Nanoseconds time) {
    newer_ = make();
    observe::Latencies latencies;
    latencies.open();
    for (int i = 0; i < count; ++i)
      latencies.record(observe::TimedWork::handler, spinwire::Method{9}, time);
    const std::uint32_t row = latencies.next_changed(0);
    newer_.write(row, latencies.publish(row));
    std::filesystem::rename(newer_.path(), file_.path());
  }
  /// Further connections, without anything to do.
  void add_connections(std::uint32_t end) {
    for (std::uint32_t i = 3; i < end; ++i) connection(i, fmt::format("10.0.0.4:p{:04}", i), 0);
  }
  /// Each connection is blocked, by something else.
  void block() {
    using spinwire::Blocker;
    std::uint32_t index = 0;
    for (const Blocker by :
         {Blocker::send_queue, Blocker::operations, Blocker::credit, Blocker::windows})
      connection(index++, "10.0.0.9:oaken", 1, by);
  }
  [[nodiscard]] Words words(const Words& more) const {
    Words all{tools_test::bin() + "/spinwire-stat", "--directory", folder_.path(),
              std::to_string(::getpid())};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  /// The peers of one screen, in their order.
  [[nodiscard]] std::string peers(const Words& more) const {
    tools_test::Program program(words(more));
    EXPECT_EQ(program.wait(), 0) << program.err();
    std::string found;
    std::istringstream lines(program.out());
    for (std::string line; std::getline(lines, line);) {
      const std::size_t at = line.find("10.0.0.");
      if (line.find("-1 ") <= 2 && at != std::string::npos) found += line.substr(at + 9, 5) + ' ';
    }
    return found;
  }

 private:
  [[nodiscard]] observe_test::PageFile make() const {
    auto made = observe_test::PageFile::create(observe_test::options_in(folder_, 16));
    EXPECT_TRUE(made) << made.error().message();
    observe::RowWords row{};
    made->write(observe::Table::engine, 0, row, observe::fill_engine_row(row, {}, {}, {}));
    return std::move(*made);
  }
  void connection(std::uint32_t index, const std::string& peer, std::uint32_t outstanding,
                  spinwire::Blocker by = spinwire::Blocker::not_ready) {
    observe::RowWords row{};
    spinwire::ConnectionSnapshot snapshot;
    if (by != spinwire::Blocker::not_ready) snapshot.state = spinwire::ConnectionState::ready;
    snapshot.blocked_by = by;
    snapshot.stats.outstanding = outstanding;
    const std::string id = std::to_string(index) + "-1";
    file_.write(observe::Table::connection, index, row,
                observe::fill_connection_row(row, {id, peer, "", {}, {}}, snapshot));
  }

  EngineFolder folder_;
  observe_test::PageFile file_;
  observe_test::PageFile newer_;
  observe::Latencies latencies_;
};

class ToolsStatView : public observe_test::WithEngineFolder {};

TEST_F(ToolsStatView, RowsComeInTheOrderThatIsAskedFor) {
  const ChosenFile file;
  EXPECT_EQ(file.peers({"--once"}), "beech apple cedar ");
  EXPECT_EQ(file.peers({"--once", "--sort", "OUT"}), "apple cedar beech ");
  EXPECT_EQ(file.peers({"--once", "--sort", "out", "--reverse"}), "beech cedar apple ");
  EXPECT_EQ(file.peers({"--once", "--sort", "connection", "--reverse"}), "cedar apple beech ");
  EXPECT_EQ(file.peers({"--once", "--sort", "SRTT"}), "beech apple cedar ") << "of sessions";
  EXPECT_EQ(file.peers({"--once", "--sort", "OUT", "--peer", "e"}), "apple cedar beech ");
  EXPECT_EQ(file.peers({"--once", "--sort", "OUT", "--peer", "ce"}), "cedar ");
  const Outcome none = tools_test::run("spinwire-stat", {"--sort", "speed"});
  EXPECT_EQ(none.code, 2);
  EXPECT_TRUE(has(none.err, "no column 'speed'")) << none.err;
  EXPECT_TRUE(has(none.err, "SENT/s")) << none.err;
  const Outcome alone = tools_test::run("spinwire-stat", {"--reverse"});
  EXPECT_EQ(alone.code, 2);
  EXPECT_TRUE(has(alone.err, "--sort")) << alone.err;
}

TEST_F(ToolsStatView, IdsAreSortedByTheirNumbers) {
  ChosenFile file;
  file.add_connections(12);
  EXPECT_EQ(file.peers({"--once", "--sort", "CONNECTION"}),
            "beech apple cedar p0003 p0004 p0005 p0006 p0007 p0008 p0009 p0010 p0011 ");
}

/// In 20 lines.
TEST_F(ToolsStatView, KeysAreShownAboveManyCauses) {
  ChosenFile file;
  file.block();
  const Words words = file.words({"--interval", "3600"});
  InTerminal terminal(words, 80);
  ASSERT_TRUE(terminal.wait_for("\x1b[J", 1)) << terminal.text();
  const std::string screen = terminal.text();
  std::size_t causes = 0;
  for (std::size_t at = screen.find("\n! "); at != std::string::npos;
       at = screen.find("\n! ", at + 1))
    ++causes;
  EXPECT_GE(causes, 3u) << screen;
  EXPECT_TRUE(has(screen, "rows: what blocks, the longest first")) << screen;
  EXPECT_LT(screen.find("rows: what blocks"), screen.find("\n! ")) << screen;
  terminal.press('/');
  terminal.press('x');
  EXPECT_TRUE(terminal.wait_for("filter by peer: x_", 1)) << terminal.text();
  terminal.press('\n');
  EXPECT_TRUE(terminal.wait_for("peers with \"x\"", 1)) << terminal.text();
  terminal.press('q');
  EXPECT_EQ(terminal.wait(), 0);
}

TEST_F(ToolsStatView, KeysChooseOrderAndFilter) {
  const ChosenFile file;
  // No second reading: keys redraw at once.
  InTerminal terminal(file.words({"--interval", "3600"}), 120);
  ASSERT_TRUE(terminal.wait_for("rows: what blocks, the longest first  all peers", 1))
      << terminal.text();
  const auto shows = [&](const std::string& keys, const std::string& text, std::size_t times = 1) {
    for (const char key : keys) terminal.press(key);
    EXPECT_TRUE(terminal.wait_for(text, times)) << keys << terminal.text();
  };
  shows(">", "rows: CONNECTION, a first");
  shows(">", "rows: PEER, a first");
  shows("r", "rows: PEER, z first");
  shows(">>>>>", "rows: OUT, the smallest first");
  shows("r", "rows: OUT, the largest first");
  shows("<", "rows: HEARD, the largest first");
  shows("/appx", "filter by peer: appx_");
  shows("\x7f", "filter by peer: app_  ");
  shows("\n", "peers with \"app\"");
  // The rows come behind the line that was waited for.
  const auto latest = [&terminal] {
    return terminal.text().substr(terminal.text().rfind("\x1b[H"));
  };
  EXPECT_TRUE(terminal.until([&] { return has(latest(), "\x1b[J"); }));
  const std::string screen = latest();
  EXPECT_TRUE(has(screen, "apple")) << screen;
  EXPECT_FALSE(has(screen, "beech")) << screen;
  shows("/z", "filter by peer: z_");
  shows("\x1b", "peers with \"app\"", terminal.count("peers with \"app\"") + 1);
  const std::string none = "HEARD, the largest first  all peers";
  shows("/\n", none, terminal.count(none) + 1);
  terminal.press('q');
  EXPECT_EQ(terminal.wait(), 0);
}

/// Its samples are not those of the engine before, although there are more of them.
TEST_F(ToolsStatView, ANewerEngineHasNoLastInterval) {
  ChosenFile file;
  file.handlers(1000, spinwire::Nanoseconds(1000));
  InTerminal terminal(file.words({"--interval", "0.05"}), 120);
  const std::string name = "handler.total.method-9";
  ASSERT_TRUE(terminal.wait_for("LATENCY, LAST INTERVAL", 2)) << terminal.text();
  file.replace(3000, spinwire::Nanoseconds(1000));
  EXPECT_TRUE(terminal.wait_for(name + std::string(18, ' ') + "3000 ", 1)) << terminal.text();
  EXPECT_FALSE(has(terminal.text(), " 2000 ")) << terminal.text();
  terminal.press('q');
  EXPECT_EQ(terminal.wait(), 0);
}

TEST_F(ToolsStatView, LatenciesAreThoseOfTheLastInterval) {
  ChosenFile file;
  file.handlers(1000, spinwire::Nanoseconds(1000));
  InTerminal terminal(file.words({"--interval", "0.05"}), 120);
  const std::string name = "handler.total.method-9";
  ASSERT_TRUE(terminal.wait_for("LATENCY, LAST INTERVAL", 2)) << terminal.text();
  EXPECT_TRUE(terminal.wait_for(name + std::string(21, ' ') + "0         -", 1)) << terminal.text();
  file.handlers(50, std::chrono::milliseconds(2));
  ASSERT_TRUE(terminal.wait_for(name + std::string(20, ' ') + "50 ", 1)) << terminal.text();
  const std::string count = std::string(20, ' ') + "50 ";
  const auto line_at = [&] { return terminal.text().rfind(count); };
  EXPECT_TRUE(
      terminal.until([&] { return terminal.text().find('\x1b', line_at()) != std::string::npos; }));
  const std::size_t at = line_at();
  const std::string line = terminal.text().substr(at, terminal.text().find('\x1b', at) - at);
  EXPECT_TRUE(has(line, "2.1 ms") || has(line, "2.0 ms")) << line;
  EXPECT_FALSE(has(line, " us")) << line;
  terminal.press('q');
  EXPECT_EQ(terminal.wait(), 0);
}

/// The key also changes what is shown without a second reading.
TEST_F(ToolsStatView, AKeyShowsTheLatenciesSinceOpening) {
  ChosenFile file;
  file.handlers(1000, spinwire::Nanoseconds(1000));
  InTerminal terminal(file.words({"--interval", "0.05"}), 120);
  const std::string name = "handler.total.method-9";
  const std::string none = name + std::string(21, ' ') + "0         -";
  ASSERT_TRUE(terminal.wait_for("LATENCY, SINCE OPENING", 1)) << "with one reading";
  ASSERT_TRUE(terminal.wait_for("LATENCY, LAST INTERVAL", 1)) << terminal.text();
  ASSERT_TRUE(terminal.wait_for(none, 1)) << terminal.text();
  const std::string all = name + std::string(18, ' ') + "1000 ";
  const std::size_t before = terminal.count(all);
  terminal.press('l');
  EXPECT_TRUE(terminal.wait_for(all, before + 3)) << "it stays so: " << terminal.text();
  EXPECT_TRUE(has(terminal.text(), "l latencies")) << terminal.text();
  const std::size_t intervals = terminal.count("LATENCY, LAST INTERVAL");
  terminal.press('l');
  EXPECT_TRUE(terminal.wait_for("LATENCY, LAST INTERVAL", intervals + 2)) << terminal.text();
  terminal.press('q');
  EXPECT_EQ(terminal.wait(), 0);
}

}  // namespace
}  // namespace stat_test
