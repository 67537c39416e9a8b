#include "control/control_port.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/error.h"
#include "base/log_message.h"
#include "control/tokens.h"
#include "wire/cm_data.h"

namespace spinwire::control {

using wire::FrameKind;

namespace {

constexpr int kAcceptsPerPoll = 8;
constexpr int kCmEventsPerPoll = 16;

}  // namespace

ControlPort::ControlPort(const ControlOptions& options, const Clock& clock,
                         base::TimerWheel& timers)
    : options_(options),
      clock_(clock),
      timers_(timers),
      cm_proofs_(keys_, authentication_, clock, options.handshakes, options.handshake_timeout),
      handshakes_(2 * options.handshakes),
      eviction_order_(2 * options.handshakes, options.handshakes),
      resolution_limits_(clock),
      challenge_limits_(clock, ResolutionLimits::kChallengesOfSource,
                        ResolutionLimits::kChallengesOfAll),
      grace_(clock) {
  held_.reserve(options.handshakes);
}

Result<void> ControlPort::open(Network* network) {
  auto set = EpollSet::open();
  if (!set) return tl::unexpected(set.error());
  epoll_ = std::move(*set);
  network_ = network;
  if (network != nullptr) epoll_.follow(network->change_count());
  return {};
}

void ControlPort::close() noexcept {
  event_count_ = next_event_ = 0;
  for (std::uint32_t i = 0; i < handshakes_.capacity(); ++i) {
    if (!handshakes_.in_use(i)) continue;
    handshakes_.at(i).is_failure_counted = true;  // it ends because of us
    drop(handshakes_.at(i));
  }
  kept_requests_.clear();
  kept_of_.clear();
  cm_proofs_.clear();
  resolver_.reset();
  listeners_.stop_all();
}

// ---- listeners ----

Result<void> ControlPort::check_reach(std::string_view asked, std::string_view found,
                                      const Address& address) const {
  if (has_keys() || options_.open || network_ != nullptr || address.is_loopback()) return {};
  return base::fail(Status::unauthenticated, base::format("{} {}", asked, address.text().view()),
                    base::format("{}, and there is no key to prove", found),
                    "set security.key_file (spinwire-keygen makes one), use a loopback address, or "
                    "set security.open = true where every host is trusted");
}

Result<ListenerId> ControlPort::listen(const Address& at, std::shared_ptr<ListenerOwner> owner) {
  if (auto may = check_reach("listen on", "other hosts reach this address", at); !may)
    return tl::unexpected(may.error());
  return listeners_.listen(at, std::move(owner), network_);
}

Result<ListenerId> ControlPort::listen_cm(const Address& at, std::shared_ptr<ListenerOwner> owner) {
  if (auto may = check_cm(); !may) return tl::unexpected(may.error());
  if (auto opened = open_cm_channel(); !opened) return tl::unexpected(opened.error());
  return listeners_.listen_cm(at, std::move(owner), cm_);
}

Result<ListenerId> ControlPort::adopt_listener(int fd, std::shared_ptr<ListenerOwner> owner) {
  auto socket = ListenSocket::adopt(fd, network_);
  if (!socket) return tl::unexpected(socket.error());
  // After an error the descriptor is still the caller's.
  try {
    auto may = check_reach("listen on", "other hosts reach this address", socket->local());
    auto adopted = may.and_then([&] { return listeners_.adopt(std::move(*socket), owner); });
    if (!adopted) (void)socket->release();
    return adopted;
  } catch (...) {
    (void)socket->release();
    throw;
  }
}

Result<int> ControlPort::descriptor_of(ListenerId id) {
  const int fd = network_ == nullptr ? listeners_.share(id) : -1;
  if (fd >= 0) return fd;
  return base::fail(Status::unsupported, "hand a listener over",
                    "it listens through rdma_cm or on a simulated network, without a socket",
                    "let the successor listen again; on a simulated network, release it");
}

Result<int> ControlPort::release_listener(ListenerId id) {
  if (network_ != nullptr) return listeners_.release(id);
  return descriptor_of(id).map([&](int) { return listeners_.release(id); });
}

void ControlPort::forget_released_listeners() noexcept {
  listeners_.forget_released([this](ListenerId id) {
    for (std::uint32_t i = 0; i < handshakes_.capacity(); ++i) {
      const auto* const incoming =
          handshakes_.in_use(i) ? std::get_if<Incoming>(&handshakes_.at(i).dialogue) : nullptr;
      if (incoming != nullptr && incoming->listener.index == id.index &&
          incoming->listener.generation == id.generation)
        return true;
    }
    return false;
  });
}

void ControlPort::accept_from(ListenerId listener) noexcept {
  for (int i = 0; i < kAcceptsPerPoll && has_budget(); ++i) {
    // An owner may have stopped the listener meanwhile.
    if (!listeners_.contains(listener)) return;
    // Peers without room wait in the backlog.
    const bool is_full = inbound_ >= inbound_limit();
    Handshake* const last = is_full ? find_victim() : nullptr;
    if (is_full && last == nullptr) {
      if (i == 0) stop_accepting();  // later ones may not exist
      return;
    }
    if (last != nullptr && lacks_descriptors()) {
      evict(*last);  // at once, for a peer that may come: it needs the descriptor
      continue;
    }
    auto accepted = listeners_.accept(listener);
    if (!accepted) return on_accept_failed(accepted.error());
    if (!*accepted) return;
    if (last != nullptr) evict(*last);
    accept(std::move(**accepted), listener);
  }
}

/// Without room, a listener with a backlog would keep the descriptor of the port readable.
void ControlPort::stop_accepting() noexcept {
  is_full_ = true;
  listeners_.watch(Interest::none);
}

void ControlPort::look_for_room() noexcept {
  if (inbound_ >= inbound_limit() && find_victim() == nullptr) return;
  is_full_ = false;
  listeners_.watch(Interest::read);
}

Handshake* ControlPort::begin_inbound(const Address& peer, const Dialogue& dialogue) noexcept {
  Handshake* const h = begin_handshake(true);
  if (h == nullptr) return nullptr;
  h->dialogue = dialogue;
  h->source = peer.source();
  const auto added = base::no_throw("accept a peer", [&]() -> Result<void> {
    eviction_order_.add(h->id.index, h->source, group_of(*h), h->waits_since);
    return {};
  });
  if (added) return h;
  --inbound_;
  handshakes_.release(h->id.index);
  return nullptr;
}

void ControlPort::accept(Accepted&& accepted, ListenerId listener) noexcept {
  spend();
  Handshake* const h = begin_inbound(accepted.peer, Incoming{listener});
  if (h == nullptr) return;  // closes the socket; the peer may try again
  h->exchange.adopt(std::move(accepted.fd), accepted.peer,
                    wire::kinds(FrameKind::hello, FrameKind::open_session, FrameKind::join_session,
                                FrameKind::ready),
                    keys(), &own_requests_);
  schedule_timeout(*h);
  watch(*h);
  advance(*h);
}

// ---- handshakes ----

/// Each direction has its own limit, so that many inbound peers do not block outbound handshakes.
Handshake* ControlPort::begin_handshake(bool inbound) noexcept {
  std::uint32_t& count = inbound ? inbound_ : outbound_;
  if (count >= options_.handshakes) return nullptr;
  const std::uint32_t index = handshakes_.acquire();
  if (index == base::IndexPool<Handshake>::kNone) return nullptr;
  ++count;
  Handshake& h = handshakes_.at(index);
  h.id = {index, handshakes_.generation(index)};
  h.inbound = inbound;
  h.watched = false;
  h.interest = Interest::none;
  h.address = AddressState::unknown;
  h.held_for = HeldFor::nothing;
  h.is_charged = h.is_challenged = h.is_authenticated = h.is_failure_counted = false;
  h.takes_application_fields = false;
  h.counted_for = {};
  h.needs_own_source = h.was_asked = false;
  h.waits_since = heard_time_;
  h.timer.index = index;
  h.timer.kind = kHandshakeTimer;
  return &h;
}

Result<Handshake*> ControlPort::dial(const Address& to, wire::KindSet expected,
                                     const Dialogue& dialogue) {
  if (auto may = check_reach("connect to", "it is an address of another host", to); !may)
    return tl::unexpected(may.error());
  Handshake* const h = begin_handshake(false);
  if (h == nullptr) {
    return base::fail(Status::limit, base::format("connect to {}", to.str()),
                      base::format("{} handshakes are under way already", outbound_),
                      "wait until some are over, or raise connections.handshakes");
  }
  h->dialogue = dialogue;
  if (auto begun = h->exchange.connect(to, expected, network_, keys(), &own_requests_); !begun) {
    drop(*h);
    return tl::unexpected(begun.error());
  }
  return h;
}

Result<HandshakeId> ControlPort::dial_connection(const Address& to, const Connect& dialogue) {
  return dial(to, wire::kinds(FrameKind::refuse), dialogue).map([](Handshake* h) { return h->id; });
}

Result<HandshakeId> ControlPort::open_session(const Address& to, const wire::SessionEnd& client,
                                              SessionOwner& owner, std::uint64_t subject) {
  auto h = dial(to, wire::kinds(FrameKind::session_opened, FrameKind::refuse),
                OpenSession{&owner, subject});
  if (!h) return tl::unexpected(h.error());
  send(**h, wire::encode(wire::OpenSession{client}));
  watch(**h);
  return (*h)->id;
}

Result<void> ControlPort::probe(const Address& to, std::uint64_t incarnation, ProbeOwner& owner,
                                Nanoseconds limit) {
  auto h = dial(to, wire::kinds(FrameKind::ready, FrameKind::refuse),
                ProbePeer{&owner, {to, incarnation}});
  if (!h) return tl::unexpected(h.error());
  send(**h, wire::encode(wire::Ready{incarnation}));
  timers_.reschedule((*h)->timer,
                     clock_.now() + clock_.ticks(std::min(limit, options_.handshake_timeout)));
  watch(**h);
  return {};
}

void ControlPort::assign(HandshakeId id, std::uint64_t subject) noexcept {
  Connect* const dialogue = find<Connect>(id);
  if (dialogue == nullptr) return;
  dialogue->subject = subject;
  watch(*find(id));
}

KeyName ControlPort::key_of(HandshakeId id) noexcept {
  const Handshake* const h = find(id);
  if (h == nullptr) return {};
  return h->request != nullptr ? h->request->key : h->exchange.proved_key();
}

void ControlPort::ask(HandshakeId id, const Endpoint& endpoint) noexcept {
  Connect* const dialogue = find<Connect>(id);
  if (dialogue == nullptr || dialogue->asked) return;
  dialogue->asked = true;
  Handshake& h = *find(id);
  h.exchange.expect(Connect::expected());
  if (const auto& s = dialogue->session) {
    send(h, wire::encode(wire::JoinSession{endpoint, s->session, s->token}));
  } else {
    send(h, wire::encode(wire::Hello{endpoint}));
  }
  advance(h);
}

void ControlPort::answer(HandshakeId id, const Endpoint& endpoint) noexcept {
  Accept* const dialogue = find<Accept>(id);
  if (dialogue == nullptr || dialogue->answered) return;
  dialogue->answered = true;
  Handshake& h = *find(id);
  restart_wait(h);
  h.exchange.expect(Accept::expected());
  wire::Accept accept{endpoint};
  if (!h.takes_application_fields) accept.endpoint.private_data = {};
  send(h, wire::encode(accept));
  advance(h);
}

void ControlPort::on_cm_answered(HandshakeId id) noexcept {
  CmAccept* const dialogue = find<CmAccept>(id);
  if (dialogue == nullptr) return;
  dialogue->answered = true;
  restart_wait(*find(id));
}

void ControlPort::respond(HandshakeId id, std::uint64_t path_token) noexcept {
  Handshake* const h = find(id);
  if (h == nullptr || !std::holds_alternative<OpenSession>(h->dialogue)) return;
  if (!h->exchange.all_sent()) return;  // the server repeats its challenge
  send(*h, wire::encode(wire::PathResponse{path_token}));
  h->exchange.flush();
  watch(*h);
}

void ControlPort::confirm(HandshakeId id, std::uint64_t peer_incarnation) noexcept {
  Handshake* const h = find(id);
  if (h == nullptr) return;
  const wire::Frame ready = wire::encode(wire::Ready{peer_incarnation});
  if (auto* const connect = std::get_if<Connect>(&h->dialogue)) {
    if (std::exchange(connect->confirmed, true)) return;
    send(*h, ready);
    advance(*h);
  } else if (std::holds_alternative<OpenSession>(h->dialogue)) {
    send(*h, ready);
    (void)h->exchange.advance();  // if it fails, the server forgets the session
    drop(*h);
  }
}

void ControlPort::refuse(HandshakeId id, const Error& why) noexcept {
  if (Handshake* const h = find(id); h != nullptr) refuse(*h, why);
}

void ControlPort::drop(HandshakeId id) noexcept {
  if (Handshake* const h = find(id); h != nullptr) drop(*h);
}

// ---- functions for dialogues ----

void ControlPort::watch(Handshake& h) noexcept {
  if (h.request != nullptr) return;  // rdma_cm has one channel for all
  // A peer that leaves while its frame waits must not keep its place.
  const Interest interest = h.is_paused() ? Interest::end : h.exchange.interest();
  if (h.watched && interest == h.interest) return;
  const std::uint64_t name = token(TokenKind::handshake, h.id.index, h.id.generation);
  const auto done = h.watched ? epoll_.modify(h.exchange.fd(), name, interest)
                              : epoll_.add(h.exchange.fd(), name, interest);
  if (!done) base::log(LogLevel::error, "{}", done.error().message());
  h.watched = h.watched || done.has_value();
  h.interest = interest;
}

void ControlPort::drop(Handshake& h) noexcept {
  if (is_unproved(h) && !h.is_failure_counted) {
    count_unproved(h, "it was silent, ended or gave way before it had proved a key", {});
  }
  stop_resolving(h);
  end_challenge(h, false);
  unhold(h);
  h.request.reset();
  if (h.watched) epoll_.remove(h.exchange.fd());
  h.exchange.reset();
  timers_.cancel(h.timer);
  if (h.inbound) eviction_order_.remove(h.id.index);
  if (h.inbound && h.is_authenticated) --proved_;
  --(h.inbound ? inbound_ : outbound_);
  handshakes_.release(h.id.index);
}

void ControlPort::send(Handshake& h, const wire::Frame& frame) noexcept {
  if (h.exchange.send(frame) != Status::ok)
    base::log(LogLevel::error, "{}: the handshake's send queue is full", h.exchange.peer_address());
}

void ControlPort::count_authentication(Handshake& h, Progress progress) noexcept {
  if (!h.is_authenticated && !h.exchange.proved_key().empty()) {
    h.is_authenticated = true;
    if (h.inbound) ++proved_;
    restart_wait(h);
    ++authentication_.authenticated;
  }
  if (progress == Progress::failed) {
    const Error& why = h.exchange.error();
    count_unproved(h, why.found, why.remedy);
  }
}

/// Counts a handshake once, if its peer has not proved a key. Strangers can fail as often as they
/// like, so the log has one message a second.
void ControlPort::count_unproved(Handshake& h, std::string_view found,
                                 std::string_view remedy) noexcept {
  const AuthenticationFailure failure = h.exchange.failure_so_far();
  if (failure == AuthenticationFailure::none || std::exchange(h.is_failure_counted, true)) return;
  authentication_.count(failure);
  report_unproved(h.peer(), found, remedy);
}

void ControlPort::report_unproved(const Address& peer, std::string_view found,
                                  std::string_view remedy) noexcept {
  ++unreported_failures_;
  if (clock_.now() < next_failure_report_) return;
  constexpr Nanoseconds kBetweenReports = std::chrono::seconds(1);
  next_failure_report_ = clock_.now() + clock_.ticks(kBetweenReports);
  (void)base::no_throw("report a peer without a proof", [&]() -> Result<void> {
    base::log(LogLevel::warning, "{} is not authenticated: {}{}{}{}", peer.text().view(), found,
              remedy.empty() ? "" : "; ", remedy,
              unreported_failures_ > 1
                  ? base::format(" ({} more since the last message)", unreported_failures_ - 1)
                  : std::string());
    return {};
  });
  unreported_failures_ = 0;
}

void ControlPort::schedule_timeout(Handshake& h) noexcept {
  timers_.reschedule(h.timer, clock_.now() + clock_.ticks(options_.handshake_timeout));
}

/// A host that names others' addresses would have us send challenges to them. An address that the
/// client comes from, or has confirmed before, is no other's. False: the request is held, or
/// refused without memory.
bool ControlPort::may_challenge(Handshake& h, const Gid& client) {
  h.resolving = client;
  if (h.is_challenged || !reaches_other_hosts_ || is_of_peer_or_ours(h, client) ||
      validated_.contains(h.source, client))
    return true;
  const auto charged = base::no_throw("challenge a client", [&]() -> Result<bool> {
    return challenge_limits_.try_begin(h.source);
  });
  if (!charged) return refuse(h, charged.error()), false;
  h.is_challenged = *charged;
  if (!*charged) hold(h, HeldFor::challenge);
  return *charged;
}

void ControlPort::end_challenge(Handshake& h, bool answered) noexcept {
  if (std::exchange(h.is_challenged, false)) challenge_limits_.end(h.source, answered);
}

void ControlPort::on_path_validated(const Handshake& h) noexcept {
  if (!h.is_challenged) return;
  // Without memory the client's next session counts again.
  (void)base::no_throw("remember a client's address", [&]() -> Result<void> {
    validated_.add(h.source, h.resolving);
    return {};
  });
}

void ControlPort::on_path_not_validated(const Handshake& h) noexcept {
  validated_.remove(h.source, h.resolving);
}

void ControlPort::validate_path(Handshake& h, const AcceptedSession& session) noexcept {
  // A round trip takes microseconds on most networks, so a lost challenge is sent again soon.
  constexpr Nanoseconds kFirstInterval = std::chrono::milliseconds(2);
  ValidatePath next{{session}, clock_.now(), clock_.ticks(kFirstInterval), 0};
  next.deadline = next.challenged_at + clock_.ticks(options_.handshake_timeout);
  h.exchange.expect(wire::kinds(FrameKind::path_response, FrameKind::refuse));
  begin(h, next);
  timers_.reschedule(h.timer, next.challenged_at + next.interval);
  watch(h);
  session.owner->on_challenge_due(session.subject, session.path_token);
}

void ControlPort::send_opened(Handshake& h, const AcceptedSession& session) noexcept {
  end_challenge(h, true);
  wire::SessionOpened opened{session.end};
  if (!h.takes_application_fields) opened.end.private_data = {};
  send(h, wire::encode(opened));
  h.exchange.expect(ServeSession::expected());
  begin(h, ServeSession{{session}});
  schedule_timeout(h);
  advance(h);
}

void ControlPort::refuse(Handshake& h, const Error& why) noexcept {
  if (std::holds_alternative<Refusing>(h.dialogue)) return;
  stop_resolving(h);
  end_challenge(h, false);
  unhold(h);
  if (h.inbound) {
    count_refusal(h.peer(), why.found);
    if (is_unproved(h))
      count_unproved(h, why.found, why.remedy);
    else if (!h.is_failure_counted)
      base::log(LogLevel::info, "{} is refused: {}", h.peer().text().view(), why.message());
  }
  wire::Refuse refusal = wire::make_refuse(why, h.takes_application_fields);
  if (h.takes_goodbyes()) refusal.goodbye = why.goodbye;
  if (h.request != nullptr) {
    control::reject(h.request->id, h.request->client.get(), refusal);
    return drop(h);
  }
  begin(h, Refusing{});
  if (h.exchange.state() == Exchange::State::connecting ||
      h.exchange.refuse(refusal) != Progress::waiting)
    return drop(h);
  schedule_timeout(h);
  watch(h);
}

void ControlPort::answer_probe(Handshake& h, ListenerId at, std::uint64_t incarnation) noexcept {
  if (incarnation != options_.incarnation) {
    const bool may_live = is_shared(at);
    return refuse(h, {may_live ? Status::in_use : Status::peer_lost,
                      base::format("probe for the engine of incarnation {:#x}", incarnation),
                      "another engine, or a later incarnation, runs at this address",
                      "open the sessions again"});
  }
  send(h, wire::encode(wire::Ready{incarnation}));
  (void)h.exchange.advance();
  drop(h);
}

// ---- rdma_cm ----

Result<void> ControlPort::check_adapter(const char* asked, const char* remedy) const {
  if (has_keys() || options_.open) return {};
  return base::fail(Status::unauthenticated, asked,
                    "other hosts reach the device, at loopback addresses too, and there is no key "
                    "to prove",
                    base::format("set security.key_file (spinwire-keygen makes one), {}, or set "
                                 "security.open = true where every host is trusted",
                                 remedy));
}

Result<void> ControlPort::check_cm() const {
  return check_adapter("connect through rdma_cm", "use Via::tcp");
}

Result<void> ControlPort::open_cm_channel() {
  if (cm_) return {};
  auto channel = CmChannel::open();
  if (!channel) return tl::unexpected(channel.error());
  if (auto added = epoll_.add(channel->fd(), token(TokenKind::cm, 0), Interest::read); !added)
    return added;
  cm_ = std::move(*channel);
  return {};
}

Result<CmId> ControlPort::make_cm_id() {
  if (auto may = check_cm(); !may) return tl::unexpected(may.error());
  if (auto opened = open_cm_channel(); !opened) return tl::unexpected(opened.error());
  return CmId::create(cm_, nullptr);
}

void ControlPort::set_cm_subject(const CmId& id, std::uint64_t subject) noexcept {
  id.get()->context = cm_context(subject & kCmSubjectBits);
}

void ControlPort::poll_cm() noexcept {
  CmEvent event;
  for (int i = 0; i < kCmEventsPerPoll && has_budget() && cm_.next(event); ++i) {
    spend();
    try {
      if (event.kind == RDMA_CM_EVENT_CONNECT_REQUEST) {
        on_cm_request(event);
        continue;
      }
      const auto subject = reinterpret_cast<std::uint64_t>(event.id->context);
      if ((subject & kCmListenerBit) == 0 && cm_owner_ != nullptr) {
        cm_owner_->on_cm_event(subject, event);
      }
    } catch (...) {
      base::log(LogLevel::error, "rdma_cm: out of memory for an event");
    }
  }
}

void ControlPort::on_cm_request(const CmEvent& event) {
  const auto name = reinterpret_cast<std::uint64_t>(event.listener->context);
  CmId id = CmId::adopt(event.id, nullptr);
  auto request = std::make_unique<CmRequest>();
  request->id = std::move(id);
  request->event = event;
  if (const auto from = request->id.peer_address()) request->peer = *from;
  std::copy_n(request->id.peer_gid().raw, request->gid.size(), request->gid.begin());
  request->listener = {static_cast<std::uint32_t>(name), generation_of(name)};
  take_request(std::move(request));
}

}  // namespace spinwire::control
