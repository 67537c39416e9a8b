#include "engine/connector.h"

#include <algorithm>
#include <utility>

#include "agent/unheard_peers.h"
#include "base/error.h"
#include "base/internals.h"
#include "config/connection_attributes.h"
#include "config/local_paths.h"
#include "control/peer_source.h"
#include "engine/acceptance.h"
#include "rpc/rpc_state.h"

namespace spinwire::engine {

using agent::Agent;
using agent::HandshakeStep;

namespace {

tl::unexpected<Error> no_method() {
  return base::fail(Status::unsupported, "open a session", "no method is served here",
                    "connect to an engine that serves");
}

control::Address source_of(const control::Address& peer, const Endpoint& endpoint) noexcept {
  return control::source_of(peer, endpoint.gid, endpoint.gid_type);
}

/// A listener of the application's.
class ApplicationListener final : public control::ListenerOwner {
 public:
  ApplicationListener(Connector& connector, const std::unique_ptr<rpc::Rpc>& calls,
                      const ListenTerms& terms)
      : connector_(connector), calls_(calls), terms_(terms) {}

  [[nodiscard]] const verbs::Place* own_place() const noexcept override {
    return connector_.if_own(terms_.attributes.queue_pair.place);
  }

  Result<control::Admission> admit(const control::Address& peer,
                                   const Endpoint* endpoint) override {
    return connector_.admit(peer, endpoint);
  }
  Result<control::AcceptedConnection> on_hello(control::HandshakeId handshake,
                                               const control::Address& peer,
                                               const Endpoint& endpoint) override {
    return connector_.accept(handshake, peer, endpoint, terms_);
  }
  Result<control::AcceptedConnection> on_join_session(control::HandshakeId handshake,
                                                      const control::Address& peer,
                                                      const wire::JoinSession& join) override {
    if (calls_ == nullptr) return rpc::no_such_session();
    rpc::JoinOutcome joined = rpc::on_join_session(*calls_, handshake, peer, join);
    if (joined.made) connector_.count(*joined.made, source_of(peer, join.endpoint), !joined.answer);
    return std::move(joined.answer);
  }
  Result<control::AcceptedSession> on_open_session(control::HandshakeId handshake,
                                                   const control::Address& peer,
                                                   const wire::SessionEnd& client) override {
    if (auto open = connector_.check_accepting(); !open) return tl::unexpected(open.error());
    if (calls_ == nullptr || !rpc::serves(*calls_)) return no_method();
    const auto ours = connector_.ask_about_session(handshake, peer, client, terms_);
    if (!ours) return tl::unexpected(ours.error());
    // The callback may have begun to drain the engine.
    if (auto open = connector_.check_accepting(); !open) return tl::unexpected(open.error());
    return rpc::on_open_session(*calls_, handshake, peer, client, *ours);
  }
  Result<PrivateData> on_cm_hello(control::HandshakeId handshake, control::CmId& id,
                                  const control::CmHello& hello) override {
    return connector_.ask_about_cm(handshake, id, hello, terms_);
  }
  Result<control::AcceptedConnection> on_cm_request(control::HandshakeId handshake,
                                                    control::CmId& id,
                                                    const control::CmHello& hello,
                                                    const PrivateData& ours) override {
    return connector_.accept_cm(handshake, id, hello, ours, terms_);
  }

