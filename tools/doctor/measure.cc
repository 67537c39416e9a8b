#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "common/cli.h"
#include "common/spin.h"
#include "doctor/clocks.h"
#include "doctor/latency.h"
#include "doctor/measured_region.h"
#include "doctor/out_of_band.h"
#include "doctor/two_hosts.h"
#include "doctor/waiting_room.h"
#include "spinwire/spinwire.h"

namespace spinwire::doctor {
namespace {

constexpr std::uint32_t kMostPort = 65535;
/// For a connection, and for a session: a peer that does not answer costs each of them once.
constexpr Nanoseconds kConnectLimit = std::chrono::seconds(10);
constexpr Nanoseconds kMeasureLimit = std::chrono::seconds(60);
constexpr std::uint32_t kEchoes = 2000;
/// Slow hosts and lossy links do fewer echoes, writes and calls, because the other doctor serves
/// for a minute.
constexpr Nanoseconds kEchoLimit = std::chrono::seconds(5);
constexpr Nanoseconds kRateLimit = std::chrono::seconds(5);
constexpr Nanoseconds kCallsLimit = std::chrono::seconds(8);
/// For an echo, and for the writes that are under way at the end.
constexpr Nanoseconds kLastLimit = std::chrono::seconds(5);
constexpr std::uint32_t kCalls = 2000;
constexpr std::uint32_t kWrites = 256;
constexpr std::uint32_t kWritesAtOnce = 8;
/// Part of a port's rate that large writes reach on a sound link.
constexpr double kLeastShare = 0.5;

/// What callbacks of a connection have seen.
struct ConnectionEvents {
  std::optional<RemoteRegion> region;
  std::optional<Error> error;
  std::uint32_t echoes = 0;
  std::uint32_t writes_ended = 0;
  std::optional<Status> failed_write;  ///< the first that failed, or was refused for good

  void take(Message& message) {
    if (region) {
      ++echoes;
    } else if (message.size() == sizeof(RemoteRegion)) {
      std::memcpy(&region.emplace(), message.data(), sizeof(RemoteRegion));
    }
  }
};
/// What callbacks of a session have seen.
struct SessionEvents {
  bool is_ready = false;
  std::optional<Error> error;
  std::uint32_t ended = 0;
  std::uint32_t answered = 0;
};
/// All of them outlive the engine: a connection or session that has not closed in time still has
/// callbacks.
struct Events {
  OutOfBandEvents out_of_band;
  std::deque<ConnectionEvents> connections;
  std::deque<SessionEvents> sessions;
  Nanoseconds echo_limit = kLastLimit;
  Nanoseconds close_limit = kConnectLimit;
};

/// A connection to the other doctor's engine.
class MeasuredConnection {
 public:
  MeasuredConnection(Engine& engine, Events& events, const std::string& address, Via via)
      : engine_(engine),
        events_(events.connections.emplace_back()),
        echo_limit_(events.echo_limit),
        close_limit_(events.close_limit) {
    ConnectionEvents* const seen = &events_;
    ConnectOptions options;
    options.via = via;
    options.timeout = kConnectLimit;
    options.handlers.on_message = [seen](Connection, Message& message) { seen->take(message); };
    options.handlers.on_closed = [seen](Connection, const Error& error) {
      if (!seen->error) seen->error = error;
    };
    auto connection = engine.connect(address, options);
    if (!connection) {
      seen->error = connection.error();
      return;
    }
    connection_ = *connection;
    (void)tools::spin_until(engine, 2 * kConnectLimit,
                            [seen] { return seen->region || seen->error; });
    if (!seen->region && !seen->error)
      seen->error = Error{Status::timed_out, "connect", "no message came", "try again"};
  }
  MeasuredConnection(const MeasuredConnection&) = delete;
  MeasuredConnection& operator=(const MeasuredConnection&) = delete;
  ~MeasuredConnection() {
    (void)connection_.close();
    (void)tools::spin_until(engine_, close_limit_,
                            [this] { return connection_.state() == ConnectionState::closed; });
  }

  [[nodiscard]] bool is_ready() const noexcept { return events_.region && !events_.error; }
  /// Why it is not ready.
  [[nodiscard]] std::string why() const {
    return events_.error && events_.error->status != Status::ok ? events_.error->message()
                                                                : "the other end closed it";
  }

