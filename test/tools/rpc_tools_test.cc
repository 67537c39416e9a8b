// Programs that make remote calls: spinwire-perf's rpc test, and the examples.
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "../../tools/examples/kv-store/kv_table.h"
#include "eventually.h"
#include "tools/process_memory.h"
#include "tools/programs.h"

namespace tools_test {

/// Runs the test with these options and checks its report.
void expect_calls(const Words& more, const Words& where = {"--one-thread"}) {
  Words words{"rpc"};
  words.insert(words.end(), where.begin(), where.end());
  for (const char* word : {"--count", "500", "--warmup", "50", "--json"}) words.emplace_back(word);
  words.insert(words.end(), more.begin(), more.end());
  SCOPED_TRACE(testing::PrintToString(words));
  const Outcome o = run("spinwire-perf", words);
  ASSERT_EQ(o.code, 0) << o.err;
  const auto result = parse_object(o.out);
  const double rate = expect_report(result, "rpc", "call", 500);
  const double bytes = result.value("size_bytes", 0.0) + result.value("reply_size_bytes", 0.0);
  EXPECT_NEAR(result.value("gbit_per_s", 0.0), rate * bytes * 8 / 1000, rate * bytes / 1000);
  const bool both = std::find(words.begin(), words.end(), "--symmetric") != words.end();
  EXPECT_EQ(result.value("served_mops", 0.0) > 0, both);
}

TEST_F(Tools, CallsOfAnyShapeAreReported) {
  expect_calls({});
  expect_calls({"--window", "1"});
  expect_calls({"--window", "60", "--batch", "3"});
  expect_calls({"--sessions", "5", "--window", "80"});
  expect_calls({"--sessions", "20", "--window", "4"});
  expect_calls({"--sessions", "20", "--window", "4", "--no-prefetch"});
  expect_calls({"--post", "now"});
  expect_calls({"--post", "defer", "--window", "1"});
  expect_calls({"--symmetric"});
  for (const char* size : {"1", "7", "8", "15", "48", "49", "4000"}) expect_calls({"--size", size});
  expect_calls({"--size", "5", "--reply-size", "1000"});
  expect_calls({"--size", "1000", "--reply-size", "5", "--symmetric"});
}

TEST_F(Tools, LongCallsAreReportedAsWell) {
  expect_calls({"--size", "100KiB", "--reply-size", "40", "--window", "1"});
  expect_calls({"--size", "40", "--reply-size", "100KiB"});
  expect_calls({"--size", "5000", "--reply-size", "4096", "--sessions", "3", "--batch", "2"});
  expect_calls({"--size", "3MiB", "--window", "2", "--symmetric"});
}

TEST_F(Tools, CallsThatAreTooLongAreRefusedWithTheLimit) {
  const Outcome o = run("spinwire-perf", {"rpc", "--one-thread", "--size", "1GiB"});
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.err.find("exceed"), std::string::npos) << o.err;
}

TEST_F(SlowTools, PerfServesCallersAndOthersInTurn) {
  Program server({bin() + "/spinwire-perf", "--port", "0"});
  const std::string address = server.wait_for("listening on ");
  ASSERT_NE(address, "") << server.err();
  const Words there{"127.0.0.1", "--port", address.substr(address.rfind(':') + 1)};
  expect_calls({}, there);
  EXPECT_EQ(server.wait_for("rpc, 32 bytes, window 32, 550 calls: "), "all data as sent");
  expect_calls({"--symmetric", "--sessions", "3", "--window", "8"}, there);
  EXPECT_EQ(server.wait_for("rpc, 32 bytes, window 8, 550 calls: "), "all data as sent");
  expect_calls({"--size", "20KiB", "--reply-size", "70KiB", "--window", "8"}, there);
  EXPECT_EQ(server.wait_for("rpc, 20480 bytes, window 8, 550 calls: "), "all data as sent");
  const Outcome o = run("spinwire-perf", {"lat", there[0], there[1], there[2], "-n", "300"});
  EXPECT_EQ(o.code, 0) << o.err;
  expect_calls({"--window", "1"}, there);
  server.signal(SIGTERM);
  EXPECT_EQ(server.wait(), 0) << server.err();
}

