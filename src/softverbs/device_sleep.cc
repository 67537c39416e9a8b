// Sleeping: a context that sleeps has no lane awake, so its peers ring its doorbell, and write to
// its wake-up pipe besides. Cold.
#include <errno.h>
#include <sys/epoll.h>

#include "softverbs/lane/attached_peer.h"
#include "softverbs/memory/access_tracking.h"
#include "softverbs/objects.h"
#include "softverbs/queues.h"
#include "softverbs/softverbs_device.h"

namespace spinwire::softverbs {
namespace {

/// Puts all lanes to sleep but those with packets. Returns whether there is one. Without a barrier
/// all lanes stay awake, so that nobody rings.
bool sleep_all_lanes(Context& c) noexcept {
  if (c.awake_count == 0) return false;
  for (std::uint32_t i = 0; i < c.awake_count; ++i)
    c.awake[i]->control->asleep.store(1, std::memory_order_relaxed);
  const bool fenced = fence_peers(c);  // as in sleep_idle_lanes()
  bool found = false;
  for (std::uint32_t i = 0; i < c.awake_count;) {
    InLane& lane = *c.awake[i];
    const bool is_idle = !has_packet(lane) && !lane.batch_reported && !lane.in_use;
    if (fenced && is_idle) {
      sleep_lane(c, lane);
      continue;
    }
    lane.control->asleep.store(0, std::memory_order_relaxed);
    lane.idle_rounds = 0;
    found = found || !is_idle;
    ++i;
  }
  return found;
}

/// Whether a peer has acknowledged something since the lanes were last read; then has the next poll
/// read them, which may otherwise be the 48th from now.
bool has_new_acks(Context& c) noexcept {
  for (std::uint32_t i = 0; i < c.pending.unacked; ++i) {
    const OutLane& out = c.unacked[i]->out;
    const std::uint64_t head = out.control->head.load(std::memory_order_acquire);
    if (head - out.head - 1 >= out.tail - out.head) continue;  // as in apply_peer_acks()
    c.ack_countdown = 1;
    return true;
  }
  return false;
}

bool has_work(Context& c, const Cq& cq) noexcept {
  return cq.head != cq.tail || c.pending.acks_due != 0 || !c.events.empty() ||
         c.lane_scan.has_new_bits || has_new_acks(c);
}

/// Whether a peer has closed and no control() has noticed. The next one looks at that peer first.
bool find_closed_peer(Context& c) noexcept {
  for (std::size_t i = 0; i < c.peers.size(); ++i) {
    const Peer& peer = *c.peers[i];
    if (peer.gone || peer.segment->closed.load(std::memory_order_acquire) == 0) continue;
    c.liveness.next_peer = i;
    c.liveness.next_check = 0;
    return true;
  }
  return false;
}

/// Whether something is awaited that wakes nobody: acknowledgements, room in lanes, retry timers,
/// work that control() has left for its next call, peers that could not be woken, messages in lanes
/// that cannot sleep.
bool awaits_unannounced(const Context& c) noexcept {
  return c.awake_count != 0 || c.pending.unacked != 0 || c.pending.slow_work != 0 ||
         !c.lost.empty() || c.liveness.gone != 0 || c.liveness.wakes_due != 0 ||
         c.segment->violated.load(std::memory_order_relaxed) != 0 || c.lane_scan.clears == 0 ||
         c.faults != nullptr;
}

}  // namespace

int wake_descriptor(ibv_context* context) noexcept {
  Context& c = context_of(context);
  if (!c.wake_pipe->open(*c.segment)) return -1;
  const int set = c.liveness.processes.get();
  epoll_event event{};
  event.events = EPOLLIN;
  if (epoll_ctl(set, EPOLL_CTL_ADD, c.wake_pipe->reader(), &event) != 0 && errno != EEXIST)
    return -1;
  return set;
}

SleepAnswer arm_device(ibv_cq* base) noexcept {
  const Cq& cq = *static_cast<const Cq*>(base);
  Context& c = context_of(base->context);
  const bool was_woken = c.wake_pipe->drain();
  // Peers store first what they wake for, and then read the number.
  c.segment->sleep_serial.store(++c.sleep_serial);
  const bool found = sleep_all_lanes(c);
  if (found || c.segment->doorbell.load() != 0 || has_work(c, cq) ||
      (was_woken && find_closed_peer(c))) {
    disarm_device(base->context);
    return SleepAnswer::work;
  }
  return awaits_unannounced(c) ? SleepAnswer::brief : SleepAnswer::yes;
}

void disarm_device(ibv_context* context) noexcept {
  context_of(context).segment->sleep_serial.store(0, std::memory_order_relaxed);
}

}  // namespace spinwire::softverbs
