// spinwire-doctor certify, with programs that play a good device and each kind of departure, and
// with the project's own on softverbs.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "tools/programs.h"
#include "tools/stat_formats.h"

namespace tools_test {
namespace {

/// A program with tests; the name of a test says what becomes of it.
constexpr const char* kTests = R"py(#!/usr/bin/python3 -IS
import os, signal, sys, time
declared = os.environ.get("FAKE_TESTS", "Good.One Good.Two").split()
chosen = None
for word in sys.argv[1:]:
    if word.startswith("--gtest_filter=") and "*" not in word:
        chosen = word[15:].split(":")
    if word.startswith("--gtest_output=json:"):
        with open(word[20:], "w") as out:
            for name in declared:
                suite, test = name.split(".")
                folder = "rpc" if suite == "Calls" else "base" if suite == "Other" else "engine"
                out.write('"name": "%s",\n"testsuite": [\n"name": "%s",\n"file": "test\\/%s\\/x.cc",\n'
                          % (suite, test, folder))
if "--gtest_list_tests" in sys.argv:
    for name in declared:
        print("%s.\n  %s  # GetParam() = 1" % tuple(name.split(".")))
    sys.exit(0)
failed = 0
for name in declared:
    if chosen is not None and name not in chosen:
        continue
    print("[ RUN      ] " + name, flush=True)
    verdict = "[       OK ] "
    if name.endswith("Hangs"):
        time.sleep(1000)
    if name.endswith("Dies"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if name.endswith("Fails"):
        print("x.cc:7: Failure\nthe value is 3")
        verdict, failed = "[  FAILED  ] ", 1
    if name.endswith("Skipped"):
        print("x.cc:9: Skipped\nit has no atomics")
        verdict = "[  SKIPPED ] "
    if name.endswith("Known"):
        print("x.cc:9: Skipped\nknown departure: no such check")
        verdict = "[  SKIPPED ] "
    print(verdict + name + " (0 ms)", flush=True)
sys.exit(failed)
)py";

/// A program that measures: a server, or a client that prints figures.
constexpr const char* kMeasures = R"py(#!/usr/bin/python3 -IS
import os, socket, sys
name = os.path.basename(sys.argv[0])
at = ("127.0.0.1", int(sys.argv[sys.argv.index("-p") + 1]))
if "localhost" in sys.argv or "127.0.0.1" in sys.argv:
    socket.create_connection(at)
    if name == "spinwire-perf":
        print('{"p50_ns": %s, "rate_mops": %s}' % (os.environ.get("FAKE_P50", "9000"),
                                                   os.environ.get("FAKE_RATE", "2.1")))
    elif name == "ib_send_bw":
        print(" #bytes #iterations\n 64 40000 0.5 0.5 2.0")
    else:
        print(" #bytes #iterations\n 32 20000 4.0 90.0 5.0 5.5 0.3 6.0 7.0")
else:
    listener = socket.create_server(at)
    listener.accept()
)py";

/// A folder with all programs, as players or, of the tests, the project's own.
class Programs {
 public:
  Programs() {
    write("softverbs-preload", "#!/bin/sh\nexec \"$@\"\n");
    for (const char* name : {"verbs-conformance", "spinwire-tests"}) write(name, kTests);
    for (const char* name : {"spinwire-perf", "ib_send_lat", "ib_write_lat", "ib_send_bw"})
      write(name, kMeasures);
  }
  /// Replaces one by a program of the project.
  void use_own(const std::string& name, const std::string& path) {
    std::filesystem::remove(folder_ / name);
    std::filesystem::create_symlink(path, folder_ / name);
  }
  [[nodiscard]] std::string path() const { return folder_ / "."; }
  void remove(const std::string& name) { std::filesystem::remove(folder_ / name); }
  /// Runs the doctor. `settings` are NAME=VALUE.
  [[nodiscard]] Outcome certify(const Words& settings, const Words& options = {}) const {
    // This program may itself be one of several shards.
    Words words{"/usr/bin/env", "-u", "GTEST_TOTAL_SHARDS", "-u", "GTEST_SHARD_INDEX"};
    words.insert(words.end(), settings.begin(), settings.end());
    words.insert(words.end(), {bin() + "/spinwire-doctor", "certify", "--device", "softverbs",
                               "--programs", folder_ / "."});
    words.insert(words.end(), options.begin(), options.end());
    Program program(words);
    const int code = program.wait();
    return {code, program.out(), program.err()};
  }

 private:
  void write(const std::string& name, const char* text) {
    std::ofstream(folder_ / name) << text;
    std::filesystem::permissions(folder_ / name, std::filesystem::perms::owner_all);
  }

