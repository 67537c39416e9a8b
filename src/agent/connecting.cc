#include "agent/connecting.h"

#include <arpa/inet.h>

#include <algorithm>
#include <new>
#include <utility>

#include "agent/agent.h"
#include "base/error.h"
#include "base/random.h"
#include "control/peer_source.h"
#include "wire/goodbye.h"

namespace spinwire::agent {
namespace {

/// Has a code, like each refusal of an application: so the peer knows that it is final.
Error refused_by_application() {
  Error why{Status::refused, "connect", "the application refused", "ask its operator"};
  why.code = 0;
  return why;
}

/// A new record with a reserved receive; null if either is used up.
Agent* acquire(EngineContext& ctx) noexcept {
  const std::uint32_t index = ctx.agents.acquire();
  if (index == kNone) return nullptr;
  Agent& a = ctx.agents.at(index);
  a.~Agent();
  new (&a) Agent();
  a.index = index;
  a.generation = ctx.agents.generation(index);
  prepare_timers(a);
  open_account(ctx, a);
  if (reserve_first_receive(ctx, a)) return &a;
  close_account(ctx, a);
  a.generation = 0;
  ctx.agents.release(index);
  return nullptr;
}

}  // namespace

Result<Agent*> make(EngineContext& ctx, NewAgent what, std::string asked) {
  std::unique_ptr<EndpointExchange> endpoints;
  if (const PrepareOptions* const options = what.out_of_band; options != nullptr) {
    endpoints = std::make_unique<EndpointExchange>(EndpointExchange{
        options->on_endpoint, options->peer_joins_first, options->peer_has_no_key, {}, {}});
    if (ctx.endpoint_keys != nullptr) {
      auto drawn = base::random_bytes(std::as_writable_bytes(std::span(endpoints->nonce)));
      if (!drawn) return tl::unexpected(drawn.error());
    }
  }
  auto raw = make_raw(ctx, what.attributes);
  if (!raw) return tl::unexpected(raw.error());
  std::unique_ptr<PrivateData> ours;
  if (auto kept = keep_private_data(ours, what.private_data); !kept)
    return tl::unexpected(kept.error());
  Agent* const made = acquire(ctx);
  if (made == nullptr) {
    return tl::unexpected(no_more_connections(ctx, std::move(asked),
                                              what.outbound ? ErrorFor::caller : ErrorFor::peer));
  }
  Agent& a = *made;
  name_peer(a, what.peer);
  if (what.address != nullptr) set_event_source(a, control::event_source(*what.address));
  set_attributes(a, what.attributes);
  (void)use_raw(ctx, a, std::move(*raw));
  a.setup.outbound = what.outbound;
  a.setup.handshake = what.handshake;
  a.setup.timeout = what.timeout.count() != 0 ? what.timeout
                    : what.outbound           ? ctx.config.connections.connect_timeout
                                              : ctx.config.connections.handshake_timeout;
  if (what.handlers != nullptr) use_handlers(a, *what.handlers);
  a.reconnect = std::move(what.reconnect);
  a.private_data = std::move(ours);
  if (what.out_of_band != nullptr) {
    a.setup.out_of_band = true;
    a.setup.endpoints = std::move(endpoints);
  }
  set_stage(a, Stage::domain);
  enter(ctx, a, what.state);
  queue_setup(ctx, a);
  return made;
}

bool is_full(const EngineContext& ctx) noexcept {
  const bool lacks_receives = ctx.device->srq() != nullptr
                                  ? ctx.reserved_receives >= ctx.reservable_receives
                                  : ctx.own_queues->queues.full();
  return lacks_receives || ctx.agents.full();
}

Error no_more_connections(const EngineContext& ctx, std::string asked, ErrorFor reader) {
  const char* const engine = reader == ErrorFor::peer ? "the server" : "this engine";
  if (ctx.device->srq() == nullptr && !ctx.agents.full()) {
    const std::uint32_t count = ctx.agents.size() + 1;
    return {Status::limit, std::move(asked),
            base::format("asked {} receives for {} connections, have {}",
                         ctx.own_queues->share.slots * count, count,
                         ctx.receives.size() - ctx.receive_shortage),
            base::format("without a shared receive queue each connection has its own: raise "
                         "queues.receive_depth of {}; messages that are kept count, too",
                         engine)};
  }
  return {Status::limit, std::move(asked),
          base::format("{} connections, {} of {} receives reserved", ctx.agents.size(),
                       ctx.reserved_receives, ctx.reservable_receives),
          base::format("raise connections.maximum or queues.receive_depth of {}", engine)};
}

Result<void> configure(EngineContext& ctx, Agent& a, const ConnectionSettings& settings) {
  constexpr const char* kAsked = "configure a connection";
  if (a.qp != nullptr || a.stage > Stage::create) {
    return base::fail(Status::invalid_argument, kAsked, "its queue pair is being made already",
                      "configure it in on_accept, or give settings to connect() or prepare()");
  }
  if (settings.own_domain != a.attributes.own_domain && a.stage > Stage::domain) {
    return base::fail(Status::invalid_argument, kAsked, "its protection domain is settled already",
                      "give own_domain in on_accept, to connect() or to prepare()");
  }
  const auto attributes = config::resolve(ctx.config, *ctx.device, settings, is_through_cm(a));
  if (!attributes) return tl::unexpected(attributes.error());
  const GidType type = attributes->queue_pair.place.gid_type;
  if (type != a.attributes.queue_pair.place.gid_type) {
    return base::fail(
        Status::unsupported, kAsked,
        base::format("that place has a GID of type {}, the peer's is of type {}", to_string(type),
                     to_string(a.attributes.queue_pair.place.gid_type)),
        "give a place with a GID of the peer's type");
  }
  const bool moves = !attributes->queue_pair.place.is_at(place_of(a));
  if (moves && !is_peers_qp(a, 0) && !a.setup.in_accept) {
    return base::fail(Status::invalid_argument, kAsked,
                      "its peer's address was resolved for its former port or GID",
                      "choose a port or GID in on_accept, or before join()");
  }
  if (a.raw != nullptr && a.raw->accepted != a.raw->completed) {
    return base::fail(Status::invalid_argument, kAsked, "it has receives already",
                      "configure it before post_receive()");
  }
  auto raw = make_raw(ctx, *attributes, a.raw.get());
  if (!raw) return tl::unexpected(raw.error());
  if (!use_raw(ctx, a, std::move(*raw)))
    return tl::unexpected(no_more_connections(ctx, kAsked, ErrorFor::caller));
  set_attributes(a, *attributes);
  return {};
}

void name_peer(Agent& a, std::string_view text) noexcept {
  const std::size_t n = std::min(text.size(), a.peer.name.size() - 1);
  std::copy_n(text.begin(), n, a.peer.name.begin());
  a.peer.name[n] = '\0';
}

Result<void> keep_private_data(std::unique_ptr<PrivateData>& kept,
                               const PrivateData* data) noexcept {
  if (data == nullptr || data->empty()) {
    kept.reset();
    return {};
  }
  if (kept == nullptr) kept.reset(new (std::nothrow) PrivateData);
  if (kept == nullptr) return tl::unexpected(base::out_of_memory());
  *kept = *data;
  return {};
}

PeerIdentity peer_identity_of(const Agent& a) noexcept {
  PeerIdentity peer{a.peer.name.data(), a.peer.key.view(), {}};
  if (a.peer.private_data != nullptr) peer.private_data = a.peer.private_data->bytes();
  return peer;
}

LocalPath local_path_of(const Agent& a) noexcept {
  const verbs::Place& place = a.attributes.queue_pair.place;
  if (is_through_cm(a)) return {place.port, {}};
  return {place.port, static_cast<std::uint32_t>(place.gid_index)};
}

Error closed_by_application() {
  return {Status::refused, "connect", "the application closed the connection", "try again"};
}

Error reason_for_peer(const Agent& a) {
  Error why = a.cause.status != Status::ok ? a.cause : closed_by_application();
  why.goodbye = goodbye_of(a);
  return why;
}

// ---- the handshake ----

HandshakeStep next_handshake_step(const Agent& a) noexcept {
  const bool by_cm = is_through_cm(a);
  if (is_ending(a) || was_ready(a))
    return a.setup.handshake ? HandshakeStep::end : HandshakeStep::none;
  if (!by_cm && !a.setup.handshake) return HandshakeStep::none;
  const bool outbound = a.setup.outbound;
  if (outbound && a.stage == Stage::up) return HandshakeStep::confirm;
  if (a.stage != (outbound ? Stage::wait : Stage::up) || (by_cm && a.setup.cm->handshake_sent))
    return HandshakeStep::none;
  return outbound ? HandshakeStep::ask : HandshakeStep::answer;
}

void on_asked(EngineContext& ctx, Agent& a) noexcept {
  if (a.state == ConnectionState::resolving) enter(ctx, a, ConnectionState::exchanging);
}

Result<void> receive_endpoint(EngineContext& ctx, Agent& a, const Result<Endpoint>& peer) {
  if (is_ending(a)) return tl::unexpected(closed_by_application());
  Result<void> taken =
      peer ? accept_endpoint(ctx, a, *peer) : Result<void>(tl::unexpected(peer.error()));
  taken ? advance(ctx, a, Event::endpoint_received) : fail(ctx, a, taken.error());
  return taken;
}

namespace {

/// While on_accept runs, which may throw.
class InAccept {
 public:
  explicit InAccept(Agent& a) noexcept : agent_(a) { agent_.setup.in_accept = true; }
  InAccept(const InAccept&) = delete;
  InAccept& operator=(const InAccept&) = delete;
  ~InAccept() { agent_.setup.in_accept = false; }

