// Queue pairs: creation, the state machine, destruction. Cold.
#include <errno.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <string>

#include "base/log_message.h"
#include "softverbs/context_gid.h"
#include "softverbs/device_control.h"
#include "softverbs/faults/fault_layer.h"
#include "softverbs/lane/attached_peer.h"
#include "softverbs/memory/access_tracking.h"
#include "softverbs/objects.h"
#include "softverbs/process_directory.h"
#include "softverbs/queues.h"
#include "softverbs/refusal.h"
#include "softverbs/softverbs_device.h"
#include "softverbs/ud/ud_datagram.h"

namespace spinwire::softverbs {

namespace {

constexpr std::uint32_t kMaxInline = 1024;
constexpr std::uint8_t kMaxReads = 128;
constexpr unsigned kPeerAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                                 IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC |
                                 IBV_ACCESS_MW_BIND;
constexpr std::uint32_t kFirstNumber = 2;  // 0 and 1 are the management queue pairs

/// Transitions of a reliable connection, with the attributes that each requires and allows
/// (IB specification volume 1, 11.2.5.2, as the kernel's ib_modify_qp_is_ok applies it).
struct Transition {
  ibv_qp_state from;
  ibv_qp_state to;
  int required;
  int optional;
};
constexpr int kPath = IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX;
constexpr Transition kTransitions[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_INIT, IBV_QPS_RTR,
     IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
         IBV_QP_MIN_RNR_TIMER,
     kPath},
    {IBV_QPS_RTR, IBV_QPS_RTS,
     IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
     IBV_QP_CUR_STATE | IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER |
         IBV_QP_PATH_MIG_STATE},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0,
     IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE |
         IBV_QP_MIN_RNR_TIMER},
};

/// Transitions of unreliable datagrams. A failed send leads to SQE, in which the queue pair still
/// receives.
constexpr Transition kDatagramTransitions[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY},
    {IBV_QPS_INIT, IBV_QPS_RTR, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
    {IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN, IBV_QP_CUR_STATE | IBV_QP_QKEY},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0, IBV_QP_CUR_STATE | IBV_QP_QKEY},
    {IBV_QPS_SQE, IBV_QPS_RTS, 0, IBV_QP_CUR_STATE | IBV_QP_QKEY},
};

const Transition* find_transition(ibv_qp_type type, ibv_qp_state from, ibv_qp_state to) noexcept {
  const std::span<const Transition> all = type == IBV_QPT_UD
                                              ? std::span<const Transition>(kDatagramTransitions)
                                              : std::span<const Transition>(kTransitions);
  for (const Transition& t : all) {
    if (t.from == from && t.to == to) return &t;
  }
  return nullptr;
}

/// Reserves room for `used` entries and one more, so that adding one never allocates.
template <typename T>
void reserve_one(std::vector<T>& list, std::size_t used) {
  if (list.capacity() <= used) list.reserve(std::max<std::size_t>(64, 2 * used));
}

bool allocate_qpn(QueuePairNumbers& n, std::uint32_t& qpn) {
  std::uint32_t index = 0;
  if (n.next < kFirstNumber) n.next = kFirstNumber;
  const bool fresh = n.next < kMaxQueuePairs;
  if (n.free > QueuePairNumbers::kRest || (!fresh && n.free != 0)) {
    index = n.first_free;
    n.first_free = n.next_free[index];
    --n.free;
  } else if (fresh) {
    index = n.next++;
  } else {
    return false;
  }
  qpn = std::uint32_t{n.generation[index]} << 16 | index;
  return true;
}

void free_qpn(QueuePairNumbers& n, std::uint32_t index) noexcept {
  if (n.free++ == 0)
    n.first_free = index;
  else
    n.next_free[n.last_free] = static_cast<std::uint16_t>(index);
  n.last_free = index;
}

