// How sessions of remote calls are opened, asked about and joined through the control port. Cold.
#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "base/error.h"
#include "engine/engine_core.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire::detail {

using control::Progress;
using engine::Handshake;
using rpc::ClientSession;
using wire::FrameKind;

namespace {

Result<void> check_carrier(const agent::EngineContext& s) {
  const DeviceInfo& device = s.device->info();
  if (s.config.rpc.transport != RpcTransport::datagram || device.datagrams) return {};
  return base::fail(Status::unsupported,
                    "make remote calls possible with rpc.transport = \"datagram\"",
                    fmt::format("device {} has no unreliable datagrams", device.name),
                    "set rpc.transport to \"automatic\" or \"connection\", or open another device");
}

Result<void> check_room(const agent::EngineContext& s) {
  if (!rpc::uses_datagrams(s)) return {};
  const Config& c = s.config;
  const std::uint64_t needed =
      config::completions_needed(c) + c.rpc.send_depth + c.rpc.receive_depth;
  if (needed <= c.queues.completion_depth) return {};
  return base::fail(
      Status::limit, "make remote calls possible",
      fmt::format("queues.completion_depth = {}, and {} can complete at once with "
                  "rpc.send_depth = {} and rpc.receive_depth = {}",
                  c.queues.completion_depth, needed, c.rpc.send_depth, c.rpc.receive_depth),
      fmt::format("give at least {}, or lower one of the others", needed));
}

}  // namespace

Result<void> EngineCore::start_rpc() {
  if (ending) return engine::ending_error("make remote calls possible");
  if (calls != nullptr) return {};
  if (auto left = check_device_left("make remote calls possible"); !left) return left;
  if (auto carrier = check_carrier(context); !carrier) return carrier;
  if (auto room = check_room(context); !room) return room;
  auto made = rpc::open(context);
  if (!made) return tl::unexpected(made.error());
  calls = std::move(*made);
  rpc_qp_num = calls->port != nullptr ? calls->port->qp_num() : rpc::kNoQueuePair;
  return {};
}

Result<void> EngineCore::serve(Method method, const MethodHandler& handler) {
  if (guard.polling()) {
    return base::fail(Status::reentrant, "serve a method", "a callback asks",
                      "give the methods before polling, or between polls");
  }
  if (auto started = start_rpc(); !started) return started;
  auto& handlers = calls->handlers;
  if (method >= handlers.size()) handlers.resize(method + std::size_t{1});
  handlers[method] = handler;
  calls->method_count = static_cast<std::uint32_t>(handlers.size());
  return {};
}

Result<Session> EngineCore::open_session(std::string_view text, const SessionOptions& options) {
  auto address = control::Address::parse(text);
  if (!address) return tl::unexpected(address.error());
  const std::uint32_t window = options.window != 0 ? options.window : context.config.rpc.window;
  if (!std::has_single_bit(window) || window > rpc::kWindowMax) {
    return base::fail(Status::invalid_argument, "open a session",
                      fmt::format("a window of {} calls", window), "give a power of two up to 64");
  }
  if (auto valid = engine::check_timeout("open a session", options.timeout); !valid)
    return tl::unexpected(valid.error());
  if (auto started = start_rpc(); !started) return tl::unexpected(started.error());
  std::string name(address->text().view());
  ClientSession* const c = rpc::make_client_session(*calls, window);
  if (c == nullptr) {
    return base::fail(Status::limit, fmt::format("open a session with {}", name),
                      fmt::format("rpc.sessions = {} are open", context.config.rpc.sessions),
                      "close some, or raise it");
  }
  if (auto begun = begin_session(*c, *address); !begun) {
    rpc::close_session(*calls, *c);
    return tl::unexpected(begun.error());
  }
  c->address = std::move(name);
  c->on_ready = options.on_ready;
  c->on_closed = options.on_closed;
  const Nanoseconds patience =
      options.timeout.count() != 0 ? options.timeout : context.config.connections.connect_timeout;
  context.timers.schedule(c->timer, context.clock.now() + context.clock.ticks(patience));
  step_soon();
  return Session(&guard.slot(), rpc::id_of(*c));
}

Result<void> EngineCore::begin_session(ClientSession& c, const control::Address& to) {
  Handshake* const h = begin_handshake(false);
  if (h == nullptr) {
    return base::fail(Status::limit, fmt::format("open a session with {}", to.str()),
                      fmt::format("{} connections are being made already", outbound_handshakes),
                      "wait until some are ready, or raise connections.handshakes");
  }
  auto begun =
      h->exchange.connect(to, wire::kinds(FrameKind::session_opened, FrameKind::refuse), host);
  if (!begun) {
    drop(*h);
    return begun;
  }
  h->session = c.name;
  c.handshake = h->index;
  say(*h, wire::encode(wire::OpenSession{
              rpc::local_session_end(*calls, c.name, c.window, rpc::first_call_number(c))}));
  watch(*h);
  return {};
}

/// The exchange is over, and with it what its session knows of it.
void EngineCore::forget_opening(const Handshake& h) noexcept {
  ClientSession* const c = rpc::find_client(*calls, h.session);
  if (c != nullptr) c->handshake = rpc::kNone;
}

