#include "doctor/certify_perftest.h"

#include <fmt/core.h>
#include <fmt/ranges.h>
#include <infiniband/verbs.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <thread>

#include "common/cli.h"
#include "common/json.h"

namespace spinwire::doctor {
namespace {

/// A run has the measurement's share of the time, within these limits. So one that hangs takes
/// little from the measurements that follow.
constexpr SteadyTime::duration kLeastRunLimit = std::chrono::seconds(10);
constexpr SteadyTime::duration kMostRunLimit = std::chrono::seconds(60);
/// Limits of the ratio to perftest.
constexpr double kMostTime = 1.05;
constexpr double kLeastRate = 0.95;

/// What perftest prints, in the fifth column: the typical time in us, or million messages per
/// second; or, in the fourth, Gbit/s.
enum class Figure : std::uint8_t {
  half_round_trip,
  round_trip,  ///< of a READ or an atomic
  rate,
  bandwidth,
};

/// What one measurement asks of either program.
struct Measurement {
  const char* name;
  const char* perftest;
  std::vector<std::string> theirs;
  std::vector<std::string> ours;
  Figure figure;
  std::uint32_t operations;  ///< of a run, at most

  [[nodiscard]] bool is_time() const noexcept { return figure <= Figure::round_trip; }
  /// The member of spinwire-perf's JSON: ns, million/s or Gbit/s.
  [[nodiscard]] const char* member() const noexcept {
    return is_time() ? "p50_ns" : figure == Figure::rate ? "rate_mops" : "gbit_per_s";
  }
  [[nodiscard]] const char* unit() const noexcept {
    return is_time() ? "us" : figure == Figure::rate ? "million/s" : "Gbit/s";
  }
  [[nodiscard]] bool is_atomic() const noexcept { return ours[2] == "atomic"; }
};

Measurement bandwidth(const char* name, const char* perftest, const char* op, const char* size,
                      std::uint32_t operations) {
  return {name,
          perftest,
          {"-s", size, "-t", "8", "--report_gbits"},
          {"bw", "--op", op, "-s", size, "-w", "8"},
          Figure::bandwidth,
          operations};
}

const Measurement& measurement_at(std::uint32_t index) {
  constexpr std::uint32_t kTimes = kMostOperations / 2;
  // Doctors name a measurement to each other by its number: new ones come last.
  static const std::array<Measurement, kMeasurements> kAll{{
      {"send, round trip of 32 bytes",
       "ib_send_lat",
       {"-s", "32"},
       {"lat", "--op", "send", "-s", "32"},
       Figure::half_round_trip,
       kTimes},
      {"write, round trip of 32 bytes",
       "ib_write_lat",
       {"-s", "32"},
       {"lat", "--op", "pong", "-s", "32"},
       Figure::half_round_trip,
       kTimes},
      {"rate of messages of 64 bytes",
       "ib_send_bw",
       {"-s", "64"},
       {"rate", "--op", "send", "-s", "64", "-w", "128"},
       Figure::rate,
       kMostOperations},
      {"read of 32 bytes",
       "ib_read_lat",
       {"-s", "32"},
       {"lat", "--op", "read", "-s", "32"},
       Figure::round_trip,
       kTimes},
      {"atomic of 8 bytes",
       "ib_atomic_lat",
       {"-A", "FETCH_AND_ADD"},
       {"lat", "--op", "atomic"},
       Figure::round_trip,
       kTimes},
      bandwidth("messages of 64 KiB", "ib_send_bw", "send", "65536", 4000),
      bandwidth("messages of 1 MiB", "ib_send_bw", "send", "1048576", 500),
      bandwidth("writes of 64 KiB", "ib_write_bw", "write", "65536", 4000),
      bandwidth("writes of 1 MiB", "ib_write_bw", "write", "1048576", 500),
      bandwidth("reads of 64 KiB", "ib_read_bw", "read", "65536", 4000),
      bandwidth("reads of 1 MiB", "ib_read_bw", "read", "1048576", 500),
  }};
  return kAll[index];
}

/// Operations of a run. Slow devices do fewer, but enough for a median, or for several windows.
std::uint32_t operations_of(const Certification& what, const Measurement& m) {
  const std::uint32_t least = m.figure == Figure::bandwidth ? 64 : 200;
  return std::max(m.operations / static_cast<std::uint32_t>(what.slowness), least);
}

/// Two different processors for client and server; -1: any.
int cpu_of(std::size_t end) {
  const std::vector<int> allowed = tools::allowed_cpus();
  return allowed.size() > end && allowed.size() > 1 ? allowed[end] : -1;
}

/// A TCP port that nothing uses, below those that the kernel gives to other programs meanwhile; 0:
/// none was found.
int free_port() {
  static std::minstd_rand random(std::random_device{}());
  std::uniform_int_distribution<int> ports(20000, 32000);
  for (int tries = 0; tries < 100; ++tries) {
    const int port = ports(random);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool is_free = ::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    ::close(fd);
    if (is_free) return port;
  }
  return 0;
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

/// The numbers of the last line of perftest's table; empty: there is none.
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

/// perftest's program for either end. Errors: unsupported (it is missing).
Result<Command> perftest_command(const Certification& what, const Programs& programs,
                                 const Measurement& m, int port, std::uint32_t operations) {
  Findings missing;
  const std::string program =
      programs.find("perftest", m.perftest, "apt-get install perftest", missing);
  Command command{{program}};
  if (program.empty() || !add_preload(what, programs, "perftest", command, missing)) {
    const Finding& why = missing.all().front();
    return tl::unexpected(Error{Status::unsupported, why.remedy, why.text, ""});
  }
  std::vector<std::string>& words = command.words;
  words.insert(words.end(), {"-d", what.device, "-F", "-p", std::to_string(port)});
  // softverbs shows such programs its first port alone.
  if (what.port == 1 || (what.port > 0 && what.device != "softverbs"))
    words.insert(words.end(), {"-i", std::to_string(what.port)});
  if (what.gid_index >= 0) words.insert(words.end(), {"-x", std::to_string(what.gid_index)});
  words.insert(words.end(), m.theirs.begin(), m.theirs.end());
  words.insert(words.end(), {"-n", std::to_string(operations)});
  return command;
}

/// spinwire-perf for either end; `words` are its first arguments. Errors: unsupported (it is
/// missing).
Result<Command> spinwire_command(const Certification& what, const Programs& programs,
                                 const Measurement& m, int port,
                                 const std::vector<std::string>& words, bool is_loopback) {
  Findings missing;
  const std::string program = programs.find("perftest", "spinwire-perf",
                                            "make tools  # or install spinwire-tools", missing);
  if (program.empty()) {
    const Finding& why = missing.all().front();
    return tl::unexpected(Error{Status::unsupported, why.remedy, why.text, ""});
  }
  Command command{{program}};
  command.words.insert(command.words.end(), words.begin(), words.end());
  command.words.insert(command.words.end(), {"-p", std::to_string(port), "-d", what.device});
  if (!what.config.empty()) command.words.insert(command.words.end(), {"-c", what.config});
  const bool is_rate = m.figure == Figure::rate;
  command.environment = {{"SPINWIRE_QUEUES_RECEIVE_DEPTH", is_rate ? "512" : "64"},
                         {"SPINWIRE_CONNECTIONS_CREDITS", is_rate ? "256" : "32"}};
  // Between hosts, what the user has set decides whether a key is needed.
  if (is_loopback) command.environment.emplace_back("SPINWIRE_SECURITY_OPEN", "true");
  if (what.port > 0)
    command.environment.emplace_back("SPINWIRE_DEVICE_PORT", std::to_string(what.port));
  if (what.gid_index >= 0)
    command.environment.emplace_back("SPINWIRE_DEVICE_GID_INDEX", std::to_string(what.gid_index));
  return command;
}

/// perftest takes an IPv6 address without brackets.
std::string without_brackets(const std::string& host) {
  return host.starts_with('[') ? host.substr(1, host.size() - 2) : host;
}

Result<Command> client_command(const Certification& what, const Programs& programs,
                               const Measurement& m, PerfProgram program,
                               const PerfServer::Started& server) {
  const bool is_loopback = server.host.empty();
  const int port = static_cast<int>(server.port);
  if (program == PerfProgram::perftest) {
    auto command = perftest_command(what, programs, m, port, server.operations);
    if (command)
      command->words.push_back(is_loopback ? "localhost" : without_brackets(server.host));
    return command;
  }
  std::vector<std::string> words = m.ours;
  words.insert(words.begin() + 1, is_loopback ? "127.0.0.1" : server.host);
  words.insert(words.end(), {"-n", std::to_string(server.operations), "--json"});
  return spinwire_command(what, programs, m, port, words, is_loopback);
}

/// perftest's figure in a row of its table, in the unit of Measurement::member().
double perftest_figure(const Measurement& m, const std::vector<double>& row) {
  switch (m.figure) {
    case Figure::half_round_trip:
      return 2000 * row[4];
    case Figure::round_trip:
      return 1000 * row[4];
    case Figure::rate:
      return row[4];
    case Figure::bandwidth:
      break;
  }
  return row[3];
}

/// The figure in the output of a client, in the unit of Measurement::member(). Errors: system.
Result<double> figure_of(const Measurement& m, PerfProgram program, const std::string& output,
                         const Command& client) {
  if (program == PerfProgram::perftest) {
    const std::vector<double> row = last_row(output);
    if (row.size() < 5 || perftest_figure(m, row) <= 0)
      return tl::unexpected(Error{Status::system, client.text(), "it prints no figures", ""});
    return perftest_figure(m, row);
  }
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    // Other lines are messages.
    const tools::Json report = tools::Json::parse(line, nullptr, false);
    const auto figure = report.find(m.member());
    if (figure != report.end() && figure->is_number() && *figure > 0) return figure->get<double>();
  }
  return tl::unexpected(
      Error{Status::system, client.text(), fmt::format("it prints no {}", m.member()), ""});
}

/// One run of one program, of a measurement that has this share of the time.
Result<double> measure(const Certification& what, const Programs& programs, PerfServer& server,
                       std::uint32_t measurement, PerfProgram program, SteadyTime::duration share,
                       SteadyTime deadline) {
  const Measurement& m = measurement_at(measurement);
  if (now() >= deadline)
    return tl::unexpected(
        Error{Status::timed_out, "measure", "the time is over",
              "spinwire-doctor certify --device DEVICE --minutes MINUTES  # with more minutes"});
  deadline = std::min(deadline, now() + std::clamp(share, kLeastRunLimit, kMostRunLimit));
  const auto started = server.start(measurement, program, deadline);
  if (!started) return tl::unexpected(started.error());
  auto client = client_command(what, programs, m, program, *started);
  if (!client) return tl::unexpected(client.error());
  client->cpu = cpu_of(0);
  const auto output = output_of(*client, deadline);
  server.stop(output ? deadline : SteadyTime{});
  if (!output) return tl::unexpected(output.error());
  return figure_of(m, program, *output, *client);
}

/// Whether libibverbs' device has atomics; the embedded one always has.
bool device_has_atomics(const std::string& name) {
  if (name == "softverbs") return true;
  int count = 0;
  const std::unique_ptr<ibv_device*, void (*)(ibv_device**)> devices(::ibv_get_device_list(&count),
                                                                     ::ibv_free_device_list);
  for (int i = 0; i < count; ++i) {
    ibv_device* const device = devices.get()[i];
    if (name != ::ibv_get_device_name(device)) continue;
    const std::unique_ptr<ibv_context, int (*)(ibv_context*)> context(::ibv_open_device(device),
                                                                      ::ibv_close_device);
    ibv_device_attr attributes{};
    return context != nullptr && ::ibv_query_device(context.get(), &attributes) == 0 &&
           attributes.atomic_cap != IBV_ATOMIC_NONE;
  }
  return false;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// In the unit of the report.
double shown(const Measurement& m, double value) { return m.is_time() ? value / 1000 : value; }

void report_comparison(const Measurement& m, const std::vector<double>& theirs,
                       const std::vector<double>& ours, Findings& findings) {
  std::vector<double> ratios;
  for (std::size_t i = 0; i < ours.size(); ++i) ratios.push_back(ours[i] / theirs[i]);
  const double ratio = median(ratios);
  const double limit = m.is_time() ? kMostTime : kLeastRate;
  const bool is_good = m.is_time() ? ratio <= limit : ratio >= limit;
  findings.add(
      "perftest", is_good ? Severity::ok : Severity::warning,
      fmt::format(
          "{0}: {1:.2f} {2}, {3} {4:.2f} {2}, ratio {5:.3f}{6}", m.name, shown(m, median(ours)),
          m.unit(), m.perftest, shown(m, median(theirs)), ratio,
          is_good ? "" : fmt::format(", {} than {:.2f}", m.is_time() ? "more" : "less", limit)),
      fmt::format("medians of {} run{}; ratios {:.3f} to {:.3f}, {} {:.2f} wanted", ratios.size(),
                  ratios.size() == 1 ? "" : "s", *std::min_element(ratios.begin(), ratios.end()),
                  *std::max_element(ratios.begin(), ratios.end()),
                  m.is_time() ? "at most" : "at least", limit));
}

/// Takes one measurement. After `enough` it begins no further run.
void compare_once(const Certification& what, const Programs& programs, PerfServer& server,
                  std::uint32_t measurement, SteadyTime enough, SteadyTime deadline,
                  Findings& findings) {
  const Measurement& m = measurement_at(measurement);
  const SteadyTime::duration share = enough - now();
  std::vector<double> theirs;
  std::vector<double> ours;
  std::optional<Error> failure;
  const auto run = [&](PerfProgram program) {
    const auto value = measure(what, programs, server, measurement, program, share, deadline);
    if (!value) failure = value.error();
    if (value) (program == PerfProgram::spinwire ? ours : theirs).push_back(*value);
  };
  // They alternate, so that both meet the same disturbances.
  for (int i = 0; i < what.runs && !failure && (i == 0 || now() < enough); ++i) {
    run(i % 2 == 0 ? PerfProgram::perftest : PerfProgram::spinwire);
    if (!failure) run(i % 2 == 0 ? PerfProgram::spinwire : PerfProgram::perftest);
  }
  // The last measurement runs until the deadline, which may cut a further pair of runs off.
  const bool has_pair = !theirs.empty() && !ours.empty();
  if (failure && !(has_pair && failure->status == Status::timed_out)) {
    findings.add("perftest", Severity::error, fmt::format("{}: not measured", m.name),
                 failure->found, failure->remedy.empty() ? failure->asked : failure->remedy);
  }
  ours.resize(std::min(ours.size(), theirs.size()));
  theirs.resize(ours.size());
  if (!ours.empty()) report_comparison(m, theirs, ours, findings);
}

}  // namespace

std::string_view to_string(PerfProgram program) noexcept {
  return program == PerfProgram::perftest ? "perftest" : "spinwire-perf";
}

Result<Command> LocalServer::command(std::uint32_t measurement, PerfProgram program, int port,
                                     std::uint32_t operations) const {
  const Measurement& m = measurement_at(measurement);
  if (program == PerfProgram::perftest)
    return perftest_command(what_, programs_, m, port, operations);
  std::vector<std::string> words{"--once"};
  if (!address_.empty()) words.insert(words.end(), {"--bind", address_});
  return spinwire_command(what_, programs_, m, port, words, address_.empty());
}

Result<PerfServer::Started> LocalServer::start(std::uint32_t measurement, PerfProgram program,
                                               SteadyTime deadline) {
  running_.reset();
  const int port = free_port();
  const std::uint32_t operations = operations_of(what_, measurement_at(measurement));
  auto server = command(measurement, program, port, operations);
  if (!server) return tl::unexpected(server.error());
  server->cpu = cpu_of(1);
  server->watched_fd = what_.watched_fd;
  auto serving = RunningProgram::start(*server);
  if (!serving) return tl::unexpected(serving.error());
  while (!is_listening(port)) {
    std::string line;
    const auto look = now() + std::chrono::milliseconds(20);
    if (now() >= deadline || tools::stop_requested())
      return tl::unexpected(Error{Status::timed_out, server->text(), "it does not listen", ""});
    const auto got = serving->next_line(line, look);
    if (got == RunningProgram::Got::late && now() < look)
      return tl::unexpected(Error{Status::timed_out, server->text(), "nobody waits for it", ""});
    if (got == RunningProgram::Got::end)
      return tl::unexpected(
          Error{Status::system, server->text(), "it ended before it listened", ""});
  }
  running_.emplace(std::move(*serving));
  return Started{"", static_cast<std::uint32_t>(port), operations};
}

void LocalServer::stop(SteadyTime deadline) {
  if (running_) (void)running_->wait(deadline);
  running_.reset();
}

void compare_with_perftest(const Certification& what, const Programs& programs, PerfServer& server,
                           SteadyTime deadline, Findings& findings) {
  const bool has_atomics = device_has_atomics(what.device);
  for (std::uint32_t i = 0; i < kMeasurements; ++i) {
    const Measurement& m = measurement_at(i);
    if (m.is_atomic() && !has_atomics) {
      findings.add("perftest", Severity::note, fmt::format("{}: not measured", m.name),
                   "the device has no atomics");
      continue;
    }
    // A measurement that needs less leaves the rest of its share to the others.
    const SteadyTime begin = std::min(now(), deadline);
    const SteadyTime enough = begin + (deadline - begin) / (kMeasurements - i);
    compare_once(what, programs, server, i, enough, deadline, findings);
  }
}

}  // namespace spinwire::doctor
