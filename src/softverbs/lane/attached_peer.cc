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
#include <utility>

#include "base/error.h"
#include "softverbs/context_gid.h"
#include "softverbs/device_control.h"
#include "softverbs/lane/local_segments.h"
#include "softverbs/memory/peer_file.h"
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
  auto* segment = local.segment != nullptr && local.regions != nullptr
                      ? reinterpret_cast<Segment*>(local.segment->data())
                      : nullptr;
  if (segment == nullptr || segment->closed.load(std::memory_order_acquire) != 0)
    return refuse_with(ENODEV, why, "this process has closed that device, or is another process");
  return segment;
}

void unmap_segment(Peer& peer) noexcept {
  if (peer.segment != nullptr && !peer.same_process) munmap(peer.segment, sizeof(Segment));
  peer.segment = nullptr;
  peer.local = {};
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

/// The part of a lane that is populated when it is opened; every pair uses it. The rest is
/// allocated when touched.
constexpr std::size_t kPopulated = offsetof(Lane, data) + kLeastData;

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

/// Reports the process's end to control(). The peer must stay where it is.
void watch_process(Context& c, Peer& peer) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = &peer;
  // The process has ended, or a limit is reached: control() then checks the process itself.
  if (peer.pidfd &&
      epoll_ctl(c.liveness.processes.get(), EPOLL_CTL_ADD, peer.pidfd.get(), &event) != 0)
    peer.pidfd.reset();
}

bool open_out_lane(Context& c, Peer& peer, std::string& why) {
  const std::uint32_t lane = claim_lane(*peer.segment, *c.segment);
  if (lane == kMaxLanes)
    return refuse_with(ENOSPC, why,
                       base::format("the peer's device has all of its {} lanes in use", kMaxLanes)),
           false;
  OutLane& out = peer.out;
  out.index = lane;
  out.lines = peer.segment->lanes[lane].lines;
  out.data = peer.segment->lanes[lane].data;
  out.control = &peer.segment->lanes[lane].control;
  populate(&peer.segment->lanes[lane], kPopulated);
  ring_doorbell(peer);
  return true;
}

Peer* attach(Context& c, const ibv_gid& gid, std::string& why) {
  for (auto& peer : c.peers) {
    if (same_gid(peer->gid, gid) && !peer->gone) return peer.get();
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
  // Opened before the segment is mapped: a matching nonce then proves that the pidfd is of the same
  // process.
  if (!peer->same_process)
    peer->pidfd.reset(static_cast<int>(syscall(SYS_pidfd_open, peer->pid, 0)));
  peer->segment = peer->same_process ? share_segment(*peer, why) : map_segment(*parts, gid, why);
  if (peer->segment == nullptr) return nullptr;
  if (!open_out_lane(c, *peer, why)) {
    const int error = errno;
    unmap_segment(*peer);
    return refuse_with(error);
  }
  Peer* attached = peer.get();
  // Only now: a forked child that holds the pidfd keeps the event of a peer that is given up.
  watch_process(c, *attached);
  c.liveness.watched += peer->pidfd ? 1 : 0;
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
  char size[2] = {};  // "0 " without memory
  return !fd || (read(fd.get(), size, sizeof size) == 2 && size[0] == '0' && size[1] == ' ');
}

bool process_ended(std::uint32_t pid) noexcept {
  const base::UniqueFd process(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (!process) return errno == ESRCH;
  pollfd ended{process.get(), POLLIN, 0};
  return poll(&ended, 1, 0) == 1;
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
    lane.data = c.segment->lanes[index].data;
    lane.control = &c.segment->lanes[index].control;
    lane.next = lane.lines;
    lane.end = lane.lines + kLaneLines;
    lane.mark = lane_mark(0);
    lane.route = plain_route(c.segment->directory[index].sender_shown, c.segment->shown_gid);
    populate(&c.segment->lanes[index], kPopulated);
    wake_lane(c, lane);
  }
  InLane& lane = *c.lanes[index];
  if (lane.peer == nullptr) {
    for (auto& peer : c.peers) {
      // Links one lane per peer, even if the directory names the peer twice: only that lane is
      // released with the peer.
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
  for (Qp& qp : peer.queue_pairs) qp.open = false;
  apply_peer_acks(peer);
  while (!peer.stalled.empty()) unstall(*peer.stalled.front());
  for (Qp& qp : peer.queue_pairs) {
    if (qp.direct_end > peer.out.head) fail_direct_messages(qp);
    if (qp.sq_tail == qp.sq_head) continue;
    stop_waiting(qp);
    run_send_queue(qp);  // runs work requests that need no peer, such as a waiting invalidation
    if (qp.sq_tail != qp.sq_head && !qp.waiting) handle_unreachable(qp);
  }
  peer.out.in_flight_head = peer.out.in_flight_tail;
}

void detach_peer(Context& c, Peer& peer) noexcept {
  publish_held(c);
  if (peer.pidfd) {
    (void)epoll_ctl(c.liveness.processes.get(), EPOLL_CTL_DEL, peer.pidfd.get(), nullptr);
    --c.liveness.watched;
  }
  if (peer.in != nullptr) peer.in->peer = nullptr;
  const auto unlist = [&peer](std::unique_ptr<Peer*[]>& list, std::uint16_t& count) {
    for (std::uint32_t i = 0; i < count; ++i) {
      if (list[i] == &peer) list[i] = list[--count];
    }
  };
  unlist(c.unacked, c.pending.unacked);
  unlist(c.acks_due, c.pending.acks_due);
  for (MappedObject& object : peer.objects) {
    if (object.base != nullptr) munmap(object.base, object.size);
  }
  // The peer sees that the lane is released and reclaims it.
  peer.segment->directory[peer.out.index].state.store(lane_word(c.pid, LaneState::released),
                                                      std::memory_order_release);
  unmap_segment(peer);
  c.peers.erase(std::find_if(c.peers.begin(), c.peers.end(),
                             [&](const auto& p) { return p.get() == &peer; }));
}

}  // namespace spinwire::softverbs
