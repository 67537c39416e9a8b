#include "softverbs/softverbs_device.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <type_traits>

#include "base/error.h"
#include "base/membarrier.h"
#include "base/random.h"
#include "softverbs/context_gid.h"
#include "softverbs/device_control.h"
#include "softverbs/faults/fault_layer.h"
#include "softverbs/lane/attached_peer.h"
#include "softverbs/lane/local_segments.h"
#include "softverbs/memory/atomic_lock.h"
#include "softverbs/memory/memory_window.h"
#include "softverbs/objects.h"
#include "softverbs/process_directory.h"
#include "softverbs/queues.h"
#include "softverbs/refusal.h"

namespace spinwire::softverbs {
namespace {

constexpr int kMaxCqe = 1 << 22;
constexpr std::size_t kEventRoom = 256;
/// Timeout of datagrams that wait for a stopped receiver. It is short for receivers that poll all
/// the time; programs that share processors may be descheduled for longer.
constexpr Nanoseconds kDatagramTimeout = std::chrono::milliseconds(1);
constexpr Nanoseconds kProgramDatagramTimeout = std::chrono::milliseconds(200);

int no_notify(ibv_cq*, int) { return EOPNOTSUPP; }

void fill_context(Context& c) {
  c.verbs.device = &c.device;
  c.verbs.cmd_fd = -1;
  c.verbs.async_fd = -1;
  c.verbs.num_comp_vectors = 1;
  c.verbs.ops.poll_cq = poll_cq;
  c.verbs.ops.req_notify_cq = no_notify;
  c.verbs.ops.alloc_mw = alloc_mw;
  c.verbs.ops.dealloc_mw = dealloc_mw;
  c.verbs.ops.post_srq_recv = post_srq_recv;
  c.verbs.ops.post_send = post_send;
  c.verbs.ops.post_recv = post_recv;
  c.device.node_type = IBV_NODE_CA;
  c.device.transport_type = IBV_TRANSPORT_IB;
  std::snprintf(c.device.name, sizeof c.device.name, "%s", kDeviceName);
  std::snprintf(c.device.dev_name, sizeof c.device.dev_name, "%s", kDeviceName);
}

void fill_segment(Context& c) {
  c.segment = reinterpret_cast<Segment*>(c.memory->data());
  c.nonce = base::random_seed() & kNonceMask;
  c.process = process_word(static_cast<std::uint32_t>(getpid()));
  c.segment->magic = kSegmentMagic;
  c.segment->version = kSegmentVersion;
  c.pid = static_cast<std::uint32_t>(getpid());
  c.gid = make_gid({c.pid, static_cast<std::uint32_t>(c.memory->fd()), c.nonce});
  c.shown_gid = c.gid;
  c.segment->pid = c.pid;
  c.segment->gid = c.gid;
  c.segment->shown_gid = c.gid;
}

/// Publishes the table of atomic locks as object 0.
void publish_lock_table(Context& c) {
  struct stat st {};
  (void)fstat(c.locks->fd(), &st);
  ObjectEntry& entry = c.segment->objects[kLockObject];
  entry.fd = c.locks->fd();
  entry.size = c.locks->size();
  entry.inode = st.st_ino;
  entry.generation.store(1, std::memory_order_release);
  c.object_users.push_back(1);
}

/// A table of zeroes. What was never used costs nothing, which calloc() does not promise: it clears
/// memory that was used before. Beyond 2 MiB, an entry may take a whole huge page.
template <typename Entry>
std::shared_ptr<Entry[]> make_table(std::size_t entries) {
  static_assert(std::is_trivially_destructible_v<Entry>);
  const auto memory =
      std::make_shared<base::LargeMemory>(base::sparse_memory(entries * sizeof(Entry)));
  return {memory, reinterpret_cast<Entry*>(memory->get())};
}

/// How far the user of this process trusts its peers' pages. Programs for libibverbs have little
/// but private memory; engines have pools.
PageTrust chosen_page_trust(Driving driving) noexcept {
  const char* const chosen = std::getenv(kTrustPagesVariable);
  if (chosen != nullptr && std::strcmp(chosen, "0") == 0) return PageTrust::none;
  if (chosen != nullptr && std::strcmp(chosen, "1") == 0) return PageTrust::all;
  return driving == Driving::by_poll ? PageTrust::all : PageTrust::usual;
}

Result<ibv_context*> open_checked(const Clock& clock, Driving driving) {
  // Without membarrier, peers could miss that a key is invalid or a lane asleep.
  if (!base::membarrier_available()) {
    return base::fail(Status::unsupported, "open the softverbs device",
                      "the kernel refuses expedited memory barriers (membarrier)",
                      "use Linux 4.16 or later, and a seccomp filter that allows membarrier");
  }
  base::SharedMemoryOptions options;
  options.name = "spinwire-softverbs";
  options.populate = false;
  auto memory = base::SharedMemory::create(sizeof(Segment), options);
  if (!memory) return tl::unexpected(memory.error());
  auto c = std::make_unique<Context>();
  c->memory = std::make_shared<base::SharedMemory>(std::move(*memory));
  c->clock = clock;
  c->driving = driving;
  c->datagram_timeout =
      clock.ticks(driving == Driving::by_poll ? kProgramDatagramTimeout : kDatagramTimeout);
  c->pending.slow_work = driving == Driving::by_poll ? 1 : 0;
  c->awake = std::make_unique<InLane*[]>(kMaxLanes);
  c->unacked = std::make_unique<Peer*[]>(kMaxLanes);
  c->acks_due = std::make_unique<Peer*[]>(kMaxLanes);
  c->queue_pair_memory = base::sparse_memory(kMaxQueuePairs * sizeof(Qp));
  c->queue_pairs = reinterpret_cast<Qp*>(c->queue_pair_memory.get());
  c->regions.own = make_table<OwnRegion>(kMaxRegions);
  c->rights = make_table<QueuePairRights>(kMaxQueuePairs);
  c->accesses = std::make_shared<LocalAccesses>();
  c->wake_pipe = std::make_shared<WakePipe>();
  c->lane_scan.claimed_since = std::make_unique<std::uint64_t[]>(kMaxLanes);
  c->page_trust = chosen_page_trust(driving);
  c->lanes.resize(kMaxLanes);
  c->numbers.next_free = std::make_unique_for_overwrite<std::uint16_t[]>(kMaxQueuePairs);
  c->numbers.generation.resize(kMaxQueuePairs, 0);
  c->object_users.reserve(64);
  c->events.reserve(kEventRoom);
  c->liveness.processes.reset(epoll_create1(EPOLL_CLOEXEC));
  if (!c->liveness.processes) {
    return base::fail_errno(Status::system, "open the softverbs device", "epoll_create1", errno,
                            "free memory of this machine");
  }
  auto locks = process_locks();
  if (!locks) return tl::unexpected(locks.error());
  c->locks = std::move(*locks);
  fill_segment(*c);
  if (driving == Driving::by_poll) {
    auto slot = DirectorySlot::take(c->gid);
    if (!slot) return tl::unexpected(slot.error());
    c->directory_slot = std::move(*slot);
    c->shown_gid = c->directory_slot.gid();
    c->segment->shown_gid = c->shown_gid;
    std::ranges::fill(c->numbers.generation, static_cast<std::uint8_t>(c->directory_slot.number()));
  }
  publish_lock_table(*c);
  fill_context(*c);
  add_local_segment(c->gid, {c->memory, c->regions.own, c->rights, c->accesses, c->wake_pipe});
  return &c.release()->verbs;
}

/// A locally administered identifier (IEEE 802, second bit), because the device has no vendor.
constexpr std::uint32_t kVendorId = 0x02736f;

}  // namespace

Result<ibv_context*> open_device(const Clock& clock, Driving driving, const FaultPlan* faults) {
  auto opened = base::no_throw("open the softverbs device", [&]() -> Result<ibv_context*> {
    return open_checked(clock, driving);
  });
  if (!opened || faults == nullptr) return opened;
  if (auto set = set_faults(*opened, *faults); !set) {
    (void)close_device(*opened);
    return tl::unexpected(set.error());
  }
  return opened;
}

int close_device(ibv_context* context) noexcept {
  Context& c = context_of(context);
  if (c.objects_open != 0) return EBUSY;
  c.segment->closed.store(1);
  for (const auto& peer : c.peers) {
    if (!peer->gone) announce_end(*peer);
  }
  while (!c.peers.empty()) detach_peer(c, *c.peers.back());
  delete &c;
  return 0;
}

void keep_to_thread(ibv_context* context) noexcept { context_of(context).one_thread = true; }

void control_device(ibv_context* context) noexcept { control(context_of(context)); }

int query_device(ibv_context* context, ibv_device_attr* attr) noexcept {
  *attr = {};
  const ibv_gid& gid = context_of(context).gid;
  std::snprintf(attr->fw_ver, sizeof attr->fw_ver, "%u", kSegmentVersion);
  std::memcpy(&attr->node_guid, gid.raw + 8, sizeof attr->node_guid);
  attr->sys_image_guid = attr->node_guid;
  attr->vendor_id = kVendorId;
  attr->vendor_part_id = 1;
  attr->hw_ver = kSegmentVersion;
  attr->max_mr_size = ~std::uint64_t{0};
  attr->page_size_cap = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  attr->max_qp = kMaxQueuePairs - 2;
  attr->max_qp_wr = kMaxWr;
  attr->max_sge = kMaxSge;
  attr->max_sge_rd = kMaxSge;
  attr->max_cq = 1 << 16;
  attr->max_cqe = kMaxCqe;
  attr->max_mr = kMaxRegions - 1;
  attr->max_mw = attr->max_mr;  // shared with max_mr
  attr->device_cap_flags = IBV_DEVICE_MEM_WINDOW_TYPE_2B;
  attr->max_pd = 1 << 16;
  attr->max_qp_rd_atom = 128;
  attr->max_res_rd_atom = attr->max_qp_rd_atom * attr->max_qp;
  attr->max_qp_init_rd_atom = 128;
  attr->atomic_cap = IBV_ATOMIC_HCA;  // private memory: under a lock, not atomic for processors
  attr->max_ah = 1 << 16;
  attr->max_srq = 1 << 16;
  attr->max_srq_wr = kMaxWr;
  attr->max_srq_sge = kMaxSge;
  attr->max_pkeys = 1;
  attr->phys_port_cnt = ports_of(context_of(context));
  return 0;
}

std::uint8_t ports_of(const Context& c) noexcept {
  // A program for libibverbs would take the ports for networks of their own.
  return c.driving == Driving::by_user ? kPorts : 1;
}

int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* attr) noexcept {
  const Context& c = context_of(context);
  if (port == 0 || port > ports_of(c)) return EINVAL;
  const bool down = c.faults != nullptr && is_port_down(*c.faults, port);
  *attr = {};
  attr->state = down ? IBV_PORT_DOWN : IBV_PORT_ACTIVE;
  attr->max_mtu = attr->active_mtu = IBV_MTU_4096;
  attr->gid_tbl_len = 1;
  attr->pkey_tbl_len = 1;
  attr->max_msg_sz = kMaxMessage;
  attr->active_width = 2;
  attr->active_speed = 32;
  attr->phys_state = down ? 2 : 5;  // Polling, LinkUp
  attr->link_layer = IBV_LINK_LAYER_ETHERNET;
  return 0;
}

