#include "control/dialogues.h"

#include <utility>

#include "base/error.h"
#include "base/log_message.h"
#include "base/secret_word.h"
#include "control/control_port.h"
#include "wire/cm_data.h"

namespace spinwire::control {

using wire::FrameKind;

namespace {

Error nobody_listens() {
  return {Status::refused, "connect", "nobody listens here any more", "try again"};
}

Error gave_way() {
  return {Status::limit, "finish a handshake",
          "the peer was silent while others waited for a handshake",
          "raise connections.handshakes or connections.maximum if such peers are honest"};
}

Error held_too_long(const Handshake& h) {
  if (h.address == AddressState::pending) {
    return {Status::timed_out, "resolve the peer's address",
            "nobody has answered there within the handshake time-out",
            "see that the peer's RDMA interface is up, and try again"};
  }
  if (h.held_for == HeldFor::resolution) return too_many_addresses();
  if (h.held_for == HeldFor::challenge) {
    return {Status::limit, "challenge the client's address",
            "too many addresses that were named from there do not answer challenges",
            "see that the client receives datagrams, and try again"};
  }
  return {Status::limit, "accept one more connection",
          "too many connections are half-open or silent since, and none has ended within the "
          "handshake time-out",
          "try again, or raise connections.maximum at the server"};
}

}  // namespace

Error too_many_addresses() {
  return {Status::limit, "resolve the peer's address",
          "too many addresses that were named from there do not answer",
          "see that the peer's RDMA interface is up, and try again"};
}

Error refused_by_application(std::string asked, const wire::Refuse& refusal) {
  Error why{refusal.status, std::move(asked), refusal.message(),
            base::format("the peer's application refused with the code {}", *refusal.code)};
  why.code = refusal.code;
  why.goodbye = refusal.goodbye;
  return why;
}

Error closed_early() {
  return {Status::peer_lost, "shake hands with a peer", "it closed the TCP connection half-way",
          "see the peer's log"};
}

bool Handshake::takes_goodbyes() const noexcept {
  if (request != nullptr) return wire::takes_goodbyes(request->event.data());
  return (exchange.received().header.features & wire::feature::goodbye) != 0;
}

// ---- inbound, until the first frame ----

void Incoming::on_frame(ControlPort& port, Handshake& h) const {
  const wire::Received& got = h.exchange.received();
  if (const auto* probe = std::get_if<wire::Ready>(&got.body))
    return port.answer_probe(h, listener, probe->incarnation);
  const auto* hello = std::get_if<wire::Hello>(&got.body);
  const auto* join = std::get_if<wire::JoinSession>(&got.body);
  const auto* open = std::get_if<wire::OpenSession>(&got.body);
  h.takes_application_fields = (hello != nullptr && hello->endpoint.application_fields) ||
                               (open != nullptr && open->end.application_fields);
  const std::shared_ptr<ListenerOwner> owner = port.owner_of(listener);
  const verbs::Place* const from = owner != nullptr ? owner->own_place() : nullptr;
  const auto resolved = hello != nullptr  ? port.resolve(h, hello->endpoint, from)
                        : join != nullptr ? port.resolve(h, join->endpoint, nullptr)
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
  // The owner may stop its listener; this reference keeps the owner until it has answered.
  const std::shared_ptr<ListenerOwner> owner = port.owner_of(listener);
  if (owner == nullptr) return port.refuse(h, nobody_listens());
  const auto* hello = std::get_if<wire::Hello>(&got.body);
  const auto* join = std::get_if<wire::JoinSession>(&got.body);
  const Endpoint* const endpoint = hello != nullptr  ? &hello->endpoint
                                   : join != nullptr ? &join->endpoint
                                                     : nullptr;
  if (endpoint != nullptr && !port.admit(h, *owner, endpoint)) return;
  const HandshakeId id = h.id;
  const ListenerId at = listener;  // the owner may end the handshake, and this with it
  const auto accept = [&](const Result<AcceptedConnection>& taken) {
    if (port.find<Incoming>(id) == nullptr) return;  // the owner has ended it in the call
    if (!taken) return port.refuse(h, taken.error());
    h.exchange.expect(wire::kinds(FrameKind::refuse));  // ready comes after our accept
    port.begin(h, Accept{{taken->owner, taken->subject}});
    port.cancel_timeout(h);
  };
  if (hello != nullptr) return accept(owner->on_hello(id, h.peer(), hello->endpoint));
  if (join != nullptr) {
    auto joined = owner->on_join_session(id, h.peer(), *join);
    // The session's server has handed the listener over, or shares it: the client shall come to us.
    if (!joined && joined.error().status == Status::refused && port.is_shared(at))
      joined.error().goodbye = {GoodbyeReason::draining, Nanoseconds(0)};
    return accept(joined);
  }
  const auto* open = std::get_if<wire::OpenSession>(&got.body);
  if (open == nullptr) return;  // the exchange accepts only expected kinds
  if (open->end.qp_num != 0 && !port.may_challenge(h, open->end.gid)) return;
  const auto served = owner->on_open_session(id, h.exchange.peer(), open->end);
  if (port.find<Incoming>(id) == nullptr) {  // the owner has ended it in the call
    if (served) served->owner->on_unconfirmed(served->subject, served->opened_at);
    return;
  }
  if (!served) {
    port.end_challenge(h, true);  // none was sent
    return port.refuse(h, served.error());
  }
  served->path_token != 0 ? port.validate_path(h, *served) : port.send_opened(h, *served);
}

void Incoming::on_failed(ControlPort& port, Handshake& h, const Error& why) { port.refuse(h, why); }

void Incoming::give_up(ControlPort& port, Handshake& h) {
  port.count_refusal(h.peer(), "it was silent, and gave way to another peer");
  port.drop(h);
}

void Incoming::on_timeout(ControlPort& port, Handshake& h) {
  if (h.is_paused()) {
    port.forget_answered(h);
    return port.refuse(h, held_too_long(h));
  }
  port.count_refusal(h.peer(), "it said nothing valid within the handshake time-out");
  if (!port.is_unproved(h)) {
    base::log(LogLevel::info, "{} said nothing valid within the handshake time-out",
              h.exchange.peer_address());
  }
  port.drop(h);
}

// ---- connections ----

// Each function copies the dialogue, which the port replaces.

void ConnectionDialogue::on_failed(ControlPort& port, Handshake& h, const Error& why) const {
  const ConnectionDialogue over = *this;
  port.refuse(h, why);
  over.owner->on_failed(over.subject, why);
}

void ConnectionDialogue::on_refused(ControlPort& port, Handshake& h,
                                    const wire::Refuse& refusal) const {
  const ConnectionDialogue over = *this;
  const wire::Refuse copy = refusal;
  port.drop(h);
  over.owner->on_refused(over.subject, copy);
}

void ConnectionDialogue::end(ControlPort& port, Handshake& h) const {
  const ConnectionDialogue over = *this;
  port.drop(h);
  over.owner->on_confirmed(over.subject);
}

void ConnectionDialogue::give_up(ControlPort& port, Handshake& h) const {
  on_failed(port, h, gave_way());
}

bool Connect::is_over(const Handshake& h) const noexcept {
  return confirmed && h.exchange.all_sent();
}

Error Connect::closed_error(const Handshake& h) {
  return {Status::peer_lost, base::format("connect to {}", h.exchange.peer_address()),
          "the peer closed the TCP connection in the handshake",
          "see the peer's log; it may have reached a limit or have been stopped"};
}

void Connect::on_resolved(ControlPort& port, Handshake& h, const Result<void>& outcome) const {
  outcome ? on_frame(port, h) : on_failed(port, h, outcome.error());
}

void Connect::on_frame(ControlPort& port, Handshake& h) const {
  const wire::Received& got = h.exchange.received();
  if (const auto* no = std::get_if<wire::Refuse>(&got.body)) return on_refused(port, h, *no);
  const auto* yes = std::get_if<wire::Accept>(&got.body);
  if (yes == nullptr) return;  // the exchange accepts only expected kinds
  const auto resolved = port.resolve(h, yes->endpoint, owner->own_place(subject));
  if (!resolved) return on_resolved(port, h, tl::unexpected(resolved.error()));
  if (!*resolved) return;
  h.exchange.expect(wire::kinds(FrameKind::refuse));  // the peer may still give up
  const HandshakeId id = h.id;
  if (const auto taken = owner->on_accept(subject, yes->endpoint); !taken)
    port.refuse(id, taken.error());  // unless the owner has ended it in the call
}

void Accept::on_frame(ControlPort& port, Handshake& h) const {
  const wire::Received& got = h.exchange.received();
  if (const auto* no = std::get_if<wire::Refuse>(&got.body)) {
    port.count_refusal(h.peer(), "the peer gave up");
    return on_refused(port, h, *no);
  }
  const auto* ready = std::get_if<wire::Ready>(&got.body);
  if (ready != nullptr && ready->incarnation == port.incarnation()) {
    port.on_confirmed(h);
    return end(port, h);
  }
  on_failed(port, h,
            {Status::protocol, "finish a handshake",
             "the peer's confirmation names another incarnation of this engine", "reconnect"});
}

void Accept::on_resolved(ControlPort&, Handshake&, const Result<void>& outcome) const {
  const Accept now = *this;
  now.owner->on_address_resolved(now.subject, outcome);
}

CmHello CmRequest::hello() const noexcept {
  static const PrivateData kNone;
  return {event, client != nullptr ? client->private_data() : kNone,
          wire::takes_cm_private_data(event.data())};
}

void CmIncoming::resume(ControlPort& port, Handshake& h) const {
  // The owner may stop its listener: this keeps it until it has answered.
  const std::shared_ptr<ListenerOwner> to = port.owner_of(listener);
  if (to == nullptr) return port.refuse(h, nobody_listens());
  h.takes_application_fields = wire::takes_application_fields(h.request->event.data());
  // The kernel's rdma_cm answers whence a request came. It does not resolve what the request names.
  const auto resolved = port.resolve_request(h);
  if (!resolved) return port.refuse(h, resolved.error());
  if (!*resolved || !port.admit(h, *to, nullptr)) return;
  const HandshakeId id = h.id;
  CmRequest& request = *h.request;
  const CmHello hello = request.hello();
  if (!request.ours) {
    auto ours = to->on_cm_hello(id, request.id, hello);
    if (port.find<CmIncoming>(id) == nullptr) return;  // the owner has ended it in the call
    if (!ours) return port.refuse(h, ours.error());
    request.ours = hello.takes_private_data ? *ours : PrivateData();
    if (request.ours->bytes().size() > wire::kCmAnswerData) return port.send_more(h);
  }
  const auto taken = to->on_cm_request(id, request.id, hello, *request.ours);
  if (port.find<CmIncoming>(id) == nullptr) return;
  if (!taken) return port.refuse(h, taken.error());
  port.begin(h, CmAccept{{taken->owner, taken->subject}});
  port.cancel_timeout(h);
}

void CmIncoming::on_resolved(ControlPort& port, Handshake& h, const Result<void>& outcome) const {
  outcome ? resume(port, h) : port.refuse(h, outcome.error());
}

void CmIncoming::give_up(ControlPort& port, Handshake& h) { port.refuse(h, gave_way()); }
void CmIncoming::on_timeout(ControlPort& port, Handshake& h) { port.refuse(h, held_too_long(h)); }

// ---- sessions ----

Error OpenSession::closed_error(const Handshake&) {
  return {Status::peer_lost, "open a session", "the peer closed the TCP connection",
          "see the peer's log"};
}

void OpenSession::on_failed(ControlPort& port, Handshake& h, const Error& why) const {
  const OpenSession over = *this;
  port.drop(h);
  over.owner->on_open_failed(over.subject, why);
}

void OpenSession::on_resolved(ControlPort& port, Handshake& h, const Result<void>& outcome) const {
  outcome ? on_frame(port, h) : on_failed(port, h, outcome.error());
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
  if (yes == nullptr) return;  // the exchange accepts only expected kinds
  const auto resolved = port.resolve(h, yes->end);
  if (!resolved) return on_resolved(port, h, tl::unexpected(resolved.error()));
  if (!*resolved) return;
  const HandshakeId id = h.id;
  const wire::SessionEnd server = yes->end;
  to.on_opened(about, id, server);
  port.drop(id);  // unless it is confirmed
}

void ServedSessionDialogue::end_unconfirmed(ControlPort& port, Handshake& h) const {
  const AcceptedSession over = session;
  port.drop(h);
  over.owner->on_unconfirmed(over.subject, over.opened_at);
}

void ValidatePath::on_frame(ControlPort& port, Handshake& h) const {
  const auto* shown = std::get_if<wire::PathResponse>(&h.exchange.received().body);
  if (shown == nullptr) return give_up(port, h);
  if (base::is_same_secret(shown->token, session.path_token)) {
    session.owner->on_path_validated(session.subject);
    port.on_path_validated(h);
    return port.send_opened(h, AcceptedSession(session));
  }
  // Another host may have sent the client a challenge of its own.
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
  port.count_refusal(h.peer(), "its datagram address was not confirmed in time");
  port.on_path_not_validated(h);
  end_unconfirmed(port, h);
}

void ServeSession::on_frame(ControlPort& port, Handshake& h) const {
  const auto& body = h.exchange.received().body;
  if (std::holds_alternative<wire::PathResponse>(body)) {
    h.exchange.expect(expected());
    return port.watch(h);
  }
  const auto* const ready = std::get_if<wire::Ready>(&body);
  if (ready == nullptr || ready->incarnation != port.incarnation()) return end_unconfirmed(port, h);
  port.on_confirmed(h);
  port.drop(h);
}

// ---- probes ----

ProbeFinding explain(ProbeOutcome outcome) noexcept {
  switch (outcome) {
    case ProbeOutcome::alive:
      return {"its control port answers", nullptr};
    case ProbeOutcome::restarted:
      return {"another engine, or the next incarnation of this one, is at its address",
              "connect again"};
    case ProbeOutcome::handed_over:
      return {"another engine has its listener, so that it cannot be asked", nullptr};
    case ProbeOutcome::silent:
      return {"its control port accepts connections but does not answer",
              "the peer's process hangs, was stopped, or polls too rarely"};
    case ProbeOutcome::no_listener:
      return {"nobody listens at its address",
              "the peer's process is gone, or has closed its listener: start it again"};
    case ProbeOutcome::unreachable:
      return {"its host does not answer", "the peer's host or the network between is down"};
    case ProbeOutcome::none:
      break;
  }
  return {nullptr, nullptr};
}

void ProbePeer::on_frame(ControlPort& port, Handshake& h) const {
  const auto& body = h.exchange.received().body;
  const auto* const no = std::get_if<wire::Refuse>(&body);
  end(port, h,
      std::holds_alternative<wire::Ready>(body)          ? ProbeOutcome::alive
      : no != nullptr && no->status == Status::peer_lost ? ProbeOutcome::restarted
      : no != nullptr && no->status == Status::in_use    ? ProbeOutcome::handed_over
                                                         : ProbeOutcome::none);
}

void ProbePeer::on_failed(ControlPort& port, Handshake& h, const Error& why) const {
  const bool unreachable = why.status == Status::timed_out || why.status == Status::system;
  end(port, h,
      why.status == Status::refused ? ProbeOutcome::no_listener
      : unreachable                 ? ProbeOutcome::unreachable  // no route
                                    : ProbeOutcome::none);
}

void ProbePeer::on_timeout(ControlPort& port, Handshake& h) const {
  const bool connected = h.exchange.state() == Exchange::State::open;
  end(port, h, connected ? ProbeOutcome::silent : ProbeOutcome::unreachable);
}

void ProbePeer::end(ControlPort& port, Handshake& h, ProbeOutcome outcome) const {
  const ProbePeer over = *this;
  port.drop(h);
  over.owner->on_probe_ended(over.probed, outcome);
}

// ---- refusals ----

void Refusing::give_up(ControlPort& port, Handshake& h) { port.drop(h); }

}  // namespace spinwire::control
