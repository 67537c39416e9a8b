#include "control/control_port.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "wire/cm_data.h"

namespace spinwire::control {

using wire::FrameKind;

namespace {

constexpr int kBacklog = 512;
constexpr int kAcceptsPerPoll = 8;
constexpr int kCmEventsPerPoll = 16;

// Tokens of the epoll set: a kind, a generation, an index.
enum class TokenKind : std::uint64_t { handshake, listener, descriptor, cm };
constexpr std::uint32_t kGenerationBits = 0x3fffffff;
constexpr std::uint64_t token(TokenKind kind, std::uint32_t index,
                              std::uint32_t generation = 0) noexcept {
  return static_cast<std::uint64_t>(kind) << 62 |
         std::uint64_t{generation & kGenerationBits} << 32 | index;
}
constexpr TokenKind kind_of(std::uint64_t token) noexcept {
  return static_cast<TokenKind>(token >> 62);
}
constexpr std::uint32_t generation_of(std::uint64_t token) noexcept {
  return static_cast<std::uint32_t>(token >> 32) & kGenerationBits;
}

// What an rdma_cm identifier carries: a listener's token with the first bit, or its owner's
// subject.
constexpr std::uint64_t kCmListenerBit = std::uint64_t{1} << 63;
void* cm_context(std::uint64_t value) noexcept { return reinterpret_cast<void*>(value); }

}  // namespace

ControlPort::ControlPort(const ControlOptions& options, const Clock& clock,
                         base::TimerWheel& timers)
    : options_(options), clock_(clock), timers_(timers), handshakes_(2 * options.handshakes) {}

Result<void> ControlPort::open(Network* network) {
  auto set = EpollSet::open();
  if (!set) return tl::unexpected(set.error());
  epoll_ = std::move(*set);
  network_ = network;
  if (network != nullptr) epoll_.follow(network->change_count());
  return {};
}

void ControlPort::close() noexcept {
  for (std::uint32_t i = 0; i < handshakes_.capacity(); ++i) {
    if (handshakes_.in_use(i)) drop(handshakes_.at(i));
  }
  resolver_.reset();
  for (const auto& listener : listeners_) {
    if (listener != nullptr && !listener->cm) epoll_.remove(listener->socket.fd());
  }
  listeners_.clear();
}

// ---- what the descriptors report ----

void ControlPort::poll() noexcept {
  std::array<Event, EpollSet::kEventsMax> events;
  const std::size_t count = epoll_.wait(events);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t name = events[i].token;
    const auto index = static_cast<std::uint32_t>(name);
    switch (kind_of(name)) {
      case TokenKind::handshake:
        if (handshakes_.in_use(index) &&
            (handshakes_.generation(index) & kGenerationBits) == generation_of(name))
          advance(handshakes_.at(index));
        break;
      case TokenKind::listener:
        accept_from(index, generation_of(name));
        break;
      case TokenKind::descriptor:
        descriptors_[index]->on_readable();
        break;
      case TokenKind::cm:
        poll_cm();
        break;
    }
  }
}

void ControlPort::advance(Handshake& h) noexcept {
  try {
    std::visit([&](auto& dialogue) { dialogue.advance(*this, h); }, h.dialogue);
  } catch (...) {
    base::log(LogLevel::error, "{}: out of memory in a handshake", h.exchange.peer_address());
  }
}

void ControlPort::on_timer(base::Timer& timer) noexcept {
  Handshake& h = handshakes_.at(timer.index);
  std::visit([&](auto& dialogue) { dialogue.on_timeout(*this, h); }, h.dialogue);
}

Result<void> ControlPort::watch(int fd, DescriptorOwner& owner) {
  const auto index = static_cast<std::uint32_t>(descriptors_.size());
  descriptors_.push_back(&owner);
  return epoll_.add(fd, token(TokenKind::descriptor, index), Interest::read);
}

// ---- listeners ----

Result<void> ControlPort::open_socket(Listener& listener, std::uint32_t index, const Address& at) {
  auto socket = ListenSocket::open(at, kBacklog, network_);
  if (!socket) return tl::unexpected(socket.error());
  listener.socket = std::move(*socket);
  return epoll_.add(listener.socket.fd(), token(TokenKind::listener, index, listener.generation),
                    Interest::read);
}

