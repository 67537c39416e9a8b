// RDMA WRITE, RDMA READ and atomics: they access the peer's memory without notice to its program,
// except WRITE with immediate.
#include "conformance/conformance_ends.h"

namespace conformance::one_sided_cases {

constexpr std::byte kUntouched{0x5a};

class OneSidedLength : public Connected, public testing::WithParamInterface<std::uint32_t> {};

TEST_P(OneSidedLength, Write) {
  const std::uint32_t length = GetParam();
  fill(a.memory.at(0, length), length);
  std::ranges::fill(b.memory.at(0, length + 16), kUntouched);
  Send(1, IBV_WR_RDMA_WRITE, {a.memory.sge(0, length)})
      .at(b.memory.address(8), b.memory.rkey())
      .on(a);
  expect_wc(a.sent(), a, 1, IBV_WC_SUCCESS, IBV_WC_RDMA_WRITE);
  EXPECT_TRUE(holds(b.memory.at(8, length), length));
  EXPECT_TRUE(all_are(b.memory.at(0, 8), kUntouched));
  EXPECT_TRUE(all_are(b.memory.at(8 + length, 8), kUntouched));
  EXPECT_TRUE(nothing(b.recv_cq.get()));
}

TEST_P(OneSidedLength, Read) {
  const std::uint32_t length = GetParam();
  fill(b.memory.at(0, length), length);
  std::ranges::fill(a.memory.at(0, length + 16), kUntouched);
  Send(1, IBV_WR_RDMA_READ, {a.memory.sge(8, length)})
      .at(b.memory.address(), b.memory.rkey())
      .on(a);
  const ibv_wc wc = a.sent();
  expect_wc(wc, a, 1, IBV_WC_SUCCESS, IBV_WC_RDMA_READ);
  EXPECT_EQ(wc.byte_len, length);
  EXPECT_TRUE(holds(a.memory.at(8, length), length));
  EXPECT_TRUE(all_are(a.memory.at(0, 8), kUntouched));
  EXPECT_TRUE(all_are(a.memory.at(8 + length, 8), kUntouched));
}

TEST_P(OneSidedLength, WriteWithImmediate) {
  const std::uint32_t length = GetParam();
  fill(a.memory.at(0, length), length);
  std::ranges::fill(b.memory.at(60000, 64), kUntouched);
  b.receive(5, 60000, 64);
  Send(1, IBV_WR_RDMA_WRITE_WITH_IMM, {a.memory.sge(0, length)})
      .imm(0xa0b0c0d0)
      .at(b.memory.address(), b.memory.rkey())
      .on(a);
  const ibv_wc wc = b.received();
  expect_recv(wc, b, 5, length, IBV_WC_WITH_IMM, IBV_WC_RECV_RDMA_WITH_IMM);
  EXPECT_EQ(ntohl(wc.imm_data), 0xa0b0c0d0u);
  EXPECT_TRUE(holds(b.memory.at(0, length), length));
  EXPECT_TRUE(all_are(b.memory.at(60000, 64), kUntouched))
      << "the receive's own memory is not used";
  expect_wc(a.sent(), a, 1, IBV_WC_SUCCESS, IBV_WC_RDMA_WRITE);
}

INSTANTIATE_TEST_SUITE_P(Lengths, OneSidedLength,
                         testing::Values(0u, 1u, 8u, 48u, 63u, 64u, 424u, 440u, 441u, 1024u, 1025u,
                                         4096u, 5121u, 50000u));

class OneSided : public Connected {};

TEST_F(OneSided, WriteGathers) {
  fill(a.memory.at(0, 3000), 1);
  Send(1, IBV_WR_RDMA_WRITE,
       {a.memory.sge(0, 1), a.memory.sge(1, 1999), a.memory.sge(2000, 0), a.memory.sge(2000, 1000)})
      .at(b.memory.address(100), b.memory.rkey())
      .on(a);
  expect_wc(a.sent(), a, 1, IBV_WC_SUCCESS, IBV_WC_RDMA_WRITE);
  EXPECT_TRUE(holds(b.memory.at(100, 3000), 1));
}

TEST_F(OneSided, ReadScatters) {
  fill(b.memory.at(100, 3000), 2);
  Send(1, IBV_WR_RDMA_READ,
       {a.memory.sge(5000, 1), a.memory.sge(0, 1999), a.memory.sge(9000, 1000)})
      .at(b.memory.address(100), b.memory.rkey())
      .on(a);
  expect_wc(a.sent(), a, 1, IBV_WC_SUCCESS, IBV_WC_RDMA_READ);
  std::vector<std::byte> together(3000);
  std::ranges::copy(a.memory.at(5000, 1), together.begin());
  std::ranges::copy(a.memory.at(0, 1999), together.begin() + 1);
  std::ranges::copy(a.memory.at(9000, 1000), together.begin() + 2000);
  EXPECT_TRUE(holds(together, 2));
}

TEST_F(OneSided, InlineWriteIsReadAtOnce) {
  fill(a.memory.at(0, 64), 3);
  Send(1, IBV_WR_RDMA_WRITE, {a.memory.sge(0, 64)}, IBV_SEND_SIGNALED | IBV_SEND_INLINE)
      .at(b.memory.address(), b.memory.rkey())
      .on(a);
  std::ranges::fill(a.memory.at(0, 64), std::byte{0});
  expect_wc(a.sent(), a, 1, IBV_WC_SUCCESS, IBV_WC_RDMA_WRITE);
  EXPECT_TRUE(holds(b.memory.at(0, 64), 3));
}

// The specification (C9-88) requires no key check for zero bytes.
TEST_F(OneSided, NoBytesNeedNoKey) {
  for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ}) {
    Send(1, opcode).at(0xdead, 0xbeef).on(a);
    expect_wc(a.sent(), a, 1, IBV_WC_SUCCESS,
              opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE);
  }
}