/// Nobody waits for the server's answer any more, which may never come.
void EngineCore::stop_opening(const ClientSession& c) noexcept {
  if (c.handshake != rpc::kNone) drop(handshakes.at(c.handshake));
}

/// What a server has said to ours.
void EngineCore::take_session_answer(Handshake& h, ClientSession& c) noexcept {
  const wire::Received& got = h.exchange.received();
  if (const auto* no = std::get_if<wire::Refuse>(&got.body)) {
    const Error why{no->status, fmt::format("open a session with {}", c.address),
                    fmt::format("the peer refused: {}", no->message()), "see the peer's reason"};
    drop(h);
    return rpc::fail_session(*calls, c, why);
  }
  const auto* yes = std::get_if<wire::SessionOpened>(&got.body);
  if (yes == nullptr) return;  // the exchange takes only what was expected
  const wire::SessionEnd end = yes->end;
  const auto route = base::no_throw("address a peer", [&]() -> Result<rpc::PeerAddress*> {
    if (end.window != c.window || end.first != rpc::first_call_number(c))
      return base::fail(Status::protocol, fmt::format("open a session with {}", c.address),
                        "the peer has another window than was asked for", "see the peer's version");
    return rpc::acquire_peer_address(*calls, end);
  });
  if (route) {
    say(h, wire::encode(wire::Ready{end.incarnation}));
    (void)h.exchange.advance();  // whatever comes of it: the server forgets us without it
  }
  drop(h);
  if (!route) return rpc::fail_session(*calls, c, route.error());
  rpc::set_peer(*calls, c, end, *route);
}

void EngineCore::progress_session(Handshake& h) noexcept {
  ClientSession* const c = calls != nullptr ? rpc::find_client(*calls, h.session) : nullptr;
  if (c == nullptr || c->state != SessionState::opening) return drop(h);
  switch (h.exchange.advance()) {
    case Progress::waiting:
      return watch(h);
    case Progress::frame:
      return take_session_answer(h, *c);
    case Progress::closed:
      drop(h);
      return rpc::fail_session(*calls, *c, Status::peer_lost, "the peer closed the TCP connection");
    case Progress::failed: {
      const Error why = h.exchange.error();
      drop(h);
      return rpc::fail_session(*calls, *c, why);
    }
  }
}

/// A peer asks for a session here.
void EngineCore::take_open_session(Handshake& h, const wire::SessionEnd& asked) noexcept {
  if (find_listener(h.listener, h.listener_generation) == nullptr)
    return refuse(h, {Status::refused, "open a session", "nobody listens here any more", ""});
  if (calls == nullptr || calls->handlers.empty())
    return refuse(h, {Status::unsupported, "open a session", "no method is served here",
                      "connect to an engine that serves"});
  const auto opened = base::no_throw("open a session", [&]() -> Result<rpc::ServerSession*> {
    auto route = rpc::acquire_peer_address(*calls, asked);
    if (!route) return tl::unexpected(route.error());
    rpc::ServerSession* const s = rpc::accept_session(*calls, asked, *route);
    if (s != nullptr) return s;
    rpc::release_peer_address(*calls, *route);
    return base::fail(Status::limit, "open a session",
                      fmt::format("rpc.sessions = {} are served", context.config.rpc.sessions),
                      "raise it there");
  });
  if (!opened) return refuse(h, opened.error());
  h.serves = (*opened)->name;
  h.begun = (*opened)->last_heard;
  say(h, wire::encode(wire::SessionOpened{
             rpc::local_session_end(*calls, (*opened)->name, (*opened)->window, asked.first)}));
  h.exchange.expect(wire::kinds(FrameKind::ready, FrameKind::refuse));
  progress_serving(h);
}

/// Asks at the addresses of silent servers whether they are still those that we know.
void EngineCore::ask_silent() noexcept {
  while (ClientSession* const c = rpc::next_session_to_probe(*calls)) {
    // What keeps us from asking may be otherwise when the next silence is over.
    (void)base::no_throw("ask for a silent peer", [&] { return ask(*c); });
  }
}

Result<void> EngineCore::ask(const ClientSession& c) {
  auto to = control::Address::parse(c.address);
  if (!to) return tl::unexpected(to.error());
  auto begun = begin_exchange(*to);
  if (!begun) return tl::unexpected(begun.error());
  Handshake& h = **begun;
  h.asks = c.peer_address->incarnation;
  h.exchange.expect(wire::kinds(FrameKind::ready, FrameKind::refuse));
  say(h, wire::encode(wire::Ready{h.asks}));
  context.timers.reschedule(
      h.timer,
      context.clock.now() + context.clock.ticks(context.config.connections.handshake_timeout));
  watch(h);
  return {};
}

/// Only an engine that says that it is another one tells us anything.
void EngineCore::progress_asking(Handshake& h) noexcept {
  const Progress now = h.exchange.advance();
  if (now == Progress::waiting) return watch(h);
  const auto* no =
      now == Progress::frame ? std::get_if<wire::Refuse>(&h.exchange.received().body) : nullptr;
  const bool gone = no != nullptr && no->status == Status::peer_lost;
  const std::uint64_t incarnation = h.asks;
  drop(h);
  if (gone) rpc::fail_silent_sessions(*calls, incarnation);
}

