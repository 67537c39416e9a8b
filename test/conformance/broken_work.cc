// The layer between the cases and the device, hot part: posting and completions.
#include "conformance/object_records.h"

namespace conformance::layer {

ibv_context_ops& own(ibv_context* context) { return ledger.ops[context]; }

// ---- keys -------------------------------------------------------------------------------------

enum class Fault { none, key, domain, bounds };

Fault judge(const ibv_pd* pd, std::uint64_t address, std::uint64_t length, std::uint32_t key) {
  const auto at = ledger.regions.find(key);
  if (at == ledger.regions.end()) return Fault::key;
  const Region& region = at->second;
  if (region.pd != pd) return Fault::domain;
  const bool inside = address >= region.address && length <= region.length &&
                      address - region.address <= region.length - length;
  return inside ? Fault::none : Fault::bounds;
}

bool forgiven(Fault fault) {
  return (fault == Fault::key && broken("keys-unchecked")) ||
         (fault == Fault::domain && broken("domains-unchecked")) ||
         (fault == Fault::bounds && broken("bounds-unchecked"));
}

/// Points elements to scratch memory, as for a device that does not check keys.
void divert(ibv_pd* pd, std::vector<ibv_sge>& sges) {
  for (ibv_sge& sge : sges) {
    if (!forgiven(judge(pd, sge.addr, sge.length, sge.lkey))) continue;
    const Scratch& scratch = scratch_of(pd);
    sge.addr = reinterpret_cast<std::uint64_t>(scratch.bytes.data());
    sge.lkey = scratch.mr->lkey;
  }
}

// ---- posting: changes -------------------------------------------------------------------------

bool is_atomic(ibv_wr_opcode opcode) {
  return opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}
bool is_write(ibv_wr_opcode opcode) {
  return opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
}
bool is_one_sided(ibv_wr_opcode opcode) {
  return is_write(opcode) || opcode == IBV_WR_RDMA_READ || is_atomic(opcode);
}

void change_elements(Work& work, const QueuePair& known) {
  const ibv_wr_opcode opcode = work.wr.opcode;
  if (broken("gather-order")) std::ranges::reverse(work.sges);
  const bool cut = (broken("write-short") && is_write(opcode)) ||
                   (broken("read-short") && opcode == IBV_WR_RDMA_READ);
  if (cut && !work.sges.empty() && work.sges.back().length != 0) --work.sges.back().length;
  if (broken("elements-unchecked"))
    work.sges.resize(std::min<std::size_t>(work.sges.size(), known.cap.max_send_sge));
  if ((work.wr.send_flags & IBV_SEND_INLINE) == 0) divert(known.qp->pd, work.sges);
  if (broken("read-only-unread")) {
    for (ibv_sge& sge : work.sges) {
      if ((ledger.regions[sge.lkey].access & IBV_ACCESS_LOCAL_WRITE) == 0) sge.lkey ^= 0x5a5a00;
    }
  }
  if (broken("inline-unchecked") && work.length() > known.cap.max_inline_data)
    work.wr.send_flags &= ~static_cast<unsigned>(IBV_SEND_INLINE);
}

/// The address of a one-sided work request; its place depends on the opcode.
std::uint64_t& remote_address(ibv_send_wr& wr) {
  return is_atomic(wr.opcode) ? wr.wr.atomic.remote_addr : wr.wr.rdma.remote_addr;
}
std::uint32_t& remote_key(ibv_send_wr& wr) {
  return is_atomic(wr.opcode) ? wr.wr.atomic.rkey : wr.wr.rdma.rkey;
}

void change_window_key(std::uint32_t& key, const QueuePair& known) {
  for (const auto& [bound, window] : ledger.windows) {
    if (broken("window-tag") && bound >> 8 == key >> 8) key = bound;
    if (broken("window-for-all") && bound == key && window.qpn != known.dest) {
      key = window.region_key;
      return;
    }
  }
}

void change_target(Work& work, const QueuePair& known) {
  std::uint64_t& address = remote_address(work.wr);
  std::uint32_t& key = remote_key(work.wr);
  if (broken("atomic-aligned") && is_atomic(work.wr.opcode)) address &= ~std::uint64_t{7};
  change_window_key(key, known);
  const QueuePair* peer = ledger.find(known.dest);
  if (peer == nullptr || ledger.windows.contains(key)) return;
  if (!forgiven(judge(peer->qp->pd, address, work.length(), key))) return;
  const Scratch& scratch = scratch_of(peer->qp->pd);
  address = (reinterpret_cast<std::uint64_t>(scratch.bytes.data()) + 7) & ~std::uint64_t{7};
  key = scratch.mr->rkey;
}

void change_atomic(ibv_send_wr& wr) {
  std::uint64_t now = 0;
  if (!broken("swap-always") && !broken("swap-32") && !broken("add-lost")) return;
  constexpr std::uint32_t kEvery = 10;
  if (wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
    if (broken("add-lost") && ++ledger.additions % kEvery == 0) wr.wr.atomic.compare_add = 0;
    return;
  }
  const Region& region = ledger.regions[wr.wr.atomic.rkey];
  if (judge(region.pd, wr.wr.atomic.remote_addr, sizeof now, wr.wr.atomic.rkey) != Fault::none)
    return;
  std::memcpy(&now, bytes_at(wr.wr.atomic.remote_addr), sizeof now);
  const bool half =
      static_cast<std::uint32_t>(now) == static_cast<std::uint32_t>(wr.wr.atomic.compare_add);
  if (broken("swap-always") || (broken("swap-32") && half)) wr.wr.atomic.compare_add = now;
}

void change_bind(ibv_send_wr& wr, const QueuePair& known) {
  ibv_mw_bind_info& info = wr.bind_mw.bind_info;
  const bool local = (info.mw_access_flags & IBV_ACCESS_LOCAL_WRITE) != 0;
  if (broken("window-local") && local) info.length = 0;
  if (broken("window-short")) info.length /= 2;
  if (broken("window-bounds")) {
    info.addr = reinterpret_cast<std::uint64_t>(info.mr->addr);
    info.length = info.mr->length;
  }
  if (broken("window-rights"))
    info.mw_access_flags =
        IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
  const unsigned of_region = static_cast<unsigned>(ledger.regions[info.mr->lkey].access);
  if (broken("window-region-rights") && (info.mw_access_flags & ~of_region) != 0) info.length = 0;
  ledger.windows[wr.bind_mw.rkey] = {known.qp->qp_num, info.mr->rkey};
}

/// Replaces a work request by one without effect.
void turn_into_nothing(Work& work) {
  work.disguised = true;
  work.wr.opcode = IBV_WR_RDMA_WRITE;
  work.sges.clear();
}

void change_invalidation(Work& work) {
  const std::uint32_t key = work.wr.invalidate_rkey;
  const bool known = ledger.windows.contains(key);
  if (work.wr.opcode == IBV_WR_LOCAL_INV) {
    if (broken("local-inv") || (broken("local-inv-unchecked") && !known))
      return turn_into_nothing(work);
  } else if (broken("remote-inv")) {
    work.wr.opcode = IBV_WR_SEND;
  }
  ledger.windows.erase(key);
}

// ---- datagrams --------------------------------------------------------------------------------

bool can_take(QueuePair* to) {
  return to != nullptr && to->qp->qp_type == IBV_QPT_UD && !ledger.receives_of(to->qp).empty();
}

QueuePair* somebody() {
  for (auto& [number, known] : ledger.queue_pairs) {
    if (can_take(&known)) return &known;
  }
  return nullptr;
}

/// Clears a byte behind a receive that is too small for a datagram.
void write_behind(QueuePair* to, const Work& work) {
  if (!can_take(to)) return;
  const PostedReceive& next = ledger.receives_of(to->qp).front();
  if (capacity(next) >= work.length() + sizeof(ibv_grh) || next.sges.empty()) return;
  *(bytes_at(next.sges.back().addr) + next.sges.back().length) = std::byte{0};
}

void change_datagram(Work& work) {
  ibv_send_wr& wr = work.wr;
  QueuePair* to = ledger.find(wr.wr.ud.remote_qpn);
  const bool nobody = to == nullptr || to->qp->qp_type != IBV_QPT_UD;
  if (broken("datagram-astray") && nobody) {
    to = somebody();
    if (to != nullptr) wr.wr.ud.remote_qpn = to->qp->qp_num;
  }
  if (broken("qkey-ignored") && to != nullptr) wr.wr.ud.remote_qkey = to->qkey;
  if (broken("qkey-high")) wr.wr.ud.remote_qkey &= 0x7fff'ffff;
  if (broken("datagram-behind")) write_behind(to, work);
  if (broken("datagram-opcode")) wr.opcode = IBV_WR_SEND;
}

bool receives_now(const QueuePair& to) {
  return to.qp->state != IBV_QPS_INIT && !ledger.receives[to.qp].empty();
}

int post(ibv_qp* qp, Work& work) {
  work.wr.sg_list = work.sges.data();
  work.wr.num_sge = static_cast<int>(work.sges.size());
  ibv_send_wr* bad = nullptr;
  return own(qp->context).post_send(qp, &work.wr, &bad);
}

/// Keeps a datagram until it can be received and reports success to its sender. Returns whether it
/// did.
bool keep(ibv_qp* qp, const Work& work) {
  QueuePair* to = ledger.find(work.wr.wr.ud.remote_qpn);
  if (!broken("datagram-kept") || to == nullptr || to->qp->srq != nullptr || receives_now(*to))
    return false;
  to->kept.push_back(work);
  to->kept.back().wr.send_flags &= ~static_cast<unsigned>(IBV_SEND_SIGNALED);
  to->kept.back().wr.wr_id = qp->qp_num;  // the sender
  ibv_wc wc{};
  wc.wr_id = work.wr.wr_id;
  wc.opcode = IBV_WC_SEND;
  wc.qp_num = qp->qp_num;
  ledger.ready[qp->send_cq].push_back(wc);
  return true;
}

/// Whether a datagram is for a queue pair of another context.
bool lies_elsewhere(const ibv_qp* qp, const ibv_send_wr& wr) {
  const QueuePair* to = ledger.find(wr.wr.ud.remote_qpn);
  return to != nullptr && to->qp->context != qp->context;
}

void post_kept(QueuePair& to) {
  while (!to.kept.empty() && receives_now(to)) {
    const QueuePair* from = ledger.find(static_cast<std::uint32_t>(to.kept.front().wr.wr_id));
    if (from != nullptr) (void)post(from->qp, to.kept.front());
    to.kept.pop_front();
  }
}

// ---- posting ----------------------------------------------------------------------------------

/// Whether a post is accepted but has no effect.
bool swallowed(const ibv_qp* qp, bool receive) {
  if (broken("late-posts") && qp->state == IBV_QPS_ERR) return true;
  if (receive) {
    return (broken("reset-receives") && qp->state == IBV_QPS_RESET) ||
           (broken("srq-own") && qp->srq != nullptr);
  }
  return broken("early-sends") &&
         (qp->state == IBV_QPS_INIT || qp->state == IBV_QPS_RTR || qp->state == IBV_QPS_RESET);
}

bool room_lost(QueuePair& known, const ibv_send_wr& wr) {
  if (!broken("room-lost") || (wr.send_flags & IBV_SEND_SIGNALED) != 0) return false;
  return ++known.unsignaled >= known.cap.max_send_wr;
}

void change(Work& work, const QueuePair& known) {
  if (broken("unsignaled")) work.wr.send_flags |= IBV_SEND_SIGNALED;
  if (known.qp->qp_type == IBV_QPT_UD) {
    change_datagram(work);
  } else if (is_one_sided(work.wr.opcode)) {
    change_target(work, known);
    if (is_atomic(work.wr.opcode)) change_atomic(work.wr);
  } else if (work.wr.opcode == IBV_WR_BIND_MW) {
    change_bind(work.wr, known);
  } else if (work.wr.opcode == IBV_WR_LOCAL_INV || work.wr.opcode == IBV_WR_SEND_WITH_INV) {
    change_invalidation(work);
  }
  change_elements(work, known);
}

int post_one(ibv_qp* qp, const ibv_send_wr& wr) {
  QueuePair& known = ledger.queue_pairs[qp->qp_num];
  if (swallowed(qp, false)) return 0;
  if (room_lost(known, wr)) return ENOMEM;
  Work work(wr);
  change(work, known);
  if (qp->qp_type == IBV_QPT_UD && keep(qp, work)) return 0;
  if (broken("datagram-in-context") && lies_elsewhere(qp, wr)) work.wr.wr.ud.remote_qpn = 0;
  const bool late = (wr.send_flags & IBV_SEND_INLINE) != 0 || !ledger.late.empty();
  if (broken("inline-late") && late) {
    ledger.late.emplace_back(qp, work);
  } else if (const int error = post(qp, work); error != 0) {
    return error;
  }
  Work sent(wr);
  sent.disguised = work.disguised;
  known.sent.push_back(std::move(sent));
  return 0;
}

/// Whether the second of two neighbours is posted before the first.
bool overtaken(const ibv_send_wr& first, const ibv_send_wr& second) {
  const bool fenced = (second.send_flags & IBV_SEND_FENCE) != 0;
  return (broken("write-overtaken") && first.opcode == IBV_WR_RDMA_WRITE) ||
         (broken("fence-ignored") && first.opcode == IBV_WR_RDMA_READ && fenced) ||
         (broken("bind-late") && first.opcode == IBV_WR_BIND_MW);
}

int post_send(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad) {
  std::vector<ibv_send_wr*> list;
  for (; wr != nullptr; wr = wr->next) list.push_back(wr);
  for (std::size_t i = 0; i + 1 < list.size(); ++i) {
    if (overtaken(*list[i], *list[i + 1])) std::swap(list[i], list[i + 1]), ++i;
  }
  int refused = 0;
  for (ibv_send_wr* one_wr : list) {
    const int error = post_one(qp, *one_wr);
    if (error == 0) continue;
    if (refused == 0) *bad = broken("bad-wr") ? list.front() : one_wr;
    refused = error;
    if (!broken("list-goes-on")) break;
  }
  return refused;
}

template <typename Post>
int post_receives(const void* owner, ibv_pd* pd, std::size_t most, ibv_recv_wr* wr,
                  ibv_recv_wr** bad, Post&& post_one_receive) {
  ibv_recv_wr* const first = wr;
  int refused = 0;
  for (; wr != nullptr; wr = wr->next) {
    PostedReceive posted{wr->wr_id, {wr->sg_list, wr->sg_list + std::max(wr->num_sge, 0)}};
    std::vector<ibv_sge> sges = posted.sges;
    if (broken("scatter-order")) std::ranges::reverse(sges);
    if (broken("elements-unchecked")) sges.resize(std::min(sges.size(), most));
    divert(pd, sges);
    ibv_recv_wr changed{wr->wr_id, nullptr, sges.data(), static_cast<int>(sges.size())};
    const int error = post_one_receive(changed);
    if (error == 0) {
      ledger.receives[owner].push_back(std::move(posted));
      continue;
    }
    if (refused == 0) *bad = broken("bad-wr") ? first : wr;
    refused = error;
    if (!broken("list-goes-on")) break;
  }
  return refused;
}

int post_recv(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr** bad) {
  if (swallowed(qp, true)) return 0;
  QueuePair& known = ledger.queue_pairs[qp->qp_num];
  const int error =
      post_receives(qp, qp->pd, known.cap.max_recv_sge, wr, bad, [&](ibv_recv_wr& changed) {
        ibv_recv_wr* ignored = nullptr;
        return own(qp->context).post_recv(qp, &changed, &ignored);
      });
  post_kept(known);
  return error;
}

int post_srq_recv(ibv_srq* srq, ibv_recv_wr* wr, ibv_recv_wr** bad) {
  ibv_srq_attr attr{};
  (void)ibv_query_srq(srq, &attr);
  return post_receives(srq, srq->pd, attr.max_sge, wr, bad, [&](ibv_recv_wr& changed) {
    ibv_recv_wr* ignored = nullptr;
    return own(srq->context).post_srq_recv(srq, &changed, &ignored);
  });
}

// ---- completions ------------------------------------------------------------------------------

bool is_receive(const ibv_cq* cq, const ibv_wc& wc, const QueuePair& known) {
  if (wc.status == IBV_WC_SUCCESS) return (wc.opcode & IBV_WC_RECV) != 0;
  return cq == known.qp->recv_cq && cq != known.qp->send_cq;
}

void change_header(ibv_wc& wc, const PostedReceive& posted) {
  if ((wc.wc_flags & IBV_WC_GRH) == 0) return;
  for (std::uint64_t i = 0; broken("grh-zeroed") && i < sizeof(ibv_grh); ++i)
    *byte_at(posted.sges, i) = std::byte{0};
  if (broken("grh-flag")) wc.wc_flags &= ~static_cast<unsigned>(IBV_WC_GRH);
  if (broken("src-qp")) wc.src_qp = 0;
}

void change_received(ibv_wc& wc, const PostedReceive& posted) {
  std::byte* last = wc.opcode == IBV_WC_RECV && wc.byte_len != 0
                        ? byte_at(posted.sges, wc.byte_len - 1)
                        : nullptr;
  if (broken("payload-byte") && last != nullptr) *last ^= std::byte{1};
  change_header(wc, posted);
  if (broken("write-imm-room") && wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM &&
      wc.byte_len > capacity(posted))
    wc.status = IBV_WC_LOC_LEN_ERR;
  if (broken("byte-len")) ++wc.byte_len;
  if (broken("imm-swapped") && (wc.wc_flags & IBV_WC_WITH_IMM) != 0)
    wc.imm_data = __builtin_bswap32(wc.imm_data);
  if (broken("imm-flag")) wc.wc_flags |= IBV_WC_WITH_IMM;
  if (broken("write-imm-opcode") && wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM) wc.opcode = IBV_WC_RECV;
  if (broken("recv-opcode")) wc.opcode = IBV_WC_SEND;
}

PostedReceive take_posted(const ibv_qp* qp, std::uint64_t id) {
  auto& waiting = ledger.receives_of(qp);
  const auto at = std::ranges::find_if(waiting, [&](const PostedReceive& p) { return p.id == id; });
  if (at == waiting.end()) return {id, {}};
  PostedReceive posted = std::move(*at);
  waiting.erase(at);
  return posted;
}

/// Returns false if the completion is lost.
bool change_receive(ibv_wc& wc, const QueuePair& known) {
  const PostedReceive posted = take_posted(known.qp, wc.wr_id);
  if (broken("rtr-deaf") && known.qp->state == IBV_QPS_RTR) return false;
  if (wc.status == IBV_WC_SUCCESS) change_received(wc, posted);
  if (broken("length-hidden") && wc.status == IBV_WC_LOC_LEN_ERR) {
    wc.status = IBV_WC_SUCCESS;
    wc.opcode = IBV_WC_RECV;
  }
  if (broken("wr-id")) wc.wr_id ^= 1;
  return true;
}

Work take_sent(QueuePair& known, std::uint64_t id) {
  while (!known.sent.empty()) {
    Work work = std::move(known.sent.front());
    known.sent.pop_front();
    if (work.wr.wr_id == id) return work;
  }
  return Work(ibv_send_wr{});
}

ibv_wc_opcode success_of(ibv_wr_opcode opcode) {
  switch (opcode) {
    case IBV_WR_RDMA_READ:
      return IBV_WC_RDMA_READ;
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
      return IBV_WC_RDMA_WRITE;
    case IBV_WR_LOCAL_INV:
      return IBV_WC_LOCAL_INV;
    case IBV_WR_BIND_MW:
      return IBV_WC_BIND_MW;
    default:
      return IBV_WC_SEND;
  }
}

void change_result(const Work& work) {
  if (!is_atomic(work.wr.opcode) || work.sges.empty() || work.sges[0].length != 8) return;
  if (!broken("atomic-new") && !broken("atomic-wide")) return;
  std::byte* result = bytes_at(work.sges[0].addr);
  std::uint64_t old = 0;
  std::memcpy(&old, result, sizeof old);
  const auto& operands = work.wr.wr.atomic;
  const std::uint64_t fresh = work.wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD
                                  ? old + operands.compare_add
                              : old == operands.compare_add ? operands.swap
                                                            : old;
  if (broken("atomic-new")) std::memcpy(result, &fresh, sizeof fresh);
  if (broken("atomic-wide")) std::memset(result + sizeof old, 0, sizeof old);
}

void change_done(ibv_wc& wc, const QueuePair& known, const Work& work) {
  change_result(work);
  if (work.disguised) wc.opcode = success_of(IBV_WR_LOCAL_INV);
  const ibv_wr_opcode opcode = work.wr.opcode;
  if (broken("write-long") && opcode == IBV_WR_RDMA_WRITE &&
      ledger.regions.contains(work.wr.wr.rdma.rkey))
    *(bytes_at(work.wr.wr.rdma.remote_addr) + work.length()) = std::byte{0};
  if (broken("send-opcode") && wc.opcode == IBV_WC_RDMA_WRITE) wc.opcode = IBV_WC_SEND;
  if (broken("read-length") && wc.opcode == IBV_WC_RDMA_READ) wc.byte_len = 0;
  if (broken("read-opcode") && wc.opcode == IBV_WC_RDMA_READ) wc.opcode = IBV_WC_RDMA_WRITE;
  if (broken("empty-checked") && is_one_sided(opcode) && work.length() == 0)
    wc.status = IBV_WC_REM_ACCESS_ERR;
  if (broken("done-flushed") && known.qp->state == IBV_QPS_ERR) wc.status = IBV_WC_WR_FLUSH_ERR;
}

/// Turns a failure into success.
void hide(ibv_wc& wc, const Work& work) {
  const bool hidden = (broken("dead-answers") && wc.status == IBV_WC_RETRY_EXC_ERR) ||
                      (broken("bind-unchecked") && wc.status == IBV_WC_MW_BIND_ERR);
  if (!hidden) return;
  wc.status = IBV_WC_SUCCESS;
  wc.opcode = success_of(work.wr.opcode);
}

bool change_send(ibv_wc& wc, QueuePair& known) {
  const Work work = take_sent(known, wc.wr_id);
  const bool failed = wc.status != IBV_WC_SUCCESS;
  if (!failed) {
    change_done(wc, known, work);
    return true;
  }
  if (broken("error-unsignaled") && (work.wr.send_flags & IBV_SEND_SIGNALED) == 0) return false;
  if (broken("length-blame") && wc.status == IBV_WC_REM_INV_REQ_ERR) wc.status = IBV_WC_REM_OP_ERR;
  const QueuePair* peer = ledger.find(known.dest);
  if (broken("peer-dragged") && wc.status == IBV_WC_LOC_PROT_ERR && peer != nullptr)
    (void)modify_to(peer->qp, IBV_QPS_ERR);
  if (broken("needless-event") && wc.status == IBV_WC_LOC_PROT_ERR)
    ledger.needless.push_back(known.qp);
  hide(wc, work);
  return true;
}

/// Turns one completion of the device into none, one or two.
void change(ibv_cq* cq, ibv_wc wc, std::vector<ibv_wc>& out) {
  QueuePair* known = ledger.find(wc.qp_num);
  if (known == nullptr) return out.push_back(wc);
  const bool receive = is_receive(cq, wc, *known);
  if (!(receive ? change_receive(wc, *known) : change_send(wc, *known))) return;
  const bool flushed = wc.status == IBV_WC_WR_FLUSH_ERR;
  if (flushed && broken("flush-lost")) return;
  out.push_back(wc);
  if ((flushed && broken("flush-doubled")) || (receive && broken("doubled"))) out.push_back(wc);
}

/// Applies defects that need several completions.
void disorder(std::vector<ibv_wc>& wcs) {
  const auto flushed = [](const ibv_wc& wc) { return wc.status == IBV_WC_WR_FLUSH_ERR; };
  if (broken("flush-order")) {
    const auto begin = std::ranges::find_if(wcs, flushed);
    std::reverse(begin, wcs.end());
  }
  const auto failed = std::ranges::find_if(
      wcs, [&](const ibv_wc& wc) { return wc.status != IBV_WC_SUCCESS && !flushed(wc); });
  for (auto at = wcs.begin(); broken("earlier-hurt") && failed != wcs.end() && at != failed; ++at)
    at->status = IBV_WC_WR_FLUSH_ERR;
}

void pump(ibv_cq* cq) {
  constexpr int kBatch = 64;
  ibv_wc wcs[kBatch];
  const int got = own(cq->context).poll_cq(cq, kBatch, wcs);
  std::vector<ibv_wc> out;
  for (int i = 0; i < got; ++i) change(cq, wcs[i], out);
  disorder(out);
  auto& ready = ledger.ready[cq];
  ready.insert(ready.end(), out.begin(), out.end());
}

int poll_cq(ibv_cq* cq, int entries, ibv_wc* wc) {
  for (; !ledger.late.empty(); ledger.late.pop_front())
    (void)post(ledger.late.front().first, ledger.late.front().second);
  if (broken("notify-always") && cq->channel != nullptr)
    (void)own(cq->context).req_notify_cq(cq, 0);
  if (broken("one-context") && cq->context == ledger.second) return 0;
  if (entries == 0) {
    ibv_wc lost;
    return own(cq->context).poll_cq(cq, broken("poll-none") ? 1 : 0, &lost) & 0;
  }
  auto& ready = ledger.ready[cq];
  if (ready.empty()) pump(cq);
  int n = 0;
  for (; n < entries && !ready.empty(); ready.pop_front()) wc[n++] = ready.front();
  return n;
}

int req_notify_cq(ibv_cq* cq, int solicited_only) {
  if (broken("notify-never")) return 0;
  if (broken("solicited-ignored")) solicited_only = 0;
  bool& asked = ledger.solicited[cq];
  if (broken("narrower") && asked) return 0;
  asked = solicited_only != 0;
  return own(cq->context).req_notify_cq(cq, solicited_only);
}

int dealloc_mw(ibv_mw* mw) {
  if (broken("dealloc-keeps")) return 0;
  std::erase_if(ledger.windows,
                [&](const auto& window) { return window.first >> 8 == mw->rkey >> 8; });
  return own(mw->context).dealloc_mw(mw);
}

// ---- taking over ------------------------------------------------------------------------------

decltype(verbs_context::query_device_ex) own_query_device_ex = nullptr;

int query_device_ex(ibv_context* context, const ibv_query_device_ex_input* input,
                    ibv_device_attr_ex* attr, std::size_t size) {
  const int error = own_query_device_ex(context, input, attr, size);
  if (broken("extended")) ++attr->orig_attr.max_cqe;
  return error;
}

decltype(verbs_context::create_cq_ex) own_create_cq_ex = nullptr;

ibv_cq_ex* create_cq_ex(ibv_context* context, ibv_cq_init_attr_ex* attr) {
  if (broken("extended-any")) attr->wc_flags &= IBV_WC_STANDARD_FLAGS;
  ibv_cq_ex* const cq = own_create_cq_ex(context, attr);
  if (cq != nullptr && broken("extended-length")) cq->read_byte_len = [](ibv_cq_ex*) { return 0u; };
  return cq;
}

decltype(verbs_context::dealloc_td) own_dealloc_td = nullptr;

int dealloc_td(ibv_td* td) { return broken("parent-busy") ? 0 : own_dealloc_td(td); }

decltype(verbs_context::query_port) own_query_port = nullptr;

int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* attr, std::size_t size) {
  const int error =
      own_query_port(context, broken("any-port") ? std::uint8_t{1} : port, attr, size);
  if (broken("port-down")) attr->state = IBV_PORT_DOWN;
  return error;
}

void take_over(ibv_context* context) {
  ledger.second = ledger.ops.empty() ? nullptr : context;
  ledger.ops[context] = context->ops;
  context->ops.post_send = post_send;
  context->ops.post_recv = post_recv;
  context->ops.post_srq_recv = post_srq_recv;
  context->ops.poll_cq = poll_cq;
  context->ops.req_notify_cq = req_notify_cq;
  context->ops.dealloc_mw = dealloc_mw;
  verbs_context* extended = verbs_get_ctx(context);
  if (extended == nullptr || extended->query_port == query_port) return;
  own_query_port = extended->query_port;
  extended->query_port = query_port;
  own_query_device_ex = extended->query_device_ex;
  extended->query_device_ex = query_device_ex;
  own_create_cq_ex = extended->create_cq_ex;
  if (own_create_cq_ex != nullptr) extended->create_cq_ex = create_cq_ex;
  own_dealloc_td = extended->dealloc_td;
  if (own_dealloc_td != nullptr) extended->dealloc_td = dealloc_td;
}

}  // namespace conformance::layer
