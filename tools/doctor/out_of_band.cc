#include "doctor/out_of_band.h"

#include <fmt/core.h>

#include <span>
#include <utility>

#include "common/spin.h"
#include "doctor/certify_pair.h"

namespace spinwire::doctor {
namespace {

/// For each of four steps: our endpoint is made, is sent, is answered; the connection carries an
/// echo. With closing these are 18 s at most, of the 20 s from the beginning of its turn that a
/// server gives a client until its engine connects. A slow exchange of clocks leaves less.
constexpr Nanoseconds kStepLimit = std::chrono::seconds(4);
constexpr Nanoseconds kCloseLimit = std::chrono::seconds(2);
/// For the server until it has joined: its answer comes while the client still waits for one.
constexpr Nanoseconds kJoinLimit = std::chrono::seconds(3);
static_assert(kJoinLimit < kStepLimit);
constexpr Link::Limit kFrameLimit = std::chrono::duration_cast<Link::Limit>(kStepLimit);

/// Our end of the connection. It must stay where it is.
class OutOfBandClient {
 public:
  OutOfBandClient(Engine& engine, OutOfBandEvents& events) : engine_(engine), events_(events) {
    PrepareOptions options;
    options.timeout = 4 * kStepLimit;  // the steps have limits of their own
    // The other doctor joins before it answers, so an endpoint of an earlier connection is refused.
    options.peer_joins_first = true;
    // `events` outlives a connection that is not closed in time; this object does not.
    options.on_endpoint = [&events](Connection, const Endpoint& endpoint) {
      events.endpoint = endpoint.text();
    };
    options.handlers.on_ready = [&events](Connection) { events.is_ready = true; };
    options.handlers.on_message = [&events](Connection, Message& message) {
      if (!message.is_write())
        events.echo.assign(reinterpret_cast<const char*>(message.data()), message.size());
      events.has_echo = true;
    };
    options.handlers.on_closed = [&events](Connection, const Error& error) {
      if (!events.error) events.error = error;
    };
    auto prepared = engine.prepare(options);
    if (!prepared) {
      events_.error = prepared.error();
      return;
    }
    connection_ = *prepared;
    wait_for([this] { return !events_.endpoint.empty(); }, "no endpoint came");
  }
  OutOfBandClient(const OutOfBandClient&) = delete;
  OutOfBandClient& operator=(const OutOfBandClient&) = delete;
  ~OutOfBandClient() {
    (void)connection_.close();
    (void)tools::spin_until(engine_, kCloseLimit,
                            [this] { return connection_.state() == ConnectionState::closed; });
  }

  [[nodiscard]] const std::string& endpoint() const noexcept { return events_.endpoint; }
  [[nodiscard]] const std::optional<Error>& error() const noexcept { return events_.error; }

  /// Joins the other doctor's endpoint, and waits for the echo of random bytes.
  void connect(const std::string& text) {
    const auto joined =
        Endpoint::parse(text).and_then([this](const Endpoint& e) { return connection_.join(e); });
    const auto random = make_nonce();
    if (!joined || !random) {
      events_.error = joined ? random.error() : joined.error();
      return;
    }
    const auto bytes = std::as_bytes(std::span(*random));
    bool is_sent = false;
    wait_for(
        [&] {
          if (events_.is_ready && !is_sent) is_sent = connection_.send_copy(bytes) == Status::ok;
          return events_.has_echo;
        },
        "no echo came");
    if (!events_.error && events_.echo != *random)
      events_.error =
          Error{Status::protocol, "connect out-of-band", "the echo is not what was sent", ""};
  }

 private:
  template <typename Done>
  void wait_for(Done&& done, const char* why) {
    const bool came =
        tools::spin_until(engine_, kStepLimit, [&] { return events_.error || done(); });
    if (!came && !events_.error)
      events_.error = Error{Status::timed_out, "connect out-of-band", why, ""};
  }

