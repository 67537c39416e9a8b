// Listening, connecting, and the exchanges that bring connections up. Cold.
#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "engine/engine_core.h"

namespace spinwire::engine {

tl::unexpected<Error> ending_error(const char* asked) {
  return base::fail(Status::not_connected, asked, "the engine is being destroyed",
                    "open another engine");
}

Error no_more_connections(const agent::EngineContext& s, std::string asked) {
  if (s.device->srq() == nullptr && !s.agents.full()) {
    const std::uint32_t count = s.agents.size() + 1;
    return {Status::limit, std::move(asked),
            fmt::format("asked {} receives for {} connections, have {}",
                        s.own_queues->share.slots * count, count,
                        s.receives.size() - s.receive_shortage),
            "without a shared receive queue each connection has its own: raise "
            "queues.receive_depth there; messages that are kept count, too"};
  }
  return {Status::limit, std::move(asked),
          fmt::format("{} connections, {} of {} receives promised", s.agents.size(),
                      s.reserved_receives, s.reservable_receives),
          "raise connections.maximum or queues.receive_depth there"};
}

Result<void> check_timeout(const char* asked, Nanoseconds timeout) {
  if (timeout >= Nanoseconds{0} && timeout <= std::chrono::hours(1)) return {};
  return base::fail(Status::invalid_argument, asked,
                    fmt::format("its time-out is {} ns", timeout.count()),
                    "allow up to an hour, or 0 for connections.connect_timeout");
}

void name_peer(agent::Agent& a, std::string_view text) noexcept {
  const std::size_t n = std::min(text.size(), a.peer.name.size() - 1);
  std::copy_n(text.begin(), n, a.peer.name.begin());
  a.peer.name[n] = '\0';
}

}  // namespace spinwire::engine

