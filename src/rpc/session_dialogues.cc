#include "rpc/session_dialogues.h"

#include <bit>
#include <cstring>
#include <memory>

#include "agent/connecting.h"
#include "base/error.h"
#include "config/connection_attributes.h"
#include "control/peer_source.h"
#include "rpc/client_session.h"
#include "rpc/rpc_state.h"
#include "rpc/server_session.h"
#include "rpc/session_failover.h"
#include "rpc/session_liveness.h"
#include "rpc/session_recording.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire::rpc {

namespace {

/// May throw std::bad_alloc.
std::unique_ptr<SessionPeer> make_session_peer(std::string_view address, control::KeyName key,
                                               const wire::SessionEnd& end) {
  auto peer = std::make_unique<SessionPeer>();
  peer->address.length =
      static_cast<std::uint8_t>(address.copy(peer->address.text.data(), peer->address.text.size()));
  peer->key = std::move(key);
  if (!end.private_data.empty())
    peer->private_data = std::make_unique<PrivateData>(end.private_data);
  return peer;
}

}  // namespace

// ---- opening ----

Result<ClientSession*> SessionDialogues::open(std::string_view text,
                                              const SessionOptions& options) {
  auto plan =
      agent::ReconnectPlan::make("open a session", options.reconnect, text, options.alternatives,
                                 rpc_.context.clock, options.local_paths);
  if (!plan) return tl::unexpected(plan.error());
  if (auto good = check_local_paths(rpc_.context, options.local_paths); !good)
    return tl::unexpected(good.error());
  const std::uint32_t window =
      options.window != 0 ? options.window : rpc_.context.config.rpc.window;
  if (!std::has_single_bit(window) || window > kWindowMax) {
    return base::fail(Status::invalid_argument, "open a session",
                      base::format("a window of {} calls", window), "give a power of two up to 64");
  }
  if (auto valid = config::check_timeout("open a session", options.timeout); !valid)
    return tl::unexpected(valid.error());
  PrivateData ours;
  if (ours.assign(options.private_data) != Status::ok) {
    return base::fail(Status::invalid_argument, "open a session",
                      base::format("private data of {} bytes", options.private_data.size()),
                      base::format("give up to {} bytes", kPrivateDataMax));
  }
  ClientSession* const c = make_client_session(rpc_, window);
  if (c == nullptr) {
    return base::fail(Status::limit, base::format("open a session with {}", text),
                      base::format("rpc.sessions = {} are open", rpc_.context.config.rpc.sessions),
                      "close some, or raise rpc.sessions");
  }
  c->timeout = options.timeout.count() != 0 ? options.timeout
                                            : rpc_.context.config.connections.connect_timeout;
  c->when_not_ready = options.when_not_ready;
  const auto dialled = base::no_throw("open a session", [&] {
    if (!ours.empty()) c->private_data = std::make_unique<PrivateData>(ours);
    if (options.reconnect.attempts == 0 && plan->is_only_default())
      return dial(*c, plan->address());
    c->reconnect.reset(new SessionReconnect{std::move(*plan), options.on_interrupted});
    c->backlog_room += c->window;  // calls that a server refuses wait besides; see refused_calls.h
    agent::ReconnectPlan& way = c->reconnect->plan;
    return way.begin_round([&] { return dial(*c, way.address()); }, rpc_.context.clock.now());
  });
  if (!dialled) {
    end_session_in_order(rpc_, *c);
    return tl::unexpected(dialled.error());
  }
  c->on_ready = options.on_ready;
  c->on_closed = options.on_closed;
  c->on_writable = options.on_writable;
  return c;
}

Result<void> SessionDialogues::dial(ClientSession& c, const control::Address& to) {
  if (auto usable = use_local_path(rpc_.context, c); !usable) return usable;
  const auto token = base::random_secret();
  if (!token) return tl::unexpected(token.error());
  c.address = to.text().view();
  c.event_source = control::event_source(to);
  wire::SessionEnd end =
      local_session_end(rpc_, c.name, c.window, first_call_number(c), !has_own_place(c));
  end.token = c.token = *token;
  if (c.private_data != nullptr) end.private_data = *c.private_data;
  record_state(rpc_, c);
  const auto handshake = port_.open_session(to, end, *this, c.name);
  if (!handshake) return tl::unexpected(handshake.error());
  c.handshake = *handshake;
  c.deadline = rpc_.context.clock.now() + rpc_.context.clock.ticks(c.timeout);
  rpc_.context.timers.reschedule(c.timer, c.deadline);
  engine_.step_soon();
  return {};
}

Result<void> SessionDialogues::dial_again(ClientSession& c) {
  if (auto present = engine_.check_device("open a session again"); !present) return present;
  return dial(c, c.reconnect->plan.address());
}

ClientSession* SessionDialogues::find_opening(std::uint64_t subject) noexcept {
  ClientSession* const c = find_client(rpc_, static_cast<std::uint32_t>(subject));
  return c != nullptr && c->state == SessionState::opening ? c : nullptr;
}

