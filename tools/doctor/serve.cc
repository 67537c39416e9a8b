#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "common/cli.h"
#include "common/spin.h"
#include "doctor/certify_pair.h"
#include "doctor/clocks.h"
#include "doctor/measured_region.h"
#include "doctor/out_of_band.h"
#include "doctor/two_hosts.h"
#include "doctor/waiting_room.h"
#include "spinwire/spinwire.h"

namespace spinwire::doctor {
namespace {

constexpr Link::Limit kAnswerLimit{5000};
constexpr Link::Limit kStopInterval{100};
/// Limits for one client while others wait. Both run from the beginning of its turn: the first
/// until its engine has connected, with all questions before, the second until the client is done.
constexpr Link::Limit kFirstLimit{20000};
constexpr Link::Limit kServeLimit{60000};
/// For the facts of a client that waits for its turn. Clients send them first.
constexpr Link::Limit kFactsLimit{5000};

/// The two deadlines of a client.
struct ClientTime {
  SteadyTime to_connect;
  SteadyTime end;

  explicit ClientTime(const Host& host)
      : to_connect(now() + Link::Limit(host.limit_ms("first", kFirstLimit.count()))),
        end(now() + kServeLimit) {}
};

Link::Limit until(SteadyTime end, Link::Limit most) {
  const auto left = std::chrono::duration_cast<Link::Limit>(end - now());
  return std::clamp(left, Link::Limit(0), most);
}

/// The engine that a client measures: it gives its region, echoes messages, and answers calls.
class MeasuredEngine {
 public:
  /// Listens at `host`, in each way that the device has. Adds to `facts` where, or why not. `nonce`
  /// is what the client's engine has to say.
  MeasuredEngine(const Config& config, const std::string& host, std::string nonce, Facts& facts)
      : nonce_(std::move(nonce)) {
    auto opened = Engine::open(config);
    if (!opened) {
      set_error(facts, "engine.error", opened.error());
      return;
    }
    engine_.emplace(std::move(*opened));
    facts["engine.device"] = engine_->device_name();
    buffer_ = engine_->allocate(kRegionBytes, {.pool = Pool::lease});
    auto region = engine_->expose(buffer_, Access::remote_write);
    if (!region) {
      set_error(facts, "engine.error", region.error());
      return;
    }
    region_ = *region;
    if (auto served = engine_->serve(
            kEchoMethod, [](Request& request) { (void)request.reply(request.bytes()); });
        !served)
      set_error(facts, "engine.calls", served.error());
    listen(host, Via::tcp, "engine", facts, listener_);
    if (facts["engine.device"] != "softverbs")
      listen(host, Via::rdma_cm, "cm", facts, cm_listener_);
  }
  MeasuredEngine(const MeasuredEngine&) = delete;
  MeasuredEngine& operator=(const MeasuredEngine&) = delete;

  [[nodiscard]] bool is_connected() const noexcept {
    return connected_ || out_of_band_.is_connected();
  }
  /// Whether an engine that was admitted has said the nonce.
  [[nodiscard]] bool is_known() const noexcept { return is_known_; }

  /// Drives the engine until the client is done, or its time is over. With a key, only a client
  /// that has proved it connects.
  void run(Link& client, const ClientTime& time) {
    if (!engine_) return;
    const tools::Deadline to_connect(engine_->clock(), until(time.to_connect, kFirstLimit));
    const tools::Deadline end(engine_->clock(), until(time.end, kServeLimit));
    Idler idler(IdleStrategy::yield);
    while (exchange_endpoints(client, time) && !end.passed() &&
           (is_connected() || !to_connect.passed()) && !tools::stop_requested()) {
      for (int i = 0; i < 256; ++i) (void)idler.idle(*engine_, tools::drive(*engine_));
    }
  }

 private:
  /// Receives a client's endpoint when it comes, and answers it when ours is known. False: the
  /// client sends something else, has closed, or breaks the protocol.
  bool exchange_endpoints(Link& client, const ClientTime& time) {
    const Link::Limit limit = until(is_connected() ? time.end : time.to_connect, kAnswerLimit);
    const auto next = client.next_kind();
    if (next &&
        (next != LinkKind::endpoint || !listens_ || !out_of_band_.take(*engine_, client, limit)))
      return false;
    return out_of_band_.answer(client, limit);
  }

  /// Tells our user the error, and the client, which may be anyone, its status alone: the rest may
  /// name files of this host.
  static void set_error(Facts& facts, const std::string& name, const Error& error) {
    facts[name] = std::string(to_string(error.status));
    (void)tools::fail(error);
  }