  Engine& engine_;
  OutOfBandEvents& events_;
  Connection connection_;
};

using Outcome = OutOfBandTrial::Outcome;

OutOfBandTrial failed(const Error& error) {
  // Without a key nobody connects out-of-band on this device, which is as the user has set it.
  const bool is_forbidden = error.status == Status::unauthenticated;
  return {is_forbidden ? Outcome::not_tried : Outcome::fails, error.message()};
}

}  // namespace

OutOfBandTrial try_out_of_band(Engine& engine, OutOfBandEvents& events, Link& link,
                               const Facts& theirs) {
  if (fact(theirs, kEndpointFact).empty())
    return {Outcome::not_tried,
            "the doctor there exchanges no endpoints: its engine does not "
            "listen, or it is older"};
  OutOfBandClient client(engine, events);
  if (client.error()) return failed(*client.error());
  const Facts ours{{"endpoint", client.endpoint()}};
  const auto answer = link.send(LinkKind::endpoint, encode_facts(ours), kFrameLimit).and_then([&] {
    return link.receive(LinkKind::endpoint, kFrameLimit);
  });
  if (!answer) return {Outcome::fails, answer.error().message()};
  const Facts said = decode_facts(*answer);
  if (const std::string why = fact(said, "error"); !why.empty())
    return {why == to_string(Status::unauthenticated) ? Outcome::not_tried : Outcome::fails,
            "there: " + why};
  client.connect(fact(said, "endpoint"));
  if (client.error()) return {Outcome::fails, client.error()->message()};
  return {Outcome::works, "Engine::prepare(), Connection::join()"};
}

void judge_out_of_band(const OutOfBandTrial& trial, const char* loss_remedy, Findings& findings) {
  switch (trial.outcome) {
    case Outcome::works:
      return findings.add("out-of-band", Severity::ok, "a connection by exchanged endpoints works",
                          trial.evidence);
    case Outcome::not_tried:
      return findings.add("out-of-band", Severity::note, "not tried: endpoints are not exchanged",
                          trial.evidence);
    case Outcome::fails:
      return findings.add("out-of-band", Severity::warning, "no connection by exchanged endpoints",
                          trial.evidence,
                          loss_remedy != nullptr
                              ? loss_remedy
                              : "spinwire-doctor  # on both hosts; and the same security.key_file");
  }
}

bool OutOfBandServer::take(Engine& engine, Link& client, Link::Limit limit) {
  const auto frame = client.receive(LinkKind::endpoint, limit);
  if (!frame || std::exchange(is_taken_, true)) return false;
  const auto peer = Endpoint::parse(fact(decode_facts(*frame), "endpoint"));
  if (!peer) {
    set_answer("error", std::string(to_string(peer.error().status)));
    return true;
  }
  peer_ = *peer;
  PrepareOptions options;
  options.timeout = kJoinLimit;
  options.on_endpoint = [this](Connection connection, const Endpoint&) { join(connection); };
  // From now on the device takes what the client sends.
  options.handlers.on_ready = [this](Connection connection) {
    const auto ours = connection.endpoint();
    set_answer(ours ? "endpoint" : "error",
               ours ? ours->text() : std::string(to_string(ours.error().status)));
  };
  options.handlers.on_message = [this](Connection connection, Message& message) {
    is_connected_ = true;
    // A client sends one message, so there is room for its echo. A write has no bytes to send.
    const std::span<const std::byte> bytes(message.data(), message.size());
    if (message.is_write() || connection.send_copy(bytes) != Status::ok) (void)connection.close();
  };
  options.handlers.on_closed = [this](Connection, const Error& error) {
    set_answer("error", std::string(to_string(error.status)));
  };
  const auto prepared = engine.prepare(options);
  if (!prepared) set_answer("error", std::string(to_string(prepared.error().status)));
  return true;
}

void OutOfBandServer::join(Connection connection) {
  const auto joined = connection.join(peer_);
  if (joined) return;
  set_answer("error", std::string(to_string(joined.error().status)));
  (void)connection.close();
}

bool OutOfBandServer::answer(Link& client, Link::Limit limit) {
  if (!answer_ || is_answered_) return true;
  is_answered_ = true;
  return client.send(LinkKind::endpoint, encode_facts(*answer_), limit).has_value();
}

}  // namespace spinwire::doctor
