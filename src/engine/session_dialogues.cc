#include "engine/session_dialogues.h"

#include <fmt/format.h>

#include <bit>

#include "agent/agent.h"
#include "base/error.h"
#include "config/queue_sizing.h"
#include "engine/connector.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire::engine {

using rpc::ClientSession;

namespace {

Result<void> check_transport(const agent::EngineContext& s) {
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

// ---- opening ----

Result<void> SessionDialogues::start() {
  if (rpc_ != nullptr) return {};
  if (auto present = device_.check_present("make remote calls possible"); !present) return present;
  if (auto transport = check_transport(context_); !transport) return transport;
  if (auto room = check_room(context_); !room) return room;
  auto made = rpc::open(context_);
  if (!made) return tl::unexpected(made.error());
  rpc_ = std::move(*made);
  rpc_qp_num_ = rpc_->port != nullptr ? rpc_->port->qp_num() : rpc::kNoQueuePair;
  return {};
}

Result<void> SessionDialogues::serve(Method method, const MethodHandler& handler) {
  if (auto started = start(); !started) return started;
  auto& handlers = rpc_->handlers;
  if (method >= handlers.size()) handlers.resize(method + std::size_t{1});
  handlers[method] = handler;
  rpc_->method_count = static_cast<std::uint32_t>(handlers.size());
  return {};
}

Result<ClientSession*> SessionDialogues::open(std::string_view text,
                                              const SessionOptions& options) {
  auto address = control::Address::parse(text);
  if (!address) return tl::unexpected(address.error());
  const std::uint32_t window = options.window != 0 ? options.window : context_.config.rpc.window;
  if (!std::has_single_bit(window) || window > rpc::kWindowMax) {
    return base::fail(Status::invalid_argument, "open a session",
                      fmt::format("a window of {} calls", window), "give a power of two up to 64");
  }
  if (auto valid = check_timeout("open a session", options.timeout); !valid)
    return tl::unexpected(valid.error());
  if (auto started = start(); !started) return tl::unexpected(started.error());
  std::string name(address->text().view());
  ClientSession* const c = rpc::make_client_session(*rpc_, window);
  if (c == nullptr) {
    return base::fail(Status::limit, fmt::format("open a session with {}", name),
                      fmt::format("rpc.sessions = {} are open", context_.config.rpc.sessions),
                      "close some, or raise it");
  }
  const auto handshake = port_.open_session(
      *address, rpc::local_session_end(*rpc_, c->name, c->window, rpc::first_call_number(*c)),
      *this, c->name);
  if (!handshake) {
    rpc::close_session(*rpc_, *c);
    return tl::unexpected(handshake.error());
  }
  c->handshake = *handshake;
  c->address = std::move(name);
  c->on_ready = options.on_ready;
  c->on_closed = options.on_closed;
  const Nanoseconds timeout =
      options.timeout.count() != 0 ? options.timeout : context_.config.connections.connect_timeout;
  context_.timers.schedule(c->timer, context_.clock.now() + context_.clock.ticks(timeout));
  schedule_.step_soon();
  return c;
}

ClientSession* SessionDialogues::find_opening(std::uint64_t subject) noexcept {
  ClientSession* const c = rpc::find_client(*rpc_, static_cast<std::uint32_t>(subject));
  return c != nullptr && c->state == SessionState::opening ? c : nullptr;
}

void SessionDialogues::on_opened(std::uint64_t subject, control::HandshakeId handshake,
                                 const wire::SessionEnd& server) {
  ClientSession* const c = find_opening(subject);
  if (c == nullptr) return;
  const auto peer = base::no_throw("address a peer", [&]() -> Result<rpc::PeerAddress*> {
    if (server.window != c->window || server.first != rpc::first_call_number(*c)) {
      return base::fail(Status::protocol, fmt::format("open a session with {}", c->address),
                        "the peer has another window than was asked for", "see the peer's version");
    }
    return rpc::acquire_peer_address(*rpc_, server);
  });
  if (!peer) return rpc::fail_session(*rpc_, *c, peer.error());
  port_.confirm(handshake, server.incarnation);
  rpc::set_peer(*rpc_, *c, server, *peer);
}

void SessionDialogues::on_open_refused(std::uint64_t subject, const wire::Refuse& refusal) {
  ClientSession* const c = find_opening(subject);
  if (c == nullptr) return;
  const Error why{refusal.status, fmt::format("open a session with {}", c->address),
                  fmt::format("the peer refused: {}", refusal.message()), "see the peer's reason"};
  rpc::fail_session(*rpc_, *c, why);
}

void SessionDialogues::on_open_failed(std::uint64_t subject, const Error& why) {
  if (ClientSession* const c = find_opening(subject); c != nullptr)
    rpc::fail_session(*rpc_, *c, why);
}

// ---- serving ----

Result<control::AcceptedSession> SessionDialogues::accept(const wire::SessionEnd& client) {
  if (rpc_ == nullptr || rpc_->handlers.empty()) {
    return base::fail(Status::unsupported, "open a session", "no method is served here",
                      "connect to an engine that serves");
  }
  return base::no_throw("open a session", [&]() -> Result<control::AcceptedSession> {
    auto peer = rpc::acquire_peer_address(*rpc_, client);
    if (!peer) return tl::unexpected(peer.error());
    const rpc::ServerSession* const s = rpc::accept_session(*rpc_, client, *peer);
    if (s == nullptr) {
      rpc::release_peer_address(*rpc_, *peer);
      return base::fail(Status::limit, "open a session",
                        fmt::format("rpc.sessions = {} are served", context_.config.rpc.sessions),
                        "raise it there");
    }
    return control::AcceptedSession{rpc::local_session_end(*rpc_, s->name, s->window, client.first),
                                    this, s->name, s->last_heard};
  });
}

void SessionDialogues::on_unconfirmed(std::uint64_t subject, std::uint64_t opened_at) {
  rpc::ServerSession* const s = rpc::find_server(*rpc_, static_cast<std::uint32_t>(subject));
  if (s != nullptr && rpc::last_heard_from(*s) == opened_at && s->connection == nullptr)
    rpc::forget_session(*rpc_, *s);
}

// ---- connections for long calls ----

void SessionDialogues::step() noexcept {
  if (rpc_ == nullptr) return;
  if (rpc_->connections_wanted != 0) connect_sessions();
  if (rpc_->has_silent_peers) probe_silent_peers();
}

void SessionDialogues::connect_sessions() noexcept {
  // The callbacks of calls that fail may make others, which want a connection again: not now.
  for (std::uint32_t left = rpc_->connections_wanted; left != 0 && port_.outbound_room() != 0;
       --left) {
    ClientSession* const c = rpc::next_session_to_connect(*rpc_);
    if (c == nullptr) return;
    const auto begun = base::no_throw("connect a session", [&] { return connect(*c); });
    if (!begun) rpc::fail_connecting(*rpc_, *c, begun.error());
  }
}

Result<void> SessionDialogues::connect(ClientSession& c) {
  if (auto present = device_.check_present("connect a session"); !present) return present;
  auto to = control::Address::parse(c.address);
  if (!to) return tl::unexpected(to.error());
  const auto handshake = port_.join_session(
      *to, connections_, {c.peer_session, c.name, rpc_->local.qp_num, rpc_->local.qkey});
  if (!handshake) return tl::unexpected(handshake.error());
  agent::Agent* const a = agent::acquire(context_, ConnectionState::resolving, true);
  if (a == nullptr) {
    port_.drop(*handshake);
    return tl::unexpected(no_more_connections(
        context_, fmt::format("connect a session with {} for its calls", c.address)));
  }
  name_peer(*a, c.address);
  agent::set_attributes(*a, rpc::connection_attributes(context_));
  rpc::attach_connection(*rpc_, c, *a);
  a->setup.handshake = *handshake;
  port_.assign(*handshake, Connector::subject_of(*a));
  return {};
}

// The connection is internal: the application's handlers do not see it.
Result<control::AcceptedConnection> SessionDialogues::accept_join(control::HandshakeId handshake,
                                                                  std::string_view peer,
                                                                  const wire::JoinSession& join) {
  rpc::ServerSession* const s = rpc_ != nullptr ? rpc::find_session_to_join(*rpc_, join) : nullptr;
  if (s == nullptr) {
    return base::fail(Status::refused, "join a session", "the peer has no such session here",
                      "open another session");
  }
  const auto refuse = [&](const Error& why) {
    // A session without datagrams cannot go on without its connection.
    if (s->transport == rpc::Transport::connection) rpc::release_server_session(*rpc_, *s);
    return tl::unexpected(why);
  };
  if (auto present = device_.check_present("join a session"); !present)
    return refuse(present.error());
  agent::Agent* const a = agent::acquire(context_, ConnectionState::exchanging, false);
  if (a == nullptr) return refuse(no_more_connections(context_, "join a session"));
  a->setup.handshake = handshake;
  name_peer(*a, peer);
  agent::set_attributes(*a, rpc::connection_attributes(context_));
  const auto joined = base::no_throw("join a session", [&]() -> Result<void> {
    if (auto taken = agent::take_endpoint(context_, *a, join.endpoint); !taken) return taken;
    rpc::join_session(*rpc_, *s, *a);
    return {};
  });
  if (!joined) {
    agent::fail(context_, *a, joined.error());
    return refuse(joined.error());
  }
  return control::AcceptedConnection{&connections_, Connector::subject_of(*a)};
}

// ---- silent peers ----

void SessionDialogues::probe_silent_peers() noexcept {
  while (const ClientSession* const c = rpc::next_session_to_probe(*rpc_)) {
    // A probe that cannot begin is tried again after the next silence.
    (void)base::no_throw("probe a silent peer", [&]() -> Result<void> {
      auto to = control::Address::parse(c->address);
      if (!to) return tl::unexpected(to.error());
      return port_.probe(*to, c->peer_address->incarnation, *this);
    });
  }
}

void SessionDialogues::on_peer_gone(std::uint64_t incarnation) {
  rpc::fail_silent_sessions(*rpc_, incarnation);
}

}  // namespace spinwire::engine