namespace spinwire::detail {

using agent::Agent;
using agent::kNone;
using control::Progress;
using engine::Handshake;
using engine::Listening;
using wire::FrameKind;

namespace {

Result<void> check(const Reconnect& r) {
  constexpr Nanoseconds kLeast = std::chrono::microseconds(1), kMost = std::chrono::hours(1);
  if (r.first_delay >= kLeast && r.first_delay <= r.max_delay && r.max_delay <= kMost) return {};
  return base::fail(
      Status::invalid_argument, "connect with reconnecting",
      fmt::format("delays from {} ns to {} ns", r.first_delay.count(), r.max_delay.count()),
      "delays are 1 us to 1 h, and first_delay is at most max_delay");
}

constexpr int kBacklog = 512;
constexpr int kAcceptsPerStep = 8;

// Tokens of the epoll set: what, generation, index.
constexpr std::uint64_t kListenerToken = std::uint64_t{1} << 63;
constexpr std::uint64_t token(std::uint32_t generation, std::uint32_t index) noexcept {
  return std::uint64_t{generation & engine::kTokenGenerations} << 32 | index;
}

}  // namespace

Result<void> EngineCore::listen_on_socket(Listening& listening, const control::Address& at,
                                          std::uint32_t index) {
  auto socket = control::ListenSocket::open(at, kBacklog, host);
  if (!socket) return tl::unexpected(socket.error());
  listening.socket = std::move(*socket);
  return epoll.add(listening.socket.fd(), kListenerToken | token(listening.generation, index),
                   control::Interest::read);
}

Result<Listener> EngineCore::listen(std::string_view text, const ListenOptions& options) {
  if (ending) return engine::ending_error("listen");
  if (auto left = check_device_left("listen"); !left) return tl::unexpected(left.error());
  auto address = control::Address::parse(text);
  if (!address) return tl::unexpected(address.error());
  const auto attributes = resolve(options.settings, options.via);
  if (!attributes) return tl::unexpected(attributes.error());
  auto listening = std::make_unique<Listening>();
  listening->options = options;
  listening->attributes = *attributes;
  listener_generation = (listener_generation + 1) & engine::kTokenGenerations;
  listening->generation = listener_generation;
  auto free = std::find(listeners.begin(), listeners.end(), nullptr);
  if (free == listeners.end()) free = listeners.insert(listeners.end(), nullptr);
  const auto index = static_cast<std::uint32_t>(free - listeners.begin());
  auto done = options.via == Via::rdma_cm ? listen_through_cm(*listening, *address, index)
                                          : listen_on_socket(*listening, *address, index);
  if (!done) return tl::unexpected(done.error());
  *free = std::move(listening);
  return Listener(&guard.slot(), index, listener_generation);
}

Listening* EngineCore::find_listener(std::uint32_t index, std::uint32_t generation) noexcept {
  if (index >= listeners.size() || listeners[index] == nullptr) return nullptr;
  return listeners[index]->generation == generation ? listeners[index].get() : nullptr;
}

void EngineCore::stop_listening(std::uint32_t index, std::uint32_t generation) noexcept {
  if (find_listener(index, generation) == nullptr) return;
  if (!listeners[index]->cm) epoll.remove(listeners[index]->socket.fd());
  listeners[index].reset();
  // Handshakes under way have copied what they need.
}

Handshake* EngineCore::begin_handshake(bool inbound) noexcept {
  // As many of either direction: a crowd at the door keeps nobody from going out.
  std::uint32_t& count = inbound ? inbound_handshakes : outbound_handshakes;
  if (count >= context.config.connections.handshakes) return nullptr;
  const std::uint32_t index = handshakes.acquire();
  if (index == kNone) return nullptr;
  ++count;
  Handshake& h = handshakes.at(index);
  h.agent = kNone;
  h.index = index;
  h.listener = kNone;
  h.inbound = inbound;
  h.spoken = h.confirmed = h.refusing = h.watched = false;
  h.serves = h.session = h.joins = 0;
  h.asks = 0;
  h.interest = control::Interest::none;
  h.begun = context.clock.now();
  h.timer.index = index;
  h.timer.kind = engine::kHandshakeTimer;
  return &h;
}

Result<Handshake*> EngineCore::begin_exchange(const control::Address& to) {
  Handshake* h = begin_handshake(false);
  if (h == nullptr) {
    return base::fail(Status::limit, fmt::format("connect to {}", to.str()),
                      fmt::format("{} connections are being made already", outbound_handshakes),
                      "wait until some are ready, or raise connections.handshakes");
  }
  auto begun = h->exchange.connect(to, wire::kinds(FrameKind::accept, FrameKind::refuse), host);
  if (begun) return h;
  drop(*h);
  return tl::unexpected(begun.error());
}

Result<engine::Attempt> EngineCore::begin(const control::Address& to, Via via,
                                          Nanoseconds patience) {
  if (auto left = check_device_left("connect"); !left) return tl::unexpected(left.error());
  if (via == Via::rdma_cm)
    return begin_through_cm(to, patience).map([](auto link) {
      return engine::Attempt{nullptr, std::move(link)};
    });
  return begin_exchange(to).map([](Handshake* h) { return engine::Attempt{h, nullptr}; });
}

void EngineCore::attach(engine::Attempt attempt, Agent& a) noexcept {
  if (attempt.link != nullptr) return attach_link(std::move(attempt.link), a);
  Handshake& h = *attempt.exchange;
  a.setup.exchange = h.index;
  h.agent = a.index;
  h.agent_generation = a.generation;
  watch(h);
}

Result<Connection> EngineCore::connect(std::string_view text, const ConnectOptions& options) {
  if (ending) return engine::ending_error("connect");
  auto address = control::Address::parse(text);
  if (!address) return tl::unexpected(address.error());
  if (auto valid = check(options.reconnect); !valid) return tl::unexpected(valid.error());
  if (auto valid = engine::check_timeout("connect", options.timeout); !valid)
    return tl::unexpected(valid.error());
  const auto attributes = resolve(options.settings, options.via);
  if (!attributes) return tl::unexpected(attributes.error());
  auto raw = agent::make_raw(context, *attributes);
  if (!raw) return tl::unexpected(raw.error());
  std::unique_ptr<agent::Again> again;
  if (options.reconnect.attempts != 0)
    again = std::make_unique<agent::Again>(options.reconnect, *address, options.via);
  const Nanoseconds patience =
      options.timeout.count() != 0 ? options.timeout : context.config.connections.connect_timeout;
  auto attempt = begin(*address, options.via, patience);
  if (!attempt) return tl::unexpected(attempt.error());
  Agent* a = agent::acquire(context, ConnectionState::resolving, true, patience);
  if (a == nullptr) {
    if (attempt->exchange != nullptr) drop(*attempt->exchange);
    return tl::unexpected(engine::no_more_connections(context, fmt::format("connect to {}", text)));
  }
  engine::name_peer(*a, address->text().view());
  agent::set_attributes(*a, *attributes);
  (void)agent::use_raw(context, *a, std::move(*raw));
  a->handlers = options.handlers;
  a->reconnect = std::move(again);
  attach(std::move(*attempt), *a);
  step_soon();
  return agent::handle(context, *a);
}

/// The next attempt of a connection that rests. What fails here counts as one.
void EngineCore::reconnect(Agent& a) noexcept {
  const auto begun = base::no_throw("connect again", [&]() -> Result<void> {
    if (!agent::revive(context, a)) {
      return tl::unexpected(engine::no_more_connections(
          context, fmt::format("connect to {} again", a.peer.name.data())));
    }
    auto attempt = begin(a.reconnect->address, a.reconnect->via, a.setup.timeout);
    if (!attempt) return tl::unexpected(attempt.error());
    attach(std::move(*attempt), a);
    return {};
  });
  if (!begun) agent::fail(context, a, begun.error());
}

void EngineCore::watch(Handshake& h) noexcept {
  const control::Interest interest = h.exchange.interest();
  const std::uint64_t name = token(handshakes.generation(h.index), h.index);
  if (h.watched && interest == h.interest) return;
  const auto done = h.watched ? epoll.modify(h.exchange.fd(), name, interest)
                              : epoll.add(h.exchange.fd(), name, interest);
  if (!done) base::log(LogLevel::error, "{}", done.error().message());
  h.watched = h.watched || done.has_value();
  h.interest = interest;
}

void EngineCore::drop(Handshake& h) noexcept {
  if (Agent* a = agent_of(h); a != nullptr) a->setup.exchange = kNone;
  if (h.session != 0) forget_opening(h);
  if (h.watched) epoll.remove(h.exchange.fd());
  h.exchange.reset();
  context.timers.cancel(h.timer);
  --(h.inbound ? inbound_handshakes : outbound_handshakes);
  handshakes.release(h.index);
}

void EngineCore::say(Handshake& h, const wire::Frame& frame) noexcept {
  if (h.exchange.send(frame) != Status::ok)
    base::log(LogLevel::error, "{}: the handshake's send queue is full", h.exchange.peer_address());
}

void EngineCore::refuse(Handshake& h, const Error& why) noexcept {
  if (h.refusing) return;
  h.refusing = true;
  if (h.inbound) {
    ++context.stats.handshakes_refused;
    base::log(LogLevel::info, "{} is refused: {}", h.exchange.peer_address(), why.message());
  }
  if (Agent* a = agent_of(h); a != nullptr) {
    a->setup.exchange = kNone;
    h.agent = kNone;
  }
  if (h.exchange.state() == control::Exchange::State::connecting ||
      h.exchange.refuse(wire::make_refuse(why.status, why.message())) != Progress::waiting) {
    drop(h);
    return;
  }
  // Lingers until the peer has read it, but not for ever.
  context.timers.reschedule(
      h.timer,
      context.clock.now() + context.clock.ticks(context.config.connections.handshake_timeout));
  watch(h);
}

/// Room for one more inbound handshake: one that has been silent while others wait gives way.
bool EngineCore::make_room() noexcept {
  if (inbound_handshakes < context.config.connections.handshakes) return true;
  const std::uint64_t patience = context.clock.ticks(std::min<Nanoseconds>(
      context.config.connections.handshake_timeout / 8, std::chrono::milliseconds(100)));
  Handshake* oldest = nullptr;
  for (std::uint32_t i = 0; i < handshakes.capacity(); ++i) {
    if (!handshakes.in_use(i)) continue;
    Handshake& h = handshakes.at(i);
    if (h.inbound && h.agent == kNone && (oldest == nullptr || h.begun < oldest->begun))
      oldest = &h;
  }
  if (oldest == nullptr || context.clock.now() - oldest->begun < patience) return false;
  if (!oldest->refusing) ++context.stats.handshakes_refused;
  drop(*oldest);
  return true;
}

void EngineCore::accept_from(std::uint32_t index, std::uint32_t generation) noexcept {
  for (int i = 0; i < kAcceptsPerStep; ++i) {
    // Looked up each time: a callback may have dropped the listener.
    Listening* listening = find_listener(index, generation);
    if (listening == nullptr || !make_room()) return;  // the backlog keeps it, epoll tells again
    auto accepted = listening->socket.accept();
    if (!accepted) {
      base::log(LogLevel::warning, "{}", accepted.error().message());
      return;
    }
    if (!*accepted) return;
    Handshake* h = begin_handshake(true);
    h->listener = index;
    h->listener_generation = generation;
    h->exchange.adopt(std::move((*accepted)->fd), (*accepted)->peer,
                      wire::kinds(FrameKind::hello, FrameKind::open_session,
                                  FrameKind::join_session, FrameKind::ready));
    context.timers.schedule(
        h->timer,
        context.clock.now() + context.clock.ticks(context.config.connections.handshake_timeout));
    watch(*h);
    progress(*h);
  }
}

void EngineCore::look_at_sockets() noexcept {
  std::array<control::Event, control::EpollSet::kEventsMax> events;
  const std::size_t n = epoll.wait(events);
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint64_t name = events[i].token;
    const auto index = static_cast<std::uint32_t>(name);
    const auto generation = static_cast<std::uint32_t>(name >> 32) & engine::kTokenGenerations;
    if (name == engine::kDeviceToken) {
      take_async_events();
    } else if (name == engine::kCmToken) {
      take_cm_events();
    } else if ((name & kListenerToken) != 0) {
      accept_from(index, generation);
    } else if (handshakes.in_use(index) &&
               (handshakes.generation(index) & engine::kTokenGenerations) == generation) {
      progress(handshakes.at(index));
    }
  }
}

