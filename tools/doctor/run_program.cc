#include "doctor/run_program.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <thread>

#include "common/cli.h"

namespace spinwire::doctor {
namespace {

constexpr auto kLookAgain = std::chrono::milliseconds(100);

/// What the child needs of a command. Made before the fork: another thread may hold a lock of the
/// heap or of the environment at that moment, and the child would wait for it for ever.
class Image {
 public:
  explicit Image(const Command& command) : words_(command.words), cpu_(command.cpu) {
    for (char** each = environ; *each != nullptr; ++each) {
      const std::string_view variable(*each);
      const auto is_replaced = [&](const auto& added) {
        return variable.substr(0, variable.find('=')) == added.first;
      };
      if (std::none_of(command.environment.begin(), command.environment.end(), is_replaced))
        variables_.emplace_back(variable);
    }
    for (const auto& [name, value] : command.environment) variables_.push_back(name + '=' + value);
    argv_ = pointers(words_);
    envp_ = pointers(variables_);
    CPU_ZERO(&processors_);
    if (cpu_ >= 0) CPU_SET(static_cast<std::size_t>(cpu_), &processors_);
  }
  Image(const Image&) = delete;
  Image& operator=(const Image&) = delete;
  ~Image() = default;

  /// In the child: becomes the program.
  [[noreturn]] void become(int output) const {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::setpgid(0, 0);
    const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    ::dup2(nothing, STDIN_FILENO);
    ::dup2(output, STDOUT_FILENO);
    ::dup2(output, STDERR_FILENO);
    if (cpu_ >= 0) (void)::sched_setaffinity(0, sizeof processors_, &processors_);
    ::execvpe(argv_[0], argv_.data(), envp_.data());
    ::_exit(127);
  }

 private:
  static std::vector<char*> pointers(std::vector<std::string>& texts) {
    std::vector<char*> all;
    for (std::string& text : texts) all.push_back(text.data());
    all.push_back(nullptr);
    return all;
  }

  std::vector<std::string> words_;
  std::vector<std::string> variables_;
  std::vector<char*> argv_;
  std::vector<char*> envp_;
  int cpu_;
  cpu_set_t processors_{};
};

std::string quoted(const std::string& word) {
  const bool is_plain = word.find_first_of(" *?:'\"$&|;<>()") == std::string::npos;
  return is_plain ? word : '\'' + word + '\'';
}

}  // namespace

std::string Command::text() const {
  std::string text;
  for (const auto& [name, value] : environment) text += name + '=' + quoted(value) + ' ';
  for (const std::string& word : words) text += quoted(word) + ' ';
  if (!text.empty()) text.pop_back();
  return text;
}

Result<RunningProgram> RunningProgram::start(const Command& command) {
  const auto refused = [&](const char* call) {
    return tl::unexpected(Error{Status::system, fmt::format("start {}", command.words[0]),
                                fmt::format("{}: {}", call, std::strerror(errno)),
                                "ulimit -u; ulimit -n  # one of these limits may be too low"});
  };
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return refused("pipe2");
  const Image image(command);
  const pid_t pid = ::fork();
  if (pid == 0) image.become(ends[1]);
  if (pid < 0) {
    auto error = refused("fork");
    for (const int end : ends) ::close(end);
    return error;
  }
  ::setpgid(pid, pid);
  ::close(ends[1]);
  return RunningProgram(pid, ends[0], command.watched_fd);
}

RunningProgram::~RunningProgram() {
  if (pid_ > 0) {
    ::kill(-pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  if (fd_ >= 0) ::close(fd_);
}

bool RunningProgram::is_over() const {
  if (tools::stop_requested()) return true;
  pollfd watched{watched_fd_, POLLRDHUP, 0};
  return watched_fd_ >= 0 && ::poll(&watched, 1, 0) > 0;
}

RunningProgram::Got RunningProgram::next_line(std::string& line, SteadyTime deadline) {
  for (;;) {
    const std::size_t end = text_.find('\n');
    if (end != std::string::npos) {
      line = text_.substr(0, end);
      text_.erase(0, end + 1);
      return Got::line;
    }
    if (std::chrono::steady_clock::now() >= deadline || is_over()) return Got::late;
    pollfd wait{fd_, POLLIN, 0};
    if (::poll(&wait, 1, static_cast<int>(kLookAgain.count())) <= 0) continue;
    std::array<char, 4096> bytes{};
    const ssize_t got = ::read(fd_, bytes.data(), bytes.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return Got::end;
    text_.append(bytes.data(), static_cast<std::size_t>(got));
  }
}

int RunningProgram::wait(SteadyTime deadline) {
  int status = 0;
  while (::waitpid(pid_, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() >= deadline || is_over()) ::kill(-pid_, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  ::kill(-pid_, SIGKILL);  // children that the program has left
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

Result<std::string> output_of(const Command& command, SteadyTime deadline) {
  auto program = RunningProgram::start(command);
  if (!program) return tl::unexpected(program.error());
  std::string all;
  std::string line;
  RunningProgram::Got got = program->next_line(line, deadline);
  for (; got == RunningProgram::Got::line; got = program->next_line(line, deadline))
    all += line + '\n';
  if (got == RunningProgram::Got::late)
    return tl::unexpected(Error{Status::timed_out, command.text(), "it takes too long", ""});
  const int status = program->wait(deadline);
  if (status == 0) return all;
  return tl::unexpected(Error{Status::system, command.text(),
                              fmt::format("it ends with status {}: {}", status, all), ""});
}

}  // namespace spinwire::doctor
