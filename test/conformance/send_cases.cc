// SEND on a reliable connection: the data, its place, and the completions of both ends.
#include <set>

#include "conformance/conformance_ends.h"

namespace conformance::send_cases {

constexpr std::size_t kThere = 0;  // offset of the sender's bytes
constexpr std::size_t kHere = 0;   // offset of the receive
constexpr std::byte kUntouched{0x5a};

class SendLength : public Connected, public testing::WithParamInterface<std::uint32_t> {};

TEST_P(SendLength, ArrivesWhole) {
  const std::uint32_t length = GetParam();
  fill(a.memory.at(kThere, length), length);
  std::ranges::fill(b.memory.at(kHere, length + 8), kUntouched);
  b.receive(7, kHere, length + 8);
  Send(3, IBV_WR_SEND, {a.memory.sge(kThere, length)}).on(a);
  expect_recv(b.received(), b, 7, length);
  expect_wc(a.sent(), a, 3, IBV_WC_SUCCESS, IBV_WC_SEND);
  EXPECT_TRUE(holds(b.memory.at(kHere, length), length));
  EXPECT_TRUE(all_are(b.memory.at(kHere + length, 8), kUntouched)) << "written behind the message";
}

TEST_P(SendLength, FillsItsReceiveExactly) {
  const std::uint32_t length = GetParam();
  fill(a.memory.at(kThere, length), ~length);
  b.receive(7, kHere, length);
  Send(3, IBV_WR_SEND_WITH_IMM, {a.memory.sge(kThere, length)}).imm(length).on(a);
  const ibv_wc wc = b.received();
  expect_recv(wc, b, 7, length, IBV_WC_WITH_IMM);
  EXPECT_EQ(ntohl(wc.imm_data), length);
  EXPECT_TRUE(holds(b.memory.at(kHere, length), ~length));
  expect_wc(a.sent(), a, 3, IBV_WC_SUCCESS, IBV_WC_SEND);
}

// Lengths around a line of 64 bytes, the path's MTU of 1024, and several MTUs.
INSTANTIATE_TEST_SUITE_P(Lengths, SendLength,
                         testing::Values(0u, 1u, 2u, 7u, 8u, 47u, 48u, 49u, 63u, 64u, 65u, 439u,
                                         440u, 441u, 1023u, 1024u, 1025u, 1088u, 1089u, 2048u,
                                         3073u, 4096u, 32768u, 60000u));

class RcSend : public Connected {};

TEST_F(RcSend, ImmediateTravelsInNetworkOrder) {
  b.receive(1, kHere, 16);
  Send send(2, IBV_WR_SEND_WITH_IMM, {a.memory.sge(kThere, 4)});
  send.imm(0x01020304).on(a);
  const ibv_wc wc = b.received();
  EXPECT_EQ(wc.imm_data, send.wr.imm_data);
  EXPECT_EQ(ntohl(wc.imm_data), 0x01020304u);
  expect_recv(wc, b, 1, 4, IBV_WC_WITH_IMM);
}

TEST_F(RcSend, WithoutImmediateTheFlagIsClear) {
  for (const ibv_wr_opcode opcode : {IBV_WR_SEND_WITH_IMM, IBV_WR_SEND}) {
    b.receive(1, kHere, 16);
    Send(2, opcode, {a.memory.sge(kThere, 4)}).imm(5).on(a);
    expect_recv(b.received(), b, 1, 4, opcode == IBV_WR_SEND ? 0u : unsigned{IBV_WC_WITH_IMM});
  }
}

TEST_F(RcSend, GathersAndScattersInOrder) {
  fill(a.memory.at(0, 300), 1);
  b.receive_into(1, {b.memory.sge(5000, 10), b.memory.sge(3000, 0), b.memory.sge(1000, 200),
                     b.memory.sge(8000, 300)});
  Send(2, IBV_WR_SEND,
       {a.memory.sge(0, 100), a.memory.sge(100, 1), a.memory.sge(101, 0), a.memory.sge(101, 199)})
      .on(a);
  expect_recv(b.received(), b, 1, 300);
  std::vector<std::byte> together(300);
  std::ranges::copy(b.memory.at(5000, 10), together.begin());
  std::ranges::copy(b.memory.at(1000, 200), together.begin() + 10);
  std::ranges::copy(b.memory.at(8000, 90), together.begin() + 210);
  EXPECT_TRUE(holds(together, 1));
  EXPECT_TRUE(all_are(b.memory.at(8090, 210), std::byte{0}));
}

TEST_F(RcSend, GathersMoreThanOnePacket) {
  fill(a.memory.at(0, 9000), 2);
  b.receive_into(1, {b.memory.sge(20000, 4097), b.memory.sge(0, 1), b.memory.sge(30000, 8000)});
  Send(2, IBV_WR_SEND, {a.memory.sge(0, 1023), a.memory.sge(1023, 3001), a.memory.sge(4024, 4976)})
      .on(a);
  expect_recv(b.received(), b, 1, 9000);
  std::vector<std::byte> together(9000);
  std::ranges::copy(b.memory.at(20000, 4097), together.begin());
  std::ranges::copy(b.memory.at(0, 1), together.begin() + 4097);
  std::ranges::copy(b.memory.at(30000, 4902), together.begin() + 4098);
  EXPECT_TRUE(holds(together, 2));
}

TEST_F(RcSend, NoElementIsAnEmptyMessage) {
  ASSERT_EQ(b.receive_into(1, {}), 0);
  Send(2, IBV_WR_SEND).on(a);
  expect_recv(b.received(), b, 1, 0);
  expect_wc(a.sent(), a, 2, IBV_WC_SUCCESS, IBV_WC_SEND);
}

// Inline data is copied before the post returns: the memory may change, and needs no key.
TEST_F(RcSend, InlineIsReadAtOnce) {
  std::vector<std::byte> private_bytes(60);
  fill(private_bytes, 3);
  b.receive(1, kHere, 64);
  const ibv_sge unregistered{reinterpret_cast<std::uint64_t>(private_bytes.data()), 60, 0};
  Send(2, IBV_WR_SEND, {unregistered}, IBV_SEND_SIGNALED | IBV_SEND_INLINE).on(a);
  std::ranges::fill(private_bytes, std::byte{0xff});
  expect_recv(b.received(), b, 1, 60);
  EXPECT_TRUE(holds(b.memory.at(kHere, 60), 3));
}

TEST_F(RcSend, InlineGathers) {
  fill(a.memory.at(0, 40), 4);
  b.receive(1, kHere, 64);
  Send(2, IBV_WR_SEND_WITH_IMM, {a.memory.sge(0, 13), a.memory.sge(13, 0), a.memory.sge(13, 27)},
       IBV_SEND_SIGNALED | IBV_SEND_INLINE)
      .imm(9)
      .on(a);
  std::ranges::fill(a.memory.at(0, 40), std::byte{0});
  expect_recv(b.received(), b, 1, 40, IBV_WC_WITH_IMM);
  EXPECT_TRUE(holds(b.memory.at(kHere, 40), 4));
}

TEST_F(RcSend, ManyArriveInOrderEachInItsReceive) {
  constexpr unsigned kRounds = 20, kBurst = 8;
  for (unsigned round = 0; round < kRounds; ++round) {
    for (unsigned i = 0; i < kBurst; ++i) b.receive(100 + i, 4096 * i, 4096);
    for (unsigned i = 0; i < kBurst; ++i) {
      const std::uint32_t length = (round * 131 + i * 517) % 4096;
      fill(a.memory.at(4096 * i, length), round * kBurst + i);
      Send(200 + i, IBV_WR_SEND, {a.memory.sge(4096 * i, length)}).on(a);
    }
    for (unsigned i = 0; i < kBurst; ++i) {
      const std::uint32_t length = (round * 131 + i * 517) % 4096;
      expect_recv(b.received(), b, 100 + i, length);
      EXPECT_TRUE(holds(b.memory.at(4096 * i, length), round * kBurst + i));
    }
    for (unsigned i = 0; i < kBurst; ++i) expect_wc(a.sent(), a, 200 + i, IBV_WC_SUCCESS);
  }
}

TEST_F(RcSend, BothWaysAtOnce) {
  fill(a.memory.at(0, 2000), 5);
  fill(b.memory.at(0, 2000), 6);
  a.receive(1, 8192, 2000);
  b.receive(2, 8192, 2000);
  Send(3, IBV_WR_SEND, {a.memory.sge(0, 2000)}).on(a);
  Send(4, IBV_WR_SEND, {b.memory.sge(0, 2000)}).on(b);
  expect_recv(a.received(), a, 1, 2000);
  expect_recv(b.received(), b, 2, 2000);
  EXPECT_TRUE(holds(a.memory.at(8192, 2000), 6));
  EXPECT_TRUE(holds(b.memory.at(8192, 2000), 5));
  expect_wc(a.sent(), a, 3, IBV_WC_SUCCESS);
  expect_wc(b.sent(), b, 4, IBV_WC_SUCCESS);
}

class RcSignal : public Verbs {};

TEST_F(RcSignal, UnsignaledDoNotCompleteButAreDoneBeforeTheNextSignaled) {
  const Pair link = pair();
  for (unsigned i = 0; i < 4; ++i) link.b.receive(i, 64 * i, 64);
  for (unsigned i = 0; i < 3; ++i)
    Send(10 + i, IBV_WR_SEND, {link.a.memory.sge(0, 8)}, 0).on(link.a);
  Send(13, IBV_WR_SEND, {link.a.memory.sge(0, 8)}).on(link.a);
  EXPECT_EQ(take(link.b.recv_cq.get(), 4).size(), 4u);
  expect_wc(link.a.sent(), link.a, 13, IBV_WC_SUCCESS);
  EXPECT_TRUE(nothing(link.a.send_cq.get()));
}

TEST_F(RcSignal, UnsignaledOneSidedDoNotComplete) {
  const Pair link = pair();
  const Memory& target = link.b.memory;
  Send(1, IBV_WR_RDMA_WRITE, {link.a.memory.sge(0, 8)}, 0)
      .at(target.address(), target.rkey())
      .on(link.a);
  Send(2, IBV_WR_RDMA_READ, {link.a.memory.sge(64, 8)}, 0)
      .at(target.address(), target.rkey())
      .on(link.a);
  Send(3, IBV_WR_RDMA_WRITE, {link.a.memory.sge(0, 8)})
      .at(target.address(), target.rkey())
      .on(link.a);
  expect_wc(link.a.sent(), link.a, 3, IBV_WC_SUCCESS, IBV_WC_RDMA_WRITE);
  EXPECT_TRUE(nothing(link.a.send_cq.get()));
}

TEST_F(RcSignal, SignalAllCompletesEach) {
  EndOptions all;
  all.signal_all = true;
  const Pair link = pair(all);
  for (unsigned i = 0; i < 3; ++i) link.b.receive(i, 64 * i, 64);
  for (unsigned i = 0; i < 3; ++i)
    Send(10 + i, IBV_WR_SEND, {link.a.memory.sge(0, 8)}, 0).on(link.a);
  for (unsigned i = 0; i < 3; ++i) expect_wc(link.a.sent(), link.a, 10 + i, IBV_WC_SUCCESS);
}

TEST_F(RcSignal, UnsignaledRoomComesBackWithTheNextSignaled) {
  EndOptions small;
  small.send_wr = 4;
  const Pair link = pair(small);
  const std::uint32_t depth = link.a.cap.max_send_wr;
  for (unsigned round = 0; round < 3; ++round) {
    for (unsigned i = 0; i + 1 < depth; ++i) {
      Send write(i, IBV_WR_RDMA_WRITE, {link.a.memory.sge(0, 8)}, 0);
      write.at(link.b.memory.address(), link.b.memory.rkey()).on(link.a);
    }
    Send last(99, IBV_WR_RDMA_WRITE, {link.a.memory.sge(0, 8)});
    last.at(link.b.memory.address(), link.b.memory.rkey()).on(link.a);
    expect_wc(link.a.sent(), link.a, 99, IBV_WC_SUCCESS, IBV_WC_RDMA_WRITE);
  }
}

// Both queues of a queue pair may share a completion queue; opcodes and ids tell them apart.
TEST_F(RcSignal, OneCompletionQueueForBothDirections) {
  const Pair link = pair();
  Cq shared(ibv_create_cq(context.get(), 16, nullptr, nullptr, 0));
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = shared.get();
  init.qp_type = IBV_QPT_RC;
  init.cap = {4, 4, 1, 1, 0};
  End left(context.get(), pd.get());
  left.qp.reset(ibv_create_qp(pd.get(), &init));
  ASSERT_NE(left.qp, nullptr);
  End right(context.get(), pd.get());
  connect(left, right);
  left.receive(1, 0, 64);
  right.receive(2, 0, 64);
  Send(3, IBV_WR_SEND, {right.memory.sge(64, 5)}).on(right);
  expect_recv(one(shared.get()), left, 1, 5);
  Send(4, IBV_WR_SEND, {left.memory.sge(64, 6)}).on(left);
  expect_recv(right.received(), right, 2, 6);
  expect_wc(one(shared.get()), left, 4, IBV_WC_SUCCESS, IBV_WC_SEND);
  left.qp.reset();  // before its completion queue
}

class TwoContexts : public Verbs {};

TEST_F(TwoContexts, AreConnectedLikeOne) {
  const Context other = open_device();
  const Pd other_pd(ibv_alloc_pd(other.get()));
  ASSERT_NE(other_pd, nullptr);
  const End a(context.get(), pd.get());
  const End b(other.get(), other_pd.get());
  connect(a, b);
  fill(a.memory.at(0, 5000), 7);
  b.receive(1, 0, 5000);
  Send(2, IBV_WR_SEND, {a.memory.sge(0, 5000)}).on(a);
  expect_recv(b.received(), b, 1, 5000);
  EXPECT_TRUE(holds(b.memory.at(0, 5000), 7));
  expect_wc(a.sent(), a, 2, IBV_WC_SUCCESS, IBV_WC_SEND);
  Send(3, IBV_WR_RDMA_WRITE, {a.memory.sge(0, 3000)})
      .at(b.memory.address(9000), b.memory.rkey())
      .on(a);
  expect_wc(a.sent(), a, 3, IBV_WC_SUCCESS, IBV_WC_RDMA_WRITE);
  EXPECT_EQ(std::memcmp(b.memory.at(9000, 3000).data(), a.memory.at(0, 3000).data(), 3000), 0);
  Send(4, IBV_WR_ATOMIC_FETCH_AND_ADD, {a.memory.sge(6000, 8)})
      .atomic(b.memory.address(16000), b.memory.rkey(), 5)
      .on(a);
  expect_wc(a.sent(), a, 4, IBV_WC_SUCCESS, IBV_WC_FETCH_ADD);
  EXPECT_EQ(b.memory.word(16000), 5u);
}

/// An end in its own context.
class OwnContext {
 public:
  explicit OwnContext(const EndOptions& options = {})
      : pd(ibv_alloc_pd(context.get())), end(context.get(), pd.get(), options) {
    must(pd != nullptr, "ibv_alloc_pd");
  }
  Context context = open_device();
  Pd pd;
  End end;
};

// Contexts of one port share its GIDs and the space of its queue pair numbers.
TEST_F(TwoContexts, HaveOneGidAndNumbersOfTheirOwn) {
  const End a(context.get(), pd.get());
  const OwnContext other;
  EXPECT_EQ(std::memcmp(a.gid().raw, other.end.gid().raw, sizeof(ibv_gid)), 0);
  std::set<std::uint32_t> numbers{a.qp->qp_num, other.end.qp->qp_num};
  const End c(context.get(), pd.get());
  const End d(other.context.get(), other.pd.get());
  numbers.insert({c.qp->qp_num, d.qp->qp_num});
  EXPECT_EQ(numbers.size(), 4u);
}

// Programs that test themselves use the GID of their own port as destination.
TEST_F(TwoContexts, AreReachedByTheGidOfTheOther) {
  const End a(context.get(), pd.get());
  const OwnContext other;
  const End& b = other.end;
  const auto connect_by_own_gid = [](const End& end, const End& peer) {
    end.to_init();
    ibv_qp_attr attr = end.rtr_attr(peer);
    attr.ah_attr.grh.dgid = end.gid();
    must(end.modify(attr, kRtrMask) == 0, "RTR");
    end.to_rts();
  };
  connect_by_own_gid(a, b);
  connect_by_own_gid(b, a);
  fill(a.memory.at(0, 500), 7);
  fill(b.memory.at(1000, 500), 8);
  b.receive(1, 0, 500);
  a.receive(2, 1000, 500);
  Send(3, IBV_WR_SEND, {a.memory.sge(0, 500)}).on(a);
  Send(4, IBV_WR_SEND, {b.memory.sge(1000, 500)}).on(b);
  expect_recv(b.received(), b, 1, 500);
  expect_recv(a.received(), a, 2, 500);
  EXPECT_TRUE(holds(b.memory.at(0, 500), 7));
  EXPECT_TRUE(holds(a.memory.at(1000, 500), 8));
}

TEST_F(TwoContexts, AreReachedThroughOneAddress) {
  constexpr std::uint32_t kHeader = sizeof(ibv_grh);
  EndOptions datagrams;
  datagrams.type = IBV_QPT_UD;
  const End a(context.get(), pd.get(), datagrams);
  const End b(context.get(), pd.get(), datagrams);
  const OwnContext other(datagrams);
  for (const End* end : {&a, &b, &other.end}) {
    end->to_init();
    end->to_rtr(a);
    end->to_rts();
    end->receive(1, 0, 256);
  }
  ibv_ah_attr where = a.address_of(a);
  const Ah address(ibv_create_ah(pd.get(), &where));
  ASSERT_NE(address, nullptr);
  fill(a.memory.at(0, 24), 5);
  fill(a.memory.at(64, 24), 6);
  Send to_b(2, IBV_WR_SEND, {a.memory.sge(0, 24)});
  Send to_other(3, IBV_WR_SEND, {a.memory.sge(64, 24)});
  to_b.to(address.get(), b.qp->qp_num, datagrams.qkey);
  to_other.to(address.get(), other.end.qp->qp_num, datagrams.qkey).wr.next = &to_b.wr;
  to_other.on(a);
  expect_recv(b.received(), b, 1, kHeader + 24, IBV_WC_GRH);
  ibv_wc wc = other.end.received();
  expect_recv(wc, other.end, 1, kHeader + 24, IBV_WC_GRH);
  EXPECT_TRUE(holds(b.memory.at(kHeader, 24), 5));
  EXPECT_TRUE(holds(other.end.memory.at(kHeader, 24), 6));
  // The return address, from the received datagram.
  auto* header = reinterpret_cast<ibv_grh*>(other.end.memory.at(0, kHeader).data());
  const Ah back(ibv_create_ah_from_wc(other.pd.get(), &wc, header, settings.port));
  ASSERT_NE(back, nullptr);
  Send(4, IBV_WR_SEND, {other.end.memory.sge(512, 8)})
      .to(back.get(), wc.src_qp, datagrams.qkey)
      .on(other.end);
  expect_recv(a.received(), a, 1, kHeader + 8, IBV_WC_GRH);
}

}  // namespace conformance::send_cases
