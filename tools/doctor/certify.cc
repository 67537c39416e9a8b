#include "doctor/certify.h"

#include <fmt/core.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <set>
#include <sstream>

#include "doctor/certify_perftest.h"
#include "spinwire/device.h"

namespace spinwire::doctor {
namespace {

constexpr const char* kBuild =
    "make tests build/bin/verbs-conformance  # in the source tree; then give --programs build/bin";

/// The embedded device is no device of libibverbs without the preloaded library.
bool is_embedded(const Certification& what) { return what.device == "softverbs"; }

/// The programs' own errors say what is wrong with the device.
void add_failure(std::string_view part, const Error& error, Findings& findings) {
  findings.add(part, Severity::error, "the tests cannot be listed", error.message());
}

void certify_conformance(const Certification& what, const Programs& programs, SteadyTime deadline,
                         Findings& findings) {
  const std::string part = "conformance";
  if (is_embedded(what) && what.port > 1)
    return findings.add(part, Severity::note, "not run: programs see the first port alone",
                        "softverbs-preload");
  const std::string program = programs.find(part, "verbs-conformance", kBuild, findings);
  if (program.empty()) return;
  Command command{{program, "--device", what.device}};
  command.watched_fd = what.watched_fd;
  if (what.port > 0)
    command.words.insert(command.words.end(), {"--port", std::to_string(what.port)});
  if (what.gid_index >= 0)
    command.words.insert(command.words.end(), {"--gid", std::to_string(what.gid_index)});
  if (!add_preload(what, programs, part, command, findings)) return;
  const auto cases = list_tests(command);
  if (!cases) return add_failure(part, cases.error(), findings);
  run_tests({part, command, *cases, std::chrono::seconds(what.test_seconds)}, deadline, findings);
}

Command test_command(const Certification& what, const std::string& program) {
  Command command{{program}};
  command.watched_fd = what.watched_fd;
  if (!is_embedded(what)) command.environment.emplace_back("SPINWIRE_TEST_DEVICE", what.device);
  if (what.port > 0)
    command.environment.emplace_back("SPINWIRE_TEST_PORT", std::to_string(what.port));
  if (!what.address.empty())
    command.environment.emplace_back("SPINWIRE_TEST_ADDRESS", what.address);
  if (what.slowness > 1)
    command.environment.emplace_back("SPINWIRE_TEST_SLOWNESS", std::to_string(what.slowness));
  return command;
}

/// Runs what the suites of these folders of test/ declare.
void certify_suites(const Certification& what, const Programs& programs, const std::string& part,
                    const std::vector<std::string>& folders, SteadyTime deadline,
                    Findings& findings) {
  const std::string program = programs.find(part, "spinwire-tests", kBuild, findings);
  if (program.empty()) return;
  Command command = test_command(what, program);
  Command listing = command;
  listing.words.push_back("--gtest_filter=" + what.tests);
  const auto tests = list_tests_of(listing, folders);
  if (!tests) return add_failure(part, tests.error(), findings);
  if (tests->empty())
    return findings.add(part, Severity::note, "no test was chosen", "--tests " + what.tests);
  run_tests({part, command, *tests, std::chrono::seconds(what.test_seconds)}, deadline, findings);
}

}  // namespace

bool find_device(const Certification& what, Findings& findings) {
  const auto devices = list_devices();
  std::set<std::string> names;
  std::set<int> ports;
  if (devices) {
    for (const DeviceCandidate& each : *devices) {
      names.insert(each.device);
      if (each.device == what.device) ports.insert(each.port);
    }
  }
  if (names.contains(what.device) && (what.port == 0 || ports.contains(what.port))) return true;
  if (names.contains(what.device)) {
    findings.add("device", Severity::error,
                 fmt::format("device {} has no port {}", what.device, what.port),
                 fmt::format("its ports: {}", fmt::join(ports, ", ")), "spinwire-devices");
    return false;
  }
  findings.add("device", Severity::error, fmt::format("there is no device {}", what.device),
               devices ? fmt::format("{}", fmt::join(names, ", ")) : devices.error().message(),
               "spinwire-devices");
  return false;
}

Programs::Programs(const std::string& folder) : folder_(folder) {
  if (!folder_.empty()) return;
  std::error_code ignored;
  folder_ = std::filesystem::read_symlink("/proc/self/exe", ignored).parent_path().string();
}

std::string Programs::find(std::string_view part, const std::string& name, const char* remedy,
                           Findings& findings) const {
  std::string folders = folder_;
  if (const char* path = std::getenv("PATH"); path != nullptr) folders += std::string(":") + path;
  std::istringstream each(folders);
  for (std::string folder; std::getline(each, folder, ':');) {
    const std::string file = folder + '/' + name;
    if (::access(file.c_str(), X_OK) == 0) return file;
  }
  findings.add(part, Severity::error, fmt::format("{} is missing: this part has not run", name),
               folder_ + " and PATH", remedy);
  return {};
}

bool add_preload(const Certification& what, const Programs& programs, std::string_view part,
                 Command& command, Findings& findings) {
  if (!is_embedded(what)) return true;
  const std::string preload = programs.find(part, "softverbs-preload", kBuild, findings);
  if (!preload.empty()) command.words.insert(command.words.begin(), preload);
  return !preload.empty();
}

void run_suites(const Certification& what, const Programs& programs, SteadyTime begin,
                SteadyTime end, Findings& findings) {
  // A part may use what earlier ones have left.
  const auto until = [&](int sixths) { return begin + (end - begin) * sixths / 6; };
  certify_conformance(what, programs, until(1), findings);
  certify_suites(what, programs, "engine", {"agent", "engine", "scenarios"}, until(4), findings);
  certify_suites(what, programs, "calls", {"rpc"}, until(6), findings);
}

Findings certify(const Certification& what) {
  const SteadyTime began = std::chrono::steady_clock::now();
  const Programs programs(what.programs);
  Findings findings;
  if (!find_device(what, findings)) return findings;
  run_suites(what, programs, began, began + part_of_time(what, 0.9), findings);
  LocalServer server(what, programs, "");
  compare_with_perftest(what, programs, server, began + part_of_time(what, 1), findings);
  return findings;
}

}  // namespace spinwire::doctor
