// Latencies as spinwire-stat writes them: on the screen, as JSON, for Prometheus and in
// HdrHistogram's log format.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <string>

#include "observe/engine_folder.h"
#include "observe/latency.h"
#include "tools/hdr_log.h"
#include "tools/programs.h"
#include "tools/stat_client.h"
#include "tools/stat_formats.h"

namespace stat_test {
namespace {

using observe_test::EngineFolder;
using tools_test::HdrLog;
using tools_test::Outcome;
using tools_test::Words;

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
  const HdrLog log(tools_test::read_file(out / "latencies.hlog"), 1);
  ASSERT_EQ(log.intervals.size(), 1u);
  EXPECT_TRUE(log.intervals[0].tag.starts_with("Tag=")) << log.intervals[0].tag;
  EXPECT_TRUE(log.intervals[0].tag.ends_with(".handler.total.method-9")) << log.intervals[0].tag;
  EXPECT_EQ(log.intervals[0].longest, 34359738368.0);
  EXPECT_EQ(log.intervals[0].counts, expected);
  const std::string json = stat({"--json"});
  EXPECT_TRUE(nlohmann::json::accept(json)) << json;
  EXPECT_TRUE(has(json, "\"work\":\"handler\",\"stage\":\"total\",\"method\":9,")) << json;
  const PrometheusText text(stat({"--prometheus"}));
  EXPECT_TRUE(text.families().contains(std::string(spinwire::kLatencyMetric.name)));
  EXPECT_EQ(text.count("spinwire_latency_seconds"), 4u);
  EXPECT_EQ(text.count("spinwire_latency_seconds_count"), 1u);
  EXPECT_EQ(text.count("spinwire_latency_seconds_sum"), 1u);
  const std::string screen = stat({std::to_string(::getpid()), "--once"});
  EXPECT_TRUE(has(screen, "handler.total.method-9")) << screen;
}

}  // namespace
}  // namespace stat_test
