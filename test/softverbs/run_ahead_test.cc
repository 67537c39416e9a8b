// Work requests that send no packet, behind messages that the peer has not taken: the peer is
// another process, which polls when it is told to.
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "softverbs/memory/memory_window.h"
#include "softverbs/peer_process.h"
#include "softverbs/rc/rc_direct.h"
#include "softverbs/rc_link.h"

namespace softverbs_test::ahead {

constexpr std::size_t kTarget = 4096;  ///< at the peer: what READs read
constexpr std::size_t kResult = 512;   ///< here: where they put it
constexpr std::uint32_t kLength = 256;

ibv_wc next_completion(Node& node) {
  ibv_wc wc{};
  bool found = false;
  const auto poll = [&] {
    sv::control_device(node.context);
    if (!found) found = node.poll(wc);
  };
  EXPECT_TRUE(until(poll, [&] { return found; }));
  return wc;
}

/// A peer that posts as many receives as each byte on the socket says, and polls all the time
/// between the first byte and the next.
void serve(int socket) {
  Node theirs;
  (void)meet(theirs, theirs.make_qp(), socket);
  fill(theirs.bytes(kTarget, kLength), 5);
  put(socket, 'f');
  const char receives = get<char>(socket);
  ibv_wc wc{};
  // Without receives, so that messages are refused until the next byte.
  if (receives == 0) {
    must(until([&] { (void)theirs.poll(wc); }, [&] { return hung_up(socket); }), "a second byte");
    for (char left = get<char>(socket); left > 0; --left) theirs.post_recv(1, 8192, 64);
  } else {
    for (char left = receives; left > 0; --left) theirs.post_recv(1, 8192, 64);
  }
  (void)until([&] { (void)theirs.poll(wc); }, [&] { return hung_up(socket); });
}

class SoftverbsRunAhead : public testing::Test {
 protected:
  SoftverbsRunAhead() : child_(&serve), qp_(node_.make_qp()) {
    theirs_ = meet(node_, qp_, child_.socket());
    (void)get<char>(child_.socket());
  }
  int post_message(std::uint64_t id) { return Send(id, node_.sge(0, 8)).post(qp_); }
  int post_read(std::uint64_t id, unsigned flags) {
    Send read(id, node_.sge(kResult, kLength), IBV_WR_RDMA_READ, IBV_SEND_SIGNALED | flags);
    return read.to(theirs_.memory + kTarget, theirs_.key).post(qp_);
  }
  int post_write_imm(std::uint64_t id, std::size_t at) {
    Send write(id, node_.sge(0, 8), IBV_WR_RDMA_WRITE_WITH_IMM);
    return write.to(theirs_.memory + at, theirs_.key).post(qp_);
  }
  [[nodiscard]] bool has_read() const { return holds(node_.bytes(kResult, kLength), 5); }
  /// Polls until there are so many completions, and returns their ids; all must be good.
  std::vector<std::uint64_t> complete(std::size_t count) {
    std::vector<std::uint64_t> ids;
    ibv_wc wc{};
    const auto poll = [&] {
      sv::control_device(node_.context);
      if (!node_.poll(wc)) return;
      EXPECT_EQ(wc.status, IBV_WC_SUCCESS) << wc.wr_id;
      ids.push_back(wc.wr_id);
    };
    EXPECT_TRUE(until(
        poll, [&] { return ids.size() >= count; }, std::chrono::seconds(30)));
    return ids;
  }
  bool completes_nothing() {
    ibv_wc wc{};
    for (int i = 0; i < 3 * kLook; ++i) {
      if (node_.poll(wc)) return false;
    }
    return true;
  }
  void let_it_take(char receives) { put(child_.socket(), receives); }

