// READs and WRITEs that run at once, without completions.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "softverbs/direct_message_link.h"
#include "softverbs/memory/memory_region.h"

namespace softverbs_test::direct_one_sided {

constexpr std::size_t kHere = 13u << 20;   ///< in the memory of the initiator
constexpr std::size_t kThere = 12u << 20;  ///< in the peer's
constexpr std::uint32_t kBytes = 3000;

ibv_send_wr* run(ibv_qp* qp, Send& first) { return sv::direct_messages().run(qp, &first.wr); }

class SoftverbsDirectOneSided : public MessagePair {
 protected:
  Send request(ibv_wr_opcode opcode, std::uint32_t bytes = kBytes, std::size_t here = kHere) {
    Send made(7777, a_.node.sge(here, bytes), opcode);
    made.to(b_.node.address(kThere), b_.node.mr->rkey);
    return made;
  }
  std::span<std::byte> here(std::size_t at = kHere) { return a_.node.bytes(at, kBytes); }
  std::span<std::byte> there() { return b_.node.bytes(kThere, kBytes); }
  /// Whether a WRITE is left to be posted, and has written nothing.
  bool is_left(Send& write) {
    fill(here(), 5);
    fill(there(), 6);
    return run(a_.qp, write) == &write.wr && holds(there(), 6);
  }
};

/// `list` points at its own element once it lies where it stays.
void link(Send& first, Send& second) {
  first.wr.sg_list = &first.sge;
  second.wr.sg_list = &second.sge;
  first.wr.next = &second.wr;
}

TEST_F(SoftverbsDirectOneSided, AreDoneInOrderWithoutCompletions) {
  fill(here(), 1);
  Send write = request(IBV_WR_RDMA_WRITE);
  Send read = request(IBV_WR_RDMA_READ, kBytes, kHere + 4096);
  link(write, read);
  EXPECT_EQ(run(a_.qp, write), nullptr);
  EXPECT_TRUE(holds(there(), 1));
  EXPECT_TRUE(holds(here(kHere + 4096), 1)) << "the READ comes after the WRITE";
  settle();
  EXPECT_EQ(a_.sends.size() + b_.sends.size(), 0u);
  // The queue pairs go on.
  ASSERT_TRUE(a_.send(number_of(1, 32)));
  a_.publish();
  settle();
  EXPECT_EQ(b_.taken(), Numbers{number_of(1, 32)});
}

TEST_F(SoftverbsDirectOneSided, EndWhereTheListHasAnotherRequest) {
  fill(here(), 1);
  Send write = request(IBV_WR_RDMA_WRITE);
  Send send(2, a_.node.sge(0, 8));
  link(write, send);
  EXPECT_EQ(run(a_.qp, write), &send.wr);
  EXPECT_TRUE(holds(there(), 1));
  EXPECT_EQ(b_.taken(), Numbers{});
}

TEST_F(SoftverbsDirectOneSided, WaitForEarlierWorkRequests) {
  ASSERT_EQ(a_.post(number_of(1, 32)), 0);
  Send write = request(IBV_WR_RDMA_WRITE);
  write.wr.sg_list = &write.sge;
  EXPECT_TRUE(is_left(write));
  settle();
  EXPECT_EQ(run(a_.qp, write), nullptr);
}

TEST_F(SoftverbsDirectOneSided, AreLeftWhereTheyFail) {
  Send write = request(IBV_WR_RDMA_WRITE);
  write.wr.sg_list = &write.sge;
  ++write.wr.wr.rdma.rkey;
  EXPECT_TRUE(is_left(write));
  write.to(b_.node.address(b_.node.memory.size() - 8), b_.node.mr->rkey);
  EXPECT_TRUE(is_left(write)) << "out of the peer's bounds";
  write.to(b_.node.address(kThere), b_.node.mr->rkey);
  ++write.sge.lkey;
  EXPECT_TRUE(is_left(write)) << "no key of ours";
  --write.sge.lkey;
  write.sge.length = 0;
  EXPECT_TRUE(is_left(write));
  write.sge.length = kBytes;
  ibv_mr* readable =
      sv::reg_mr(a_.node.pd, a_.node.bytes(kHere, kBytes).data(), kBytes, IBV_ACCESS_REMOTE_READ);
  ASSERT_NE(readable, nullptr);
  Send read = request(IBV_WR_RDMA_READ);
  read.wr.sg_list = &read.sge;
  read.sge.lkey = readable->lkey;
  fill(here(), 5);
  EXPECT_EQ(run(a_.qp, read), &read.wr);
  EXPECT_TRUE(holds(here(), 5)) << "the device may not write there";
  ASSERT_EQ(sv::dereg_mr(readable), 0);
  ibv_qp_attr attr{};
  attr.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;
  ASSERT_EQ(sv::modify_qp(b_.qp, &attr, IBV_QP_ACCESS_FLAGS), 0);
  EXPECT_TRUE(is_left(write)) << "the peer's queue pair takes no WRITE";
  // Posted, it fails as always.
  ASSERT_EQ(write.post(a_.qp), 0);
  settle();
  ASSERT_EQ(a_.sends.size(), 1u);
  EXPECT_EQ(a_.sends[0].status, IBV_WC_REM_ACCESS_ERR);
  EXPECT_TRUE(is_left(write)) << "the queue pair has failed";
}

TEST_F(SoftverbsDirectOneSided, AreLeftWhereThePeerDoesNotServe) {
  b_.node.fail(b_.qp);
  Send write = request(IBV_WR_RDMA_WRITE);
  write.wr.sg_list = &write.sge;
  EXPECT_TRUE(is_left(write));
}

// A plan of faults must be able to delay them, or to let them fail.
TEST(SoftverbsDirectOneSidedSetUp, AreLeftWithAPlanOfFaults) {
  const sv::FaultPlan plan;
  Node a({.faults = &plan}), b;
  ibv_qp* const qa = a.make_qp();
  ibv_qp* const qb = b.make_qp();
  connect(a, qa, b, qb);
  Send write(1, a.sge(0, 64), IBV_WR_RDMA_WRITE);
  write.to(b.address(4096), b.mr->rkey);
  fill(a.bytes(0, 64), 1);
  EXPECT_EQ(run(qa, write), &write.wr);
  EXPECT_FALSE(holds(b.bytes(4096, 64), 1));
}

}  // namespace softverbs_test::direct_one_sided
