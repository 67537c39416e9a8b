#include "softverbs/memory/access_tracking.h"

#include "base/membarrier.h"
#include "softverbs/context_gid.h"

namespace spinwire::softverbs {
namespace {

constexpr std::uint32_t kNoLane = kMaxLanes;

/// The lane in which the peer tells what it is at; kNoLane if it has none yet.
std::uint32_t lane_of(const Context& c, const Peer& peer) noexcept {
  if (peer.in != nullptr) return peer.in->index;
  const std::uint32_t used = lanes_in_use(*c.segment);
  for (std::uint32_t lane = 0; lane < used; ++lane) {
    const LaneEntry& entry = c.segment->directory[lane];
    if (lane_state(entry.state.load(std::memory_order_acquire)) == LaneState::active &&
        same_gid(entry.sender, peer.gid))
      return lane;
  }
  return kNoLane;
}

}  // namespace

bool reach_all(const Context& c) noexcept { return c.one_thread || base::membarrier(); }

BusyLane busy_now(const Context& c, const Peer& peer) noexcept {
  const std::uint32_t lane = lane_of(c, peer);
  if (lane == kNoLane) return {lane, 0};
  return {lane, c.segment->lanes[lane].control.busy.load(std::memory_order_seq_cst)};
}

bool has_left(const Context& c, const Peer& peer, const BusyLane& noted) noexcept {
  if ((noted.word & 1) == 0) return true;
  const std::atomic<std::uint64_t>& busy = c.segment->lanes[noted.lane].control.busy;
  for (int spins = 100; spins != 0 && !peer.gone; --spins) {
    if (busy.load(std::memory_order_acquire) != noted.word) return true;
  }
  return peer.gone;
}

bool nobody_in(const Context& c, Qp& qp) noexcept {
  if (qp.within == Within::nobody) return true;
  if (qp.within == Within::anybody) {
    // From here on whoever was not busy sees the queue pair as it is now.
    if (!reach_all(c)) return false;
    qp.busy = busy_now(c, *qp.peer);
    qp.within = Within::noted;
  }
  if (!has_left(c, *qp.peer, qp.busy)) return false;
  const bool served = (qp.entry->ident.load(std::memory_order_relaxed) & kServed) != 0;
  qp.within = served ? Within::anybody : Within::nobody;
  return true;
}

}  // namespace spinwire::softverbs
