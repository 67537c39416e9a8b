// Words that are stored into the peer's memory without a work request.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>

#include "softverbs/direct_message_link.h"

namespace softverbs_test::direct_word {

constexpr std::size_t kAt = 12u << 20;  ///< in the peer's memory
constexpr std::uint64_t kWord = 0x1122334455667788;

bool store(const MessageEnd& from, const MessageEnd& to, std::uint64_t word = kWord,
           std::size_t at = kAt) {
  return sv::direct_messages().write_word(from.qp, to.node.address(at), to.node.mr->rkey, word);
}
std::uint64_t word_at(MessageEnd& end, std::size_t at = kAt) {
  std::uint64_t word = 0;
  std::memcpy(&word, end.node.bytes(at, sizeof word).data(), sizeof word);
  return word;
}

class SoftverbsDirectWord : public MessagePair {};

TEST_F(SoftverbsDirectWord, IsThereAtOnceWithoutACompletion) {
  ASSERT_TRUE(store(a_, b_));
  EXPECT_EQ(word_at(b_), kWord);
  ASSERT_TRUE(a_.send(number_of(1, 32)));  // a message that is not published does not delay it
  ASSERT_TRUE(store(a_, b_, 7));
  EXPECT_EQ(word_at(b_), 7u);
  a_.publish();
  settle();
  EXPECT_EQ(a_.sends.size() + b_.sends.size(), 0u);
  EXPECT_EQ(b_.taken(), Numbers{number_of(1, 32)});
}

TEST_F(SoftverbsDirectWord, WaitsForWorkRequests) {
  // A READ waits until the SEND before it is acknowledged.
  ASSERT_EQ(a_.post(number_of(1, 32)), 0);
  ASSERT_TRUE(store(a_, b_, 1));  // the SEND is transmitted
  Send read(7777, a_.node.sge(14u << 20, 64), IBV_WR_RDMA_READ);
  ASSERT_EQ(read.to(b_.node.address(0), b_.node.mr->rkey).post(a_.qp), 0);
  EXPECT_FALSE(store(a_, b_));
  EXPECT_EQ(word_at(b_), 1u);
  settle();
  EXPECT_EQ(a_.sends.size(), 2u);
  EXPECT_TRUE(store(a_, b_));
}

TEST_F(SoftverbsDirectWord, IsRefusedWhereAWriteFails) {
  const auto refused = [&](std::size_t at, std::uint32_t key) {
    return !sv::direct_messages().write_word(a_.qp, b_.node.address(at), key, kWord);
  };
  EXPECT_TRUE(refused(kAt, b_.node.mr->rkey + 1));
  EXPECT_TRUE(refused(b_.node.memory.size() - 4, b_.node.mr->rkey));
  EXPECT_TRUE(refused(kAt + 4, b_.node.mr->rkey));  // a WRITE would work, but not by a store
  ibv_mr* readable = sv::reg_mr(b_.node.pd, b_.node.bytes(kAt, 64).data(), 64,
                                IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
  ASSERT_NE(readable, nullptr);
  const std::uint32_t key = readable->rkey;
  EXPECT_TRUE(refused(kAt, key));
  sv::dereg_mr(readable);
  EXPECT_TRUE(refused(kAt, key));
  // Nothing is reported, and the queue pairs go on.
  EXPECT_EQ(word_at(b_), 0u);
  settle();
  EXPECT_EQ(a_.sends.size(), 0u);
  EXPECT_TRUE(store(a_, b_));
}

TEST_F(SoftverbsDirectWord, IsRefusedOnceEitherQueuePairHasFailed) {
  b_.node.fail(b_.qp);
  EXPECT_FALSE(store(a_, b_));
  EXPECT_EQ(word_at(b_), 0u);
  a_.node.fail(a_.qp);
  EXPECT_FALSE(store(a_, b_));
}

TEST_F(SoftverbsDirectWord, IsRefusedByTheRightsOfTheQueuePair) {
  ibv_qp_attr attr{};
  attr.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;
  ASSERT_EQ(sv::modify_qp(b_.qp, &attr, IBV_QP_ACCESS_FLAGS), 0);
  EXPECT_FALSE(store(a_, b_));
  EXPECT_EQ(word_at(b_), 0u);
}

TEST(SoftverbsDirectWordSetUp, IsRefusedBeforeBothEndsAreConnected) {
  std::uint64_t now = 1'000'000'000;
  MessageEnd a(&now), b(&now);
  EXPECT_FALSE(store(a, b));
  ASSERT_EQ(a.node.init(a.qp), 0);
  ASSERT_EQ(a.node.rtr(a.qp, b.node.endpoint(b.qp)), 0);
  EXPECT_FALSE(store(a, b));
  ASSERT_EQ(a.node.rts(a.qp), 0);
  EXPECT_FALSE(store(a, b));  // the peer: RESET
  ASSERT_EQ(b.node.init(b.qp), 0);
  ASSERT_EQ(b.node.rtr(b.qp, a.node.endpoint(a.qp)), 0);
  sv::control_device(a.node.context);
  sv::control_device(b.node.context);
  EXPECT_TRUE(store(a, b));
  EXPECT_EQ(word_at(b), kWord);
}

// The plan of faults decides about work requests.
TEST(SoftverbsDirectWordSetUp, IsRefusedWhereFaultsAreInjected) {
  const sv::FaultPlan plan;
  Node a({.faults = &plan}), b;
  ibv_qp* qa = a.make_qp();
  ibv_qp* qb = b.make_qp();
  connect(a, qa, b, qb);
  const auto store = [&](const Node& to, ibv_qp* qp) {
    return sv::direct_messages().write_word(qp, to.address(0), to.mr->rkey, kWord);
  };
  EXPECT_FALSE(store(b, qa));
  EXPECT_TRUE(store(a, qb));
}

}  // namespace softverbs_test::direct_word
