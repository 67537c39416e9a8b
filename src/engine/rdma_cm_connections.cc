// The connector's part for rdma_cm: identifiers, requests and events. agent/cm_link.h has the rest.
// Cold.

#include <utility>

#include "base/error.h"
#include "engine/connector.h"

namespace spinwire::engine {

using agent::Agent;
using control::CmEvent;
using control::CmId;

namespace {

std::string name_of(const CmId& id) {
  const auto from = id.peer_address();
  return std::string(from ? from->text().view() : "a peer through rdma_cm");
}

}  // namespace

Result<void> Connector::check_cm() const {
  if (context_.device->provider().reaches_other_hosts) return port_.check_cm();
  return base::fail(
      Status::unsupported, "connect through rdma_cm",
      base::format("device {} is embedded: rdma_cm does not know it", context_.device->info().name),
      "use Via::tcp, or prepare() and join()");
}

Result<Connector::Attempt> Connector::begin_cm(const control::Address& to, Nanoseconds timeout) {
  auto id = check_cm().and_then([&] { return port_.make_cm_id(); });
  if (!id) return tl::unexpected(id.error());
  if (auto begun = id->resolve_address(to, timeout); !begun) return tl::unexpected(begun.error());
  Attempt attempt{{}, std::make_unique<agent::CmLink>()};
  attempt.cm->id = std::move(*id);
  attempt.cm->client = port_.make_cm_client();
  return attempt;
}

void Connector::attach_cm(std::unique_ptr<agent::CmLink> link, Agent& a) noexcept {
  control::ControlPort::set_cm_subject(link->id, agent::subject_of(a));
  agent::use_cm(a, std::move(link));
}

/// The agent of an event; null if the agent has ended, or now uses another identifier.
Agent* Connector::find_cm(std::uint64_t subject, const rdma_cm_id* id) noexcept {
  const auto index = static_cast<std::uint32_t>(subject);
  if (!context_.agents.in_use(index)) return nullptr;
  Agent& a = context_.agents.at(index);
  const bool same = (agent::subject_of(a) & control::ControlPort::kCmSubjectBits) == subject;
  return same && agent::uses_cm(a, id) ? &a : nullptr;
}

void Connector::on_cm_event(std::uint64_t subject, const CmEvent& event) {
  Agent* const a = find_cm(subject, event.id);
  if (a == nullptr) return;
  // Completions may contain the goodbye of a peer that disconnects: handle it first.
  if (event.kind == RDMA_CM_EVENT_DISCONNECTED || event.kind == RDMA_CM_EVENT_REJECTED)
    completions_.process_all_completions();
  agent::on_cm_event(context_, *a, event);
  if (agent::needs_cm_id(*a)) renew_cm_id(*a);
  // The request is over at the control port once the connection is ready.
  if (event.kind == RDMA_CM_EVENT_ESTABLISHED && agent::was_ready(*a) && agent::handshake_of(*a))
    end_handshake(*a);
}

/// A rejected identifier asks no more.
void Connector::renew_cm_id(Agent& a) noexcept {
  const auto begun = base::no_throw("ask again through rdma_cm", [&]() -> Result<void> {
    auto id = port_.make_cm_id();
    if (!id) return tl::unexpected(id.error());
    control::ControlPort::set_cm_subject(*id, agent::subject_of(a));
    return agent::renew_cm_id(a, std::move(*id));
  });
  if (!begun) agent::fail(context_, a, begun.error());
}

Result<Endpoint> Connector::read_cm_hello(const CmId& id, const control::CmHello& hello) const {
  const auto good = check_accepting()
                        .and_then([&] { return device_.check_present("accept a connection"); })
                        .and_then([&] { return agent::check_cm_device(context_, id); });
  if (!good) return tl::unexpected(good.error());
  return agent::read_cm_endpoint(context_, id, hello.request).map([&](Endpoint peer) {
    peer.private_data = hello.private_data;
    return peer;
  });
}

Result<PrivateData> Connector::ask_about_cm(control::HandshakeId handshake, const CmId& id,
                                            const control::CmHello& hello,
                                            const ListenTerms& terms) const {
  if (auto peer = read_cm_hello(id, hello); !peer) return tl::unexpected(peer.error());
  return ask_to_connect({name_of(id), port_.key_of(handshake).view(), hello.private_data.bytes()},
                        terms, hello.takes_private_data);
}

Result<control::AcceptedConnection> Connector::accept_cm(control::HandshakeId handshake, CmId& id,
                                                         const control::CmHello& hello,
                                                         const PrivateData& ours,
                                                         const ListenTerms& terms) {
  const auto peer = read_cm_hello(id, hello);  // the callback may have begun to drain the engine
  if (!peer) return tl::unexpected(peer.error());
  const auto from = id.peer_address();
  auto link = std::make_unique<agent::CmLink>();
  link->resolved = true;
  const auto made = agent::make(context_,
                                {.peer = name_of(id),
                                 .attributes = terms.attributes,
                                 .handshake = handshake,
                                 .private_data = &ours},
                                "accept one more connection");
  if (!made) return tl::unexpected(made.error());
  agent::set_peer_key(**made, port_.key_of(handshake));
  // From here on, ending the agent rejects the request.
  link->id = std::move(id);
  link->server = port_.take_cm_server(handshake);
  attach_cm(std::move(link), **made);
  return introduce(**made, from ? *from : control::Address(), *peer, terms);
}

}  // namespace spinwire::engine