Result<void> ControlPort::open_cm_id(Listener& listener, std::uint32_t index, const Address& at) {
  if (auto opened = open_cm_channel(); !opened) return opened;
  const std::uint64_t name = token(TokenKind::handshake, index, listener.generation);
  auto id = CmId::create(cm_, cm_context(kCmListenerBit | name));
  if (!id) return tl::unexpected(id.error());
  if (auto bound = id->listen(at, kBacklog); !bound) return bound;
  listener.cm = std::move(*id);
  return {};
}

Result<ListenerId> ControlPort::add_listener(std::unique_ptr<Listener> listener,
                                             Result<void> (ControlPort::*bind)(Listener&,
                                                                               std::uint32_t,
                                                                               const Address&),
                                             const Address& at) {
  listener_generation_ = std::max((listener_generation_ + 1) & kGenerationBits, 1u);
  listener->generation = listener_generation_;
  auto free = std::find(listeners_.begin(), listeners_.end(), nullptr);
  if (free == listeners_.end()) free = listeners_.insert(listeners_.end(), nullptr);
  const auto index = static_cast<std::uint32_t>(free - listeners_.begin());
  if (auto opened = (this->*bind)(*listener, index, at); !opened)
    return tl::unexpected(opened.error());
  *free = std::move(listener);
  return ListenerId{index, listener_generation_};
}

Result<ListenerId> ControlPort::listen(const Address& at, std::shared_ptr<ListenerOwner> owner) {
  auto listener = std::make_unique<Listener>();
  listener->owner = std::move(owner);
  return add_listener(std::move(listener), &ControlPort::open_socket, at);
}

Result<ListenerId> ControlPort::listen_cm(const Address& at, std::shared_ptr<ListenerOwner> owner) {
  auto listener = std::make_unique<Listener>();
  listener->owner = std::move(owner);
  return add_listener(std::move(listener), &ControlPort::open_cm_id, at);
}

ControlPort::Listener* ControlPort::find_listener(std::uint32_t index,
                                                  std::uint32_t generation) const noexcept {
  if (index >= listeners_.size() || listeners_[index] == nullptr) return nullptr;
  return listeners_[index]->generation == generation ? listeners_[index].get() : nullptr;
}

std::shared_ptr<ListenerOwner> ControlPort::owner_of(ListenerId id) const noexcept {
  const Listener* const listener = find_listener(id.index, id.generation);
  return listener != nullptr ? listener->owner : nullptr;
}

void ControlPort::stop_listening(ListenerId id) noexcept {
  const Listener* const listener = find_listener(id.index, id.generation);
  if (listener == nullptr) return;
  if (!listener->cm) epoll_.remove(listener->socket.fd());
  listeners_[id.index].reset();
}

std::string ControlPort::address_of(ListenerId id) const {
  const Listener* const listener = find_listener(id.index, id.generation);
  if (listener == nullptr) return {};
  if (!listener->cm) return listener->socket.local().str();
  const auto bound = listener->cm.local_address();
  return bound ? bound->str() : std::string();
}

void ControlPort::accept_from(std::uint32_t index, std::uint32_t generation) noexcept {
  for (int i = 0; i < kAcceptsPerPoll; ++i) {
    // An owner may have stopped the listener meanwhile.
    Listener* const listener = find_listener(index, generation);
    if (listener == nullptr) return;
    // The backlog keeps those for whom there is no room yet.
    Handshake* const last = inbound_ < options_.handshakes ? nullptr : find_to_give_up();
    if (last == nullptr && inbound_ >= options_.handshakes) return;
    auto accepted = listener->socket.accept();
    if (!accepted) {
      base::log(LogLevel::warning, "{}", accepted.error().message());
      return;
    }
    if (!*accepted) return;
    if (last != nullptr) give_up(*last);
    accept(std::move(**accepted), {index, generation});
  }
}

