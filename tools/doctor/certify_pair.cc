#include "doctor/certify_pair.h"

#include <fmt/core.h>
#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cstdio>

#include "common/cli.h"
#include "doctor/certify_perftest.h"

namespace spinwire::doctor {
namespace {

constexpr std::size_t kNonceDigits = 32;
constexpr std::uint32_t kHighestPort = 65535;
constexpr std::uint32_t kMostIds = 1000000;
constexpr std::uint32_t kMostSeconds = 24 * 60 * 60;
constexpr std::size_t kMostFindings = 200;
/// Longest text of a finding that is sent. Several of them fit into a frame.
constexpr std::size_t kMostWords = 2000;
constexpr Link::Limit kRequestLimit{10000};
/// A server that starts on a busy host, and the answer.
constexpr Link::Limit kStartLimit{70000};

Link::Limit until(SteadyTime end) {
  return std::max(std::chrono::duration_cast<Link::Limit>(end - now()), Link::Limit(0));
}

/// The parts of a report; what a peer names otherwise is no part.
constexpr std::array<std::string_view, 4> kParts{"conformance", "engine", "calls", "device"};

Facts facts_of(const Finding& finding) {
  Facts facts;
  facts["check"] = finding.check;
  facts["severity"] = std::string(to_string(finding.severity));
  facts["text"] = finding.text.substr(0, kMostWords);
  facts["evidence"] = finding.evidence.substr(0, kMostWords);
  return facts;
}

/// Adds a finding of the other host. Its remedy is not sent: a peer's text is no command.
void add_theirs(const Facts& facts, Findings& findings) {
  const std::string check = fact(facts, "check");
  const bool is_part = std::find(kParts.begin(), kParts.end(), check) != kParts.end();
  Severity severity = Severity::error;
  for (const Severity each : {Severity::ok, Severity::note, Severity::warning}) {
    if (fact(facts, "severity") == to_string(each)) severity = each;
  }
  const bool is_departure = severity == Severity::error;
  findings.add((is_part ? check : "report") + " there", severity, fact(facts, "text"),
               fact(facts, "evidence"),
               is_departure ? "# the report of the doctor there has the command" : "");
}

/// Requests of the other doctor, by their numbers. An answer that comes too late is ignored.
class Requests {
 public:
  explicit Requests(Link& link) : link_(link) {}

  /// Errors: those of Link::send().
  Result<void> send(Facts request) {
    request["id"] = std::to_string(++id_);
    return link_.send(LinkKind::facts, encode_facts(request), kRequestLimit);
  }
  /// Errors: those of Link::receive(); timed_out.
  Result<Facts> receive(Link::Limit limit) {
    const SteadyTime end = now() + limit;
    do {
      // An endpoint that came too late for out_of_band.h may be before the answer.
      const auto answer = link_.receive_either(LinkKind::facts, LinkKind::endpoint, until(end));
      if (!answer) return tl::unexpected(answer.error());
      if (answer->kind == LinkKind::endpoint) continue;
      Facts facts = decode_facts(answer->text);
      if (number_fact(facts, "id", kMostIds) == id_) return facts;
    } while (now() < end);
    return tl::unexpected(
        Error{Status::timed_out, "wait for the other doctor", "it answers something else",
              "spinwire-doctor certify --device DEVICE --serve ADDRESS  # there"});
  }
  [[nodiscard]] std::string host() const { return link_.peer_host(); }

 private:
  Link& link_;
  std::uint32_t id_ = 0;
};

/// Runs the servers of perftest and spinwire-perf on the other host.
class RemoteServer : public PerfServer {
 public:
  explicit RemoteServer(Requests& requests) : requests_(requests) {}

  Result<Started> start(std::uint32_t measurement, PerfProgram program,
                        SteadyTime /*deadline*/) override {
    const auto sent = requests_.send({{"request", "start"},
                                      {"measurement", std::to_string(measurement + 1)},
                                      {"program", program == PerfProgram::perftest ? "1" : "2"}});
    const auto answer = sent.and_then([&] { return requests_.receive(kStartLimit); });
    if (!answer) return failed(answer.error().found);
    const auto port = number_fact(*answer, "port", kHighestPort);
    const auto operations = number_fact(*answer, "operations", kMostOperations);
    if (!port || !operations) return failed(fact(*answer, "error"));
    return Started{requests_.host(), *port, *operations};
  }
  /// The other host ends a server when it starts the next one, or when its time is over.
  void stop(SteadyTime /*deadline*/) override {}

