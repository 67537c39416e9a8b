// Requests that the responder refuses. The requester gets a completion with the reason, and its
// queue pair goes to ERR. The responder's queue pair goes to ERR, too, with an event (InfiniBand
// specification volume 1, 9.9 and 11.6.3).
#include "conformance/conformance_ends.h"

namespace conformance::remote_error_cases {

constexpr std::byte kUntouched{0x5a};

enum class Way { write, write_imm, read, add, swap };

struct Access {
  Way way;
  const char* name;
  int right;  ///< that the operation needs
};
constexpr Access kAccesses[] = {{Way::write, "Write", kRemoteWrite},
                                {Way::write_imm, "WriteImm", kRemoteWrite},
                                {Way::read, "Read", kRemoteRead},
                                {Way::add, "FetchAdd", kRemoteAtomic},
                                {Way::swap, "CompareSwap", kRemoteAtomic}};

class RemoteAccess : public Verbs, public testing::WithParamInterface<Access> {
 protected:
  void SetUp() override {
    if (GetParam().right == kRemoteAtomic && device.atomic_cap == IBV_ATOMIC_NONE)
      GTEST_SKIP() << "atomic_cap is IBV_ATOMIC_NONE";
  }

  static void attempt(const End& from, std::uint64_t address, std::uint32_t rkey) {
    const std::vector<ibv_sge> here = {from.memory.sge(512, 8)};
    switch (GetParam().way) {
      case Way::write:
        return Send(9, IBV_WR_RDMA_WRITE, here).at(address, rkey).on(from);
      case Way::write_imm:
        return Send(9, IBV_WR_RDMA_WRITE_WITH_IMM, here).imm(1).at(address, rkey).on(from);
      case Way::read:
        return Send(9, IBV_WR_RDMA_READ, here).at(address, rkey).on(from);
      case Way::add:
        return Send(9, IBV_WR_ATOMIC_FETCH_AND_ADD, here).atomic(address, rkey, 3).on(from);
      case Way::swap:
        return Send(9, IBV_WR_ATOMIC_CMP_AND_SWP, here).atomic(address, rkey, 0, 3).on(from);
    }
  }

