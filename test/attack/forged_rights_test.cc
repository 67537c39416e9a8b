// A peer rewrites the entries of our segment that describe our memory. The victim's own thread must
// write only where its application allowed it.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "softverbs/memory/memory_window.h"
#include "softverbs/rc_link.h"
#include "softverbs/ud_link.h"
#include "verbs/direct_messages.h"

namespace forged_rights_test {
namespace {

using namespace softverbs_test;  // NOLINT: a test's helpers

constexpr std::size_t kOpened = 64;

/// The victim is node b. It exposes the first bytes of `own`; the attacker knows the key.
class AttackByForgedRights : public testing::Test {
 protected:
  AttackByForgedRights() : opened_(sv::reg_mr(link_.b.pd, own_.data(), kOpened, Node::kAllAccess)) {
    must(opened_ != nullptr, "reg_mr");
    fill(link_.a.bytes(0, own_.size()), 1);
  }
  ~AttackByForgedRights() override {
    if (opened_ != nullptr) {
      EXPECT_EQ(sv::dereg_mr(opened_), 0);
    }
  }

  [[nodiscard]] sv::RegionEntry& shared_entry() const {
    return link_.b.internals().segment->regions[sv::region_index(key_)];
  }
  void widen() const { widen(shared_entry()); }
  void widen(sv::RegionEntry& entry) const {
    entry.address = reinterpret_cast<std::uint64_t>(own_.data());
    entry.length = own_.size();
  }
  /// A WRITE with immediate, which the victim's poll executes.
  void write(std::size_t offset) {
    ASSERT_EQ(link_.b.post_recv(50, 0, 64), 0);
    Send send(1, link_.a.sge(0, 32), IBV_WR_RDMA_WRITE_WITH_IMM);
    send.to(reinterpret_cast<std::uint64_t>(own_.data()) + offset, key_);
    ASSERT_EQ(send.post(link_.qa), 0);
    ASSERT_TRUE(link_.run(1, 0));
  }
  /// A WRITE or READ, which the attacker's own thread executes.
  ibv_wc_status one_sided(ibv_wr_opcode opcode, std::size_t offset) {
    return one_sided(opcode, offset, key_);
  }
  ibv_wc_status one_sided(ibv_wr_opcode opcode, std::size_t offset, std::uint32_t key,
                          unsigned flags = 0) {
    link_.at_a.clear();
    Send send(1, link_.a.sge(0, 32), opcode, IBV_SEND_SIGNALED | flags);
    send.to(reinterpret_cast<std::uint64_t>(own_.data()) + offset, key);
    must(send.post(link_.qa) == 0, "post");
    must(link_.run(1, 0), "run");
    return link_.at_a[0].status;
  }
  /// The attacker writes to memory of another domain of the victim, after `forge` has made the
  /// segment say that its queue pair may.
  template <typename Forge>
  void write_in_another_domain(Forge&& forge) {
    ibv_pd* const other = sv::alloc_pd(link_.b.context);
    ibv_mr* const elsewhere = sv::reg_mr(other, own_.data(), own_.size(), Node::kAllAccess);
    ASSERT_NE(elsewhere, nullptr);
    forge(*static_cast<const sv::Pd*>(other), elsewhere->rkey);
    EXPECT_EQ(one_sided(IBV_WR_RDMA_WRITE, 0, elsewhere->rkey), IBV_WC_REM_ACCESS_ERR);
    EXPECT_TRUE(all_are(own_, 0));
    EXPECT_EQ(sv::dereg_mr(elsewhere), 0);
    EXPECT_EQ(sv::dealloc_pd(other), 0);
  }
  /// A window that opens the first bytes of the region to the attacker's queue pair.
  ibv_mw* bind_window(ibv_mr& region) {
    ibv_mw* const window = sv::alloc_mw(link_.b.pd, IBV_MW_TYPE_2);
    must(window != nullptr, "alloc_mw");
    ibv_send_wr wr{};
    wr.opcode = IBV_WR_BIND_MW;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.bind_mw = {window,
                  ibv_inc_rkey(window->rkey),
                  {&region, reinterpret_cast<std::uint64_t>(own_.data()), kOpened,
                   IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE}};
    ibv_send_wr* bad = nullptr;
    link_.at_b.clear();
    must(ibv_post_send(link_.qb, &wr, &bad) == 0 && link_.run(0, 1), "bind");
    must(link_.at_b[0].status == IBV_WC_SUCCESS, "bind");
    window->rkey = wr.bind_mw.rkey;
    return window;
  }
  /// A new pair of queue pairs, after a refusal.
  void reconnect() {
    link_.qa = link_.a.make_qp();
    link_.qb = link_.b.make_qp();
    connect(link_.a, link_.qa, link_.b, link_.qb);
  }
  void expect_refused() const {
    EXPECT_EQ(link_.at_a[0].status, IBV_WC_REM_ACCESS_ERR);
    EXPECT_TRUE(all_are(own_, 0));
  }