TEST_F(SlowTools, ACallerThatLeavesMakesRoomForTheNext) {
  Program server({bin() + "/spinwire-perf", "--port", "0"});
  const std::string address = server.wait_for("listening on ");
  const Words there{"127.0.0.1", "--port", address.substr(address.rfind(':') + 1)};
  Program first({bin() + "/spinwire-perf", "rpc", there[0], there[1], there[2], "--count",
                 "1000000000000", "--warmup", "0"});
  EXPECT_EQ(server.wait_for("measuring for "), "a caller");
  first.signal(SIGTERM);
  EXPECT_EQ(first.wait(), 1);
  EXPECT_NE(first.err().find("interrupted"), std::string::npos) << first.err();
  expect_calls({}, there);
}

TEST_F(SlowTools, CallersNameALostServer) {
  Program server({bin() + "/spinwire-perf", "--port", "0"});
  const std::string address = server.wait_for("listening on ");
  const std::string port = address.substr(address.rfind(':') + 1);
  Program client({bin() + "/spinwire-perf", "rpc", "127.0.0.1", "--port", port, "--count",
                  "1000000000000", "--warmup", "0"});
  EXPECT_EQ(server.wait_for("measuring for "), "a caller");
  server.signal(SIGKILL);
  EXPECT_EQ(client.wait(), 1);
  EXPECT_NE(client.err().find(address), std::string::npos) << client.err();
}

// ---- kv-store ---------------------------------------------------------------------------------

TEST_F(Tools, TheStoresDemoChecksWhatItReads) {
  const Outcome o = run("kv-store", {"demo", "--count", "3000"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.out.find("3000 operations"), std::string::npos) << o.out;
  EXPECT_NE(o.out.find("every value whole"), std::string::npos) << o.out;
}

TEST_F(SlowTools, TheStoreKeepsWhatWasPut) {
  Program server({bin() + "/kv-store", "serve", "--address", "127.0.0.1:0"});
  const std::string at = server.wait_for("listening on ");
  ASSERT_NE(at, "") << server.err();
  EXPECT_EQ(run("kv-store", {"put", "a key", "a value", "-a", at}).code, 0);
  EXPECT_EQ(run("kv-store", {"put", "empty", "", "-a", at}).code, 0);
  EXPECT_EQ(run("kv-store", {"get", "a key", "-a", at}).out, "a value\n");
  EXPECT_EQ(run("kv-store", {"get", "empty", "-a", at}).out, "\n");
  EXPECT_EQ(run("kv-store", {"put", "a key", std::string(448, 'v'), "-a", at}).code, 0);
  EXPECT_EQ(run("kv-store", {"get", "a key", "-a", at}).out, std::string(448, 'v') + "\n");
  const Outcome none = run("kv-store", {"get", "another", "-a", at});
  EXPECT_EQ(none.code, 1);
  EXPECT_NE(none.err.find("there is no another"), std::string::npos) << none.err;
  server.signal(SIGTERM);
  EXPECT_EQ(server.wait(), 0) << server.err();
}

TEST_F(SlowTools, ABucketThatIsFullIsTold) {
  Program server({bin() + "/kv-store", "serve", "--address", "127.0.0.1:0", "--buckets", "1"});
  const std::string at = server.wait_for("listening on ");
  for (const char* key : {"1", "2", "3", "4"})
    EXPECT_EQ(run("kv-store", {"put", key, "v", "-a", at}).code, 0);
  const Outcome o = run("kv-store", {"put", "5", "v", "-a", at});
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.err.find("bucket is full"), std::string::npos) << o.err;
  EXPECT_EQ(run("kv-store", {"put", "3", "w", "-a", at}).code, 0);
  EXPECT_EQ(run("kv-store", {"get", "3", "-a", at}).out, "w\n");
  // Until a key is deleted.
  EXPECT_EQ(run("kv-store", {"delete", "2", "-a", at}).code, 0);
  EXPECT_EQ(run("kv-store", {"get", "2", "-a", at}).code, 1);
  const Outcome again = run("kv-store", {"delete", "2", "-a", at});
  EXPECT_EQ(again.code, 1);
  EXPECT_NE(again.err.find("2 was not deleted: the key does not exist"), std::string::npos)
      << again.err;
  EXPECT_EQ(run("kv-store", {"put", "5", "v", "-a", at}).code, 0);
  EXPECT_EQ(run("kv-store", {"get", "5", "-a", at}).out, "v\n");
  EXPECT_EQ(run("kv-store", {"get", "4", "-a", at}).out, "v\n");
}

