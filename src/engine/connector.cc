#include "engine/connector.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/internals.h"
#include "config/connection_settings.h"
#include "rpc/rpc.h"

namespace spinwire::engine {

using agent::Agent;
using agent::Stage;

namespace {

Result<void> check(const Reconnect& r) {
  constexpr Nanoseconds kLeast = std::chrono::microseconds(1), kMost = std::chrono::hours(1);
  if (r.first_delay >= kLeast && r.first_delay <= r.max_delay && r.max_delay <= kMost) return {};
  return base::fail(
      Status::invalid_argument, "connect with reconnecting",
      base::format("delays from {} ns to {} ns", r.first_delay.count(), r.max_delay.count()),
      "delays are 1 us to 1 h, and first_delay is at most max_delay");
}

tl::unexpected<Error> no_method() {
  return base::fail(Status::unsupported, "open a session", "no method is served here",
                    "connect to an engine that serves");
}

/// A listener of the application's.
class ApplicationListener final : public control::ListenerOwner {
 public:
  ApplicationListener(Connector& connector, const std::unique_ptr<rpc::Rpc>& calls,
                      const ListenOptions& options, const config::ConnectionAttributes& attributes)
      : connector_(connector), calls_(calls), options_(options), attributes_(attributes) {}

  Result<control::AcceptedConnection> on_hello(control::HandshakeId handshake,
                                               std::string_view peer,
                                               const Endpoint& endpoint) override {
    return connector_.accept(handshake, peer, endpoint, options_, attributes_);
  }
  Result<control::AcceptedConnection> on_join_session(control::HandshakeId handshake,
                                                      std::string_view peer,
                                                      const wire::JoinSession& join) override {
    if (calls_ == nullptr) return no_method();
    return calls_->dialogues.accept_join(handshake, peer, join);
  }
  Result<control::AcceptedSession> on_open_session(const control::Address& peer,
                                                   const wire::SessionEnd& client) override {
    if (calls_ == nullptr) return no_method();
    return calls_->dialogues.accept(peer, client);
  }
  Result<void> on_cm_request(control::CmId& id, const control::CmEvent& request) override {
    return connector_.accept_cm(id, request, options_, attributes_);
  }