  /// Sends these bytes, and waits until they have come back; false: the connection ended.
  bool echo(std::span<const std::byte> bytes) {
    const std::uint32_t before = events_.echoes;
    const Status sent = submit([&] { return connection_.send_copy(bytes); });
    if (sent != Status::ok && !events_.error)
      events_.error = Error{sent, "send", std::string(to_string(sent)), ""};
    const bool came = tools::spin_until(engine_, echo_limit_,
                                        [&] { return events_.echoes != before || events_.error; });
    if (!came && !events_.error)
      events_.error = Error{Status::timed_out, "echo", "no echo came", ""};
    return !events_.error;
  }

  /// Median of `round_trips()` round trips of 64 bytes, in microseconds; none if the connection
  /// ended.
  std::optional<double> round_trip() {
    std::vector<std::uint64_t> ticks;
    const std::array<std::byte, 64> bytes{};
    const tools::Deadline end(engine_.clock(), kEchoLimit);
    while (ticks.empty() || (ticks.size() < kEchoes && !end.passed())) {
      const std::uint64_t start = engine_.clock().now();
      if (!echo(bytes)) return std::nullopt;
      ticks.push_back(engine_.clock().now() - start);
    }
    round_trips_ = ticks.size();
    const auto middle = ticks.begin() + static_cast<std::ptrdiff_t>(round_trips_ / 2);
    std::nth_element(ticks.begin(), middle, ticks.end());
    return static_cast<double>(engine_.clock().duration(*middle).count()) / 1e3;
  }
  [[nodiscard]] std::size_t round_trips() const noexcept { return round_trips_; }

  /// Rate of large writes, in Gbit/s; none if they stall or fail.
  std::optional<double> rate() {
    const BufferSlice from = engine_.allocate(kRegionBytes);
    if (!from) return fail_write(Status::no_buffer);
    Writes w;
    const std::uint64_t start = engine_.clock().now();
    const tools::Deadline end(engine_.clock(), kRateLimit);
    const bool in_time = tools::spin_until(engine_, kRateLimit + kLastLimit, [&] {
      const bool is_over = events_.error || events_.failed_write || (w.begun != 0 && end.passed());
      while (!is_over && w.begun < kWrites && w.begun - events_.writes_ended < kWritesAtOnce &&
             begin(w, from)) {
      }
      return events_.writes_ended == w.begun && (events_.writes_ended == kWrites || is_over);
    });
    const auto time = engine_.clock().duration(engine_.clock().now() - start).count();
    if (w.begun == 0 && !events_.failed_write) events_.failed_write = w.refusal;
    is_stalled_ = !in_time && !events_.error && !events_.failed_write;
    if (is_stalled_)
      events_.error =
          Error{Status::timed_out, "write",
                fmt::format("of {} writes {} ended in {} s", w.begun, events_.writes_ended,
                            (kRateLimit + kLastLimit) / std::chrono::seconds(1)),
                ""};
    if (w.begun != events_.writes_ended) {
      (void)connection_.close();
      (void)tools::spin_until(engine_, close_limit_,
                              [&] { return events_.writes_ended == w.begun; });
    }
    if (events_.failed_write) return fail_write(*events_.failed_write);
    if (!in_time || events_.error || time <= 0) return std::nullopt;
    writes_ = events_.writes_ended;
    return 8.0 * static_cast<double>(events_.writes_ended) * static_cast<double>(kRegionBytes) /
           static_cast<double>(time);
  }
  [[nodiscard]] std::uint32_t writes() const noexcept { return writes_; }
  /// Whether the writes ended too late, although the connection did not fail.
  [[nodiscard]] bool is_stalled() const noexcept { return is_stalled_; }

 private:
  struct Writes {
    std::uint32_t begun = 0;
    std::optional<Status> refusal;  ///< of the last one that has to wait
  };
  /// Begins a write; false: it has to wait, or fails.
  bool begin(Writes& w, const BufferSlice& from) {
    const Status status = connection_.write(from, events_.region->slice(0, kRegionBytes),
                                            [seen = &events_](const Completion& c) {
                                              ++seen->writes_ended;
                                              if (c.status != Status::ok && !seen->failed_write)
                                                seen->failed_write = c.status;
                                            });
    if (status == Status::ok) {
      ++w.begun;
    } else if (status != Status::would_block && status != Status::no_buffer) {
      events_.failed_write = status;
    } else {
      w.refusal = status;
    }
    return status == Status::ok;
  }
  /// A write failed. If that ends the connection, its error says more.
  std::nullopt_t fail_write(Status status) {
    constexpr Nanoseconds kEndLimit = std::chrono::seconds(1);
    (void)tools::spin_until(engine_, kEndLimit, [this] { return events_.error.has_value(); });
    if (!events_.error) events_.error = Error{status, "write", std::string(to_string(status)), ""};
    return std::nullopt;
  }
  /// Tries until the library accepts it, refuses it for good, or kMeasureLimit is over. Returns the
  /// last answer.
  template <typename Submit>
  Status submit(Submit&& submit) {
    Status status = Status::would_block;
    (void)tools::spin_until(engine_, kMeasureLimit, [&] {
      status = submit();
      return status != Status::would_block && status != Status::no_buffer;
    });
    return status;
  }