void ControlPort::accept(Accepted&& accepted, ListenerId listener) noexcept {
  const auto source = base::no_throw("accept a peer", [&]() -> Result<SourceCounts::iterator> {
    return sources_.try_emplace(accepted.peer.source(), 0).first;
  });
  Handshake* const h = source ? begin_handshake(true) : nullptr;
  if (h == nullptr) return;  // closes the socket; the peer may try again
  h->source = *source;
  ++h->source->second;
  h->dialogue = Incoming{listener};
  h->exchange.adopt(std::move(accepted.fd), accepted.peer,
                    wire::kinds(FrameKind::hello, FrameKind::open_session, FrameKind::join_session,
                                FrameKind::ready));
  schedule_timeout(*h);
  watch(*h);
  advance(*h);
}

// ---- handshakes ----

/// The limit is one of each direction, so that many peers at the door keep nobody from going out.
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
  h.waits_since = clock_.now();
  h.timer.index = index;
  h.timer.kind = kHandshakeTimer;
  return &h;
}

Result<Handshake*> ControlPort::dial(const Address& to, wire::KindSet expected,
                                     const Dialogue& dialogue) {
  Handshake* const h = begin_handshake(false);
  if (h == nullptr) {
    return base::fail(Status::limit, base::format("connect to {}", to.str()),
                      base::format("{} handshakes are under way already", outbound_),
                      "wait until some are over, or raise connections.handshakes");
  }
  h->dialogue = dialogue;
  if (auto begun = h->exchange.connect(to, expected, network_); !begun) {
    drop(*h);
    return tl::unexpected(begun.error());
  }
  return h;
}

Result<HandshakeId> ControlPort::connect(const Address& to, ConnectionOwner& owner) {
  Connect dialogue;
  dialogue.owner = &owner;
  auto h = dial(to, wire::kinds(FrameKind::accept, FrameKind::refuse), dialogue);
  if (!h) return tl::unexpected(h.error());
  return (*h)->id;
}

