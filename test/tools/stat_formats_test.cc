// The check of Prometheus' text format finds what is wrong: else it would show nothing about
// spinwire-stat. And the record of metrics: what is renamed, removed or new is found.
#include "tools/stat_formats.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "tools/programs.h"

namespace stat_test {
namespace {

using tools_test::Outcome;
using tools_test::Program;

const std::string kGauge = "# HELP g a gauge\n# TYPE g gauge\n";
const std::string kHistogram = "# HELP h times\n# TYPE h histogram\n";
const std::string kSummary = "# HELP s times\n# TYPE s summary\n";

TEST(PrometheusFormat, GoodTextsAreGood) {
  for (const std::string& text :
       {std::string(), kGauge + "g 1\n", kGauge + "g{a=\"x\"} 1\ng{a=\"y\"} -2.5e3\n",
        kGauge + "# a comment\ng{a=\"\\\\ \\\" \\n\",b=\"}\"} NaN\n",
        "# HELP g with \\\\ and \\n\n# TYPE g gauge\ng 1\n" + kSummary +
            "s{quantile=\"0.5\"} 1\ns{quantile=\"1\"} 2\ns_sum 3\ns_count 2\n",
        kHistogram + "h_bucket{le=\"1\"} 1\nh_bucket{le=\"+Inf\"} 3\nh_sum 9\nh_count 3\n"})
    EXPECT_EQ(PrometheusText::errors_of(text), std::vector<std::string>{}) << text;
}

TEST(PrometheusFormat, EachDefectIsFound) {
  struct Case {
    std::string text;
    const char* error;
  };
  const std::string buckets = "h_bucket{le=\"1\"} 2\nh_bucket{le=\"+Inf\"} 3\n";
  const Case cases[] = {
      {kGauge + "g 1", "the last line has no end"},
      {"g 1\n", "outside of its family"},
      {"# HELP g a gauge\ng 1\n", "before TYPE"},
      {"# TYPE g gauge\n# HELP g a gauge\ng 1\n", "TYPE without HELP"},
      {kGauge + kGauge + "g 1\n", "a second HELP"},
      {"# HELP g a\n# TYPE g gauge\n# TYPE g gauge\ng 1\n", "a second TYPE"},
      {kGauge + "g 1\n# TYPE g gauge\n", "a second TYPE"},
      {kGauge + "g{a=\"1\"} 1\n" + kSummary + "s_sum 1\ns_count 1\ng{a=\"2\"} 1\n",
       "outside of its family"},
      {kGauge + "g 1\n# HELP i x\n# TYPE i gauge\ni 1\n" + kGauge + "g{a=\"2\"} 1\n", "has ended"},
      {kGauge, "without TYPE or samples"},
      {"# HELP g a gauge\n# TYPE g gaga\ng 1\n", "no such type"},
      {"# HELP g a \\t gauge\n# TYPE g gauge\ng 1\n", "a bad escape"},
      {kGauge + "g{a=\"1\"} 1\ng{a=\"1\"} 2\n", "a series twice"},
      {kGauge + "g{a=\"1\",b=\"2\"} 1\ng{b=\"2\",a=\"1\"} 2\n", "a series twice"},
      {kGauge + "g{a=\"1\",a=\"2\"} 1\n", "a label twice"},
      {kGauge + "g{a=\"\\x\"} 1\n", "a bad escape"},
      {kGauge + "g{a=\"a\"b\"} 1\n", "no comma"},
      {kGauge + "g{a=\"1\"b=\"2\"} 1\n", "no comma"},
      {kGauge + "g{a=\"1} 1\n", "does not end"},
      {kGauge + "g{0=\"1\"} 1\n", "no name of a label"},
      {kGauge + "g{__a=\"1\"} 1\n", "no name of a label"},
      {kGauge + "g\n", "no space"},
      {kGauge + "g one\n", "no number"},
      {"# HELP c x\n# TYPE c counter\nc -1\n", "below 0"},
      {kGauge + "g_sum 1\n", "outside of its family"},
      {kSummary + "s{quantile=\"0.5\"} 1\ns_sum 1\n", "no sum or count"},
      {kSummary + "s{quantile=\"2\"} 1\ns_sum 1\ns_count 1\n", "outside of 0 to 1"},
      {kSummary + "s 1\ns_sum 1\ns_count 1\n", "without quantile"},
      {kSummary + "s_bucket{le=\"1\"} 1\n", "outside of its family"},
      {kHistogram + buckets + "h_sum 1\nh_count 4\n", "+Inf is not the count"},
      {kHistogram + "h_bucket{le=\"1\"} 3\nh_sum 1\nh_count 3\n", "no bucket +Inf"},
      {kHistogram + "h_bucket{le=\"1\"} 4\nh_bucket{le=\"+Inf\"} 3\nh_sum 1\nh_count 3\n",
       "do not add up"},
      {kHistogram + "h_bucket{le=\"2\"} 1\nh_bucket{le=\"1\"} 2\nh_bucket{le=\"+Inf\"} 3\n"
                    "h_sum 1\nh_count 3\n",
       "out of order"},
      {kHistogram + "h_bucket 1\nh_sum 1\nh_count 3\n", "without le"},
      {kHistogram + "h 1\n" + buckets + "h_sum 1\nh_count 3\n", "outside of its family"},
  };
  for (const Case& test : cases) {
    const std::vector<std::string> errors = PrometheusText::errors_of(test.text);
    ASSERT_FALSE(errors.empty()) << test.text;
    std::string all;
    for (const std::string& error : errors) all += error + '\n';
    EXPECT_NE(all.find(test.error), std::string::npos) << test.text << all;
  }
}

// ---- the record of metrics --------------------------------------------------------------------

Outcome check_metrics(const std::string& record) {
  Program check({"tools/dev/check_metrics.sh", tools_test::bin() + "/spinwire-stat", record});
  const int code = check.wait();
  return {code, check.out(), check.err()};
}

TEST(MetricRecord, AgreesWithTheLibrary) {
  const Outcome o = check_metrics("tools/dev/metrics.txt");
  EXPECT_EQ(o.code, 0) << o.err;
}

TEST(MetricRecord, WhatIsRenamedRemovedChangedOrNewIsFound) {
  const std::string record = tools_test::read_file("tools/dev/metrics.txt");
  struct Case {
    std::string from, to, error;
  };
  for (const Case& test :
       {Case{"engine spinwire_polls_total counter -\n", "engine spinwire_poll_total counter -\n",
             "-engine spinwire_poll_total counter -"},
        Case{"file spinwire_up gauge -\n", "", "+file spinwire_up gauge -"},
        Case{"file spinwire_up gauge -\n", "file spinwire_up gauge -\nfile spinwire_down gauge -\n",
             "-file spinwire_down gauge -"},
        Case{"spinwire_latency_seconds summary", "spinwire_latency_seconds histogram",
             "+latency spinwire_latency_seconds summary seconds"},
        Case{"pool pool label -\n", "pool name label -\n", "-pool name label -"}}) {
    const std::size_t at = record.find(test.from);
    ASSERT_NE(at, std::string::npos) << test.from;
    const tools_test::Folder folder;
    std::ofstream(folder / "record") << std::string(record).replace(at, test.from.size(), test.to);
    const Outcome o = check_metrics(folder / "record");
    EXPECT_EQ(o.code, 1) << test.to;
    EXPECT_NE(o.err.find(test.error), std::string::npos) << o.err;
    EXPECT_NE(o.err.find("make metrics-record"), std::string::npos) << o.err;
  }
}

}  // namespace
}  // namespace stat_test
