// Unreliable datagrams: addressed one by one, with a routing header before the payload, and
// silently dropped after any error.
#include "conformance/conformance_ends.h"

namespace conformance::datagram_cases {

constexpr std::uint32_t kHeader = sizeof(ibv_grh);
static_assert(kHeader == 40);
constexpr std::uint32_t kKey = 0x1234;
constexpr std::byte kUntouched{0x5a};

EndOptions datagrams() {
  EndOptions options;
  options.type = IBV_QPT_UD;
  options.qkey = kKey;
  return options;
}

class Datagrams : public Verbs {
 protected:
  Datagrams() : link_(context.get(), pd.get(), datagrams(), datagrams()), a(link_.a), b(link_.b) {
    ibv_ah_attr where = a.address_of(b);
    to_b_.reset(ibv_create_ah(pd.get(), &where));
    must(to_b_ != nullptr, "ibv_create_ah");
    ibv_port_attr port{};
    must(ibv_query_port(context.get(), settings.port, &port) == 0, "ibv_query_port");
    mtu_ = 128u << port.active_mtu;
  }
  Send& addressed(Send& send, std::uint32_t qkey = kKey) const {
    return send.to(to_b_.get(), b.qp->qp_num, qkey);
  }
  void send(std::uint64_t id, std::size_t offset, std::uint32_t length,
            std::uint32_t qkey = kKey) const {
    Send wr(id, IBV_WR_SEND, {a.memory.sge(offset, length)});
    addressed(wr, qkey).on(a);
    expect_wc(a.sent(), a, id, IBV_WC_SUCCESS, IBV_WC_SEND);
  }
  /// Checks the next datagram, which shows that earlier ones were dropped.
  void expect_next(std::uint64_t id, unsigned seed) const {
    fill(a.memory.at(30000, 24), seed);
    send(99, 30000, 24);
    expect_recv(b.received(), b, id, kHeader + 24, IBV_WC_GRH);
    EXPECT_TRUE(nothing(b.recv_cq.get()));
  }
  Pair link_;
  End& a;
  End& b;
  Ah to_b_;
  std::uint32_t mtu_ = 0;
};

class DatagramLength : public Datagrams, public testing::WithParamInterface<std::uint32_t> {};

TEST_P(DatagramLength, ArrivesBehindTheHeader) {
  const std::uint32_t length = GetParam();
  ASSERT_LE(length, mtu_);
  fill(a.memory.at(0, length), length);
  std::ranges::fill(b.memory.at(0, length + 64), kUntouched);
  b.receive(1, 0, length + kHeader + 8);
  send(2, 0, length);
  const ibv_wc wc = b.received();
  expect_recv(wc, b, 1, length + kHeader, IBV_WC_GRH);
  EXPECT_EQ(wc.src_qp, a.qp->qp_num);
  EXPECT_TRUE(holds(b.memory.at(kHeader, length), length));
  EXPECT_TRUE(all_are(b.memory.at(kHeader + length, 8), kUntouched));
}

TEST_P(DatagramLength, FillsItsReceiveExactlyWithImmediate) {
  const std::uint32_t length = GetParam();
  fill(a.memory.at(0, length), ~length);
  b.receive(1, 0, length + kHeader);
  Send wr(2, IBV_WR_SEND_WITH_IMM, {a.memory.sge(0, length)});
  addressed(wr.imm(0x0a0b0c0d)).on(a);
  const ibv_wc wc = b.received();
  expect_recv(wc, b, 1, length + kHeader, IBV_WC_GRH | IBV_WC_WITH_IMM);
  EXPECT_EQ(ntohl(wc.imm_data), 0x0a0b0c0du);
  EXPECT_TRUE(holds(b.memory.at(kHeader, length), ~length));
}

INSTANTIATE_TEST_SUITE_P(Lengths, DatagramLength,
                         testing::Values(0u, 1u, 8u, 24u, 48u, 49u, 64u, 440u, 441u, 1000u, 1024u));

TEST_F(Datagrams, OfOneMtuArrive) {
  fill(a.memory.at(0, mtu_), 1);
  b.receive(1, 0, mtu_ + kHeader);
  send(2, 0, mtu_);
  expect_recv(b.received(), b, 1, mtu_ + kHeader, IBV_WC_GRH);
  EXPECT_TRUE(holds(b.memory.at(kHeader, mtu_), 1));
}

// The header names both ends. On Ethernet its first 20 bytes are undefined, and the rest may be an
// IPv4 header; libibverbs' functions below distinguish the two.
TEST_F(Datagrams, HeaderNamesTheReceiver) {
  std::ranges::fill(b.memory.at(0, kHeader), std::byte{0xff});
  b.receive(1, 0, 256);
  send(2, 0, 16);
  expect_recv(b.received(), b, 1, kHeader + 16, IBV_WC_GRH);
  ibv_grh grh{};
  std::memcpy(&grh, b.memory.at(0, kHeader).data(), sizeof grh);
  const bool whole = ntohl(grh.version_tclass_flow) >> 28 == 6;
  const ibv_gid wanted = b.gid();
  if (whole) {
    EXPECT_EQ(std::memcmp(&grh.dgid, &wanted, sizeof wanted), 0);
    EXPECT_EQ(std::memcmp(&grh.sgid, a.gid().raw, sizeof wanted), 0);
    EXPECT_EQ(grh.next_hdr, 0x1b);
  } else {
    // The last 20 bytes: an IPv4 header, which ends with the destination.
    EXPECT_EQ(std::memcmp(b.memory.at(36, 4).data(), wanted.raw + 12, 4), 0);
  }
}

TEST_F(Datagrams, AreAnsweredByTheirCompletion) {
  b.receive(1, 0, 256);
  send(2, 0, 16);
  ibv_wc wc = b.received();
  auto* header = reinterpret_cast<ibv_grh*>(b.memory.at(0, kHeader).data());
  const Ah back(ibv_create_ah_from_wc(pd.get(), &wc, header, settings.port));
  ASSERT_NE(back, nullptr);
  a.receive(3, 0, 256);
  fill(b.memory.at(8192, 16), 1);
  Send(4, IBV_WR_SEND, {b.memory.sge(8192, 16)}).to(back.get(), wc.src_qp, kKey).on(b);
  expect_recv(a.received(), a, 3, kHeader + 16, IBV_WC_GRH);
  EXPECT_TRUE(holds(a.memory.at(kHeader, 16), 1));
}

TEST_F(Datagrams, AddressOfACompletionNamesTheSender) {
  b.receive(1, 0, 256);
  send(2, 0, 16);
  ibv_wc wc = b.received();
  auto* header = reinterpret_cast<ibv_grh*>(b.memory.at(0, kHeader).data());
  ibv_ah_attr attr{};
  ASSERT_EQ(ibv_init_ah_from_wc(context.get(), settings.port, &wc, header, &attr), 0);
  EXPECT_EQ(attr.is_global, 1);
  EXPECT_EQ(attr.port_num, settings.port);
  EXPECT_EQ(std::memcmp(&attr.grh.dgid, a.gid().raw, sizeof(ibv_gid)), 0);
}

TEST_F(Datagrams, GatherAndScatter) {
  fill(a.memory.at(0, 300), 1);
  ASSERT_EQ(b.receive_into(1, {b.memory.sge(0, 30), b.memory.sge(1000, 10), b.memory.sge(2000, 100),
                               b.memory.sge(3000, 400)}),
            0);
  Send wr(2, IBV_WR_SEND, {a.memory.sge(0, 100), a.memory.sge(100, 0), a.memory.sge(100, 200)});
  addressed(wr).on(a);
  expect_recv(b.received(), b, 1, kHeader + 300, IBV_WC_GRH);
  std::vector<std::byte> together(300);
  std::ranges::copy(b.memory.at(2000, 100), together.begin());
  std::ranges::copy(b.memory.at(3000, 200), together.begin() + 100);
  EXPECT_TRUE(holds(together, 1));
}

TEST_F(Datagrams, InlineIsReadAtOnce) {
  fill(a.memory.at(0, 60), 1);
  b.receive(1, 0, 256);
  Send wr(2, IBV_WR_SEND, {a.memory.sge(0, 60)}, IBV_SEND_SIGNALED | IBV_SEND_INLINE);
  addressed(wr).on(a);
  std::ranges::fill(a.memory.at(0, 60), std::byte{0});
  expect_recv(b.received(), b, 1, kHeader + 60, IBV_WC_GRH);
  EXPECT_TRUE(holds(b.memory.at(kHeader, 60), 1));
}

TEST_F(Datagrams, UnsignaledDoNotComplete) {
  for (unsigned i = 0; i < 3; ++i) {
    b.receive(i, 256 * i, 256);
    Send wr(10 + i, IBV_WR_SEND, {a.memory.sge(0, 8)}, i == 2 ? unsigned{IBV_SEND_SIGNALED} : 0u);
    addressed(wr).on(a);
  }
  expect_wc(a.sent(), a, 12, IBV_WC_SUCCESS);
  EXPECT_TRUE(nothing(a.send_cq.get()));
  for (unsigned i = 0; i < 3; ++i) expect_recv(b.received(), b, i, kHeader + 8, IBV_WC_GRH);
}

// One queue pair receives from several senders and can tell them apart.
TEST_F(Datagrams, ComeFromManySenders) {
  const End other = end(datagrams());
  other.to_init();
  other.to_rtr(b);
  other.to_rts();
  b.receive(1, 0, 256);
  b.receive(2, 256, 256);
  send(3, 0, 8);
  EXPECT_EQ(b.received().src_qp, a.qp->qp_num);
  Send wr(4, IBV_WR_SEND, {other.memory.sge(0, 8)});
  addressed(wr).on(other);
  EXPECT_EQ(b.received().src_qp, other.qp->qp_num);
}

TEST_F(Datagrams, ReceivesMayBeShared) {
  if (device.max_srq == 0) GTEST_SKIP() << "max_srq is 0";
  const Srq srq = make_srq();
  const Memory memory(pd.get(), 4096);
  EndOptions options = datagrams();
  options.srq = srq.get();
  const End to = end(options);
  to.to_init();
  to.to_rtr(a);
  ibv_sge sge = memory.sge(0, 256);
  ibv_recv_wr wr{1, nullptr, &sge, 1};
  ibv_recv_wr* bad = nullptr;
  ASSERT_EQ(ibv_post_srq_recv(srq.get(), &wr, &bad), 0);
  fill(a.memory.at(0, 33), 1);
  Send(2, IBV_WR_SEND, {a.memory.sge(0, 33)}).to(to_b_.get(), to.qp->qp_num, kKey).on(a);
  expect_recv(to.received(), to, 1, kHeader + 33, IBV_WC_GRH);
  EXPECT_TRUE(holds(memory.at(kHeader, 33), 1));
}

// ---- dropped ----------------------------------------------------------------------------------

TEST_F(Datagrams, UnderAWrongKeyAreDropped) {
  b.receive(1, 0, 256);
  send(2, 0, 16, kKey + 1);
  expect_next(1, 1);
  EXPECT_TRUE(holds(b.memory.at(kHeader, 24), 1));
}

// A Q_Key with the highest bit set means the sender's own key.
TEST_F(Datagrams, HighestBitMeansTheOwnKey) {
  b.receive(1, 0, 256);
  send(2, 0, 16, 0x8000'0000u | (kKey + 5));
  expect_recv(b.received(), b, 1, kHeader + 16, IBV_WC_GRH);
}

TEST_F(Datagrams, OwnKeyMayBeTheWrongOne) {
  EndOptions stranger = datagrams();
  stranger.qkey = kKey + 7;
  const End from = end(stranger);
  from.to_init();
  from.to_rtr(b);
  from.to_rts();
  b.receive(1, 0, 256);
  Send wr(2, IBV_WR_SEND, {from.memory.sge(0, 8)});
  addressed(wr, 0x8000'0000u | kKey).on(from);
  expect_wc(from.sent(), from, 2, IBV_WC_SUCCESS);
  expect_next(1, 2);
}

TEST_F(Datagrams, WithoutAReceiveAreDropped) {
  send(1, 0, 16);
  settle(b.recv_cq.get());
  b.receive(2, 0, 256);
  EXPECT_TRUE(nothing(b.recv_cq.get()));
  expect_next(2, 3);
  EXPECT_EQ(b.state(), IBV_QPS_RTS);
}

// A datagram longer than the receive is dropped and the receive stays (responder class D), or the
// receive completes with an error: devices differ. Nothing may be written behind it.
TEST_F(Datagrams, LongerThanTheReceiveAreNotDelivered) {
  std::ranges::fill(b.memory.at(0, 512), kUntouched);
  b.receive(1, 0, kHeader + 15);
  send(2, 0, 16);
  settle(b.recv_cq.get());
  ibv_wc wc = blank_wc();
  if (ibv_poll_cq(b.recv_cq.get(), 1, &wc) == 1) expect_wc(wc, b, 1, IBV_WC_LOC_LEN_ERR);
  EXPECT_TRUE(all_are(b.memory.at(kHeader + 15, 64), kUntouched));
}

TEST_F(Datagrams, ToNobodyAreDropped) {
  b.receive(2, 0, 256);
  Send(1, IBV_WR_SEND, {a.memory.sge(0, 8)}).to(to_b_.get(), 0xfffffe, kKey).on(a);
  expect_wc(a.sent(), a, 1, IBV_WC_SUCCESS);
  expect_next(2, 4);
}

TEST_F(Datagrams, ToAConnectionAreDropped) {
  const Pair connection = pair();
  connection.b.receive(1, 0, 256);
  b.receive(3, 0, 256);
  Send(2, IBV_WR_SEND, {a.memory.sge(0, 8)}).to(to_b_.get(), connection.b.qp->qp_num, kKey).on(a);
  expect_wc(a.sent(), a, 2, IBV_WC_SUCCESS);
  EXPECT_TRUE(nothing(connection.b.recv_cq.get()));
  expect_next(3, 5);
}

TEST_F(Datagrams, ToAQueuePairThatIsNotReadyAreDropped) {
  const End young = end(datagrams());
  young.to_init();
  young.receive(1, 0, 256);
  Send(2, IBV_WR_SEND, {a.memory.sge(0, 8)}).to(to_b_.get(), young.qp->qp_num, kKey).on(a);
  expect_wc(a.sent(), a, 2, IBV_WC_SUCCESS);
  EXPECT_TRUE(nothing(young.recv_cq.get()));
  young.to_rtr(a);
  EXPECT_TRUE(nothing(young.recv_cq.get()));
}

TEST_F(Datagrams, KeyCanBeChanged) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTS;
  attr.qkey = kKey + 1;
  ASSERT_EQ(b.modify(attr, IBV_QP_STATE | IBV_QP_QKEY), 0);
  EXPECT_EQ(b.query(IBV_QP_QKEY).qkey, kKey + 1);
  b.receive(1, 0, 256);
  send(2, 0, 8, kKey);
  EXPECT_TRUE(nothing(b.recv_cq.get()));
  send(3, 0, 16, kKey + 1);
  expect_recv(b.received(), b, 1, kHeader + 16, IBV_WC_GRH);
}

// ---- refused ----------------------------------------------------------------------------------

TEST_F(Datagrams, KnowNoOtherOpcode) {
  for (const ibv_wr_opcode opcode :
       {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_SEND_WITH_INV, IBV_WR_ATOMIC_FETCH_AND_ADD}) {
    Send wr(1, opcode, {a.memory.sge(0, 8)});
    EXPECT_NE(addressed(wr).wr.wr_id, 0u);
    const int error = a.post(wr.wr);
    // Refused by the post, or by a completion if the driver leaves the check to the adapter.
    if (error == 0) {
      EXPECT_EQ(a.sent().status, IBV_WC_LOC_QP_OP_ERR);
      break;
    }
    EXPECT_TRUE(error == EINVAL || error == EOPNOTSUPP) << std::strerror(error);
  }
}

TEST_F(Datagrams, AddressNeedsAPort) {
  ibv_ah_attr where = a.address_of(b);
  where.port_num = 200;
  EXPECT_EQ(Ah(ibv_create_ah(pd.get(), &where)), nullptr);
}

}  // namespace conformance::datagram_cases