int query_gid(ibv_context* context, std::uint8_t port, int index, ibv_gid* gid) noexcept {
  const Context& c = context_of(context);
  if (port == 0 || port > ports_of(c) || index != 0) return EINVAL;
  *gid = gid_of_port(c.shown_gid, port);
  return 0;
}

int get_async_event(ibv_context* context, ibv_async_event* event) noexcept {
  Context& c = context_of(context);
  if (c.events.empty()) return EAGAIN;
  *event = c.events.front();
  c.events.erase(c.events.begin());
  return 0;
}

ibv_pd* alloc_pd(ibv_context* context) noexcept {
  Context& c = context_of(context);
  auto* pd = new (std::nothrow) Pd();
  if (pd == nullptr) return refuse_with(ENOMEM);
  pd->context = context;
  pd->id = c.next_pd++;
  ++c.objects_open;
  return pd;
}

ibv_pd* alloc_parent_domain(ibv_pd* base) noexcept {
  Pd* const domain = static_cast<Pd*>(base);
  auto* pd = static_cast<Pd*>(alloc_pd(base->context));
  if (pd == nullptr) return nullptr;
  pd->id = domain->id;
  pd->parent = domain;
  ++domain->users;
  return pd;
}

int dealloc_pd(ibv_pd* base) noexcept {
  Pd* pd = static_cast<Pd*>(base);
  if (pd->users != 0) return EBUSY;
  if (pd->parent != nullptr) --pd->parent->users;
  --context_of(pd->context).objects_open;
  delete pd;
  return 0;
}

