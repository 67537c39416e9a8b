#include "control/address_resolver.h"

#include <rdma/rdma_cma.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/error.h"
#include "base/log_message.h"
#include "control/control_port.h"
#include "verbs/gid.h"

namespace spinwire::control {
namespace {

/// Two ARP requests, which the kernel sends a second apart.
constexpr Nanoseconds kResolutionTime = std::chrono::seconds(2);

bool is_link_local(const std::array<std::uint8_t, 16>& gid) noexcept {
  return gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80;
}

std::string text_of(const std::array<std::uint8_t, 16>& gid) {
  ibv_gid raw{};
  std::copy(gid.begin(), gid.end(), raw.raw);
  return verbs::gid_text(raw);
}

Error unreachable(const std::string& address, ErrorText found) noexcept {
  return {
      Status::peer_lost, base::format("reach the peer's RDMA address {}", address),
      std::move(found),
      "see that the RDMA interfaces of both hosts are up and in networks that reach each other"};
}

}  // namespace

CmAddressResolver::~CmAddressResolver() {
  if (channel_) port_.unwatch(channel_.fd());
}

Result<bool> CmAddressResolver::open() {
  if (channel_ || !has_rdma_cm_) return has_rdma_cm_;
  auto opened = UcmChannel::open();
  if (!opened) {
    has_rdma_cm_ = opened.error().status != Status::no_device;
    if (has_rdma_cm_) return tl::unexpected(opened.error());
    base::log(LogLevel::warning, "polls may wait for ARP when peers connect: {}",
              opened.error().message());
    return false;
  }
  if (auto watched = port_.watch(opened->fd(), *this); !watched)
    return tl::unexpected(watched.error());
  channel_ = std::move(*opened);
  return true;
}

Result<bool> CmAddressResolver::begin(const Resolution& what,
                                      const std::array<std::uint8_t, 16>& gid, GidType type) {
  // The owner refuses a GID of another type. A link-local GID of RoCEv1 contains the Ethernet
  // address.
  if (type != GidType::unknown && type != type_) return true;
  if (gid == local_ || (type_ == GidType::roce_v1 && is_link_local(gid))) return true;
  const auto opened = open();
  if (!opened) return tl::unexpected(opened.error());
  if (!*opened) return true;
  const Address to = Address::from_v6(gid, interface_), from = Address::from_v6(local_, interface_);
  const std::uint64_t key = ++last_key_;
  Pending& pending = pending_[key] = {0, what, text_of(gid)};
  const auto id = channel_.resolve(key, to, from, kResolutionTime);
  if (!id) {
    Error why = unreachable(pending.address, id.error().found);
    pending_.erase(key);
    return tl::unexpected(std::move(why));
  }
  pending.id = *id;
  return false;
}

void CmAddressResolver::cancel(const Resolution& what) noexcept {
  std::erase_if(pending_, [&](const auto& each) {
    const Resolution& has = each.second.what;
    if (has.handshake != what.handshake || has.subject != what.subject) return false;
    channel_.destroy(each.second.id);
    return true;
  });
}

void CmAddressResolver::on_readable() {
  constexpr int kEventsPerPoll = 16;
  for (int i = 0; i < kEventsPerPoll; ++i) {
    const auto event = channel_.next();
    if (!event) return;
    const auto found = pending_.find(event->key);
    if (found == pending_.end()) continue;
    const Pending over = std::move(found->second);
    pending_.erase(found);
    channel_.destroy(over.id);
    if (event->kind == RDMA_CM_EVENT_ADDR_RESOLVED) {
      port_.on_resolved(over.what, {});
      continue;
    }
    ErrorText why =
        event->status == ETIMEDOUT ? ErrorText("nobody answers there")
        : event->status != 0
            ? ErrorText(base::errno_text(event->status))
            : ErrorText(base::format("{} came instead of the answer", rdma_event_str(event->kind)));
    port_.on_resolved(over.what, tl::unexpected(unreachable(over.address, std::move(why))));
  }
}

// ---- frames wait at the port ----

Result<bool> ControlPort::resolve(Handshake& h, const std::array<std::uint8_t, 16>& gid,
                                  GidType type) {
  if (resolver_ == nullptr || h.address == AddressState::resolved) return true;
  // A peer that names the address it comes from, or one that has answered, leaves no unknown
  // neighbour behind.
  if (h.inbound && !is_of_peer_or_ours(h, gid) && !answered_.contains(gid)) {
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
    return resolver_->begin({h.id, 0}, gid, type);
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

Result<bool> ControlPort::resolve(Handshake& h, const Endpoint& peer) {
  return resolve(h, peer.gid, peer.gid_type);
}

Result<bool> ControlPort::resolve(Handshake& h, const wire::SessionEnd& peer) {
  if (peer.qp_num == 0) return true;  // the address only names the peer
  return resolve(h, peer.gid, peer.gid_type);
}

Result<bool> ControlPort::resolve(std::uint64_t subject, const Endpoint& peer) {
  if (resolver_ == nullptr) return true;
  return resolver_->begin({{}, subject}, peer.gid, peer.gid_type);
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

void ControlPort::on_resolved(const Resolution& what, const Result<void>& outcome) noexcept {
  try {
    if (!what.handshake && cm_owner_ != nullptr)
      return cm_owner_->on_address_resolved(what.subject, outcome);
    Handshake* const h = find(what.handshake);
    if (h == nullptr || h->address != AddressState::pending) return;
    h->address = AddressState::resolved;
    update_eviction(*h);
    end_resolution(*h, outcome.has_value());
    if (!outcome) answered_.remove(h->resolving);
    if (outcome && h->inbound) answered_.add(h->source, h->resolving);
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