/// Ends a queue pair that no list holds, and zeroes its place.
struct Vacate {
  void operator()(Qp* qp) const noexcept {
    Context& c = context_of(qp->context);
    const std::uint32_t index = qp->handle;
    std::destroy_at(qp);
    std::memset(static_cast<void*>(qp), 0, sizeof *qp);
    free_qpn(c.numbers, index);
  }
};

/// Makes an unused queue pair in the place of a free number; null: there is none.
std::unique_ptr<Qp, Vacate> make_in_place(Context& c) noexcept {
  std::uint32_t number = 0;
  if (!allocate_qpn(c.numbers, number)) return nullptr;
  const std::uint32_t index = queue_pair_index(number);
  std::unique_ptr<Qp, Vacate> qp(std::construct_at(c.queue_pairs + index));
  qp->context = &c.verbs;
  qp->qp_num = number;
  qp->handle = index;
  return qp;
}

ibv_qp* create(Context& c, Pd& pd, ibv_qp_init_attr& init) {
  reserve_one(c.waiting, c.objects_open);
  auto qp = make_in_place(c);
  if (qp == nullptr) return refuse_with(ENOMEM);
  qp->round = &c.round;
  const std::uint32_t depth = std::bit_ceil(std::max(init.cap.max_send_wr, 1u));
  qp->sq_depth = depth;
  qp->sq_mask = depth - 1;
  qp->max_sge = std::max(init.cap.max_send_sge, 1u);
  qp->max_inline = init.cap.max_inline_data;
  qp->sq = std::make_unique<SendWr[]>(depth);
  // Memory of elements that are never used is never touched.
  qp->sq_sges = std::make_unique_for_overwrite<ibv_sge[]>(std::size_t{depth} * qp->max_sge);
  qp->sq_inline = std::make_unique_for_overwrite<std::byte[]>(std::size_t{depth} * qp->max_inline);
  qp->signal_all = init.sq_sig_all != 0 ? IBV_SEND_SIGNALED : 0;
  qp->receives = init.srq != nullptr ? &static_cast<Srq*>(init.srq)->queue : &qp->own_receives;
  if (init.srq == nullptr)
    make_receive_queue(qp->own_receives, init.cap.max_recv_wr, init.cap.max_recv_sge);
  if (c.faults != nullptr) attach_queue(c, *qp);
  qp->datagram_word = packet_kind(Packet::datagram, 0) << 48 | std::uint64_t{qp->qp_num} << 24;
  qp->qp_context = init.qp_context;
  qp->pd = &pd;
  qp->send_cq = init.send_cq;
  qp->recv_cq = init.recv_cq;
  qp->srq = init.srq;
  qp->state = IBV_QPS_RESET;
  qp->qp_type = init.qp_type;
  init.cap.max_send_wr = depth;
  init.cap.max_send_sge = qp->max_sge;
  init.cap.max_recv_wr = init.srq != nullptr ? 0 : qp->own_receives.depth;
  init.cap.max_recv_sge = init.srq != nullptr ? 0 : qp->own_receives.max_sge;
  qp->init = init;
  qp->entry = &c.segment->queue_pairs[qp->handle];
  qp->rights = &c.rights[qp->handle];
  qp->entry->word_key.store(0, std::memory_order_relaxed);
  qp->entry->word.store(0, std::memory_order_relaxed);
  set_ident(*qp, 0);
  for (QueuePairRights* const table : {qp->rights, &qp->entry->rights}) {
    table->pd.store(pd.id, std::memory_order_relaxed);
    table->in_place.store(0, std::memory_order_relaxed);
    table->access.store(0, std::memory_order_relaxed);
  }
  qp->receives_with = init.recv_cq;  // from now on find_queue_pair() finds it
  ++pd.users;
  ++static_cast<Cq*>(init.send_cq)->users;
  ++static_cast<Cq*>(init.recv_cq)->users;
  if (init.srq != nullptr) ++static_cast<Srq*>(init.srq)->users;
  ++c.objects_open;
  return qp.release();
}

