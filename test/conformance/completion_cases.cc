// Completion queues: polling, notification by a channel, solicited events, overrun, resizing.
#include <poll.h>

#include "conformance/conformance_ends.h"

namespace conformance::completion_cases {

class Completions : public Connected {};

TEST_F(Completions, AreHandedOutOnceAndInOrder) {
  for (unsigned i = 0; i < 6; ++i) b.receive(i, 64 * i, 64);
  for (unsigned i = 0; i < 6; ++i) Send(10 + i, IBV_WR_SEND, {a.memory.sge(0, 8)}).on(a);
  std::vector<ibv_wc> wcs;
  ibv_wc some[4];
  for (Deadline deadline; wcs.size() < 6 && deadline.look();) {
    const int got = ibv_poll_cq(b.recv_cq.get(), 4, some);
    ASSERT_GE(got, 0);
    ASSERT_LE(got, 4);
    wcs.insert(wcs.end(), some, some + got);
  }
  ASSERT_EQ(wcs.size(), 6u);
  for (unsigned i = 0; i < 6; ++i) expect_recv(wcs[i], b, i, 8);
  EXPECT_TRUE(nothing(b.recv_cq.get()));
  const std::vector<ibv_wc> sent = take(a.send_cq.get(), 6);
  for (unsigned i = 0; i < sent.size(); ++i) expect_wc(sent[i], a, 10 + i, IBV_WC_SUCCESS);
  EXPECT_TRUE(nothing(a.send_cq.get()));
}

TEST_F(Completions, PollingForNoneTakesNone) {
  b.receive(1, 0, 64);
  Send(2, IBV_WR_SEND, {a.memory.sge(0, 8)}).on(a);
  for (int i = 0; i < 200; ++i) EXPECT_EQ(ibv_poll_cq(b.recv_cq.get(), 0, nullptr), 0);
  expect_recv(b.received(), b, 1, 8);
}

// More completions than the queue holds: the queue is in error, which an event reports.
TEST_F(Completions, OverrunIsTold) {
  EndOptions small;
  small.cqe = 2;
  const Pair tight = pair(small);
  const int room = tight.a.send_cq->cqe;
  const int sends = room + 1;
  ASSERT_LE(sends, static_cast<int>(tight.a.cap.max_send_wr));
  for (int i = 0; i < sends; ++i) {
    Send(static_cast<std::uint64_t>(i), IBV_WR_RDMA_WRITE, {tight.a.memory.sge(0, 8)})
        .at(tight.b.memory.address(), tight.b.memory.rkey())
        .on(tight.a);
  }
  EXPECT_TRUE(
      event_came(context.get(), IBV_EVENT_CQ_ERR, tight.a.send_cq.get(), tight.b.recv_cq.get()));
}

TEST_F(Completions, ResizedKeepsWhatItHolds) {
  b.receive(1, 0, 64);
  b.receive(2, 64, 64);
  Send(3, IBV_WR_SEND, {a.memory.sge(0, 8)}).on(a);
  settle(a.send_cq.get());
  EXPECT_EQ(ibv_resize_cq(b.recv_cq.get(), 0), EINVAL);
  const int smaller = b.recv_cq->cqe / 2;
  ASSERT_EQ(ibv_resize_cq(b.recv_cq.get(), smaller), 0);
  EXPECT_GE(b.recv_cq->cqe, smaller);
  Send(4, IBV_WR_SEND, {a.memory.sge(0, 9)}).on(a);
  expect_recv(b.received(), b, 1, 8);
  expect_recv(b.received(), b, 2, 9);
}

TEST_F(Completions, ResizedBelowWhatWaitsIsRefused) {
  b.receive(1, 0, 64);
  b.receive(2, 64, 64);
  for (std::uint64_t i = 0; i < 2; ++i) Send(i, IBV_WR_SEND, {a.memory.sge(0, 8)}).on(a);
  (void)take(a.send_cq.get(), 2);
  const int error = ibv_resize_cq(b.recv_cq.get(), 1);
  if (error == EOPNOTSUPP || error == ENOSYS) GTEST_SKIP() << "completion queues keep their size";
  EXPECT_EQ(error, EINVAL);
  EXPECT_EQ(take(b.recv_cq.get(), 2).size(), 2u);
}

TEST_F(Completions, Grows) {
  const int larger = 2 * b.recv_cq->cqe;
  const int error = ibv_resize_cq(b.recv_cq.get(), larger);
  if (error == EOPNOTSUPP || error == ENOSYS) GTEST_SKIP() << "completion queues do not grow";
  ASSERT_EQ(error, 0);
  EXPECT_GE(b.recv_cq->cqe, larger);
  b.receive(1, 0, 64);
  Send(3, IBV_WR_SEND, {a.memory.sge(0, 8)}).on(a);
  expect_recv(b.received(), b, 1, 8);
}

// ---- notification -----------------------------------------------------------------------------

class Notification : public Verbs {
 protected:
  Notification() : channel_(ibv_create_comp_channel(context.get())) {
    must(channel_ != nullptr, "ibv_create_comp_channel");
    do_not_block(channel_->fd);
    EndOptions watched;
    watched.channel = channel_.get();
    link_ = std::make_unique<Pair>(context.get(), pd.get(), EndOptions{}, watched);
    for (unsigned i = 0; i < 8; ++i) b().receive(i, 64 * i, 64);
  }
  [[nodiscard]] const End& a() const { return link_->a; }
  [[nodiscard]] const End& b() const { return link_->b; }
  void send(unsigned flags = 0) const {
    Send(50, IBV_WR_SEND, {a().memory.sge(0, 8)}, IBV_SEND_SIGNALED | flags).on(a());
  }
  /// Whether an event arrives within `timeout`. Takes and acknowledges it.
  [[nodiscard]] bool event(const ibv_cq* of, std::chrono::milliseconds timeout) const {
    pollfd waiting{channel_->fd, POLLIN, 0};
    if (::poll(&waiting, 1, static_cast<int>(timeout.count())) != 1) return false;
    ibv_cq* cq = nullptr;
    void* cq_context = nullptr;
    if (ibv_get_cq_event(channel_.get(), &cq, &cq_context) != 0) return false;
    ibv_ack_cq_events(cq, 1);
    EXPECT_EQ(cq, of);
    EXPECT_EQ(cq_context, of->cq_context);
    return true;
  }
  [[nodiscard]] bool told() const { return event(b().recv_cq.get(), settings.timeout); }
  [[nodiscard]] bool silent() const {
    settle(b().recv_cq.get());
    return !event(b().recv_cq.get(), std::chrono::milliseconds(3));
  }

