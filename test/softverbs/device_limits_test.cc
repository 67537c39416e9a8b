// Limits, orders of destruction, and reused numbers.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "softverbs/rc_link.h"

namespace softverbs_test::limits {

NodeOptions small() {
  NodeOptions options;
  options.memory = 1u << 16;
  options.cq_entries = 64;
  return options;
}

ibv_qp_init_attr least(const Node& node) {
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = node.cq;
  init.srq = node.srq;
  init.qp_type = IBV_QPT_RC;
  init.cap = {1, 1, 1, 1, 0};
  return init;
}

TEST(SoftverbsLimits, ObjectsInUseAreKept) {
  Node node(small());
  ibv_qp* qp = node.make_qp();
  EXPECT_EQ(sv::close_device(node.context), EBUSY);
  EXPECT_EQ(sv::dealloc_pd(node.pd), EBUSY);
  EXPECT_EQ(sv::destroy_cq(node.cq), EBUSY);
  EXPECT_EQ(sv::destroy_srq(node.srq), EBUSY);
  node.destroy(qp);
  // Each object alone keeps its domain and the device.
  ibv_pd* pd = sv::alloc_pd(node.context);
  ibv_mr* mr = sv::reg_mr(pd, node.memory.data(), 64, 0);
  EXPECT_EQ(sv::dealloc_pd(pd), EBUSY);
  EXPECT_EQ(sv::dereg_mr(mr), 0);
  ibv_srq_init_attr attr{};
  attr.attr = {4, 1, 0};
  ibv_srq* srq = sv::create_srq(pd, &attr);
  ASSERT_NE(srq, nullptr);
  EXPECT_EQ(sv::dealloc_pd(pd), EBUSY);
  EXPECT_EQ(sv::destroy_srq(srq), 0);
  EXPECT_EQ(sv::dealloc_pd(pd), 0);

  auto opened = sv::open_device(spinwire::Clock::real(), sv::Driving::by_user);
  ASSERT_TRUE(opened.has_value());
  ibv_cq* cq = sv::create_cq(*opened, 1);
  EXPECT_EQ(sv::close_device(*opened), EBUSY);
  EXPECT_EQ(sv::destroy_cq(cq), 0);
  EXPECT_EQ(sv::close_device(*opened), 0);
}

TEST(SoftverbsLimits, BadRequestsAreRefused) {
  Node node(small()), foreign(small());
  const auto refused = [&](const std::function<void(ibv_qp_init_attr&)>& spoil, int error) {
    ibv_qp_init_attr init = least(node);
    spoil(init);
    errno = 0;
    return sv::create_qp(node.pd, &init) == nullptr && errno == error;
  };
  EXPECT_TRUE(refused([](auto& i) { i.qp_type = IBV_QPT_RAW_PACKET; }, EOPNOTSUPP));
  EXPECT_TRUE(refused([](auto& i) { i.send_cq = nullptr; }, EINVAL));
  EXPECT_TRUE(refused([](auto& i) { i.recv_cq = nullptr; }, EINVAL));
  EXPECT_TRUE(refused([&](auto& i) { i.send_cq = foreign.cq; }, EINVAL));
  EXPECT_TRUE(refused([&](auto& i) { i.srq = foreign.srq; }, EINVAL));
  EXPECT_TRUE(refused([](auto& i) { i.cap.max_send_wr = 32769; }, EINVAL));
  EXPECT_TRUE(refused([](auto& i) { i.cap.max_recv_wr = 32769; }, EINVAL));
  EXPECT_TRUE(refused([](auto& i) { i.cap.max_send_sge = 17; }, EINVAL));
  EXPECT_TRUE(refused([](auto& i) { i.cap.max_recv_sge = 17; }, EINVAL));
  EXPECT_TRUE(refused([](auto& i) { i.cap.max_inline_data = 1025; }, EINVAL));

  errno = 0;
  EXPECT_EQ(sv::create_cq(node.context, 0), nullptr);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(sv::create_cq(node.context, (1 << 22) + 1), nullptr);
  ibv_srq_init_attr attr{};
  for (const ibv_srq_attr bad :
       {ibv_srq_attr{0, 1, 0}, ibv_srq_attr{32769, 1, 0}, ibv_srq_attr{4, 17, 0}}) {
    attr.attr = bad;
    EXPECT_EQ(sv::create_srq(node.pd, &attr), nullptr);
  }
}

TEST(SoftverbsLimits, DeviceTellsThem) {
  Node node(small());
  ibv_device_attr device{};
  ASSERT_EQ(sv::query_device(node.context, &device), 0);
  EXPECT_EQ(device.max_sge, 16);
  EXPECT_GE(device.max_qp, 65'000);
  EXPECT_EQ(device.phys_port_cnt, 2);
  ibv_port_attr port{};
  ASSERT_EQ(sv::query_port(node.context, 1, &port), 0);
  EXPECT_EQ(port.state, IBV_PORT_ACTIVE);
  EXPECT_EQ(port.max_msg_sz, 1u << 31);
  ASSERT_EQ(sv::query_port(node.context, 2, &port), 0);
  EXPECT_EQ(port.state, IBV_PORT_ACTIVE);
  EXPECT_EQ(sv::query_port(node.context, 0, &port), EINVAL);
  EXPECT_EQ(sv::query_port(node.context, 3, &port), EINVAL);
  ibv_gid gid{};
  EXPECT_EQ(sv::query_gid(node.context, 1, 1, &gid), EINVAL);
  EXPECT_EQ(sv::query_gid(node.context, 3, 0, &gid), EINVAL);
  ASSERT_EQ(sv::query_gid(node.context, 1, 0, &gid), 0);
  EXPECT_TRUE(sv::parse_gid(gid).has_value());
}

TEST(SoftverbsLimits, NoLaneLeft) {
  Node a(small()), b(small());
  sv::Segment& segment = *b.internals().segment;
  for (sv::LaneEntry& entry : segment.directory)
    entry.state.store(sv::lane_word(segment.pid, sv::LaneState::claimed));
  ibv_qp* qa = a.make_qp();
  ibv_qp* qb = b.make_qp();
  ASSERT_EQ(a.init(qa), 0);
  EXPECT_EQ(a.rtr(qa, b.endpoint(qb)), ENOSPC);
  EXPECT_EQ(state_of(qa), IBV_QPS_INIT);
  EXPECT_TRUE(a.internals().peers.empty());
  segment.directory[9].state.store(0);
  EXPECT_EQ(a.rtr(qa, b.endpoint(qb)), 0);
  EXPECT_EQ(a.internals().peers[0]->out.index, 9u);
}

TEST(SoftverbsLimits, NoObjectLeft) {
  // Then the region is not mapped, and peers access it through the kernel.
  Node node(small());
  std::vector<std::uint32_t>& users = node.internals().object_users;
  const std::vector<std::uint32_t> before = users;
  users.assign(sv::kMaxObjects, 1);
  for (std::uint32_t i = 0; i < sv::kMaxObjects; ++i)
    node.internals().segment->objects[i].inode ^= 1;
  ibv_mr* mr = sv::reg_mr(node.pd, node.memory.data(), 64, Node::kAllAccess);
  ASSERT_NE(mr, nullptr);
  EXPECT_EQ(node.internals().segment->regions[sv::region_index(mr->rkey)].object, sv::kNoObject);
  users = before;
  EXPECT_EQ(sv::dereg_mr(mr), 0);
}

TEST(SoftverbsLimits, NumbersUsedAgainDoNotGetOldPackets) {
  Link link;
  ibv_qp* fresh_a = link.a.make_qp();
  ASSERT_EQ(link.b.post_recv(1, 0, 64), 0);
  const std::uint32_t old_number = link.qb->qp_num;
  for (std::uint64_t i = 0; i < 3; ++i) ASSERT_EQ(Send(i, link.a.sge(0, 8)).post(link.qa), 0);
  link.b.destroy(link.qb);
  link.b.internals().numbers.next = sv::kMaxQueuePairs;  // as if all had been used once
  ibv_qp* again = link.b.make_qp();
  ASSERT_EQ(sv::queue_pair_index(again->qp_num), sv::queue_pair_index(old_number));
  ASSERT_NE(again->qp_num, old_number);
  connect(link.a, fresh_a, link.b, again);
  // Even when connected to the old sender, with the packet numbers of the old packets.
  link.steps(4);
  EXPECT_TRUE(link.at_b.empty());
  ASSERT_EQ(Send(9, link.a.sge(0, 16)).post(fresh_a), 0);
  ASSERT_TRUE(link.run(1, 1));
  EXPECT_EQ(link.at_b[0].byte_len, 16u);
  EXPECT_EQ(link.at_b[0].qp_num, again->qp_num);
  EXPECT_EQ(link.at_a[0].wr_id, 9u);
}

TEST(SoftverbsLimits, AFewQueuePairsAtATimeUseAPartOfTheTable) {
  constexpr std::uint32_t kAtATime = 3;
  Node node(small());
  ibv_qp_init_attr init = least(node);
  std::map<std::uint32_t, std::uint32_t> last_use;  // by index
  std::set<std::uint32_t> numbers;
  std::vector<ibv_qp*> open;
  for (std::uint32_t i = 0; i < 3 * sv::QueuePairNumbers::kRest; ++i) {
    ibv_qp* const qp = sv::create_qp(node.pd, &init);
    ASSERT_NE(qp, nullptr);
    EXPECT_TRUE(numbers.insert(qp->qp_num).second) << "number " << qp->qp_num << " came again";
    const auto [use, first] = last_use.try_emplace(sv::queue_pair_index(qp->qp_num), i);
    if (!first) {
      EXPECT_GT(i - std::exchange(use->second, i), sv::QueuePairNumbers::kRest);
    }
    open.push_back(qp);
    if (open.size() < kAtATime) continue;
    ASSERT_EQ(sv::destroy_qp(open.front()), 0);
    open.erase(open.begin());
  }
  EXPECT_LE(last_use.size(), sv::QueuePairNumbers::kRest + kAtATime + 1);
  for (ibv_qp* qp : open) ASSERT_EQ(sv::destroy_qp(qp), 0);
}

TEST(SlowSoftverbsLimits, AllQueuePairs) {
  Node node(small());
  std::vector<ibv_qp*> all;
  ibv_qp_init_attr init = least(node);
  while (ibv_qp* qp = sv::create_qp(node.pd, &init)) {
    all.push_back(qp);
    ASSERT_LE(all.size(), sv::kMaxQueuePairs);
  }
  EXPECT_EQ(errno, ENOMEM);
  ibv_device_attr device{};
  ASSERT_EQ(sv::query_device(node.context, &device), 0);
  EXPECT_EQ(all.size(), static_cast<std::size_t>(device.max_qp));
  std::uint32_t number = all[1000]->qp_num;
  ASSERT_EQ(sv::destroy_qp(all[1000]), 0);
  for (int i = 0; i < 300; ++i) {  // through all its generations
    all[1000] = sv::create_qp(node.pd, &init);
    ASSERT_NE(all[1000], nullptr);
    EXPECT_NE(all[1000]->qp_num, number);
    number = all[1000]->qp_num;
    ASSERT_EQ(sv::destroy_qp(all[1000]), 0);
  }
  all.erase(all.begin() + 1000);
  for (ibv_qp* qp : all) ASSERT_EQ(sv::destroy_qp(qp), 0);
}

TEST(SlowSoftverbsLimits, AllRegions) {
  Node node(small());
  std::vector<ibv_mr*> all;
  while (ibv_mr* mr = sv::reg_mr(node.pd, node.memory.data(), 64, 0)) {
    all.push_back(mr);
    ASSERT_LE(all.size(), sv::kMaxRegions);
  }
  EXPECT_EQ(errno, ENOMEM);
  ibv_device_attr device{};
  ASSERT_EQ(sv::query_device(node.context, &device), 0);
  EXPECT_EQ(all.size() + 1, static_cast<std::size_t>(device.max_mr));  // the node has one itself
  const std::uint32_t key = all[77]->rkey;
  ASSERT_EQ(sv::dereg_mr(all[77]), 0);
  all[77] = sv::reg_mr(node.pd, node.memory.data(), 64, 0);
  ASSERT_NE(all[77], nullptr);
  EXPECT_EQ(sv::region_index(all[77]->rkey), sv::region_index(key));
  EXPECT_NE(all[77]->rkey, key);
  for (ibv_mr* mr : all) ASSERT_EQ(sv::dereg_mr(mr), 0);
}

/// A device only, which a test opens a thousand times.
struct Bare {
  ibv_context* context = nullptr;
  ibv_pd* pd = nullptr;
  ibv_cq* cq = nullptr;
  ibv_qp* qp = nullptr;
  ~Bare() {
    if (qp != nullptr) sv::destroy_qp(qp);
    if (cq != nullptr) sv::destroy_cq(cq);
    if (pd != nullptr) sv::dealloc_pd(pd);
    if (context != nullptr) sv::close_device(context);
  }
};

TEST(SlowSoftverbsLimits, ThousandContextsAttachToOne) {
  constexpr std::size_t kCount = 1000;
  rlimit files{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  if (files.rlim_max < 2 * kCount + 200) GTEST_SKIP() << "too few open files allowed";
  const rlimit before = files;
  files.rlim_cur = files.rlim_max;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
  {
    NodeOptions options = small();
    options.srq_depth = 2048;
    options.cq_entries = 4096;
    Node hub(options);
    std::vector<std::unique_ptr<Bare>> all;
    for (std::size_t i = 0; i < kCount; ++i) {
      all.push_back(std::make_unique<Bare>());
      Bare& one = *all.back();
      auto opened = sv::open_device(spinwire::Clock::real(), sv::Driving::by_user);
      ASSERT_TRUE(opened.has_value()) << i;
      one.context = *opened;
      one.pd = sv::alloc_pd(one.context);
      one.cq = sv::create_cq(one.context, 16);
      ibv_qp_init_attr init{};
      init.send_cq = init.recv_cq = one.cq;
      init.qp_type = IBV_QPT_RC;
      init.cap = {4, 4, 1, 1, 64};
      one.qp = sv::create_qp(one.pd, &init);
      ASSERT_NE(one.qp, nullptr);
      ibv_qp* ours = hub.make_qp();
      Endpoint theirs{{}, one.qp->qp_num, 1};
      sv::query_gid(one.context, 1, 0, &theirs.gid);
      ASSERT_EQ(hub.init(one.qp), 0);
      ASSERT_EQ(hub.rtr(one.qp, hub.endpoint(ours)), 0);
      ASSERT_EQ(hub.init(ours), 0);
      ASSERT_EQ(hub.rtr(ours, theirs), 0);
      ibv_qp_attr attr{};
      attr.qp_state = IBV_QPS_RTS;
      attr.timeout = 14;
      attr.sq_psn = 1;
      ASSERT_EQ(sv::modify_qp(one.qp, &attr,
                              IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                  IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
                0);
      ASSERT_EQ(hub.post_recv(i, 0, 64), 0);
    }
    std::uint64_t word = 0;
    const ibv_sge sge{reinterpret_cast<std::uint64_t>(&word), 8, 0};
    for (const auto& one : all)
      ASSERT_EQ(Send(1, sge, IBV_WR_SEND, IBV_SEND_INLINE | IBV_SEND_SIGNALED).post(one->qp), 0);
    std::size_t got = 0;
    EXPECT_TRUE(until(
        [&] {
          ibv_wc wc[16];
          got += static_cast<std::size_t>(ibv_poll_cq(hub.cq, 16, wc));
          sv::control_device(hub.context);
        },
        [&] { return got == kCount; }));
    EXPECT_EQ(hub.internals().peers.size(), kCount);
    all.clear();
    while (!hub.qps.empty()) hub.destroy(hub.qps.back());
    EXPECT_TRUE(until([&] { sv::control_device(hub.context); },
                      [&] { return hub.internals().peers.empty(); }));
    EXPECT_EQ(hub.internals().awake_count, 0u);
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  }
}

}  // namespace softverbs_test::limits