Result<HandshakeId> ControlPort::join_session(const Address& to, ConnectionOwner& owner,
                                              const SessionReference& session) {
  Connect dialogue;
  dialogue.owner = &owner;
  dialogue.session = session;
  auto h = dial(to, wire::kinds(FrameKind::accept, FrameKind::refuse), dialogue);
  if (!h) return tl::unexpected(h.error());
  return (*h)->id;
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

Result<void> ControlPort::probe(const Address& to, std::uint64_t incarnation, ProbeOwner& owner) {
  auto h =
      dial(to, wire::kinds(FrameKind::ready, FrameKind::refuse), ProbePeer{&owner, incarnation});
  if (!h) return tl::unexpected(h.error());
  send(**h, wire::encode(wire::Ready{incarnation}));
  schedule_timeout(**h);
  watch(**h);
  return {};
}

void ControlPort::assign(HandshakeId id, std::uint64_t subject) noexcept {
  Connect* const dialogue = find<Connect>(id);
  if (dialogue == nullptr) return;
  dialogue->subject = subject;
  watch(*find(id));
}

void ControlPort::ask(HandshakeId id, const Endpoint& endpoint) noexcept {
  Connect* const dialogue = find<Connect>(id);
  if (dialogue == nullptr || dialogue->asked) return;
  dialogue->asked = true;
  Handshake& h = *find(id);
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
  h.waits_since = clock_.now();
  send(h, wire::encode(wire::Accept{endpoint}));
  advance(h);
}

void ControlPort::respond(HandshakeId id, std::uint64_t path_token) noexcept {
  Handshake* const h = find(id);
  if (h == nullptr || !std::holds_alternative<OpenSession>(h->dialogue)) return;
  if (!h->exchange.all_sent()) return;  // the server repeats its challenge
  send(*h, wire::encode(wire::PathResponse{path_token}));
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

// ---- what dialogues use ----

void ControlPort::watch(Handshake& h) noexcept {
  const Interest interest = h.exchange.interest();
  if (h.watched && interest == h.interest) return;
  const std::uint64_t name = token(TokenKind::handshake, h.id.index, h.id.generation);
  const auto done = h.watched ? epoll_.modify(h.exchange.fd(), name, interest)
                              : epoll_.add(h.exchange.fd(), name, interest);
  if (!done) base::log(LogLevel::error, "{}", done.error().message());
  h.watched = h.watched || done.has_value();
  h.interest = interest;
}

void ControlPort::drop(Handshake& h) noexcept {
  stop_resolving(h);
  if (h.watched) epoll_.remove(h.exchange.fd());
  h.exchange.reset();
  timers_.cancel(h.timer);
  if (h.inbound && --h.source->second == 0) sources_.erase(h.source);
  --(h.inbound ? inbound_ : outbound_);
  handshakes_.release(h.id.index);
}

void ControlPort::send(Handshake& h, const wire::Frame& frame) noexcept {
  if (h.exchange.send(frame) != Status::ok)
    base::log(LogLevel::error, "{}: the handshake's send queue is full", h.exchange.peer_address());
}

void ControlPort::schedule_timeout(Handshake& h) noexcept {
  timers_.reschedule(h.timer, clock_.now() + clock_.ticks(options_.handshake_timeout));
}

void ControlPort::validate_path(Handshake& h, const AcceptedSession& session) noexcept {
  // A round trip takes microseconds on most networks; what is lost is sent again soon.
  constexpr Nanoseconds kFirstInterval = std::chrono::milliseconds(2);
  ValidatePath next{session, clock_.now(), clock_.ticks(kFirstInterval), 0};
  next.deadline = next.challenged_at + clock_.ticks(options_.handshake_timeout);
  h.exchange.expect(wire::kinds(FrameKind::path_response, FrameKind::refuse));
  begin(h, next);
  timers_.reschedule(h.timer, next.challenged_at + next.interval);
  watch(h);
  session.owner->on_challenge_due(session.subject, session.path_token);
}

void ControlPort::send_opened(Handshake& h, const AcceptedSession& session) noexcept {
  send(h, wire::encode(wire::SessionOpened{session.end}));
  h.exchange.expect(ServeSession::expected());
  begin(h, ServeSession{session.owner, session.subject, session.opened_at});
  schedule_timeout(h);
  advance(h);
}

void ControlPort::refuse(Handshake& h, const Error& why) noexcept {
  if (std::holds_alternative<Refusing>(h.dialogue)) return;
  stop_resolving(h);
  if (h.inbound) {
    count_refusal();
    base::log(LogLevel::info, "{} is refused: {}", h.exchange.peer_address(), why.message());
  }
  const wire::Refuse refusal = wire::make_refuse(why.status, why.message());
  begin(h, Refusing{});
  if (h.exchange.state() == Exchange::State::connecting ||
      h.exchange.refuse(refusal) != Progress::waiting)
    return drop(h);
  schedule_timeout(h);
  watch(h);
}

void ControlPort::answer_probe(Handshake& h, std::uint64_t incarnation) noexcept {
  if (incarnation != options_.incarnation) {
    return refuse(h, {Status::peer_lost, "ask for an engine",
                      "this is another engine, or its next incarnation", "open other sessions"});
  }
  send(h, wire::encode(wire::Ready{incarnation}));
  (void)h.exchange.advance();
  drop(h);
}

// ---- rdma_cm ----

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
  if (auto opened = open_cm_channel(); !opened) return tl::unexpected(opened.error());
  return CmId::create(cm_, nullptr);
}

void ControlPort::set_cm_subject(const CmId& id, std::uint64_t subject) noexcept {
  id.get()->context = cm_context(subject & kCmSubjectBits);
}

void ControlPort::poll_cm() noexcept {
  CmEvent event;
  for (int i = 0; i < kCmEventsPerPoll && cm_.next(event); ++i) {
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

void ControlPort::on_cm_request(const CmEvent& request) {
  const auto name = reinterpret_cast<std::uint64_t>(request.listener->context);
  CmId id = CmId::adopt(request.id, nullptr);
  const auto owner = owner_of({static_cast<std::uint32_t>(name), generation_of(name)});
  const Result<void> taken =
      owner != nullptr
          ? owner->on_cm_request(id, request)
          : base::fail(Status::refused, "connect", "nobody listens here any more", "try again");
  if (taken) return;
  count_refusal();
  const std::string why = taken.error().message();
  base::log(LogLevel::info, "a request through rdma_cm is refused: {}", why);
  if (id) id.reject(wire::encode_cm_refusal(wire::make_refuse(taken.error().status, why)).bytes());
}

}  // namespace spinwire::control
