// READs and WRITEs that run at once, without completions.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <thread>

#include "softverbs/direct_message_link.h"
#include "softverbs/memory/memory_region.h"
#include "softverbs/softverbs_device.h"
#include "verbs/direct_messages.h"

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

/// A pair whose second end has memory that nobody may read from afar, as the pools of engines.
class SoftverbsNamedByPeer : public SoftverbsDirectOneSided {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(SoftverbsDirectOneSided::SetUp());
    closed_ = sv::reg_mr(b_.node.pd, there().data(), kBytes, IBV_ACCESS_LOCAL_WRITE);
    ASSERT_NE(closed_, nullptr);
    fill(there(), 6);
    fill(here(), 5);
  }
  void TearDown() override { EXPECT_EQ(sv::dereg_mr(closed_), 0); }
  Send read_of(const ibv_mr* region, unsigned flags) {
    Send made(7777, a_.node.sge(kHere, kBytes), IBV_WR_RDMA_READ, IBV_SEND_SIGNALED | flags);
    made.to(b_.node.address(kThere), region->lkey);
    return made;
  }
  /// How a READ that is posted ends.
  ibv_wc_status post(Send& read) {
    EXPECT_EQ(read.post(a_.qp), 0);
    settle();
    EXPECT_FALSE(a_.sends.empty());
    return a_.sends.empty() ? IBV_WC_GENERAL_ERR : a_.sends[0].status;
  }
  ibv_mr* closed_ = nullptr;
};

TEST_F(SoftverbsNamedByPeer, AReadNeedsNoRightOfAPeer) {
  Send read = read_of(closed_, spinwire::verbs::kNamedByPeer);
  read.wr.sg_list = &read.sge;
  EXPECT_EQ(run(a_.qp, read), nullptr);
  EXPECT_TRUE(holds(here(), 6));
  fill(here(), 5);
  EXPECT_EQ(post(read), IBV_WC_SUCCESS);
  EXPECT_TRUE(holds(here(), 6));
}

TEST_F(SoftverbsNamedByPeer, OtherReadsNeedIt) {
  Send read = read_of(closed_, 0);
  read.wr.sg_list = &read.sge;
  EXPECT_EQ(run(a_.qp, read), &read.wr);
  EXPECT_EQ(post(read), IBV_WC_REM_ACCESS_ERR);
  EXPECT_TRUE(holds(here(), 5));
}

TEST_F(SoftverbsNamedByPeer, ItsBoundsAreThoseOfTheMemory) {
  Send read = read_of(closed_, spinwire::verbs::kNamedByPeer);
  read.to(b_.node.address(kThere + 1), closed_->lkey);
  read.wr.sg_list = &read.sge;
  EXPECT_EQ(run(a_.qp, read), &read.wr);
  EXPECT_EQ(post(read), IBV_WC_REM_ACCESS_ERR);
  EXPECT_TRUE(holds(here(), 5));
}

TEST_F(SoftverbsNamedByPeer, ItsMemoryIsOfTheQueuePairsDomain) {
  ibv_pd* const other = sv::alloc_pd(b_.node.context);
  ASSERT_NE(other, nullptr);
  ibv_mr* const foreign = sv::reg_mr(other, there().data(), kBytes, IBV_ACCESS_LOCAL_WRITE);
  ASSERT_NE(foreign, nullptr);
  Send read = read_of(foreign, spinwire::verbs::kNamedByPeer);
  read.wr.sg_list = &read.sge;
  EXPECT_EQ(run(a_.qp, read), &read.wr);
  EXPECT_EQ(post(read), IBV_WC_REM_ACCESS_ERR);
  EXPECT_TRUE(holds(here(), 5));
  EXPECT_EQ(sv::dereg_mr(foreign), 0);
  EXPECT_EQ(sv::dealloc_pd(other), 0);
}

TEST_F(SoftverbsNamedByPeer, AWriteNeedsTheRightAllTheSame) {
  Send write = read_of(closed_, spinwire::verbs::kNamedByPeer);
  write.wr.opcode = IBV_WR_RDMA_WRITE;
  write.wr.sg_list = &write.sge;
  EXPECT_EQ(run(a_.qp, write), &write.wr);
  EXPECT_EQ(post(write), IBV_WC_REM_ACCESS_ERR);
  EXPECT_TRUE(holds(there(), 6));
}

// The devices of programs for libibverbs know no flag but those of libibverbs.
TEST(SoftverbsNamedByPeerSetUp, AProgramsReadIsLikeAnyOther) {
  NodeOptions of_program;
  of_program.driving = sv::Driving::by_poll;
  Link link(of_program);
  ibv_mr* const closed =
      sv::reg_mr(link.b.pd, link.b.memory.data(), kBytes, IBV_ACCESS_LOCAL_WRITE);
  ASSERT_NE(closed, nullptr);
  fill(link.a.bytes(0, kBytes), 5);
  fill(link.b.bytes(0, kBytes), 6);
  const auto read_by = [&link](std::uint32_t key) {
    Send read(1, link.a.sge(0, kBytes), IBV_WR_RDMA_READ,
              IBV_SEND_SIGNALED | spinwire::verbs::kNamedByPeer);
    must(read.to(link.b.address(0), key).post(link.qa) == 0, "post");
    link.at_a.clear();
    must(until([&] { link.poll_a(); }, [&] { return !link.at_a.empty(); }), "a completion");
    return link.at_a[0].status;
  };
  EXPECT_EQ(read_by(link.b.mr->rkey), IBV_WC_SUCCESS);
  EXPECT_TRUE(holds(link.a.bytes(0, kBytes), 6));
  fill(link.a.bytes(0, kBytes), 5);
  EXPECT_EQ(read_by(closed->lkey), IBV_WC_REM_ACCESS_ERR);
  EXPECT_TRUE(holds(link.a.bytes(0, kBytes), 5));
  EXPECT_EQ(sv::dereg_mr(closed), 0);
}

/// Fails the owner's queue pair while its peer reads named memory. Nothing: the READ had ended
/// before.
std::optional<ibv_wc_status> fail_owner_during_read() {
  constexpr std::size_t kAll = 32u << 20;
  NodeOptions large;
  large.memory = kAll;
  Link link(large);
  fill(link.a.bytes(0, kAll), 5);
  fill(link.b.bytes(0, kAll), 6);
  int failed = 0;
  std::jthread owner([&link, &failed] {
    const std::atomic_ref<std::byte> first(link.a.memory[0]);
    while (first.load() == std::byte{5}) continue;
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_ERR;
    failed = sv::modify_qp(link.qb, &attr, IBV_QP_STATE);
  });
  Send read(1, link.a.sge(0, static_cast<std::uint32_t>(kAll)), IBV_WR_RDMA_READ,
            IBV_SEND_SIGNALED | spinwire::verbs::kNamedByPeer);
  must(read.to(link.b.address(0), link.b.mr->lkey).post(link.qa) == 0, "post");
  owner.join();
  if (failed != EBUSY) return {};  // no access was in progress any more
  must(until([&] { link.poll_a(); }, [&] { return !link.at_a.empty(); }), "a completion");
  return link.at_a[0].status;
}

TEST(SoftverbsNamedByPeerSetUp, WhatItsOwnerMayUseAgainIsNotRead) {
  int seen = 0;
  for (int i = 0; i < 200 && seen < 3; ++i) {
    if (const auto status = fail_owner_during_read()) {
      ++seen;
      EXPECT_NE(*status, IBV_WC_SUCCESS);
    }
  }
  EXPECT_NE(seen, 0) << "no queue pair failed during a READ";
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
