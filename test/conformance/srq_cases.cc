// Shared receive queues: several queue pairs take receives from one queue, in the order of posting;
// the limit event, and the event that a failed queue pair takes no more.
#include "conformance/conformance_ends.h"

namespace conformance::srq_cases {

class SharedReceives : public Verbs {
 protected:
  void SetUp() override {
    if (device.max_srq == 0) GTEST_SKIP() << "max_srq is 0";
    srq_ = make_srq();
    memory_ = std::make_unique<Memory>(pd.get(), 64 << 10);
  }
  void TearDown() override { memory_.reset(); }

  int receive_into(std::uint64_t id, std::vector<ibv_sge> sges) const {
    ibv_recv_wr wr{id, nullptr, sges.data(), static_cast<int>(sges.size())};
    ibv_recv_wr* bad = nullptr;
    return ibv_post_srq_recv(srq_.get(), &wr, &bad);
  }
  void receive(std::uint64_t id, std::size_t offset, std::uint32_t length) const {
    must(receive_into(id, {memory_->sge(offset, length)}) == 0, "ibv_post_srq_recv");
  }
  [[nodiscard]] EndOptions sharing() const {
    EndOptions options;
    options.srq = srq_.get();
    return options;
  }
  void set_limit(std::uint32_t limit) const {
    ibv_srq_attr attr{};
    attr.srq_limit = limit;
    must(ibv_modify_srq(srq_.get(), &attr, IBV_SRQ_LIMIT) == 0, "ibv_modify_srq");
  }
  [[nodiscard]] std::uint32_t limit() const {
    ibv_srq_attr attr{};
    must(ibv_query_srq(srq_.get(), &attr) == 0, "ibv_query_srq");
    return attr.srq_limit;
  }
  static void send(const End& from, std::uint32_t length) {
    Send(50, IBV_WR_SEND, {from.memory.sge(0, length)}).on(from);
  }