// When a SEND arrives, earlier WRITEs of the same queue pair are visible: both keep their order.
TEST_F(OneSided, WriteIsThereBeforeTheSendBehindIt) {
  for (unsigned round = 0; round < 20; ++round) {
    fill(a.memory.at(0, 2000), round);
    b.receive(round, 60000, 16);
    Send write(1, IBV_WR_RDMA_WRITE, {a.memory.sge(0, 2000)}, 0);
    Send tell(2, IBV_WR_SEND, {a.memory.sge(0, 4)});
    write.at(b.memory.address(), b.memory.rkey());
    write.wr.next = &tell.wr;
    ASSERT_EQ(a.post(write.wr), 0);
    expect_recv(b.received(), b, round, 4);
    EXPECT_TRUE(holds(b.memory.at(0, 2000), round));
    expect_wc(a.sent(), a, 2, IBV_WC_SUCCESS);
  }
}

// Bytes of a READ may be sent on only behind a fence, which waits for the READ.
TEST_F(OneSided, FenceWaitsForTheRead) {
  for (unsigned round = 0; round < 10; ++round) {
    fill(b.memory.at(0, 512), 100 + round);
    b.receive(round, 4096, 512);
    Send read(1, IBV_WR_RDMA_READ, {a.memory.sge(0, 512)});
    Send forward(2, IBV_WR_SEND, {a.memory.sge(0, 512)}, IBV_SEND_SIGNALED | IBV_SEND_FENCE);
    read.at(b.memory.address(), b.memory.rkey());
    read.wr.next = &forward.wr;
    ASSERT_EQ(a.post(read.wr), 0);
    expect_recv(b.received(), b, round, 512);
    EXPECT_TRUE(holds(b.memory.at(4096, 512), 100 + round));
    expect_wc(a.sent(), a, 1, IBV_WC_SUCCESS, IBV_WC_RDMA_READ);
    expect_wc(a.sent(), a, 2, IBV_WC_SUCCESS, IBV_WC_SEND);
  }
}

TEST_F(OneSided, WriteWithImmediateKeepsItsPlaceAmongSends) {
  for (unsigned i = 0; i < 3; ++i) b.receive(i, 60000, 16);
  Send(1, IBV_WR_SEND, {a.memory.sge(0, 4)}).on(a);
  Send(2, IBV_WR_RDMA_WRITE_WITH_IMM, {a.memory.sge(0, 700)})
      .imm(77)
      .at(b.memory.address(), b.memory.rkey())
      .on(a);
  Send(3, IBV_WR_SEND, {a.memory.sge(0, 5)}).on(a);
  expect_recv(b.received(), b, 0, 4);
  expect_recv(b.received(), b, 1, 700, IBV_WC_WITH_IMM, IBV_WC_RECV_RDMA_WITH_IMM);
  expect_recv(b.received(), b, 2, 5);
  for (unsigned i = 1; i <= 3; ++i) EXPECT_EQ(a.sent().wr_id, i);
}

// ---- atomics ----------------------------------------------------------------------------------

class Atomics : public Connected {
 protected:
  void SetUp() override {
    if (device.atomic_cap == IBV_ATOMIC_NONE) GTEST_SKIP() << "atomic_cap is IBV_ATOMIC_NONE";
  }
  std::uint64_t add(std::uint64_t operand) {
    Send(1, IBV_WR_ATOMIC_FETCH_AND_ADD, {a.memory.sge(kResult, 8)})
        .atomic(b.memory.address(kTarget), b.memory.rkey(), operand)
        .on(a);
    const ibv_wc wc = a.sent();
    expect_wc(wc, a, 1, IBV_WC_SUCCESS, IBV_WC_FETCH_ADD);
    EXPECT_EQ(wc.byte_len, 8u);
    return a.memory.word(kResult);
  }
  std::uint64_t swap(std::uint64_t compare, std::uint64_t with) {
    Send(2, IBV_WR_ATOMIC_CMP_AND_SWP, {a.memory.sge(kResult, 8)})
        .atomic(b.memory.address(kTarget), b.memory.rkey(), compare, with)
        .on(a);
    const ibv_wc wc = a.sent();
    expect_wc(wc, a, 2, IBV_WC_SUCCESS, IBV_WC_COMP_SWAP);
    EXPECT_EQ(wc.byte_len, 8u);
    return a.memory.word(kResult);
  }
  static constexpr std::size_t kTarget = 800, kResult = 160;
};

