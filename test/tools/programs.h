// Runs the built programs as a user does and captures output and exit code. The folder is
// SPINWIRE_BIN, or else build/bin.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace tools_test {

using Clock = std::chrono::steady_clock;
using Words = std::vector<std::string>;

/// Any run that lasts longer hangs. The machine may be busy with something else.
constexpr auto kLimit = std::chrono::seconds(300);

inline std::string bin() {
  const char* folder = std::getenv("SPINWIRE_BIN");
  return folder != nullptr ? folder : "build/bin";
}

/// A started program whose stdout and stderr are read through pipes. The destructor kills it.
class Program {
 public:
  explicit Program(Words words) {
    std::array<int, 2> out{};
    std::array<int, 2> err{};
    if (::pipe2(out.data(), O_CLOEXEC) != 0 || ::pipe2(err.data(), O_CLOEXEC) != 0) std::abort();
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(out[1], STDOUT_FILENO);
      ::dup2(err[1], STDERR_FILENO);
      ::setenv("SPINWIRE_MEMORY_HUGEPAGES", "off", 1);  // no warnings on stderr
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
    ::close(out[1]);
    ::close(err[1]);
    fds_ = {out[0], err[0]};
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  ~Program() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    for (const int fd : fds_) ::close(fd);
  }

  /// Reads until both pipes are closed. Returns the exit code, -1 after the time limit, or -2 after
  /// a signal.
  int wait() {
    const auto end = Clock::now() + kLimit;
    while (open_ != 0 && Clock::now() < end) read_some();
    if (open_ != 0) return -1;
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -2;
  }
  /// Reads until stdout has a line with this beginning. Returns the rest of the line.
  std::string wait_for(const std::string& beginning) { return wait_for(beginning, text_[0]); }
  /// Reads until stderr has a line with this in it. Returns the rest of the line.
  std::string wait_for_error(const std::string& text) { return wait_for(text, text_[1]); }
  void signal(int number) const { ::kill(pid_, number); }
  [[nodiscard]] pid_t pid() const { return pid_; }
  [[nodiscard]] const std::string& out() const { return text_[0]; }
  [[nodiscard]] const std::string& err() const { return text_[1]; }

 private:
  std::string wait_for(const std::string& beginning, const std::string& text) {
    const auto end = Clock::now() + kLimit;
    while (Clock::now() < end) {
      const std::size_t at = text.find(beginning);
      const std::size_t line_end = at == std::string::npos ? at : text.find('\n', at);
      if (line_end != std::string::npos)
        return text.substr(at + beginning.size(), line_end - at - beginning.size());
      if (open_ == 0) break;
      read_some();
    }
    return {};
  }
  void read_some() {
    std::array<pollfd, 2> polled{};
    for (std::size_t i = 0; i < 2; ++i) polled[i] = {closed_[i] ? -1 : fds_[i], POLLIN, 0};
    if (::poll(polled.data(), polled.size(), 100) <= 0) return;
    for (std::size_t i = 0; i < 2; ++i) {
      if (polled[i].revents == 0) continue;
      std::array<char, 4096> bytes{};
      const ssize_t got = ::read(fds_[i], bytes.data(), bytes.size());
      if (got > 0) {
        text_[i].append(bytes.data(), static_cast<std::size_t>(got));
      } else {
        closed_[i] = true;
        --open_;
      }
    }
  }

  pid_t pid_ = -1;
  std::array<int, 2> fds_{};
  std::array<bool, 2> closed_{};
  int open_ = 2;
  std::array<std::string, 2> text_;
};

/// What /proc/PID/FILE says; empty once the process is gone.
inline std::string read_process_file(pid_t pid, const char* file) {
  const std::ifstream in("/proc/" + std::to_string(pid) + '/' + file);
  std::ostringstream text;
  text << in.rdbuf();  // takes a process that ends meanwhile for the end of the file
  return text.str();
}
/// Whether a process is stopped. Its name has no parenthesis.
inline bool is_stopped(pid_t pid) {
  const std::string stat = read_process_file(pid, "stat");
  const std::size_t name_end = stat.rfind(") ");
  return name_end != std::string::npos && stat[name_end + 2] == 'T';
}
/// How long a process's main thread has run on processors so far, without its other threads; none
/// once it is gone.
inline std::optional<std::chrono::nanoseconds> processor_time(pid_t pid) {
  const std::string stat = read_process_file(pid, "schedstat");
  if (stat.empty()) return std::nullopt;
  return std::chrono::nanoseconds(std::stoll(stat));
}

struct Outcome {
  int code;
  std::string out;
  std::string err;
};

inline Outcome run(const std::string& name, const Words& arguments) {
  Words words{bin() + "/" + name};
  words.insert(words.end(), arguments.begin(), arguments.end());
  Program program(words);
  const int code = program.wait();
  return {code, program.out(), program.err()};
}

/// A temporary folder that is removed with its contents.
class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "spinwire-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] std::string operator/(const std::string& name) const { return path_ / name; }
  [[nodiscard]] std::size_t files() const {
    const std::filesystem::directory_iterator begin(path_);
    return static_cast<std::size_t>(std::distance(begin, std::filesystem::directory_iterator()));
  }

 private:
  std::filesystem::path path_;
};

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

inline void write_random(const std::string& path, std::size_t size) {
  std::mt19937_64 random(size);
  std::string bytes(size, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  std::ofstream(path, std::ios::binary) << bytes;
}

/// The object that the text is, on one line; an empty one for anything else.
inline nlohmann::json parse_object(const std::string& text) {
  nlohmann::json value = nlohmann::json::parse(text, nullptr, false);
  const bool is_line = text.find('\n') == text.size() - 1;
  return value.is_object() && is_line ? value : nlohmann::json::object();
}

/// Checks what spinwire-perf reports of every test: percentiles that do not fall, and a rate that
/// matches count and seconds. Returns the rate in Mops.
inline double expect_report(const nlohmann::json& result, const std::string& test,
                            const std::string& op, std::uint32_t count) {
  EXPECT_EQ(result.value("test", ""), test);
  EXPECT_EQ(result.value("op", ""), op);
  EXPECT_EQ(result.value("count", 0u), count);
  double least = 0;
  for (const char* key : {"min_ns", "p50_ns", "p90_ns", "p99_ns", "p999_ns", "max_ns"}) {
    const double value = result.value(key, 0.0);
    EXPECT_GE(value, least) << key;
    EXPECT_GT(value, 0) << key;
    least = value;
  }
  const double rate = count / result.value("seconds", 0.0) / 1e6;
  EXPECT_NEAR(result.value("rate_mops", 0.0), rate, rate / 1000);
  return rate;
}

class Tools : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"spinwire-perf", "echo", "file-push", "tour", "kv-store",
                             "market-feed", "gateway", "replicated-log", "log-client"}) {
      if (!std::filesystem::exists(bin() + "/" + name)) {
        FAIL() << bin() << "/" << name << " is not built: run make first";
      }
    }
  }
};
class SlowTools : public Tools {};

}  // namespace tools_test
