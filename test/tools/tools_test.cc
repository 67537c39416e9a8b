// The command-line tools and examples, as a user runs them.
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <regex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "../../tools/common/histogram.h"
#include "control/loopback.h"
#include "tools/programs.h"

namespace tools_test {

// ---- command lines ----------------------------------------------------------------------------

TEST_F(Tools, HelpGoesToStdout) {
  for (const char* name : {"spinwire-perf", "echo", "file-push", "tour", "kv-store", "market-feed",
                           "gateway", "replicated-log", "log-client"}) {
    const Outcome o = run(name, {"--help"});
    EXPECT_EQ(o.code, 0) << name;
    EXPECT_NE(o.out.find("Usage: " + std::string(name)), std::string::npos) << o.out;
    EXPECT_EQ(o.err, "") << name;
  }
}

TEST_F(Tools, MisuseIsExitCodeTwo) {
  const std::vector<std::pair<const char*, Words>> cases{
      {"spinwire-perf", {"--bogus"}},
      {"spinwire-perf", {"speed"}},
      {"spinwire-perf", {"lat", "--op", "push", "--one-thread"}},
      {"spinwire-perf", {"rate", "--op", "pong", "--one-thread"}},
      {"spinwire-perf", {"lat", "--op", "pong", "--window", "2", "--one-thread"}},
      {"spinwire-perf", {"bw", "--op", "atomic", "--one-thread"}},
      {"spinwire-perf", {"lat", "--op", "atomic", "--size", "4", "--one-thread"}},
      {"spinwire-perf", {"lat", "--op", "atomic", "--all", "--one-thread"}},
      {"spinwire-perf", {"lat", "--size", "0", "--one-thread"}},
      {"spinwire-perf", {"lat", "--post", "later", "--one-thread"}},
      {"spinwire-perf", {"rate", "--no-prefetch", "--one-thread"}},
      {"spinwire-perf", {"lat", "127.0.0.1", "--one-thread"}},
      {"spinwire-perf", {"rpc", "--op", "send", "--one-thread"}},
      {"spinwire-perf", {"rpc", "--batch", "33", "--one-thread"}},
      {"spinwire-perf", {"rpc", "--window", "65", "--one-thread"}},
      {"spinwire-perf", {"rpc", "--sessions", "0", "--one-thread"}},
      {"spinwire-perf", {"rate", "--batch", "2", "--one-thread"}},
      {"spinwire-perf", {"lat", "--symmetric", "--one-thread"}},
      {"echo", {}},
      {"echo", {"both", "--bogus"}},
      {"tour", {"--bogus"}},
      {"file-push", {"receive"}},
      {"file-push", {"send", "file"}},
      {"kv-store", {}},
      {"kv-store", {"put", "key"}},
      {"kv-store", {"get", std::string(41, 'k')}},
      {"kv-store", {"put", "key", std::string(449, 'v')}},
      {"kv-store", {"serve", "--buckets", "1000"}},
      {"kv-store", {"demo", "--size", "15"}},
      {"kv-store", {"delete"}},
      {"kv-store", {"get", ""}},
      {"market-feed", {"--count", "0"}},
      {"gateway", {}},
      {"gateway", {"serve", "127.0.0.1:0"}},
      {"gateway", {"demo", "--idle", "sleep"}},
      {"replicated-log", {"--id", "0", "--file", "log"}},
      {"replicated-log", {"--id", "0", "--nodes", "a,b,c", "--file", "log", "--records", "9000"}},
      {"replicated-log", {"--id", "3", "--file", "log", "--nodes", "a,b,c"}},
      {"log-client", {"append"}},
      {"log-client", {"read"}},
      {"market-feed", {"--cpu", "0"}},
      {"market-feed", {"strategy", "--cpu", "0,1"}},
      {"spinwire-perf", {"lat", "--count", "-1", "--one-thread"}},
      {"spinwire-sim", {"--runs", "0"}},
      {"spinwire-new-project", {}},
      {"spinwire-new-project", {"--bogus"}},
      {"sim-test", {"abc"}},
      {"sim-test", {"-1"}},
      {"sim-test", {"1", "2"}},
  };
  for (const auto& [name, arguments] : cases) {
    const Outcome o = run(name, arguments);
    EXPECT_EQ(o.code, 2) << name << ' ' << testing::PrintToString(arguments);
    EXPECT_EQ(o.out, "");
    EXPECT_NE(o.err, "") << name << ' ' << testing::PrintToString(arguments);
    EXPECT_LT(o.err.size(), 400u) << name << ' ' << o.err;
  }
}

TEST_F(Tools, AProjectIsMadeInANewOrEmptyFolderOnly) {
  const Folder folder;
  const std::string path = folder / "first";
  EXPECT_EQ(run("spinwire-new-project", {path}).code, 0);
  EXPECT_NE(read_file(path + "/Makefile").find("\nfirst: main.cc\n"), std::string::npos);
  EXPECT_EQ(read_file(path + "/main.cc").find("@NAME@"), std::string::npos);
  std::ofstream(path + "/main.cc") << "mine";
  const Outcome again = run("spinwire-new-project", {path});
  EXPECT_EQ(again.code, 1);
  EXPECT_NE(again.err.find("is not empty"), std::string::npos) << again.err;
  EXPECT_EQ(read_file(path + "/main.cc"), "mine");
  for (const char* name : {"a b", "1st", "all", "$x"}) {
    EXPECT_EQ(run("spinwire-new-project", {folder / name}).code, 1) << name;
    EXPECT_FALSE(std::filesystem::exists(folder / name)) << name;
  }
}

/// What tools/completion.bash makes of a line; its last word is the one to complete.
std::string completed(const std::string& line) {
  Words words{"/bin/bash", "-c",
              "source tools/completion.bash; COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); "
              "rule=$(complete -p \"${1##*/}\") || exit; rule=${rule##*-F }; "
              "${rule%% *} \"$1\" \"${COMP_WORDS[COMP_CWORD]}\" \"${COMP_WORDS[COMP_CWORD - 1]}\"; "
              "echo \"${COMPREPLY[*]}\"",
              "bash"};
  std::istringstream text(line);
  for (std::string word; text >> word;) words.push_back(word == "''" ? "" : word);
  words[4] = bin() + '/' + words[4];
  Program program(words);
  EXPECT_EQ(program.wait(), 0) << program.err();
  return program.out();
}

TEST_F(Tools, BashCompletesOptionsValuesAndSubcommands) {
  EXPECT_EQ(completed("spinwire-perf --warm"), "--warmup\n");
  EXPECT_EQ(completed("spinwire-perf --op w"), "write\n");
  EXPECT_EQ(completed("spinwire-perf ''"), "bw lat rate rpc\n");
  EXPECT_EQ(completed("spinwire-doctor pl"), "plan\n");
  EXPECT_EQ(completed("spinwire-doctor plan --message"), "--message-size\n");
  EXPECT_EQ(completed("spinwire-perf --no-such"), "\n");
}

TEST_F(Tools, BashCompletesTheCommandThatRunsOnTheEmbeddedDevice) {
  EXPECT_EQ(completed("softverbs-preload mkfif"), "mkfifo\n");
  EXPECT_EQ(completed("softverbs-preload --h"), "--help\n");
  EXPECT_EQ(completed("softverbs-preload mkfifo --no-such"), "\n");
}

TEST_F(Tools, BadConfNamesFileAndLine) {
  const Folder folder;
  const std::string path = folder / "bad.toml";
  std::ofstream(path) << "[queues]\nsend_depth = 64\nsend_deep = 64\n";
  const Outcome o = run("spinwire-perf", {"lat", "--one-thread", "--conf", path});
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.err.find(path), std::string::npos) << o.err;
  EXPECT_NE(o.err.find(":3:"), std::string::npos) << o.err;
  EXPECT_EQ(o.out, "");
}

