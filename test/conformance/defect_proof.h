// The proof: the program runs itself once for each planted defect. Every case that a defect's entry
// names must detect it, and every case must detect at least one defect.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <list>
#include <set>
#include <string>
#include <vector>

#include "conformance/conformance_device.h"
#include "conformance/defects.h"
#include "conformance/patterns.h"

namespace conformance {

/// Reports each case to the parent, one line each: + begun, = passed, ! failed, - skipped.
class Reporter : public testing::EmptyTestEventListener {
 public:
  explicit Reporter(int fd) : fd_(fd) {}
  void OnTestStart(const testing::TestInfo& info) override { tell('+', info); }
  void OnTestEnd(const testing::TestInfo& info) override {
    const testing::TestResult& result = *info.result();
    tell(result.Failed() ? '!' : result.Skipped() ? '-' : '=', info);
  }

 private:
  void tell(char what, const testing::TestInfo& info) const {
    const std::string line =
        what + (std::string(info.test_suite_name()) + "." + info.name()) + "\n";
    must(::write(fd_, line.data(), line.size()) == static_cast<ssize_t>(line.size()), "report");
  }
  int fd_;
};

inline void report_to(int fd) {
  testing::UnitTest::GetInstance()->listeners().Append(new Reporter(fd));
}

struct Outcome {
  std::set<std::string> passed;
  std::set<std::string> failed;
  std::set<std::string> skipped;
  std::string cut_short;  ///< the case in which it died or exceeded its time limit
};

/// One run of this program. Its report is read at the end, since it is a file.
class Run {
 public:
  explicit Run(std::string_view defect) : defect_(defect) {
    report_ = ::memfd_create("report", 0);
    must(report_ >= 0, "memfd_create");
    pid_ = ::fork();
    must(pid_ >= 0, "fork");
    if (pid_ == 0) become();
    ended_ = static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0));
    must(ended_ >= 0, "pidfd_open");
  }
  Run(Run&& other) noexcept
      : defect_(other.defect_),
        report_(other.report_),
        pid_(other.pid_),
        ended_(other.ended_),
        end_(other.end_) {
    other.pid_ = other.report_ = other.ended_ = -1;
  }
  Run& operator=(Run&&) = delete;
  ~Run() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    if (report_ >= 0) ::close(report_);
    if (ended_ >= 0) ::close(ended_);
  }
  /// Waits until one run has ended or exceeded its time limit.
  static void wait_for_any(const std::list<Run>& runs) {
    std::vector<pollfd> ends;
    auto first = std::chrono::steady_clock::time_point::max();
    for (const Run& run : runs) {
      ends.push_back({run.ended_, POLLIN, 0});
      first = std::min(first, run.end_);
    }
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(first - std::chrono::steady_clock::now());
    (void)::poll(ends.data(), ends.size(), static_cast<int>(std::max<long>(left.count(), 0)));
  }
  [[nodiscard]] bool over() {
    if (pid_ > 0 && ::waitpid(pid_, nullptr, WNOHANG) == pid_) pid_ = -1;
    return pid_ < 0 || std::chrono::steady_clock::now() > end_;
  }
  [[nodiscard]] std::string_view defect() const { return defect_; }
  [[nodiscard]] Outcome outcome() const {
    std::string text(static_cast<std::size_t>(::lseek(report_, 0, SEEK_END)), '\0');
    must(::pread(report_, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()),
         "report");
    Outcome outcome;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t end = text.find('\n', at);
      const std::string name = text.substr(at + 1, end - at - 1);
      std::set<std::string>* into = text[at] == '='   ? &outcome.passed
                                    : text[at] == '!' ? &outcome.failed
                                                      : &outcome.skipped;
      if (text[at] != '+') into->insert(name);
      outcome.cut_short = text[at] == '+' ? name : std::string();
      at = end + 1;
    }
    if (!outcome.cut_short.empty()) outcome.failed.insert(outcome.cut_short);
    return outcome;
  }

 private:
  [[noreturn]] void become() const {
    const int nowhere = ::open("/dev/null", O_WRONLY);
    ::dup2(nowhere, STDOUT_FILENO);
    ::dup2(nowhere, STDERR_FILENO);
    std::vector<std::string> words = {"verbs-conformance", "--report", std::to_string(report_)};
    if (!settings.device.empty()) words.insert(words.end(), {"--device", settings.device});
    if (settings.gid_index >= 0)
      words.insert(words.end(), {"--gid", std::to_string(settings.gid_index)});
    if (!defect_.empty()) {
      constexpr const char* kTimeout = "30";
      words.insert(words.end(), {"--defect", std::string(defect_), "--timeout", kTimeout});
    }
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    ::execv("/proc/self/exe", argv.data());
    ::_exit(127);
  }

  static constexpr std::chrono::seconds kLimit{300};  // seconds on an idle machine
  std::string_view defect_;
  int report_;
  pid_t pid_;
  int ended_ = -1;  ///< readable once it has ended
  std::chrono::steady_clock::time_point end_ = std::chrono::steady_clock::now() + kLimit;
};