TEST_F(SlowTools, OneStoreTakesManyBenches) {
  Program server({bin() + "/kv-store", "serve", "--address", "127.0.0.1:0"});
  const std::string at = server.wait_for("listening on ");
  const Words words{"bench", "-a", at, "--count", "20000", "--keys", "3", "--puts", "50"};
  const auto with_size = [&words](const char* size) {
    Words more = words;
    for (const char* word : {"--size", size}) more.emplace_back(word);
    return more;
  };
  for (const char* size : {"400", "400", "16"}) {  // one after another
    const Outcome o = run("kv-store", with_size(size));
    EXPECT_EQ(o.code, 0) << o.err;
  }
  Words first{bin() + "/kv-store"};  // and two at once
  for (const std::string& word : with_size("100")) first.push_back(word);
  Program other(first);
  const Outcome o = run("kv-store", with_size("448"));
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(other.wait(), 0) << other.err();
  // A value that no bench has put is detected.
  EXPECT_EQ(run("kv-store", {"put", "bench 1", std::string(400, 'x'), "-a", at}).code, 0);
  const Outcome wrong = run("kv-store", {"bench", "-a", at, "--count", "1000", "--puts", "0"});
  EXPECT_EQ(wrong.code, 1);
  EXPECT_NE(wrong.err.find("bench 1 has a value that was never put"), std::string::npos)
      << wrong.err;
}

/// Waits until a process's main thread has run for so long on processors, or has ended.
bool runs_for(pid_t pid, std::chrono::nanoseconds time) {
  const auto begun = processor_time(pid);
  return waiting::eventually(
      [&] {
        const auto now = processor_time(pid);
        return !begun || !now || *now - *begun >= time;
      },
      kLimit);
}

/// How many READs a run of `kv-store bench` repeated.
int repeated_reads(const std::string& report) {
  const std::size_t at = report.find(" READs met a slot being written");
  if (at == std::string::npos) return -1;
  return std::stoi(report.substr(report.rfind('\n', at) + 1));
}

/// A slot of a running store, whose value the test puts again in two halves, as the store does if
/// it is stopped in between.
class HalfPut {
 public:
  HalfPut(pid_t store, std::string_view key) : memory_(store) {
    constexpr std::size_t kBeforeKey = offsetof(kv::Slot, key);
    const std::uint64_t at = memory_.find(key, [&](std::uint64_t found) {
      return memory_.read(found - kBeforeKey, std::as_writable_bytes(std::span(&after_, 1))) &&
             kv::is_whole(after_) && kv::holds(after_, key);
    });
    if (at == 0) return;
    address_ = at - kBeforeKey;
    kv::write(after_, key, std::string(after_.value.data(), after_.value_size));
  }
  [[nodiscard]] std::uint64_t address() const { return address_; }
  bool begin() {
    kv::Slot half = after_;
    --half.version;
    std::fill(half.value.begin() + half.value_size / 2, half.value.end(), '?');
    return memory_.write(address_, std::as_bytes(std::span(&half, 1)));
  }
  /// The version last, as the store does.
  bool finish() {
    const auto bytes = std::as_bytes(std::span(&after_, 1));
    constexpr std::size_t kVersion = sizeof after_.version;
    return memory_.write(address_ + kVersion, bytes.subspan(kVersion)) &&
           memory_.write(address_, bytes.first(kVersion));
  }

 private:
  ProcessMemory memory_;
  std::uint64_t address_ = 0;
  kv::Slot after_{};
};

/// Lets `reader` begin amid a put, stops the store there, and ends the put once the reader has read
/// for a while. False: on a busy machine the reader did not begin to read before the end of the
/// put, or had no time to wait for it.
bool read_amid_put(const Program& store, const Words& reader) {
  HalfPut put(store.pid(), "bench 0");
  const std::string table = file_mapped_at(store.pid(), put.address());
  EXPECT_NE(table, "") << "the store has no such key";
  EXPECT_TRUE(put.begin());
  Program reads(reader);
  // The first READ maps the table, unless it lies in memory that the reader needs to connect. A
  // process that has ended has mapped nothing.
  EXPECT_TRUE(waiting::eventually(
      [&] {
        const std::string maps = read_process_file(reads.pid(), "maps");
        return maps.empty() || maps.find(table) != std::string::npos;
      },
      kLimit));
  store.signal(SIGSTOP);
  EXPECT_TRUE(waiting::eventually([&] { return is_stopped(store.pid()); }, kLimit));
  EXPECT_TRUE(runs_for(reads.pid(), std::chrono::milliseconds(2)));
  EXPECT_TRUE(put.finish());
  store.signal(SIGCONT);
  const int code = reads.wait();
  if (reads.err().find("bench 0 cannot be read: timed_out") != std::string::npos) return false;
  EXPECT_EQ(code, 0) << reads.err();
  const int repeated = repeated_reads(reads.out());
  EXPECT_GE(repeated, 0) << reads.out();
  return repeated > 0;
}

