// Programs that play those that spinwire-doctor certify runs: a good device, and each kind of
// departure.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>

#include "tools/doctor_host.h"
#include "tools/programs.h"

namespace tools_test {

/// A program with tests; the name of a test says what becomes of it.
inline constexpr const char* kTests = R"py(#!/usr/bin/python3 -IS
import json, os, signal, sys, time
declared = os.environ.get("FAKE_TESTS", "Good.One Good.Two").split()
named = os.environ.get("SPINWIRE_TEST_PORT")
if "--port" in sys.argv:
    named = sys.argv[sys.argv.index("--port") + 1]
if named != os.environ.get("FAKE_PORT"):
    sys.exit("port %s is named" % named)
chosen = None
for word in sys.argv[1:]:
    if word.startswith("--gtest_filter=") and "*" not in word:
        chosen = word[15:].split(":")
    if word.startswith("--gtest_output=json:"):
        suites = []
        for name in declared:
            suite, test = name.split(".")
            folder = "rpc" if suite == "Calls" else "base" if suite == "Other" else "engine"
            suites.append({"name": suite, "testsuite": [{"name": test, "file": "test/%s/x.cc" % folder}]})
        with open(word[20:], "w") as out:
            out.write("no list" if "Unlisted" in declared[0] else json.dumps({"testsuites": suites}))
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
inline constexpr const char* kMeasures = R"py(#!/usr/bin/python3 -IS
import os, socket, sys
name = os.path.basename(sys.argv[0])
at = ("127.0.0.1", int(sys.argv[sys.argv.index("-p") + 1]))
words = sys.argv[1:]
if "FAKE_RECORD" in os.environ:
    with open(os.environ["FAKE_RECORD"], "a") as record:
        record.write(" ".join([name] + words) + "\n")
if name == "spinwire-perf" and os.environ.get("SPINWIRE_DEVICE_PORT") != os.environ.get("FAKE_PORT"):
    sys.exit("port %s is named" % os.environ.get("SPINWIRE_DEVICE_PORT"))
if "--bind" in words:
    words.remove(words[words.index("--bind") + 1])
if "localhost" in words or "127.0.0.1" in words:
    socket.create_connection(at)
    if "FAKE_FAULT" in os.environ:
        sys.exit(os.environ["FAKE_FAULT"])
    if name == "spinwire-perf":
        print('{"p50_ns": %s, "rate_mops": %s, "gbit_per_s": %s}'
              % (os.environ.get("FAKE_P50", "9000"), os.environ.get("FAKE_RATE", "2.1"),
                 os.environ.get("FAKE_GBIT", "60")))
    elif name.endswith("_bw"):
        print(" #bytes #iterations\n 64 40000 0.5 50.0 2.0")
    else:  # half of a round trip, but the whole time of a READ or an atomic
        typical = "10.0" if name in ("ib_read_lat", "ib_atomic_lat") else "5.0"
        print(" #bytes #iterations\n 32 20000 4.0 90.0 %s 5.5 0.3 6.0 7.0" % typical)
else:
    listener = socket.create_server(at)
    listener.accept()
)py";

/// A folder with all programs, as players or, of the tests, the project's own.
class CertifyPrograms {
 public:
  CertifyPrograms() {
    write("softverbs-preload", "#!/bin/sh\nexec \"$@\"\n");
    for (const char* name : {"verbs-conformance", "spinwire-tests"}) write(name, kTests);
    for (const char* name : {"spinwire-perf", "ib_send_lat", "ib_write_lat", "ib_read_lat",
                             "ib_atomic_lat", "ib_send_bw", "ib_write_bw", "ib_read_bw"})
      write(name, kMeasures);
  }
  /// Replaces one by a program of the project.
  void use_own(const std::string& name, const std::string& path) {
    std::filesystem::remove(folder_ / name);
    std::filesystem::create_symlink(path, folder_ / name);
  }
  [[nodiscard]] std::string path() const { return folder_ / "."; }
  void remove(const std::string& name) { std::filesystem::remove(folder_ / name); }
  /// What starts the doctor. `settings` are NAME=VALUE.
  [[nodiscard]] Words command(const Words& settings, const Words& options) const {
    // This program may itself be one of several shards.
    Words words{"/usr/bin/env", "-u", "GTEST_TOTAL_SHARDS", "-u", "GTEST_SHARD_INDEX"};
    words.insert(words.end(), settings.begin(), settings.end());
    words.insert(words.end(), {bin() + "/spinwire-doctor", "certify", "--device", "softverbs",
                               "--programs", folder_ / "."});
    // Each measurement starts programs.
    if (std::find(options.begin(), options.end(), "--runs") == options.end())
      words.insert(words.end(), {"--runs", "1"});
    words.insert(words.end(), options.begin(), options.end());
    return words;
  }
  /// Runs the doctor to its end. What it tells the user to run must be commands.
  [[nodiscard]] Outcome certify(const Words& settings, const Words& options = {}) const {
    Program program(command(settings, options));
    const int code = program.wait();
    constexpr std::string_view kRun = "         run:  ";
    std::istringstream lines(program.out());
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with(kRun)) {
        EXPECT_TRUE(is_line_for_a_shell(line.substr(kRun.size())));
      }
    }
    return {code, program.out(), program.err()};
  }

 private:
  void write(const std::string& name, const char* text) {
    std::ofstream(folder_ / name) << text;
    std::filesystem::permissions(folder_ / name, std::filesystem::perms::owner_all);
  }

  Folder folder_;
};

inline void expect_text(const Outcome& ran, const std::string& text) {
  EXPECT_NE(ran.out.find(text), std::string::npos) << text << "\n" << ran.out << ran.err;
}

}  // namespace tools_test
