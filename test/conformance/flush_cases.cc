// In ERR, outstanding work is flushed, in order for each queue, and so is work posted later.
#include "conformance/conformance_ends.h"

namespace conformance::flush_cases {

class Flush : public Connected {};

TEST_F(Flush, ReceivesInOrder) {
  for (unsigned i = 0; i < 6; ++i) b.receive(100 + i, 64 * i, 64);
  b.to_error();
  for (unsigned i = 0; i < 6; ++i) expect_wc(b.received(), b, 100 + i, IBV_WC_WR_FLUSH_ERR);
  EXPECT_TRUE(nothing(b.recv_cq.get())) << "each is flushed once";
}

TEST_F(Flush, SendsInOrderSignaledOrNot) {
  // There is no receive, so none of these messages can be delivered.
  for (unsigned i = 0; i < 6; ++i)
    Send(200 + i, IBV_WR_SEND, {a.memory.sge(0, 8)}, i % 2 == 0 ? unsigned{IBV_SEND_SIGNALED} : 0u)
        .on(a);
  a.to_error();
  for (unsigned i = 0; i < 6; ++i) expect_wc(a.sent(), a, 200 + i, IBV_WC_WR_FLUSH_ERR);
  EXPECT_TRUE(nothing(a.send_cq.get()));
}

TEST_F(Flush, WhateverTheyWere) {
  const ibv_wr_opcode opcodes[] = {IBV_WR_SEND,      IBV_WR_SEND_WITH_IMM,
                                   IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE,
                                   IBV_WR_SEND,      IBV_WR_RDMA_WRITE_WITH_IMM};
  std::uint64_t id = 0;
  for (const ibv_wr_opcode opcode : opcodes)
    Send(id++, opcode, {a.memory.sge(0, 8)}).at(b.memory.address(), b.memory.rkey()).on(a);
  a.to_error();
  for (std::uint64_t i = 0; i < id; ++i) expect_wc(a.sent(), a, i, IBV_WC_WR_FLUSH_ERR);
}

TEST_F(Flush, WhatIsPostedAfterwards) {
  a.to_error();
  Send(1, IBV_WR_SEND, {a.memory.sge(0, 8)}, 0).on(a);
  Send(2, IBV_WR_RDMA_WRITE, {a.memory.sge(0, 8)}).at(b.memory.address(), b.memory.rkey()).on(a);
  expect_wc(a.sent(), a, 1, IBV_WC_WR_FLUSH_ERR);
  expect_wc(a.sent(), a, 2, IBV_WC_WR_FLUSH_ERR);
  a.receive(3, 0, 64);
  a.receive(4, 0, 64);
  expect_wc(a.received(), a, 3, IBV_WC_WR_FLUSH_ERR);
  expect_wc(a.received(), a, 4, IBV_WC_WR_FLUSH_ERR);
}

// Work completed earlier keeps its status.
TEST_F(Flush, DoneIsDone) {
  b.receive(1, 0, 64);
  b.receive(2, 64, 64);
  Send(3, IBV_WR_SEND, {a.memory.sge(0, 8)}).on(a);
  expect_recv(b.received(), b, 1, 8);
  a.to_error();
  b.to_error();
  expect_wc(a.sent(), a, 3, IBV_WC_SUCCESS);
  EXPECT_TRUE(nothing(a.send_cq.get()));
  expect_wc(b.received(), b, 2, IBV_WC_WR_FLUSH_ERR);
}

TEST_F(Flush, CompletionsOutliveTheirQueuePair) {
  b.receive(1, 0, 64);
  Send(2, IBV_WR_SEND, {a.memory.sge(0, 8)}).on(a);
  expect_recv(b.received(), b, 1, 8);
  expect_wc(a.sent(), a, 2, IBV_WC_SUCCESS);
  // Destroying flushes nothing: completions not yet taken may vanish, but no new ones may appear.
  b.receive(3, 0, 64);
  b.qp.reset();
  EXPECT_TRUE(nothing(b.recv_cq.get()));
}

// The standard way to learn that everything posted has been flushed.
TEST_F(Flush, DrainsByALastWorkRequest) {
  for (unsigned i = 0; i < 3; ++i) Send(i, IBV_WR_SEND, {a.memory.sge(0, 8)}, 0).on(a);
  a.to_error();
  Send(77, IBV_WR_SEND, {a.memory.sge(0, 8)}).on(a);
  for (unsigned i = 0; i < 3; ++i) EXPECT_EQ(a.sent().wr_id, i);
  expect_wc(a.sent(), a, 77, IBV_WC_WR_FLUSH_ERR);
}

TEST_F(Flush, NothingArrivesAfterwards) {
  b.receive(1, 0, 64);
  b.to_error();
  expect_wc(b.received(), b, 1, IBV_WC_WR_FLUSH_ERR);
  fill(a.memory.at(0, 64), 1);
  Send(2, IBV_WR_SEND, {a.memory.sge(0, 64)}).on(a);
  expect_wc(a.sent(), a, 2, IBV_WC_RETRY_EXC_ERR);
  EXPECT_TRUE(all_are(b.memory.at(0, 64), std::byte{0}));
}

TEST_F(Flush, OfOneQueuePairLeavesTheOthers) {
  const Pair other = pair();
  b.receive(1, 0, 64);
  other.b.receive(2, 0, 64);
  a.to_error();
  b.to_error();
  expect_wc(b.received(), b, 1, IBV_WC_WR_FLUSH_ERR);
  Send(3, IBV_WR_SEND, {other.a.memory.sge(0, 8)}).on(other.a);
  expect_recv(other.b.received(), other.b, 2, 8);
}

TEST_F(Flush, DatagramQueuesToo) {
  EndOptions options;
  options.type = IBV_QPT_UD;
  const Pair udp = pair(options, options);
  for (unsigned i = 0; i < 3; ++i) udp.b.receive(i, 256 * i, 256);
  udp.b.to_error();
  for (unsigned i = 0; i < 3; ++i) expect_wc(udp.b.received(), udp.b, i, IBV_WC_WR_FLUSH_ERR);
  udp.b.receive(9, 0, 256);
  expect_wc(udp.b.received(), udp.b, 9, IBV_WC_WR_FLUSH_ERR);
  ibv_ah_attr where = udp.b.address_of(udp.a);
  const Ah ah(ibv_create_ah(pd.get(), &where));
  Send(10, IBV_WR_SEND, {udp.b.memory.sge(0, 8)})
      .to(ah.get(), udp.a.qp->qp_num, options.qkey)
      .on(udp.b);
  expect_wc(udp.b.sent(), udp.b, 10, IBV_WC_WR_FLUSH_ERR);
}

}  // namespace conformance::flush_cases