TEST_F(Tools, ServerThatIsNotThereIsNamed) {
  const Outcome o = run("spinwire-perf", {"lat", "127.0.0.1", "-p", "1", "--wait", "0.1"});
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.err.find("127.0.0.1:1"), std::string::npos) << o.err;
}

TEST_F(Tools, TimesOfOptionsHaveUnits) {
  const Outcome o = run("spinwire-perf", {"lat", "127.0.0.1", "-p", "1", "--wait", "50ms"});
  EXPECT_EQ(o.code, 1) << o.err;
  for (const char* bad : {"50 parsecs", "2d", "1441min", "-1s"}) {
    EXPECT_EQ(run("spinwire-perf", {"lat", "127.0.0.1", "--wait", bad}).code, 2) << bad;
    EXPECT_EQ(run("spinwire-stat", {"--once", "--interval", bad}).code, 2) << bad;
  }
  EXPECT_EQ(run("spinwire-stat", {"--list", "--interval", "50ms"}).code, 0);
}

/// A percentile that a tool prints, without a unit behind it; empty: each has one.
std::string time_without_unit(const std::string& text) {
  const std::regex times("(min|max|p[0-9.]+):? +[0-9.]+(?! (ns|us|ms|s)\\b)[^0-9.].*");
  std::smatch found;
  return std::regex_search(text, found, times) ? found.str() : "";
}