  Link link_;
  std::array<std::byte, 256> own_{};
  ibv_mr* opened_;
  const std::uint32_t key_ = opened_->rkey;
};

TEST_F(AttackByForgedRights, AWriteWithinItsRegionSucceeds) {
  write(0);
  EXPECT_EQ(link_.at_a[0].status, IBV_WC_SUCCESS);
  EXPECT_TRUE(holds(std::span(own_).first(32), 1));
}

TEST_F(AttackByForgedRights, AWriteBeyondItsRegion) {
  widen();
  write(128);
  expect_refused();
}

TEST_F(AttackByForgedRights, AWriteUnderAnEndedKey) {
  EXPECT_EQ(sv::dereg_mr(std::exchange(opened_, nullptr)), 0);
  shared_entry().key = key_;
  write(0);
  expect_refused();
}

TEST_F(AttackByForgedRights, AWriteUnderARegionThatIsReadOnly) {
  EXPECT_EQ(sv::dereg_mr(opened_), 0);
  opened_ = sv::reg_mr(link_.b.pd, own_.data(), kOpened, IBV_ACCESS_REMOTE_READ);
  ASSERT_NE(opened_, nullptr);
  sv::RegionEntry& entry = link_.b.internals().segment->regions[sv::region_index(opened_->rkey)];
  entry.access = Node::kAllAccess;
  ASSERT_EQ(link_.b.post_recv(50, 0, 64), 0);
  Send send(1, link_.a.sge(0, 32), IBV_WR_RDMA_WRITE_WITH_IMM);
  send.to(reinterpret_cast<std::uint64_t>(own_.data()), opened_->rkey);
  ASSERT_EQ(send.post(link_.qa), 0);
  ASSERT_TRUE(link_.run(1, 0));
  expect_refused();
}

TEST_F(AttackByForgedRights, AWriteThroughAQueuePairWithoutTheRight) {
  ibv_qp_attr attr{};
  attr.qp_access_flags = IBV_ACCESS_REMOTE_READ;
  ASSERT_EQ(sv::modify_qp(link_.qb, &attr, IBV_QP_ACCESS_FLAGS), 0);
  link_.b.internals().segment->queue_pairs[link_.qb->handle].rights.access = Node::kAllAccess;
  write(0);
  expect_refused();
}

// Both nodes are of this process: what a third process writes into the segment of one must not lead
// the thread of the other astray.

TEST_F(AttackByForgedRights, AOneSidedWriteWithinItsRegionSucceeds) {
  EXPECT_EQ(one_sided(IBV_WR_RDMA_WRITE, 0), IBV_WC_SUCCESS);
  EXPECT_TRUE(holds(std::span(own_).first(32), 1));
}

TEST_F(AttackByForgedRights, AOneSidedWriteOrReadBeyondItsRegion) {
  for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ}) {
    reconnect();
    widen();
    EXPECT_EQ(one_sided(opcode, 128), IBV_WC_REM_ACCESS_ERR);
    EXPECT_TRUE(all_are(own_, 0));
  }
}