 private:
  Connector& connector_;
  const std::unique_ptr<rpc::Rpc>& calls_;  ///< null: no method is served, no session open
  ListenOptions options_;
  config::ConnectionAttributes attributes_;
};

}  // namespace

// ---- what the application asks for ----

Result<Listener> Connector::listen(std::string_view text, const ListenOptions& options,
                                   const std::unique_ptr<rpc::Rpc>& calls) {
  if (auto present = device_.check_present("listen"); !present)
    return tl::unexpected(present.error());
  auto address = control::Address::parse(text);
  if (!address) return tl::unexpected(address.error());
  const bool through_cm = options.via == Via::rdma_cm;
  const auto attributes =
      config::resolve(context_.config, *context_.device, options.settings, through_cm);
  if (!attributes) return tl::unexpected(attributes.error());
  if (auto able = through_cm ? check_cm() : Result<void>{}; !able)
    return tl::unexpected(able.error());
  auto owner = std::make_shared<ApplicationListener>(*this, calls, options, *attributes);
  const auto id = through_cm ? port_.listen_cm(*address, std::move(owner))
                             : port_.listen(*address, std::move(owner));
  if (!id) return tl::unexpected(id.error());
  return detail::make<Listener>(context_.slot, id->index, id->generation);
}

Result<Connector::Attempt> Connector::begin(const control::Address& to, Via via,
                                            Nanoseconds timeout) {
  if (auto present = device_.check_present("connect"); !present)
    return tl::unexpected(present.error());
  if (via == Via::rdma_cm)
    return begin_cm(to, timeout).map([](auto link) { return Attempt{{}, std::move(link)}; });
  return port_.connect(to, *this).map([](control::HandshakeId id) { return Attempt{id, nullptr}; });
}

void Connector::attach(Attempt attempt, Agent& a) noexcept {
  if (attempt.link != nullptr) return attach_cm(std::move(attempt.link), a);
  a.setup.handshake = attempt.handshake;
  port_.assign(a.setup.handshake, agent::subject_of(a));
}

Result<Connection> Connector::connect(std::string_view text, const ConnectOptions& options) {
  auto address = control::Address::parse(text);
  if (!address) return tl::unexpected(address.error());
  if (auto valid = check(options.reconnect); !valid) return tl::unexpected(valid.error());
  if (auto valid = config::check_timeout("connect", options.timeout); !valid)
    return tl::unexpected(valid.error());
  const auto attributes = config::resolve(context_.config, *context_.device, options.settings,
                                          options.via == Via::rdma_cm);
  if (!attributes) return tl::unexpected(attributes.error());
  auto raw = agent::make_raw(context_, *attributes);
  if (!raw) return tl::unexpected(raw.error());
  std::unique_ptr<agent::ReconnectState> again;
  if (options.reconnect.attempts != 0)
    again = std::make_unique<agent::ReconnectState>(options.reconnect, *address, options.via);
  const Nanoseconds timeout =
      options.timeout.count() != 0 ? options.timeout : context_.config.connections.connect_timeout;
  auto attempt = begin(*address, options.via, timeout);
  if (!attempt) return tl::unexpected(attempt.error());
  Agent* const a = agent::acquire(context_, ConnectionState::resolving, true, timeout);
  if (a == nullptr) {
    port_.drop(attempt->handshake);
    return tl::unexpected(
        agent::no_more_connections(context_, base::format("connect to {}", text)));
  }
  agent::name_peer(*a, address->text().view());
  agent::set_attributes(*a, *attributes);
  (void)agent::use_raw(context_, *a, std::move(*raw));
  a->handlers = options.handlers;
  a->reconnect = std::move(again);
  attach(std::move(*attempt), *a);
  schedule_.step_soon();
  return agent::handle(context_, *a);
}

// An attempt that fails here counts like any other.
void Connector::reconnect(Agent& a) noexcept {
  const auto begun = base::no_throw("connect again", [&]() -> Result<void> {
    if (!agent::start_attempt(context_, a)) {
      return tl::unexpected(agent::no_more_connections(
          context_, base::format("connect to {} again", a.peer.name.data())));
    }
    auto attempt = begin(a.reconnect->address, a.reconnect->via, a.setup.timeout);
    if (!attempt) return tl::unexpected(attempt.error());
    attach(std::move(*attempt), a);
    return {};
  });
  if (!begun) agent::fail(context_, a, begun.error());
}

// ---- handshakes over TCP ----

void Connector::on_setup_step(Agent& a) noexcept {
  if (a.setup.handshake) {
    on_tcp_step(a);
  } else if (a.setup.out_of_band) {
    on_out_of_band_step(a);
  } else if (a.setup.cm != nullptr) {
    on_cm_step(a);
  }
}

void Connector::on_tcp_step(Agent& a) noexcept {
  // A message that overtakes the last frame makes a connection ready, too.
  if (a.setup.was_ready) return port_.drop(a.setup.handshake);
  if (a.state == ConnectionState::draining) {
    const Error closed{Status::refused, "connect", "the application closed the connection",
                       "try again"};
    return port_.refuse(a.setup.handshake, a.cause.status != Status::ok ? a.cause : closed);
  }
  if (!a.setup.outbound) {
    if (a.stage == Stage::up) port_.answer(a.setup.handshake, agent::endpoint(context_, a));
  } else if (a.stage == Stage::wait) {
    if (a.state == ConnectionState::resolving)
      agent::enter(context_, a, ConnectionState::exchanging);
    port_.ask(a.setup.handshake, agent::endpoint(context_, a));
  } else if (a.stage == Stage::up) {
    port_.confirm(a.setup.handshake, a.peer.incarnation);
  }
}

Result<void> Connector::on_accept(std::uint64_t subject, const Endpoint& peer) {
  Agent* const a = find(subject);
  if (a == nullptr || a->state == ConnectionState::draining) {
    return base::fail(Status::refused, "connect", "the application closed the connection",
                      "try again");
  }
  if (auto taken = agent::accept_endpoint(context_, *a, peer); !taken) {
    agent::fail(context_, *a, taken.error());
    return taken;
  }
  agent::advance(context_, *a, agent::Event::endpoint_received);
  return {};
}

void Connector::on_confirmed(std::uint64_t subject) {
  Agent* const a = find(subject);
  if (a != nullptr) agent::advance(context_, *a, agent::Event::peer_ready);
}

void Connector::on_refused(std::uint64_t subject, const wire::Refuse& refusal) {
  Agent* const a = find(subject);
  if (a == nullptr || a->setup.was_ready || a->state == ConnectionState::draining) return;
  // A full peer may have room later. Any other refusal is final.
  if (a->reconnect != nullptr) a->reconnect->permanent = refusal.status != Status::limit;
  agent::fail(context_, *a,
              {refusal.status,
               a->setup.outbound ? base::format("connect to {}", a->peer.name.data())
                                 : base::format("accept a connection from {}", a->peer.name.data()),
               base::format("the peer {}: {}", a->setup.outbound ? "refused" : "gave up",
                            refusal.message()),
               "see the peer's reason"});
}

void Connector::on_failed(std::uint64_t subject, const Error& why) {
  Agent* const a = find(subject);
  if (a == nullptr || a->setup.was_ready || a->state == ConnectionState::draining) return;
  agent::fail(context_, *a, why);
}

Result<control::AcceptedConnection> Connector::accept(
    control::HandshakeId handshake, std::string_view peer, const Endpoint& endpoint,
    const ListenOptions& options, const config::ConnectionAttributes& attributes) {
  if (auto present = device_.check_present("accept a connection"); !present)
    return tl::unexpected(present.error());
  auto raw = agent::make_raw(context_, attributes);
  if (!raw) return tl::unexpected(raw.error());
  Agent* const a = agent::acquire(context_, ConnectionState::exchanging, false);
  if (a == nullptr)
    return tl::unexpected(agent::no_more_connections(context_, "accept one more connection"));
  a->setup.handshake = handshake;
  agent::name_peer(*a, peer);
  agent::set_attributes(*a, attributes);
  (void)agent::use_raw(context_, *a, std::move(*raw));
  if (auto taken = agent::accept_endpoint(context_, *a, endpoint); !taken) {
    agent::fail(context_, *a, taken.error());  // without handlers: the application never saw it
    return tl::unexpected(taken.error());
  }
  if (!aborted_) {
    a->handlers = options.handlers;
    if (options.on_accept) options.on_accept(agent::handle(context_, *a));
  }
  if (a->state == ConnectionState::draining) {
    return base::fail(Status::refused, "connect", "the application refused", "ask its operator");
  }
  if (auto agreed = agent::agree_on_raw(*a, a->peer.is_raw); !agreed) {
    agent::fail(context_, *a, agreed.error());
    return tl::unexpected(agreed.error());
  }
  return control::AcceptedConnection{this, agent::subject_of(*a)};
}

}  // namespace spinwire::engine