void EngineCore::progress(Handshake& h) noexcept {
  if (h.refusing) {
    const Progress now = h.exchange.advance();
    if (now == Progress::closed || now == Progress::failed) {
      drop(h);
    } else {
      watch(h);
    }
    return;
  }
  if (h.session != 0) return progress_session(h);
  if (h.serves != 0) return progress_serving(h);
  if (h.asks != 0) return progress_asking(h);
  Agent* a = agent_of(h);
  if (a != nullptr && a->setup.was_ready)
    return drop(h);  // a message was faster than the last frame
  if (h.agent != kNone && (a == nullptr || a->state == ConnectionState::draining)) {
    // The connection ended meanwhile: by its application, a deadline or an error.
    Error why{Status::refused, "connect", "the application closed the connection", "try again"};
    if (a != nullptr && a->cause.status != Status::ok) why = a->cause;
    refuse(h, why);
    return;
  }
  if (h.inbound) {
    progress_inbound(h);
  } else {
    progress_outbound(h);
  }
}

void EngineCore::take_answer(Handshake& h, Agent& a) noexcept {
  const wire::Received& got = h.exchange.received();
  if (const auto* no = std::get_if<wire::Refuse>(&got.body)) {
    // A full peer may have room later; any other answer stays what it is.
    if (a.reconnect != nullptr) a.reconnect->permanent = no->status != Status::limit;
    agent::fail(context, a,
                {no->status, fmt::format("connect to {}", a.peer.name.data()),
                 fmt::format("the peer refused: {}", no->message()), "see the peer's reason"});
    drop(h);
    return;
  }
  const auto* yes = std::get_if<wire::Accept>(&got.body);
  if (yes == nullptr) return;  // the exchange takes only what was expected
  const auto taken = agent::take_endpoint(context, a, yes->endpoint);
  if (!taken) {
    agent::fail(context, a, taken.error());
    refuse(h, taken.error());
    return;
  }
  h.exchange.expect({});
  a.stage = agent::Stage::rtr;
  agent::list_setup(context, a);
}

