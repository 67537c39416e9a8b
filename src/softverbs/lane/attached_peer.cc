#include "softverbs/lane/attached_peer.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#include "base/error.h"
#include "base/log_message.h"
#include "softverbs/context_gid.h"
#include "softverbs/device_control.h"
#include "softverbs/lane/local_segments.h"
#include "softverbs/memory/peer_file.h"
#include "softverbs/memory/remote_access.h"
#include "softverbs/queues.h"
#include "softverbs/refusal.h"
#include "softverbs/ud/ud_datagram.h"

namespace spinwire::softverbs {
namespace {

/// Text for the kernel's refusal.
std::string reach_error(const GidParts& parts, int error) {
  switch (error) {
    case ENOENT:
    case ESRCH:
      return base::format(
          "process {} is gone, or has closed its device, or lives in another PID namespace",
          parts.pid);
    case EACCES:
    case EPERM:
      return base::format(
          "process {} belongs to another user, or has dropped its dumpable flag or gained "
          "capabilities; peers must run as one user",
          parts.pid);
    default:
      return base::format("process {}: {}", parts.pid, base::errno_text(error));
  }
}

Segment* map_segment(const GidParts& parts, const ibv_gid& gid, std::string& why) {
  const PeerFile file = open_peer_file(parts.pid, parts.fd, PeerFileKind::ordinary_pages);
  if (!file.fd && errno != ENODEV) {
    const int error = errno == EACCES && is_ending(parts.pid) ? ESRCH : errno;
    return refuse_with(error, why, reach_error(parts, error));
  }
  if (!file.fd || file.size < sizeof(Segment))
    return refuse_with(
        ENODEV, why,
        base::format("process {} has no softverbs device of this version under that descriptor",
                     parts.pid));
  void* at = mmap(nullptr, sizeof(Segment), PROT_READ | PROT_WRITE, MAP_SHARED, file.fd.get(), 0);
  if (at == MAP_FAILED) {
    const int error = errno;
    return refuse_with(error, why, base::errno_text(error));
  }
  auto* segment = static_cast<Segment*>(at);
  if (segment->magic != kSegmentMagic || segment->version != kSegmentVersion ||
      !same_gid(segment->gid, gid) || segment->closed.load(std::memory_order_acquire) != 0) {
    munmap(at, sizeof(Segment));
    return refuse_with(
        ENODEV, why,
        base::format("process {} has closed that device, or is another process", parts.pid));
  }
  return segment;
}

/// The segment of a context of this process: shares the owner's mapping.
Segment* share_segment(Peer& peer, std::string& why) {
  const LocalSegment& local = peer.local = find_local_segment(peer.gid);
  const bool whole = local.segment != nullptr && local.regions != nullptr &&
                     local.queue_pairs != nullptr && local.accesses != nullptr &&
                     local.wake_pipe != nullptr;
  auto* segment = whole ? reinterpret_cast<Segment*>(local.segment->data()) : nullptr;
  if (segment == nullptr || segment->closed.load(std::memory_order_acquire) != 0)
    return refuse_with(ENODEV, why, "this process has closed that device, or is another process");
  return segment;
}

void unmap_segment(Peer& peer) noexcept {
  if (peer.segment != nullptr && !peer.same_process) munmap(peer.segment, sizeof(Segment));
  peer.segment = nullptr;
  peer.local = {};
}

/// Whether a lane has been used since it was zeroed.
bool was_used(const Lane& lane) noexcept {
  return lane.lines->word.load(std::memory_order_relaxed) != 0 ||
         lane.control.head.load(std::memory_order_relaxed) != 0 ||
         lane.control.access_serial.load(std::memory_order_relaxed) != 0;
}

/// Whether a process has as many lanes in a segment as it may.
bool has_its_share(const Segment& segment, std::uint32_t pid) noexcept {
  std::uint32_t count = 0;
  const std::uint32_t used = std::min(segment.lanes_used.load(), kMaxLanes);
  for (std::uint32_t i = 0; i < used; ++i) {
    const std::uint64_t state = segment.directory[i].state.load(std::memory_order_relaxed);
    count += lane_state(state) != LaneState::free && lane_pid(state) == pid ? 1 : 0;
  }
  return count >= kLanesPerProcess;
}

/// Claims that may be in vain while a lane is sought. Each touches pages of the peer's segment, and
/// the owner alone leaves no lane free that is used.
constexpr std::uint32_t kVainClaims = 4;

/// Claims a free entry of the peer's lane directory; kMaxLanes if there is none, or if the
/// directory often says free of a lane that is used.
std::uint32_t claim_lane(Segment& segment, const Context& self) {
  const std::uint64_t claimed = lane_word(self.pid, LaneState::claimed);
  std::uint32_t vain = 0;
  for (std::uint32_t i = 0; i < kMaxLanes && vain < kVainClaims; ++i) {
    LaneEntry& entry = segment.directory[i];
    std::uint64_t expected = entry.state.load(std::memory_order_relaxed);
    if (lane_state(expected) != LaneState::free) continue;
    if (!entry.state.compare_exchange_strong(expected, claimed)) continue;
    std::uint32_t used = segment.lanes_used.load(std::memory_order_relaxed);
    while (used <= i && !segment.lanes_used.compare_exchange_weak(used, i + 1)) {
    }
    entry.sender = self.gid;
    entry.sender_shown = self.shown_gid;
    // Somebody may have marked a lane free that has a sender: the owner decides what it is.
    const LaneState next = was_used(segment.lanes[i]) ? LaneState::released : LaneState::active;
    expected = claimed;
    // The owner takes a claim back that takes too long.
    if (entry.state.compare_exchange_strong(expected, lane_word(self.pid, next)) &&
        next == LaneState::active)
      return i;
    ++vain;
  }
  return kMaxLanes;
}

void populate(void* address, std::size_t length) {
#ifdef MADV_POPULATE_WRITE
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t from = reinterpret_cast<std::uintptr_t>(address) & ~(page - 1);
  const std::uintptr_t to = reinterpret_cast<std::uintptr_t>(address) + length;
  // Only saves later page faults, so a refusal is no error.
  (void)madvise(reinterpret_cast<void*>(from), to - from, MADV_POPULATE_WRITE);
#else
  (void)address;
  (void)length;
#endif
}

/// Populates the part of a lane that every pair uses, when it is opened. The rest is allocated when
/// touched.
void populate_lane(Segment& segment, std::uint32_t index) {
  populate(&segment.lanes[index], offsetof(Lane, data));
  populate(data_of(segment, index).begin, kLeastData);
}

/// The record of the living process with this pid.
PeerProcess& find_process(Context& c, std::uint32_t pid) {
  std::erase_if(c.liveness.all, [](const auto& each) { return each->users == 0; });
  for (const auto& known : c.liveness.all) {
    if (known->pid == pid && known->pidfd && !has_ended(known->pidfd)) return *known;
  }
  auto& made = c.liveness.all.emplace_back(std::make_unique<PeerProcess>());
  made->pid = pid;
  made->pidfd.reset(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  return *made;
}

/// Reports the process's end to control(), once one of its contexts is attached: a forked child may
/// hold the pidfd, and with it the event, of a record that is dropped without unwatch_process().
void watch_process(Context& c, PeerProcess& process) noexcept {
  if (process.watched || !process.pidfd) return;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = &process;
  // The process has ended, or a limit is reached: control() then checks the process itself.
  process.watched =
      epoll_ctl(c.liveness.processes.get(), EPOLL_CTL_ADD, process.pidfd.get(), &event) == 0;
  if (!process.watched) process.pidfd.reset();
  c.liveness.watched += process.watched ? 1 : 0;
}

/// Drops the record of a process without peers.
void drop_process(Context& c, PeerProcess* process) noexcept {
  if (process == nullptr || process->users != 0) return;
  unwatch_process(c, *process);
  std::erase_if(c.liveness.all, [&](const auto& each) { return each.get() == process; });
}

/// Marks our accesses where the peer looks for them: in its lane, or in private memory if it is of
/// this process.
void mark_accesses(const Context& c, Peer& peer) {
  peer.out.access_serial = &peer.out.control->access_serial;
  if (!peer.same_process) return;
  peer.local_access = std::make_shared<LocalAccess>();
  peer.local_access->from = c.gid;
  peer.out.access_serial = &peer.local_access->serial;
  LocalAccesses& there = *peer.local.accesses;
  const std::lock_guard<std::mutex> lock(there.mutex);
  there.all.push_back(peer.local_access);
}

void unmark_accesses(Peer& peer) noexcept {
  if (peer.local_access == nullptr) return;
  LocalAccesses& there = *peer.local.accesses;
  const std::lock_guard<std::mutex> lock(there.mutex);
  std::erase(there.all, peer.local_access);
}

bool open_out_lane(Context& c, Peer& peer, std::string& why) {
  if (!peer.same_process && has_its_share(*peer.segment, c.pid))
    return refuse_with(ENOSPC, why,
                       base::format("this process has {} lanes in the peer's device, the most that "
                                    "one process may have",
                                    kLanesPerProcess)),
           false;
  const std::uint32_t lane = claim_lane(*peer.segment, c);
  if (lane == kMaxLanes)
    return refuse_with(ENOSPC, why,
                       base::format("the peer's device has no free lane among its {}, or says so "
                                    "of lanes that are used",
                                    kMaxLanes)),
           false;
  OutLane& out = peer.out;
  out.index = lane;
  out.lines = peer.segment->lanes[lane].lines;
  const LaneData data = data_of(*peer.segment, lane);
  out.data = data.begin;
  out.data_capacity = data.size;
  out.control = &peer.segment->lanes[lane].control;
  return true;
}

/// Gives a lane back that we claimed. Its owner sees that it is released and reclaims it.
void release_out_lane(const Context& c, Peer& peer) noexcept {
  std::uint64_t ours = lane_word(c.pid, LaneState::active);
  peer.segment->directory[peer.out.index].state.compare_exchange_strong(
      ours, lane_word(c.pid, LaneState::released));
}

/// Reaches a context's segment and claims a lane in it.
bool reach(Context& c, Peer& peer, const GidParts& parts, std::string& why) {
  peer.segment = peer.same_process ? share_segment(peer, why) : map_segment(parts, peer.gid, why);
  if (peer.segment == nullptr) return false;
  int error = 0;
  if (open_out_lane(c, peer, why)) {
    try {
      mark_accesses(c, peer);
      return true;
    } catch (const std::bad_alloc&) {
      release_out_lane(c, peer);
      error = ENOMEM;
    }
  } else {
    error = errno;
  }
  unmap_segment(peer);
  errno = error;
  return false;
}

Peer* attach(Context& c, const ibv_gid& gid, std::string& why) {
  for (auto& peer : c.peers) {
    if (!same_gid(peer->gid, gid) || (peer->gone && !peer->given_up)) continue;
    if (!peer->given_up) return peer.get();
    return refuse_with(
        ESTALE, why,
        base::format("process {} was given up, because it stayed in one access to our memory for "
                     "too long; it must open its device anew",
                     peer->pid));
  }
  const std::optional<GidParts> parts = parse_gid(gid);
  if (!parts)
    return refuse_with(
        EINVAL, why,
        "the GID is not of a softverbs device; both ends must use the same kind of device");
  if (c.peers.size() == kMaxLanes)
    return refuse_with(ENOSPC, why,
                       base::format("this device has the maximum of {} peers", kMaxLanes));
  auto peer = std::make_unique<Peer>();
  peer->context = &c;
  peer->gid = gid;
  peer->pid = parts->pid;
  peer->same_process = parts->pid == c.pid;
  peer->turns.budget = c.datagram_timeout;
  peer->out.in_flight = std::make_unique<InFlight[]>(kInFlight);
  peer->out.placed = std::make_unique<PlacedBytes[]>(kLaneLines);
  c.peers.reserve(c.peers.size() + 1);
  // Its pidfd is opened before the segment is mapped: a matching nonce then proves that the pidfd
  // is of the same process.
  if (!peer->same_process) peer->process = &find_process(c, parts->pid);
  const bool too_many = peer->process != nullptr && peer->process->users >= kLanesPerProcess;
  if (too_many) {
    refuse_with(EDQUOT, why,
                base::format("process {} has {} contexts attached, the most that one process may "
                             "have",
                             parts->pid, kLanesPerProcess));
  }
  if (too_many || !reach(c, *peer, *parts, why)) {
    const int error = errno;
    drop_process(c, peer->process);
    return refuse_with(error);
  }
  populate_lane(*peer->segment, peer->out.index);
  ring_doorbell(*peer);
  Peer* attached = peer.get();
  if (peer->process != nullptr) {
    ++peer->process->users;
    watch_process(c, *peer->process);
  }
  c.peers.push_back(std::move(peer));
  open_in_lane(c, *attached);
  return attached;
}

}  // namespace

bool is_ending(std::uint32_t pid) {
  const base::UniqueFd fd(
      ::open(base::format("/proc/{}/statm", pid).c_str(), O_RDONLY | O_CLOEXEC));
  char size[2] = {};  // "0 " without memory
  return !fd || (read(fd.get(), size, sizeof size) == 2 && size[0] == '0' && size[1] == ' ');
}

bool has_ended(const base::UniqueFd& pidfd) noexcept {
  pollfd ended{pidfd.get(), POLLIN, 0};
  return ::poll(&ended, 1, 0) == 1;
}

bool process_ended(std::uint32_t pid) noexcept {
  const base::UniqueFd process(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  // EINVAL: no process can have this pid, such as 0.
  if (!process) return errno == ESRCH || errno == EINVAL;
  return has_ended(process);
}

void unwatch_process(Context& c, PeerProcess& process) noexcept {
  if (!std::exchange(process.watched, false)) return;
  (void)epoll_ctl(c.liveness.processes.get(), EPOLL_CTL_DEL, process.pidfd.get(), nullptr);
  --c.liveness.watched;
}

std::uint32_t lanes_in_use(Context& c) noexcept {
  return c.lane_scan.used = std::max(c.lane_scan.used, lanes_in_use(*c.segment));
}

Peer* attach_peer(Context& c, const ibv_gid& gid, std::string& why) noexcept {
  return or_no_memory([&] { return attach(c, gid, why); });
}

InLane* open_lane(Context& c, std::uint32_t index) noexcept {
  if (c.lanes[index] == nullptr) {
    try {
      c.lanes[index] = std::make_unique<InLane>();
    } catch (const std::bad_alloc&) {
      return nullptr;
    }
    InLane& lane = *c.lanes[index];
    lane.index = index;
    lane.serial = ++c.lane_serial;
    lane.lines = c.segment->lanes[index].lines;
    lane.data = data_of(*c.segment, index);
    lane.control = &c.segment->lanes[index].control;
    lane.next = lane.lines;
    lane.end = lane.lines + kLaneLines;
    lane.mark = lane_mark(0);
    const LaneEntry& entry = c.segment->directory[index];
    lane.pid = lane_pid(entry.state.load(std::memory_order_acquire));
    lane.sender = entry.sender;
    lane.route = plain_route(entry.sender_shown, c.shown_gid);
    populate_lane(*c.segment, index);
    wake_lane(c, lane);
  }
  InLane& lane = *c.lanes[index];
  if (lane.peer == nullptr) {
    for (auto& peer : c.peers) {
      // Links one lane per peer, even if the directory names the peer twice: only that lane is
      // released with the peer.
      if (!peer->gone && peer->in == nullptr && same_gid(peer->gid, lane.sender)) {
        lane.peer = peer.get();
        lane.opposite = &peer->out;
        peer->in = &lane;
      }
    }
  }
  return &lane;
}

void open_in_lane(Context& c, const Peer& peer) noexcept {
  const std::uint32_t used = lanes_in_use(c);
  for (std::uint32_t i = 0; i < used && peer.in == nullptr; ++i) {
    const LaneEntry& entry = c.segment->directory[i];
    if (lane_state(entry.state.load(std::memory_order_acquire)) == LaneState::active &&
        same_gid(entry.sender, peer.gid))
      (void)open_lane(c, i);
  }
}

void sleep_lane(Context& c, InLane& lane) noexcept {
  for (std::uint32_t i = 0; i < c.awake_count; ++i) {
    if (c.awake[i] != &lane) continue;
    c.awake[i] = c.awake[--c.awake_count];
    lane.awake = false;
    return;
  }
}

void wake_lane(Context& c, InLane& lane) noexcept {
  lane.control->asleep.store(0, std::memory_order_relaxed);
  lane.idle_rounds = 0;
  if (lane.awake) return;
  lane.awake = true;
  c.awake[c.awake_count++] = &lane;
}

void ring_doorbell(Peer& peer) noexcept {
  const std::uint32_t lane = peer.out.index;
  peer.segment->doorbells[lane / 64].fetch_or(std::uint64_t{1} << (lane % 64));
  peer.segment->doorbell.store(1);
  wake_sleeper(peer);
}

void wake_sleeper(Peer& peer) noexcept {
  Segment& there = *peer.segment;
  std::uint64_t serial = there.sleep_serial.load();  // after what it is woken for: see arm_device()
  if (serial == 0) return;
  if (peer.same_process) {
    peer.local.wake_pipe->write();
  } else if (!peer.wake.write(peer.pid, there)) {
    // The number stays, so that other peers wake it.
    if (!peer.wake.is_refused() && !std::exchange(peer.wake_due, true))
      ++peer.context->liveness.wakes_due;
    return;
  }
  there.sleep_serial.compare_exchange_strong(serial, 0);
}

void announce_end(Peer& peer) noexcept {
  if (peer.segment->sleep_serial.load() != 0) return wake_sleeper(peer);
  if (peer.same_process) return peer.local.wake_pipe->write();
  if (peer.segment->wake_inode.load(std::memory_order_relaxed) != 0)
    (void)peer.wake.write(peer.pid, *peer.segment);
}

void handle_peer_gone(Peer& peer) noexcept {
  if (peer.gone) return;
  peer.gone = true;  // stops sending
  ++peer.context->liveness.gone;
  peer.out.direct_limit = 0;
  for (Qp& qp : peer.queue_pairs) qp.open = false;
  apply_peer_acks(peer);
  while (!peer.stalled.empty()) unstall(*peer.stalled.front());
  for (Qp& qp : peer.queue_pairs) {
    if (qp.direct_end > peer.out.head) fail_direct_messages(qp);
    complete_what_ran_ahead(qp);  // behind packets of others that the peer has not taken
    if (qp.sq_tail == qp.sq_head) continue;
    stop_waiting(qp);
    run_send_queue(qp);  // runs work requests that need no peer, such as a waiting invalidation
    if (qp.sq_tail != qp.sq_head && !qp.waiting) handle_unreachable(qp);
  }
  peer.out.in_flight_head = peer.out.in_flight_tail;
}

void give_up_peer(Peer& peer) noexcept {
  if (peer.gone) return;
  base::log(LogLevel::warning,
            "softverbs: process {} has been in one access to our memory for too long; its "
            "connections end",
            peer.pid);
  peer.given_up = true;
  handle_peer_gone(peer);
  --peer.context->liveness.gone;  // nothing ends it but the end of its process
}

void end_given_up(Peer& peer) noexcept {
  if (std::exchange(peer.given_up, false)) ++peer.context->liveness.gone;
}

void detach_peer(Context& c, Peer& peer) noexcept {
  publish_held(c);
  if (peer.gone && !peer.given_up) --c.liveness.gone;
  if (peer.wake_due) --c.liveness.wakes_due;
  if (peer.in != nullptr) {
    peer.in->peer = nullptr;
    peer.in->opposite = nullptr;
  }
  const auto unlist = [&peer](std::unique_ptr<Peer*[]>& list, std::uint16_t& count) {
    for (std::uint32_t i = 0; i < count; ++i) {
      if (list[i] == &peer) list[i] = list[--count];
    }
  };
  unlist(c.unacked, c.pending.unacked);
  unlist(c.acks_due, c.pending.acks_due);
  unmap_objects(peer);
  unmark_accesses(peer);
  release_out_lane(c, peer);
  unmap_segment(peer);
  if (peer.process != nullptr) {
    --peer.process->users;
    drop_process(c, peer.process);
  }
  c.peers.erase(std::find_if(c.peers.begin(), c.peers.end(),
                             [&](const auto& p) { return p.get() == &peer; }));
}

}  // namespace spinwire::softverbs