  Srq srq_;
  std::unique_ptr<Memory> memory_;
};

TEST_F(SharedReceives, AreTakenInOrderByTheQueuePairThatNeedsOne) {
  const Pair one_link = pair({}, sharing()), other = pair({}, sharing());
  for (unsigned i = 0; i < 4; ++i) receive(i, 1024 * i, 1024);
  const Pair* turns[] = {&one_link, &other, &other, &one_link};
  for (unsigned i = 0; i < 4; ++i) {
    const Pair& link = *turns[i];
    fill(link.a.memory.at(0, 100 + i), i);
    send(link.a, 100 + i);
    const ibv_wc wc = link.b.received();
    expect_recv(wc, link.b, i, 100 + i);
    EXPECT_TRUE(holds(memory_->at(1024 * i, 100 + i), i));
    expect_wc(link.a.sent(), link.a, 50, IBV_WC_SUCCESS);
  }
}

TEST_F(SharedReceives, Scatter) {
  const Pair link = pair({}, sharing());
  ASSERT_EQ(receive_into(1, {memory_->sge(5000, 600), memory_->sge(0, 2000)}), 0);
  fill(link.a.memory.at(0, 2000), 3);
  send(link.a, 2000);
  expect_recv(link.b.received(), link.b, 1, 2000);
  std::vector<std::byte> together(2000);
  std::ranges::copy(memory_->at(5000, 600), together.begin());
  std::ranges::copy(memory_->at(0, 1400), together.begin() + 600);
  EXPECT_TRUE(holds(together, 3));
}

TEST_F(SharedReceives, ServeWritesWithImmediate) {
  const Pair link = pair({}, sharing());
  receive(1, 0, 8);
  fill(link.a.memory.at(0, 64), 3);
  Send(2, IBV_WR_RDMA_WRITE_WITH_IMM, {link.a.memory.sge(0, 64)})
      .imm(9)
      .at(link.b.memory.address(), link.b.memory.rkey())
      .on(link.a);
  expect_recv(link.b.received(), link.b, 1, 64, IBV_WC_WITH_IMM, IBV_WC_RECV_RDMA_WITH_IMM);
  EXPECT_TRUE(holds(link.b.memory.at(0, 64), 3));
}

TEST_F(SharedReceives, QueuePairHasNoneOfItsOwn) {
  const Pair link = pair({}, sharing());
  EXPECT_NE(link.b.receive_into(1, {memory_->sge(0, 8)}), 0);
}

TEST_F(SharedReceives, EmptyMakesSendersWait) {
  const Pair link = pair({}, sharing());
  send(link.a, 8);
  EXPECT_TRUE(nothing(link.a.send_cq.get()));
  receive(1, 0, 64);
  expect_recv(link.b.received(), link.b, 1, 8);
  expect_wc(link.a.sent(), link.a, 50, IBV_WC_SUCCESS);
}

TEST_F(SharedReceives, TooSmallFailsOneQueuePairOnly) {
  const Pair bad = pair({}, sharing()), good = pair({}, sharing());
  receive(1, 0, 8);
  receive(2, 1024, 64);
  send(bad.a, 9);
  expect_wc(bad.b.received(), bad.b, 1, IBV_WC_LOC_LEN_ERR);
  expect_wc(bad.a.sent(), bad.a, 50, IBV_WC_REM_INV_REQ_ERR);
  send(good.a, 40);
  expect_recv(good.b.received(), good.b, 2, 40);
}

// Receives of a shared queue belong to no queue pair until they are taken, so none is flushed.
TEST_F(SharedReceives, AreNotFlushed) {
  const Pair link = pair({}, sharing()), other = pair({}, sharing());
  receive(1, 0, 64);
  link.b.to_error();
  EXPECT_TRUE(nothing(link.b.recv_cq.get()));
  send(other.a, 8);
  expect_recv(other.b.received(), other.b, 1, 8);
}

TEST_F(SharedReceives, LastTakenIsTold) {
  const Pair link = pair({}, sharing());
  receive(1, 0, 64);
  link.b.to_error();
  EXPECT_TRUE(event_came(context.get(), IBV_EVENT_QP_LAST_WQE_REACHED, link.b.qp.get(),
                         link.b.recv_cq.get()));
  settle(link.b.recv_cq.get());
  EXPECT_FALSE(any_event(context.get())) << "once";
}

TEST_F(SharedReceives, LimitIsToldOnceAndThenOff) {
  const Pair link = pair({}, sharing());
  for (unsigned i = 0; i < 6; ++i) receive(i, 64 * i, 64);
  set_limit(4);
  EXPECT_EQ(limit(), 4u);
  for (unsigned i = 0; i < 2; ++i) {
    send(link.a, 8);
    (void)link.b.received();
  }
  settle(link.b.recv_cq.get());
  EXPECT_FALSE(any_event(context.get())) << "as many as the limit are left, not fewer";
  send(link.a, 8);
  expect_recv(link.b.received(), link.b, 2, 8);
  EXPECT_TRUE(
      event_came(context.get(), IBV_EVENT_SRQ_LIMIT_REACHED, srq_.get(), link.b.recv_cq.get()));
  EXPECT_EQ(limit(), 0u);
  for (unsigned i = 0; i < 3; ++i) {
    send(link.a, 8);
    (void)link.b.received();
  }
  settle(link.b.recv_cq.get());
  EXPECT_FALSE(any_event(context.get()));
}

TEST_F(SharedReceives, LimitMayBeArmedAgain) {
  const Pair link = pair({}, sharing());
  for (unsigned round = 0; round < 2; ++round) {
    receive(1, 0, 64);
    receive(2, 64, 64);
    set_limit(2);
    send(link.a, 8);
    (void)link.b.received();
    EXPECT_TRUE(
        event_came(context.get(), IBV_EVENT_SRQ_LIMIT_REACHED, srq_.get(), link.b.recv_cq.get()));
    send(link.a, 8);
    (void)link.b.received();
  }
}

TEST_F(SharedReceives, QueryTellsWhatThereIs) {
  ibv_srq_attr attr{};
  ASSERT_EQ(ibv_query_srq(srq_.get(), &attr), 0);
  EXPECT_GE(attr.max_wr, 16u);
  EXPECT_GE(attr.max_sge, 2u);
  EXPECT_EQ(attr.srq_limit, 0u);
}

TEST_F(SharedReceives, LimitBeyondTheQueueIsRefused) {
  ibv_srq_attr attr{};
  ASSERT_EQ(ibv_query_srq(srq_.get(), &attr), 0);
  attr.srq_limit = attr.max_wr + 1;
  EXPECT_EQ(ibv_modify_srq(srq_.get(), &attr, IBV_SRQ_LIMIT), EINVAL);
  EXPECT_EQ(limit(), 0u);
}

TEST_F(SharedReceives, BeyondTheQueueTheFirstRefusedIsNamed) {
  ibv_srq_attr attr{};
  ASSERT_EQ(ibv_query_srq(srq_.get(), &attr), 0);
  ibv_sge sge = memory_->sge(0, 64);
  std::vector<ibv_recv_wr> list(attr.max_wr + 2, ibv_recv_wr{1, nullptr, &sge, 1});
  for (std::size_t i = 0; i + 1 < list.size(); ++i) list[i].next = &list[i + 1];
  ibv_recv_wr* bad = nullptr;
  EXPECT_EQ(ibv_post_srq_recv(srq_.get(), list.data(), &bad), ENOMEM);
  EXPECT_EQ(bad, &list[attr.max_wr]);
}

TEST_F(SharedReceives, TooManyElementsAreRefused) {
  ibv_srq_attr attr{};
  ASSERT_EQ(ibv_query_srq(srq_.get(), &attr), 0);
  std::vector<ibv_sge> sges(attr.max_sge + 1, memory_->sge(0, 8));
  EXPECT_EQ(receive_into(1, sges), EINVAL);
}

TEST_F(SharedReceives, InUseIsNotDestroyed) {
  const End user = end(sharing());
  EXPECT_EQ(ibv_destroy_srq(srq_.get()), EBUSY);
}

TEST_F(SharedReceives, LargerThanTheDeviceAllowsAreNotMade) {
  ibv_srq_init_attr init{};
  init.attr = {static_cast<std::uint32_t>(device.max_srq_wr) + 1, 1, 0};
  EXPECT_EQ(Srq(ibv_create_srq(pd.get(), &init)), nullptr);
  init.attr = {1, static_cast<std::uint32_t>(device.max_srq_sge) + 1, 0};
  EXPECT_EQ(Srq(ibv_create_srq(pd.get(), &init)), nullptr);
}

}  // namespace conformance::srq_cases