TEST_F(Tools, EachTimeHasItsUnit) {
  EXPECT_NE(time_without_unit("  min 1.5  p50 2 us\n"), "");
  EXPECT_EQ(time_without_unit("  min 1.5 us  p50 2 us\n"), "");
  const std::vector<std::pair<const char*, Words>> programs{
      {"spinwire-perf", {"lat", "--one-thread", "-n", "100"}},
      {"spinwire-perf", {"lat", "--one-thread", "-n", "100", "--histogram"}},
      {"spinwire-perf", {"rpc", "--one-thread", "-n", "100", "--warmup", "1"}},
      {"echo", {"both", "--count", "100"}},
      {"kv-store", {"demo", "--count", "100"}}};
  for (const auto& [name, words] : programs) {
    const Outcome o = run(name, words);
    EXPECT_EQ(o.code, 0) << o.err;
    EXPECT_NE(o.out.find("p50"), std::string::npos) << o.out;
    EXPECT_EQ(time_without_unit(o.out), "") << name;
  }
}

TEST_F(Tools, DeviceOptionWinsOverTheConfiguration) {
  const Outcome o = run("spinwire-perf", {"lat", "--one-thread", "--device", "nosuch0"});
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.err.find("nosuch0"), std::string::npos) << o.err;
}

// ---- spinwire-perf in one thread --------------------------------------------------------------

void expect_results(const std::string& test, const std::string& op, const Words& more) {
  Words words{test, "--op", op, "--one-thread", "--count", "300", "--warmup", "20", "--json"};
  words.insert(words.end(), more.begin(), more.end());
  SCOPED_TRACE(testing::PrintToString(words));
  const Outcome o = run("spinwire-perf", words);
  ASSERT_EQ(o.code, 0) << o.err;
  const auto result = parse_object(o.out);
  (void)expect_report(result, test, op, 300);
  EXPECT_EQ(result.value("device", ""), "softverbs");
  for (const char* key : {"size_bytes", "window", "gbit_per_s"})
    EXPECT_GT(result.value(key, 0.0), 0) << key;
}

TEST_F(Tools, EveryTestAndOperationReports) {
  for (const char* test : {"lat", "rate", "bw"}) {
    for (const char* op : {"send", "write", "read"}) expect_results(test, op, {});
  }
  expect_results("lat", "atomic", {});
  expect_results("rate", "atomic", {"--window", "7"});
}

// Below 8 bytes the stamp is cut, below 16 there is only one, from 16 on there is a pattern.
TEST_F(Tools, OddSizesAreChecked) {
  for (const char* op : {"send", "write", "read"}) {
    for (const char* size : {"1", "7", "15", "17", "1000"}) {
      expect_results("lat", op, {"--size", size, "--window", "5"});
    }
  }
}

TEST_F(Tools, PairsOfWritesAreCheckedAtAnySize) {
  for (const char* size : {"1", "7", "8", "15", "32", "5000"})
    expect_results("lat", "pong", {"--size", size});
}

TEST_F(Tools, MessagesBeyondTheLimitAreRefusedWithAdvice) {
  const Outcome o = run("spinwire-perf", {"lat", "--one-thread", "--size", "65MiB"});
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.err.find("connections.max_message_bytes"), std::string::npos) << o.err;
}

TEST_F(Tools, LargeWritesFitBesideTheDialogue) {
  expect_results("bw", "write", {"--size", "4MiB", "--window", "8"});
}

// ---- two processes ----------------------------------------------------------------------------

