#include <fmt/core.h>
#include <fmt/ranges.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>
#include <thread>

#include "common/cli.h"
#include "doctor/certify.h"

namespace spinwire::doctor {
namespace {

/// Runs of each program and measurement. They alternate, so that both meet the same disturbances.
constexpr int kRuns = 5;
constexpr auto kRunLimit = std::chrono::seconds(60);
/// Limits of the ratio to perftest.
constexpr double kMostTime = 1.05;
constexpr double kLeastRate = 0.95;

/// What one measurement asks of either program.
struct Measurement {
  const char* name;
  const char* perftest;
  std::vector<std::string> theirs;
  std::vector<std::string> ours;
  const char* member;  ///< of spinwire-perf's JSON
  bool is_rate;        ///< million messages per second; else ns of a round trip
};

const std::vector<Measurement>& measurements() {
  static const std::vector<Measurement> kAll{
      // perftest reports half of a round trip.
      {"send, round trip of 32 bytes",
       "ib_send_lat",
       {"-s", "32"},
       {"lat", "--op", "send", "-s", "32"},
       "p50_ns",
       false},
      {"write, round trip of 32 bytes",
       "ib_write_lat",
       {"-s", "32"},
       {"lat", "--op", "pong", "-s", "32"},
       "p50_ns",
       false},
      {"rate of messages of 64 bytes",
       "ib_send_bw",
       {"-s", "64"},
       {"rate", "--op", "send", "-s", "64", "-w", "128"},
       "rate_mops",
       true},
  };
  return kAll;
}

/// Operations of a run, as arguments of either program. Slow devices do fewer.
void add_count(const Certification& what, const Measurement& m, Command& command) {
  const int count = std::max((m.is_rate ? 40000 : 20000) / what.slowness, 1000);
  command.words.insert(command.words.end(), {"-n", std::to_string(count)});
}

/// Two different processors for client and server; -1: any.
int cpu_of(std::size_t end) {
  const std::vector<int> allowed = tools::allowed_cpus();
  return allowed.size() > end && allowed.size() > 1 ? allowed[end] : -1;
}

/// A TCP port of loopback that nothing uses; 0: there is none.
int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  const bool is_bound = ::bind(fd, generic, size) == 0 && ::getsockname(fd, generic, &size) == 0;
  ::close(fd);
  return is_bound ? ntohs(address.sin_port) : 0;
}

/// Whether a process of this host listens on the TCP port.
bool is_listening(int port) {
  const std::string address = fmt::format(":{:04X} ", port);
  for (const char* path : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream lines(path);
    for (std::string line; std::getline(lines, line);) {
      // "  0: ADDRESS:PORT ADDRESS:PORT STATE": the first address is ours, and 0A is LISTEN.
      if (line.find(address) == line.find(':', line.find(':') + 1) &&
          line.find(" 0A ") != std::string::npos)
        return true;
    }
  }
  return false;
}

/// Starts the server, and answers the output of the client. Errors: system, timed_out.
Result<std::string> measure_pair(Command server, Command client, int port, SteadyTime deadline) {
  deadline = std::min(deadline, std::chrono::steady_clock::now() + kRunLimit);
  client.cpu = cpu_of(0);
  server.cpu = cpu_of(1);
  auto serving = RunningProgram::start(server);
  if (!serving) return tl::unexpected(serving.error());
  while (!is_listening(port)) {
    std::string line;
    const auto look = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
    if (std::chrono::steady_clock::now() >= deadline || tools::stop_requested())
      return tl::unexpected(Error{Status::timed_out, server.text(), "it does not listen", ""});
    if (serving->next_line(line, look) == RunningProgram::Got::end)
      return tl::unexpected(
          Error{Status::system, server.text(), "it ended before it listened", ""});
  }
  auto output = output_of(client, deadline);
  if (output) (void)serving->wait(deadline);
  return output;
}

/// The words of the last line of perftest's table; empty: there is none.
std::vector<double> last_row(const std::string& output) {
  std::vector<double> row;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::vector<double> numbers;
    for (double number = 0; words >> number;) numbers.push_back(number);
    if (numbers.size() > 3) row = numbers;
  }
  return row;
}

Result<double> measure_theirs(const Certification& what, const Measurement& m,
                              const Command& program, SteadyTime deadline) {
  const int port = free_port();
  Command server = program;
  server.words.insert(server.words.end(), {"-d", what.device, "-F", "-p", std::to_string(port)});
  if (what.gid_index >= 0)
    server.words.insert(server.words.end(), {"-x", std::to_string(what.gid_index)});
  server.words.insert(server.words.end(), m.theirs.begin(), m.theirs.end());
  add_count(what, m, server);
  Command client = server;
  client.words.push_back("localhost");
  const auto output = measure_pair(server, client, port, deadline);
  if (!output) return tl::unexpected(output.error());
  const std::vector<double> row = last_row(*output);
  if (row.size() < 5)
    return tl::unexpected(Error{Status::system, client.text(), "it prints no table", ""});
  return m.is_rate ? row[4] : 2000 * row[4];  // the typical time, us
}