  Child child_;
  Node node_;
  ibv_qp* qp_;
  Card theirs_{};
};

using Ids = std::vector<std::uint64_t>;

TEST_F(SoftverbsRunAhead, AReadThatMayReadsAtOnceAndCompletesInItsTurn) {
  ASSERT_EQ(post_message(1), 0);
  ASSERT_EQ(post_read(2, sv::kMayRunAhead), 0);
  ASSERT_EQ(post_message(3), 0);
  EXPECT_TRUE(has_read());
  EXPECT_TRUE(completes_nothing());
  let_it_take(2);
  EXPECT_EQ(complete(3), (Ids{1, 2, 3}));
}

TEST_F(SoftverbsRunAhead, AnotherReadWaits) {
  ASSERT_EQ(post_message(1), 0);
  ASSERT_EQ(post_read(2, 0), 0);
  EXPECT_TRUE(completes_nothing());
  EXPECT_FALSE(has_read());
  let_it_take(1);
  EXPECT_EQ(complete(2), (Ids{1, 2}));
  EXPECT_TRUE(has_read());
}

TEST_F(SoftverbsRunAhead, AReadWaitsForAWriteOfWhatItReads) {
  ASSERT_EQ(post_write_imm(1, kTarget + kLength - 8), 0);
  ASSERT_EQ(post_read(2, sv::kMayRunAhead), 0);
  EXPECT_TRUE(completes_nothing());
  EXPECT_TRUE(all_are(node_.bytes(kResult, kLength), 0));
  let_it_take(1);
  EXPECT_EQ(complete(2), (Ids{1, 2}));
  EXPECT_TRUE(all_are(node_.bytes(kResult + kLength - 8, 8), 0)) << "what was written";
}

TEST_F(SoftverbsRunAhead, AReadDoesNotWaitForAWriteOfOtherMemory) {
  ASSERT_EQ(post_write_imm(1, kTarget + kLength), 0);
  ASSERT_EQ(post_read(2, sv::kMayRunAhead), 0);
  EXPECT_TRUE(has_read());
  let_it_take(1);
  EXPECT_EQ(complete(2), (Ids{1, 2}));
}

TEST_F(SoftverbsRunAhead, WhatRanDoesNotRunAgainWhenMessagesAreSentAgain) {
  ASSERT_EQ(post_message(1), 0);
  ASSERT_EQ(post_read(2, sv::kMayRunAhead), 0);
  ASSERT_EQ(post_message(3), 0);
  ASSERT_TRUE(has_read());
  fill(node_.bytes(kResult, kLength), 6);
  let_it_take(0);  // refused until there are receives
  const auto retries = [&] { return static_cast<sv::Qp*>(qp_)->epoch; };
  ibv_wc wc{};
  ASSERT_TRUE(until([&] { (void)node_.poll(wc); }, [&] { return retries() >= 3; },
                    std::chrono::seconds(30)));
  let_it_take(2);
  EXPECT_EQ(complete(3), (Ids{1, 2, 3}));
  EXPECT_TRUE(holds(node_.bytes(kResult, kLength), 6));
}

TEST_F(SoftverbsRunAhead, OneThatCannotReadIsTriedAgainInItsTurnOnly) {
  ASSERT_EQ(post_message(1), 0);
  Send read(2, node_.sge(kResult, kLength), IBV_WR_RDMA_READ, IBV_SEND_SIGNALED | sv::kMayRunAhead);
  ASSERT_EQ(read.to(theirs_.memory + kTarget, theirs_.key + 1).post(qp_), 0);
  const sv::SendWr& kept = static_cast<sv::Qp*>(qp_)->sq[1];
  EXPECT_EQ(kept.flags & (sv::kMayRunAhead | sv::kHasRun), 0u);
  let_it_take(1);
  for (const auto& [id, status] : {std::pair{1u, IBV_WC_SUCCESS}, {2u, IBV_WC_REM_ACCESS_ERR}}) {
    const ibv_wc wc = next_completion(node_);
    EXPECT_EQ(wc.wr_id, id);
    EXPECT_EQ(wc.status, status);
  }
}

/// A peer with two queue pairs that takes one message, and ends.
void take_one(int socket) {
  Node theirs;
  for (int i = 0; i < 2; ++i) (void)meet(theirs, theirs.make_qp(), socket);
  for (int i = 0; i < 2; ++i) theirs.post_recv(1, 8192, 64);
  (void)get<char>(socket);
  must(next_completion(theirs).status == IBV_WC_SUCCESS, "a message");
  _exit(0);  // as one that is killed
}

TEST(SoftverbsRanAhead, CompletesIfThePeerEndsBeforeItTakesOthersPackets) {
  Child child(&take_one);
  Node node;
  ibv_qp* const qps[] = {node.make_qp(), node.make_qp()};
  Card theirs[2];
  for (int i = 0; i < 2; ++i) theirs[i] = meet(node, qps[i], child.socket());
  ASSERT_EQ(Send(1, node.sge(0, 8)).post(qps[0]), 0);
  ASSERT_EQ(Send(2, node.sge(0, 8)).post(qps[1]), 0);
  Send read(3, node.sge(kResult, kLength), IBV_WR_RDMA_READ, IBV_SEND_SIGNALED | sv::kMayRunAhead);
  ASSERT_EQ(read.to(theirs[0].memory + kTarget, theirs[0].key).post(qps[0]), 0);
  put(child.socket(), 't');
  EXPECT_EQ(child.wait(), 0);
  std::map<std::uint64_t, ibv_wc_status> found;
  for (int i = 0; i < 3; ++i) {
    const ibv_wc wc = next_completion(node);
    found[wc.wr_id] = wc.status;
  }
  EXPECT_EQ(found[1], IBV_WC_SUCCESS);
  EXPECT_EQ(found[2], IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(found[3], IBV_WC_SUCCESS);
}

TEST_F(SoftverbsRunAhead, AWindowIsBoundAndEndedAtOnce) {
  ibv_mw* const mw = sv::alloc_mw(node_.pd, IBV_MW_TYPE_2);
  ASSERT_NE(mw, nullptr);
  const std::uint32_t key = ibv_inc_rkey(mw->rkey);
  ASSERT_EQ(post_message(1), 0);
  ibv_send_wr bind{};
  bind.wr_id = 2;
  bind.opcode = IBV_WR_BIND_MW;
  bind.send_flags = IBV_SEND_SIGNALED;
  bind.bind_mw = {mw, key, {node_.mr, node_.address(0), kLength, IBV_ACCESS_REMOTE_READ}};
  ibv_send_wr* bad = nullptr;
  ASSERT_EQ(ibv_post_send(qp_, &bind, &bad), 0);
  EXPECT_EQ(static_cast<sv::Mw*>(mw)->qp, qp_);
  ASSERT_EQ(post_message(3), 0);
  ibv_send_wr end{};
  end.wr_id = 4;
  end.opcode = IBV_WR_LOCAL_INV;
  end.send_flags = IBV_SEND_SIGNALED;
  end.invalidate_rkey = key;
  ASSERT_EQ(ibv_post_send(qp_, &end, &bad), 0);
  EXPECT_EQ(static_cast<sv::Mw*>(mw)->qp, nullptr);
  EXPECT_TRUE(completes_nothing());
  let_it_take(2);
  EXPECT_EQ(complete(4), (Ids{1, 2, 3, 4}));
  EXPECT_EQ(sv::dealloc_mw(mw), 0);
}

TEST_F(SoftverbsRunAhead, WhatRanIsFlushedWithTheRest) {
  ASSERT_EQ(post_message(1), 0);
  ASSERT_EQ(post_read(2, sv::kMayRunAhead), 0);
  ASSERT_TRUE(has_read());
  node_.fail(qp_);
  for (const std::uint64_t id : {1, 2}) {
    ibv_wc wc{};
    ASSERT_TRUE(node_.poll(wc));
    EXPECT_EQ(wc.wr_id, id);
    EXPECT_EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
  }
}

}  // namespace softverbs_test::ahead