// By what it writes to a lane, a third process can make one of our contexts name its private memory
// to the other.
TEST_F(AttackByForgedRights, AReadOfPrivateMemoryThatThePeerHasNamed) {
  ibv_mr* const hidden = sv::reg_mr(link_.b.pd, own_.data(), own_.size(), IBV_ACCESS_LOCAL_WRITE);
  ASSERT_NE(hidden, nullptr);
  fill(own_, 7);
  EXPECT_EQ(one_sided(IBV_WR_RDMA_READ, 0, hidden->lkey, spinwire::verbs::kNamedByPeer),
            IBV_WC_REM_ACCESS_ERR);
  EXPECT_TRUE(holds(link_.a.bytes(0, own_.size()), 1)) << "nothing was read";
  // A READ that runs at once is left, and copies nothing.
  reconnect();
  Send read(1, link_.a.sge(0, 32), IBV_WR_RDMA_READ, spinwire::verbs::kNamedByPeer);
  read.to(reinterpret_cast<std::uint64_t>(own_.data()), hidden->lkey);
  read.wr.sg_list = &read.sge;
  EXPECT_EQ(sv::direct_messages().run(link_.qa, &read.wr), &read.wr);
  EXPECT_TRUE(holds(link_.a.bytes(0, own_.size()), 1));
  EXPECT_EQ(sv::dereg_mr(hidden), 0);
}

TEST_F(AttackByForgedRights, AOneSidedWriteUnderAnEndedKey) {
  EXPECT_EQ(sv::dereg_mr(std::exchange(opened_, nullptr)), 0);
  shared_entry().key = key_;
  EXPECT_EQ(one_sided(IBV_WR_RDMA_WRITE, 0), IBV_WC_REM_ACCESS_ERR);
  EXPECT_TRUE(all_are(own_, 0));
}

TEST_F(AttackByForgedRights, AOneSidedWriteInAnotherDomain) {
  write_in_another_domain([this](const sv::Pd&, std::uint32_t key) {
    link_.b.internals().segment->regions[sv::region_index(key)].pd = shared_entry().pd;
  });
}

TEST_F(AttackByForgedRights, AOneSidedWriteThroughAQueuePairWithoutTheRight) {
  ibv_qp_attr attr{};
  attr.qp_access_flags = IBV_ACCESS_REMOTE_READ;
  ASSERT_EQ(sv::modify_qp(link_.qb, &attr, IBV_QP_ACCESS_FLAGS), 0);
  link_.b.internals().segment->queue_pairs[link_.qb->handle].rights.access = Node::kAllAccess;
  EXPECT_EQ(one_sided(IBV_WR_RDMA_WRITE, 0), IBV_WC_REM_ACCESS_ERR);
  EXPECT_TRUE(all_are(own_, 0));
}

TEST_F(AttackByForgedRights, AOneSidedWriteThroughAQueuePairOfAnotherDomain) {
  write_in_another_domain([this](const sv::Pd& other, std::uint32_t) {
    link_.b.internals().segment->queue_pairs[link_.qb->handle].rights.pd = other.id;
  });
}

TEST_F(AttackByForgedRights, AWriteThroughAQueuePairThatHasFailed) {
  link_.b.fail(link_.qb);
  link_.b.internals().segment->queue_pairs[link_.qb->handle].rights.ident =
      sv::queue_pair_ident(link_.qb->qp_num, link_.qa->qp_num);
  EXPECT_EQ(one_sided(IBV_WR_RDMA_WRITE, 0), IBV_WC_RETRY_EXC_ERR);
  EXPECT_TRUE(all_are(own_, 0));
}