void copy_attributes(Qp& qp, const ibv_qp_attr& attr, int mask) noexcept {
  ibv_qp_attr& kept = qp.attr;
  if ((mask & IBV_QP_PKEY_INDEX) != 0) kept.pkey_index = attr.pkey_index;
  if ((mask & IBV_QP_PORT) != 0) kept.port_num = attr.port_num;
  if ((mask & IBV_QP_ACCESS_FLAGS) != 0) kept.qp_access_flags = attr.qp_access_flags;
  if ((mask & IBV_QP_QKEY) != 0) kept.qkey = attr.qkey;
  if ((mask & IBV_QP_AV) != 0) kept.ah_attr = attr.ah_attr;
  if ((mask & IBV_QP_PATH_MTU) != 0) kept.path_mtu = attr.path_mtu;
  if ((mask & IBV_QP_DEST_QPN) != 0) kept.dest_qp_num = attr.dest_qp_num;
  if ((mask & IBV_QP_RQ_PSN) != 0) kept.rq_psn = attr.rq_psn & 0xffffff;
  if ((mask & IBV_QP_SQ_PSN) != 0) kept.sq_psn = attr.sq_psn & 0xffffff;
  if ((mask & IBV_QP_MAX_DEST_RD_ATOMIC) != 0) kept.max_dest_rd_atomic = attr.max_dest_rd_atomic;
  if ((mask & IBV_QP_MAX_QP_RD_ATOMIC) != 0) kept.max_rd_atomic = attr.max_rd_atomic;
  if ((mask & IBV_QP_MIN_RNR_TIMER) != 0) kept.min_rnr_timer = attr.min_rnr_timer;
  if ((mask & IBV_QP_TIMEOUT) != 0) kept.timeout = attr.timeout;
  if ((mask & IBV_QP_RETRY_CNT) != 0) kept.retry_cnt = attr.retry_cnt;
  if ((mask & IBV_QP_RNR_RETRY) != 0) kept.rnr_retry = attr.rnr_retry;
}

/// Publishes the attributes that peers need.
void publish_attributes(Qp& qp) noexcept {
  for (QueuePairRights* const table : {qp.rights, &qp.entry->rights}) {
    table->access.store(qp.attr.qp_access_flags | std::uint32_t{qp.attr.port_num} << kPortShift,
                        std::memory_order_relaxed);
    table->rnr_timer.store(qp.attr.min_rnr_timer, std::memory_order_relaxed);
  }
}

/// Whether a queue pair may use the port. Lanes do not say through which port a datagram went.
bool has_port(const Qp& qp, std::uint8_t port) noexcept {
  return port == 1 ||
         (qp.qp_type == IBV_QPT_RC && port != 0 && port <= ports_of(context_of(qp.context)));
}

/// Checks the attributes' values; 0 or EINVAL.
int check_attributes(const Qp& qp, const ibv_qp_attr& attr, int mask) noexcept {
  if ((mask & IBV_QP_PORT) != 0 && !has_port(qp, attr.port_num)) return EINVAL;
  if ((mask & IBV_QP_PKEY_INDEX) != 0 && attr.pkey_index != 0) return EINVAL;
  if ((mask & IBV_QP_PATH_MTU) != 0 &&
      (attr.path_mtu < IBV_MTU_256 || attr.path_mtu > IBV_MTU_4096))
    return EINVAL;
  if ((mask & IBV_QP_TIMEOUT) != 0 && attr.timeout > 31) return EINVAL;
  if ((mask & IBV_QP_RETRY_CNT) != 0 && attr.retry_cnt > 7) return EINVAL;
  if ((mask & IBV_QP_RNR_RETRY) != 0 && attr.rnr_retry > 7) return EINVAL;
  if ((mask & IBV_QP_MIN_RNR_TIMER) != 0 && attr.min_rnr_timer > 31) return EINVAL;
  if ((mask & IBV_QP_DEST_QPN) != 0 && attr.dest_qp_num > 0xffffff) return EINVAL;
  if ((mask & IBV_QP_AV) != 0 &&
      (!has_gid(attr.ah_attr) || attr.ah_attr.port_num != qp.attr.port_num))
    return EINVAL;
  if ((mask & IBV_QP_MAX_QP_RD_ATOMIC) != 0 && attr.max_rd_atomic > kMaxReads) return EINVAL;
  if ((mask & IBV_QP_MAX_DEST_RD_ATOMIC) != 0 && attr.max_dest_rd_atomic > kMaxReads) return EINVAL;
  if ((mask & IBV_QP_ACCESS_FLAGS) != 0 && (attr.qp_access_flags & ~kPeerAccess) != 0)
    return EINVAL;
  return 0;
}

