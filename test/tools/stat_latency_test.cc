// Latencies as spinwire-stat writes them: on the screen, as JSON, for Prometheus and in
// HdrHistogram's log format.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "observe/engine_folder.h"
#include "observe/latency.h"
#include "tools/programs.h"
#include "tools/stat_client.h"
#include "tools/stat_formats.h"

namespace stat_test {
namespace {

using observe_test::EngineFolder;
using tools_test::Outcome;
using tools_test::Words;

/// A log in HdrHistogram's format, read by what its specification says.
class HdrLog {
 public:
  struct Interval {
    std::string tag;
    double longest = 0;
    std::map<std::uint64_t, std::uint64_t> counts;  ///< by the least value of their bucket
  };
  explicit HdrLog(const std::string& text) {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with('#') || line.starts_with('"')) continue;
      std::istringstream fields(line);
      Interval& interval = intervals.emplace_back();
      std::string skipped, longest, encoded;
      std::getline(fields, interval.tag, ',');
      std::getline(fields, skipped, ',');
      std::getline(fields, skipped, ',');
      std::getline(fields, longest, ',');
      std::getline(fields, encoded);
      interval.longest = std::stod(longest);
      decode(from_base64(encoded), interval);
    }
  }
  std::vector<Interval> intervals;

 private:
  using Octets = std::vector<std::uint8_t>;
  static Octets from_base64(const std::string& text) {
    EXPECT_EQ(text.size() % 4, 0u);
    const std::string digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    Octets out;
    unsigned bits = 0, count = 0;
    for (const char c : text) {
      if (c == '=') break;
      EXPECT_NE(digits.find(c), std::string::npos);
      bits = bits << 6 | static_cast<unsigned>(digits.find(c));
      if ((count += 6) >= 8) out.push_back(static_cast<std::uint8_t>(bits >> (count -= 8)));
    }
    return out;
  }
  static std::uint64_t number(const Octets& from, std::size_t at, std::size_t bytes) {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < bytes; ++i) value = value << 8 | from.at(at + i);
    return value;
  }
  static void decode(const Octets& all, Interval& interval) {
    EXPECT_EQ(number(all, 0, 4), 0x1c849314u);
    EXPECT_EQ(number(all, 4, 4), all.size() - 8);
    // zlib with one stored block.
    EXPECT_EQ(number(all, 8, 2) % 31, 0u);
    EXPECT_EQ(all.at(10), 1);
    const std::size_t length = all.at(11) | all.at(12) << 8;
    EXPECT_EQ(length ^ 0xffff, static_cast<std::size_t>(all.at(13) | all.at(14) << 8));
    EXPECT_EQ(15 + length + 4, all.size());
    std::uint32_t a = 1, b = 0;
    for (std::size_t i = 0; i < length; ++i) {
      a = (a + all.at(15 + i)) % 65521;
      b = (b + a) % 65521;
    }
    EXPECT_EQ(number(all, 15 + length, 4), b << 16 | a);
    const Octets plain(all.begin() + 15, all.end() - 4);
    EXPECT_EQ(number(plain, 0, 4), 0x1c849313u);
    EXPECT_EQ(number(plain, 4, 4), plain.size() - 40);
    EXPECT_EQ(number(plain, 8, 4), 0u);
    EXPECT_EQ(number(plain, 12, 4), 1u) << "significant digits";
    EXPECT_EQ(number(plain, 16, 8), 1u) << "lowest value";
    EXPECT_EQ(number(plain, 32, 8), 0x3ff0000000000000u) << "the double 1.0";
    std::size_t index = 0;
    for (std::size_t at = 40; at < plain.size();) {
      std::uint64_t raw = 0;
      for (int shift = 0;; shift += 7) {
        const std::uint8_t byte = plain.at(at++);
        if (shift == 56) {
          raw |= std::uint64_t{byte} << shift;
          break;
        }
        raw |= std::uint64_t{byte & 0x7fu} << shift;
        if ((byte & 0x80) == 0) break;
      }
      const auto value = static_cast<std::int64_t>(raw >> 1) ^ -static_cast<std::int64_t>(raw & 1);
      if (value < 0) {
        index += static_cast<std::size_t>(-value);
        continue;
      }
      // One significant digit: 32 values of the first bucket, then halves of 16.
      const std::size_t half = index / 16;
      const std::uint64_t least = half < 2 ? index : std::uint64_t{16 + index % 16} << (half - 1);
      interval.counts[least] = static_cast<std::uint64_t>(value);
      ++index;
    }
  }
};

class ToolsStatLatency : public observe_test::WithEngineFolder {};

TEST_F(ToolsStatLatency, WritesLatenciesInAllForms) {
  const EngineFolder folder;
  auto file = observe_test::PageFile::create(observe_test::options_in(folder));
  ASSERT_TRUE(file);
  spinwire::observe::Latencies latencies;
  latencies.open();
  using spinwire::Nanoseconds;
  using spinwire::observe::TimedWork;
  const std::map<std::uint64_t, std::uint64_t> times = {
      {0, 1}, {7, 2}, {31, 1}, {32, 300}, {1000, 5}, {123456789, 70000}, {34359738368, 1}};
  std::map<std::uint64_t, std::uint64_t> expected;
  for (const auto& [ns, count] : times) {
    const std::uint32_t bucket = spinwire::observe::bucket_of(ns);
    expected[bucket < 32 ? bucket : std::uint64_t{16 + bucket % 16} << (bucket / 16 - 1)] = count;
    for (std::uint64_t i = 0; i < count; ++i)
      latencies.record(TimedWork::handler, spinwire::Method{9}, Nanoseconds(ns));
  }
  const std::uint32_t row = latencies.next_changed(0);
  file->write(row, latencies.publish(row));
  spinwire::observe::RowWords words{};
  file->write(
      spinwire::observe::Table::engine, 0, words,
      (spinwire::observe::table_columns(spinwire::observe::Table::engine).row_bytes - 16) / 8);
  const auto stat = [&](Words more) {
    more.insert(more.end(), {"--directory", folder.path()});
    const Outcome ran = tools_test::run("spinwire-stat", more);
    EXPECT_EQ(ran.code, 0) << ran.err;
    return ran.out;
  };
  const tools_test::Folder out;
  stat({"--hdr", out / "latencies.hlog"});
  const HdrLog log(tools_test::read_file(out / "latencies.hlog"));
  ASSERT_EQ(log.intervals.size(), 1u);
  EXPECT_TRUE(log.intervals[0].tag.starts_with("Tag=")) << log.intervals[0].tag;
  EXPECT_TRUE(log.intervals[0].tag.ends_with(".handler.total.method-9")) << log.intervals[0].tag;
  EXPECT_EQ(log.intervals[0].longest, 34359738368.0);
  EXPECT_EQ(log.intervals[0].counts, expected);
  const std::string json = stat({"--json"});
  EXPECT_TRUE(Json::is_valid(json)) << json;
  EXPECT_TRUE(has(json, "\"work\":\"handler\",\"stage\":\"total\",\"method\":9,")) << json;
  const PrometheusText text(stat({"--prometheus"}));
  EXPECT_EQ(text.count("spinwire_latency_seconds"), 4u);
  EXPECT_EQ(text.count("spinwire_latency_seconds_count"), 1u);
  EXPECT_EQ(text.count("spinwire_latency_seconds_sum"), 1u);
  const std::string screen = stat({std::to_string(::getpid()), "--once"});
  EXPECT_TRUE(has(screen, "handler.total.method-9")) << screen;
}

}  // namespace
}  // namespace stat_test
