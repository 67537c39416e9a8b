#include "softverbs/lane/attached_peer.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "base/error.h"
#include "softverbs/context_gid.h"
#include "softverbs/device_control.h"
#include "softverbs/lane/local_segments.h"
#include "softverbs/memory/peer_file.h"
#include "softverbs/queues.h"
#include "softverbs/ud/ud_datagram.h"

namespace spinwire::softverbs {
namespace {

/// Explains the kernel's refusal.
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
    why = reach_error(parts, error);
    errno = error;
    return nullptr;
  }
  if (!file.fd || file.size < sizeof(Segment)) {
    why = base::format("process {} has no softverbs device of this version under that descriptor",
                       parts.pid);
    errno = ENODEV;
    return nullptr;
  }
  void* at = mmap(nullptr, sizeof(Segment), PROT_READ | PROT_WRITE, MAP_SHARED, file.fd.get(), 0);
  if (at == MAP_FAILED) {
    why = base::errno_text(errno);
    return nullptr;
  }
  auto* segment = static_cast<Segment*>(at);
  if (segment->magic != kSegmentMagic || segment->version != kSegmentVersion ||
      !same_gid(segment->gid, gid) || segment->closed.load(std::memory_order_acquire) != 0) {
    munmap(at, sizeof(Segment));
    why = base::format("process {} has closed that device, or is another process", parts.pid);
    errno = ENODEV;
    return nullptr;
  }
  return segment;
}

/// The segment of a context of this process: its owner's own mapping.
Segment* share_segment(Peer& peer, std::string& why) {
  peer.local = find_local_segment(peer.gid);
  auto* segment = peer.local != nullptr ? reinterpret_cast<Segment*>(peer.local->data()) : nullptr;
  if (segment == nullptr || segment->closed.load(std::memory_order_acquire) != 0) {
    why = "this process has closed that device, or is another process";
    errno = ENODEV;
    return nullptr;
  }
  return segment;
}

void unmap_segment(Peer& peer) noexcept {
  if (peer.segment != nullptr && peer.local == nullptr) munmap(peer.segment, sizeof(Segment));
  peer.segment = nullptr;
  peer.local.reset();
}

/// Claims a free entry of the peer's lane directory; kMaxLanes if there is none.
std::uint32_t claim_lane(Segment& segment, const Segment& self) {
  for (std::uint32_t i = 0; i < kMaxLanes; ++i) {
    LaneEntry& entry = segment.directory[i];
    std::uint64_t expected = entry.state.load(std::memory_order_relaxed);
    if (lane_state(expected) != LaneState::free) continue;
    if (!entry.state.compare_exchange_strong(expected, lane_word(self.pid, LaneState::claimed)))
      continue;
    std::uint32_t used = segment.lanes_used.load(std::memory_order_relaxed);
    while (used <= i && !segment.lanes_used.compare_exchange_weak(used, i + 1)) {
    }
    entry.sender = self.gid;
    entry.sender_shown = self.shown_gid;
    entry.state.store(lane_word(self.pid, LaneState::active), std::memory_order_release);
    return i;
  }
  return kMaxLanes;
}

void populate(void* address, std::size_t length) {
#ifdef MADV_POPULATE_WRITE
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t from = reinterpret_cast<std::uintptr_t>(address) & ~(page - 1);
  const std::uintptr_t to = reinterpret_cast<std::uintptr_t>(address) + length;
  // Only saves page faults later: a refusal is no error.
  (void)madvise(reinterpret_cast<void*>(from), to - from, MADV_POPULATE_WRITE);
#else
  (void)address;
  (void)length;
#endif
}

void watch_process(Context& c, Peer& peer) {
  peer.pidfd.reset(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = &peer;
  // The process ended, or a limit is reached: control() then checks the process itself.
  if (peer.pidfd && epoll_ctl(c.liveness.get(), EPOLL_CTL_ADD, peer.pidfd.get(), &event) != 0)
    peer.pidfd.reset();
}

bool open_out_lane(Context& c, Peer& peer, std::string& why) {
  const std::uint32_t lane = claim_lane(*peer.segment, *c.segment);
  if (lane == kMaxLanes) {
    why = base::format("the peer's device has all of its {} lanes in use", kMaxLanes);
    errno = ENOSPC;
    return false;
  }
  OutLane& out = peer.out;
  out.index = lane;
  out.lines = peer.segment->lanes[lane].lines;
  out.control = &peer.segment->lanes[lane].control;
  populate(&peer.segment->lanes[lane], sizeof(Lane));
  ring_doorbell(peer);
  return true;
}

Peer* attach(Context& c, const ibv_gid& gid, std::string& why) {
  for (auto& peer : c.peers) {
    if (same_gid(peer->gid, gid) && !peer->gone) return peer.get();
  }
  const std::optional<GidParts> parts = parse_gid(gid);
  if (!parts) {
    why = "the GID is not of a softverbs device; both ends must use the same kind of device";
    errno = EINVAL;
    return nullptr;
  }
  if (c.peers.size() == kMaxLanes) {
    why = base::format("this device has the maximum of {} peers", kMaxLanes);
    errno = ENOSPC;
    return nullptr;
  }
  auto peer = std::make_unique<Peer>();
  peer->context = &c;
  peer->gid = gid;
  peer->pid = parts->pid;
  peer->same_process = parts->pid == c.pid;
  peer->wait_budget = c.datagram_timeout;
  peer->out.in_flight = std::make_unique<InFlight[]>(kInFlight);
  c.peers.reserve(c.peers.size() + 1);
  if (!peer->same_process) watch_process(c, *peer);
  // After the pidfd: the nonce in the segment then also vouches for the process behind it.
  peer->segment = peer->same_process ? share_segment(*peer, why) : map_segment(*parts, gid, why);
  if (peer->segment == nullptr) return nullptr;
  if (!open_out_lane(c, *peer, why)) {
    const int error = errno;
    unmap_segment(*peer);
    errno = error;
    return nullptr;
  }
  Peer* attached = peer.get();
  c.watched += peer->pidfd ? 1 : 0;
  c.peers.push_back(std::move(peer));
  const std::uint32_t used = lanes_in_use(*c.segment);
  for (std::uint32_t i = 0; i < used; ++i) {
    const LaneEntry& entry = c.segment->directory[i];
    if (lane_state(entry.state.load(std::memory_order_acquire)) == LaneState::active &&
        same_gid(entry.sender, gid)) {
      open_lane(c, i);
    }
  }
  return attached;
}

}  // namespace