 private:
  Connector& connector_;
  const std::unique_ptr<rpc::Rpc>& calls_;  ///< null: no method and no session
  ListenTerms terms_;
};

}  // namespace

// ---- requests of the application ----

Result<ListenTerms> Connector::terms_of(const char* asked, const ListenOptions& options,
                                        bool through_cm) const {
  const auto attributes =
      config::resolve(context_.config, *context_.device, options.settings, through_cm);
  if (!attributes) return tl::unexpected(attributes.error());
  const auto ours = copy_private_data(asked, options.private_data);
  if (!ours) return tl::unexpected(ours.error());
  ListenTerms terms{options, *attributes, *ours};
  terms.options.private_data = {};  // may be gone after the call
  return terms;
}

Result<Listener> Connector::listen(std::string_view text, const ListenOptions& options,
                                   const std::unique_ptr<rpc::Rpc>& calls) {
  if (auto present = device_.check_present("listen"); !present)
    return tl::unexpected(present.error());
  auto address = control::Address::parse(text);
  if (!address) return tl::unexpected(address.error());
  const bool through_cm = options.via == Via::rdma_cm;
  auto terms = terms_of("listen", options, through_cm);
  if (!terms) return tl::unexpected(terms.error());
  if (auto able = through_cm ? check_cm() : Result<void>{}; !able)
    return tl::unexpected(able.error());
  auto owner = std::make_shared<ApplicationListener>(*this, calls, *terms);
  const auto id = through_cm ? port_.listen_cm(*address, std::move(owner))
                             : port_.listen(*address, std::move(owner));
  if (!id) return tl::unexpected(id.error());
  return detail::make<Listener>(context_.slot, id->index, id->generation);
}

Result<Listener> Connector::adopt_listener(int fd, const ListenOptions& options,
                                           const std::unique_ptr<rpc::Rpc>& calls) {
  if (auto present = device_.check_present("adopt a listener"); !present)
    return tl::unexpected(present.error());
  if (options.via != Via::tcp) {
    return base::fail(Status::unsupported, "adopt a listener", "rdma_cm has no listening socket",
                      "use Via::tcp, or listen again");
  }
  auto terms = terms_of("adopt a listener", options, false);
  if (!terms) return tl::unexpected(terms.error());
  const auto id =
      port_.adopt_listener(fd, std::make_shared<ApplicationListener>(*this, calls, *terms));
  if (!id) return tl::unexpected(id.error());
  return detail::make<Listener>(context_.slot, id->index, id->generation);
}

Result<Connector::Attempt> Connector::begin(const control::Address& to, Via via,
                                            Nanoseconds timeout) {
  if (auto present = device_.check_present("connect"); !present)
    return tl::unexpected(present.error());
  if (via == Via::rdma_cm) return begin_cm(to, timeout);
  return port_.connect(to, *this).map([](control::HandshakeId id) { return Attempt{id, {}}; });
}

Result<Connector::Attempt> Connector::begin_first(agent::ReconnectPlan& plan, Via via,
                                                  Nanoseconds timeout,
                                                  verbs::QueuePairOptions& queue_pair) {
  const auto begin_next = [&]() -> Result<Attempt> {
    if (const LocalPath* const path = plan.local_path(); path != nullptr) {
      if (auto usable = config::use_local_path(queue_pair, *context_.device, *path); !usable)
        return tl::unexpected(usable.error());
    }
    return begin(plan.address(), via, timeout);
  };
  return plan.begin_round(begin_next, context_.clock.now());
}

void Connector::attach(Attempt attempt, Agent& a) noexcept {
  if (attempt.cm != nullptr) return attach_cm(std::move(attempt.cm), a);
  agent::use_handshake(a, attempt.handshake);
  port_.assign(attempt.handshake, agent::subject_of(a));
}

Result<Connection> Connector::connect(std::string_view text, const ConnectOptions& options) {
  auto plan = agent::ReconnectPlan::make("connect", options.reconnect, text, options.alternatives,
                                         context_.clock, options.local_paths);
  if (!plan) return tl::unexpected(plan.error());
  if (auto valid = config::check_timeout("connect", options.timeout); !valid)
    return tl::unexpected(valid.error());
  const bool through_cm = options.via == Via::rdma_cm;
  auto attributes =
      config::resolve(context_.config, *context_.device, options.settings, through_cm);
  if (!attributes) return tl::unexpected(attributes.error());
  if (auto good = config::check_local_paths(*context_.device, options.local_paths, options.settings,
                                            through_cm, attributes->queue_pair.path.pkey_index);
      !good)
    return tl::unexpected(good.error());
  const auto ours = copy_private_data("connect", options.private_data);
  if (!ours) return tl::unexpected(ours.error());
  const Nanoseconds timeout =
      options.timeout.count() != 0 ? options.timeout : context_.config.connections.connect_timeout;
  std::unique_ptr<agent::ReconnectState> again;
  if (options.reconnect.attempts != 0 || plan->has_choice())
    again = std::make_unique<agent::ReconnectState>(std::move(*plan), options.via);
  // What may throw is done: nobody else would end the handshake that begins here.
  agent::ReconnectPlan& first = again != nullptr ? again->plan : *plan;
  auto attempt = begin_first(first, options.via, timeout, attributes->queue_pair);
  if (!attempt) return tl::unexpected(attempt.error());
  const control::Address to = first.address();
  const control::AddressText peer = to.text();
  const auto made = agent::make(context_,
                                {.state = ConnectionState::resolving,
                                 .outbound = true,
                                 .peer = peer.view(),
                                 .address = &to,
                                 .attributes = *attributes,
                                 .timeout = timeout,
                                 .handlers = &options.handlers,
                                 .reconnect = std::move(again),
                                 .private_data = &*ours},
                                base::format("connect to {}", text));
  if (!made) {
    port_.drop(attempt->handshake);
    return tl::unexpected(made.error());
  }
  attach(std::move(*attempt), **made);
  schedule_.step_soon();
  return agent::handle(context_, **made);
}

// An attempt that fails here counts like any other.
void Connector::reconnect(Agent& a) noexcept {
  const auto begun = base::no_throw("connect again", [&]() -> Result<void> {
    const auto way = agent::start_attempt(context_, a);
    if (!way) return tl::unexpected(way.error());
    auto attempt = begin(way->to, way->via, way->timeout);
    if (!attempt) return tl::unexpected(attempt.error());
    attach(std::move(*attempt), a);
    return {};
  });
  if (!begun) agent::fail(context_, a, begun.error());
}

// ---- handshakes over TCP ----

void Connector::on_setup_step(Agent& a) noexcept {
  if (agent::is_ending(a)) accepted_.on_ending(agent::subject_of(a));
  const HandshakeStep step = agent::next_handshake_step(a);
  if (step == HandshakeStep::none) return;
  if (step == HandshakeStep::end) return end_handshake(a);
  if (!agent::is_through_cm(a)) return send_frame(a, step);
  agent::run_cm_step(context_, a, step);
  if (step == HandshakeStep::answer && !agent::is_ending(a))
    port_.on_cm_answered(agent::handshake_of(a));
}

void Connector::end_handshake(const Agent& a) noexcept {
  // A message that overtakes the last frame makes a connection ready, too.
  if (!agent::was_ready(a)) return port_.refuse(agent::handshake_of(a), agent::reason_for_peer(a));
  accepted_.on_ready(agent::subject_of(a));
  port_.drop(agent::handshake_of(a));
}

void Connector::send_frame(Agent& a, HandshakeStep step) noexcept {
  const control::HandshakeId handshake = agent::handshake_of(a);
  if (step == HandshakeStep::confirm) return port_.confirm(handshake, agent::peer_incarnation(a));
  if (step == HandshakeStep::answer) return port_.answer(handshake, agent::endpoint(context_, a));
  agent::on_asked(context_, a);
  port_.ask(handshake, agent::endpoint(context_, a));
}

Result<void> Connector::on_accept(std::uint64_t subject, const Endpoint& peer) {
  Agent* const a = find(subject);
  if (a != nullptr) {
    agent::set_peer_key(*a, port_.key_of(agent::handshake_of(*a)));
    return agent::receive_endpoint(context_, *a, peer);
  }
  return tl::unexpected(agent::closed_by_application());
}

void Connector::on_confirmed(std::uint64_t subject) {
  if (Agent* const a = find(subject); a != nullptr) {
    agent::advance(context_, *a, agent::Event::peer_ready);
    (void)find_unready(subject);
  }
}

Agent* Connector::find_unready(std::uint64_t subject) noexcept {
  Agent* const a = find(subject);
  if (a == nullptr || !agent::was_ready(*a)) return a;
  accepted_.on_ready(subject);
  return nullptr;
}

void Connector::on_refused(std::uint64_t subject, const wire::Refuse& refusal) {
  Agent* const a = find_unready(subject);
  if (a == nullptr) return;
  agent::on_refused(context_, *a, refusal);
  accepted_.on_ending(subject);
}

void Connector::on_failed(std::uint64_t subject, const Error& why) {
  Agent* const a = find_unready(subject);
  if (a == nullptr) return;
  if (!agent::is_ending(*a)) agent::fail(context_, *a, why);
  accepted_.on_ending(subject);
}

// ---- what listeners take ----

Result<void> Connector::check_accepting() const {
  if (refusal_.reason == GoodbyeReason::none) return {};
  return tl::unexpected(base::goodbye_error(Status::refused, "connect", refusal_));
}

/// A peer that would be refused, or wait, learns that the engine drains.
Result<control::Admission> Connector::admit(const control::Address& peer,
                                            const Endpoint* endpoint) {
  const control::Address source = endpoint != nullptr ? source_of(peer, *endpoint) : peer;
  auto room = admit(source);
  if (room) room->source = source.source();
  return room;
}

Result<control::Admission> Connector::admit(const control::Address& source) {
  auto room = room_for(source);
  const bool is_full = agent::is_full(context_);
  if (room && room->now && !is_full) return room;
  if (auto open = check_accepting(); !open) return tl::unexpected(open.error());
  if (room && !is_full) return room;  // half-open ones have their share
  return make_room(source, std::move(room));
}

Result<control::Admission> Connector::make_room(const control::Address& source,
                                                Result<control::Admission> room) {
  // Peers that were never heard give way to any source that would be within its share without them,
  // and without those that end already. They give way to peers of their own source, too.
  const std::uint32_t free = free_records();
  const std::uint32_t will_be_free = free + accepted_.ending() + agent::unheard_count(context_);
  const bool yields_to_all = accepted_.check_share(source, will_be_free).has_value();
  const agent::UnheardPeers unheard =
      agent::find_unheard(context_, yields_to_all ? nullptr : &source);
  const std::uint32_t lacking = std::max(accepted_.records_lacking(source, free), 1u);
  if (unheard.due != nullptr && accepted_.ending() < port_.waiting_for_connections() + lacking) {
    agent::give_way(context_, *unheard.due);
    accepted_.on_giving_way(agent::subject_of(*unheard.due));
  }
  const bool waits_for_end = !room && yields_to_all && accepted_.ending() != 0;
  if (!unheard.any && !waits_for_end) {
    // Anybody on this host can name its process, and leave a connection half-open.
    if (room) return room;
    const auto own = accepted_.unready_of(source);
    if (own.half_open + own.ending == 0) return room;
    return control::Admission{false, own.ending, true};
  }
  // The end of a half-open connection helps a full engine, but not a source that has its share.
  return control::Admission{false, room ? accepted_.ending() : port_.waiting_for_connections() + 1,
                            !room && !yields_to_all};
}

Result<control::Admission> Connector::room_for(const control::Address& source) const {
  if (auto share = agent::check_receives_of(context_, source); !share)
    return tl::unexpected(share.error());
  return accepted_.admit(source, free_records(), agent::is_full(context_));
}

std::uint32_t Connector::free_records() const noexcept {
  return context_.agents.capacity() - context_.agents.size();
}

void Connector::count(std::uint64_t subject, const control::Address& source, bool ending) noexcept {
  Agent* const a = find(subject);
  if (a == nullptr) return;
  accepted_.add(subject, source);
  if (ending) accepted_.on_ending(subject);
  agent::use_account_of(context_, *a, source);
}

Result<PrivateData> Connector::ask_to_connect(const PeerIdentity& peer, const ListenTerms& terms,
                                              bool carries_data) const {
  if (aborted_) return terms.private_data;
  return ask_to_accept(terms.options.on_connect_request, peer, terms.private_data, carries_data);
}

Result<PrivateData> Connector::ask_about_session(control::HandshakeId handshake,
                                                 const control::Address& peer,
                                                 const wire::SessionEnd& client,
                                                 const ListenTerms& terms) {
  if (aborted_) return terms.private_data;
  const control::AddressText address = peer.text();
  return ask_to_accept(
      terms.options.on_session_request,
      {address.view(), port_.key_of(handshake).view(), client.private_data.bytes()},
      terms.private_data);
}

Result<control::AcceptedConnection> Connector::accept(control::HandshakeId handshake,
                                                      const control::Address& peer,
                                                      const Endpoint& endpoint,
                                                      const ListenTerms& terms) {
  if (auto open = check_accepting(); !open) return tl::unexpected(open.error());
  if (auto present = device_.check_present("accept a connection"); !present)
    return tl::unexpected(present.error());
  const control::AddressText address = peer.text();
  const control::KeyName key = port_.key_of(handshake);
  const auto ours =
      ask_to_connect({address.view(), key.view(), endpoint.private_data.bytes()}, terms);
  if (!ours) return tl::unexpected(ours.error());
  if (auto open = check_accepting(); !open) return tl::unexpected(open.error());  // still
  const auto made = agent::make(context_,
                                {.peer = address.view(),
                                 .attributes = terms.attributes,
                                 .handshake = handshake,
                                 .private_data = &*ours},
                                "accept one more connection");
  if (!made) return tl::unexpected(made.error());
  agent::set_peer_key(**made, key);
  return introduce(**made, peer, endpoint, terms);
}

Result<control::AcceptedConnection> Connector::introduce(Agent& a, const control::Address& from,
                                                         const Endpoint& endpoint,
                                                         const ListenTerms& terms) {
  count(agent::subject_of(a), source_of(from, endpoint));
  return agent::accept_peer(context_, a, endpoint, aborted_ ? nullptr : &terms.options)
      .and_then([&] { return resolve_if_moved(a, endpoint, terms); })
      .map([&] {
        return control::AcceptedConnection{this, agent::subject_of(a)};
      });
}

Result<void> Connector::resolve_if_moved(Agent& a, const Endpoint& peer, const ListenTerms& terms) {
  const verbs::Place& place = agent::place_of(a);
  if (place.is_at(terms.attributes.queue_pair.place)) return {};
  const auto known = port_.resolve_again(agent::handshake_of(a), peer, if_own(place));
  if (!known) agent::fail(context_, a, known.error());
  if (known && !*known) agent::await_address(a);
  return known.map([](bool) {});
}

// ---- the port and the GID of connections ----

const verbs::Place* Connector::if_own(const verbs::Place& place) const noexcept {
  return place.is_at(context_.device->place()) ? nullptr : &place;
}

const verbs::Place* Connector::own_place(std::uint64_t subject) const noexcept {
  const Agent* const a = find(subject);
  return a != nullptr ? if_own(agent::place_of(*a)) : nullptr;
}

}  // namespace spinwire::engine