TEST_F(SlowTools, AServerThatStopsAmidAPutIsWaitedFor) {
  Program server({bin() + "/kv-store", "serve", "--address", "127.0.0.1:0"});
  const std::string at = server.wait_for("listening on ");
  const Words bench{"bench", "-a", at, "--count", "1000", "--keys", "1", "--puts"};
  Words puts = bench;
  puts.emplace_back("100");
  ASSERT_EQ(run("kv-store", puts).code, 0);
  Words reads{"/usr/bin/env", "SPINWIRE_CONNECTIONS_PEER_TIMEOUT=120s", bin() + "/kv-store"};
  reads.insert(reads.end(), bench.begin(), bench.end());
  reads.emplace_back("0");
  bool waited = false;
  for (int i = 0; i < 5 && !waited && !HasFailure(); ++i) waited = read_amid_put(server, reads);
  EXPECT_TRUE(waited);
}

// ---- market-feed ------------------------------------------------------------------------------

TEST_F(Tools, TheFeedsOrdersAreAllFilled) {
  const Outcome o = run("market-feed", {"--count", "2000", "--interval", "1us"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.out.find("2000 ticks"), std::string::npos) << o.out;
  for (const char* word : {"tick to order", "order round trip", "p50", "p99.9"})
    EXPECT_NE(o.out.find(word), std::string::npos) << word << o.out;
}

TEST_F(Tools, AProcessorThatIsNotThereIsNamed) {
  const Outcome o = run("market-feed", {"--count", "10", "--cpu", "0,1000"});
  EXPECT_EQ(o.code, 1);
  EXPECT_NE(o.err.find("CPU 1000"), std::string::npos) << o.err;
  for (const char* end : {"exchange", "strategy"}) {
    const Outcome alone = run("market-feed", {end, "127.0.0.1:1", "--cpu", "1000"});
    EXPECT_EQ(alone.code, 1);
    EXPECT_NE(alone.err.find("CPU 1000"), std::string::npos) << alone.err;
  }
}

TEST_F(SlowTools, EachEndOfTheFeedCanBeAlone) {
  // The shell's first processor: there may be only one.
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  ASSERT_EQ(::sched_getaffinity(0, sizeof allowed, &allowed), 0);
  int cpu = 0;
  while (!CPU_ISSET(static_cast<unsigned>(cpu), &allowed)) ++cpu;
  const std::string number = std::to_string(cpu);
  Program exchange({bin() + "/market-feed", "exchange", "127.0.0.1:0", "--cpu", number});
  const std::string at = exchange.wait_for("listening on ");
  ASSERT_NE(at, "") << exchange.err();
  const Outcome o = run("market-feed", {"strategy", at, "--cpu", number, "--count", "50"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_NE(o.out.find("50 ticks"), std::string::npos) << o.out;
  EXPECT_EQ(exchange.wait(), 0) << exchange.err();
}

// ---- simulations ------------------------------------------------------------------------------

// Whatever ends a run, its seed is reported. Here it exceeds the process's CPU time.
TEST_F(Tools, ARunThatDiesIsNamed) {
  for (const char* jobs : {"1", "2"}) {
    Program shell({"/bin/sh", "-c",
                   "ulimit -c 0 && ulimit -t 1 && exec " + bin() +
                       "/spinwire-sim --seed 7 --runs 100000 --jobs " + jobs});
    EXPECT_EQ(shell.wait(), 1);
    EXPECT_NE(shell.err().find("the process that ran it died of signal"), std::string::npos)
        << shell.err();
    EXPECT_NE(shell.err().find("again: spinwire-sim --seed "), std::string::npos) << shell.err();
    EXPECT_NE(shell.out().find(" runs passed, "), std::string::npos) << shell.out();
  }
}

TEST_F(Tools, OneSeedOfTheExampleOfATest) {
  const Outcome o = run("sim-test", {"18446744073709551615"});
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(o.out.substr(0, 33), "seed 18446744073709551615: trace ") << o.out;
  EXPECT_EQ(run("sim-test", {"18446744073709551615"}).out, o.out);
}

}  // namespace tools_test