  Engine& engine_;
  ConnectionEvents& events_;
  Nanoseconds echo_limit_;
  Nanoseconds close_limit_;
  Connection connection_;
  std::size_t round_trips_ = 0;
  std::uint32_t writes_ = 0;
  bool is_stalled_ = false;
};

/// A session with the other doctor's engine.
class MeasuredSession {
 public:
  MeasuredSession(Engine& engine, Events& events, const std::string& address)
      : engine_(engine), events_(events.sessions.emplace_back()) {
    SessionEvents* const seen = &events_;
    SessionOptions options;
    options.timeout = kConnectLimit;
    options.on_ready = [seen](Session) { seen->is_ready = true; };
    options.on_closed = [seen](Session, const Error& error) {
      if (!seen->error) seen->error = error;
    };
    auto session = engine.open_session(address, options);
    if (!session) {
      seen->error = session.error();
      return;
    }
    session_ = *session;
    (void)tools::spin_until(engine, 2 * kConnectLimit,
                            [seen] { return seen->is_ready || seen->error; });
  }
  MeasuredSession(const MeasuredSession&) = delete;
  MeasuredSession& operator=(const MeasuredSession&) = delete;
  ~MeasuredSession() {
    (void)session_.close();
    (void)tools::spin_until(engine_, kConnectLimit, [this] { return events_.error.has_value(); });
  }

  [[nodiscard]] bool is_ready() const noexcept { return events_.is_ready && !events_.error; }
  [[nodiscard]] std::string why() const {
    if (!events_.error) return "the other end does not answer";
    return events_.error->status != Status::ok ? events_.error->message()
                                               : "the other end closed it";
  }
  /// Makes kCalls calls, or fewer in kCallsLimit; true: all were answered.
  bool call() {
    const std::array<std::byte, 48> bytes{};
    const tools::Deadline end(engine_.clock(), kCallsLimit);
    (void)tools::spin_until(engine_, kMeasureLimit, [&] {
      const bool is_over = events_.error || (begun_ != 0 && end.passed());
      while (begun_ < kCalls && !is_over &&
             session_.call(kEchoMethod, bytes, [seen = &events_](Reply& reply) {
               ++seen->ended;
               seen->answered += reply.status() == Status::ok ? 1 : 0;
             }) == Status::ok)
        ++begun_;
      return events_.ended == begun_ && (begun_ == kCalls || is_over);
    });
    return begun_ != 0 && events_.answered == begun_;
  }
  [[nodiscard]] std::uint32_t calls() const noexcept { return begun_; }
  [[nodiscard]] std::uint32_t answered() const noexcept { return events_.answered; }