void SessionDialogues::on_opened(std::uint64_t subject, control::HandshakeId handshake,
                                 const wire::SessionEnd& server) {
  ClientSession* const c = find_opening(subject);
  if (c == nullptr) return;
  const auto peer = base::no_throw("address a peer", [&]() -> Result<PeerAddress*> {
    if (server.window != c->window || server.first != first_call_number(*c)) {
      return base::fail(Status::protocol, base::format("open a session with {}", c->address),
                        base::format("asked for a window of {} calls from number {}, the server "
                                     "answers {} from number {}",
                                     c->window, first_call_number(*c), server.window, server.first),
                        base::kProtocolRemedy);
    }
    auto shown = make_session_peer(c->address, port_.key_of(handshake), server);
    auto found = acquire_peer_address(rpc_, server);
    if (found) c->peer = std::move(shown);
    return found;
  });
  if (!peer) return end_session(rpc_, *c, peer.error());
  record(rpc_, *c, observe::EventKind::handshake, {"the server has answered"});
  port_.confirm(handshake, server.incarnation);
  on_server_answered(rpc_, *c, server, *peer);
}

void SessionDialogues::on_path_challenge(const ClientSession& c, std::uint64_t token) noexcept {
  port_.respond(c.handshake, token);
  engine_.step_soon();
}

void SessionDialogues::on_open_refused(std::uint64_t subject, const wire::Refuse& refusal) {
  ClientSession* const c = find_opening(subject);
  if (c == nullptr) return;
  std::string asked = base::format("open a session with {}", c->address);
  Error why = refusal.code ? control::refused_by_application(std::move(asked), refusal)
                           : Error{refusal.status, std::move(asked),
                                   base::format("the peer refused: {}", refusal.message()),
                                   base::kRefusalRemedy};
  why.goodbye = refusal.goodbye;
  end_session(rpc_, *c, why);
}

void SessionDialogues::on_open_failed(std::uint64_t subject, const Error& why) {
  if (ClientSession* const c = find_opening(subject); c != nullptr) end_session(rpc_, *c, why);
}

// ---- serving ----

Error SessionDialogues::share_is_used_up(const char* asked, const control::Address& source) const {
  return {Status::limit, asked,
          base::format("{} of rpc.sessions = {} are of {}, which is its share",
                       rpc_.share.used_by(source), rpc_.context.config.rpc.sessions,
                       control::source_text(source)),
          "raise rpc.sessions_per_source or rpc.sessions at the server"};
}

Result<control::AcceptedSession> SessionDialogues::accept(control::HandshakeId handshake,
                                                          const control::Address& from,
                                                          const wire::SessionEnd& client,
                                                          const PrivateData& ours) {
  return base::no_throw("open a session", [&]() -> Result<control::AcceptedSession> {
    const auto token = base::random_secret();
    const auto path_token = base::random_secret();
    auto shown = make_session_peer(from.text().view(), port_.key_of(handshake), client);
    if (!token || !path_token) return tl::unexpected((token ? path_token : token).error());
    const control::Address source = control::source_of(from, client.gid, client.gid_type);
    if (!admit_source(rpc_, source))
      return tl::unexpected(share_is_used_up("open a session", source));
    auto peer = acquire_peer_address(rpc_, client);
    if (!peer) return tl::unexpected(peer.error());
    const auto release = [this](PeerAddress* address) { release_peer_address(rpc_, address); };
    std::unique_ptr<PeerAddress, decltype(release)> reference(*peer, release);
    ServerSession* const s = accept_session(rpc_, client, *peer, source);
    if (s == nullptr) {
      return base::fail(
          Status::limit, "open a session",
          base::format("rpc.sessions = {} are served", rpc_.context.config.rpc.sessions),
          "raise rpc.sessions at the server");
    }
    (void)reference.release();  // it is the session's
    // A client without datagrams gets no datagram address.
    const bool datagrams = s->transport == Transport::datagram;
    wire::SessionEnd end = local_session_end(rpc_, s->name, s->window, client.first, datagrams);
    end.token = s->token = *token;
    end.private_data = ours;
    s->peer = std::move(shown);
    record(rpc_, *s, observe::EventKind::opened, {"by client ", s->peer->address.view()});
    return control::AcceptedSession{end, this, s->name, s->last_heard, datagrams ? *path_token : 0};
  });
}

void SessionDialogues::on_challenge_due(std::uint64_t subject, std::uint64_t token) {
  const ServerSession* const s = find_server(rpc_, static_cast<std::uint32_t>(subject));
  if (s == nullptr) return;
  Payload payload;
  std::memcpy(payload.text, &token, wire::kPathTokenBytes);
  (void)send(
      rpc_, s->peer_address->destination,
      wire::session_header(s->peer_session, 0, wire::RpcKind::path_challenge, s->client_proof),
      payload);
}

