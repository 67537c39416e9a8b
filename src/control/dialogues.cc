#include "control/dialogues.h"

#include "base/error.h"
#include "base/log.h"
#include "control/control_port.h"

namespace spinwire::control {

using wire::FrameKind;

namespace {

Error closed_early() {
  return {Status::peer_lost, "shake hands with a peer", "it closed the TCP connection half-way",
          "see the peer's log"};
}

constexpr wire::KindSet kConfirmation = wire::kinds(FrameKind::ready, FrameKind::refuse);

}  // namespace

// ---- inbound, until the first frame ----

void Incoming::advance(ControlPort& port, Handshake& h) {
  switch (h.exchange.advance()) {
    case Progress::waiting:
      return port.watch(h);
    case Progress::frame:
      return on_frame(port, h);
    case Progress::closed:
      return port.refuse(h, closed_early());
    case Progress::failed:
      return port.refuse(h, Error(h.exchange.error()));
  }
}

void Incoming::on_frame(ControlPort& port, Handshake& h) const {
  const wire::Received& got = h.exchange.received();
  if (const auto* probe = std::get_if<wire::Ready>(&got.body))
    return port.answer_probe(h, probe->incarnation);
  const auto* hello = std::get_if<wire::Hello>(&got.body);
  const auto* join = std::get_if<wire::JoinSession>(&got.body);
  const auto* open = std::get_if<wire::OpenSession>(&got.body);
  const auto resolved = hello != nullptr  ? port.resolve(h, hello->endpoint)
                        : join != nullptr ? port.resolve(h, join->endpoint)
                        : open != nullptr ? port.resolve(h, open->end)
                                          : Result<bool>(true);
  if (!resolved) return port.refuse(h, resolved.error());
  if (*resolved) pass_on(port, h);
}

void Incoming::on_resolved(ControlPort& port, Handshake& h, const Result<void>& outcome) const {
  outcome ? pass_on(port, h) : port.refuse(h, outcome.error());
}

void Incoming::pass_on(ControlPort& port, Handshake& h) const {
  const wire::Received& got = h.exchange.received();
  // The owner may stop its listener: this keeps it until it has answered.
  const std::shared_ptr<ListenerOwner> owner = port.owner_of(listener);
  if (owner == nullptr)
    return port.refuse(h,
                       {Status::refused, "connect", "nobody listens here any more", "try again"});
  const auto accept = [&](const Result<AcceptedConnection>& taken) {
    if (!taken) return port.refuse(h, taken.error());
    h.exchange.expect(kConfirmation);
    port.begin(h, Accept{taken->owner, taken->subject});
    port.cancel_timeout(h);
  };
  if (const auto* hello = std::get_if<wire::Hello>(&got.body))
    return accept(owner->on_hello(h.id, h.exchange.peer_address(), hello->endpoint));
  if (const auto* join = std::get_if<wire::JoinSession>(&got.body))
    return accept(owner->on_join_session(h.id, h.exchange.peer_address(), *join));
  const auto* open = std::get_if<wire::OpenSession>(&got.body);
  if (open == nullptr) return;  // the exchange takes only what was expected
  const auto served = owner->on_open_session(h.exchange.peer(), open->end);
  if (!served) return port.refuse(h, served.error());
  served->path_token != 0 ? port.validate_path(h, *served) : port.send_opened(h, *served);
}

void Incoming::give_up(ControlPort& port, Handshake& h) {
  port.count_refusal();
  port.drop(h);
}

void Incoming::on_timeout(ControlPort& port, Handshake& h) {
  port.count_refusal();
  base::log(LogLevel::info, "{} said nothing valid within the handshake time-out",
            h.exchange.peer_address());
  port.drop(h);
}

// ---- outbound connections ----

void Connect::advance(ControlPort& port, Handshake& h) {
  ConnectionOwner& to = *owner;
  const std::uint64_t about = subject;
  const Progress progress = h.exchange.advance();
  const bool over = confirmed && h.exchange.all_sent();
  if (progress == Progress::frame) return on_frame(port, h);
  if (progress == Progress::failed) {
    const Error why = h.exchange.error();
    port.refuse(h, why);
    return to.on_failed(about, why);
  }
  if (over) {  // a peer that has read the last frame may close at once
    port.drop(h);
    return to.on_confirmed(about);
  }
  if (progress == Progress::waiting) return port.watch(h);
  const Error why{Status::peer_lost, base::format("connect to {}", h.exchange.peer_address()),
                  "the peer closed the TCP connection in the handshake",
                  "see the peer's log; it may have reached a limit or have been stopped"};
  port.drop(h);
  to.on_failed(about, why);
}

void Connect::on_resolved(ControlPort& port, Handshake& h, const Result<void>& outcome) const {
  if (outcome) return on_frame(port, h);
  ConnectionOwner& to = *owner;
  const std::uint64_t about = subject;
  port.refuse(h, outcome.error());
  to.on_failed(about, outcome.error());
}

void Connect::on_frame(ControlPort& port, Handshake& h) const {
  const wire::Received& got = h.exchange.received();
  if (const auto* no = std::get_if<wire::Refuse>(&got.body)) {
    const wire::Refuse refusal = *no;
    ConnectionOwner& to = *owner;
    const std::uint64_t about = subject;
    port.drop(h);
    return to.on_refused(about, refusal);
  }
  const auto* yes = std::get_if<wire::Accept>(&got.body);
  if (yes == nullptr) return;  // the exchange takes only what was expected
  const auto resolved = port.resolve(h, yes->endpoint);
  if (!resolved) return on_resolved(port, h, tl::unexpected(resolved.error()));
  if (!*resolved) return;
  h.exchange.expect({});
  if (const auto taken = owner->on_accept(subject, yes->endpoint); !taken)
    port.refuse(h, taken.error());
}

// ---- inbound connections ----

void Accept::advance(ControlPort& port, Handshake& h) {
  const Progress progress = h.exchange.advance();
  if (progress == Progress::waiting) return port.watch(h);
  if (progress == Progress::frame) return on_frame(port, h);
  const Error why = progress == Progress::failed ? h.exchange.error() : closed_early();
  ConnectionOwner& to = *owner;
  const std::uint64_t about = subject;
  port.refuse(h, why);
  to.on_failed(about, why);
}

void Accept::on_frame(ControlPort& port, Handshake& h) const {
  ConnectionOwner& to = *owner;
  const std::uint64_t about = subject;
  const wire::Received& got = h.exchange.received();
  if (const auto* no = std::get_if<wire::Refuse>(&got.body)) {
    const wire::Refuse refusal = *no;
    port.count_refusal();
    port.drop(h);
    return to.on_refused(about, refusal);
  }
  const auto* ready = std::get_if<wire::Ready>(&got.body);
  if (ready == nullptr || ready->incarnation != port.incarnation()) {
    const Error why{Status::protocol, "finish a handshake",
                    "the peer's confirmation names another incarnation of this engine",
                    "reconnect"};
    port.refuse(h, why);
    return to.on_failed(about, why);
  }
  port.drop(h);
  to.on_confirmed(about);
}

void Accept::give_up(ControlPort& port, Handshake& h) {
  const Error why{Status::limit, "finish a handshake",
                  "the peer was silent while others waited for a handshake",
                  "raise connections.handshakes if such peers are honest"};
  ConnectionOwner& to = *owner;
  const std::uint64_t about = subject;
  port.refuse(h, why);
  to.on_failed(about, why);
}

// ---- sessions ----

void OpenSession::advance(ControlPort& port, Handshake& h) {
  const Progress progress = h.exchange.advance();
  if (progress == Progress::waiting) return port.watch(h);
  SessionOwner& to = *owner;
  const std::uint64_t about = subject;
  if (progress != Progress::frame) {
    const Error why = progress == Progress::failed
                          ? h.exchange.error()
                          : Error{Status::peer_lost, "open a session",
                                  "the peer closed the TCP connection", "see the peer's log"};
    port.drop(h);
    return to.on_open_failed(about, why);
  }
  on_frame(port, h);
}

void OpenSession::on_resolved(ControlPort& port, Handshake& h, const Result<void>& outcome) const {
  if (outcome) return on_frame(port, h);
  SessionOwner& to = *owner;
  const std::uint64_t about = subject;
  port.drop(h);
  to.on_open_failed(about, outcome.error());
}

void OpenSession::on_frame(ControlPort& port, Handshake& h) const {
  SessionOwner& to = *owner;
  const std::uint64_t about = subject;
  const wire::Received& got = h.exchange.received();
  if (const auto* no = std::get_if<wire::Refuse>(&got.body)) {
    const wire::Refuse refusal = *no;
    port.drop(h);
    return to.on_open_refused(about, refusal);
  }
  const auto* yes = std::get_if<wire::SessionOpened>(&got.body);
  if (yes == nullptr) return;  // the exchange takes only what was expected
  const auto resolved = port.resolve(h, yes->end);
  if (!resolved) return on_resolved(port, h, tl::unexpected(resolved.error()));
  if (!*resolved) return;
  const HandshakeId id = h.id;
  const wire::SessionEnd server = yes->end;
  to.on_opened(about, id, server);
  port.drop(id);  // unless it is confirmed
}

void ValidatePath::advance(ControlPort& port, Handshake& h) const {
  const Progress progress = h.exchange.advance();
  if (progress == Progress::waiting) return port.watch(h);
  const auto* shown = progress == Progress::frame
                          ? std::get_if<wire::PathResponse>(&h.exchange.received().body)
                          : nullptr;
  if (shown == nullptr) return give_up(port, h);
  if (shown->token == session.path_token) return port.send_opened(h, AcceptedSession(session));
  // Somebody else may have sent the client a challenge of his own.
  h.exchange.expect(wire::kinds(FrameKind::path_response, FrameKind::refuse));
  port.watch(h);
}

void ValidatePath::on_timeout(ControlPort& port, Handshake& h) {
  const std::uint64_t now = port.clock_.now();
  if (now >= deadline) return give_up(port, h);
  interval *= 2;
  port.timers_.reschedule(h.timer, std::min(now + interval, deadline));
  session.owner->on_challenge_due(session.subject, session.path_token);
}

void ValidatePath::give_up(ControlPort& port, Handshake& h) const {
  const AcceptedSession over = session;
  port.count_refusal();
  port.drop(h);
  over.owner->on_unconfirmed(over.subject, over.opened_at);
}

void ServeSession::advance(ControlPort& port, Handshake& h) {
  const Progress progress = h.exchange.advance();
  const auto* const body = progress == Progress::frame ? &h.exchange.received().body : nullptr;
  if (body != nullptr && std::holds_alternative<wire::PathResponse>(*body)) {
    h.exchange.expect(expected());
    return port.watch(h);
  }
  if (progress == Progress::waiting) return port.watch(h);
  const auto* const ready = body != nullptr ? std::get_if<wire::Ready>(body) : nullptr;
  const bool confirmed = ready != nullptr && ready->incarnation == port.incarnation();
  const ServeSession over = *this;
  port.drop(h);
  if (!confirmed) over.owner->on_unconfirmed(over.subject, over.opened_at);
}

// The owner keeps a session that its client uses already.
void ServeSession::give_up(ControlPort& port, Handshake& h) const {
  const ServeSession over = *this;
  port.drop(h);
  over.owner->on_unconfirmed(over.subject, over.opened_at);
}

// ---- probes ----

namespace {

ProbeOutcome outcome_of(Progress progress, const Exchange& exchange) noexcept {
  if (progress == Progress::frame) {
    const auto& body = exchange.received().body;
    if (std::holds_alternative<wire::Ready>(body)) return ProbeOutcome::alive;
    const auto* const no = std::get_if<wire::Refuse>(&body);
    return no != nullptr && no->status == Status::peer_lost ? ProbeOutcome::restarted
                                                            : ProbeOutcome::none;
  }
  if (progress != Progress::failed) return ProbeOutcome::none;
  switch (exchange.error().status) {
    case Status::refused:
      return ProbeOutcome::no_listener;
    case Status::timed_out:
    case Status::system:  // no route
      return ProbeOutcome::unreachable;
    default:
      return ProbeOutcome::none;
  }
}

}  // namespace

void ProbePeer::advance(ControlPort& port, Handshake& h) {
  const Progress progress = h.exchange.advance();
  if (progress == Progress::waiting) return port.watch(h);
  end(port, h, outcome_of(progress, h.exchange));
}

void ProbePeer::on_timeout(ControlPort& port, Handshake& h) {
  const bool connected = h.exchange.state() == Exchange::State::open;
  end(port, h, connected ? ProbeOutcome::silent : ProbeOutcome::unreachable);
}

void ProbePeer::end(ControlPort& port, Handshake& h, ProbeOutcome outcome) const {
  const ProbePeer over = *this;
  port.drop(h);
  over.owner->on_probe_ended(over.incarnation, outcome);
}

// ---- refusals ----

void Refusing::advance(ControlPort& port, Handshake& h) {
  const Progress progress = h.exchange.advance();
  if (progress == Progress::closed || progress == Progress::failed) return port.drop(h);
  port.watch(h);
}

void Refusing::give_up(ControlPort& port, Handshake& h) { port.drop(h); }
void Refusing::on_timeout(ControlPort& port, Handshake& h) { port.drop(h); }

}  // namespace spinwire::control
