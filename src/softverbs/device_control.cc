#include "softverbs/device_control.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstddef>
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
// What one step does at most of what takes many microseconds, however many lanes peers claim and
// ring for.
constexpr std::uint32_t kOpensPerStep = 16;  // attaching a sender: a dozen system calls
constexpr std::uint32_t kTriesPerStep = 2;   // looking for a sender again
constexpr std::uint32_t kClearsPerStep = 2;  // zeroing a lane: 16 KiB and a system call
constexpr std::uint32_t kRingsPerPoll = 4;   // words of 64 doorbells
constexpr std::uint32_t kDoorbellWords = kMaxLanes / 64;
/// The longest claim of a living process, which takes microseconds unless the process is stopped.
constexpr Nanoseconds kLongestClaim = std::chrono::seconds(10);

enum class Sender : std::uint8_t { attached, gone, refused, not_now };

/// Tries to attach the sender of a lane.
Sender attach_sender(Context& c, std::uint32_t index, const ibv_gid& sender) noexcept {
  const std::optional<GidParts> parts = parse_gid(sender);
  if (!parts) return Sender::refused;
  std::string why;
  const Peer* peer = attach_peer(c, sender, why);
  if (peer == nullptr) {
    if (errno == ENODEV || errno == ENOENT || process_ended(parts->pid)) return Sender::gone;
    return errno == EDQUOT ? Sender::refused : Sender::not_now;
  }
  (void)open_lane(c, index);
  // A sender has one lane.
  return peer->in != nullptr && peer->in->index != index ? Sender::refused : Sender::attached;
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

/// Zeroes a lane that is not open and marks it free. The entry is claimed first: a lane that a
/// sender has claimed since `state` was read is not zeroed. False if the step has zeroed enough.
bool clear_lane(Context& c, std::uint32_t index, std::uint64_t state) noexcept {
  if (c.lane_scan.clears == 0) return false;
  LaneEntry& entry = c.segment->directory[index];
  if (!entry.state.compare_exchange_strong(state, lane_word(c.pid, LaneState::claimed)))
    return false;
  --c.lane_scan.clears;
  c.lane_scan.claimed_since[index] = 0;
  Lane& lane = c.segment->lanes[index];
  std::memset(static_cast<void*>(&lane), 0, offsetof(Lane, data));
  // The kernel takes the pages of the data back; they are zeroed when they are touched again.
  const LaneData data = data_of(*c.segment, index);
  if (madvise(data.begin, data.size, MADV_REMOVE) != 0) std::memset(data.begin, 0, data.size);
  entry.state.store(lane_word(0, LaneState::free), std::memory_order_release);
  return true;
}

/// Closes an open lane whose sender released it or is gone, once all its packets are read. What
/// peers write into the directory does not matter, except that the sender has released the lane.
bool close_lane(Context& c, InLane& lane, bool gone) noexcept {
  const std::uint32_t index = lane.index;
  const std::uint64_t state = c.segment->directory[index].state.load(std::memory_order_acquire);
  const bool lives = lane.peer != nullptr && lane.peer->given_up;
  const bool over = gone || state == lane_word(lane.pid, LaneState::released) ||
                    (lane.peer != nullptr && lane.peer->gone && !lives);
  if (!over || c.lane_scan.clears == 0) return false;
  if (has_packet(lane)) {
    wake_lane(c, lane);  // the sender was killed before it rang
    return false;
  }
  if (lane.batch_reported || lane.in_use || (lane.peer != nullptr && lane.peer->users != 0))
    return false;
  if (lane.peer != nullptr && lane.peer->in == &lane) {
    lane.peer->in = nullptr;
    lane.peer->out.direct_limit = 0;
  }
  sleep_lane(c, lane);
  const std::uint32_t pid = lane.pid;
  c.lanes[index].reset();
  // If the entry was marked free meanwhile, the lane may have a new sender; a step opens it.
  const bool taken = lane_pid(state) != pid && (lane_state(state) == LaneState::claimed ||
                                                lane_state(state) == LaneState::active);
  if (!taken) (void)clear_lane(c, index, state);
  return true;
}

/// Whether a claim was never finished. It takes microseconds; that of a dead process never ends.
bool claim_abandoned(Context& c, std::uint32_t index, std::uint64_t state) noexcept {
  std::uint64_t& since = c.lane_scan.claimed_since[index];
  const std::uint64_t now = read_clock(c);
  if (since == 0) since = std::max<std::uint64_t>(now, 1);
  if (now - since > c.clock.ticks(kLongestClaim)) return true;
  if (lane_pid(state) == c.pid) return false;
  --c.lane_scan.tries;
  return process_ended(lane_pid(state));
}

/// Frees a lane that is not open: its sender released it, is gone or refused, or never finished its
/// claim.
void reclaim_unopened(Context& c, std::uint32_t index) noexcept {
  const std::uint64_t state = c.segment->directory[index].state.load(std::memory_order_acquire);
  if (lane_state(state) != LaneState::claimed) c.lane_scan.claimed_since[index] = 0;
  switch (lane_state(state)) {
    case LaneState::free:
      return;
    case LaneState::claimed:
      if (claim_abandoned(c, index, state)) (void)clear_lane(c, index, state);
      return;
    case LaneState::released:
      if (!open_if_unread(c, index)) (void)clear_lane(c, index, state);
      return;
    case LaneState::active: {
      // The sender could not be attached when it rang, or died before it rang.
      --c.lane_scan.tries;
      const Sender sender = attach_sender(c, index, c.segment->directory[index].sender);
      if (c.lanes[index] != nullptr || sender == Sender::not_now) return;
      if (sender == Sender::refused || !open_if_unread(c, index)) (void)clear_lane(c, index, state);
      return;
    }
  }
  (void)clear_lane(c, index, state);  // a state that does not exist
}

void scan_lanes(Context& c) noexcept {
  LaneScan& scan = c.lane_scan;
  const std::uint32_t used = lanes_in_use(c);
  // The next step goes on where this one has done enough.
  for (std::uint32_t i = std::min(kScanPerStep, used); i != 0 && scan.tries != 0; --i) {
    if (scan.next >= used) scan.next = 0;
    const std::uint32_t index = scan.next++;
    InLane* const lane = c.lanes[index].get();
    if (lane == nullptr) {
      reclaim_unopened(c, index);
    } else if (lane->peer != nullptr) {
      (void)close_lane(c, *lane, false);
    } else {
      --scan.tries;
      const Sender sender = attach_sender(c, index, lane->sender);
      (void)close_lane(c, *lane, sender == Sender::gone || sender == Sender::refused);
    }
  }
}

/// Opens a lane that rang, and attaches its sender so that its end is noticed.
void open_new_lane(Context& c, std::uint32_t index) noexcept {
  if (c.lanes[index] != nullptr) return;
  const LaneEntry& entry = c.segment->directory[index];
  const LaneState state = lane_state(entry.state.load(std::memory_order_acquire));
  if (state == LaneState::released) (void)open_if_unread(c, index);
  if (state != LaneState::active) return;
  --c.lane_scan.opens;
  const Sender sender = attach_sender(c, index, entry.sender);
  if (sender == Sender::gone) (void)open_if_unread(c, index);
  // Without memory or descriptors scan_lanes() tries again.
  if (sender == Sender::not_now) (void)open_lane(c, index);
}

/// Opens the new lanes that rang. Takes them in turn, so that those who ring all the time keep no
/// other waiting.
void open_new_lanes(Context& c) noexcept {
  LaneScan& scan = c.lane_scan;
  if (!scan.has_new_bits) return;
  // The first word comes twice: from `next_new` on, and up to it.
  for (std::uint32_t words = 0; words <= kDoorbellWords; ++words) {
    const std::uint32_t word = scan.next_new / 64;
    std::uint64_t& bits = scan.new_bits[word];
    std::uint64_t ahead = bits & ~std::uint64_t{0} << (scan.next_new % 64);
    for (; ahead != 0; ahead &= ahead - 1) {
      if (scan.opens == 0) return;
      const auto bit = static_cast<std::uint32_t>(std::countr_zero(ahead));
      bits &= ~(std::uint64_t{1} << bit);
      const std::uint32_t index = word * 64 + bit;
      scan.next_new = (index + 1) % kMaxLanes;
      open_new_lane(c, index);
    }
    scan.next_new = (word + 1) % kDoorbellWords * 64;
  }
  scan.has_new_bits = false;
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
    const std::uint32_t used = lanes_in_use(c);
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

/// Fails the queue pairs whose peers made a refused one-sided request. Returns whether there is
/// one.
bool handle_violations(Context& c) noexcept {
  bool found = false;
  for (const auto& peer : c.peers) {
    for (Qp& qp : peer->queue_pairs) {
      const std::uint64_t word = qp.entry->violation.load(std::memory_order_acquire);
      if (word == 0) continue;
      qp.entry->violation.store(0, std::memory_order_relaxed);
      const bool invalid = word == violation_word(qp.qp_num, qp.dest_qpn, Nak::invalid_request);
      if (!invalid && word != violation_word(qp.qp_num, qp.dest_qpn, Nak::access)) continue;
      if (qp.expected == kNeverExpected) continue;  // the queue pair has failed already
      found = true;
      if (!peer->gone) apply_peer_acks(*peer);  // packets that the peer received are not flushed
      stop_waiting(qp);
      run_send_queue(qp);  // completes an invalidation that waited for the peer
      enter_error(qp);
      raise_event(c, invalid ? IBV_EVENT_QP_REQ_ERR : IBV_EVENT_QP_ACCESS_ERR, &qp);
    }
  }
  return found;
}

/// Looks for violations if a peer says that there are some. A peer that says so in vain makes polls
/// look a few times; then only liveness checks do.
void look_for_violations(Context& c) noexcept {
  if (c.lane_scan.violation_looks == 0) return;
  if (c.segment->violated.load(std::memory_order_relaxed) == 0) return;
  c.segment->violated.exchange(0);
  if (!handle_violations(c)) --c.lane_scan.violation_looks;
}

/// Fails the connections of a process that has ended; a step takes a number of its contexts.
void handle_process_ended(Context& c, PeerProcess& process) noexcept {
  std::uint32_t left = kOpensPerStep;
  bool all_gone = true;
  for (const auto& peer : c.peers) {
    if (peer->process != &process || (peer->gone && !peer->given_up)) continue;
    if (left == 0 || (!peer->gone && has_unread_packets(c, *peer))) {
      all_gone = false;
      continue;
    }
    --left;
    handle_peer_gone(*peer);
    end_given_up(*peer);
  }
  if (all_gone) unwatch_process(c, process);
}

/// Tries again to wake peers that could not be woken, which takes system calls.
void wake_again(Context& c) noexcept {
  std::uint32_t left = kOpensPerStep;
  for (std::size_t i = c.peers.size(); i != 0 && left != 0 && c.liveness.wakes_due != 0; --i) {
    Peer& peer = *c.peers[c.liveness.next_wake++ % c.peers.size()];
    if (!std::exchange(peer.wake_due, false)) continue;
    --c.liveness.wakes_due;
    --left;
    wake_sleeper(peer);
  }
}

void check_liveness(Context& c) noexcept {
  const std::uint64_t now = read_clock(c);
  if (now < c.liveness.next_check) return;
  c.liveness.next_check = now + c.clock.ticks(kLivenessInterval);
  c.lane_scan.violation_looks = kVainLooks;
  look_for_violations(c);
  epoll_event dead[16];
  const int n = c.liveness.watched == 0 ? 0 : epoll_wait(c.liveness.processes.get(), dead, 16, 0);
  for (int i = 0; i < n; ++i) {
    // The wake-up pipe, which is in the set too, has no process.
    if (dead[i].data.ptr != nullptr)
      handle_process_ended(c, *static_cast<PeerProcess*>(dead[i].data.ptr));
  }
  wake_again(c);
  // Checks peers that closed orderly or have no pidfd, a bounded number per call.
  for (std::size_t i = std::min<std::size_t>(kScanPerStep, c.peers.size()); i != 0; --i) {
    Peer& peer = *c.peers[c.liveness.next_peer++ % c.peers.size()];
    if (peer.overdue) give_up_peer(peer);
    const bool dead_unwatched =
        !peer.same_process && !peer.process->pidfd && process_ended(peer.pid);
    const bool ended = peer.segment->closed.load(std::memory_order_acquire) != 0 || dead_unwatched;
    if (ended && (!peer.gone || peer.given_up) && !has_unread_packets(c, peer)) {
      handle_peer_gone(peer);
      end_given_up(peer);
    }
    if (peer.gone && !peer.given_up && peer.users == 0 &&
        (peer.in == nullptr || close_lane(c, *peer.in, true))) {
      detach_peer(c, peer);
      break;
    }
  }
}

}  // namespace

void control(Context& c) noexcept {
  c.lane_scan.opens = kOpensPerStep;
  c.lane_scan.tries = kTriesPerStep;
  c.lane_scan.clears = kClearsPerStep;
  // So that another lane is the first to have objects mapped. A poll of all lanes leaves `turn`
  // behind the last one, which stands for the first.
  if (c.maps_left == 0 && c.awake_count != 0) c.turn = c.turn % c.awake_count + 1;
  c.maps_left = kMapsPerStep;
  wake_lanes(c);
  open_new_lanes(c);
  check_liveness(c);
  scan_lanes(c);
  sleep_idle_lanes(c);
}

void wake_lanes(Context& c) noexcept {
  if (c.segment->doorbell.load(std::memory_order_relaxed) == 0) return;
  c.segment->doorbell.exchange(0);
  look_for_violations(c);
  LaneScan& scan = c.lane_scan;
  std::uint32_t left = kRingsPerPoll;
  for (std::uint32_t words = 0; words < kDoorbellWords; ++words) {
    const std::uint32_t i = scan.next_ring;
    if (c.segment->doorbells[i].load(std::memory_order_relaxed) != 0) {
      if (left == 0) return c.segment->doorbell.store(1);  // the next poll goes on here
      --left;
      for (std::uint64_t bits = c.segment->doorbells[i].exchange(0); bits != 0; bits &= bits - 1) {
        const std::uint32_t index = i * 64 + static_cast<std::uint32_t>(std::countr_zero(bits));
        if (c.lanes[index] != nullptr) {
          wake_lane(c, *c.lanes[index]);
        } else {
          scan.new_bits[i] |= std::uint64_t{1} << (index % 64);
          scan.has_new_bits = true;  // opening a lane allocates: control() does it
        }
      }
    }
    scan.next_ring = (i + 1) % kDoorbellWords;
  }
}

}  // namespace spinwire::softverbs