void EngineCore::progress_outbound(Handshake& h) noexcept {
  Agent& a = *agent_of(h);
  if (!h.spoken && a.stage == agent::Stage::wait) {
    h.spoken = true;
    if (h.joins != 0) {
      say_join(h, a);
    } else {
      say(h, wire::encode(wire::Hello{agent::endpoint(context, a)}));
    }
    agent::enter(context, a, ConnectionState::exchanging);
  }
  if (!h.confirmed && a.stage == agent::Stage::up) {
    h.confirmed = true;
    say(h, wire::encode(wire::Ready{a.peer.incarnation}));
  }
  switch (h.exchange.advance()) {
    case Progress::waiting:
      break;
    case Progress::frame:
      return take_answer(h, a);
    case Progress::closed:
      if (h.confirmed && h.exchange.all_sent()) break;  // it has read that already
      agent::fail(context, a,
                  {Status::peer_lost, fmt::format("connect to {}", a.peer.name.data()),
                   "the peer closed the TCP connection in the handshake",
                   "see the peer's log; it may have reached a limit or have been stopped"});
      drop(h);
      return;
    case Progress::failed: {
      const Error why = h.exchange.error();
      agent::fail(context, a, why);
      refuse(h, why);
      return;
    }
  }
  if (h.confirmed && h.exchange.all_sent()) {
    drop(h);
    agent::become_ready(context, a);
    return;
  }
  watch(h);
}

