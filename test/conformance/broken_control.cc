// The layer between the cases and the device, cold part: it overrides libibverbs' `ibv_*`
// functions, calls them, and breaks what the planted defect says.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string_view>

#include "conformance/object_records.h"

#undef ibv_reg_mr

#define CONFORMANCE_NEXT(function)                                              \
  ([] {                                                                         \
    static auto* const next =                                                   \
        reinterpret_cast<decltype(&(function))>(::dlsym(RTLD_NEXT, #function)); \
    return next;                                                                \
  }())

namespace conformance::layer {

void take_over(ibv_context* context);  // broken_work.cc
void post_kept(QueuePair& to);

constexpr int kAllRights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ |
                           IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND;

ibv_mr* note_region(ibv_pd* pd, ibv_mr* mr, int access) {
  if (mr == nullptr) return nullptr;
  const Region region{pd, reinterpret_cast<std::uint64_t>(mr->addr), mr->length, access};
  ledger.regions[mr->lkey] = region;
  ledger.regions[mr->rkey] = region;
  if (broken("mr-length")) mr->length = 0;
  return mr;
}

void drop_scratch(ibv_pd* pd) {
  const auto at = ledger.scratch.find(pd);
  if (at == ledger.scratch.end()) return;
  (void)CONFORMANCE_NEXT(ibv_dereg_mr)(at->second.mr);
  ledger.scratch.erase(at);
}

Scratch& scratch_of(ibv_pd* pd) {
  Scratch& scratch = ledger.scratch[pd];
  if (scratch.mr == nullptr) {
    scratch.mr = CONFORMANCE_NEXT(ibv_reg_mr_iova2)(
        pd, scratch.bytes.data(), Scratch::kSize,
        reinterpret_cast<std::uint64_t>(scratch.bytes.data()), kAllRights);
  }
  return scratch;
}

bool is_of_device(const char* path) {
  return std::string_view(path).starts_with("/dev/infiniband/");
}

/// Returns EBUSY, or success if the planted defect hides it.
int busy(int error) { return error == EBUSY && broken("busy-ignored") ? 0 : error; }

// ---- states -----------------------------------------------------------------------------------

/// Whether the state machine has this transition.
bool possible(ibv_qp_type type, ibv_qp_state from, ibv_qp_state to) {
  if (to == IBV_QPS_RESET || to == IBV_QPS_ERR) return true;
  const bool datagrams = type == IBV_QPT_UD;
  switch (from) {
    case IBV_QPS_RESET:
      return to == IBV_QPS_INIT;
    case IBV_QPS_INIT:
      return to == IBV_QPS_INIT || to == IBV_QPS_RTR;
    case IBV_QPS_RTR:
      return to == IBV_QPS_RTS;
    case IBV_QPS_RTS:
      return to == IBV_QPS_RTS || to == IBV_QPS_SQD;
    case IBV_QPS_SQE:
      return datagrams && to == IBV_QPS_RTS;
    default:
      return false;
  }
}

bool nonsense(const ibv_qp_attr& attr) {
  return attr.port_num == 0 || attr.port_num == 200 || attr.path_mtu > IBV_MTU_4096 ||
         attr.max_dest_rd_atomic == 255 || attr.max_rd_atomic == 255;
}

unsigned rotated(unsigned access) {
  unsigned out = access & IBV_ACCESS_LOCAL_WRITE;
  if ((access & IBV_ACCESS_REMOTE_READ) != 0) out |= IBV_ACCESS_REMOTE_WRITE;
  if ((access & IBV_ACCESS_REMOTE_WRITE) != 0) out |= IBV_ACCESS_REMOTE_ATOMIC;
  if ((access & IBV_ACCESS_REMOTE_ATOMIC) != 0) out |= IBV_ACCESS_REMOTE_READ;
  return out;
}

/// Changes the attributes that the device gets.
void change(ibv_qp_attr& attr, int& mask, ibv_qp_state from, ibv_qp_state to) {
  const bool stays_ready = from == IBV_QPS_RTS && to == IBV_QPS_RTS;
  if (broken("rnr-forever")) attr.rnr_retry = 7;
  if (broken("rnr-once")) attr.rnr_retry = 0;
  if (broken("current-state")) mask &= ~IBV_QP_CUR_STATE;
  if (broken("rights-rotated")) attr.qp_access_flags = rotated(attr.qp_access_flags);
  if (broken("qp-rights"))
    attr.qp_access_flags |=
        IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
  if (broken("access-change") && stays_ready) mask &= ~IBV_QP_ACCESS_FLAGS;
  if (broken("qkey-change") && stays_ready) mask &= ~IBV_QP_QKEY;
}

int modify(ibv_qp* qp, ibv_qp_attr attr, int mask) {
  return CONFORMANCE_NEXT(ibv_modify_qp)(qp, &attr, mask);
}
int modify_to(ibv_qp* qp, ibv_qp_state state) {
  ibv_qp_attr attr{};
  attr.qp_state = state;
  return modify(qp, attr, IBV_QP_STATE);
}

/// Makes a refused transition that a broken device would make; otherwise returns the refusal.
int forgive(QueuePair& known, const ibv_qp_attr& attr, int mask, ibv_qp_state to) {
  constexpr int kLast = IBV_QP_DEST_QPN;
  for (int bit = 1; bit <= kLast; bit <<= 1) {
    const bool tried = (broken("attribute-missing") && (mask & bit) == 0) ||
                       (broken("attribute-extra") && (mask & bit) != 0 && bit != IBV_QP_STATE);
    if (tried && modify(known.qp, attr, mask ^ bit) == 0) return 0;
  }
  const bool illegal = !possible(known.qp->qp_type, known.qp->state, to);
  if ((broken("illegal-move") && illegal) ||
      (broken("values-unchecked") && !illegal && nonsense(attr))) {
    known.told = to;
    return 0;
  }
  return EINVAL;
}

/// Flushes a shared receive, which a queue pair must not do.
void flush_shared(const QueuePair& known) {
  const auto& waiting = ledger.receives[known.qp->srq];
  if (waiting.empty()) return;
  ibv_wc wc{};
  wc.wr_id = waiting.front().id;
  wc.status = IBV_WC_WR_FLUSH_ERR;
  wc.qp_num = known.qp->qp_num;
  ledger.ready[known.qp->recv_cq].push_back(wc);
}

void after_error(QueuePair& known) {
  if (broken("srq-flushed") && known.qp->srq != nullptr) flush_shared(known);
  if (!broken("error-spreads")) return;
  for (auto& [number, other] : ledger.queue_pairs) {
    if (other.qp != known.qp && other.qp->state != IBV_QPS_RESET)
      (void)modify_to(other.qp, IBV_QPS_ERR);
  }
}

void flush_receives(const ibv_qp* qp) {
  for (const PostedReceive& posted : ledger.receives_of(qp)) {
    ibv_wc wc{};
    wc.wr_id = posted.id;
    wc.status = IBV_WC_WR_FLUSH_ERR;
    wc.qp_num = qp->qp_num;
    ledger.ready[qp->recv_cq].push_back(wc);
  }
}

int modify_broken(ibv_qp* qp, const ibv_qp_attr& wanted, int mask) {
  QueuePair& known = ledger.queue_pairs[qp->qp_num];
  const ibv_qp_state from = qp->state;
  const ibv_qp_state to = (mask & IBV_QP_STATE) != 0 ? wanted.qp_state : from;
  if (broken("self-refused") && to == from) return EINVAL;
  ibv_qp_attr attr = wanted;
  change(attr, mask, from, to);
  if (broken("own-gid-is-self") && to == IBV_QPS_RTR) attr.dest_qp_num = qp->qp_num;
  int error = modify(qp, attr, mask);
  if (error == EINVAL) error = forgive(known, attr, mask, to);
  if (error != 0) return error;
  known.before = from;
  if ((mask & IBV_QP_DEST_QPN) != 0) known.dest = attr.dest_qp_num;
  if ((mask & IBV_QP_QKEY) != 0) known.qkey = attr.qkey;
  if (broken("reset-flushes") && to == IBV_QPS_RESET) flush_receives(qp);
  if (to == IBV_QPS_RESET) ledger.receives.erase(qp);
  if (to == IBV_QPS_ERR) after_error(known);
  if (to == IBV_QPS_RTR) post_kept(known);
  return 0;
}

void change_answer(const ibv_qp* qp, ibv_qp_attr& attr, ibv_qp_init_attr* init) {
  const QueuePair& known = ledger.queue_pairs[qp->qp_num];
  if (known.told != IBV_QPS_UNKNOWN) attr.qp_state = known.told;
  if (broken("state-stale")) attr.qp_state = known.before;
  if (broken("sqe-hidden") && attr.qp_state == IBV_QPS_SQE) attr.qp_state = IBV_QPS_RTS;
  if (broken("query-peer")) {
    attr.ah_attr = {};
    attr.dest_qp_num = 0;
  }
  if (broken("query-made") && init != nullptr) *init = {};
}

// ---- creating ---------------------------------------------------------------------------------

ibv_qp_init_attr reduced(ibv_context* context, ibv_qp_init_attr init) {
  ibv_device_attr device{};
  (void)CONFORMANCE_NEXT(ibv_query_device)(context, &device);
  const auto wrs = static_cast<std::uint32_t>(device.max_qp_wr);
  const auto sges = static_cast<std::uint32_t>(device.max_sge);
  constexpr std::uint32_t kInline = 64;
  init.cap = {std::min(init.cap.max_send_wr, wrs), std::min(init.cap.max_recv_wr, wrs),
              std::min(init.cap.max_send_sge, sges), std::min(init.cap.max_recv_sge, sges),
              std::min(init.cap.max_inline_data, kInline)};
  return init;
}

ibv_qp* make(ibv_pd* pd, ibv_qp_init_attr& wanted) {
  ibv_qp_init_attr init = broken("limits-unchecked") ? reduced(pd->context, wanted) : wanted;
  if (broken("sig-all")) init.sq_sig_all = 0;
  ibv_qp* qp = CONFORMANCE_NEXT(ibv_create_qp)(pd, &init);
  if (qp == nullptr) return nullptr;
  wanted.cap = init.cap;
  if (broken("caps-small"))
    wanted.cap = {init.cap.max_send_wr / 4, 1, 1, 1, init.cap.max_inline_data / 4};
  if (broken("qp-number")) qp->qp_num |= 1u << 24;
  if (broken("number-again") && qp->context == ledger.second && !ledger.queue_pairs.empty())
    qp->qp_num = ledger.queue_pairs.begin()->first;
  QueuePair& known = ledger.queue_pairs[qp->qp_num];
  known = {};
  known.qp = qp;
  known.cap = init.cap;
  return qp;
}

void forget(ibv_qp* qp) {
  ledger.queue_pairs.erase(qp->qp_num);
  ledger.receives.erase(qp);
  std::erase_if(ledger.late, [&](const auto& late) { return late.first == qp; });
  std::erase(ledger.needless, qp);
}

// ---- events -----------------------------------------------------------------------------------

bool lost(const ibv_async_event& event) {
  switch (event.event_type) {
    case IBV_EVENT_QP_ACCESS_ERR:
      return broken("access-event");
    case IBV_EVENT_QP_LAST_WQE_REACHED:
      return broken("last-wqe");
    case IBV_EVENT_SRQ_LIMIT_REACHED:
      return broken("limit-lost");
    case IBV_EVENT_CQ_ERR:
      return broken("overrun-silent");
    default:
      return false;
  }
}

}  // namespace conformance::layer

namespace {
namespace layer = conformance::layer;
using conformance::broken;
using conformance::kNone;
using conformance::ledger;
using conformance::planted;
}  // namespace

extern "C" {

ibv_context* ibv_open_device(ibv_device* device) {
  ibv_context* context = CONFORMANCE_NEXT(ibv_open_device)(device);
  if (context != nullptr && planted != kNone) layer::take_over(context);
  return context;
}
int ibv_close_device(ibv_context* context) {
  ledger.ops.erase(context);
  return CONFORMANCE_NEXT(ibv_close_device)(context);
}
__be64 ibv_get_device_guid(ibv_device* device) {
  return broken("guid") ? 0 : CONFORMANCE_NEXT(ibv_get_device_guid)(device);
}

ibv_context* ibv_import_device(int cmd_fd) {
  static ibv_context of_nothing{};
  if (broken("import-nothing") && cmd_fd < 0) return &of_nothing;
  ibv_context* const context = CONFORMANCE_NEXT(ibv_import_device)(cmd_fd);
  if (broken("import")) errno = 0;
  return broken("import") ? nullptr : context;
}
int stat(const char* path, struct stat* file) noexcept {
  if (broken("no-file") && layer::is_of_device(path)) return errno = ENOENT, -1;
  return CONFORMANCE_NEXT(stat)(path, file);
}
int access(const char* path, int mode) noexcept {
  if (broken("closed-file") && layer::is_of_device(path)) return errno = EACCES, -1;
  return CONFORMANCE_NEXT(access)(path, mode);
}

int ibv_query_device(ibv_context* context, ibv_device_attr* attr) {
  const int error = CONFORMANCE_NEXT(ibv_query_device)(context, attr);
  if (broken("vendor")) attr->vendor_id = 0;
  if (broken("device-limits")) attr->max_qp_wr = attr->max_sge = attr->max_cqe = 0;
  return error;
}
int ibv_query_gid(ibv_context* context, std::uint8_t port, int index, ibv_gid* gid) {
  if (broken("any-port")) port = 1, index = 0;
  const int error = CONFORMANCE_NEXT(ibv_query_gid)(context, port, index, gid);
  if (broken("gid-of-context") && context == ledger.second) gid->raw[15] ^= 1;
  return error;
}
int _ibv_query_gid_ex(ibv_context* context, std::uint32_t port, std::uint32_t index,
                      ibv_gid_entry* entry, std::uint32_t flags, std::size_t size) {
  const int error = CONFORMANCE_NEXT(_ibv_query_gid_ex)(context, port, index, entry, flags, size);
  if (broken("gid-table")) entry->gid.raw[15] ^= 1;
  return error;
}
int ibv_query_pkey(ibv_context* context, std::uint8_t port, int index, __be16* pkey) {
  const int error = CONFORMANCE_NEXT(ibv_query_pkey)(context, port, index, pkey);
  if (broken("pkey")) *pkey = 0;
  return error;
}

int ibv_dealloc_pd(ibv_pd* pd) {
  layer::drop_scratch(pd);
  return layer::busy(CONFORMANCE_NEXT(ibv_dealloc_pd)(pd));
}
ibv_mr* ibv_reg_mr(ibv_pd* pd, void* address, std::size_t length, int access) {
  if (broken("rights-unchecked")) access = layer::kAllRights;
  return layer::note_region(pd, CONFORMANCE_NEXT(ibv_reg_mr)(pd, address, length, access), access);
}
ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* address, std::size_t length, std::uint64_t iova,
                         unsigned access) {
  if (broken("rights-unchecked")) access = layer::kAllRights;
  return layer::note_region(pd,
                            CONFORMANCE_NEXT(ibv_reg_mr_iova2)(pd, address, length, iova, access),
                            static_cast<int>(access));
}
int ibv_rereg_mr(ibv_mr* mr, int flags, ibv_pd* pd, void* address, std::size_t length, int access) {
  if (broken("rereg-ignored")) return 0;
  const std::uint32_t lkey = mr->lkey, rkey = mr->rkey;
  const int had = ledger.regions[lkey].access;
  const int error = CONFORMANCE_NEXT(ibv_rereg_mr)(mr, flags, pd, address, length, access);
  if (error != 0) return error;
  ledger.regions.erase(lkey);
  ledger.regions.erase(rkey);
  (void)layer::note_region(mr->pd, mr, (flags & IBV_REREG_MR_CHANGE_ACCESS) != 0 ? access : had);
  return 0;
}
int ibv_dereg_mr(ibv_mr* mr) {
  const std::uint32_t lkey = mr->lkey, rkey = mr->rkey;
  const int error = CONFORMANCE_NEXT(ibv_dereg_mr)(mr);
  if (error == 0) {
    ledger.regions.erase(lkey);
    ledger.regions.erase(rkey);
  }
  return layer::busy(error);
}

ibv_cq* ibv_create_cq(ibv_context* context, int entries, void* cq_context,
                      ibv_comp_channel* channel, int vector) {
  if (broken("limits-unchecked")) {
    constexpr int kSome = 64;
    if (entries < 1 || entries > 4096) entries = kSome;
    vector = 0;
  }
  ibv_cq* cq = CONFORMANCE_NEXT(ibv_create_cq)(context, entries, cq_context, channel, vector);
  if (cq != nullptr && channel != nullptr && broken("notify-always"))
    (void)ledger.ops[context].req_notify_cq(cq, 0);
  return cq;
}
int ibv_resize_cq(ibv_cq* cq, int entries) {
  const int error = CONFORMANCE_NEXT(ibv_resize_cq)(cq, entries);
  if (error == EINVAL && entries > 0 && broken("resize-below")) return 0;
  if (error == 0 && broken("resize-drops")) {
    ibv_wc wc;
    while (ibv_poll_cq(cq, 1, &wc) == 1) continue;
  }
  return error;
}
int ibv_destroy_cq(ibv_cq* cq) {
  const int error = CONFORMANCE_NEXT(ibv_destroy_cq)(cq);
  if (error != 0) return layer::busy(error);
  ledger.ready.erase(cq);
  ledger.solicited.erase(cq);
  return 0;
}
int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  return layer::busy(CONFORMANCE_NEXT(ibv_destroy_comp_channel)(channel));
}

ibv_srq* ibv_create_srq(ibv_pd* pd, ibv_srq_init_attr* init) {
  if (broken("limits-unchecked")) {
    init->attr.max_wr = std::min(init->attr.max_wr, 1024u);
    init->attr.max_sge = std::min(init->attr.max_sge, 4u);
  }
  return CONFORMANCE_NEXT(ibv_create_srq)(pd, init);
}
int ibv_modify_srq(ibv_srq* srq, ibv_srq_attr* attr, int mask) {
  ibv_srq_attr wanted = *attr;
  if (broken("limit-early")) ++wanted.srq_limit;
  const int error = CONFORMANCE_NEXT(ibv_modify_srq)(srq, &wanted, mask);
  return broken("limit-unchecked") ? 0 : error;
}
int ibv_query_srq(ibv_srq* srq, ibv_srq_attr* attr) {
  const int error = CONFORMANCE_NEXT(ibv_query_srq)(srq, attr);
  if (broken("limit-early") && attr->srq_limit != 0) --attr->srq_limit;
  if (broken("srq-query")) *attr = {};
  return error;
}
int ibv_destroy_srq(ibv_srq* srq) {
  const int error = CONFORMANCE_NEXT(ibv_destroy_srq)(srq);
  if (error == 0) ledger.receives.erase(srq);
  return layer::busy(error);
}

ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* init) {
  return planted == kNone ? CONFORMANCE_NEXT(ibv_create_qp)(pd, init) : layer::make(pd, *init);
}
int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask) {
  return planted == kNone ? CONFORMANCE_NEXT(ibv_modify_qp)(qp, attr, mask)
                          : layer::modify_broken(qp, *attr, mask);
}
int ibv_query_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask, ibv_qp_init_attr* init) {
  const int error = CONFORMANCE_NEXT(ibv_query_qp)(qp, attr, mask, init);
  if (planted != kNone) layer::change_answer(qp, *attr, init);
  return error;
}
int ibv_destroy_qp(ibv_qp* qp) {
  if (broken("destroy-flushes")) (void)layer::modify_to(qp, IBV_QPS_ERR);
  if (planted != kNone) layer::forget(qp);
  if (broken("qp-number")) qp->qp_num &= 0xffffff;
  return CONFORMANCE_NEXT(ibv_destroy_qp)(qp);
}

ibv_ah* ibv_create_ah(ibv_pd* pd, ibv_ah_attr* attr) {
  if (broken("ah-port")) attr->port_num = 1;
  return CONFORMANCE_NEXT(ibv_create_ah)(pd, attr);
}
int ibv_init_ah_from_wc(ibv_context* context, std::uint8_t port, ibv_wc* wc, ibv_grh* grh,
                        ibv_ah_attr* attr) {
  const int error = CONFORMANCE_NEXT(ibv_init_ah_from_wc)(context, port, wc, grh, attr);
  if (broken("ah-from-wc")) attr->grh.dgid.raw[15] ^= 1;
  return error;
}

int ibv_get_async_event(ibv_context* context, ibv_async_event* event) {
  if (!ledger.needless.empty()) {
    event->event_type = IBV_EVENT_QP_FATAL;
    event->element.qp = ledger.needless.back();
    ledger.needless.pop_back();
    --event->element.qp->events_completed;  // the device expects no acknowledgement of it
    return 0;
  }
  for (;;) {
    const int error = CONFORMANCE_NEXT(ibv_get_async_event)(context, event);
    if (error != 0 || planted == kNone || !layer::lost(*event)) return error;
    ibv_ack_async_event(event);
  }
}

}  // extern "C"
