#include "softverbs/memory/access_tracking.h"

#include <chrono>
#include <thread>

#include "base/membarrier.h"
#include "softverbs/context_gid.h"

namespace spinwire::softverbs {
namespace {

constexpr std::uint32_t kNoLane = kMaxLanes;

/// The lane whose `access_serial` word the peer writes; kNoLane if it has none yet.
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

bool fence_peers(const Context& c) noexcept { return c.one_thread || base::membarrier(); }

PendingAccess current_access(const Context& c, const Peer& peer) noexcept {
  const std::uint32_t lane = lane_of(c, peer);
  if (lane == kNoLane) return {lane, 0};
  return {lane, c.segment->lanes[lane].control.access_serial.load(std::memory_order_seq_cst)};
}

bool access_ended(const Context& c, const Peer& peer, const PendingAccess& recorded) noexcept {
  if ((recorded.word & 1) == 0) return true;
  const std::atomic<std::uint64_t>& serial = c.segment->lanes[recorded.lane].control.access_serial;
  for (int spins = 100; spins != 0 && !peer.gone; --spins) {
    if (serial.load(std::memory_order_acquire) != recorded.word) return true;
  }
  return peer.gone;
}

bool peer_accesses_ended(const Context& c, Qp& qp) noexcept {
  if (qp.peer_access.state == PeerAccess::none) return true;
  if (qp.peer_access.state == PeerAccess::possible) {
    // From now on a peer that was not busy sees the queue pair's new state.
    if (!fence_peers(c)) return false;
    qp.peer_access.pending = current_access(c, *qp.peer);
    qp.peer_access.state = PeerAccess::recorded;
  }
  if (!access_ended(c, *qp.peer, qp.peer_access.pending)) return false;
  const bool served = (qp.entry->ident.load(std::memory_order_relaxed) & kServed) != 0;
  qp.peer_access.state = served ? PeerAccess::possible : PeerAccess::none;
  return true;
}

void record_accesses(Context& c, Mr& mr) {
  const std::uint32_t used = lanes_in_use(*c.segment);
  for (std::uint32_t lane = 0; lane < used; ++lane) {
    const std::uint64_t word =
        c.segment->lanes[lane].control.access_serial.load(std::memory_order_acquire);
    if ((word & 1) != 0) mr.pending_accesses.push_back({lane, word});
  }
}

bool accesses_ended(Context& c, Mr& mr) noexcept {
  int spins = 1000;  // for all lanes together
  while (!mr.pending_accesses.empty()) {
    const PendingAccess& recorded = mr.pending_accesses.back();
    const std::atomic<std::uint64_t>& word = c.segment->lanes[recorded.lane].control.access_serial;
    const InLane* known = c.lanes[recorded.lane].get();
    const bool gone = known != nullptr && known->peer != nullptr && known->peer->gone;
    while (!gone && word.load(std::memory_order_acquire) == recorded.word) {
      if (spins-- == 0) return false;
    }
    mr.pending_accesses.pop_back();
  }
  return true;
}

bool wait_for_local_accesses(ibv_context* context, Nanoseconds timeout) noexcept {
  const Context& c = context_of(context);
  if (c.one_thread || !fence_peers(c)) return c.one_thread;
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  const std::uint32_t used = lanes_in_use(*c.segment);
  for (std::uint32_t lane = 0; lane < used; ++lane) {
    const LaneEntry& entry = c.segment->directory[lane];
    if (lane_pid(entry.state.load(std::memory_order_acquire)) != c.pid) continue;
    const std::atomic<std::uint64_t>& serial = c.segment->lanes[lane].control.access_serial;
    const std::uint64_t word = serial.load(std::memory_order_seq_cst);
    while ((word & 1) != 0 && serial.load(std::memory_order_acquire) == word) {
      if (std::chrono::steady_clock::now() >= deadline) return false;
      // The accessing thread may need this processor, whatever its priority.
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  return true;
}

}  // namespace spinwire::softverbs