bool is_ending(std::uint32_t pid) {
  const base::UniqueFd fd(
      ::open(base::format("/proc/{}/statm", pid).c_str(), O_RDONLY | O_CLOEXEC));
  char size[2] = {};  // "0 " where there is no memory
  return !fd || (read(fd.get(), size, sizeof size) == 2 && size[0] == '0' && size[1] == ' ');
}

bool process_ended(std::uint32_t pid) noexcept {
  const base::UniqueFd process(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (!process) return errno == ESRCH;
  pollfd ended{process.get(), POLLIN, 0};
  return poll(&ended, 1, 0) == 1;
}

Peer* attach_peer(Context& c, const ibv_gid& gid, std::string& why) noexcept {
  try {
    return attach(c, gid, why);
  } catch (const std::bad_alloc&) {
    errno = ENOMEM;
    return nullptr;
  }
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
    lane.control = &c.segment->lanes[index].control;
    lane.next = lane.lines;
    lane.end = lane.lines + kLaneLines;
    lane.mark = lane_mark(0);
    lane.route = plain_route(c.segment->directory[index].sender_shown, c.segment->shown_gid);
    populate(&c.segment->lanes[index], sizeof(Lane));
    wake_lane(c, lane);
  }
  InLane& lane = *c.lanes[index];
  if (lane.peer == nullptr) {
    for (auto& peer : c.peers) {
      // One lane for each peer, whatever the directory says: only that one is released with the
      // peer.
      if (!peer->gone && peer->in == nullptr &&
          same_gid(peer->gid, c.segment->directory[index].sender)) {
        lane.peer = peer.get();
        peer->in = &lane;
      }
    }
  }
  return &lane;
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
}

void handle_peer_gone(Peer& peer) noexcept {
  if (peer.gone) return;
  peer.gone = true;  // stops sending
  peer.out.direct_limit = 0;
  for (Qp* qp = peer.queue_pairs; qp != nullptr; qp = qp->next_of_peer) qp->open = false;
  acknowledge(peer);
  while (peer.stalled != nullptr) unstall(*peer.stalled);
  for (Qp* qp = peer.queue_pairs; qp != nullptr; qp = qp->next_of_peer) {
    if (qp->sq_tail == qp->sq_head) continue;
    stop_waiting(*qp);
    pump(*qp);  // work requests that need no peer, such as a waiting invalidation
    if (qp->sq_tail != qp->sq_head && !qp->waiting) handle_unreachable(*qp);
  }
  peer.out.in_flight_head = peer.out.in_flight_tail;
}

void detach_peer(Context& c, Peer& peer) noexcept {
  publish_held(c);
  if (peer.pidfd) {
    (void)epoll_ctl(c.liveness.get(), EPOLL_CTL_DEL, peer.pidfd.get(), nullptr);
    --c.watched;
  }
  if (peer.in != nullptr) peer.in->peer = nullptr;
  for (std::uint32_t i = 0; i < c.pending.unacked; ++i) {
    if (c.unacked[i] == &peer) c.unacked[i] = c.unacked[--c.pending.unacked];
  }
  for (std::uint32_t i = 0; i < c.pending.acks_due; ++i) {
    if (c.acks_due[i] == &peer) c.acks_due[i] = c.acks_due[--c.pending.acks_due];
  }
  for (MappedObject& object : peer.objects) {
    if (object.base != nullptr) munmap(object.base, object.size);
  }
  // The peer sees the lane released and takes it back.
  peer.segment->directory[peer.out.index].state.store(lane_word(c.pid, LaneState::released),
                                                      std::memory_order_release);
  unmap_segment(peer);
  c.peers.erase(std::find_if(c.peers.begin(), c.peers.end(),
                             [&](const auto& p) { return p.get() == &peer; }));
}

}  // namespace spinwire::softverbs
