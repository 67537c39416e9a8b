#include "softverbs/memory/access_tracking.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include "base/membarrier.h"
#include "softverbs/context_gid.h"
#include "softverbs/lane/attached_peer.h"

namespace spinwire::softverbs {
namespace {

/// The access that a peer of another process marks in its lane. Opens a lane that the peer has
/// claimed since the last control().
PendingAccess access_in_lane(Context& c, const Peer& peer) noexcept {
  if (peer.gone) return {};
  open_in_lane(c, peer);
  if (peer.in == nullptr) return {};
  const InLane& lane = *peer.in;
  return {nullptr, lane.index, lane.serial,
          lane.control->access_serial.load(std::memory_order_seq_cst), read_clock(c)};
}

/// Calls `visit` with each access in progress of this process's threads.
template <typename Visit>
void for_each_local_access(const Context& c, Visit&& visit) {
  LocalAccesses& accesses = *c.accesses;
  const std::lock_guard<std::mutex> lock(accesses.mutex);
  for (const std::shared_ptr<LocalAccess>& each : accesses.all) {
    const std::uint64_t word = each->serial.load(std::memory_order_seq_cst);
    if ((word & 1) != 0) visit(PendingAccess{each, 0, 0, word, 0});
  }
}

/// Whether the access still shows. One that takes too long makes control() give its peer up.
bool in_progress(Context& c, const PendingAccess& recorded) noexcept {
  if ((recorded.word & 1) == 0) return false;
  if (recorded.local != nullptr)
    return recorded.local->serial.load(std::memory_order_acquire) == recorded.word;
  const InLane* const lane = c.lanes[recorded.lane].get();
  if (lane == nullptr || lane->serial != recorded.lane_serial || lane->peer == nullptr ||
      lane->peer->gone)
    return false;
  return lane->control->access_serial.load(std::memory_order_acquire) == recorded.word;
}

/// Notes that a peer's access has been in progress for too long.
void check_duration(Context& c, const PendingAccess& recorded) noexcept {
  if (recorded.local != nullptr) return;
  if (read_clock(c) - recorded.since <= c.clock.ticks(kLongestAccess)) return;
  c.lanes[recorded.lane]->peer->overdue = true;
}

/// Waits for the end of an access, as long as there are spins left.
bool spin_until_ended(Context& c, const PendingAccess& recorded, int& spins) noexcept {
  while (in_progress(c, recorded)) {
    if (spins-- > 0) continue;
    check_duration(c, recorded);
    return false;
  }
  return true;
}

}  // namespace

bool fence_peers(const Context& c) noexcept { return c.one_thread || base::membarrier(); }

PendingAccess current_access(Context& c, const Peer& peer) noexcept {
  if (!peer.same_process) return access_in_lane(c, peer);
  PendingAccess found;
  for_each_local_access(c, [&](const PendingAccess& access) {
    if (same_gid(access.local->from, peer.gid)) found = access;
  });
  return found;
}

bool access_ended(Context& c, const PendingAccess& recorded) noexcept {
  int spins = 100;
  return spin_until_ended(c, recorded, spins);
}

bool peer_accesses_ended(Context& c, Qp& qp) noexcept {
  if (qp.peer_access.state == PeerAccess::none) return true;
  if (qp.peer_access.state == PeerAccess::possible) {
    // From now on a peer that was not busy sees the queue pair's new state.
    if (!fence_peers(c)) return false;
    qp.peer_access.pending = current_access(c, *qp.peer);
    qp.peer_access.state = PeerAccess::recorded;
  }
  if (!access_ended(c, qp.peer_access.pending)) return false;
  const bool served = (qp.rights->ident.load(std::memory_order_relaxed) & kServed) != 0;
  qp.peer_access.state = served ? PeerAccess::possible : PeerAccess::none;
  return true;
}

void record_accesses(Context& c, Mr& mr) {
  for_each_local_access(
      c, [&](const PendingAccess& access) { mr.pending_accesses.push_back(access); });
  const std::uint64_t scope = c.regions.own[mr.index].pd;
  for (const auto& peer : c.peers) {
    const auto reaches = [scope](const Qp& qp) {
      return scope == static_cast<const Pd*>(qp.pd)->id || scope == window_scope(qp.qp_num);
    };
    if (peer->same_process || !std::ranges::any_of(peer->queue_pairs, reaches)) continue;
    const PendingAccess access = access_in_lane(c, *peer);
    if ((access.word & 1) != 0) mr.pending_accesses.push_back(access);
  }
}

bool accesses_ended(Context& c, Mr& mr) noexcept {
  int spins = 1000;  // for all accesses together
  while (!mr.pending_accesses.empty()) {
    if (!spin_until_ended(c, mr.pending_accesses.back(), spins)) return false;
    mr.pending_accesses.pop_back();
  }
  return true;
}

bool wait_for_local_accesses(ibv_context* context, Nanoseconds timeout) noexcept {
  const Context& c = context_of(context);
  if (c.one_thread || !fence_peers(c)) return c.one_thread;
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::vector<PendingAccess> pending;
  try {
    for_each_local_access(c, [&](const PendingAccess& access) { pending.push_back(access); });
  } catch (const std::bad_alloc&) {
    return false;
  }
  for (const PendingAccess& access : pending) {
    while (access.local->serial.load(std::memory_order_acquire) == access.word) {
      if (std::chrono::steady_clock::now() >= deadline) return false;
      // The accessing thread may need this processor, whatever its priority.
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  return true;
}

}  // namespace spinwire::softverbs
