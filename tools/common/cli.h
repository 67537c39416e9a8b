// Shared by all command lines: exit codes, messages on stderr, log, signals, CPU.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "spinwire/status.h"

namespace CLI {
class App;
}

namespace spinwire::tools {

inline constexpr int kDone = 0;
inline constexpr int kFailed = 1;
inline constexpr int kMisused = 2;
/// Bounds for CLI::Range(), whose error message names both. CLI::PositiveNumber's message is
/// unreadable.
inline constexpr std::uint64_t kOne = 1;
inline constexpr std::uint64_t kMostCount = 1'000'000'000'000'000;
inline constexpr int kMostCpu = 1023;
/// For CLI::AsNumberWithUnit(): units of a time in seconds. A number alone is seconds.
inline const std::map<std::string, double> kTimeUnits{
    {"us", 1e-6}, {"ms", 1e-3}, {"s", 1}, {"min", 60}};
/// Default address of servers: reachable from this host only.
inline constexpr int kDefaultPort = 18515;
inline constexpr std::string_view kDefaultBind = "127.0.0.1";

/// Parses the command line. Returns true if the program should go on. If false, the program ends
/// with `code`; --help went to stdout, an error to stderr.
bool parse_arguments(CLI::App& app, int argc, char** argv, int& code);

/// Sets the program's name for the messages below. Call it first in main().
void set_program(std::string_view name);
/// Prints "program: message" on stderr; returns kFailed.
int fail(std::string_view message);
int fail(const Error& error);

/// Sends the library's warnings and errors to stderr.
void log_to_stderr();
/// From now on its errors alone.
void log_errors_to_stderr();

/// SIGINT and SIGTERM make stop_requested() true from now on; a second one ends the program.
void catch_stop_signals();
/// Costs one load.
bool stop_requested() noexcept;

/// The CPUs that this process may run on.
std::vector<int> allowed_cpus();
/// Keeps the calling thread on one CPU. Errors: invalid_argument, if this process may not use that
/// CPU.
Result<void> pin_to_cpu(int cpu);

}  // namespace spinwire::tools