  Folder folder_;
};

void expect_text(const Outcome& ran, const std::string& text) {
  EXPECT_NE(ran.out.find(text), std::string::npos) << text << "\n" << ran.out << ran.err;
}

TEST(Certify, ReportsTheFiguresOfAGoodDevice) {
  const Programs programs;
  const Outcome ran = programs.certify({"FAKE_TESTS=Good.One Calls.Two Other.Three"});
  EXPECT_EQ(ran.code, 0) << ran.out << ran.err;
  expect_text(ran, "device softverbs: no departure\n");
  expect_text(ran, "ok       conformance  passed: 3 tests\n");
  expect_text(ran, "ok       engine       passed: 1 test\n");
  expect_text(ran, "ok       calls        passed: 1 test\n");
  expect_text(ran, "send, round trip of 32 bytes: 9.00 us, ib_send_lat 10.00, ratio 0.900\n");
  expect_text(ran, "write, round trip of 32 bytes: 9.00 us, ib_write_lat 10.00, ratio 0.900\n");
  expect_text(ran, "rate of messages of 64 bytes: 2.10 million/s, ib_send_bw 2.00, ratio 1.050\n");
  expect_text(ran, "medians of 5 runs; ratios 0.900 to 0.900\n");
}

TEST(Certify, NamesEachDepartureAndGoesOn) {
  const Programs programs;
  const Words settings{"FAKE_TESTS=A.First A.Fails A.Dies A.Skipped A.Known A.Last Calls.Fails",
                       "FAKE_P50=12000", "FAKE_RATE=1"};
  const Outcome ran = programs.certify(settings, {});
  EXPECT_EQ(ran.code, 2) << ran.err;
  expect_text(ran, "device softverbs: there are departures\n");
  for (const std::string part : {"conformance ", "engine      "}) {
    expect_text(ran, "error    " + part +
                         " A.Fails failed\n         read: x.cc:7: Failure; the value is 3\n");
    expect_text(ran, "error    " + part +
                         " A.Dies failed\n         read: the program ended with status 139\n");
    expect_text(ran, "note     " + part + " skipped: 1 test\n         read: it has no atomics\n");
    expect_text(ran, "warning  " + part + " 1 case: a known departure: no such check\n");
    expect_text(ran, "ok       " + part + " passed: 2 tests\n");
  }
  expect_text(ran, "error    calls        Calls.Fails failed\n");
  expect_text(ran, "--gtest_filter=Calls.Fails\n");
  expect_text(ran,
              "warning  perftest     send, round trip of 32 bytes: 12.00 us, ib_send_lat 10.00, "
              "ratio 1.200, more than 1.05\n");
  expect_text(ran,
              "warning  perftest     rate of messages of 64 bytes: 1.00 million/s, ib_send_bw "
              "2.00, ratio 0.500, less than 0.95\n");
}

TEST(SlowCertify, AHangingTestFailsAlone) {
  const Programs programs;
  const Outcome ran =
      programs.certify({"FAKE_TESTS=A.First Other.Hangs A.Last"}, {"--test-seconds", "15"});
  EXPECT_EQ(ran.code, 2) << ran.err;
  expect_text(
      ran, "error    conformance  Other.Hangs failed\n         read: it takes longer than 15 s\n");
  expect_text(ran, "ok       conformance  passed: 2 tests\n");
}

TEST(Certify, SaysWhichProgramsAreMissingAndRunsTheOthers) {
  Programs programs;
  for (const char* name : {"verbs-conformance", "spinwire-tests", "ib_send_lat"})
    programs.remove(name);
  const Outcome ran = programs.certify({"PATH=" + programs.path()}, {"--json"});
  EXPECT_EQ(ran.code, 2) << ran.err;
  EXPECT_TRUE(stat_test::Json::is_valid(ran.out)) << ran.out;
  for (const char* name : {"verbs-conformance", "spinwire-tests", "ib_send_lat"})
    expect_text(ran, std::string(name) + " is missing: this part has not run");
  expect_text(ran, "make tests build/bin/verbs-conformance");
  expect_text(ran, "apt-get install perftest");
  expect_text(ran, "ib_write_lat 10.00, ratio 0.900");
}

TEST(SlowCertify, EndsInTime) {
  const Programs programs;
  const Outcome ran =
      programs.certify({"FAKE_TESTS=A.First A.Hangs A.Last"}, {"--minutes", "0.05"});
  EXPECT_EQ(ran.code, 2) << ran.err;  // nothing was measured
  expect_text(ran, "; the time is over\n");
  expect_text(ran, "run:  give --minutes more\n");
}

TEST(Certify, RefusesADeviceThatThisHostLacks) {
  const Outcome ran = run("spinwire-doctor", {"certify", "--device", "mlx5_99", "--json"});
  EXPECT_EQ(ran.code, 2) << ran.err;
  expect_text(ran, "there is no device mlx5_99");
  EXPECT_EQ(run("spinwire-doctor", {"certify"}).code, 3);  // which device?
}

/// The project's own programs have the options and the output that the doctor expects.
TEST(Certify, RunsTheProjectsTests) {
  Programs programs;
  const std::string own = std::filesystem::absolute(bin()).lexically_normal();
  for (const char* name : {"softverbs-preload", "verbs-conformance"})
    programs.use_own(name, own + "/" + name);
  programs.use_own("spinwire-tests", std::filesystem::read_symlink("/proc/self/exe"));
  const Outcome ran =
      programs.certify({}, {"--tests", "EngineClose.*:RpcCalls.EveryRefusal*:Units.*"});
  EXPECT_EQ(ran.code, 0) << ran.out << ran.err;
  expect_text(ran, "ok       engine       passed: ");
  expect_text(ran, "ok       calls        passed: 1 test\n");
  expect_text(ran, "skipped: 2 tests\n         read: RTS to SQD is refused\n");
}

}  // namespace
}  // namespace tools_test