ibv_cq* create_cq(ibv_context* context, int entries) noexcept {
  if (entries < 1 || entries > kMaxCqe) return refuse_with(EINVAL);
  return or_no_memory([&]() -> ibv_cq* {
    auto cq = std::make_unique<Cq>();
    const std::uint32_t size = std::bit_ceil(static_cast<std::uint32_t>(entries));
    cq->ring = std::make_unique<ibv_wc[]>(size);
    cq->mask = size - 1;
    cq->context = context;
    cq->cqe = static_cast<int>(size);
    ++context_of(context).objects_open;
    return cq.release();
  });
}

int resize_cq(ibv_cq* base, int entries) noexcept {
  Cq& cq = *static_cast<Cq*>(base);
  if (entries < 1 || entries > kMaxCqe) return EINVAL;
  if (static_cast<std::uint32_t>(entries) < cq.tail - cq.head) return EINVAL;
  const std::uint32_t size = std::bit_ceil(static_cast<std::uint32_t>(entries));
  if (size <= cq.mask + 1) return 0;
  auto* ring = new (std::nothrow) ibv_wc[size]();
  if (ring == nullptr) return ENOMEM;
  for (std::uint32_t i = cq.head; i != cq.tail; ++i) ring[i & (size - 1)] = cq.ring[i & cq.mask];
  cq.ring.reset(ring);
  cq.mask = size - 1;
  cq.cqe = static_cast<int>(size);
  return 0;
}

