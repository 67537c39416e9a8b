#include "softverbs/device_control.h"

#include <errno.h>
#include <sys/epoll.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "softverbs/context_gid.h"
#include "softverbs/lane/attached_peer.h"
#include "softverbs/memory/access_tracking.h"
#include "softverbs/queues.h"

namespace spinwire::softverbs {
namespace {

/// Lanes that stay awake even if idle: each costs a poll a few instructions and saves the doorbell.
constexpr std::uint32_t kAlwaysAwake = 2;
constexpr std::uint32_t kScanPerStep = 64;
constexpr Nanoseconds kLivenessInterval = std::chrono::milliseconds(1);

/// Tries to attach the sender of a lane; true if the sender is gone.
bool sender_unreachable(Context& c, std::uint32_t index) noexcept {
  const ibv_gid sender = c.segment->directory[index].sender;
  const std::optional<GidParts> parts = parse_gid(sender);
  std::string why;
  if (!parts) return true;
  if (attach_peer(c, sender, why) == nullptr)
    return errno == ENODEV || errno == ENOENT || process_ended(parts->pid);
  open_lane(c, index);
  return false;
}

/// Opens a lane that no poll has read yet, if it holds a packet; its sender may have closed
/// already. Returns whether it holds one.
bool open_if_unread(Context& c, std::uint32_t index) noexcept {
  if (word_mark(c.segment->lanes[index].lines->word.load(std::memory_order_acquire)) !=
      lane_mark(0))
    return false;
  (void)open_lane(c, index);
  return true;
}

/// Frees and zeroes a lane that its sender released, or whose sender is gone, once all its packets
/// are read.
bool reclaim_lane(Context& c, std::uint32_t index, bool gone) {
  LaneEntry& entry = c.segment->directory[index];
  const std::uint64_t state = entry.state.load(std::memory_order_acquire);
  InLane* lane = c.lanes[index].get();
  if (lane_state(state) == LaneState::free) return false;
  if (lane_state(state) == LaneState::claimed) {
    // A claim takes microseconds; the claim of a dead process never ends.
    if (lane_pid(state) == c.pid || !process_ended(lane_pid(state))) return false;
  } else if (lane != nullptr) {
    const bool over = gone || lane_state(state) == LaneState::released ||
                      (lane->peer != nullptr && lane->peer->gone);
    if (!over) return false;
    if (has_packet(*lane)) {
      wake_lane(c, *lane);  // the sender was killed before it rang
      return false;
    }
    if (lane->batch_reported || lane->in_use || (lane->peer != nullptr && lane->peer->users != 0))
      return false;
    if (lane->peer != nullptr && lane->peer->in == lane) {
      lane->peer->in = nullptr;
      lane->peer->out.direct_limit = 0;
    }
    sleep_lane(c, *lane);
    c.lanes[index].reset();
  } else if ((!gone && lane_state(state) != LaneState::released) || open_if_unread(c, index)) {
    return false;
  }
  std::memset(static_cast<void*>(&c.segment->lanes[index]), 0, sizeof(Lane));
  entry.state.store(lane_word(0, LaneState::free), std::memory_order_release);
  return true;
}

void scan_lanes(Context& c) {
  const std::uint32_t used = lanes_in_use(*c.segment);
  bool tried = false;
  for (std::uint32_t i = std::min(kScanPerStep, used); i != 0; --i) {
    if (c.lane_scan.next >= used) c.lane_scan.next = 0;
    const std::uint32_t index = c.lane_scan.next++;
    const LaneState state =
        lane_state(c.segment->directory[index].state.load(std::memory_order_acquire));
    if (state == LaneState::free) continue;
    // The sender could not be attached when it rang, or died before it rang.
    const InLane* lane = c.lanes[index].get();
    const bool unattached =
        state == LaneState::active && (lane == nullptr || lane->peer == nullptr);
    reclaim_lane(c, index,
                 unattached && !std::exchange(tried, true) && sender_unreachable(c, index));
  }
}

/// Opens the new lanes that rang, and attaches their senders so that their end is noticed.
void open_new_lanes(Context& c) {
  if (!c.lane_scan.has_new_bits) return;
  c.lane_scan.has_new_bits = false;
  for (std::uint32_t i = 0; i < kMaxLanes / 64; ++i) {
    for (std::uint64_t bits = std::exchange(c.lane_scan.new_bits[i], 0); bits != 0;
         bits &= bits - 1) {
      const std::uint32_t index = i * 64 + static_cast<std::uint32_t>(std::countr_zero(bits));
      const LaneEntry& entry = c.segment->directory[index];
      const LaneState state = lane_state(entry.state.load(std::memory_order_acquire));
      if (state == LaneState::released) (void)open_if_unread(c, index);
      if (state != LaneState::active) continue;
      const InLane* lane = open_lane(c, index);
      // Without memory or descriptors scan_lanes() tries again.
      if (lane != nullptr && lane->peer == nullptr) (void)sender_unreachable(c, index);
    }
  }
}

void sleep_idle_lanes(Context& c) {
  if (c.awake_count <= kAlwaysAwake) return;
  InLane* idle[kScanPerStep];
  std::uint32_t count = 0;
  for (std::uint32_t i = 0; i < c.awake_count; ++i) {
    InLane& lane = *c.awake[i];
    if (lane.position != lane.control_position) {
      lane.control_position = lane.position;
      lane.idle_rounds = 0;
    } else if (++lane.idle_rounds >= c.idle_rounds && count < kScanPerStep &&
               count + kAlwaysAwake < c.awake_count) {
      idle[count++] = &lane;
    }
  }
  if (count == 0) return;
  for (std::uint32_t i = 0; i < count; ++i)
    idle[i]->control->asleep.store(1, std::memory_order_relaxed);
  const bool fenced = fence_peers(c);  // the check below finds packets of senders that did not see
                                       // `asleep`
  for (std::uint32_t i = 0; i < count; ++i) {
    InLane& lane = *idle[i];
    if (!fenced || has_packet(lane)) {
      lane.control->asleep.store(0, std::memory_order_relaxed);
      lane.idle_rounds = 0;
    } else {
      sleep_lane(c, lane);
      ++c.lanes_slept;
    }
  }
}

/// Whether polls have not yet received all packets of a peer that has ended.
bool has_unread_packets(Context& c, const Peer& peer) noexcept {
  if (peer.in == nullptr) {  // the peer may have rung since open_new_lanes()
    const std::uint32_t used = lanes_in_use(*c.segment);
    for (std::uint32_t i = 0; i < used && peer.in == nullptr; ++i) {
      const LaneState state =
          lane_state(c.segment->directory[i].state.load(std::memory_order_acquire));
      if ((state == LaneState::active || state == LaneState::released) && c.lanes[i] == nullptr &&
          same_gid(c.segment->directory[i].sender, peer.gid))
        (void)open_if_unread(c, i);
    }
  }
  InLane* lane = peer.in;
  if (lane == nullptr || !has_packet(*lane)) return false;
  wake_lane(c, *lane);  // the peer may have died before it rang
  return true;
}

void check_liveness(Context& c) {
  const std::uint64_t now = read_clock(c);
  if (now < c.liveness.next_check) return;
  c.liveness.next_check = now + c.clock.ticks(kLivenessInterval);
  epoll_event dead[16];
  const int n = c.liveness.watched == 0 ? 0 : epoll_wait(c.liveness.processes.get(), dead, 16, 0);
  for (int i = 0; i < n; ++i) {
    Peer& peer = *static_cast<Peer*>(dead[i].data.ptr);
    if (has_unread_packets(c, peer)) continue;
    (void)epoll_ctl(c.liveness.processes.get(), EPOLL_CTL_DEL, peer.pidfd.get(), nullptr);
    handle_peer_gone(peer);
  }
  // Checks peers that closed orderly or have no pidfd, a bounded number per call.
  for (std::size_t i = std::min<std::size_t>(kScanPerStep, c.peers.size()); i != 0; --i) {
    Peer& peer = *c.peers[c.liveness.next_peer++ % c.peers.size()];
    const bool dead_unwatched = !peer.same_process && !peer.pidfd && process_ended(peer.pid);
    const bool ended = peer.segment->closed.load(std::memory_order_acquire) != 0 || dead_unwatched;
    if (ended && !peer.gone && !has_unread_packets(c, peer)) handle_peer_gone(peer);
    if (peer.gone && peer.users == 0 &&
        (peer.in == nullptr || reclaim_lane(c, peer.in->index, true))) {
      detach_peer(c, peer);
      break;
    }
  }
}

}  // namespace

void control(Context& c) noexcept {
  wake_lanes(c);
  open_new_lanes(c);
  check_liveness(c);
  scan_lanes(c);
  sleep_idle_lanes(c);
}

/// Fails the queue pairs whose peers made a refused one-sided request.
static void handle_violations(Context& c) noexcept {
  for (const auto& peer : c.peers) {
    for (Qp& qp : peer->queue_pairs) {
      const std::uint64_t word = qp.entry->violation.load(std::memory_order_acquire);
      if (word == 0) continue;
      qp.entry->violation.store(0, std::memory_order_relaxed);
      const bool invalid = word == violation_word(qp.qp_num, qp.dest_qpn, Nak::invalid_request);
      if (!invalid && word != violation_word(qp.qp_num, qp.dest_qpn, Nak::access)) continue;
      if (qp.expected == kNeverExpected) continue;  // the queue pair has failed already
      if (!peer->gone) apply_peer_acks(*peer);  // packets that the peer received are not flushed
      stop_waiting(qp);
      run_send_queue(qp);  // completes an invalidation that waited for the peer
      enter_error(qp);
      raise_event(c, invalid ? IBV_EVENT_QP_REQ_ERR : IBV_EVENT_QP_ACCESS_ERR, &qp);
    }
  }
}

void wake_lanes(Context& c) noexcept {
  if (c.segment->doorbell.load(std::memory_order_relaxed) == 0) return;
  c.segment->doorbell.exchange(0);
  if (c.segment->violated.load(std::memory_order_relaxed) != 0) {
    c.segment->violated.exchange(0);
    handle_violations(c);
  }
  for (std::uint32_t i = 0; i < kMaxLanes / 64; ++i) {
    if (c.segment->doorbells[i].load(std::memory_order_relaxed) == 0) continue;
    for (std::uint64_t bits = c.segment->doorbells[i].exchange(0); bits != 0; bits &= bits - 1) {
      const std::uint32_t index = i * 64 + static_cast<std::uint32_t>(std::countr_zero(bits));
      if (c.lanes[index] != nullptr) {
        wake_lane(c, *c.lanes[index]);
      } else {
        c.lane_scan.new_bits[i] |= std::uint64_t{1} << (index % 64);
        c.lane_scan.has_new_bits = true;  // opening a lane allocates: control() does it
      }
    }
  }
}

}  // namespace spinwire::softverbs