/// Whether the peer's queue pair is at the port that our path leads to. One that has no port yet
/// is.
bool is_at_port(Qp& qp) noexcept {
  const std::uint32_t port =
      rights_of_remote(qp).access.load(std::memory_order_relaxed) >> kPortShift;
  return port == 0 || names_process(qp.attr.ah_attr.grh.dgid) ||
         port == port_of(qp.attr.ah_attr.grh.dgid);
}

void disconnect_peer(Qp& qp) noexcept {
  if (qp.peer == nullptr) return;
  qp.peer->queue_pairs.erase(qp);
  unstall(qp);
  qp.peer->waits_for_acks = false;  // those that wait set it again
  --qp.peer->users;
  qp.peer = nullptr;
  qp.remote_rights = nullptr;
}

int to_rtr(Context& c, Qp& qp) noexcept {
  std::string why;
  ibv_gid gid{};
  Peer* peer = find_context(qp.attr.ah_attr.grh.dgid, qp.attr.dest_qp_num, gid, why)
                   ? attach_peer(c, gid, why)
                   : nullptr;
  if (peer == nullptr) {
    const int error = errno;
    base::log(LogLevel::warning, "softverbs: the peer cannot be reached: {}", why);
    return error;
  }
  qp.peer = peer;
  ++peer->users;
  peer->queue_pairs.push_front(qp);
  qp.dest_qpn = qp.attr.dest_qp_num;
  if (!is_at_port(qp)) {
    disconnect_peer(qp);
    base::log(LogLevel::warning, "softverbs: queue pair {} is not at the port of that GID",
              qp.dest_qpn);
    return ENODEV;
  }
  qp.remote_rights = &rights_of_remote(qp);
  qp.naks_handled = remote_entry(qp).nak_serial.load(std::memory_order_relaxed);
  QueuePairEntry& entry = *qp.entry;
  entry.expected_psn.store(qp.attr.rq_psn, std::memory_order_relaxed);
  entry.nak.store(Nak::none, std::memory_order_relaxed);
  entry.violation.store(0, std::memory_order_relaxed);
  publish_attributes(qp);  // before peers can find the queue pair
  set_remote(qp, parse_gid(peer->gid)->nonce);
  set_ident(qp, queue_pair_ident(qp.qp_num, qp.dest_qpn));
  qp.peer_access.state = PeerAccess::possible;
  qp.expected = std::uint64_t{qp.attr.rq_psn} << 24 | qp.qp_num;
  return 0;
}

/// Moves any state to RESET. Outstanding work requests are dropped without completions.
void to_reset(Qp& qp) noexcept {
  if (qp.faults != nullptr) queue_reset(qp);
  stop_waiting(qp);
  drop_waiting(qp);
  forget_direct_messages(qp);
  disconnect_peer(qp);
  stop_serving(qp);
  qp.open = false;
  expect_nothing(qp);
  qp.nak_given = false;
  qp.retries = qp.rnr_retries = 0;
  qp.contended_since = 0;
  qp.sq_head = qp.sq_next = qp.sq_tail = qp.sq_reclaimed = 0;
  qp.own_receives.head = qp.own_receives.tail = 0;
  ++qp.epoch;
  qp.state = IBV_QPS_RESET;
  forget_batches(context_of(qp.context), qp);
}

