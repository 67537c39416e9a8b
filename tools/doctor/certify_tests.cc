#include <fmt/core.h>
#include <fmt/ranges.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "common/json.h"
#include "doctor/certify.h"

namespace spinwire::doctor {
namespace {

using Got = RunningProgram::Got;

std::string counted(std::size_t count, std::string_view noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

/// A program lists its tests at once, unless the machine is busy.
constexpr auto kListLimit = std::chrono::minutes(2);
/// How the conformance program says that a case fails as it is known to on such devices.
constexpr std::string_view kKnown = "known departure: ";
/// Lines of a failed test that the report repeats.
constexpr std::size_t kFailureLines = 4;

/// Follows the output of a GoogleTest program.
class Verdicts {
 public:
  Verdicts(const TestPart& part, Findings& findings)
      : part_(part), findings_(findings), left_(part.tests.begin(), part.tests.end()) {}

  void follow(const std::string& line) {
    if (line.starts_with("[ RUN      ] ")) {
      // Ignores such lines of child processes that are GoogleTest programs, too.
      if (running_.empty()) begin(line.substr(13));
    } else if (!running_.empty() && is_verdict(line)) {
      end(line);
    } else if (!running_.empty() && said_.size() < kFailureLines && !line.empty()) {
      said_.push_back(line);
    }
  }
  /// The running test, or if there is none the program, has failed: why.
  void fail(const std::string& why) {
    const std::string name = running_.empty() ? "the program" : running_;
    add_failure(name, why);
    left_.erase(running_);
    running_.clear();
  }
  [[nodiscard]] bool is_running() const { return !running_.empty(); }
  /// Tests without a verdict.
  [[nodiscard]] const std::set<std::string>& left() const { return left_; }
  /// Times that a test has begun or ended.
  [[nodiscard]] std::size_t steps() const { return steps_; }
  /// Adds what passed, was skipped, or did not run.
  void report(std::chrono::seconds took) {
    for (const auto& [why, count] : skipped_) {
      if (why.starts_with(kKnown)) {
        findings_.add(part_.part, Severity::warning,
                      fmt::format("{}: a {}", counted(count, "case"), why), "",
                      "# no command: the device or its driver departs, which the cases allow for");
      } else {
        findings_.add(part_.part, Severity::note,
                      fmt::format("skipped: {}", counted(count, "test")), why);
      }
    }
    if (!left_.empty()) {
      findings_.add(
          part_.part, Severity::warning,
          fmt::format("not run: {}; the time is over", counted(left_.size(), "test")),
          fmt::format("the first is {}", *left_.begin()),
          "spinwire-doctor certify --device DEVICE --minutes MINUTES  # with more minutes");
    }
    const Severity severity = passed_ == 0 ? Severity::error : Severity::ok;
    findings_.add(part_.part, severity, fmt::format("passed: {}", counted(passed_, "test")),
                  fmt::format("{} failed, in {} s", failed_, took.count()));
  }

 private:
  static bool is_ok(const std::string& line) { return line.starts_with("[       OK ] "); }
  static bool is_skipped(const std::string& line) { return line.starts_with("[  SKIPPED ] "); }
  [[nodiscard]] bool is_verdict(const std::string& line) const {
    if (!is_ok(line) && !is_skipped(line) && !line.starts_with("[  FAILED  ] ")) return false;
    const std::string rest = line.substr(13);
    return rest.starts_with(running_) &&
           (rest.size() == running_.size() || rest[running_.size()] == ' ' ||
            rest[running_.size()] == ',');
  }
  void begin(const std::string& name) {
    running_ = name;
    said_.clear();
    ++steps_;
  }
  void end(const std::string& line) {
    ++steps_;
    left_.erase(running_);
    if (is_ok(line)) {
      ++passed_;
    } else if (is_skipped(line)) {
      ++skipped_[reason()];
    } else {
      add_failure(running_, fmt::format("{}", fmt::join(said_, "; ")));
    }
    running_.clear();
  }
  /// Why the running test was skipped: the line behind "FILE:LINE: Skipped".
  [[nodiscard]] std::string reason() const {
    for (const std::string& line : said_)
      if (!line.ends_with(": Skipped")) return line;
    return "it does not say why";
  }
  void add_failure(const std::string& name, const std::string& why) {
    ++failed_;
    Command again = part_.command;
    again.words.push_back("--gtest_filter=" + (running_.empty() ? "*" : name));
    findings_.add(part_.part, Severity::error, name + " failed", why, again.text());
  }

  const TestPart& part_;
  Findings& findings_;
  std::set<std::string> left_;
  std::string running_;
  std::vector<std::string> said_;  ///< by the running test
  std::map<std::string, std::size_t> skipped_;
  std::size_t passed_ = 0;
  std::size_t failed_ = 0;
  std::size_t steps_ = 0;
};

/// Runs the tests without a verdict until one hangs, the program ends, or the time is over.
void run_rest(const TestPart& part, SteadyTime deadline, Verdicts& verdicts, Findings& findings) {
  Command command = part.command;
  command.words.push_back("--gtest_color=no");
  command.words.push_back(fmt::format("--gtest_filter={}", fmt::join(verdicts.left(), ":")));
  auto program = RunningProgram::start(command);
  if (!program) {
    findings.add(part.part, Severity::error, "cannot " + program.error().asked,
                 program.error().found, program.error().remedy);
    return;
  }
  std::string line;
  for (;;) {
    const SteadyTime limit = now() + part.test_limit;
    const std::size_t steps = verdicts.steps();
    Got got = Got::line;
    while (got == Got::line && verdicts.steps() == steps) {
      got = program->next_line(line, std::min(limit, deadline));
      if (got == Got::line) verdicts.follow(line);
    }
    if (got == Got::line) continue;
    if (got == Got::late && now() >= limit && limit < deadline)
      return verdicts.fail(fmt::format("it takes longer than {} s", part.test_limit.count()));
    if (got == Got::late) return;
    const int status = program->wait(std::min(limit, deadline));
    // Status 1 means failed tests, which have verdicts.
    if (status > 1 || verdicts.is_running())
      verdicts.fail(fmt::format("the program ended with status {}", status));
    return;
  }
}

/// The quick tests of a list as GoogleTest writes it, that are declared in these folders. Throws
/// Json::exception if it is no such list.
std::vector<std::string> tests_in(const tools::Json& list,
                                  const std::vector<std::string>& folders) {
  std::vector<std::string> tests;
  for (const tools::Json& each : list.at("testsuites")) {
    const auto suite = each.at("name").get<std::string>();
    if (suite.starts_with("Slow") || suite.find("/Slow") != std::string::npos) continue;
    for (const tools::Json& test : each.at("testsuite")) {
      const auto path = test.at("file").get<std::string>();
      if (std::any_of(folders.begin(), folders.end(), [&](const std::string& folder) {
            return path.starts_with("test/" + folder + "/");
          }))
        tests.push_back(suite + '.' + test.at("name").get<std::string>());
    }
  }
  return tests;
}

/// A file with an unused name, which is removed.
class ScratchFile {
 public:
  ScratchFile() {
    const int fd = ::mkstemps(path_.data(), 5);
    if (fd >= 0) ::close(fd);
  }
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;
  ~ScratchFile() { ::unlink(path_.c_str()); }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_ = "/tmp/spinwire-doctor-XXXXXX.json";
};

}  // namespace

void run_tests(const TestPart& part, SteadyTime deadline, Findings& findings) {
  const SteadyTime began = now();
  Verdicts verdicts(part, findings);
  std::size_t before = part.tests.size() + 1;
  while (!verdicts.left().empty() && verdicts.left().size() < before && now() < deadline) {
    before = verdicts.left().size();
    run_rest(part, deadline, verdicts, findings);
  }
  verdicts.report(std::chrono::duration_cast<std::chrono::seconds>(now() - began));
}

Result<std::vector<std::string>> list_tests(const Command& command) {
  Command listing = command;
  listing.words.push_back("--gtest_list_tests");
  const auto output = output_of(listing, now() + kListLimit);
  if (!output) return tl::unexpected(output.error());
  std::vector<std::string> tests;
  std::string suite;
  std::istringstream lines(*output);
  for (std::string line; std::getline(lines, line);) {
    line = line.substr(0, line.find("  #"));
    if (line.starts_with("  ")) {
      tests.push_back(suite + line.substr(2));
    } else if (line.ends_with('.')) {
      suite = line;
    }
  }
  return tests;
}

Result<std::vector<std::string>> list_tests_of(const Command& command,
                                               const std::vector<std::string>& folders) {
  const ScratchFile file;
  Command listing = command;
  listing.words.insert(listing.words.end(),
                       {"--gtest_list_tests", "--gtest_output=json:" + file.path()});
  const auto output = output_of(listing, now() + kListLimit);
  if (!output) return tl::unexpected(output.error());
  std::ifstream in(file.path());
  try {
    return tests_in(tools::Json::parse(in), folders);
  } catch (const tools::Json::exception& why) {
    return tl::unexpected(Error{Status::system, listing.text(),
                                fmt::format("its list is no GoogleTest list: {}", why.what()), ""});
  }
}

}  // namespace spinwire::doctor