void EngineCore::take_hello(Handshake& h) noexcept {
  if (const auto* session = std::get_if<wire::OpenSession>(&h.exchange.received().body))
    return take_open_session(h, session->end);
  if (const auto* join = std::get_if<wire::JoinSession>(&h.exchange.received().body))
    return take_join(h, *join);
  if (const auto* asked = std::get_if<wire::Ready>(&h.exchange.received().body))
    return take_asking(h, asked->incarnation);
  const auto* hello = std::get_if<wire::Hello>(&h.exchange.received().body);
  if (hello == nullptr) return;  // the exchange takes only what was expected
  const Listening* listening = find_listener(h.listener, h.listener_generation);
  if (listening == nullptr) {
    return refuse(h, {Status::refused, "connect", "nobody listens here any more", "try again"});
  }
  if (auto left = check_device_left("accept a connection"); !left) return refuse(h, left.error());
  auto raw = agent::make_raw(context, listening->attributes);
  if (!raw) return refuse(h, raw.error());
  Agent* a = agent::acquire(context, ConnectionState::exchanging, false);
  if (a == nullptr) {
    return refuse(h, engine::no_more_connections(context, "accept one more connection"));
  }
  h.agent = a->index;
  h.agent_generation = a->generation;
  a->setup.exchange = h.index;
  engine::name_peer(*a, h.exchange.peer_address());
  agent::set_attributes(*a, listening->attributes);
  (void)agent::use_raw(context, *a, std::move(*raw));
  a->handlers = listening->options.handlers;
  const auto taken = agent::take_endpoint(context, *a, hello->endpoint);
  if (!taken) {
    a->handlers = {};  // the application never heard of it
    agent::fail(context, *a, taken.error());
    return refuse(h, taken.error());
  }
  h.exchange.expect(wire::kinds(FrameKind::ready, FrameKind::refuse));
  const Callback<void(Connection)> on_accept = listening->options.on_accept;
  if (on_accept) on_accept(agent::handle(context, *a));
  if (a->state == ConnectionState::draining) {
    refuse(h, {Status::refused, "connect", "the application refused", "ask its operator"});
  } else if (const auto agreed = agent::agree_on_raw(*a, a->peer.is_raw); !agreed) {
    agent::fail(context, *a, agreed.error());
    refuse(h, agreed.error());
  }
}

void EngineCore::take_confirmation(Handshake& h, Agent& a) noexcept {
  const wire::Received& got = h.exchange.received();
  if (const auto* no = std::get_if<wire::Refuse>(&got.body)) {
    ++context.stats.handshakes_refused;
    agent::fail(context, a,
                {no->status, fmt::format("accept a connection from {}", a.peer.name.data()),
                 fmt::format("the peer gave up: {}", no->message()), "see the peer's reason"});
    return drop(h);
  }
  const auto* ready = std::get_if<wire::Ready>(&got.body);
  if (ready == nullptr || ready->incarnation != context.incarnation) {
    const Error why{Status::protocol, "finish a handshake",
                    "the peer's confirmation names another life of this engine", "reconnect"};
    agent::fail(context, a, why);
    return refuse(h, why);
  }
  drop(h);
  agent::become_ready(context, a);
}

void EngineCore::progress_inbound(Handshake& h) noexcept {
  Agent* a = agent_of(h);
  if (a != nullptr && !h.spoken && a->stage == agent::Stage::up) {
    h.spoken = true;
    say(h, wire::encode(wire::Accept{agent::endpoint(context, *a)}));
  }
  switch (h.exchange.advance()) {
    case Progress::waiting:
      watch(h);
      return;
    case Progress::frame:
      return a == nullptr ? take_hello(h) : take_confirmation(h, *a);
    case Progress::closed:
    case Progress::failed:
      break;
  }
  Error why = h.exchange.state() == control::Exchange::State::failed
                  ? h.exchange.error()
                  : Error{Status::peer_lost, "shake hands with a peer",
                          "it closed the TCP connection half-way", "see the peer's log"};
  if (a != nullptr) agent::fail(context, *a, why);
  refuse(h, why);
}

}  // namespace spinwire::detail