TEST_F(Atomics, AddAnswersTheOldValue) {
  b.memory.set_word(kTarget, 40);
  EXPECT_EQ(add(2), 40u);
  EXPECT_EQ(b.memory.word(kTarget), 42u);
  EXPECT_EQ(add(0), 42u);
  EXPECT_EQ(b.memory.word(kTarget), 42u);
}

TEST_F(Atomics, AddWrapsIn64Bits) {
  b.memory.set_word(kTarget, ~std::uint64_t{0} - 1);
  EXPECT_EQ(add(3), ~std::uint64_t{0} - 1);
  EXPECT_EQ(b.memory.word(kTarget), 1u);
  EXPECT_EQ(add(0x1234'5678'0000'0000), 1u);
  EXPECT_EQ(b.memory.word(kTarget), 0x1234'5678'0000'0001u);
}

TEST_F(Atomics, SwapIfEqual) {
  b.memory.set_word(kTarget, 0x1111'2222'3333'4444);
  EXPECT_EQ(swap(0x1111'2222'3333'4444, 9), 0x1111'2222'3333'4444u);
  EXPECT_EQ(b.memory.word(kTarget), 9u);
}

TEST_F(Atomics, NoSwapIfNot) {
  b.memory.set_word(kTarget, 0x1111'2222'3333'4444);
  EXPECT_EQ(swap(0x1111'2222'3333'4445, 9), 0x1111'2222'3333'4444u);
  EXPECT_EQ(b.memory.word(kTarget), 0x1111'2222'3333'4444u);
  EXPECT_EQ(swap(0x3333'4444, 9), 0x1111'2222'3333'4444u) << "all 64 bits are compared";
  EXPECT_EQ(b.memory.word(kTarget), 0x1111'2222'3333'4444u);
}

TEST_F(Atomics, NeighboursStay) {
  std::ranges::fill(b.memory.at(kTarget - 8, 24), kUntouched);
  std::ranges::fill(a.memory.at(kResult - 8, 24), kUntouched);
  b.memory.set_word(kTarget, ~std::uint64_t{0});
  EXPECT_EQ(add(1), ~std::uint64_t{0});
  EXPECT_TRUE(all_are(b.memory.at(kTarget - 8, 8), kUntouched));
  EXPECT_TRUE(all_are(b.memory.at(kTarget + 8, 8), kUntouched));
  EXPECT_TRUE(all_are(a.memory.at(kResult - 8, 8), kUntouched));
  EXPECT_TRUE(all_are(a.memory.at(kResult + 8, 8), kUntouched));
}

TEST_F(Atomics, ResultMayBeScattered) {
  b.memory.set_word(kTarget, 0x0807'0605'0403'0201);
  Send(1, IBV_WR_ATOMIC_FETCH_AND_ADD, {a.memory.sge(0, 3), a.memory.sge(64, 5)})
      .atomic(b.memory.address(kTarget), b.memory.rkey(), 1)
      .on(a);
  expect_wc(a.sent(), a, 1, IBV_WC_SUCCESS, IBV_WC_FETCH_ADD);
  std::uint64_t together = 0;
  std::memcpy(&together, a.memory.at(0, 3).data(), 3);
  std::memcpy(reinterpret_cast<std::byte*>(&together) + 3, a.memory.at(64, 5).data(), 5);
  EXPECT_EQ(together, 0x0807'0605'0403'0201u);
}

TEST_F(Atomics, ManyFromBothEndsAddUp) {
  constexpr unsigned kEach = 50;
  for (unsigned i = 0; i < kEach; ++i) {
    for (const End* end : {&a, &b}) {
      Send(i, IBV_WR_ATOMIC_FETCH_AND_ADD, {end->memory.sge(kResult, 8)})
          .atomic(b.memory.address(kTarget), b.memory.rkey(), i)
          .on(*end);
      if (end == &a) continue;
      expect_wc(a.sent(), a, i, IBV_WC_SUCCESS, IBV_WC_FETCH_ADD);
      expect_wc(b.sent(), b, i, IBV_WC_SUCCESS, IBV_WC_FETCH_ADD);
    }
  }
  EXPECT_EQ(b.memory.word(kTarget), std::uint64_t{kEach} * (kEach - 1));
}

}  // namespace conformance::one_sided_cases
