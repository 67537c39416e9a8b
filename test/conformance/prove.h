// The proof: the program runs itself once for each planted defect. Every defect has to be seen by
// all cases that its entry names, and every case has to see one at least.
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

/// Tells the parent how each case went, one line each: + begun, = passed, ! failed, - skipped.
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
  std::string cut_short;  ///< the case at which it died or its time was over
};

/// One run of this program; what it reports is read at the end: it fits into a file.
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
  /// Until one of them has ended, or its time is over.
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

  static constexpr std::chrono::seconds kLimit{60};
  std::string_view defect_;
  int report_;
  pid_t pid_;
  int ended_ = -1;  ///< readable when it has
  std::chrono::steady_clock::time_point end_ = std::chrono::steady_clock::now() + kLimit;
};

class Proof {
 public:
  explicit Proof(unsigned jobs) : jobs_(jobs) {}

  int run() {
    const auto begin = std::chrono::steady_clock::now();
    if (!sound()) return 1;
    for (const Defect& defect : kDefects) {
      if (running_.size() == jobs_) collect_one();
      running_.emplace_back(defect.name);
    }
    while (!running_.empty()) collect_one();
    for (const std::string& name : sound_.passed) {
      if (!seeing_.contains(name)) complain("no defect makes this case fail: " + name);
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::printf("%zu cases, each saw a defect or is named above; %zu defects; %.0f s\n",
                sound_.passed.size(), std::size(kDefects), took.count());
    std::printf("[  PASSED  ] %zu tests.\n", seen_);
    if (complaints_ != 0) std::printf("[  FAILED  ] %zu tests.\n", complaints_);
    return complaints_ == 0 ? 0 : 1;
  }

 private:
  /// The device as it is passes: else its failures would prove nothing.
  bool sound() {
    std::list<Run> alone;
    alone.emplace_back("");
    while (!alone.front().over()) Run::wait_for_any(alone);
    sound_ = alone.front().outcome();
    for (const std::string& name : sound_.failed) complain("fails without a defect: " + name);
    if (sound_.passed.empty()) complain("no case passed");
    if (complaints_ != 0)
      std::printf("[  PASSED  ] 0 tests.\n[  FAILED  ] %zu tests.\n", complaints_);
    return complaints_ == 0;
  }

  void collect_one() {
    for (;;) {
      for (auto run = running_.begin(); run != running_.end(); ++run) {
        if (!run->over()) continue;
        judge(kDefects[Name::find(run->defect())], run->outcome());
        running_.erase(run);
        return;
      }
      Run::wait_for_any(running_);
    }
  }

  void judge(const Defect& defect, const Outcome& outcome) {
    const std::size_t before = complaints_;
    for (const std::string_view pattern : patterns_of(defect.seen_by)) {
      bool any = false;
      for (const std::string& name : sound_.passed) {
        if (!matches(pattern, name)) continue;
        any = true;
        if (outcome.passed.contains(name))
          complain(std::string(defect.name) + " was not seen by " + name);
        else if (!outcome.failed.contains(name))
          complain(std::string(defect.name) + " ended before " + name);
      }
      if (!any) complain(std::string(defect.name) + " names no case: " + std::string(pattern));
    }
    seeing_.insert(outcome.failed.begin(), outcome.failed.end());
    seen_ += complaints_ == before ? 1 : 0;
    std::printf("%-22s %3zu cases  %s%s%s\n", std::string(defect.name).c_str(),
                outcome.failed.size(), std::string(defect.breaks).c_str(),
                outcome.cut_short.empty() ? "" : "; ended in ", outcome.cut_short.c_str());
    std::fflush(stdout);
  }

  void complain(const std::string& what) {
    ++complaints_;
    std::printf("%s\n", what.c_str());
  }

  unsigned jobs_;
  std::list<Run> running_;
  Outcome sound_;
  std::set<std::string> seeing_;
  std::size_t seen_ = 0;
  std::size_t complaints_ = 0;
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