void SessionDialogues::on_path_validated(std::uint64_t subject) {
  ServerSession* const s = find_server(rpc_, static_cast<std::uint32_t>(subject));
  if (s == nullptr) return;
  s->is_path_validated = true;
  record(rpc_, *s, observe::EventKind::handshake, {"the client receives datagrams"});
}

void SessionDialogues::on_unconfirmed(std::uint64_t subject, std::uint64_t opened_at) {
  ServerSession* const s = find_server(rpc_, static_cast<std::uint32_t>(subject));
  if (s != nullptr && last_heard_from(*s) == opened_at && s->connection == nullptr)
    release_with_tombstone(rpc_, *s, Status::peer_lost);
}

// ---- connections for long calls ----

void SessionDialogues::begin_connections() noexcept {
  // Callbacks of failing calls may make calls that want a connection again, so the step is limited.
  for (std::uint32_t left = port_.outbound_room(); left != 0 && port_.outbound_room() != 0;
       --left) {
    if (!wants_connections(rpc_)) return;
    ClientSession& c = next_session_to_connect(rpc_);
    const auto begun = base::no_throw("connect a session", [&] { return connect(c); });
    if (!begun) fail_connecting(rpc_, c, begun.error());
  }
}

Result<void> SessionDialogues::connect(ClientSession& c) {
  if (auto present = engine_.check_device("connect a session"); !present) return present;
  auto to = control::Address::parse(c.address);
  if (!to) return tl::unexpected(to.error());
  const auto handshake = port_.join_session(*to, connections_, {c.peer_session, c.token});
  if (!handshake) return tl::unexpected(handshake.error());
  config::ConnectionAttributes attributes = connection_attributes(rpc_.context);
  if (has_own_place(c)) attributes.queue_pair.place = *c.reconnect->place;
  const auto made = agent::make(rpc_.context,
                                {.state = ConnectionState::resolving,
                                 .outbound = true,
                                 .peer = c.address,
                                 .address = &*to,
                                 .attributes = attributes,
                                 .handshake = *handshake},
                                base::format("connect a session with {} for its calls", c.address));
  if (!made) {
    port_.drop(*handshake);
    return tl::unexpected(made.error());
  }
  attach_connection(rpc_, c, **made);
  port_.assign(*handshake, agent::subject_of(**made));
  return {};
}

// The connection is internal: the application's handlers do not see it.
JoinOutcome SessionDialogues::accept_join(control::HandshakeId handshake,
                                          const control::Address& from,
                                          const wire::JoinSession& join) {
  ServerSession* const s = find_session_to_join(rpc_, join);
  if (s == nullptr) return {no_such_session(), {}};
  std::optional<std::uint64_t> subject;
  const auto refuse = [&](const Error& why) -> JoinOutcome {
    // A session without datagrams ends with its connection.
    if (s->transport == Transport::connection) release_server_session(rpc_, *s, why.status);
    return {tl::unexpected(why), subject};
  };
  if (auto present = engine_.check_device("join a session"); !present)
    return refuse(present.error());
  // Without datagrams nothing has shown that the client is where it said: the connection will.
  const control::Address source =
      control::source_of(from, join.endpoint.gid, join.endpoint.gid_type);
  const auto counted = base::no_throw("join a session", [&]() -> Result<void> {
    if (s->transport != Transport::connection || count_for_source(rpc_, *s, source)) return {};
    return tl::unexpected(share_is_used_up("join a session", source));
  });
  if (!counted) return refuse(counted.error());
  const auto made = agent::make(rpc_.context,
                                {.peer = from.text().view(),
                                 .attributes = connection_attributes(rpc_.context),
                                 .handshake = handshake},
                                "join a session");
  if (!made) return refuse(made.error());
  agent::Agent* const a = *made;
  subject = agent::subject_of(*a);
  agent::set_peer_key(*a, port_.key_of(handshake));
  const auto joined = base::no_throw("join a session", [&]() -> Result<void> {
    if (auto taken = agent::accept_endpoint(rpc_.context, *a, join.endpoint); !taken) return taken;
    join_session(rpc_, *s, *a);
    return {};
  });
  if (!joined) {
    agent::fail(rpc_.context, *a, joined.error());
    return refuse(joined.error());
  }
  return {control::AcceptedConnection{&connections_, *subject}, subject};
}

// ---- silent servers ----

// A probe that cannot start is tried again after the next silence. An unanswered probe ends before
// the session does.
bool SessionDialogues::probe(const ClientSession& c) noexcept {
  constexpr int kShare = 4;
  const auto begun = base::no_throw("probe a silent server", [&]() -> Result<void> {
    auto to = control::Address::parse(c.address);
    if (!to) return tl::unexpected(to.error());
    return port_.probe(*to, c.peer_address->incarnation, *this,
                       rpc_.context.config.connections.peer_timeout / kShare);
  });
  return begun.has_value();
}

void SessionDialogues::on_probe_ended(const control::ProbedEngine& probed,
                                      control::ProbeOutcome outcome) {
  on_server_probed(rpc_, probed, outcome);
}

}  // namespace spinwire::rpc
