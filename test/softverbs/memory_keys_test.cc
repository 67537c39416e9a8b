// Keys, bounds and rights: which error each end gets, and that no byte is accessed.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "softverbs/memory/remote_access.h"
#include "softverbs/rc_link.h"

namespace softverbs_test::keys {

constexpr std::uint32_t kSize = 64;
constexpr std::size_t kExposed = 8192;  ///< offset of the tested region in b's memory
constexpr std::size_t kLength = 4096;

/// A link, a separate region of b, and the parameters of a work request for it.
struct Case {
  Link link;
  ibv_mr* region = nullptr;
  std::uint64_t address = 0;
  std::uint32_t key = 0;

  explicit Case(int access = Node::kAllAccess, const NodeOptions& options = {}) : link(options) {
    region = sv::reg_mr(link.b.pd, &link.b.memory[kExposed], kLength, access);
    must(region != nullptr, "reg_mr");
    address = link.b.address(kExposed);
    key = region->rkey;
    std::fill(link.b.memory.begin(), link.b.memory.end(), std::byte{0x11});
    std::fill(link.a.memory.begin(), link.a.memory.end(), std::byte{0x22});
  }
  ~Case() {
    if (region != nullptr) sv::dereg_mr(region);
  }
  Case(const Case&) = delete;
  Case& operator=(const Case&) = delete;

