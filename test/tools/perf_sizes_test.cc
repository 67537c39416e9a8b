// spinwire-perf over all sizes, and pools and queues that follow what is measured.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tools/programs.h"

namespace tools_test {

constexpr std::uint64_t kLargestSize = std::uint64_t{8} << 20;

/// The first numbers of a table's lines.
std::vector<std::uint64_t> sizes_of_table(const std::string& text) {
  std::vector<std::uint64_t> sizes;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::uint64_t size = 0;
    if (words >> size) sizes.push_back(size);
  }
  return sizes;
}

std::vector<std::uint64_t> all_sizes() {
  std::vector<std::uint64_t> sizes;
  for (std::uint64_t size = 1; size <= kLargestSize; size *= 2) sizes.push_back(size);
  return sizes;
}

Outcome run_perf(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return run("spinwire-perf", words);
}

const Words kShort{"--count", "20", "--warmup", "4", "--one-thread"};

TEST_F(Tools, AllSizesExcludeOneSize) {
  for (const Words& words : {Words{"lat", "-a", "--size", "8"}, Words{"bw", "-a", "--histogram"}}) {
    const Outcome o = run_perf(words, kShort);
    EXPECT_EQ(o.code, 2) << testing::PrintToString(words);
    EXPECT_NE(o.err, "");
  }
}

TEST_F(SlowTools, AllSizesAreLinesOfATable) {
  const std::vector<Words> cases{{"lat", "-a"}, {"rpc", "-a"}};
  for (const Words& words : cases) {
    const Outcome o = run_perf(words, kShort);
    EXPECT_EQ(o.code, 0) << o.err;
    EXPECT_EQ(sizes_of_table(o.out), all_sizes()) << testing::PrintToString(words) << o.out;
  }
}

TEST_F(SlowTools, AllSizesAreObjectsOfJson) {
  const Outcome o = run_perf({"bw", "-a", "--op", "send", "--json"}, kShort);
  EXPECT_EQ(o.code, 0) << o.err;
  std::vector<std::uint64_t> sizes;
  std::istringstream in(o.out);
  for (std::string line; std::getline(in, line);) {
    const auto result = parse_object(line + '\n');
    (void)expect_report(result, "bw", "send", 20);
    sizes.push_back(result.value("size_bytes", std::uint64_t{0}));
  }
  EXPECT_EQ(sizes, all_sizes());
}

TEST_F(SlowTools, AServerTakesAllSizes) {
  Program server({bin() + "/spinwire-perf", "--port", "0"});
  const std::string address = server.wait_for("listening on ");
  ASSERT_NE(address, "") << server.err();
  const Words there{"127.0.0.1", "--port", address.substr(address.rfind(':') + 1), "--count", "20",
                    "--warmup",  "4"};
  for (const char* test : {"lat", "bw"}) {
    const Outcome o = run_perf({test, "-a"}, there);
    EXPECT_EQ(o.code, 0) << o.err;
    EXPECT_EQ(sizes_of_table(o.out), all_sizes()) << o.out;
  }
  server.signal(SIGTERM);
  EXPECT_EQ(server.wait(), 0) << server.err();
}

TEST_F(Tools, PoolsFollowSizeAndWindow) {
  const std::vector<Words> cases{{"bw", "--op", "send", "--size", "1MiB"},
                                 {"bw", "--op", "send", "--size", "600KiB", "--window", "40"},
                                 {"lat", "--op", "send", "--size", "9MiB", "--window", "3"},
                                 {"bw", "--op", "read", "--size", "1MiB", "--window", "40"},
                                 {"rpc", "--size", "2MiB", "--window", "5"}};
  for (const Words& words : cases) {
    const Outcome o = run_perf(words, kShort);
    EXPECT_EQ(o.code, 0) << testing::PrintToString(words) << o.err;
  }
}

TEST_F(Tools, QueuesFollowTheWindow) {
  for (const char* op : {"send", "write", "read"}) {
    const Outcome o = run("spinwire-perf", {"rate", "--op", op, "--window", "5000", "--count",
                                            "20000", "--one-thread"});
    EXPECT_EQ(o.code, 0) << op << o.err;
  }
}

TEST_F(Tools, PoolsThatTheUserHasSetStay) {
  const Folder folder;
  const std::string path = folder / "small.toml";
  for (const char* text : {"[memory]\nsend_bytes = \"8MiB\"\n", "memory.send_bytes = \"8MiB\"\n"}) {
    std::ofstream(path) << text;
    const Outcome o = run_perf({"bw", "--op", "send", "--size", "1MiB", "--conf", path}, kShort);
    EXPECT_EQ(o.code, 1) << text;
    EXPECT_NE(o.err.find("raise memory.send_bytes"), std::string::npos) << o.err;
  }
}

}  // namespace tools_test