 private:
  Engine& engine_;
  SessionEvents& events_;
  Session session_;
  std::uint32_t begun_ = 0;
};

/// The port of a device; null: it is no adapter's.
const Port* adapter_port(const Subject& subject, std::string_view device) {
  const auto port = std::find_if(subject.ports.begin(), subject.ports.end(),
                                 [&](const Port& p) { return p.device == device; });
  return port != subject.ports.end() && !port->is_software ? &*port : nullptr;
}

void judge_bandwidth(const Port* adapter, const MeasuredConnection& measured, double gigabits,
                     Findings& findings) {
  const bool narrow = adapter != nullptr && gigabits < kLeastShare * adapter->gigabits();
  findings.add(
      "bandwidth", narrow ? Severity::warning : Severity::ok,
      fmt::format("writes move {:.1f} Gbit/s{}", gigabits,
                  narrow ? fmt::format(", less than half of the port's {}", adapter->rate) : ""),
      fmt::format("{} writes of {} KiB; rate of the port: {}", measured.writes(),
                  kRegionBytes >> 10,
                  adapter != nullptr ? adapter->rate : "none, as it is no adapter"),
      narrow ? "ethtool -S INTERFACE | grep -E 'pause|discard'  # and spinwire-doctor on both hosts"
             : "");
}

/// What the network loses, as far as calls over datagrams show it.
enum class Loss : std::uint8_t { unknown, none, some, many };

bool is_lossy(Loss loss) noexcept { return loss == Loss::some || loss == Loss::many; }

constexpr const char* kLossRemedy =
    "ethtool -S INTERFACE | grep -E 'discard|drop'  # on both hosts; and configure PFC or ECN";

void measure_rdma_cm(Engine& engine, Events& events, const std::string& host, const Facts& theirs,
                     Loss loss, Findings& findings) {
  const auto port = number_fact(theirs, "cm.port", kMostPort);
  if (engine.device_name() == "softverbs") {
    findings.add("rdma_cm", Severity::ok, "softverbs has no rdma_cm", "Engine::device_name()");
    return;
  }
  if (!port) {
    findings.add("rdma_cm", Severity::note, "the other host does not listen by rdma_cm",
                 fact(theirs, "cm.error"));
    return;
  }
  const std::string address = fmt::format("{}:{}", host, *port);
  const MeasuredConnection connection(engine, events, address, Via::rdma_cm);
  if (connection.is_ready())
    return findings.add("rdma_cm", Severity::ok, "a connection by rdma_cm works",
                        fmt::format("connect({})", address));
  // The connection manager sends datagrams, too.
  findings.add("rdma_cm", Severity::warning, "no connection by rdma_cm", connection.why(),
               is_lossy(loss) ? kLossRemedy : "modprobe rdma_ucm  # on both hosts");
}

Loss judge_loss(std::uint64_t lost, std::uint32_t calls, Findings& findings) {
  const std::string evidence =
      fmt::format("RpcStats::retransmitted_requests: {} of {} calls", lost, calls);
  if (lost == 0) {
    findings.add("loss", Severity::ok, "no datagram was lost", evidence);
    return Loss::none;
  }
  const bool many = lost * 100 > calls;
  findings.add("loss", many ? Severity::warning : Severity::note,
               fmt::format("{} datagrams were lost", lost), evidence, kLossRemedy);
  return many ? Loss::many : Loss::some;
}

Loss measure_datagrams(Engine& engine, Events& events, const std::string& address,
                       Findings& findings) {
  if (!engine.device().datagrams) {
    findings.add("datagrams", Severity::note, "the device has no datagrams; calls use connections",
                 "DeviceInfo::datagrams");
    return Loss::unknown;
  }
  MeasuredSession session(engine, events, address);
  const bool works = session.is_ready() && session.call();
  if (works) {
    findings.add("datagrams", Severity::ok, "calls over datagrams work",
                 fmt::format("{} calls were answered", session.answered()));
  } else {
    findings.add("datagrams", Severity::error, "calls over datagrams are not answered",
                 session.calls() != 0 ? fmt::format("{} of {} calls were answered",
                                                    session.answered(), session.calls())
                                      : session.why(),
                 "export SPINWIRE_RPC_TRANSPORT=connection  # does without datagrams");
  }
  if (session.calls() == 0) return Loss::unknown;
  return judge_loss(engine.rpc_stats().retransmitted_requests, session.calls(), findings);
}

/// Writes whose packets are lost stall, because devices send all packets behind a lost one again.
/// Without a loss of datagrams, which are short, only long packets are lost.
void judge_stall(const MeasuredConnection& measured, Loss loss, Findings& findings) {
  if (loss == Loss::some)
    return findings.add("bandwidth", Severity::warning, "long writes stall: packets are lost",
                        measured.why(), kLossRemedy);
  findings.add("bandwidth", Severity::error, "long writes stall, while short messages arrive",
               measured.why(),
               "ip link set dev INTERFACE mtu MTU  # on both hosts: one that each hop between them "
               "carries");
}

void measure_rate(const Port* adapter, MeasuredConnection& connection, Loss loss,
                  Findings& findings) {
  // Long writes would stall, and seem to be another fault.
  if (loss == Loss::many)
    return findings.add("bandwidth", Severity::note, "not measured: the network loses packets",
                        "RpcStats::retransmitted_requests, above");
  const auto rate = connection.rate();
  if (rate) return judge_bandwidth(adapter, connection, *rate, findings);
  if (connection.is_stalled()) return judge_stall(connection, loss, findings);
  findings.add("connection", Severity::error, "the connection fails under long writes",
               connection.why(), "spinwire-doctor  # on both hosts");
}

/// Connects after a handshake over TCP, and measures. `measure_others` runs before that: on a lossy
/// link the connection may stall or end, and says less of the cause than calls do. It returns what
/// measure_datagrams() does.
template <typename MeasureOthers>
void measure_connection(const Subject& subject, Engine& engine, Events& events,
                        const std::string& address, const Facts& theirs, const std::string& nonce,
                        MeasureOthers&& measure_others, Findings& findings) {
  MeasuredConnection connection(engine, events, address, Via::tcp);
  if (!connection.is_ready()) {
    findings.add("connection", Severity::error, "no connection after a handshake over TCP",
                 connection.why(),
                 "spinwire-doctor  # on both hosts; and the same security.key_file");
    (void)measure_others();
    return;
  }
  findings.add("connection", Severity::ok, "a connection after a handshake over TCP works",
               fmt::format("connect({})", address));
  const bool is_known = nonce.empty() || connection.echo(std::as_bytes(std::span(nonce)));
  const Loss loss = measure_others();
  const Port* const adapter = adapter_port(subject, engine.device_name());
  const auto time = is_known ? connection.round_trip() : std::nullopt;
  if (time) {
    judge_latency(adapter, engine.device_name(), theirs, subject.host.round_trip_us(*time),
                  connection.round_trips(), findings);
    return measure_rate(adapter, connection, loss, findings);
  }
  findings.add("connection", Severity::error, "the connection fails while it is measured",
               connection.why(), "spinwire-doctor  # on both hosts");
  findings.add("bandwidth", Severity::note, "not measured: the connection has failed",
               connection.why());
}

/// Connects our engine to the other doctor's in each way that both have, and measures.
void measure(const Subject& subject, const Config& config, Encounter& encounter,
             const std::string& nonce, Findings& findings) {
  const Facts& theirs = encounter.theirs;
  const std::string host = encounter.link.peer_host();
  const auto port = number_fact(theirs, "engine.port", kMostPort);
  if (!port) {
    findings.add("engine", Severity::error, "the other host's engine does not listen",
                 fact(theirs, "engine.error"), "spinwire-doctor  # there");
    return;
  }
  Events events;  // before the engine, whose callbacks use it
  const auto limit = [&](const char* name, Nanoseconds usual) {
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(usual).count();
    return std::chrono::milliseconds(subject.host.limit_ms(name, ms));
  };
  events.echo_limit = limit("echo", events.echo_limit);
  events.close_limit = limit("close", events.close_limit);
  auto engine = Engine::open(config);
  if (!engine) {
    findings.add("engine", Severity::error, "this host's engine does not open",
                 engine.error().message(), "spinwire-doctor");
    return;
  }
  const std::string device(engine->device_name());
  if (const std::string other = fact(theirs, "engine.device");
      other != device && (other == "softverbs" || device == "softverbs")) {
    findings.add("engine", Severity::error, "softverbs connects to softverbs only",
                 fmt::format("device: {} here, {} there", device, other),
                 "spinwire-doctor --config FILE HOST  # on both hosts, with the same device.name");
    return;
  }
  const std::string address = fmt::format("{}:{}", host, *port);
  // Before all ways that wait for a port: the other doctor leaves an engine that does not connect.
  const OutOfBandTrial trial = try_out_of_band(*engine, events.out_of_band, encounter.link, theirs);
  const auto measure_others = [&] {
    const Loss loss = measure_datagrams(*engine, events, address, findings);
    judge_out_of_band(trial, is_lossy(loss) ? kLossRemedy : nullptr, findings);
    measure_rdma_cm(*engine, events, host, theirs, loss, findings);
    return loss;
  };
  measure_connection(subject, *engine, events, address, theirs, nonce, measure_others, findings);
}

/// How long to wait for the other doctor's facts.
struct FactsLimits {
  Link::Limit silence;  ///< without a frame
  Link::Limit busy;     ///< while it serves others
};

/// Waits for the other doctor's facts; says so while it serves others, in a line each second at
/// most, however many frames it sends. Errors: those of Link::receive(); limit (it has served
/// others for too long).
Result<std::string> receive_facts(Link& link, const FactsLimits& limits) {
  const SteadyTime end = now() + limits.busy;
  constexpr auto kLineInterval = std::chrono::seconds(1);
  std::uint32_t reported = 0;
  SteadyTime next_line{};
  for (;;) {
    auto frame = link.receive_either(LinkKind::facts, LinkKind::busy, limits.silence);
    if (!frame) return tl::unexpected(frame.error());
    if (frame->kind == LinkKind::facts) return std::move(frame->text);
    if (now() >= end)
      return tl::unexpected(
          Error{Status::limit, "wait for the other doctor", "its time for others is over", ""});
    const auto ahead = number_fact(decode_facts(frame->text), kAheadFact, kMostAhead);
    if (!ahead || *ahead == reported || now() < next_line) continue;
    reported = *ahead;
    next_line = now() + kLineInterval;
    (void)tools::fail(fmt::format(
        "the doctor at {} serves another one; this one waits; to be served before it: {}",
        link.peer_host(), *ahead));
  }
}

/// Says why the other doctor's facts did not come.
void add_no_answer(const Error& error, const FactsLimits& limits, Findings& findings) {
  const auto seconds = [](Link::Limit limit) { return static_cast<double>(limit.count()) / 1e3; };
  if (error.status == Status::limit)
    return findings.add(
        "tcp", Severity::error,
        fmt::format("the other doctor has served others for {} s", seconds(limits.busy)),
        "it says that it is busy",
        "spinwire-doctor --serve ADDRESS  # there: serve again, for this host alone");
  if (error.status != Status::timed_out)
    return findings.add("tcp", Severity::error,
                        "the other end is no doctor that this one understands", error.message(),
                        error.remedy);
  findings.add("tcp", Severity::error,
               fmt::format("the other end takes connections, but has not answered in {} s",
                           seconds(limits.silence)),
               "it is no doctor, it hangs, or it serves another doctor and does not say so, as an "
               "older one",
               "spinwire-doctor --serve ADDRESS  # there; if one serves another doctor, run this "
               "one again when that has ended");
}

}  // namespace

std::optional<Encounter> meet(const Subject& subject, const std::string& host, int port,
                              const std::string& nonce, Findings& findings) {
  // An older doctor that serves another client says nothing, for 20 s if its engine does not
  // connect.
  constexpr Link::Limit kUsualSilence{30000};
  // Longer than certifications usually take.
  constexpr Link::Limit kUsualBusy = std::chrono::hours(2);
  const FactsLimits limits{Link::Limit(subject.host.limit_ms("first", kUsualSilence.count())),
                           Link::Limit(subject.host.limit_ms("busy", kUsualBusy.count()))};
  auto link = Link::connect(host, port, std::chrono::milliseconds(5000));
  if (!link) {
    findings.add("tcp", Severity::error, "the other host cannot be reached over TCP",
                 link.error().message(), link.error().remedy);
    return std::nullopt;
  }
  findings.add("tcp", Severity::ok, "the other host is reached over TCP", link->peer_host());
  Facts ours = facts_of(subject);
  ours[kWaitsFact] = "1";
  if (!nonce.empty()) ours["certify"] = nonce;
  const auto answer = link->send(LinkKind::facts, encode_facts(ours), limits.silence).and_then([&] {
    return receive_facts(*link, limits);
  });
  if (!answer) {
    add_no_answer(answer.error(), limits, findings);
    return std::nullopt;
  }
  return Encounter{std::move(*link), std::move(ours), decode_facts(*answer)};
}

void compare_hosts(const Subject& subject, const Config& config, Encounter& encounter,
                   const std::string& nonce, Findings& findings) {
  const Facts& ours = encounter.ours;
  const Facts& theirs = encounter.theirs;
  compare_facts(ours, theirs, findings);
  if (!measure_clock(subject.host, encounter.link, theirs, findings)) {
    // The other doctor has left this client, and its engine is closed.
    findings.add("tcp", Severity::error, "the link to the other doctor failed: nothing is measured",
                 encounter.link.peer_host(), "# no command: run both doctors again");
    return;
  }
  const bool apart = fact(ours, "boot") != fact(theirs, "boot");
  if (apart && fact(theirs, "engine.device") == "softverbs") {
    findings.add("engine", Severity::error, "softverbs connects processes of one host only",
                 fmt::format("/proc/sys/kernel/random/boot_id: {} here, {} there",
                             fact(ours, "boot"), fact(theirs, "boot")),
                 "export SPINWIRE_DEVICE_NAME=auto  # for both doctors");
  } else {
    measure(subject, config, encounter, nonce, findings);
  }
}

Findings examine_pair(const Subject& subject, const Config& config, const std::string& host,
                      int port) {
  Findings findings;
  auto encounter = meet(subject, host, port, "", findings);
  if (!encounter) return findings;
  compare_hosts(subject, config, *encounter, "", findings);
  (void)encounter->link.send(LinkKind::end, "", std::chrono::milliseconds(5000));
  return findings;
}

}  // namespace spinwire::doctor
