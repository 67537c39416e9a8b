#include "control/cm_resolver.h"

#include <rdma/rdma_cma.h>

#include <bit>
#include <utility>

#include "base/error.h"
#include "base/log_message.h"
#include "control/control_port.h"

namespace spinwire::control {
namespace {

/// Two ARP requests, which the kernel sends a second apart.
constexpr Nanoseconds kResolutionTime = std::chrono::seconds(2);

bool is_link_local(const Gid& gid) noexcept { return gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80; }

Gid gid_of(const verbs::Place& place) noexcept { return std::bit_cast<Gid>(place.gid); }

}  // namespace

CmResolver::CmResolver(ControlPort& port, const verbs::Place& own, std::uint32_t interface,
                       WaitForNeighbour wait)
    : port_(port), own_(own), interface_(interface), threads_(port, std::move(wait)) {
  // Opened at once, so that no peer makes us open anything. A failure is retried when needed.
  (void)open();
}

CmResolver::~CmResolver() {
  if (channel_) port_.unwatch(channel_.fd());
}

Result<bool> CmResolver::open() {
  if (channel_ || !has_rdma_cm_) return has_rdma_cm_;
  auto opened = UcmChannel::open();
  if (!opened) {
    has_rdma_cm_ = opened.error().status != Status::no_device;
    if (has_rdma_cm_) return tl::unexpected(opened.error());
    base::log(LogLevel::info, "a thread resolves the RDMA address of each peer that connects: {}",
              opened.error().message());
    return false;
  }
  if (auto watched = port_.watch(opened->fd(), *this); !watched)
    return tl::unexpected(watched.error());
  channel_ = std::move(*opened);
  return true;
}

Result<bool> CmResolver::begin(const Resolution& what, const Gid& gid, GidType type,
                               const verbs::Place* from) {
  const verbs::Place& place = from != nullptr ? *from : own_;
  const bool by_threads = from != nullptr && from->gid_index >= 0;
  const GidType ours = by_threads ? from->gid_type : own_.gid_type;
  // The owner refuses a GID of another type. A link-local GID of RoCEv1 contains the Ethernet
  // address.
  if (type != GidType::unknown && type != ours) return true;
  if (gid == gid_of(place) || (ours == GidType::roce_v1 && is_link_local(gid))) return true;
  if (by_threads) return threads_.begin(what, gid, type, from);
  const auto opened = open();
  if (!opened) return tl::unexpected(opened.error());
  if (!*opened) return threads_.begin(what, gid, type, &own_);
  const std::uint64_t key = ++last_key_;
  Pending& pending = pending_[key] = {0, what, gid};
  const auto id = channel_.resolve(key, Address::from_v6(gid, interface_),
                                   Address::from_v6(gid_of(place), interface_), kResolutionTime);
  if (!id) {
    pending_.erase(key);
    return tl::unexpected(unreachable(gid, id.error().found));
  }
  pending.id = *id;
  return false;
}

void CmResolver::cancel(const Resolution& what) noexcept {
  threads_.cancel(what);
  std::erase_if(pending_, [&](const auto& each) {
    if (each.second.what != what) return false;
    channel_.destroy(each.second.id);
    return true;
  });
}

void CmResolver::on_readable() {
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
    Error why = event->status != 0
                    ? unreachable(over.gid, event->status)
                    : unreachable(over.gid, base::format("{} came instead of the answer",
                                                         rdma_event_str(event->kind)));
    port_.on_resolved(over.what, tl::unexpected(std::move(why)));
  }
}

}  // namespace spinwire::control
