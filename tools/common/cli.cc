#include "common/cli.h"

#include <fmt/core.h>
#include <sched.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <string>

#include "spinwire/log.h"

namespace spinwire::tools {
namespace {

std::string program = "spinwire";
volatile std::sig_atomic_t stop = 0;

std::string_view name(LogLevel level) { return level == LogLevel::error ? "error" : "warning"; }

}  // namespace

bool parse_arguments(CLI::App& app, int argc, char** argv, int& code) {
  try {
    app.parse(argc, argv);
    return true;
  } catch (const CLI::ParseError& e) {
    code = app.exit(e) == 0 ? kDone : kMisused;
    return false;
  }
}

void set_program(std::string_view name) { program = name; }

int fail(std::string_view message) {
  fmt::print(stderr, "{}: {}\n", program, message);
  return kFailed;
}

int fail(const Error& error) { return fail(error.message()); }

void log_to_stderr() {
  set_log([](LogLevel level, std::string_view message) {
    fmt::print(stderr, "{}: {}: {}\n", program, name(level), message);
  });
}

void log_errors_to_stderr() {
  set_log([](LogLevel level, std::string_view message) {
    if (level == LogLevel::error) fmt::print(stderr, "{}: {}: {}\n", program, name(level), message);
  });
}

void catch_stop_signals() {
  struct sigaction action {};
  action.sa_handler = [](int) { stop = 1; };
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
}

bool stop_requested() noexcept { return stop != 0; }

std::vector<int> allowed_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  ::sched_getaffinity(0, sizeof set, &set);
  std::vector<int> cpus;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(static_cast<unsigned>(i), &set)) cpus.push_back(i);
  }
  return cpus;
}

Result<void> pin_to_cpu(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(static_cast<unsigned>(cpu), &set);
  if (::sched_setaffinity(0, sizeof set, &set) == 0) return {};
  return tl::unexpected(Error{Status::invalid_argument, fmt::format("run on CPU {}", cpu),
                              "the system refused it",
                              "give one of the CPUs that `taskset -cp $$` lists"});
}

}  // namespace spinwire::tools