  /// Runs one work request and another behind it, which must be flushed if the first fails.
  void run(ibv_wr_opcode opcode, std::uint32_t size = kSize) {
    must(link.b.post_recv(50, 0, 0) == 0, "post_recv");
    Send send(1, link.a.sge(0, size), opcode), next(2, link.a.sge(0, 8));
    send.to(address, key);
    send.wr.next = &next.wr;
    must(send.post(link.qa) == 0, "post_send");
    link.steps(6);
  }
  void expect_failed(ibv_wc_status status) {
    ASSERT_EQ(link.at_a.size(), 2u);
    EXPECT_EQ(link.at_a[0].wr_id, 1u);
    EXPECT_EQ(link.at_a[0].status, status);
    EXPECT_EQ(link.at_a[0].qp_num, link.qa->qp_num);
    EXPECT_EQ(link.at_a[1].wr_id, 2u);
    EXPECT_EQ(link.at_a[1].status, IBV_WC_WR_FLUSH_ERR);
    EXPECT_EQ(state_of(link.qa), IBV_QPS_ERR);
    EXPECT_TRUE(all_are(link.b.memory, 0x11));
    EXPECT_TRUE(all_are(link.a.memory, 0x22));
    link.steps(4);
    EXPECT_EQ(link.at_a.size(), 2u);
  }
};

class SoftverbsKeys : public testing::TestWithParam<ibv_wr_opcode> {
 protected:
  static void expect_refused(Case& c) {
    c.run(GetParam());
    c.expect_failed(IBV_WC_REM_ACCESS_ERR);
    // The responder's queue pair fails as well, whichever end found the error.
    EXPECT_EQ(state_of(c.link.qb), IBV_QPS_ERR);
    std::vector<int> events;
    for (Event e = next_event(c.link.b); e.type >= 0; e = next_event(c.link.b)) {
      events.push_back(e.type);
      EXPECT_EQ(e.element, c.link.qb);
    }
    EXPECT_EQ(std::count(events.begin(), events.end(), IBV_EVENT_QP_ACCESS_ERR), 1);
  }
};

TEST(SoftverbsAnswers, OutliveTheQueuePairThatGaveThem) {
  // A message is taken, then a write is refused; the responder is gone before the sender checks.
  Case c;
  ASSERT_EQ(c.link.b.post_recv(50, 0, 64), 0);
  ASSERT_EQ(c.link.b.post_recv(51, 0, 64), 0);
  Send good(1, c.link.a.sge(0, 8));
  Send bad(2, c.link.a.sge(0, 8), IBV_WR_RDMA_WRITE_WITH_IMM);
  bad.to(c.address, c.key ^ 1u << 20);
  ASSERT_EQ(good.post(c.link.qa), 0);
  ASSERT_EQ(bad.post(c.link.qa), 0);
  ibv_wc wcs[4];
  ASSERT_EQ(sv::poll_cq(c.link.b.cq, 4, wcs), 1);
  EXPECT_EQ(wcs[0].wr_id, 50u);
  c.link.b.destroy(c.link.qb);
  c.link.qb = nullptr;
  c.link.steps(4);
  ASSERT_EQ(c.link.at_a.size(), 2u);
  EXPECT_EQ(c.link.at_a[0].status, IBV_WC_SUCCESS);
  EXPECT_EQ(c.link.at_a[1].status, IBV_WC_REM_ACCESS_ERR);
}

TEST_P(SoftverbsKeys, WithinBoundsAllIsWell) {
  // At either end of the region, and the whole region.
  const bool read = GetParam() == IBV_WR_RDMA_READ;
  for (const auto& [offset, size] : std::vector<std::pair<std::size_t, std::uint32_t>>{
           {0, kSize}, {kLength - kSize, kSize}, {0, kLength}}) {
    Case c;
    c.address += offset;
    ASSERT_EQ(c.link.b.post_recv(51, 0, 64), 0);
    c.run(GetParam(), size);
    ASSERT_GE(c.link.at_a.size(), 1u);
    EXPECT_EQ(c.link.at_a[0].status, IBV_WC_SUCCESS);
    EXPECT_TRUE(read ? all_are(c.link.a.bytes(0, size), 0x11)
                     : all_are(c.link.b.bytes(kExposed + offset, size), 0x22));
    EXPECT_EQ(c.link.b.memory[kExposed + offset - 1], std::byte{0x11});
    EXPECT_EQ(c.link.b.memory[kExposed + offset + size], std::byte{0x11});
  }
}

TEST_P(SoftverbsKeys, OneByteBeforeTheRegion) {
  Case c;
  c.address -= 1;
  expect_refused(c);
}
TEST_P(SoftverbsKeys, OneByteBehindTheRegion) {
  Case c;
  c.address += kLength - kSize + 1;
  expect_refused(c);
}
TEST_P(SoftverbsKeys, AddressThatWrapsAround) {
  Case c;
  c.address = ~std::uint64_t{0} - kSize / 2;
  expect_refused(c);
}
TEST_P(SoftverbsKeys, NoSuchKey) {
  for (const std::uint32_t wrong : {0u, 1u, ~0u}) {
    Case c;
    c.key = wrong == 1u ? c.key + wrong : wrong;  // includes the next generation
    expect_refused(c);
  }
}
TEST_P(SoftverbsKeys, KeyOfADeregisteredRegion) {
  Case c;
  ASSERT_EQ(sv::dereg_mr(c.region), 0);
  c.region = nullptr;
  expect_refused(c);
}
TEST_P(SoftverbsKeys, KeyOfADeregisteredRegionInUseAgain) {
  Case c;
  const std::uint32_t stale = c.key;
  // Repeats until the same entry is in use again.
  bool again = false;
  for (int i = 0; i < 3000 && !again; ++i) {
    ASSERT_EQ(sv::dereg_mr(c.region), 0);
    c.region = sv::reg_mr(c.link.b.pd, &c.link.b.memory[kExposed], kLength, Node::kAllAccess);
    ASSERT_NE(c.region, nullptr);
    ASSERT_NE(c.region->rkey, stale);
    again = sv::region_index(c.region->rkey) == sv::region_index(stale);
  }
  EXPECT_TRUE(again);
  expect_refused(c);
}
TEST_P(SoftverbsKeys, OtherProtectionDomain) {
  Case c;
  ibv_pd* pd = sv::alloc_pd(c.link.b.context);
  ibv_mr* mr = sv::reg_mr(pd, &c.link.b.memory[kExposed], kLength, Node::kAllAccess);
  c.key = mr->rkey;
  expect_refused(c);
  EXPECT_EQ(sv::dereg_mr(mr), 0);
  EXPECT_EQ(sv::dealloc_pd(pd), 0);
}
TEST_P(SoftverbsKeys, RegionWithoutTheRight) {
  const bool read = GetParam() == IBV_WR_RDMA_READ;
  Case c(IBV_ACCESS_LOCAL_WRITE | (read ? IBV_ACCESS_REMOTE_WRITE : IBV_ACCESS_REMOTE_READ));
  expect_refused(c);
}
TEST_P(SoftverbsKeys, QueuePairWithoutTheRight) {
  const bool read = GetParam() == IBV_WR_RDMA_READ;
  Case c;
  ibv_qp_attr attr{};
  attr.qp_access_flags =
      IBV_ACCESS_LOCAL_WRITE | (read ? IBV_ACCESS_REMOTE_WRITE : IBV_ACCESS_REMOTE_READ);
  ASSERT_EQ(sv::modify_qp(c.link.qb, &attr, IBV_QP_ACCESS_FLAGS), 0);
  expect_refused(c);
}
TEST_P(SoftverbsKeys, BadLocalKey) {
  const std::vector<std::function<void(Case&, ibv_sge&)>> spoils = {
      [](Case&, ibv_sge& sge) { sge.lkey ^= 1; },
      [](Case&, ibv_sge& sge) { sge.lkey = 0; },
      [](Case&, ibv_sge& sge) { sge.addr -= 1; },
      [](Case& c, ibv_sge& sge) {
        sge.addr = c.link.a.address(c.link.a.memory.size()) - kSize + 1;
      },
      [](Case& c, ibv_sge& sge) { sge.lkey = c.region->lkey; },
  };
  for (std::size_t i = 0; i < spoils.size(); ++i) {
    SCOPED_TRACE(i);
    Case c;
    Send send(1, c.link.a.sge(0, kSize), GetParam()), next(2, c.link.a.sge(0, 8));
    spoils[i](c, send.sge);
    send.to(c.address, c.key).wr.next = &next.wr;
    ASSERT_EQ(c.link.b.post_recv(1, 0, 64), 0);
    ASSERT_EQ(send.post(c.link.qa), 0);
    c.link.steps(4);
    c.expect_failed(IBV_WC_LOC_PROT_ERR);
    EXPECT_EQ(state_of(c.link.qb), IBV_QPS_RTS);
    EXPECT_TRUE(c.link.at_b.empty());
  }
}

INSTANTIATE_TEST_SUITE_P(Remote, SoftverbsKeys,
                         testing::Values(IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM,
                                         IBV_WR_RDMA_READ),
                         [](const auto& p) { return "Opcode" + std::to_string(p.param); });

/// Memory of node b that is registered for the peer of its queue pair alone.
class SoftverbsKeyForOneQueuePair : public testing::Test {
 protected:
  ~SoftverbsKeyForOneQueuePair() override { EXPECT_EQ(sv::dereg_mr(mr_), 0); }
  /// The outcome of an operation of node a through one of its queue pairs.
  ibv_wc_status outcome(ibv_qp* qp, ibv_wr_opcode opcode) {
    link_.at_a.clear();
    if (opcode == IBV_WR_RDMA_WRITE_WITH_IMM) must(link_.b.post_recv(1, 0, 64) == 0, "post_recv");
    Send send(1, link_.a.sge(0, 8), opcode);
    send.to(reinterpret_cast<std::uint64_t>(mr_->addr), mr_->rkey);
    must(send.post(qp) == 0, "post");
    must(link_.run(1, 0), "run");
    return link_.at_a[0].status;
  }

