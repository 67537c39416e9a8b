// Certifies a device: runs the conformance cases, the suites of engine and calls, and a comparison
// with perftest on it, and reports every departure and figure.
#pragma once

#include <string>
#include <vector>

#include "doctor/findings.h"
#include "doctor/run_program.h"

namespace spinwire::doctor {

struct Certification {
  std::string device;
  int port = 0;            ///< the device's; 0: the programs choose
  int gid_index = -1;      ///< negative: the programs choose
  std::string address;     ///< the port's; empty: loopback
  std::string programs;    ///< the folder of the programs; empty: that of this one
  std::string config;      ///< for spinwire-perf; empty: the defaults
  std::string tests{"*"};  ///< GoogleTest filter of the engine's and the calls' tests
  int slowness = 1;        ///< the device's, by which the tests multiply their times
  int test_seconds = 150;  ///< for one test; on an adapter the longest take seconds
  double minutes = 60;     ///< for everything
  int runs = 5;            ///< of perftest and of spinwire-perf, for each measurement, at most
  /// A socket to a client. When it has closed, the tests end. Negative: none.
  int watched_fd = -1;
};

/// Runs all parts on this host, one after the other. A part that fails, or takes too long, does not
/// stop the next one.
Findings certify(const Certification& what);

/// A part of the time for everything.
inline SteadyTime::duration part_of_time(const Certification& what, double part) {
  return std::chrono::duration_cast<SteadyTime::duration>(
      std::chrono::duration<double, std::ratio<60>>(what.minutes * part));
}

/// Whether this host has the device, with the port. If not, that is a finding.
bool find_device(const Certification& what, Findings& findings);

/// Finds the programs, and reports a missing one.
class Programs {
 public:
  explicit Programs(const std::string& folder);
  /// A program in the folder, or else in PATH; empty: a finding says that it is missing.
  std::string find(std::string_view part, const std::string& name, const char* remedy,
                   Findings& findings) const;
  [[nodiscard]] const std::string& folder() const noexcept { return folder_; }

 private:
  std::string folder_;
};

/// The words before a program that uses libibverbs: the embedded device needs the preloaded
/// library. False: it is missing, which is a finding.
bool add_preload(const Certification& what, const Programs& programs, std::string_view part,
                 Command& command, Findings& findings);

/// A GoogleTest program, and the tests of it that are to run.
struct TestPart {
  std::string part;  ///< "conformance", "engine" or "calls"
  Command command;
  std::vector<std::string> tests;
  std::chrono::seconds test_limit;  ///< for one test
};
/// Runs the tests until the deadline, and adds their outcome. A test that hangs or dies fails
/// alone.
void run_tests(const TestPart& part, SteadyTime deadline, Findings& findings);
/// The tests of a GoogleTest program. Errors: those of output_of().
Result<std::vector<std::string>> list_tests(const Command& command);
/// The tests that are declared in these folders of test/, but those that take minutes. Errors:
/// those of output_of(); system (the program writes no list).
Result<std::vector<std::string>> list_tests_of(const Command& command,
                                               const std::vector<std::string>& folders);
/// Runs the conformance cases, and the suites of engine and calls.
void run_suites(const Certification& what, const Programs& programs, SteadyTime begin,
                SteadyTime end, Findings& findings);

}  // namespace spinwire::doctor