 private:
  static tl::unexpected<Error> failed(const std::string& why) {
    return tl::unexpected(Error{Status::system, "measure there", "there: " + why,
                                "# the output of the doctor there says more"});
  }

  Requests& requests_;
};

/// Asks whether the other host admits us. False: a finding says why not.
bool begin(Requests& requests, const Facts& theirs, Findings& findings) {
  if (fact(theirs, "certify").empty()) {
    findings.add("certify", Severity::error, "the doctor there does not certify", requests.host(),
                 "spinwire-doctor certify --device DEVICE --serve ADDRESS  # there");
    return false;
  }
  const auto sent = requests.send({{"request", "begin"}});
  const auto answer = sent.and_then([&] { return requests.receive(kStartLimit); });
  if (answer && fact(*answer, "certify") == "yes") return true;
  findings.add(
      "certify", Severity::error, "the doctor there runs nothing for this one",
      answer ? fact(*answer, "error") : answer.error().found,
      "spinwire-doctor certify --device DEVICE  # on each host alone; first mend what this report "
      "names");
  return false;
}

/// Adds the findings of the other host's tests, which have until `deadline`.
void fetch_tests(Requests& requests, SteadyTime deadline, Findings& findings) {
  // Then the doctor there has ended its tests, and sends what there is.
  constexpr Link::Limit kReportLimit{60000};
  std::string why = "it has no end";
  const SteadyTime end = deadline + kReportLimit;
  for (std::size_t i = 0; i <= kMostFindings; ++i) {
    const auto answer = requests.receive(until(end));
    if (answer && fact(*answer, "done") == "yes") return;
    if (!answer || !fact(*answer, "error").empty()) {
      why = answer ? fact(*answer, "error") : answer.error().found;
      break;
    }
    add_theirs(*answer, findings);
  }
  findings.add("report there", Severity::error, "the other host's report is incomplete", why,
               "# the report of the doctor there has the rest");
}

/// Lets both hosts run their suites at the same time.
void run_suites_on_both(const Certification& what, const Programs& programs, SteadyTime deadline,
                        Requests& requests, Findings& findings) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(until(deadline)).count();
  const auto sent = requests.send(
      {{"request", "tests"}, {"seconds", std::to_string(std::max<std::int64_t>(seconds, 1))}});
  run_suites(what, programs, now(), deadline, findings);
  if (sent) return fetch_tests(requests, deadline, findings);
  findings.add("report there", Severity::error, "the other host's tests did not run",
               sent.error().found, "spinwire-doctor certify --device DEVICE  # there");
}

// ---- the server -------------------------------------------------------------------------------

/// What one client may request. Its programs end with it.
class Service {
 public:
  Service(const Certification& what, const std::string& address, Link& client)
      : what_(what),
        programs_(what.programs),
        server_(what_, programs_, address),
        client_(client),
        end_(now() + part_of_time(what, 1)) {
    what_.watched_fd = client.fd();
  }

  /// Errors: those of Link::receive().
  Result<void> run() {
    while (now() < end_ && !tools::stop_requested()) {
      if (!client_.is_readable(Link::Limit(100))) {
        if (now() > server_end_) server_.stop(SteadyTime{});
        continue;
      }
      const auto asked = client_.receive(LinkKind::facts, kRequestLimit);
      if (!asked) return tl::unexpected(asked.error());
      const Facts facts = decode_facts(*asked);
      const std::string request = fact(facts, "request");
      id_ = fact(facts, "id");
      if (request == "end") return {};
      if (auto answered = answer(request, facts); !answered) return answered;
    }
    return {};
  }