TEST_F(AttackByForgedRights, AReceiveBeyondItsRegion) {
  widen();
  ibv_sge into{reinterpret_cast<std::uint64_t>(own_.data()) + 128, 64, opened_->lkey};
  ibv_recv_wr receive{50, nullptr, &into, 1};
  ibv_recv_wr* bad = nullptr;
  ASSERT_EQ(ibv_post_srq_recv(link_.b.srq, &receive, &bad), 0);
  Send send(1, link_.a.sge(0, 32));
  ASSERT_EQ(send.post(link_.qa), 0);
  ASSERT_TRUE(link_.run(1, 1));
  EXPECT_EQ(link_.at_b[0].status, IBV_WC_LOC_PROT_ERR);
  EXPECT_TRUE(all_are(own_, 0));
}

TEST_F(AttackByForgedRights, ADatagramReceiveBeyondItsRegion) {
  ibv_qp* const from = ready_ud(link_.a, true);
  const ibv_qp* const to = ready_ud(link_.b, true);
  const Handle way(link_.a, link_.b);
  const auto receive_at = [&](std::size_t offset) {
    ibv_sge into{reinterpret_cast<std::uint64_t>(own_.data()) + offset, kOpened, opened_->lkey};
    ibv_recv_wr receive{50, nullptr, &into, 1};
    ibv_recv_wr* bad = nullptr;
    must(ibv_post_srq_recv(link_.b.srq, &receive, &bad) == 0, "ibv_post_srq_recv");
    link_.at_a.clear();
    link_.at_b.clear();
    Datagram datagram(1, link_.a.sge(0, kOpened - kGrh), way, to->qp_num);
    must(datagram.post(from) == 0, "post");
    must(link_.run(1, 1), "run");
    return link_.at_b[0].status;
  };
  const auto behind = std::span(own_).subspan(kOpened);
  EXPECT_EQ(receive_at(0), IBV_WC_SUCCESS);  // the device remembers the region from now on
  widen();
  EXPECT_EQ(receive_at(128), IBV_WC_LOC_PROT_ERR);
  EXPECT_TRUE(all_are(behind, 0));
}

TEST_F(AttackByForgedRights, AnAccessBeyondItsWindow) {
  ibv_mr* const bound =
      sv::reg_mr(link_.b.pd, own_.data(), own_.size(), IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
  ASSERT_NE(bound, nullptr);
  for (const ibv_wr_opcode opcode :
       {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE_WITH_IMM}) {
    SCOPED_TRACE(opcode);
    reconnect();
    ibv_mw* const window = bind_window(*bound);
    EXPECT_EQ(one_sided(IBV_WR_RDMA_WRITE, kOpened - 32, window->rkey), IBV_WC_SUCCESS);
    widen(link_.b.internals().segment->regions[sv::region_index(window->rkey)]);
    ASSERT_EQ(link_.b.post_recv(50, 0, 64), 0);
    EXPECT_EQ(one_sided(opcode, 128, window->rkey), IBV_WC_REM_ACCESS_ERR);
    EXPECT_TRUE(all_are(std::span(own_).subspan(kOpened), 0));
    EXPECT_TRUE(holds(link_.a.bytes(0, own_.size()), 1));  // nothing was read
    EXPECT_EQ(sv::dealloc_mw(window), 0);
  }
  EXPECT_EQ(sv::dereg_mr(bound), 0);
}

TEST_F(AttackByForgedRights, ARegionThatNamesAnObjectBeyondTheTable) {
  ibv_mr* const shared = sv::reg_mr(link_.b.pd, link_.b.memory.data(), 64, Node::kAllAccess);
  ASSERT_NE(shared, nullptr);
  sv::RegionEntry& entry = link_.b.internals().segment->regions[sv::region_index(shared->rkey)];
  ASSERT_NE(entry.object, sv::kNoObject);
  entry.object = sv::kNoObject - 1;
  EXPECT_EQ(sv::dereg_mr(shared), 0);
}

TEST_F(AttackByForgedRights, ASegmentThatNamesAnotherProcess) {
  link_.b.internals().segment->pid = 1;
  EXPECT_EQ(sv::dereg_mr(std::exchange(opened_, nullptr)), 0);
}

}  // namespace
}  // namespace forged_rights_test
