#include "control/address_resolver.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "control/control_port.h"
#include "verbs/gid.h"

namespace spinwire::control {
namespace {

/// Two requests of ARP, which the kernel sends a second apart.
constexpr Nanoseconds kResolutionTime = std::chrono::seconds(2);

bool is_link_local(const std::array<std::uint8_t, 16>& gid) noexcept {
  return gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80;
}

std::string text_of(const std::array<std::uint8_t, 16>& gid) {
  ibv_gid raw{};
  std::copy(gid.begin(), gid.end(), raw.raw);
  return verbs::gid_text(raw);
}

Error unreachable(const std::string& address, std::string found) {
  return {
      Status::peer_lost, fmt::format("reach the peer's RDMA address {}", address), std::move(found),
      "see that the RDMA interfaces of both hosts are up and in networks that reach each other"};
}

}  // namespace

Result<bool> CmAddressResolver::begin(const Resolution& what,
                                      const std::array<std::uint8_t, 16>& gid, GidType type) {
  // The owner refuses a GID of another type. One of RoCEv1 that is link-local contains
  // the Ethernet address.
  if (!has_rdma_cm_ || type != type_ || gid == local_ ||
      (type == GidType::roce_v1 && is_link_local(gid)))
    return true;
  auto id = port_.make_cm_id();
  if (!id) {
    has_rdma_cm_ = id.error().status != Status::no_device;
    if (has_rdma_cm_) return tl::unexpected(id.error());
    base::log(LogLevel::warning, "polls may wait for ARP when peers connect: {}",
              id.error().message());
    return true;
  }
  const Address to = Address::from_v6(gid, interface_), from = Address::from_v6(local_, interface_);
  if (auto begun = id->resolve_address(to, kResolutionTime, &from); !begun)
    return tl::unexpected(unreachable(text_of(gid), begun.error().found));
  ControlPort::set_cm_resolver(*id);
  const rdma_cm_id* const key = id->get();
  pending_.emplace(key, Pending{std::move(*id), what, text_of(gid)});
  return false;
}

void CmAddressResolver::cancel(const Resolution& what) noexcept {
  std::erase_if(pending_, [&](const auto& each) {
    const Resolution& has = each.second.what;
    return has.handshake == what.handshake && has.subject == what.subject;
  });
}

void CmAddressResolver::on_cm_event(const CmEvent& event) {
  const auto found = pending_.find(event.id);
  if (found == pending_.end()) return;
  const Pending over = std::move(found->second);
  pending_.erase(found);
  if (event.kind == RDMA_CM_EVENT_ADDR_RESOLVED) return port_.on_resolved(over.what, {});
  const std::string why = event.status == -ETIMEDOUT ? "nobody answers there" : event.found();
  port_.on_resolved(over.what, tl::unexpected(unreachable(over.address, why)));
}

// ---- frames wait at the port ----

Result<bool> ControlPort::resolve(Handshake& h, const std::array<std::uint8_t, 16>& gid,
                                  GidType type) {
  if (resolver_ == nullptr || h.address == AddressState::resolved) return true;
  auto begun = resolver_->begin({h.id, 0}, gid, type);
  if (!begun || *begun) return begun;
  h.address = AddressState::pending;
  // Nothing is read meanwhile: the frame stays where it is.
  if (std::exchange(h.watched, false)) epoll_.remove(h.exchange.fd());
  return false;
}

Result<bool> ControlPort::resolve(Handshake& h, const Endpoint& peer) {
  return resolve(h, peer.gid, peer.gid_type);
}

Result<bool> ControlPort::resolve(Handshake& h, const wire::SessionEnd& peer) {
  if (peer.qp_num == 0) return true;  // only names the peer
  return resolve(h, peer.gid, peer.gid_type);
}

Result<bool> ControlPort::resolve(std::uint64_t subject, const Endpoint& peer) {
  if (resolver_ == nullptr) return true;
  return resolver_->begin({{}, subject}, peer.gid, peer.gid_type);
}

void ControlPort::stop_resolving(Handshake& h) noexcept {
  if (h.address != AddressState::pending) return;
  h.address = AddressState::unknown;
  if (resolver_ != nullptr) resolver_->cancel({h.id, 0});
}

void ControlPort::on_resolved(const Resolution& what, const Result<void>& outcome) noexcept {
  try {
    if (!what.handshake && cm_owner_ != nullptr)
      return cm_owner_->on_address_resolved(what.subject, outcome);
    Handshake* const h = find(what.handshake);
    if (h == nullptr || h->address != AddressState::pending) return;
    h->address = AddressState::resolved;
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