/// Removes a queue pair's completions from a queue, so that after RESET a program finds only those
/// of later work.
void forget_completions(Context& c, Cq& cq, const Qp& qp) noexcept {
  std::uint32_t kept = cq.head;
  for (std::uint32_t at = cq.head; at != cq.tail; ++at) {
    const ibv_wc& wc = cq.ring[at & cq.mask];
    if (wc.qp_num != qp.qp_num) cq.ring[kept++ & cq.mask] = wc;
  }
  c.pending.slow_work -= cq.tail - kept;
  cq.tail = kept;
}

/// Moves to ERR. Returns 0, or EBUSY while a peer's access through the queue pair is in progress:
/// call again.
int to_error(Context& c, Qp& qp) noexcept {
  // Completes packets that the peer received, even if no poll has seen the acknowledgement.
  if (qp.peer != nullptr && !qp.peer->gone) apply_peer_acks(*qp.peer);
  enter_error(qp);
  return peer_accesses_ended(c, qp) ? 0 : EBUSY;
}

/// Ends peers' accesses before the queue pair is reset or destroyed. Returns 0, or EBUSY and leaves
/// the queue pair in ERR while one is in progress.
int drain_accesses(Context& c, Qp& qp) noexcept {
  if (qp.peer_access.state == PeerAccess::none) return 0;
  stop_serving(qp);
  if (peer_accesses_ended(c, qp)) return 0;
  return to_error(c, qp);
}

/// Revokes the rights that are not in `kept`, before any other change, so that the call can be
/// repeated. False while an access with a revoked right may be in progress.
bool revoke_rights(Context& c, Qp& qp, unsigned kept) noexcept {
  const unsigned taken = qp.attr.qp_access_flags & ~kept;
  if (taken != 0) {
    qp.attr.qp_access_flags &= kept;
    publish_attributes(qp);
    if (qp.peer_access.state == PeerAccess::recorded) qp.peer_access.state = PeerAccess::possible;
    qp.peer_access.rights_revoked = true;
  }
  if (qp.peer_access.rights_revoked) qp.peer_access.rights_revoked = !peer_accesses_ended(c, qp);
  return !qp.peer_access.rights_revoked;
}

/// Enters a state. Returns 0, or an errno value and changes nothing.
int enter(Context& c, Qp& qp, ibv_qp_state state) noexcept {
  switch (state) {
    case IBV_QPS_RTR:
      if (qp.qp_type == IBV_QPT_UD) break;
      if (const int error = to_rtr(c, qp); error != 0) return error;
      break;
    case IBV_QPS_RTS:
      if (qp.state == IBV_QPS_RTR) qp.next_psn = qp.attr.sq_psn;
      // `open` is of connections only.
      qp.open = qp.peer != nullptr && !qp.waiting && !qp.peer->gone && !qp.direct_lost;
      qp.sends_at_once = qp.qp_type == IBV_QPT_UD && qp.sq_tail == qp.sq_head;
      break;
    default:
      break;
  }
  qp.state = state;
  return 0;
}

bool valid_init(const Context& c, const Pd& pd, const ibv_qp_init_attr& init) noexcept {
  const ibv_qp_cap& cap = init.cap;
  if (init.send_cq == nullptr || init.recv_cq == nullptr) return false;
  if (init.send_cq->context != &c.verbs || init.recv_cq->context != &c.verbs) return false;
  if (init.srq != nullptr && static_cast<Srq*>(init.srq)->domain != &pd) return false;
  return cap.max_send_wr <= kMaxWr && cap.max_recv_wr <= kMaxWr && cap.max_send_sge <= kMaxSge &&
         cap.max_recv_sge <= kMaxSge && cap.max_inline_data <= kMaxInline;
}

}  // namespace

