// What all command lines have in common: exit codes, messages on stderr, log, signals, CPU.
#pragma once

#include <cstdint>
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
/// For CLI::Range(): what it refuses it says with both ends, and those of CLI::PositiveNumber
/// nobody can read.
inline constexpr std::uint64_t kOne = 1;
inline constexpr std::uint64_t kMostCount = 1'000'000'000'000'000;
inline constexpr int kMostCpu = 1023;
/// Where servers listen unless told otherwise: nobody but this host reaches it.
inline constexpr int kDefaultPort = 18515;
inline constexpr std::string_view kDefaultBind = "127.0.0.1";

/// Parses the command line. True: go on. False: end with `code`; --help went to stdout, or what is
/// wrong to stderr.
bool parse_arguments(CLI::App& app, int argc, char** argv, int& code);

/// The program's name in the messages below. Call it first in main().
void set_program(std::string_view name);
/// Prints "program: message" on stderr; answers kFailed.
int fail(std::string_view message);
int fail(const Error& error);

/// Sends the library's warnings and errors to stderr.
void log_to_stderr();

/// SIGINT and SIGTERM make stop_requested() true from now on; a second one ends the program.
void catch_stop_signals();
/// One load.
bool stop_requested() noexcept;

/// Those that this process may run on.
std::vector<int> allowed_cpus();
/// Keeps the calling thread on one CPU. Errors: invalid_argument, when it is not among ours.
Result<void> pin_to_cpu(int cpu);

}  // namespace spinwire::tools
