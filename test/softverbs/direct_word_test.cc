// Words that are stored into the peer's memory without a work request.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#include "softverbs/direct_message_link.h"
#include "softverbs/memory/memory_region.h"
#include "softverbs/peer_process.h"

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
  // A message that is not published does not delay it.
  for (std::uint32_t i = 1; i < 3; ++i) ASSERT_TRUE(a_.send(number_of(i, 32)));
  ASSERT_TRUE(store(a_, b_, 7));
  EXPECT_EQ(word_at(b_), 7u);
  a_.publish();
  settle();
  EXPECT_EQ(a_.sends.size() + b_.sends.size(), 0u);
  EXPECT_EQ(b_.taken(), (Numbers{number_of(1, 32), number_of(2, 32)}));
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

/// Credit cells have such keys.
TEST_F(SoftverbsDirectWord, AKeyOfOneQueuePairTakesTheWordsOfItsPeerAlone) {
  ibv_mr* cell = sv::reg_mr_for_qp(b_.qp, b_.node.bytes(kAt, 64).data(), 64,
                                   IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE);
  ASSERT_NE(cell, nullptr);
  ibv_qp* const other = a_.node.make_qp();
  connect(a_.node, other, b_.node, b_.node.make_qp());
  const auto write_word = [&](ibv_qp* by) {
    return sv::direct_messages().write_word(by, b_.node.address(kAt), cell->rkey, kWord);
  };
  EXPECT_FALSE(write_word(other));
  EXPECT_EQ(word_at(b_), 0u);
  EXPECT_TRUE(write_word(a_.qp));
  EXPECT_EQ(word_at(b_), kWord);
  sv::dereg_mr(cell);
}

/// The word of a queue pair, open to its peer.
ibv_mr* open_word(ibv_qp* qp) {
  return sv::reg_mr_for_qp(qp, sv::direct_messages().word(qp), sizeof(std::uint64_t),
                           IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE);
}

TEST_F(SoftverbsDirectWord, AQueuePairHasOneOfItsOwn) {
  std::atomic<std::uint64_t>& own = *sv::direct_messages().word(b_.qp);
  EXPECT_EQ(own, 0u);
  ibv_mr* opened = open_word(b_.qp);
  ASSERT_NE(opened, nullptr);
  const auto at = reinterpret_cast<std::uint64_t>(&own);
  const std::uint32_t key = opened->rkey;
  ibv_qp* const other = a_.node.make_qp();
  connect(a_.node, other, b_.node, b_.node.make_qp());
  const auto write = [&](ibv_qp* by, std::uint32_t with) {
    return sv::direct_messages().write_word(by, at, with, kWord);
  };
  EXPECT_FALSE(write(other, key));
  EXPECT_FALSE(write(a_.qp, key + 1));
  EXPECT_FALSE(write(a_.qp, 0));
  EXPECT_EQ(own, 0u);
  EXPECT_TRUE(write(a_.qp, key));
  EXPECT_EQ(own, kWord);
  own = 0;
  // Other keys open it like any memory, and this one ends like any other.
  Send send(1, a_.node.sge(14u << 20, sizeof own), IBV_WR_RDMA_WRITE);
  std::memcpy(a_.node.bytes(14u << 20, sizeof own).data(), &kWord, sizeof kWord);
  ASSERT_EQ(send.to(at, key).post(a_.qp), 0);
  settle();
  EXPECT_EQ(own, kWord);
  own = 0;
  ASSERT_EQ(sv::dereg_mr(opened), 0);
  EXPECT_FALSE(write(a_.qp, key));
  EXPECT_EQ(own, 0u);
}

TEST_F(SoftverbsDirectWord, TheOneOfAQueuePairNeedsTheRightAndAPeerThatIsServed) {
  ibv_mr* opened = open_word(b_.qp);
  ASSERT_NE(opened, nullptr);
  const auto write = [&] {
    const auto at = reinterpret_cast<std::uint64_t>(sv::direct_messages().word(b_.qp));
    return sv::direct_messages().write_word(a_.qp, at, opened->rkey, kWord);
  };
  EXPECT_TRUE(write());
  ibv_qp_attr attr{};
  attr.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;
  ASSERT_EQ(sv::modify_qp(b_.qp, &attr, IBV_QP_ACCESS_FLAGS), 0);
  EXPECT_FALSE(write());
  attr.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  ASSERT_EQ(sv::modify_qp(b_.qp, &attr, IBV_QP_ACCESS_FLAGS), 0);
  EXPECT_TRUE(write());
  b_.node.fail(b_.qp);
  EXPECT_FALSE(write());
  sv::dereg_mr(opened);
}