ibv_wc* ring_slot(Cq& cq) noexcept {
  if (cq.tail - cq.head > cq.mask) [[unlikely]] {
    if (!cq.overrun) raise_event(context_of(cq.context), IBV_EVENT_CQ_ERR, &cq);
    cq.overrun = true;
    return nullptr;
  }
  ++context_of(cq.context).pending.slow_work;
  return &cq.ring[cq.tail++ & cq.mask];
}

int destroy_cq(ibv_cq* base) noexcept {
  Cq* cq = static_cast<Cq*>(base);
  if (cq->users != 0) return EBUSY;
  Context& c = context_of(cq->context);
  c.pending.slow_work -= cq->tail - cq->head;
  drop_events(c, base);
  --c.objects_open;
  delete cq;
  return 0;
}

void make_receive_queue(ReceiveQueue& queue, std::uint32_t depth, std::uint32_t sges) {
  queue.depth = std::bit_ceil(std::max(depth, 1u));
  queue.mask = queue.depth - 1;
  queue.max_sge = std::max(sges, 1u);
  queue.ring = std::make_unique<ReceiveWr[]>(queue.depth);
  queue.sges = std::make_unique<ibv_sge[]>(std::size_t{queue.depth} * queue.max_sge);
}

ibv_srq* create_srq(ibv_pd* pd, ibv_srq_init_attr* init) noexcept {
  const std::uint32_t depth = init->attr.max_wr;
  if (depth < 1 || depth > kMaxWr || init->attr.max_sge > kMaxSge) return refuse_with(EINVAL);
  return or_no_memory([&]() -> ibv_srq* {
    auto srq = std::make_unique<Srq>();
    make_receive_queue(srq->queue, depth, init->attr.max_sge);
    srq->context = pd->context;
    srq->pd = pd;
    srq->srq_context = init->srq_context;
    srq->domain = static_cast<Pd*>(pd);
    init->attr.max_wr = srq->queue.depth;
    init->attr.max_sge = srq->queue.max_sge;
    ++srq->domain->users;
    ++context_of(pd->context).objects_open;
    return srq.release();
  });
}

int destroy_srq(ibv_srq* base) noexcept {
  Srq* srq = static_cast<Srq*>(base);
  if (srq->users != 0) return EBUSY;
  Context& c = context_of(srq->context);
  drop_events(c, base);
  --srq->domain->users;
  --c.objects_open;
  delete srq;
  return 0;
}

}  // namespace spinwire::softverbs