class Proof {
 public:
  explicit Proof(unsigned jobs) : jobs_(jobs) {}

  int run() {
    const auto begin = std::chrono::steady_clock::now();
    if (!passes_without_defects()) return 1;
    for (const Defect& defect : kDefects) {
      if (running_.size() == jobs_) collect_one();
      running_.emplace_back(defect.name);
    }
    while (!running_.empty()) collect_one();
    for (const std::string& name : without_defects_.passed) {
      if (!detecting_cases_.contains(name)) report("no defect makes this case fail: " + name);
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::printf("%zu cases, each detects a defect or is listed above; %zu defects; %.0f s\n",
                without_defects_.passed.size(), std::size(kDefects), took.count());
    std::printf("[  PASSED  ] %zu tests.\n", detected_);
    if (failures_ != 0) std::printf("[  FAILED  ] %zu tests.\n", failures_);
    return failures_ == 0 ? 0 : 1;
  }

 private:
  /// Checks that the device passes without a defect; otherwise failures would prove nothing.
  bool passes_without_defects() {
    std::list<Run> alone;
    alone.emplace_back("");
    while (!alone.front().over()) Run::wait_for_any(alone);
    without_defects_ = alone.front().outcome();
    for (const std::string& name : without_defects_.failed)
      report("fails without a defect: " + name);
    if (without_defects_.passed.empty()) report("no case passed");
    if (failures_ != 0) std::printf("[  PASSED  ] 0 tests.\n[  FAILED  ] %zu tests.\n", failures_);
    return failures_ == 0;
  }

  void collect_one() {
    for (;;) {
      for (auto run = running_.begin(); run != running_.end(); ++run) {
        if (!run->over()) continue;
        check_defect(kDefects[Name::find(run->defect())], run->outcome());
        running_.erase(run);
        return;
      }
      Run::wait_for_any(running_);
    }
  }

  void check_defect(const Defect& defect, const Outcome& outcome) {
    const std::size_t before = failures_;
    for (const std::string_view pattern : patterns_of(defect.seen_by)) {
      bool any = false;
      for (const std::string& name : without_defects_.passed) {
        if (!matches(pattern, name)) continue;
        any = true;
        if (outcome.passed.contains(name))
          report(std::string(defect.name) + " was not detected by " + name);
        else if (!outcome.failed.contains(name))
          report(std::string(defect.name) + " ended before " + name);
      }
      if (!any) report(std::string(defect.name) + " names no case: " + std::string(pattern));
    }
    detecting_cases_.insert(outcome.failed.begin(), outcome.failed.end());
    detected_ += failures_ == before ? 1 : 0;
    std::printf("%-22s %3zu cases  %s%s%s\n", std::string(defect.name).c_str(),
                outcome.failed.size(), std::string(defect.breaks).c_str(),
                outcome.cut_short.empty() ? "" : "; ended in ", outcome.cut_short.c_str());
    std::fflush(stdout);
  }

  void report(const std::string& what) {
    ++failures_;
    std::printf("%s\n", what.c_str());
  }

  unsigned jobs_;
  std::list<Run> running_;
  Outcome without_defects_;
  std::set<std::string> detecting_cases_;
  std::size_t detected_ = 0;
  std::size_t failures_ = 0;
};

inline int prove(unsigned jobs) { return Proof(jobs).run(); }

inline int list_defects() {
  for (const Defect& defect : kDefects) {
    std::printf("%-22s %s\n", std::string(defect.name).c_str(), std::string(defect.breaks).c_str());
    for (const std::string_view pattern : patterns_of(defect.seen_by))
      std::printf("    %s\n", std::string(pattern).c_str());
  }
  return 0;
}

}  // namespace conformance