Result<double> measure_ours(const Certification& what, const Measurement& m,
                            const std::string& program, SteadyTime deadline) {
  const int port = free_port();
  Command server{{program, "--once", "-p", std::to_string(port), "-d", what.device}};
  if (!what.config.empty()) server.words.insert(server.words.end(), {"-c", what.config});
  server.environment = {{"SPINWIRE_SECURITY_OPEN", "true"},
                        {"SPINWIRE_QUEUES_RECEIVE_DEPTH", m.is_rate ? "512" : "64"},
                        {"SPINWIRE_CONNECTIONS_CREDITS", m.is_rate ? "256" : "32"}};
  if (what.gid_index >= 0)
    server.environment.emplace_back("SPINWIRE_DEVICE_GID_INDEX", std::to_string(what.gid_index));
  Command client = server;
  client.words.erase(client.words.begin() + 1);  // --once
  client.words.insert(client.words.begin() + 1, m.ours.begin(), m.ours.end());
  client.words.insert(client.words.begin() + 2, "127.0.0.1");
  add_count(what, m, client);
  client.words.push_back("--json");
  const auto output = measure_pair(server, client, port, deadline);
  if (!output) return tl::unexpected(output.error());
  const std::string begin = fmt::format("\"{}\": ", m.member);
  const std::size_t at = output->find(begin);
  const double value = at == std::string::npos ? 0 : std::atof(output->c_str() + at + begin.size());
  if (value > 0) return value;
  return tl::unexpected(
      Error{Status::system, client.text(), fmt::format("it prints no {}", m.member), ""});
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// The unit of the report: us or million/s.
double shown(const Measurement& m, double value) { return m.is_rate ? value : value / 1000; }

void report_comparison(const Measurement& m, const std::vector<double>& theirs,
                       const std::vector<double>& ours, Findings& findings) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < ours.size(); ++i) ratios.push_back(ours[i] / theirs[i]);
  const double ratio = median(ratios);
  const bool is_good = m.is_rate ? ratio >= kLeastRate : ratio <= kMostTime;
  findings.add(
      "perftest", is_good ? Severity::ok : Severity::warning,
      fmt::format("{}: {:.2f} {}, {} {:.2f}, ratio {:.3f}{}", m.name, shown(m, median(ours)),
                  m.is_rate ? "million/s" : "us", m.perftest, shown(m, median(theirs)), ratio,
                  is_good     ? ""
                  : m.is_rate ? ", less than 0.95"
                              : ", more than 1.05"),
      fmt::format("medians of {} runs; ratios {:.3f} to {:.3f}", ratios.size(),
                  *std::min_element(ratios.begin(), ratios.end()),
                  *std::max_element(ratios.begin(), ratios.end())));
}

void compare_once(const Certification& what, const Measurement& m, const Command& perftest,
                  const std::string& spinwire, SteadyTime deadline, Findings& findings) {
  std::vector<double> theirs;
  std::vector<double> ours;
  std::optional<Error> failure;
  const auto measure = [&](bool is_ours) {
    const auto value = is_ours ? measure_ours(what, m, spinwire, deadline)
                               : measure_theirs(what, m, perftest, deadline);
    if (!value) failure = value.error();
    if (value) (is_ours ? ours : theirs).push_back(*value);
  };
  for (int run = 0; run < kRuns && !failure; ++run) {
    measure(run % 2 != 0);
    if (!failure) measure(run % 2 == 0);
  }
  if (failure) {
    findings.add("perftest", Severity::error, fmt::format("{}: not measured", m.name),
                 failure->found, failure->asked);
  }
  ours.resize(std::min(ours.size(), theirs.size()));
  if (!ours.empty()) report_comparison(m, theirs, ours, findings);
}

}  // namespace

void compare_with_perftest(const Certification& what, const Programs& programs, SteadyTime deadline,
                           Findings& findings) {
  const std::string part = "perftest";
  const std::string ours =
      programs.find(part, "spinwire-perf", "make tools, or install spinwire-tools", findings);
  if (ours.empty()) return;
  for (const Measurement& m : measurements()) {
    const std::string theirs =
        programs.find(part, m.perftest, "apt-get install perftest", findings);
    Command command{{theirs}};
    if (theirs.empty() || !add_preload(what, programs, part, command, findings)) continue;
    compare_once(what, m, command, ours, deadline, findings);
  }
}

}  // namespace spinwire::doctor