 private:
  Result<void> answer(const std::string& request, const Facts& facts) {
    if (request == "begin") return send({{"certify", "yes"}});
    if (request == "start") return start(facts);
    if (request == "tests") return run_tests(facts);
    return send({{"error", "there is no such request"}});
  }
  Result<void> start(const Facts& facts) {
    const auto measurement = number_fact(facts, "measurement", kMeasurements);
    const auto program = number_fact(facts, "program", 2);
    if (!measurement || !program) return send({{"error", "there is no such measurement"}});
    server_end_ = now() + kServerLimit;
    const auto started = server_.start(
        *measurement - 1, *program == 1 ? PerfProgram::perftest : PerfProgram::spinwire,
        std::min(server_end_, end_));
    if (!started) {
      const Error& why = started.error();
      (void)tools::fail(fmt::format("{}: {}", why.asked, why.found));
      return send({{"error", why.found.substr(0, kMostWords)}});
    }
    return send({{"port", std::to_string(started->port)},
                 {"operations", std::to_string(started->operations)}});
  }
  Result<void> run_tests(const Facts& facts) {
    server_.stop(SteadyTime{});
    const std::chrono::seconds asked(number_fact(facts, "seconds", kMostSeconds).value_or(1));
    Findings findings;
    run_suites(what_, programs_, now(), std::min(end_, now() + asked), findings);
    fmt::print("report for {}:\n{}", client_.peer_host(), findings.text(true));
    std::fflush(stdout);
    std::size_t sent = 0;
    for (const Finding& finding : findings.all()) {
      if (sent++ == kMostFindings)
        return send({{"error", fmt::format("it has {} findings", findings.all().size())}});
      if (auto done = send(facts_of(finding)); !done) return done;
    }
    return send({{"done", "yes"}});
  }
  /// The client reads reports when its own tests have ended.
  Result<void> send(Facts facts) {
    facts["id"] = id_;
    for (auto& [name, value] : facts) std::replace(value.begin(), value.end(), '\n', ' ');
    return client_.send(LinkKind::facts, encode_facts(facts), until(end_ + kRequestLimit));
  }

  /// A server of perftest or spinwire-perf is killed after that time.
  static constexpr auto kServerLimit = std::chrono::seconds(60);

  Certification what_;
  Programs programs_;
  LocalServer server_;
  Link& client_;
  std::string id_;  ///< of the request that is answered
  SteadyTime end_;
  SteadyTime server_end_{SteadyTime::max()};
};

}  // namespace

Result<std::string> make_nonce() {
  std::array<unsigned char, kNonceDigits / 2> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    return tl::unexpected(Error{Status::system, "make a nonce", "getrandom() fails", ""});
  std::string nonce;
  for (const unsigned char byte : bytes) nonce += fmt::format("{:02x}", byte);
  return nonce;
}

bool is_nonce(std::string_view text) noexcept {
  return text.size() == kNonceDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

Findings certify_pair(const Certification& what, const Subject& subject, const Config& config,
                      const std::string& host, int port) {
  const Programs programs(what.programs);
  Findings findings;
  if (!find_device(what, findings)) return findings;
  const auto nonce = make_nonce();
  if (!nonce) {
    findings.add("certify", Severity::error, nonce.error().found, nonce.error().asked,
                 nonce.error().remedy);
    return findings;
  }
  auto encounter = meet(subject, host, port, *nonce, findings);
  if (!encounter) return findings;
  // The other doctor may have served others until now.
  const SteadyTime began = now();
  compare_hosts(subject, config, *encounter, *nonce, findings);
  Requests requests(encounter->link);
  if (!begin(requests, encounter->theirs, findings)) return findings;
  RemoteServer server(requests);
  compare_with_perftest(what, programs, server, began + part_of_time(what, 0.5), findings);
  run_suites_on_both(what, programs, began + part_of_time(what, 1), requests, findings);
  (void)requests.send({{"request", "end"}});
  return findings;
}

Result<void> serve_certification(const Certification& what, const std::string& address,
                                 bool is_known, SteadyTime deadline, Link& client) {
  if (is_known) return Service(what, address, client).run();
  const auto asked = client.receive(LinkKind::facts, std::min(until(deadline), kRequestLimit));
  if (!asked) return tl::unexpected(asked.error());
  const Facts refusal{{"error", "it has seen no connection of this doctor's engine"},
                      {"id", fact(decode_facts(*asked), "id")}};
  return client.send(LinkKind::facts, encode_facts(refusal), kRequestLimit);
}

}  // namespace spinwire::doctor
