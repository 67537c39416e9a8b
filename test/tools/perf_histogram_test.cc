// What spinwire-perf shows of durations besides its report: a drawing, a log, how far it is.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "tools/hdr_log.h"
#include "tools/programs.h"
#include "tools/terminal.h"

namespace tools_test {

const Words kDrawn{"lat", "--one-thread", "--count", "300", "--warmup", "4", "--histogram"};

/// The lines of a drawing, which stands between two empty lines.
std::vector<std::string> drawing_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  std::string line;
  while (std::getline(in, line) && line.find("so far") == std::string::npos) {
  }
  while (std::getline(in, line) && line.find_first_of("%.") != std::string::npos)
    lines.push_back(line);
  return lines;
}

std::size_t characters_of(const std::string& line) {
  std::size_t count = 0;
  for (const char c : line) count += (static_cast<unsigned char>(c) & 0xc0) != 0x80 && c != '\r';
  return count;
}

bool is_ascii(const std::string& text) {
  for (const char c : text) {
    if (static_cast<unsigned char>(c) >= 0x80) return false;
  }
  return true;
}

TEST_F(Tools, AHistogramHasAllOperations) {
  const Outcome o = run("spinwire-perf", kDrawn);
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(o.err, "") << "progress is for terminals";
  EXPECT_TRUE(is_ascii(o.out)) << o.out;
  const auto lines = drawing_of(o.out);
  ASSERT_FALSE(lines.empty()) << o.out;
  EXPECT_NE(lines.back().find("100.000%"), std::string::npos) << o.out;
  std::size_t widest = 0;
  for (const std::string& line : lines) widest = std::max(widest, line.size());
  EXPECT_EQ(widest, 80u) << "the longest bar fills the line";
  for (const char* name : {"p50", "p99.99", "p99.999", "max"})
    EXPECT_NE(o.out.find(std::string("\n  ") + name + ' '), std::string::npos) << name << o.out;
}

TEST_F(Tools, AHistogramIsAsWideAsTheTerminal) {
  Words words{bin() + "/spinwire-perf"};
  words.insert(words.end(), kDrawn.begin(), kDrawn.end());
  for (const char* locale : {"C", "C.UTF-8"}) {
    for (const int columns : {60, 133}) {
      InTerminal terminal(words, columns, locale);
      EXPECT_EQ(terminal.wait(), 0) << terminal.text();
      std::size_t widest = 0;
      for (const std::string& line : drawing_of(terminal.text()))
        widest = std::max(widest, characters_of(line));
      EXPECT_EQ(widest, static_cast<std::size_t>(columns)) << terminal.text();
      EXPECT_EQ(is_ascii(terminal.text()), std::string(locale) == "C") << terminal.text();
    }
  }
}

TEST_F(Tools, DurationsAreWrittenAsALog) {
  const Folder folder;
  const std::string path = folder / "perf.hlog";
  const Outcome o = run("spinwire-perf", {"lat", "--one-thread", "--op", "write", "--count", "500",
                                          "--warmup", "4", "--json", "--hdr", path});
  ASSERT_EQ(o.code, 0) << o.err;
  const auto result = parse_object(o.out);
  const HdrLog log(read_file(path), 2);
  ASSERT_EQ(log.intervals.size(), 1u);
  EXPECT_EQ(log.intervals[0].tag, "Tag=lat.write.32");
  const auto& counts = log.intervals[0].counts;
  std::uint64_t operations = 0;
  for (const auto& [least, count] : counts) operations += count;
  EXPECT_EQ(operations, 500u);
  const double most = result.value("max_ns", 0.0);
  EXPECT_NEAR(log.intervals[0].longest, most, most / 50 + 1);
  EXPECT_NEAR(static_cast<double>(counts.rbegin()->first), most, most / 50 + 1);
  const double least = result.value("min_ns", 0.0);
  EXPECT_NEAR(static_cast<double>(counts.begin()->first), least, least / 50 + 1);
}

TEST_F(Tools, AServerHasNoDurationsToWrite) {
  const Folder folder;
  EXPECT_EQ(run("spinwire-perf", {"--hdr", folder / "perf.hlog"}).code, 2);
  EXPECT_EQ(folder.files(), 0u);
}

TEST_F(SlowTools, EachSizeIsAnIntervalOfTheLog) {
  const Folder folder;
  const std::string path = folder / "perf.hlog";
  const Outcome o = run("spinwire-perf", {"lat", "-a", "--one-thread", "--count", "20", "--warmup",
                                          "4", "--hdr", path});
  ASSERT_EQ(o.code, 0) << o.err;
  const HdrLog log(read_file(path), 2);
  ASSERT_EQ(log.intervals.size(), 24u);
  EXPECT_EQ(log.intervals[0].tag, "Tag=lat.send.1");
  EXPECT_EQ(log.intervals[23].tag, "Tag=lat.send.8388608");
}

const Words kEndless{"lat",     "--one-thread",  "--size",   "16",
                     "--count", "1000000000000", "--warmup", "0"};

TEST_F(SlowTools, ALongMeasurementShowsHowFarItIs) {
  Words words{bin() + "/spinwire-perf"};
  words.insert(words.end(), kEndless.begin(), kEndless.end());
  InTerminal terminal(words);
  EXPECT_TRUE(terminal.wait_for("lat send, 16 bytes: 0%, ", 2)) << terminal.text();
  EXPECT_TRUE(terminal.wait_for(" of 1000000000000, ", 2)) << terminal.text();
  terminal.signal(SIGTERM);
  EXPECT_EQ(terminal.wait(), 1);
  // The line is gone before the message.
  EXPECT_NE(terminal.text().find("\r\x1b[Kspinwire-perf: interrupted"), std::string::npos)
      << terminal.text();
}

}  // namespace tools_test