// The queue pair's own number is read from what it expects, which each message changes.
TEST_F(SoftverbsDirectWord, IsTakenWhateverHasBeenReceived) {
  for (std::uint32_t i = 0; i < 300; ++i) {  // the PSN wraps
    ASSERT_TRUE(b_.send(number_of(i, 32)));
    b_.publish();
    settle();
    ASSERT_TRUE(store(a_, b_, i + 1));
    ASSERT_EQ(word_at(b_), i + 1);
  }
  EXPECT_EQ(a_.taken().size(), 300u);
}

// A peer that revokes its memory waits for accesses that are marked.
TEST_F(SoftverbsDirectWord, IsMarkedAsAnAccess) {
  const auto serial = [&] { return a_.out().own_access_serial; };
  const auto before = serial();
  ASSERT_TRUE(store(a_, b_));
  EXPECT_EQ(serial(), before + 2);
  ASSERT_FALSE(store(a_, b_, kWord, b_.node.memory.size()));
  EXPECT_EQ(serial(), before + 4);
  EXPECT_EQ(a_.out().access_serial->load(), serial());
}

class SoftverbsDirectWordElsewhere : public testing::TestWithParam<bool> {};

TEST_P(SoftverbsDirectWordElsewhere, IsStoredInMemoryThatIsMapped) {
  NodeOptions options;
  options.private_memory = GetParam();
  Child child([&options](int socket) {
    Node node(options);
    (void)meet(node, node.make_qp(), socket);
    (void)get<char>(socket);
    std::uint64_t word = 0;
    std::memcpy(&word, node.memory.data(), sizeof word);
    put(socket, word);
    (void)get<char>(socket);
  });
  Node node;
  ibv_qp* const qp = node.make_qp();
  const Card theirs = meet(node, qp, child.socket());
  const bool mapped = !GetParam();
  EXPECT_EQ(sv::direct_messages().write_word(qp, theirs.memory, theirs.key, kWord), mapped);
  EXPECT_FALSE(sv::direct_messages().write_word(qp, theirs.memory, theirs.key + 1, kWord));
  put(child.socket(), 'r');
  const std::uint64_t theirs_now = get<std::uint64_t>(child.socket());
  EXPECT_EQ(theirs_now == kWord, mapped);
  put(child.socket(), 'q');
  EXPECT_EQ(child.wait(), 0);
}
INSTANTIATE_TEST_SUITE_P(Memory, SoftverbsDirectWordElsewhere, testing::Bool(),
                         [](const auto& with) { return with.param ? "Private" : "Shared"; });

TEST(SoftverbsDirectWordOfAQueuePair, IsReachedFromAnotherProcess) {
  struct Place {
    std::uint64_t at;
    std::uint32_t key;
  };
  Child child([](int socket) {
    Node node;
    ibv_qp* const qp = node.make_qp();
    (void)meet(node, qp, socket);
    const std::atomic<std::uint64_t>& own = *sv::direct_messages().word(qp);
    ibv_mr* opened = open_word(qp);
    must(opened != nullptr, "reg_mr_for_qp");
    put(socket, Place{reinterpret_cast<std::uint64_t>(&own), opened->rkey});
    for (int i = 0; i < 2; ++i) {
      (void)get<char>(socket);
      put(socket, own.load());
    }
    (void)get<char>(socket);
  });
  Node node;
  ibv_qp* const qp = node.make_qp();
  (void)meet(node, qp, child.socket());
  const Place there = get<Place>(child.socket());
  EXPECT_TRUE(sv::direct_messages().write_word(qp, there.at, there.key, kWord));
  put(child.socket(), 'r');
  EXPECT_EQ(get<std::uint64_t>(child.socket()), kWord);
  // A WRITE needs no other mapping of the segment.
  const std::uint64_t next = kWord + 1;
  std::memcpy(node.bytes(0, sizeof next).data(), &next, sizeof next);
  Send send(1, node.sge(0, sizeof next), IBV_WR_RDMA_WRITE);
  ASSERT_EQ(send.to(there.at, there.key).post(qp), 0);
  ibv_wc wc{};
  ASSERT_TRUE(until([] {}, [&] { return node.poll(wc) != 0; }));
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  EXPECT_TRUE(node.internals().peers[0]->objects.empty());
  put(child.socket(), 'r');
  EXPECT_EQ(get<std::uint64_t>(child.socket()), next);
  put(child.socket(), 'q');
  EXPECT_EQ(child.wait(), 0);
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

// A plan of faults must be able to delay the word, or to lose it.
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