 private:
  Agent& agent_;
};

}  // namespace

Result<void> accept_peer(EngineContext& ctx, Agent& a, const Endpoint& peer,
                         const ListenOptions* options) {
  auto good = accept_endpoint(ctx, a, peer);
  if (good && options != nullptr) {
    use_handlers(a, options->handlers);
    const InAccept inside(a);
    if (options->on_accept) options->on_accept(handle(ctx, a));
  }
  if (is_ending(a)) {
    Error why = refused_by_application();
    why.goodbye = goodbye_of(a);
    return tl::unexpected(std::move(why));
  }
  if (good) good = agree_on_raw(a, a.peer.is_raw);
  if (!good) fail(ctx, a, good.error());
  return good;
}

void on_refused(EngineContext& ctx, Agent& a, const wire::Refuse& refusal) {
  if (is_ending(a)) return;
  const bool asked = a.setup.outbound;
  std::string what =
      base::format("{} {}", asked ? "connect to" : "accept a connection from", peer_name(a));
  if (asked && refusal.code)
    return fail(ctx, a, control::refused_by_application(std::move(what), refusal));
  Error why{
      refusal.status, std::move(what),
      base::format("the peer {}: {}", asked ? "refused" : "gave up", refusal.message()),
      asked ? base::kRefusalRemedy : "correct what the peer names; the peer must connect again"};
  why.goodbye = refusal.goodbye;
  fail(ctx, a, std::move(why));
}

void on_address_known(EngineContext& ctx, Agent& a, const Result<void>& outcome) noexcept {
  a.setup.address_pending = false;
  outcome ? advance(ctx, a, Event::endpoint_received) : fail(ctx, a, outcome.error());
}

void on_cm_disconnected(EngineContext& ctx, Agent& a) {
  if (a.closing) return;
  peer_lost(ctx, a, base::format("the connection to {}", peer_name(a)),
            "rdma_cm reports that the peer disconnected", "the peer has ended");
}

// ---- out-of-band ----

namespace {

/// This end's endpoint, with a proof if there is a key. The peer's answer names our code, and the
/// code covers every value, the credits too. So an endpoint stays as it was proved, whatever keys
/// the engine takes and whatever credit it grants. May throw std::bad_alloc.
Endpoint proved_endpoint(const EngineContext& ctx, const Agent& a,
                         const control::EndpointCode& answers) {
  if (ctx.endpoint_keys == nullptr) return endpoint(ctx, a);
  Endpoint& proved = a.setup.endpoints->proved;
  if (proved.proof.empty() || proved.proof.answers != answers) {
    Endpoint ours = endpoint(ctx, a);
    ctx.endpoint_keys->prove(ours, a.setup.endpoints->nonce, answers);
    proved = ours;
  }
  return proved;
}

/// Checks the proof of the peer's endpoint, if there must be one. Answers the key; null: there need
/// not be one. Errors: unauthenticated.
Result<const control::Key*> authenticate(const EngineContext& ctx, const Agent& a,
                                         const Endpoint& peer) {
  const EndpointExchange& exchange = *a.setup.endpoints;
  if (ctx.endpoint_keys == nullptr || (exchange.peer_has_no_key && peer.proof.empty()))
    return nullptr;
  control::EndpointCode ours{};
  if (a.setup.endpoint_delivered) ours = proved_endpoint(ctx, a, {}).proof.code;
  return ctx.endpoint_keys->check(peer, ours, exchange.peer_joins_first);
}

}  // namespace

Result<void> join(EngineContext& ctx, Agent& a, const Endpoint& peer) {
  if (!a.setup.out_of_band || !is_peers_qp(a, 0)) {
    return base::fail(Status::invalid_argument, "join a peer's endpoint",
                      a.setup.out_of_band ? "the connection has its peer already"
                                          : "the connection was not made by prepare()",
                      "prepare one connection for each peer");
  }
  if (auto valid = wire::check(peer); !valid) return valid;
  const auto key = authenticate(ctx, a, peer);
  if (!key) return tl::unexpected(key.error());
  if (auto taken = accept_endpoint(ctx, a, peer); !taken) return taken;
  if (*key != nullptr) {
    set_peer_key(a, (*key)->name);
    a.setup.endpoints->peer = peer.proof.code;
  }
  std::array<char, INET6_ADDRSTRLEN> gid{};
  ::inet_ntop(AF_INET6, peer.gid.data(), gid.data(), gid.size());
  name_peer(a, base::format("[{}] queue pair {:#x}", gid.data(), peer.qp_num));
  set_event_source(a, control::event_source(peer.gid, peer.gid_type));
  await_address(a);
  return {};
}

Result<Endpoint> own_endpoint(const EngineContext& ctx, const Agent& a) {
  if (a.setup.endpoint_delivered) return proved_endpoint(ctx, a, a.setup.endpoints->peer);
  return base::fail(Status::not_connected, "get a connection's endpoint",
                    "its queue pair does not exist yet", "wait for on_endpoint");
}

void run_out_of_band_step(EngineContext& ctx, Agent& a) noexcept {
  if (!a.setup.out_of_band || a.state != ConnectionState::exchanging) return;
  const bool at_init = a.stage == Stage::wait || a.stage == Stage::rtr;
  if (!at_init || a.setup.endpoint_delivered) return advance(ctx, a, Event::peer_ready);
  a.setup.endpoint_delivered = true;
  const auto run = a.setup.endpoints->on_endpoint;
  if (!run) return;
  const auto ours = base::no_throw("deliver an endpoint", [&]() -> Result<Endpoint> {
    return proved_endpoint(ctx, a, a.setup.endpoints->peer);
  });
  ours ? run(handle(ctx, a), *ours) : fail(ctx, a, ours.error());
}

// ---- the set-up queue ----

Agent*& next_in_setup_queue(Agent& a) noexcept { return a.setup.next; }

void queue_setup(EngineContext& ctx, Agent& a) noexcept {
  if (a.setup.in_queue) return;
  a.setup.in_queue = true;
  SourceAccount& s = *a.source;
  s.setup.agents.push_back(a);
  if (!std::exchange(s.setup.is_listed, true)) ctx.sources.setup_turns.push_back(s);
}

Agent* pop_setup_queue(EngineContext& ctx) noexcept {
  auto& turns = ctx.sources.setup_turns;
  while (!turns.empty()) {
    SourceAccount& s = turns.pop_front();
    s.setup.is_listed = false;
    if (s.setup.agents.empty()) continue;  // an agent has moved to another source
    Agent& a = s.setup.agents.pop_front();
    a.setup.in_queue = false;
    if (!s.setup.agents.empty()) {
      s.setup.is_listed = true;
      turns.push_back(s);
    }
    return &a;
  }
  return nullptr;
}

bool continue_setup(EngineContext& ctx, Agent& a) noexcept {
  const Stage before = a.stage;
  const bool verb = run_setup_step(ctx, a);
  // A step of an agent that waits for its peer does nothing.
  if ((verb || a.stage != before) && !is_over(a)) queue_setup(ctx, a);
  run_out_of_band_step(ctx, a);
  return verb;
}

// ---- the end ----

void fail_for_good(EngineContext& ctx, Agent& a, Error cause) noexcept {
  stop_reconnecting(a);
  fail(ctx, a, std::move(cause));
}

void begin_end(EngineContext& ctx, Agent& a, const Goodbye& goodbye) noexcept {
  // What the application has said stays.
  if (!a.goodbye_sent && a.goodbyes.ours == 0) a.goodbyes.ours = wire::encode(goodbye);
  a.goodbyes.awaits_peer = false;
  const bool sends_goodbye = is_ready(a) || (a.closing && !a.goodbye_sent);
  if (a.stage == Stage::up && a.raw == nullptr) {
    // Saves the peer from waiting for its time-out. close() may have queued it already.
    if (sends_goodbye) (void)send_goodbye(ctx, a);
    flush(ctx, a);
  }
  close(ctx, a);
  if (a.qp != nullptr) (void)ctx.device->to_error(a.qp);
}

void complete_end(EngineContext& ctx, Agent& a) noexcept {
  // A peer that was stopped during an access must not block this engine.
  constexpr std::uint32_t kMostSteps = 64;
  advance(ctx, a, Event::aborted);
  const std::uint32_t steps = kMostSteps + ctx.registrations->size() + a.rendezvous.send_count;
  for (std::uint32_t i = 0; i < steps && a.stage != Stage::over; ++i) (void)run_setup_step(ctx, a);
}

// ---- probes ----

bool wants_loss_probe(const EngineContext& ctx, const Agent& a) noexcept {
  // The embedded device itself distinguishes a dead process from one that hangs.
  return a.setup.probe == LossProbe::none && a.cause.status == Status::peer_lost && !a.closing &&
         a.setup.outbound && was_ready(a) && a.setup.handshake &&
         ctx.device->place().gid_type != GidType::embedded;
}

void end_loss_probe(EngineContext& ctx, const control::ProbedEngine& probed, const char* found,
                    const char* remedy) noexcept {
  const control::AddressText address = probed.address.text();
  for (Agent& a : ctx.agents) {
    if (a.setup.probe != LossProbe::under_way || a.peer.incarnation != probed.incarnation ||
        peer_name(a) != address.view())
      continue;
    a.setup.probe = LossProbe::over;
    queue_setup(ctx, a);
    if (found == nullptr) continue;
    try {
      a.cause.found.append("; ").append(found);
      if (remedy != nullptr) a.cause.remedy = remedy;
    } catch (...) {  // without memory, keep the device's text
    }
  }
}

}  // namespace spinwire::agent