  Link link_;
  ibv_mr* mr_ = sv::reg_mr_for_qp(link_.qb, link_.b.memory.data(), 64, Node::kAllAccess);
};

TEST_F(SoftverbsKeyForOneQueuePair, OpensItThroughThatOne) {
  for (const ibv_wr_opcode opcode :
       {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE_WITH_IMM})
    EXPECT_EQ(outcome(link_.qa, opcode), IBV_WC_SUCCESS) << opcode;
}

TEST_F(SoftverbsKeyForOneQueuePair, OpensItThroughNoOther) {
  for (const ibv_wr_opcode opcode :
       {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE_WITH_IMM}) {
    ibv_qp* const qa = link_.a.make_qp();
    ibv_qp* const qb = link_.b.make_qp();
    connect(link_.a, qa, link_.b, qb);
    EXPECT_EQ(outcome(qa, opcode), IBV_WC_REM_ACCESS_ERR) << opcode;
  }
  EXPECT_EQ(outcome(link_.qa, IBV_WR_RDMA_WRITE), IBV_WC_SUCCESS);
}

TEST_F(SoftverbsKeyForOneQueuePair, IsNoKeyForLocalUse) {
  Send send(1, {reinterpret_cast<std::uint64_t>(mr_->addr), 8, mr_->lkey});
  ASSERT_EQ(send.post(link_.qb), 0);
  ASSERT_TRUE(link_.run(0, 1));
  EXPECT_EQ(link_.at_b[0].status, IBV_WC_LOC_PROT_ERR);
}

TEST_F(SoftverbsKeyForOneQueuePair, OutlivesTheQueuePairAndOpensNothingThen) {
  const std::uint32_t qpn = link_.qb->qp_num;
  link_.b.destroy(link_.qb);
  link_.qb = link_.b.make_qp();
  EXPECT_NE(link_.qb->qp_num, qpn);
  link_.qa = link_.a.make_qp();
  connect(link_.a, link_.qa, link_.b, link_.qb);
  EXPECT_EQ(outcome(link_.qa, IBV_WR_RDMA_WRITE), IBV_WC_REM_ACCESS_ERR);
}

TEST(SoftverbsLocalKeys, SendWithABadKeyFailsInOrder) {
  for (const std::uint32_t size : {kSize / 2, 200u, 100'000u}) {
    Link link;
    for (std::uint64_t i = 0; i < 4; ++i) ASSERT_EQ(link.b.post_recv(i, 0, 100'000), 0);
    Send first(1, link.a.sge(0, 8)), bad(2, link.a.sge(0, size)), last(3, link.a.sge(0, 8));
    bad.sge.lkey ^= 1;
    first.wr.next = &bad.wr;
    bad.wr.next = &last.wr;
    ASSERT_EQ(first.post(link.qa), 0);
    link.steps(5);
    ASSERT_EQ(link.at_a.size(), 3u);
    EXPECT_EQ(link.at_a[0].status, IBV_WC_SUCCESS);
    EXPECT_EQ(link.at_a[1].status, IBV_WC_LOC_PROT_ERR);
    EXPECT_EQ(link.at_a[2].status, IBV_WC_WR_FLUSH_ERR);
    EXPECT_EQ(link.at_b.size(), 1u);
  }
}

TEST(SoftverbsLocalKeys, ReadIntoMemoryThatMayOnlyBeRead) {
  Case c;
  ibv_mr* mr = sv::reg_mr(c.link.a.pd, c.link.a.memory.data(), 4096, 0);
  ASSERT_NE(mr, nullptr);
  Send send(1, {c.link.a.address(0), kSize, mr->lkey}, IBV_WR_RDMA_READ),
      next(2, c.link.a.sge(0, 8));
  send.to(c.address, c.key).wr.next = &next.wr;
  ASSERT_EQ(send.post(c.link.qa), 0);
  c.link.steps(4);
  c.expect_failed(IBV_WC_LOC_PROT_ERR);
  EXPECT_EQ(sv::dereg_mr(mr), 0);
}

TEST(SoftverbsLocalKeys, SendFromMemoryThatMayOnlyBeRead) {
  Link link;
  ibv_mr* mr = sv::reg_mr(link.a.pd, link.a.memory.data(), 200'000, 0);
  for (const std::uint32_t size : {8u, 300u, 150'000u}) {
    ASSERT_EQ(link.b.post_recv(1, 0, 200'000), 0);
    ASSERT_EQ(Send(1, {link.a.address(0), size, mr->lkey}).post(link.qa), 0);
  }
  ASSERT_TRUE(link.run(3, 3));
  for (const ibv_wc& wc : link.at_a) EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  EXPECT_EQ(sv::dereg_mr(mr), 0);
}

/// A receive that cannot take the message, and the status at each end.
void expect_bad_receive(Link& link, ibv_wc_status here, ibv_wc_status there, std::uint32_t size) {
  ASSERT_EQ(Send(1, link.a.sge(0, size)).post(link.qa), 0);
  ASSERT_EQ(Send(2, link.a.sge(0, 8)).post(link.qa), 0);
  link.steps(6);
  ASSERT_EQ(link.at_b.size(), 2u);
  EXPECT_EQ(link.at_b[0].wr_id, 10u);
  EXPECT_EQ(link.at_b[0].status, here);
  EXPECT_EQ(link.at_b[0].qp_num, link.qb->qp_num);
  EXPECT_EQ(link.at_b[1].wr_id, 11u);
  EXPECT_EQ(link.at_b[1].status, IBV_WC_WR_FLUSH_ERR);
  ASSERT_EQ(link.at_a.size(), 2u);
  EXPECT_EQ(link.at_a[0].status, there);
  EXPECT_EQ(link.at_a[1].status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(state_of(link.qa), IBV_QPS_ERR);
  EXPECT_EQ(state_of(link.qb), IBV_QPS_ERR);
  EXPECT_TRUE(all_are(link.b.memory, 0));
}

NodeOptions own_queue() {
  NodeOptions options;
  options.srq_depth = 0;
  return options;
}

TEST(SoftverbsReceiveChecks, TooShort) {
  for (const std::uint32_t size : {2u, 48u, 49u, 441u, 100'000u}) {
    SCOPED_TRACE(size);
    Link link(own_queue());
    std::fill_n(link.a.memory.begin(), size, std::byte{1});
    ASSERT_EQ(link.b.post_recv(10, 0, size - 1, link.qb), 0);
    ASSERT_EQ(link.b.post_recv(11, 0, 64, link.qb), 0);
    expect_bad_receive(link, IBV_WC_LOC_LEN_ERR, IBV_WC_REM_INV_REQ_ERR, size);
  }
}

TEST(SoftverbsReceiveChecks, BadKeyOrBounds) {
  for (const std::uint32_t size : {2u, 100u, 100'000u}) {
    for (int spoil = 0; spoil < 4; ++spoil) {
      SCOPED_TRACE(testing::Message() << size << " spoil " << spoil);
      Link link(own_queue());
      std::fill_n(link.a.memory.begin(), size, std::byte{1});
      ibv_mr* unwritable = sv::reg_mr(link.b.pd, link.b.memory.data(), 200'000, 0);
      ibv_sge sge = link.b.sge(0, size);
      if (spoil == 0) sge.lkey ^= 1;
      if (spoil == 1) sge.lkey = 0;
      if (spoil == 2) sge.lkey = unwritable->lkey;
      if (spoil == 3) sge.addr = link.b.address(link.b.memory.size() - size + 1);
      ibv_recv_wr wr{10, nullptr, &sge, 1};
      ibv_recv_wr* bad = nullptr;
      ASSERT_EQ(ibv_post_recv(link.qb, &wr, &bad), 0);
      ASSERT_EQ(link.b.post_recv(11, 0, 64, link.qb), 0);
      expect_bad_receive(link, IBV_WC_LOC_PROT_ERR, IBV_WC_REM_OP_ERR, size);
      EXPECT_EQ(sv::dereg_mr(unwritable), 0);
    }
  }
}

TEST(SoftverbsReceiveChecks, SharedQueueKeepsTheOthers) {
  // The failed queue pair uses up one receive; the rest serve another queue pair.
  Link link;
  ibv_qp* other_a = link.a.make_qp();
  ibv_qp* other_b = link.b.make_qp();
  connect(link.a, other_a, link.b, other_b);
  ASSERT_EQ(link.b.post_recv(1, 0, 4), 0);
  ASSERT_EQ(link.b.post_recv(2, 0, 64), 0);
  ASSERT_EQ(Send(1, link.a.sge(0, 8)).post(link.qa), 0);
  ASSERT_EQ(Send(2, link.a.sge(0, 8)).post(other_a), 0);
  link.steps(4);
  ASSERT_EQ(link.at_b.size(), 2u);
  EXPECT_EQ(link.at_b[0].status, IBV_WC_LOC_LEN_ERR);
  EXPECT_EQ(link.at_b[1].status, IBV_WC_SUCCESS);
  EXPECT_EQ(link.at_b[1].wr_id, 2u);
  const Event event = next_event(link.b);
  EXPECT_EQ(event.type, IBV_EVENT_QP_LAST_WQE_REACHED);
  EXPECT_EQ(event.element, link.qb);
  EXPECT_EQ(next_event(link.b).type, -1);
}

TEST(SoftverbsRevocation, BusyPeersAreWaitedFor) {
  Link link;
  // a is stopped during an access to b's memory.
  sv::Peer& peer = *link.a.internals().peers.front();
  sv::begin_access(peer);
  ibv_mr* mr = std::exchange(link.b.mr, nullptr);
  const std::uint32_t key = mr->rkey;
  ASSERT_EQ(sv::dereg_mr(mr), EBUSY);
  ASSERT_EQ(sv::dereg_mr(mr), EBUSY);
  // The key is already closed.
  ASSERT_EQ(sv::resolve(peer, 1, link.b.address(0), 8, key, 0, 0).kind,
            sv::RemoteBytes::Kind::refused);
  sv::end_access(peer);
  EXPECT_EQ(sv::dereg_mr(mr), 0);
}

TEST(SoftverbsRevocation, PeersThatWereNeverSeenAreWaitedFor) {
  // b has not checked its lanes since a connected and began an access.
  Node a, b;
  ibv_qp* qa = a.make_qp();
  ibv_qp* qb = b.make_qp();
  ASSERT_EQ(a.init(qa), 0);
  ASSERT_EQ(a.rtr(qa, b.endpoint(qb)), 0);
  sv::Peer& peer = *a.internals().peers.front();
  sv::begin_access(peer);
  ibv_mr* mr = std::exchange(b.mr, nullptr);
  ASSERT_EQ(sv::dereg_mr(mr), EBUSY);
  sv::end_access(peer);
  EXPECT_EQ(sv::dereg_mr(mr), 0);
}

TEST(SoftverbsRevocation, EntriesRestBeforeTheirNextUse) {
  // A stale key must be recognised for long: its generation advances only at the next use.
  Node node;
  ibv_mr* first = sv::reg_mr(node.pd, node.memory.data(), 64, 0);
  ASSERT_NE(first, nullptr);
  const std::uint32_t index = sv::region_index(first->rkey);
  ASSERT_EQ(sv::dereg_mr(first), 0);
  for (int i = 0; i < 1000; ++i) {
    ibv_mr* mr = sv::reg_mr(node.pd, node.memory.data(), 64, 0);
    ASSERT_NE(mr, nullptr);
    ASSERT_NE(sv::region_index(mr->rkey), index) << i;
    ASSERT_EQ(sv::dereg_mr(mr), 0);
  }
}

TEST(SoftverbsRevocation, RegistrationChecksItsArguments) {
  Node node;
  const auto refused = [&](void* address, std::size_t length, int access) {
    errno = 0;
    return sv::reg_mr(node.pd, address, length, access) == nullptr && errno == EINVAL;
  };
  EXPECT_TRUE(refused(nullptr, 64, 0));
  EXPECT_TRUE(refused(node.memory.data(), 0, 0));
  EXPECT_TRUE(refused(node.memory.data(), ~std::size_t{0}, 0));
  EXPECT_TRUE(refused(node.memory.data(), 64, IBV_ACCESS_REMOTE_WRITE));
  EXPECT_TRUE(refused(node.memory.data(), 64, IBV_ACCESS_REMOTE_ATOMIC));
  EXPECT_TRUE(refused(node.memory.data(), 64, IBV_ACCESS_ON_DEMAND));
}

TEST(SoftverbsRevocation, MemoryThatIsNotMappedIsNotRegistered) {
  constexpr std::size_t kPage = 4096;
  Node node;
  void* const at =
      ::mmap(nullptr, 2 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  must(at != MAP_FAILED, "mmap");
  auto* const begin = static_cast<std::byte*>(at);
  const auto refused = [&](int access) {
    errno = 0;
    ibv_mr* const mr = sv::reg_mr(node.pd, begin, 2 * kPage, access);
    return mr != nullptr ? sv::dereg_mr(mr) != 0 : errno == EFAULT;
  };
  EXPECT_FALSE(refused(IBV_ACCESS_LOCAL_WRITE));
  must(::mprotect(begin + kPage, kPage, PROT_READ) == 0, "mprotect");
  EXPECT_FALSE(refused(IBV_ACCESS_REMOTE_READ));
  EXPECT_TRUE(refused(IBV_ACCESS_LOCAL_WRITE));
  ibv_mr* const mr = sv::reg_mr(node.pd, begin, kPage, IBV_ACCESS_LOCAL_WRITE);
  ASSERT_NE(mr, nullptr);
  EXPECT_EQ(sv::rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, begin, 2 * kPage, 0),
            EFAULT);
  EXPECT_EQ(sv::dereg_mr(mr), 0) << "the registration is as before";
  must(::munmap(begin + kPage, kPage) == 0, "munmap");
  EXPECT_TRUE(refused(0));
  must(::munmap(begin, kPage) == 0, "munmap");
}

// Peers reach words of the segment, so that its bytes are registered. What lies behind it is memory
// like any other.
TEST(SoftverbsRevocation, MemoryBehindTheSegmentIsNotRegisteredWithIt) {
  const Node node;
  sv::Segment* const segment = node.internals().segment;
  ibv_mr* const whole = sv::reg_mr(node.pd, segment, sizeof *segment, IBV_ACCESS_LOCAL_WRITE);
  ASSERT_NE(whole, nullptr);
  EXPECT_EQ(sv::dereg_mr(whole), 0);
  constexpr std::size_t kMoreThanIsMapped = std::size_t{1} << 46;
  errno = 0;
  EXPECT_EQ(sv::reg_mr(node.pd, segment, sizeof *segment + kMoreThanIsMapped, 0), nullptr);
  EXPECT_EQ(errno, EFAULT);
}

}  // namespace softverbs_test::keys
