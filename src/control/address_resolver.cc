#include "control/address_resolver.h"

#include <bit>
#include <cerrno>
#include <utility>

#include "base/error.h"
#include "base/log_message.h"
#include "control/control_port.h"
#include "verbs/gid.h"

namespace spinwire::control {

Error unreachable(const Gid& gid, ErrorText found) noexcept {
  return {
      Status::peer_lost,
      base::format("reach the peer's RDMA address {}",
                   verbs::gid_text(std::bit_cast<ibv_gid>(gid))),
      std::move(found),
      "see that the RDMA interfaces of both hosts are up and in networks that reach each other"};
}

Error unreachable(const Gid& gid, int error) noexcept {
  return unreachable(gid, error == ETIMEDOUT ? ErrorText("nobody answers there")
                                             : ErrorText(base::errno_text(error)));
}

// ---- frames wait at the port ----

Result<bool> ControlPort::resolve(Handshake& h, const Gid& gid, GidType type,
                                  const verbs::Place* from) {
  if (resolver_ == nullptr || h.address == AddressState::resolved) return true;
  h.is_seen_from_elsewhere = from != nullptr;
  // A peer that names the address it comes from, or one that has answered, leaves no unknown
  // neighbour behind.
  const bool is_known = is_of_peer_or_ours(h, gid) ||
                        (from == nullptr && answered_.contains(gid)) ||
                        (from != nullptr && gid == std::bit_cast<Gid>(from->gid));
  if (h.inbound && !is_known) {
    auto charged = base::no_throw("resolve an address", [&]() -> Result<bool> {
      return resolution_limits_.try_begin(h.source);
    });
    if (!charged) return charged;
    if (!*charged) {
      hold(h, HeldFor::resolution);
      return false;
    }
    h.is_charged = true;
  }
  auto begun = base::no_throw("resolve an address", [&]() -> Result<bool> {
    return resolver_->begin({h.id, 0, h.inbound ? std::optional(h.source) : std::nullopt}, gid,
                            type, from);
  });
  if (!begun || *begun) {
    end_resolution(h, true);
    return begun;
  }
  h.address = AddressState::pending;
  update_eviction(h);
  h.resolving = gid;
  // The frame stays in the exchange: nothing is read meanwhile. An inbound peer's end is noticed. A
  // server may end with a refusal, which is read once its address is known.
  if (h.inbound) {
    watch(h);
  } else if (std::exchange(h.watched, false)) {
    epoll_.remove(h.exchange.fd());
  }
  return false;
}

Result<bool> ControlPort::resolve(Handshake& h, const Endpoint& peer, const verbs::Place* from) {
  return resolve(h, peer.gid, peer.gid_type, from);
}

Result<bool> ControlPort::resolve(Handshake& h, const wire::SessionEnd& peer) {
  if (peer.qp_num == 0) return true;  // the address only names the peer
  return resolve(h, peer.gid, peer.gid_type, nullptr);
}

Result<bool> ControlPort::resolve_request(Handshake& h) {
  const CmRequest& request = *h.request;
  verbs::Place place;
  place.gid_index = -1;  // not known
  if (request.id) place.gid = request.id.own_gid();
  const bool is_elsewhere = request.id && std::bit_cast<Gid>(place.gid) != own_address_;
  return resolve(h, request.gid, GidType::unknown, is_elsewhere ? &place : nullptr);
}

Result<bool> ControlPort::resolve(std::uint64_t subject, const Gid& gid, GidType type,
                                  const verbs::Place* from) {
  if (resolver_ == nullptr) return true;
  return resolver_->begin({{}, subject}, gid, type, from);
}

Result<bool> ControlPort::resolve_again(HandshakeId id, const Endpoint& peer,
                                        const verbs::Place* from) {
  Handshake* const h = find(id);
  if (h == nullptr) return true;
  stop_resolving(*h);
  h->address = AddressState::unknown;
  auto known = resolve(*h, peer.gid, peer.gid_type, from);
  if (h->held_for != HeldFor::resolution) return known;
  unhold(*h);  // the connection has its record already, and does not wait
  return tl::unexpected(too_many_addresses());
}

void ControlPort::end_resolution(Handshake& h, bool answered) noexcept {
  if (std::exchange(h.is_charged, false)) resolution_limits_.end(h.source, answered);
}

void ControlPort::stop_resolving(Handshake& h) noexcept {
  end_resolution(h, false);
  if (h.address != AddressState::pending) return;
  h.address = AddressState::unknown;
  update_eviction(h);
  if (resolver_ != nullptr) resolver_->cancel({h.id, 0});
}

void ControlPort::on_resolved(const Resolution& what, const Result<void>& outcome,
                              bool is_answered) noexcept {
  try {
    if (!what.handshake && cm_owner_ != nullptr)
      return cm_owner_->on_address_resolved(what.subject, outcome);
    Handshake* const h = find(what.handshake);
    if (h == nullptr || h->address != AddressState::pending) return;
    h->address = AddressState::resolved;
    update_eviction(*h);
    const bool is_silent = !outcome && outcome.error().status == Status::peer_lost;
    end_resolution(*h, !is_silent && is_answered);
    if (!h->is_seen_from_elsewhere && is_silent) answered_.remove(h->resolving);
    if (!h->is_seen_from_elsewhere && outcome && is_answered && h->inbound)
      answered_.add(h->source, h->resolving);
    watch(*h);
    std::visit(
        [&](auto& dialogue) {
          if constexpr (requires { dialogue.on_resolved(*this, *h, outcome); })
            dialogue.on_resolved(*this, *h, outcome);
        },
        h->dialogue);
  } catch (...) {
    base::log(LogLevel::error, "out of memory in a handshake");
  }
}

}  // namespace spinwire::control
