#include "peers/harness/options.h"

#include <fmt/core.h>
#include <sched.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <map>
#include <string>

namespace spinwire::bench {
namespace {

const std::map<std::string, Mode> kModes{
    {"1t", Mode::one_thread}, {"2p", Mode::two_processes}, {"sym", Mode::symmetric}};
const std::map<std::string, What> kWhats{{"messages", What::messages},
                                         {"calls", What::calls},
                                         {"write", What::write},
                                         {"read", What::read}};

/// The processors that this process may use.
std::vector<int> allowed_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  ::sched_getaffinity(0, sizeof set, &set);
  std::vector<int> found;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(static_cast<unsigned>(i), &set)) found.push_back(i);
  }
  return found;
}

[[noreturn]] void exit_misused(const std::string& why) {
  fmt::print(stderr, "{}\n", why);
  std::exit(2);
}

template <typename Value>
std::string_view name_of(const std::map<std::string, Value>& names, Value value) noexcept {
  for (const auto& [name, named] : names) {
    if (named == value) return name;
  }
  return {};
}

}  // namespace

std::string_view to_string(Mode mode) noexcept { return name_of(kModes, mode); }
std::string_view to_string(What what) noexcept { return name_of(kWhats, what); }

Options parse_options(int argc, char** argv, std::string_view about,
                      const std::vector<What>& supported) {
  Options o;
  std::string mode = "2p";
  std::string what(to_string(supported.front()));
  std::vector<std::string> known;
  for (const What w : supported) known.emplace_back(to_string(w));
  const std::vector<int> cpus = allowed_cpus();
  o.client_cpu = cpus.front();
  o.server_cpu = cpus.back();

  CLI::App app{std::string(about)};
  app.footer(
      "Prints one JSON object. \"ns\" is the median of all slices, in nanoseconds per operation;\n"
      "\"placements\" has the median for each placement of the two processors.");
  app.add_option("--mode", mode, "1t: one thread; 2p: client and server; sym: both are both")
      ->check(CLI::IsMember(kModes))
      ->capture_default_str();
  app.add_option("--what", what, "what to measure")
      ->check(CLI::IsMember(known))
      ->capture_default_str();
  app.add_option("--window", o.window, "requests under way")
      ->check(CLI::Range(1u, kWidestWindow))
      ->capture_default_str();
  app.add_option("--batch", o.batch, "requests that go out together; divides the window")
      ->check(CLI::Range(1u, kWidestWindow))
      ->capture_default_str();
  app.add_option("--size", o.size, "bytes of a request or of a one-sided operation")
      ->check(CLI::Range(std::size_t{0}, kLongestRequest))
      ->capture_default_str();
  const CLI::Option* reply_size =
      app.add_option("--rsize", o.reply_size, "bytes of a reply; as --size if not given")
          ->check(CLI::Range(std::size_t{0}, kLongestRequest));
  app.add_option("--secs", o.seconds, "seconds to measure")
      ->check(CLI::Range(0.001, 3600.0))
      ->capture_default_str();
  app.add_option("--warm-up", o.warm_up_seconds, "seconds before that")
      ->check(CLI::Range(0.0, 60.0))
      ->capture_default_str();
  app.add_option("--slice-ms", o.slice_ms, "milliseconds of a slice")
      ->check(CLI::Range(0.1, 1000.0))
      ->capture_default_str();
  app.add_option("--client-cpu", o.client_cpu, "processor of the client")->capture_default_str();
  app.add_option("--server-cpu", o.server_cpu, "processor of the server")->capture_default_str();
  app.add_flag("--verbose", o.verbose, "print each slice on stderr");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    std::exit(app.exit(e) == 0 ? 0 : 2);
  }

  o.mode = kModes.at(mode);
  o.what = kWhats.at(what);
  if (reply_size->count() == 0) o.reply_size = o.size;
  if (o.window % o.batch != 0) exit_misused("--window must be a multiple of --batch");
  if (o.is_one_sided() && o.size == 0) exit_misused("--size 0 is not possible for write and read");
  if (o.mode != Mode::one_thread && o.client_cpu == o.server_cpu)
    exit_misused("two processes need two processors");
  return o;
}

}  // namespace spinwire::bench