  /// A client awaits each echo, so one at most waits for room.
  void echo(Connection c, std::span<const std::byte> bytes) {
    const Status status = c.send_copy(bytes);
    if (status == Status::ok) return;
    if (status != Status::would_block || !waiting_.empty()) return (void)c.close();
    waiting_.assign(bytes.begin(), bytes.end());
  }

  void listen(const std::string& host, Via via, const std::string& name, Facts& facts,
              Listener& listener) {
    ListenOptions options;
    options.via = via;
    options.handlers.on_ready = [this](Connection c) {
      connected_ = true;
      waiting_.clear();
      if (c.send_copy(std::as_bytes(std::span(&region_, 1))) != Status::ok) (void)c.close();
    };
    options.handlers.on_message = [this](Connection c, Message& message) {
      // No doctor sends a write with an immediate, which has a size and no bytes.
      if (message.is_write()) return (void)c.close();
      const std::string_view said(reinterpret_cast<const char*>(message.data()), message.size());
      is_known_ = is_known_ || (is_nonce(said) && said == nonce_);
      echo(c, {message.data(), message.size()});
    };
    options.handlers.on_writable = [this](Connection c) {
      const std::vector<std::byte> bytes = std::exchange(waiting_, {});
      if (!bytes.empty()) echo(c, bytes);
    };
    auto listening = engine_->listen(host + ":0", options);
    if (!listening) return set_error(facts, name + ".error", listening.error());
    listener = std::move(*listening);
    const std::string address = listener.address();
    facts[name + ".port"] = address.substr(address.rfind(':') + 1);
    // So a client gets no connection that the rules for listening forbid.
    facts[kEndpointFact] = "1";
    listens_ = true;
  }

  std::string nonce_;
  bool is_known_ = false;
  bool listens_ = false;
  OutOfBandServer out_of_band_;  ///< before the engine, whose callbacks use it
  std::optional<Engine> engine_;
  BufferSlice buffer_;
  RemoteRegion region_;
  bool connected_ = false;
  std::vector<std::byte> waiting_;  ///< an echo that had no room
  Listener listener_;
  Listener cm_listener_;
};

/// Answers one client. A frame that is no doctor's ends it.
Result<void> serve_client(const Subject& subject, const Config& config, const std::string& host,
                          const Certification* certification, Link client) {
  const ClientTime time(subject.host);
  const auto theirs = client.receive(LinkKind::facts, until(time.to_connect, kAnswerLimit));
  Facts facts = facts_of(subject);
  if (!theirs) {
    // A doctor of another version learns ours from the header.
    if (theirs.error().status == Status::unsupported)
      (void)client.send(LinkKind::facts, encode_facts(facts), kAnswerLimit);
    return tl::unexpected(theirs.error());
  }
  const Facts said = decode_facts(*theirs);
  const std::string nonce = fact(said, "certify");
  const bool certifies = certification != nullptr && is_nonce(nonce);
  if (certifies) facts["certify"] = certification->device;
  bool is_known = false;
  bool is_connected = false;
  {
    MeasuredEngine engine(config, host, nonce, facts);
    const auto answered =
        client.send(LinkKind::facts, encode_facts(facts), until(time.to_connect, kAnswerLimit))
            .and_then([&] {
              return answer_clock(subject.host, client, said, until(time.to_connect, kFirstLimit));
            });
    if (!answered) return answered;
    engine.run(client, time);
    is_known = engine.is_known();
    is_connected = engine.is_connected();
  }
  if (!certifies) return {};
  return serve_certification(*certification, host, is_known,
                             is_connected ? time.end : time.to_connect, client);
}

}  // namespace

Result<void> serve(const Subject& subject, const Config& config, const std::string& address,
                   int port, const Certification* certification) {
  auto listener = Link::listen(address, port);
  if (!listener) return tl::unexpected(listener.error());
  const std::string bound = listener->local_address();
  fmt::print("listening on {}\n", bound);
  std::fflush(stdout);
  const std::string host = bound.substr(0, bound.rfind(':'));
  WaitingRoom room(*listener, Link::Limit(subject.host.limit_ms("facts", kFactsLimit.count())));
  while (!tools::stop_requested()) {
    auto client = room.next(kStopInterval);
    if (!client) continue;
    const std::string from = client->peer_host();
    if (auto served = serve_client(subject, config, host, certification, std::move(*client));
        !served)
      (void)tools::fail(fmt::format("{}: {}", from, served.error().message()));
  }
  return {};
}

}  // namespace spinwire::doctor
