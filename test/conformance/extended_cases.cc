// Registering regions again, reading completions field by field, thread domains, and two contexts
// of one process.
#include <poll.h>

#include "conformance/conformance_ends.h"

namespace conformance::extended_cases {

// ---- registering again ------------------------------------------------------------------------

class Reregistration : public Connected {
 protected:
  void SetUp() override {
    const Memory tried(pd.get(), 64);
    errno = 0;
    const int answer =
        ibv_rereg_mr(tried.mr(), IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, kLocalWrite);
    if (answer != 0 && (errno == EOPNOTSUPP || errno == ENOSYS))
      GTEST_SKIP() << "regions are not registered again";
    ASSERT_EQ(answer, 0) << errno;
  }
  ibv_wc_status write(std::uint64_t address, std::uint32_t rkey) {
    Send(1, IBV_WR_RDMA_WRITE, {a.memory.sge(0, 64)}).at(address, rkey).on(a);
    return a.sent().status;
  }
};

TEST_F(Reregistration, RightsAreThoseOfTheLastTime) {
  const Memory region(pd.get(), 4096, kLocalWrite);
  const std::uint32_t key = region.rkey();  // programs send the key only once
  ASSERT_EQ(ibv_rereg_mr(region.mr(), IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0,
                         kLocalWrite | kRemoteWrite),
            0);
  fill(a.memory.at(0, 64), 1);
  EXPECT_EQ(write(region.address(128), key), IBV_WC_SUCCESS);
  EXPECT_TRUE(holds(region.at(128, 64), 1));
}

TEST_F(Reregistration, OtherMemoryIsReached) {
  const Memory region(pd.get(), 4096), other(pd.get(), 8192);
  ASSERT_EQ(ibv_rereg_mr(region.mr(), IBV_REREG_MR_CHANGE_TRANSLATION, nullptr,
                         other.at(4096, 4096).data(), 4096, 0),
            0);
  EXPECT_EQ(reinterpret_cast<std::uint64_t>(region.mr()->addr), other.address(4096));
  fill(a.memory.at(0, 64), 2);
  EXPECT_EQ(write(other.address(4096), region.rkey()), IBV_WC_SUCCESS);
  EXPECT_TRUE(holds(other.at(4096, 64), 2));
  EXPECT_NE(write(region.address(), region.rkey()), IBV_WC_SUCCESS) << "what was there before";
}

TEST_F(Reregistration, WhatMakesNoSenseIsRefusedAndChangesNothing) {
  const Memory region(pd.get(), 4096);
  EXPECT_NE(ibv_rereg_mr(region.mr(), 0, nullptr, nullptr, 0, 0), 0);
  EXPECT_NE(ibv_rereg_mr(region.mr(), IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, nullptr, 0, 0), 0);
  EXPECT_NE(
      ibv_rereg_mr(region.mr(), IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, kRemoteWrite), 0)
      << "remote write needs local write";
  EXPECT_EQ(write(region.address(), region.rkey()), IBV_WC_SUCCESS);
}

// ---- completions read field by field ----------------------------------------------------------

class ExtendedCompletions : public Verbs {
 protected:
  void SetUp() override {
    cq_ = make(IBV_WC_STANDARD_FLAGS);
    if (cq_ == nullptr && (errno == EOPNOTSUPP || errno == ENOSYS))
      GTEST_SKIP() << "there are no extended completion queues";
    ASSERT_NE(cq_, nullptr);
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = ibv_cq_ex_to_cq(cq_);
    init.qp_type = IBV_QPT_RC;
    init.cap = {16, 16, 1, 1, 0};
    link_ = std::make_unique<Pair>(context.get(), pd.get());
    // b's receives complete in the extended queue.
    Qp qp(ibv_create_qp(pd.get(), &init));
    must(qp != nullptr, "ibv_create_qp");
    link_->b.qp = std::move(qp);
    must(link_->a.move_to(IBV_QPS_RESET) == 0, "RESET");
    connect(link_->a, link_->b);
  }
  void TearDown() override {
    link_.reset();
    if (cq_ != nullptr) {
      EXPECT_EQ(ibv_destroy_cq(ibv_cq_ex_to_cq(cq_)), 0);
    }
  }
  ibv_cq_ex* make(std::uint64_t fields) const {
    ibv_cq_init_attr_ex attr{};
    attr.cqe = 64;
    attr.wc_flags = fields;
    errno = 0;
    return ibv_create_cq_ex(context.get(), &attr);
  }
  /// Whether a completion can be read before the time limit.
  bool start() {
    ibv_poll_cq_attr attr{};
    for (Deadline deadline; deadline.look();) {
      const int answer = ibv_start_poll(cq_, &attr);
      if (answer == 0) return true;
      must(answer == ENOENT, "ibv_start_poll");
    }
    return false;
  }
  ibv_cq_ex* cq_ = nullptr;
  std::unique_ptr<Pair> link_;
};

TEST_F(ExtendedCompletions, TellWhatTheOthersTell) {
  const End& a = link_->a;
  const End& b = link_->b;
  b.receive(7, 0, 64);
  b.receive(8, 64, 64);
  Send(1, IBV_WR_SEND_WITH_IMM, {a.memory.sge(0, 24)}).imm(0x1234).on(a);
  Send(2, IBV_WR_SEND, {a.memory.sge(0, 25)}).on(a);
  (void)take(a.send_cq.get(), 2);
  ASSERT_TRUE(start());
  EXPECT_EQ(cq_->wr_id, 7u);
  EXPECT_EQ(cq_->status, IBV_WC_SUCCESS);
  EXPECT_EQ(ibv_wc_read_opcode(cq_), IBV_WC_RECV);
  EXPECT_EQ(ibv_wc_read_byte_len(cq_), 24u);
  EXPECT_EQ(ibv_wc_read_imm_data(cq_), htonl(0x1234));
  EXPECT_EQ(ibv_wc_read_qp_num(cq_), b.qp->qp_num);
  EXPECT_NE(ibv_wc_read_wc_flags(cq_) & IBV_WC_WITH_IMM, 0u);
  b.receive(9, 128, 64);  // while a completion is being read
  int next = ENOENT;
  for (Deadline deadline; (next = ibv_next_poll(cq_)) == ENOENT && deadline.look();) {
  }
  ASSERT_EQ(next, 0);
  EXPECT_EQ(cq_->wr_id, 8u);
  EXPECT_EQ(ibv_wc_read_byte_len(cq_), 25u);
  EXPECT_EQ(ibv_next_poll(cq_), ENOENT);
  ibv_end_poll(cq_);
}

TEST_F(ExtendedCompletions, UnknownFieldsAreRefused) {
  ibv_cq_ex* const odd = make(std::uint64_t{1} << 60);
  EXPECT_EQ(odd, nullptr);
  if (odd != nullptr) (void)ibv_destroy_cq(ibv_cq_ex_to_cq(odd));
}

// ---- thread domains ---------------------------------------------------------------------------

TEST_F(Verbs, ParentDomainStandsForItsProtectionDomain) {
  ibv_td_init_attr no_options{};
  errno = 0;
  ibv_td* const td = ibv_alloc_td(context.get(), &no_options);
  if (td == nullptr && (errno == EOPNOTSUPP || errno == ENOSYS))
    GTEST_SKIP() << "there are no thread domains";
  ASSERT_NE(td, nullptr);
  ibv_parent_domain_init_attr attr{};
  attr.pd = pd.get();
  attr.td = td;
  ibv_pd* const parent = ibv_alloc_parent_domain(context.get(), &attr);
  ASSERT_NE(parent, nullptr);
  EXPECT_EQ(ibv_dealloc_td(td), EBUSY);
  EXPECT_EQ(ibv_dealloc_pd(pd.get()), EBUSY);
  {
    const Memory memory(pd.get(), 4096);  // registered in one domain, used through the other
    const End a(context.get(), parent), b(context.get(), parent);
    connect(a, b);
    b.receive(1, 0, 64);
    Send(2, IBV_WR_SEND, {memory.sge(0, 16)}).on(a);
    EXPECT_EQ(a.sent().status, IBV_WC_SUCCESS);
    expect_recv(b.received(), b, 1, 16);
  }
  EXPECT_EQ(ibv_dealloc_pd(parent), 0);
  EXPECT_EQ(ibv_dealloc_td(td), 0);
}

// ---- two contexts of one process --------------------------------------------------------------

class OneThread : public Verbs {
 protected:
  OneThread() : other(open_device()), other_pd(ibv_alloc_pd(other.get())) {
    must(other_pd != nullptr, "ibv_alloc_pd");
  }
  Context other;
  Pd other_pd;
};

TEST_F(OneThread, TheReceiversNeedNotBePolled) {
  const End a(context.get(), pd.get()), b(other.get(), other_pd.get());
  connect(a, b);
  for (std::uint64_t i = 0; i < 4; ++i) {
    b.receive(i, 0, 64);
    Send(i, IBV_WR_SEND, {a.memory.sge(0, 8)}).on(a);
    expect_wc(a.sent(), a, i, IBV_WC_SUCCESS);
  }
  EXPECT_EQ(take(b.recv_cq.get(), 4).size(), 4u);
}

TEST_F(OneThread, ASleepingSenderIsWoken) {
  ibv_comp_channel* const channel = ibv_create_comp_channel(context.get());
  must(channel != nullptr, "ibv_create_comp_channel");
  {
    EndOptions watched;
    watched.channel = channel;
    const End a(context.get(), pd.get(), watched), b(other.get(), other_pd.get());
    connect(a, b);
    b.receive(1, 0, 64);
    must(ibv_req_notify_cq(a.send_cq.get(), 0) == 0, "ibv_req_notify_cq");
    Send(2, IBV_WR_SEND, {a.memory.sge(0, 8)}).on(a);
    pollfd event{channel->fd, POLLIN, 0};
    ASSERT_EQ(::poll(&event, 1, 20000), 1) << "no event came";
    ibv_cq* cq = nullptr;
    void* unused = nullptr;
    ASSERT_EQ(ibv_get_cq_event(channel, &cq, &unused), 0);
    EXPECT_EQ(cq, a.send_cq.get());
    ibv_ack_cq_events(cq, 1);
    expect_wc(a.sent(), a, 2, IBV_WC_SUCCESS);
  }
  EXPECT_EQ(ibv_destroy_comp_channel(channel), 0);
}

}  // namespace conformance::extended_cases