TEST_F(SlowTools, PerfServesOneClientAfterAnother) {
  Program server({bin() + "/spinwire-perf", "--port", "0"});
  const std::string address = server.wait_for("listening on ");
  ASSERT_NE(address, "") << server.err();
  const std::string port = address.substr(address.rfind(':') + 1);
  for (const char* op : {"send", "write", "read", "pong"}) {
    const Outcome o = run("spinwire-perf", {"lat", "127.0.0.1", "--port", port, "--op", op,
                                            "--count", "300", "--warmup", "10", "--json"});
    EXPECT_EQ(o.code, 0) << op << ": " << o.err;
    EXPECT_EQ(parse_object(o.out).value("op", ""), op) << o.out;
    const std::string line = ": lat " + std::string(op) + ", 32 bytes, window 1, 310 operations: ";
    EXPECT_EQ(server.wait_for(line), "all data as sent") << server.out();
  }
  server.signal(SIGTERM);
  EXPECT_EQ(server.wait(), 0) << server.err();
}

TEST_F(SlowTools, PerfEndsAfterOneClientIfToldTo) {
  Program server({bin() + "/spinwire-perf", "--port", "0", "--once"});
  const std::string address = server.wait_for("listening on ");
  const std::string port = address.substr(address.rfind(':') + 1);
  const Outcome o =
      run("spinwire-perf", {"rate", "localhost", "--port", port, "--count", "2000", "--json"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(server.wait(), 0) << server.err();
}

TEST_F(SlowTools, PerfNamesALostServer) {
  for (const char* op : {"send", "write"}) {
    Program server({bin() + "/spinwire-perf", "--port", "0"});
    const std::string address = server.wait_for("listening on ");
    const std::string port = address.substr(address.rfind(':') + 1);
    // Far more than can be done before the server is gone.
    Program client({bin() + "/spinwire-perf", "rate", "127.0.0.1", "--port", port, "--op", op,
                    "--count", "1000000000000", "--warmup", "0"});
    EXPECT_NE(server.wait_for("measuring for 127.0.0.1:"), "") << client.err();
    server.signal(SIGKILL);
    EXPECT_EQ(client.wait(), 1) << op;
    EXPECT_NE(client.err().find(address), std::string::npos) << client.err();
  }
}

TEST_F(Tools, TheTourHasAllItsStops) {
  const Outcome o = run("tour", {});
  EXPECT_EQ(o.code, 0) << o.err;
  for (const char* stop : {"1. Two engines", "2. Messages", "3. An immediate", "4. Long messages",
                           "5. One-sided", "6. Atomics", "7. Remote memory", "8. A lease",
                           "9. What was", "10. Closing", "books of both engines balance"}) {
    EXPECT_NE(o.out.find(stop), std::string::npos) << stop;
  }
  const Outcome none = run("tour", {"--device", "nosuch0"});
  EXPECT_EQ(none.code, 1);
  EXPECT_NE(none.err.find("nosuch0"), std::string::npos) << none.err;
}

TEST_F(SlowTools, EchoBoth) {
  const Outcome o = run("echo", {"both", "--count", "500", "--size", "100"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.out.find("500 round trips of 100 bytes"), std::string::npos) << o.out;
  for (const char* word : {"min", "p50", "p90", "p99", "p99.9", "max"}) {
    EXPECT_NE(o.out.find(word), std::string::npos) << word;
  }
}

/// The client is still shaking hands.
TEST_F(Tools, AnInterruptedEchoSaysSo) {
  auto silent = loopback::listener();
  Program client({bin() + "/echo", "client", std::string(silent.local().text().view())});
  const auto peer = loopback::accept_one(silent);
  ASSERT_TRUE(peer) << client.err();
  client.signal(SIGTERM);
  EXPECT_EQ(client.wait(), 1);
  EXPECT_EQ(client.err(), "echo: interrupted\n");
}

TEST_F(SlowTools, EchoTakesLongMessages) {
  const Outcome o = run("echo", {"both", "--count", "50", "--size", "100000"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.out.find("50 round trips of 100000 bytes"), std::string::npos) << o.out;
}

/// Pushes a file of `size` bytes and compares.
void expect_pushed(std::size_t size, const Words& more) {
  const Folder folder;
  const std::string from = folder / "from";
  write_random(from, size);
  Words words{"both", from, "--out", folder / "to"};
  words.insert(words.end(), more.begin(), more.end());
  const Outcome o = run("file-push", words);
  ASSERT_EQ(o.code, 0) << o.err;
  EXPECT_TRUE(read_file(from) == read_file(folder / "to")) << size;
  EXPECT_EQ(folder.files(), 2u);  // no partial files
  // Both ends print the same digest.
  const std::size_t first = o.out.find("xxh3-128 ");
  const std::size_t second = o.out.rfind("xxh3-128 ");
  ASSERT_NE(first, second) << o.out;
  EXPECT_EQ(o.out.substr(first, 41), o.out.substr(second, 41));
}

TEST_F(SlowTools, FilePushMovesFilesOfAnySize) {
  expect_pushed(0, {});
  expect_pushed(1, {});
  expect_pushed(3 * (512 << 10), {});
  expect_pushed(1'234'567, {"--block", "4096", "--window", "3"});
  expect_pushed(10'000'001, {"--window", "1"});
}

TEST_F(SlowTools, FilePushTellsBothEndsOfAFullDisk) {
  const Folder folder;
  const std::string from = folder / "from";
  write_random(from, 100'000);
  const std::string full = folder / "full";
  std::filesystem::create_symlink("/dev/full", full);
  const Outcome o = run("file-push", {"both", from, "--out", full});
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.err.find("the receiver gave up: write " + full), std::string::npos) << o.err;
  EXPECT_NE(o.err.find("No space left"), std::string::npos) << o.err;
  // A path that is no regular file is written to, never replaced.
  EXPECT_TRUE(std::filesystem::is_symlink(full));
}

TEST_F(SlowTools, FilePushLeavesNothingOfALostTransfer) {
  const Folder folder;
  const std::string from = folder / "from";
  std::ofstream(from).put('x');
  std::filesystem::resize_file(from, std::uintmax_t{1} << 40);  // takes forever, but no disk space
  Program receiver({bin() + "/file-push", "receive", "127.0.0.1:0", "--out", folder / "to"});
  const std::string address = receiver.wait_for("listening on ");
  {
    const Program sender({bin() + "/file-push", "send", from, address});
    const auto end = Clock::now() + kLimit;
    while (folder.files() < 2 && Clock::now() < end) ::sched_yield();
    EXPECT_EQ(folder.files(), 2u);
  }
  EXPECT_EQ(receiver.wait(), 1);
  EXPECT_NE(receiver.err().find("lost the sender"), std::string::npos) << receiver.err();
  EXPECT_EQ(folder.files(), 1u);
}

// ---- the histogram ----------------------------------------------------------------------------

using spinwire::tools::Histogram;

TEST(ToolsHistogram, EmptyIsZero) {
  const auto h = std::make_unique<Histogram>();
  EXPECT_EQ(h->count(), 0u);
  EXPECT_EQ(h->min(), 0u);
  EXPECT_EQ(h->max(), 0u);
  EXPECT_EQ(h->percentile(50), 0u);
}

TEST(ToolsHistogram, SmallValuesAreExact) {
  const auto h = std::make_unique<Histogram>();
  for (std::uint64_t v = 1; v <= 200; ++v) h->record(v);
  EXPECT_EQ(h->percentile(50), 100u);
  EXPECT_EQ(h->percentile(90), 180u);
  EXPECT_EQ(h->percentile(99.5), 199u);
  EXPECT_EQ(h->percentile(100), 200u);
  EXPECT_EQ(h->percentile(0), 1u);
}

TEST(ToolsHistogram, EveryValueIsWithinOnePercent) {
  for (std::uint64_t v = 1; v < (std::uint64_t{1} << 63); v += v / 37 + 1) {
    const auto h = std::make_unique<Histogram>();
    h->record(0);
    h->record(v);
    h->record(~std::uint64_t{0});
    const auto found = static_cast<double>(h->percentile(50));
    const auto wanted = static_cast<double>(v);
    ASSERT_NEAR(found, wanted, wanted / 100) << v;
    EXPECT_EQ(h->max(), ~std::uint64_t{0});
  }
}

TEST(ToolsHistogram, EndsAreExact) {
  const auto h = std::make_unique<Histogram>();
  for (const std::uint64_t v : {1'000'003ull, 2'000'003ull, 3'000'017ull}) h->record(v);
  EXPECT_EQ(h->min(), 1'000'003u);
  EXPECT_EQ(h->max(), 3'000'017u);
  EXPECT_EQ(h->percentile(1), 1'000'003u);
  EXPECT_EQ(h->percentile(99.9), 3'000'017u);
}

}  // namespace tools_test
