#include "common/verbs_link.h"

#include "common/setup.h"
#include "softverbs/memory/memory_region.h"
#include "softverbs/objects.h"
#include "softverbs/softverbs_device.h"

namespace spinwire::bench {
namespace {

namespace sv = softverbs;

void check(bool ok, const char* what) {
  if (!ok) give_up(what);
}

}  // namespace

ibv_qp* make_queue_pair(ibv_pd* pd, ibv_cq* cq, ibv_srq* srq, std::uint32_t depth) {
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = cq;
  init.srq = srq;
  init.qp_type = IBV_QPT_RC;
  init.cap.max_send_wr = init.cap.max_recv_wr = depth;
  init.cap.max_send_sge = init.cap.max_recv_sge = 1;
  init.cap.max_inline_data = 64;
  ibv_qp* const qp = sv::create_qp(pd, &init);
  check(qp != nullptr, "create_qp");
  return qp;
}

void connect_queue_pair(ibv_qp* qp, ibv_context* to, std::uint32_t qp_num) {
  constexpr std::uint32_t kPsn = 7;
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = 1;
  check(sv::modify_qp(qp, &attr,
                      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0,
        "INIT");
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = IBV_MTU_4096;
  attr.dest_qp_num = qp_num;
  attr.rq_psn = kPsn;
  attr.max_dest_rd_atomic = 1;
  attr.min_rnr_timer = 1;
  attr.ah_attr.is_global = 1;
  attr.ah_attr.port_num = 1;
  check(sv::query_gid(to, 1, 0, &attr.ah_attr.grh.dgid) == 0, "query_gid");
  check(sv::modify_qp(qp, &attr,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0,
        "RTR");
  attr.qp_state = IBV_QPS_RTS;
  attr.timeout = 14;
  attr.retry_cnt = 7;
  attr.rnr_retry = 7;
  attr.sq_psn = kPsn;
  attr.max_rd_atomic = 1;
  check(sv::modify_qp(qp, &attr,
                      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                          IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC) == 0,
        "RTS");
}

VerbsEnd::VerbsEnd()
    : context_(must(sv::open_device(Clock::real(), sv::Driving::by_user))),
      pd_(sv::alloc_pd(context_)),
      cq_(sv::create_cq(context_, 1024)),
      memory_(must(base::SharedMemory::create(2u << 20))) {
  ibv_srq_init_attr attr{};
  attr.attr.max_wr = 2 * kSlots;
  attr.attr.max_sge = 1;
  srq_ = sv::create_srq(pd_, &attr);
  mr_ = sv::reg_mr(pd_, memory_.data(), 2u << 20, IBV_ACCESS_LOCAL_WRITE);
  check(pd_ != nullptr && cq_ != nullptr && srq_ != nullptr && mr_ != nullptr, "verbs objects");
  for (std::uint32_t i = 0; i < kBatch; ++i) {
    const bool last = i + 1 == kBatch;
    send_sges_[i] = slot(kSlots + i);
    sends_[i].sg_list = &send_sges_[i];
    sends_[i].num_sge = 1;
    sends_[i].opcode = IBV_WR_SEND;
    sends_[i].next = last ? nullptr : &sends_[i + 1];
    receives_[i] = {0, last ? nullptr : &receives_[i + 1], &receive_sges_[i], 1};
  }
  qp_ = make_queue_pair(pd_, cq_, srq_, kSlots);
  for (std::uint32_t done = 0; done < kSlots; done += kBatch) {
    for (std::uint32_t i = 0; i < kBatch; ++i) {
      receives_[i].wr_id = done + i;
      receive_sges_[i] = slot(done + i);
    }
    post_receives(kBatch);
  }
}

VerbsEnd::~VerbsEnd() {
  sv::destroy_qp(qp_);
  sv::dereg_mr(mr_);
  sv::destroy_srq(srq_);
  sv::destroy_cq(cq_);
  sv::dealloc_pd(pd_);
  sv::close_device(context_);
}

void VerbsEnd::connect(const VerbsEnd& to) { connect_queue_pair(qp_, to.context_, to.qp_->qp_num); }

void VerbsEnd::settle() { sv::control_device(context_); }

ibv_sge VerbsEnd::slot(std::uint32_t index) const noexcept {
  return {reinterpret_cast<std::uint64_t>(memory_.data() + std::size_t{index} * 64), kBytes,
          mr_->lkey};
}

void VerbsEnd::post_receives(std::uint32_t count) noexcept {
  ibv_recv_wr& last = receives_[count - 1];
  ibv_recv_wr* const next = last.next;
  last.next = nullptr;
  ibv_recv_wr* bad = nullptr;
  check(ibv_post_srq_recv(srq_, receives_.data(), &bad) == 0, "post_srq_recv");
  last.next = next;
}

void VerbsEnd::send(std::uint32_t count) noexcept {
  ibv_send_wr& last = sends_[count - 1];
  ibv_send_wr* const next = last.next;
  for (std::uint32_t i = 0; i < count; ++i) sends_[i].send_flags = IBV_SEND_INLINE;
  last.send_flags |= IBV_SEND_SIGNALED;
  last.next = nullptr;
  ibv_send_wr* bad = nullptr;
  check(ibv_post_send(qp_, sends_.data(), &bad) == 0, "post_send");
  last.next = next;
}

std::uint32_t VerbsEnd::step() noexcept {
  const int n = ibv_poll_cq(cq_, static_cast<int>(kBatch), completions_.data());
  check(n >= 0, "poll_cq");
  std::uint32_t arrived = 0;
  for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(n); ++i) {
    const ibv_wc& wc = completions_[i];
    check(wc.status == IBV_WC_SUCCESS, "a work request failed");
    if (wc.opcode != IBV_WC_RECV) continue;
    receives_[arrived].wr_id = wc.wr_id;
    receive_sges_[arrived] = slot(static_cast<std::uint32_t>(wc.wr_id));
    ++arrived;
  }
  if (arrived != 0) {
    post_receives(arrived);
    send(arrived);
  }
  return arrived;
}

}  // namespace spinwire::bench
