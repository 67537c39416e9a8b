// spinwire-doctor certify, with programs that play a good device and each kind of departure, and
// with the project's own on softverbs.
#include <gtest/gtest.h>

#include <filesystem>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tools/certify_programs.h"

namespace tools_test {
namespace {

TEST(Certify, ReportsTheFiguresOfAGoodDevice) {
  const CertifyPrograms programs;
  const Outcome ran =
      programs.certify({"FAKE_TESTS=Good.One Calls.Two Other.Three"}, {"--runs", "2"});
  EXPECT_EQ(ran.code, 0) << ran.out << ran.err;
  expect_text(ran, "device softverbs: no departure\n");
  expect_text(ran, "ok       conformance  passed: 3 tests\n");
  expect_text(ran, "ok       engine       passed: 1 test\n");
  expect_text(ran, "ok       calls        passed: 1 test\n");
  expect_text(ran, "send, round trip of 32 bytes: 9.00 us, ib_send_lat 10.00 us, ratio 0.900\n");
  expect_text(ran, "write, round trip of 32 bytes: 9.00 us, ib_write_lat 10.00 us, ratio 0.900\n");
  expect_text(
      ran,
      "rate of messages of 64 bytes: 2.10 million/s, ib_send_bw 2.00 million/s, ratio 1.050\n"
      "         read: medians of 2 runs; ratios 1.050 to 1.050, at least 0.95 wanted\n");
  expect_text(ran, "medians of 2 runs; ratios 0.900 to 0.900, at most 1.05 wanted\n");
  expect_text(ran, "read of 32 bytes: 9.00 us, ib_read_lat 10.00 us, ratio 0.900\n");
  expect_text(ran, "atomic of 8 bytes: 9.00 us, ib_atomic_lat 10.00 us, ratio 0.900\n");
  for (const auto& [what, program] :
       {std::pair("messages", "ib_send_bw"), std::pair("writes", "ib_write_bw"),
        std::pair("reads", "ib_read_bw")}) {
    for (const char* size : {"64 KiB", "1 MiB"}) {
      expect_text(ran, std::string(what) + " of " + size + ": 60.00 Gbit/s, " + program +
                           " 50.00 Gbit/s, ratio 1.200\n");
    }
  }
}

TEST(Certify, NamesEachDepartureAndGoesOn) {
  const CertifyPrograms programs;
  const Words settings{"FAKE_TESTS=A.First A.Fails A.Dies A.Skipped A.Known A.Last Calls.Fails",
                       "FAKE_P50=12000", "FAKE_RATE=1", "FAKE_GBIT=40"};
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
              "warning  perftest     send, round trip of 32 bytes: 12.00 us, ib_send_lat 10.00 us, "
              "ratio 1.200, more than 1.05\n");
  expect_text(ran,
              "warning  perftest     rate of messages of 64 bytes: 1.00 million/s, ib_send_bw "
              "2.00 million/s, ratio 0.500, less than 0.95\n");
  expect_text(ran,
              "warning  perftest     reads of 1 MiB: 40.00 Gbit/s, ib_read_bw 50.00 Gbit/s, ratio "
              "0.800, less than 0.95\n");
}

/// The lines of a file that begin with a name.
std::vector<std::string> lines_of(const std::string& file, const std::string& name) {
  std::vector<std::string> found;
  std::istringstream lines(read_file(file));
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(name + ' ')) found.push_back(line);
  }
  return found;
}

TEST(Certify, TellsPerftestPortAndGid) {
  const CertifyPrograms programs;
  const Folder folder;
  const std::string record = folder / "record";
  const Outcome ran = programs.certify({"FAKE_RECORD=" + record, "FAKE_PORT=1"},
                                       {"--port", "1", "--gid", "0", "--slowness", "20"});
  EXPECT_EQ(ran.code, 0) << ran.out << ran.err;
  const struct {
    const char* program;
    const char* operations;  // of either end, after its port of TCP
  } expected[] = {
      {"ib_send_lat", "-i 1 -x 0 -s 32 -n 1000"},
      {"ib_write_lat", "-i 1 -x 0 -s 32 -n 1000"},
      {"ib_read_lat", "-i 1 -x 0 -s 32 -n 1000"},
      {"ib_atomic_lat", "-i 1 -x 0 -A FETCH_AND_ADD -n 1000"},
      {"ib_send_bw", "-i 1 -x 0 -s 64 -n 2000"},
      {"ib_send_bw", "-i 1 -x 0 -s 65536 -t 8 --report_gbits -n 200"},
      {"ib_write_bw", "-i 1 -x 0 -s 1048576 -t 8 --report_gbits -n 64"},
      {"ib_read_bw", "-i 1 -x 0 -s 1048576 -t 8 --report_gbits -n 64"},
  };
  for (const auto& each : expected) {
    int servers = 0;
    int clients = 0;
    for (const std::string& line : lines_of(record, each.program)) {
      servers += line.ends_with(each.operations) ? 1 : 0;
      clients += line.ends_with(std::string(each.operations) + " localhost") ? 1 : 0;
    }
    EXPECT_EQ(servers, 1) << each.program << ' ' << each.operations << '\n' << read_file(record);
    EXPECT_EQ(clients, 1) << each.program << ' ' << each.operations << '\n' << read_file(record);
  }
}