/// A client asks whether this is still the engine that it has sessions with.
void EngineCore::take_asking(Handshake& h, std::uint64_t incarnation) noexcept {
  if (incarnation != context.incarnation)
    return refuse(h, {Status::peer_lost, "ask for an engine",
                      "this is another one, or its next life", "open other sessions"});
  say(h, wire::encode(wire::Ready{incarnation}));
  (void)h.exchange.advance();
  drop(h);
}

/// Sessions with a first long call or without datagrams, as many as may be connected at once.
void EngineCore::connect_sessions() noexcept {
  // Those that fail may be wanted again by the callbacks of their calls.
  for (std::uint32_t most = calls->connections_wanted; most != 0; --most) {
    if (outbound_handshakes >= context.config.connections.handshakes) return;
    ClientSession* const c = rpc::next_session_to_connect(*calls);
    if (c == nullptr) return;
    const auto begun = base::no_throw("connect a session", [&] { return connect_session(*c); });
    if (!begun) rpc::fail_connecting(*calls, *c, begun.error());
  }
}

Result<void> EngineCore::connect_session(ClientSession& c) {
  if (auto left = check_device_left("connect a session"); !left) return left;
  auto to = control::Address::parse(c.address);
  if (!to) return tl::unexpected(to.error());
  auto begun = begin_exchange(*to);
  if (!begun) return tl::unexpected(begun.error());
  Handshake& h = **begun;
  agent::Agent* const a = agent::acquire(context, ConnectionState::resolving, true);
  if (a == nullptr) {
    drop(h);
    return tl::unexpected(engine::no_more_connections(
        context, fmt::format("connect a session with {} for its calls", c.address)));
  }
  h.joins = c.name;
  engine::name_peer(*a, c.address);
  agent::set_attributes(*a, rpc::connection_attributes(context));
  rpc::attach_connection(*calls, c, *a);
  attach({&h, nullptr}, *a);
  return {};
}

/// Our hello, for a connection that is a session's.
void EngineCore::say_join(Handshake& h, agent::Agent& a) noexcept {
  // The session goes after its connection.
  const ClientSession& c = *rpc::find_client(*calls, h.joins);
  wire::JoinSession join;
  join.endpoint = agent::endpoint(context, a);
  join.session = c.peer_session;
  join.name = c.name;
  join.qp_num = calls->local.qp_num;
  join.qkey = calls->local.qkey;
  say(h, wire::encode(join));
}

/// A peer connects for calls of a session that it has here: no matter of the
/// application's.
void EngineCore::take_join(Handshake& h, const wire::JoinSession& join) noexcept {
  if (find_listener(h.listener, h.listener_generation) == nullptr)
    return refuse(h, {Status::refused, "join a session", "nobody listens here any more", ""});
  rpc::ServerSession* const s =
      calls != nullptr ? rpc::find_session_to_join(*calls, join) : nullptr;
  if (s == nullptr)
    return refuse(h, {Status::refused, "join a session", "there is no such session of that peer's",
                      "open another session"});
  const auto keep_out = [&](const Error& why) {
    if (s->transport == rpc::Transport::connection)
      rpc::release_server_session(*calls, *s);  // this ends it for its client
    refuse(h, why);
  };
  if (auto left = check_device_left("join a session"); !left) return keep_out(left.error());
  agent::Agent* const a = agent::acquire(context, ConnectionState::exchanging, false);
  if (a == nullptr) return keep_out(engine::no_more_connections(context, "join a session"));
  h.agent = a->index;
  h.agent_generation = a->generation;
  a->setup.exchange = h.index;
  engine::name_peer(*a, h.exchange.peer_address());
  agent::set_attributes(*a, rpc::connection_attributes(context));
  const auto joined = base::no_throw("join a session", [&]() -> Result<void> {
    if (auto taken = agent::take_endpoint(context, *a, join.endpoint); !taken) return taken;
    rpc::join_session(*calls, *s, *a);
    return {};
  });
  if (!joined) {
    agent::fail(context, *a, joined.error());
    return keep_out(joined.error());
  }
  h.exchange.expect(wire::kinds(FrameKind::ready, FrameKind::refuse));
}

/// Until the client has confirmed that it has the session. One whose stream ends before that has
/// given it up, or is gone, unless it is using the session by then.
void EngineCore::progress_serving(Handshake& h) noexcept {
  const Progress now = h.exchange.advance();
  if (now == Progress::waiting) return watch(h);
  const auto* ready =
      now == Progress::frame ? std::get_if<wire::Ready>(&h.exchange.received().body) : nullptr;
  const bool confirmed = ready != nullptr && ready->incarnation == context.incarnation;
  rpc::ServerSession* const s = rpc::find_server(*calls, h.serves);
  if (!confirmed && s != nullptr && rpc::last_heard_from(*s) == h.begun && s->connection == nullptr)
    rpc::forget_session(*calls, *s);
  drop(h);
}

}  // namespace spinwire::detail