ibv_qp* create_qp(ibv_pd* base, ibv_qp_init_attr* init) noexcept {
  Context& c = context_of(base->context);
  Pd& pd = *static_cast<Pd*>(base);
  if (init->qp_type != IBV_QPT_RC && init->qp_type != IBV_QPT_UD) return refuse_with(EOPNOTSUPP);
  if (!valid_init(c, pd, *init)) return refuse_with(EINVAL);
  return or_no_memory([&] { return create(c, pd, *init); });
}

int modify_qp(ibv_qp* base, ibv_qp_attr* attr, int mask) noexcept {
  Qp& qp = *static_cast<Qp*>(base);
  Context& c = context_of(qp.context);
  if ((mask & IBV_QP_CUR_STATE) != 0 && attr->cur_qp_state != qp.state) return EINVAL;
  const ibv_qp_state to = (mask & IBV_QP_STATE) != 0 ? attr->qp_state : qp.state;
  const int given = mask & ~(IBV_QP_STATE | IBV_QP_CUR_STATE);
  // Any state may go to RESET, and all but RESET to ERR, without other attributes.
  if (to == IBV_QPS_RESET || to == IBV_QPS_ERR) {
    if (to == IBV_QPS_RESET && qp.windows != 0) return EBUSY;
    if (given != 0 || (to == IBV_QPS_ERR && qp.state == IBV_QPS_RESET)) return EINVAL;
    if (to == IBV_QPS_ERR) return to_error(c, qp);
    if (const int error = drain_accesses(c, qp); error != 0) return error;
    to_reset(qp);
    forget_completions(c, *static_cast<Cq*>(qp.send_cq), qp);
    forget_completions(c, *static_cast<Cq*>(qp.recv_cq), qp);
    return 0;
  }
  const Transition* transition = find_transition(qp.qp_type, qp.state, to);
  if (transition == nullptr || (given & transition->required) != transition->required ||
      (given & ~(transition->required | transition->optional)) != 0)
    return EINVAL;
  if (const int error = check_attributes(qp, *attr, mask); error != 0) return error;
  if ((mask & IBV_QP_ACCESS_FLAGS) != 0 && !revoke_rights(c, qp, attr->qp_access_flags))
    return EBUSY;
  const ibv_qp_attr before = qp.attr;
  copy_attributes(qp, *attr, mask);
  forget_batches(c, qp);
  if (const int error = enter(c, qp, to); error != 0) {
    qp.attr = before;
    return error;
  }
  publish_attributes(qp);
  if (qp.faults != nullptr) queue_connected(qp);
  return 0;
}

int query_qp(ibv_qp* base, ibv_qp_attr* attr, int, ibv_qp_init_attr* init) noexcept {
  Qp& qp = *static_cast<Qp*>(base);
  *attr = qp.attr;
  attr->qp_state = attr->cur_qp_state = qp.state;
  attr->cap = qp.init.cap;
  attr->sq_psn = qp.state == IBV_QPS_RTS ? qp.next_psn : qp.attr.sq_psn;
  if (qp.expected != kNeverExpected)
    attr->rq_psn = static_cast<std::uint32_t>(qp.expected >> 24) & 0xffffff;
  if (init != nullptr) *init = qp.init;
  return 0;
}

int destroy_qp(ibv_qp* base) noexcept {
  Qp* qp = static_cast<Qp*>(base);
  Context& c = context_of(qp->context);
  if (qp->windows != 0) return EBUSY;
  if (const int error = drain_accesses(c, *qp); error != 0) return error;
  to_reset(*qp);
  release_batches(c, *qp);
  set_ident(*qp, qp->rights->ident.load(std::memory_order_relaxed) | kDestroyed);
  drop_events(c, base);
  if (!c.directory_slot) ++c.numbers.generation[qp->handle];
  --static_cast<Pd*>(qp->pd)->users;
  --static_cast<Cq*>(qp->send_cq)->users;
  --static_cast<Cq*>(qp->recv_cq)->users;
  if (qp->srq != nullptr) --static_cast<Srq*>(qp->srq)->users;
  --c.objects_open;
  Vacate()(qp);
  return 0;
}

}  // namespace spinwire::softverbs