 private:
  Channel channel_;
  std::unique_ptr<Pair> link_;
};

TEST_F(Notification, ComesForTheNextCompletion) {
  ASSERT_EQ(ibv_req_notify_cq(b().recv_cq.get(), 0), 0);
  send();
  EXPECT_TRUE(told());
  expect_recv(b().received(), b(), 0, 8);
}

TEST_F(Notification, OnlyWhenAskedFor) {
  send();
  EXPECT_TRUE(silent());
  expect_recv(b().received(), b(), 0, 8);
  EXPECT_TRUE(silent());
}

TEST_F(Notification, OnceForEachRequest) {
  ASSERT_EQ(ibv_req_notify_cq(b().recv_cq.get(), 0), 0);
  send();
  EXPECT_TRUE(told());
  send();
  EXPECT_TRUE(silent());
  ASSERT_EQ(take(b().recv_cq.get(), 2).size(), 2u);
  ASSERT_EQ(ibv_req_notify_cq(b().recv_cq.get(), 0), 0);
  send();
  EXPECT_TRUE(told());
  expect_recv(b().received(), b(), 2, 8);
}

TEST_F(Notification, OfSends) {
  ASSERT_EQ(ibv_req_notify_cq(b().send_cq.get(), 0), 0);
  Send(1, IBV_WR_RDMA_WRITE, {b().memory.sge(0, 8)})
      .at(a().memory.address(), a().memory.rkey())
      .on(b());
  EXPECT_TRUE(event(b().send_cq.get(), settings.timeout));
  expect_wc(b().sent(), b(), 1, IBV_WC_SUCCESS, IBV_WC_RDMA_WRITE);
}

TEST_F(Notification, SolicitedOnlyLeavesTheOthersSilent) {
  ASSERT_EQ(ibv_req_notify_cq(b().recv_cq.get(), 1), 0);
  send();
  expect_recv(b().received(), b(), 0, 8);
  EXPECT_TRUE(silent());
  send(IBV_SEND_SOLICITED);
  EXPECT_TRUE(told());
  expect_recv(b().received(), b(), 1, 8);
}

TEST_F(Notification, SolicitedByWriteWithImmediate) {
  ASSERT_EQ(ibv_req_notify_cq(b().recv_cq.get(), 1), 0);
  const auto write = [&](unsigned flags) {
    Send(1, IBV_WR_RDMA_WRITE_WITH_IMM, {a().memory.sge(0, 8)}, IBV_SEND_SIGNALED | flags)
        .at(b().memory.address(4096), b().memory.rkey())
        .on(a());
  };
  write(0);
  (void)b().received();
  EXPECT_TRUE(silent());
  write(IBV_SEND_SOLICITED);
  EXPECT_TRUE(told());
  (void)b().received();
}

// Completions with an error count as solicited (11.4.2.2).
TEST_F(Notification, ErrorsAreSolicited) {
  ASSERT_EQ(ibv_req_notify_cq(b().recv_cq.get(), 1), 0);
  b().to_error();
  EXPECT_TRUE(told());
  expect_wc(b().received(), b(), 0, IBV_WC_WR_FLUSH_ERR);
}

TEST_F(Notification, AnyOverrulesSolicited) {
  ASSERT_EQ(ibv_req_notify_cq(b().recv_cq.get(), 1), 0);
  ASSERT_EQ(ibv_req_notify_cq(b().recv_cq.get(), 0), 0);
  ASSERT_EQ(ibv_req_notify_cq(b().recv_cq.get(), 1), 0);
  send();
  EXPECT_TRUE(told());
  expect_recv(b().received(), b(), 0, 8);
}

TEST_F(Notification, SolicitedDatagrams) {
  EndOptions options;
  options.type = IBV_QPT_UD;
  const End from = end(options);
  const Channel channel(ibv_create_comp_channel(context.get()));
  options.channel = channel.get();
  const End to = end(options);
  do_not_block(channel->fd);
  connect(from, to);
  ibv_ah_attr where = from.address_of(to);
  const Ah ah(ibv_create_ah(pd.get(), &where));
  to.receive(1, 0, 256);
  to.receive(2, 256, 256);
  ASSERT_EQ(ibv_req_notify_cq(to.recv_cq.get(), 1), 0);
  const auto send_one = [&](unsigned flags) {
    Send(3, IBV_WR_SEND, {from.memory.sge(0, 8)}, IBV_SEND_SIGNALED | flags)
        .to(ah.get(), to.qp->qp_num, options.qkey)
        .on(from);
  };
  pollfd waiting{channel->fd, POLLIN, 0};
  send_one(0);
  (void)to.received();
  settle(to.recv_cq.get());
  EXPECT_EQ(::poll(&waiting, 1, 3), 0);
  send_one(IBV_SEND_SOLICITED);
  EXPECT_EQ(::poll(&waiting, 1, static_cast<int>(settings.timeout.count())), 1);
  (void)to.received();
  ibv_cq* cq = nullptr;
  void* cq_context = nullptr;
  if (ibv_get_cq_event(channel.get(), &cq, &cq_context) == 0) ibv_ack_cq_events(cq, 1);
}

TEST_F(Notification, ChannelInUseIsNotDestroyed) {
  EXPECT_EQ(ibv_destroy_comp_channel(b().recv_cq->channel), EBUSY);
}

}  // namespace conformance::completion_cases