TEST(SlowCertify, AHangingTestFailsAlone) {
  const CertifyPrograms programs;
  const Outcome ran =
      programs.certify({"FAKE_TESTS=A.First Other.Hangs A.Last"}, {"--test-seconds", "15"});
  EXPECT_EQ(ran.code, 2) << ran.err;
  expect_text(
      ran, "error    conformance  Other.Hangs failed\n         read: it takes longer than 15 s\n");
  expect_text(ran, "ok       conformance  passed: 2 tests\n");
}

TEST(Certify, SaysWhichProgramsAreMissingAndRunsTheOthers) {
  CertifyPrograms programs;
  for (const char* name : {"verbs-conformance", "spinwire-tests", "ib_send_lat"})
    programs.remove(name);
  const Outcome ran = programs.certify({"PATH=" + programs.path()}, {"--json"});
  EXPECT_EQ(ran.code, 2) << ran.err;
  EXPECT_TRUE(nlohmann::json::accept(ran.out)) << ran.out;
  for (const char* name : {"verbs-conformance", "spinwire-tests", "ib_send_lat"})
    expect_text(ran, std::string(name) + " is missing: this part has not run");
  expect_text(ran, "make tests build/bin/verbs-conformance");
  expect_text(ran, "apt-get install perftest");
  expect_text(ran, "ib_write_lat 10.00 us, ratio 0.900");
}

TEST(Certify, NamesAProgramThatListsNoTests) {
  const CertifyPrograms programs;
  const Outcome ran = programs.certify({"FAKE_TESTS=Unlisted.One"});
  EXPECT_EQ(ran.code, 2) << ran.err;
  expect_text(ran, "error    engine       the tests cannot be listed\n");
  expect_text(ran, "its list is no GoogleTest list");
}

TEST(SlowCertify, EndsInTime) {
  const CertifyPrograms programs;
  const Outcome ran =
      programs.certify({"FAKE_TESTS=A.First A.Hangs A.Last"}, {"--minutes", "0.05"});
  EXPECT_EQ(ran.code, 2) << ran.err;  // nothing was measured
  expect_text(ran, "; the time is over\n");
  expect_text(
      ran,
      "run:  spinwire-doctor certify --device DEVICE --minutes MINUTES  # with more minutes\n");
}

/// Each figure has a share of the time, however many runs are wanted.
TEST(SlowCertify, MeasuresEachFigureInAShortTime) {
  const CertifyPrograms programs;
  const Outcome ran =
      programs.certify({"FAKE_TESTS=A.First"}, {"--minutes", "0.5", "--runs", "100"});
  EXPECT_EQ(ran.code, 0) << ran.out << ran.err;
  expect_text(ran, "reads of 1 MiB: 60.00 Gbit/s, ib_read_bw 50.00 Gbit/s, ratio 1.200\n");
}

TEST(Certify, RefusesADeviceThatThisHostLacks) {
  const Outcome ran = run("spinwire-doctor", {"certify", "--device", "mlx5_99", "--json"});
  EXPECT_EQ(ran.code, 2) << ran.err;
  expect_text(ran, "there is no device mlx5_99");
  EXPECT_EQ(run("spinwire-doctor", {"certify"}).code, 3);  // which device?
}

TEST(Certify, NamesThePortForAllPrograms) {
  const CertifyPrograms programs;
  EXPECT_EQ(programs.certify({}).code, 0) << "no port is named";
  for (const std::string& port : {std::string("1"), std::string("2")}) {
    const Outcome ran = programs.certify({"FAKE_PORT=" + port}, {"--port", port});
    EXPECT_EQ(ran.code, 0) << ran.out << ran.err;
    expect_text(ran, port == "1" ? "ok       conformance  passed: 2 tests\n"
                                 : "conformance  not run: programs see the first port alone\n");
    expect_text(ran, "ok       engine       passed: 2 tests\n");
    expect_text(ran, "rate of messages of 64 bytes: 2.10 million/s, ib_send_bw 2.00 million/s");
  }
  const Outcome none = programs.certify({}, {"--port", "3"});
  EXPECT_EQ(none.code, 2) << none.err;
  expect_text(none, "device softverbs has no port 3\n         read: its ports: 1, 2\n");
}

/// The project's own programs have the options and the output that the doctor expects.
TEST(Certify, RunsTheProjectsTests) {
  CertifyPrograms programs;
  const std::string own = std::filesystem::absolute(bin()).lexically_normal();
  for (const char* name : {"softverbs-preload", "verbs-conformance"})
    programs.use_own(name, own + "/" + name);
  programs.use_own("spinwire-tests", std::filesystem::read_symlink("/proc/self/exe"));
  const Outcome ran = programs.certify(
      {"FAKE_PORT=1"}, {"--port", "1", "--tests", "EngineClose.*:RpcCalls.EveryRefusal*:Units.*"});
  EXPECT_EQ(ran.code, 0) << ran.out << ran.err;
  expect_text(ran, "ok       engine       passed: ");
  expect_text(ran, "ok       calls        passed: 1 test\n");
  expect_text(ran, "skipped: 2 tests\n         read: RTS to SQD is refused\n");
}

}  // namespace
}  // namespace tools_test