  /// Checks that the request was refused with the right status, that no byte changed, and that both
  /// ends are in ERR.
  void expect_refusal(const Pair& link, std::uint64_t address, std::uint32_t rkey) const {
    if (GetParam().way == Way::write_imm) link.b.receive(5, 60000, 16);
    std::ranges::fill(link.a.memory.at(512, 8), kUntouched);
    attempt(link.a, address, rkey);
    expect_wc(link.a.sent(), link.a, 9, IBV_WC_REM_ACCESS_ERR);
    EXPECT_EQ(link.a.state(), IBV_QPS_ERR);
    EXPECT_TRUE(all_are(link.a.memory.at(512, 8), kUntouched));
    EXPECT_TRUE(all_are(link.b.memory.at(0, 128), std::byte{0}));
  }
};

TEST_P(RemoteAccess, IsGrantedWithItsRightAlone) {
  const int right = GetParam().right;
  EndOptions only;
  only.qp_access = right;
  only.memory_access = kLocalWrite | right;
  const Pair link = pair({}, only);
  if (GetParam().way == Way::write_imm) link.b.receive(5, 60000, 16);
  attempt(link.a, link.b.memory.address(), link.b.memory.rkey());
  EXPECT_EQ(link.a.sent().status, IBV_WC_SUCCESS);
  EXPECT_EQ(link.b.state(), IBV_QPS_RTS);
}

TEST_P(RemoteAccess, WrongKey) {
  const Pair link = pair();
  expect_refusal(link, link.b.memory.address(), link.b.memory.rkey() ^ 0x00ffff00);
}

TEST_P(RemoteAccess, BeyondTheEnd) {
  const Pair link = pair();
  const Memory small(pd.get(), 64);
  const bool aligned = GetParam().right == kRemoteAtomic;  // otherwise alignment would be the error
  expect_refusal(link, small.address(aligned ? 64 : 57), small.rkey());
}

TEST_P(RemoteAccess, BeforeTheBegin) {
  const Pair link = pair();
  expect_refusal(link, link.b.memory.address() - 8, link.b.memory.rkey());
}

TEST_P(RemoteAccess, WrapsAround) {
  const Pair link = pair();
  expect_refusal(link, ~std::uint64_t{0} - 7, link.b.memory.rkey());
}

TEST_P(RemoteAccess, MemoryWithoutTheRight) {
  EndOptions closed;
  closed.memory_access = kLocalWrite | (kRemote & ~GetParam().right);
  const Pair link = pair({}, closed);
  expect_refusal(link, link.b.memory.address(), link.b.memory.rkey());
}

TEST_P(RemoteAccess, QueuePairWithoutTheRight) {
  EndOptions closed;
  closed.qp_access = kRemote & ~GetParam().right;
  const Pair link = pair({}, closed);
  // An operation that a queue pair does not support is an invalid request. Adapters and Soft-RoCE
  // differ in which of two statuses they report.
  if (GetParam().way == Way::write_imm) link.b.receive(5, 60000, 16);
  attempt(link.a, link.b.memory.address(), link.b.memory.rkey());
  const ibv_wc wc = link.a.sent();
  EXPECT_EQ(wc.wr_id, 9u);
  EXPECT_TRUE(wc.status == IBV_WC_REM_ACCESS_ERR || wc.status == IBV_WC_REM_INV_REQ_ERR)
      << ibv_wc_status_str(wc.status);
  EXPECT_EQ(link.a.state(), IBV_QPS_ERR);
  EXPECT_TRUE(all_are(link.b.memory.at(0, 128), std::byte{0}));
}

TEST_P(RemoteAccess, OtherDomain) {
  const Pair link = pair();
  const Pd other(ibv_alloc_pd(context.get()));
  const Memory foreign(other.get(), 4096);
  expect_refusal(link, foreign.address(), foreign.rkey());
  EXPECT_TRUE(all_are(foreign.at(0, 64), std::byte{0}));
}

TEST_P(RemoteAccess, Deregistered) {
  const Pair link = pair();
  Memory gone(pd.get(), 4096);
  const std::uint32_t rkey = gone.rkey();
  attempt(link.a, gone.address(), rkey);
  if (GetParam().way == Way::write_imm) link.b.receive(5, 60000, 16);
  EXPECT_EQ(link.a.sent().status, IBV_WC_SUCCESS);
  std::ranges::fill(gone.at(0, 8), kUntouched);
  gone.deregister();
  expect_refusal(link, gone.address(), rkey);
  EXPECT_TRUE(all_are(gone.at(0, 8), kUntouched));
}

TEST_P(RemoteAccess, RefusalEndsTheResponderWithAnEvent) {
  const Pair link = pair();
  link.b.receive(7, 4096, 64);
  attempt(link.a, link.b.memory.address(), link.b.memory.rkey() ^ 0x00ffff00);
  expect_wc(link.a.sent(), link.a, 9, IBV_WC_REM_ACCESS_ERR);
  EXPECT_TRUE(link.b.gets_into(IBV_QPS_ERR));
  expect_wc(link.b.received(), link.b, 7, IBV_WC_WR_FLUSH_ERR);
  EXPECT_TRUE(
      event_came(context.get(), IBV_EVENT_QP_ACCESS_ERR, link.b.qp.get(), link.b.recv_cq.get()));
}

INSTANTIATE_TEST_SUITE_P(Ways, RemoteAccess, testing::ValuesIn(kAccesses),
                         [](const auto& access) { return std::string(access.param.name); });

class RemoteErrors : public Connected {};

// Requests behind the refused one are flushed, in order, signaled or not.
TEST_F(RemoteErrors, TheRestIsFlushedInOrder) {
  a.receive(20, 8192, 64);
  a.receive(21, 8192, 64);
  std::vector<std::unique_ptr<Send>> list;
  for (unsigned i = 0; i < 5; ++i) {
    list.push_back(std::make_unique<Send>(10 + i, IBV_WR_RDMA_WRITE,
                                          std::vector<ibv_sge>{a.memory.sge(0, 8)},
                                          i % 2 == 0 ? unsigned{IBV_SEND_SIGNALED} : 0u));
    list.back()->at(b.memory.address(64 * i), b.memory.rkey() ^ (i == 1 ? 0x00ffff00u : 0u));
  }
  fill(a.memory.at(0, 8), 1);
  chain(list);
  ASSERT_EQ(a.post(list[0]->wr), 0);
  expect_wc(a.sent(), a, 10, IBV_WC_SUCCESS, IBV_WC_RDMA_WRITE);
  expect_wc(a.sent(), a, 11, IBV_WC_REM_ACCESS_ERR);
  for (unsigned i = 2; i < 5; ++i) expect_wc(a.sent(), a, 10 + i, IBV_WC_WR_FLUSH_ERR);
  for (unsigned i = 20; i < 22; ++i) expect_wc(a.received(), a, i, IBV_WC_WR_FLUSH_ERR);
  EXPECT_TRUE(holds(b.memory.at(0, 8), 1));
  EXPECT_TRUE(all_are(b.memory.at(64, 300), std::byte{0}));
}

// An address that is not aligned to 8 is an invalid request (C9-108). Some drivers refuse the post,
// and then nothing is sent.
TEST_F(RemoteErrors, MisalignedAtomicIsInvalid) {
  if (device.atomic_cap == IBV_ATOMIC_NONE) GTEST_SKIP() << "atomic_cap is IBV_ATOMIC_NONE";
  Send send(1, IBV_WR_ATOMIC_FETCH_AND_ADD, {a.memory.sge(0, 8)});
  send.atomic(b.memory.address(4), b.memory.rkey(), 1);
  const int error = a.post(send.wr);
  if (error == 0) {
    expect_wc(a.sent(), a, 1, IBV_WC_REM_INV_REQ_ERR);
    EXPECT_EQ(a.state(), IBV_QPS_ERR);
    EXPECT_TRUE(b.gets_into(IBV_QPS_ERR));
  } else {
    EXPECT_EQ(error, EINVAL);
  }
  EXPECT_TRUE(all_are(b.memory.at(0, 64), std::byte{0}));
}

// A write with immediate needs a receive, but no room in it.
TEST_F(RemoteErrors, WriteWithImmediateNeedsNoRoom) {
  ASSERT_EQ(b.receive_into(1, {}), 0);
  fill(a.memory.at(0, 256), 4);
  Send(2, IBV_WR_RDMA_WRITE_WITH_IMM, {a.memory.sge(0, 256)})
      .imm(3)
      .at(b.memory.address(), b.memory.rkey())
      .on(a);
  expect_recv(b.received(), b, 1, 256, IBV_WC_WITH_IMM, IBV_WC_RECV_RDMA_WITH_IMM);
  EXPECT_TRUE(holds(b.memory.at(0, 256), 4));
}

// ---- no response ------------------------------------------------------------------------------

class Retries : public Verbs {
 protected:
  /// A connection with few retries and short timeouts.
  [[nodiscard]] Pair hasty(std::uint8_t rnr_retries = 1) const {
    EndOptions options;
    options.timeout = 4;  // 64 us
    options.retries = 1;
    options.rnr_retries = rnr_retries;
    return pair(options, options);
  }
};

TEST_F(Retries, NoReceiveEndsTheSender) {
  const Pair link = hasty();
  Send(1, IBV_WR_SEND, {link.a.memory.sge(0, 8)}).on(link.a);
  Send(2, IBV_WR_SEND, {link.a.memory.sge(0, 8)}).on(link.a);
  expect_wc(link.a.sent(), link.a, 1, IBV_WC_RNR_RETRY_EXC_ERR);
  expect_wc(link.a.sent(), link.a, 2, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(link.a.state(), IBV_QPS_ERR);
  EXPECT_EQ(link.b.state(), IBV_QPS_RTS) << "the receiver did nothing wrong";
}

TEST_F(Retries, NoRetryAtAll) {
  const Pair link = hasty(0);
  Send(1, IBV_WR_SEND_WITH_IMM, {link.a.memory.sge(0, 8)}).on(link.a);
  expect_wc(link.a.sent(), link.a, 1, IBV_WC_RNR_RETRY_EXC_ERR);
}

TEST_F(Retries, AReceiveInTimeIsFound) {
  const Pair link = pair();  // retries forever
  fill(link.a.memory.at(0, 3000), 1);
  Send(1, IBV_WR_SEND, {link.a.memory.sge(0, 20)}).on(link.a);
  Send(2, IBV_WR_SEND, {link.a.memory.sge(0, 3000)}).on(link.a);
  EXPECT_TRUE(nothing(link.a.send_cq.get()));
  link.b.receive(3, 0, 64);
  expect_recv(link.b.received(), link.b, 3, 20);
  expect_wc(link.a.sent(), link.a, 1, IBV_WC_SUCCESS);
  EXPECT_TRUE(nothing(link.a.send_cq.get()));
  link.b.receive(4, 4096, 3000);
  expect_recv(link.b.received(), link.b, 4, 3000);
  expect_wc(link.a.sent(), link.a, 2, IBV_WC_SUCCESS);
  EXPECT_TRUE(holds(link.b.memory.at(4096, 3000), 1));
}

TEST_F(Retries, OneSidedWorkNeedsNoReceive) {
  const Pair link = hasty();
  Send(1, IBV_WR_RDMA_WRITE, {link.a.memory.sge(0, 8)})
      .at(link.b.memory.address(), link.b.memory.rkey())
      .on(link.a);
  expect_wc(link.a.sent(), link.a, 1, IBV_WC_SUCCESS, IBV_WC_RDMA_WRITE);
  Send(2, IBV_WR_RDMA_WRITE_WITH_IMM, {link.a.memory.sge(0, 8)})
      .at(link.b.memory.address(), link.b.memory.rkey())
      .on(link.a);
  expect_wc(link.a.sent(), link.a, 2, IBV_WC_RNR_RETRY_EXC_ERR);
}

TEST_F(Retries, AFailedPeerDoesNotAnswer) {
  for (const ibv_wr_opcode opcode : {IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ}) {
    const Pair link = hasty();
    link.b.to_error();
    Send(1, opcode, {link.a.memory.sge(0, 8)})
        .at(link.b.memory.address(), link.b.memory.rkey())
        .on(link.a);
    expect_wc(link.a.sent(), link.a, 1, IBV_WC_RETRY_EXC_ERR);
    EXPECT_EQ(link.a.state(), IBV_QPS_ERR);
    EXPECT_TRUE(all_are(link.b.memory.at(0, 8), std::byte{0}));
  }
}

TEST_F(Retries, ADestroyedPeerDoesNotAnswer) {
  for (const ibv_wr_opcode opcode : {IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ}) {
    Pair link = hasty();
    link.b.qp.reset();
    Send(1, opcode, {link.a.memory.sge(0, 8)})
        .at(link.b.memory.address(), link.b.memory.rkey())
        .on(link.a);
    Send(2, IBV_WR_SEND, {link.a.memory.sge(0, 8)}).on(link.a);
    expect_wc(link.a.sent(), link.a, 1, IBV_WC_RETRY_EXC_ERR);
    expect_wc(link.a.sent(), link.a, 2, IBV_WC_WR_FLUSH_ERR);
  }
}

TEST_F(Retries, AResetPeerDoesNotAnswer) {
  const Pair link = hasty();
  ASSERT_EQ(link.b.move_to(IBV_QPS_RESET), 0);
  Send(1, IBV_WR_SEND, {link.a.memory.sge(0, 8)}).on(link.a);
  expect_wc(link.a.sent(), link.a, 1, IBV_WC_RETRY_EXC_ERR);
}

// A queue pair responds only to the one that it is connected to.
TEST_F(Retries, AStrangerIsNotAnswered) {
  const Pair link = hasty();
  EndOptions options;
  options.timeout = 4;
  options.retries = 1;
  const End stranger = end(options);
  stranger.to_init();
  stranger.to_rtr(link.b);
  stranger.to_rts();
  link.b.receive(1, 0, 64);
  Send(2, IBV_WR_RDMA_WRITE, {stranger.memory.sge(0, 8)})
      .at(link.b.memory.address(), link.b.memory.rkey())
      .on(stranger);
  EXPECT_NE(stranger.sent().status, IBV_WC_SUCCESS);
  Send(3, IBV_WR_SEND, {link.a.memory.sge(0, 8)}).on(link.a);
  expect_recv(link.b.received(), link.b, 1, 8);
}

}  // namespace conformance::remote_error_cases
