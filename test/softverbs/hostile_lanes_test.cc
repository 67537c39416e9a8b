// Peers write anything into the directory of lanes, its doorbells and the marks of accesses. Which
// lanes are open, and which accesses count, is decided by private records; a step does a bounded
// amount of work.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "own_process.h"
#include "softverbs/memory/access_tracking.h"
#include "softverbs/memory/remote_access.h"
#include "softverbs/peer_process.h"
#include "softverbs/ud_link.h"

namespace softverbs_test::hostile_lanes {

NodeOptions small() {
  NodeOptions options;
  options.memory = 64u << 10;
  return options;
}

sv::LaneEntry& entry_of(const Node& node, std::uint32_t lane) {
  return node.internals().segment->directory[lane];
}
void control(const Node& node) { sv::control_device(node.context); }

// ---- the state of a lane ----

TEST(SoftverbsForgedLane, ALaneMarkedFreeIsForgottenWithItsSender) {
  Node b(small());
  {
    Node a(small());
    const Handle to_b(a, b);
    control(b);
    ASSERT_EQ(b.internals().peers.size(), 1u);
    entry_of(b, 0).state = 0;
  }
  EXPECT_TRUE(until([&] { control(b); }, [&] { return b.internals().peers.empty(); }));
  EXPECT_EQ(b.internals().lanes[0], nullptr);
}

TEST(SoftverbsForgedLane, ALaneMarkedFreeIsNotShared) {
  Link link;
  ASSERT_EQ(link.b.post_recv(1, 0, 64), 0);
  ASSERT_EQ(Send(2, link.a.sge(0, 8)).post(link.qa), 0);
  ASSERT_TRUE(link.run(1, 1));
  const std::uint32_t used = link.a.internals().peers[0]->out.index;
  entry_of(link.b, used).state = 0;
  Node third(small());
  const Handle to_b(third, link.b);
  EXPECT_NE(third.internals().peers[0]->out.index, used);
  // Its owner goes on with it.
  for (int i = 0; i < 10; ++i) link.control();
  ASSERT_NE(link.b.internals().lanes[used], nullptr);
  ASSERT_EQ(link.b.post_recv(1, 0, 64), 0);
  ASSERT_EQ(Send(2, link.a.sge(0, 8)).post(link.qa), 0);
  EXPECT_TRUE(link.run(2, 2));
}

TEST(SoftverbsForgedLane, ALaneThatHasANewSenderIsNotZeroed) {
  Node b(small());
  Child claimer([](int socket) { (void)get<char>(socket); });
  const std::uint64_t claimed =
      sv::lane_word(static_cast<std::uint32_t>(claimer.pid()), sv::LaneState::claimed);
  {
    Node a(small());
    const Handle to_b(a, b);
    control(b);
    entry_of(b, 0).state = claimed;
    b.internals().segment->wide_data[0][5] = std::byte{7};
  }
  EXPECT_TRUE(until([&] { control(b); }, [&] { return b.internals().peers.empty(); }));
  EXPECT_EQ(entry_of(b, 0).state, claimed);
  EXPECT_EQ(b.internals().segment->wide_data[0][5], std::byte{7});
  put(claimer.socket(), 'x');
}

TEST(SoftverbsForgedLane, AClaimThatIsNeverFinishedEnds) {
  std::uint64_t now = 1;
  NodeOptions options = small();
  options.clock = spinwire::Clock::manual(&now);
  Node b(options);
  for (const std::uint32_t pid : {b.internals().pid, std::uint32_t{1}}) {
    entry_of(b, 3).state = sv::lane_word(pid, sv::LaneState::claimed);
    b.internals().segment->lanes_used = 4;
    for (int i = 0; i < 3; ++i) control(b);
    EXPECT_EQ(sv::lane_state(entry_of(b, 3).state), sv::LaneState::claimed);
    now += 11'000'000'000;
    control(b);
    EXPECT_EQ(sv::lane_state(entry_of(b, 3).state), sv::LaneState::free);
  }
}

TEST(SoftverbsForgedLane, AStateThatDoesNotExist) {
  Node b(small());
  entry_of(b, 0).state = 0x77;
  b.internals().segment->lanes_used = 1;
  control(b);
  EXPECT_EQ(sv::lane_state(entry_of(b, 0).state), sv::LaneState::free);
}

// ---- work within a step ----

/// Marks lanes 0 to `count` as those of senders that are gone and left a packet.
void forge_lanes(const Node& node, std::uint32_t count, sv::LaneState state) {
  sv::Context& c = node.internals();
  for (std::uint32_t i = 0; i < count; ++i) {
    entry_of(node, i).sender = sv::make_gid({c.pid, 0xfffff0, i + 1});
    entry_of(node, i).state = sv::lane_word(c.pid, state);
    c.segment->doorbells[i / 64] |= std::uint64_t{1} << (i % 64);
  }
  c.segment->lanes_used = count;
  c.segment->doorbell = 1;
}
std::uint32_t open_lanes(const Node& node) {
  const auto& lanes = node.internals().lanes;
  return static_cast<std::uint32_t>(
      std::count_if(lanes.begin(), lanes.end(), [](const auto& lane) { return lane != nullptr; }));
}
std::uint32_t free_lanes(const Node& node, std::uint32_t count) {
  std::uint32_t n = 0;
  for (std::uint32_t i = 0; i < count; ++i)
    n += sv::lane_state(entry_of(node, i).state) == sv::LaneState::free ? 1 : 0;
  return n;
}

TEST(SoftverbsForgedLane, ACountThatIsTooLowHidesNoLane) {
  Node b(small());
  forge_lanes(b, 1, sv::LaneState::active);
  b.internals().segment->lanes[0].lines->word = sv::lane_mark(0) << 56;
  control(b);
  ASSERT_EQ(open_lanes(b), 1u);
  b.internals().segment->lanes_used = 0;
  ibv_wc wc{};
  ASSERT_FALSE(b.poll(wc));  // takes the packet, which is for nobody
  EXPECT_TRUE(until([&] { control(b); }, [&] { return open_lanes(b) == 0; }));
  EXPECT_EQ(sv::lane_state(entry_of(b, 0).state), sv::LaneState::free);
}

TEST(SoftverbsStep, OpensFewLanes) {
  constexpr std::uint32_t kForged = 256;
  Node b(small());
  forge_lanes(b, kForged, sv::LaneState::active);
  for (std::uint32_t i = 0; i < kForged; ++i)
    b.internals().segment->lanes[i].lines->word = sv::lane_mark(0) << 56;
  control(b);
  EXPECT_GT(open_lanes(b), 0u);
  EXPECT_LE(open_lanes(b), 32u);
  EXPECT_TRUE(until([&] { control(b); }, [&] { return open_lanes(b) == kForged; }));
}

TEST(SoftverbsStep, ZeroesFewLanes) {
  constexpr std::uint32_t kForged = 64;
  Node b(small());
  forge_lanes(b, kForged, sv::LaneState::released);
  control(b);
  EXPECT_GT(free_lanes(b, kForged), 0u);
  EXPECT_LE(free_lanes(b, kForged), 4u);
  EXPECT_TRUE(until([&] { control(b); }, [&] { return free_lanes(b, kForged) == kForged; }));
}

TEST(SoftverbsStep, APollReadsFewDoorbells) {
  Node b(small());
  sv::Segment& segment = *b.internals().segment;
  for (auto& word : segment.doorbells) word = ~std::uint64_t{0};
  segment.doorbell = 1;
  const auto left = [&] {
    return std::count_if(std::begin(segment.doorbells), std::end(segment.doorbells),
                         [](const auto& word) { return word != 0; });
  };
  ibv_wc wc{};
  ASSERT_FALSE(b.poll(wc));
  EXPECT_GE(left(), 48);
  for (int i = 0; i < 32; ++i) ASSERT_FALSE(b.poll(wc));
  EXPECT_EQ(left(), 0);
  EXPECT_EQ(segment.doorbell, 0u);
}

TEST(SoftverbsStep, ALaneThatRingsIsReachedBesideThoseThatRingAllTheTime) {
  constexpr std::uint32_t kForged = 60;
  Node b(small());
  Node a(small());
  forge_lanes(b, kForged, sv::LaneState::active);
  const Handle to_b(a, b);
  const std::uint32_t ours = a.internals().peers[0]->out.index;
  ASSERT_EQ(ours, kForged);
  for (int i = 0; i < 20 && b.internals().lanes[ours] == nullptr; ++i) {
    forge_lanes(b, kForged, sv::LaneState::active);
    b.internals().segment->lanes_used = kForged + 1;
    control(b);
  }
  EXPECT_NE(b.internals().lanes[ours], nullptr);
}

TEST(SoftverbsStep, VainReportsOfViolationsAreLookedForRarely) {
  std::uint64_t now = 1;
  NodeOptions options;
  options.clock = spinwire::Clock::manual(&now);
  Link link(options);
  sv::Segment& segment = *link.b.internals().segment;
  const auto report = [&] {
    segment.violated = 1;
    segment.doorbell = 1;
    link.poll_b();
  };
  for (std::uint32_t i = 0; i < 2 * sv::kVainLooks; ++i) report();
  auto& qp = *static_cast<sv::Qp*>(link.qb);
  qp.entry->violation = sv::violation_word(qp.qp_num, qp.dest_qpn, sv::Nak::access);
  for (int i = 0; i < 100; ++i) report();
  EXPECT_EQ(state_of(link.qb), IBV_QPS_RTS) << "polls still look";
  now += 2'000'000;
  control(link.b);
  EXPECT_EQ(state_of(link.qb), IBV_QPS_ERR);
}

/// Lanes that are used, though their entries say free.
TEST(SoftverbsStep, ANewPeerTriesFewLanes) {
  constexpr std::uint32_t kForged = 256;
  Node a(small());
  Node b(small());
  for (std::uint32_t i = 0; i < kForged; ++i) b.internals().segment->lanes[i].control.head = 1;
  ibv_ah_attr attr = way_to(b.internals().gid);
  EXPECT_EQ(sv::create_ah(a.pd, &attr), nullptr);
  EXPECT_EQ(errno, ENOSPC);
  EXPECT_EQ(free_lanes(b, kForged), kForged - 4);
  EXPECT_TRUE(a.internals().peers.empty());
  // The owner zeroes them, and a peer attaches.
  EXPECT_TRUE(until([&] { control(b); }, [&] { return free_lanes(b, 4) == 4; }));
  const Handle handle(a, attr);
  EXPECT_EQ(a.internals().peers.size(), 1u);
}

// ---- processes ----

/// A child with `count` contexts. It sends their GIDs and stays.
void guests(int socket, int count) {
  std::vector<std::unique_ptr<Node>> nodes;
  for (int i = 0; i < count; ++i) {
    nodes.push_back(std::make_unique<Node>(small()));
    put(socket, nodes.back()->internals().gid);
  }
  (void)get<char>(socket);
}

TEST(SoftverbsPeerProcess, HasOnePidfdForAllItsContexts) {
  constexpr int kContexts = 5;
  Node node(small());
  Child child([](int socket) { guests(socket, kContexts); });
  const std::size_t files = own_process::open_descriptors();
  for (int i = 0; i < kContexts; ++i)
    const Handle handle(node, way_to(get<ibv_gid>(child.socket())));
  sv::Context& c = node.internals();
  EXPECT_EQ(c.peers.size(), std::size_t{kContexts});
  EXPECT_EQ(own_process::open_descriptors(), files + 1);
  child.kill_only();
  EXPECT_TRUE(until([&] { control(node); }, [&] { return c.peers.empty(); }));
  EXPECT_EQ(own_process::open_descriptors(), files);
  EXPECT_EQ(c.liveness.watched, 0u);
}

TEST(SoftverbsPeerProcess, HasNoMoreThanItsShare) {
  Node node(small());
  Child child([](int socket) { guests(socket, 2); });
  sv::Context& c = node.internals();
  const Handle first(node, way_to(get<ibv_gid>(child.socket())));
  ibv_ah_attr second = way_to(get<ibv_gid>(child.socket()));
  std::uint32_t& users = c.liveness.all.front()->users;
  users += sv::kLanesPerProcess - 1;
  EXPECT_EQ(sv::create_ah(node.pd, &second), nullptr);
  EXPECT_EQ(errno, EDQUOT);
  users -= sv::kLanesPerProcess - 1;
  const Handle handle(node, second);
}

TEST(SoftverbsPeerProcess, TakesNoMoreThanItsShare) {
  Node node(small());
  Child child([](int socket) { guests(socket, 1); });
  ibv_ah_attr attr = way_to(get<ibv_gid>(child.socket()));
  sv::Segment* segment = nullptr;
  {
    const Handle handle(node, attr);
    segment = node.internals().peers[0]->segment;
  }
  for (std::uint32_t i = 1; i < sv::kLanesPerProcess; ++i)
    segment->directory[i].state = sv::lane_word(node.internals().pid, sv::LaneState::active);
  segment->lanes_used = sv::kLanesPerProcess;
  Node other(small());
  EXPECT_EQ(sv::create_ah(other.pd, &attr), nullptr);
  EXPECT_EQ(errno, ENOSPC);
  segment->directory[9].state = 0;
  const Handle handle(other, attr);
}

TEST(SoftverbsPeerProcess, IsWatchedOnlyWhenItIsKept) {
  // Children that are forked meanwhile hold copies of the pidfd, which keep its event alive.
  Node node(small());
  Child target([](int socket) { (void)get<char>(socket); });
  std::atomic<bool> stop = false;
  std::vector<pid_t> forked;
  std::thread forks([&] {
    while (!stop && forked.size() < 400) {
      const pid_t pid = fork();
      if (pid == 0) {
        (void)pause();
        _exit(0);
      }
      forked.push_back(pid);
    }
  });
  ibv_ah_attr attr = way_to(sv::make_gid({static_cast<std::uint32_t>(target.pid()), 999, 5}));
  for (int i = 0; i < 4000; ++i) EXPECT_EQ(sv::create_ah(node.pd, &attr), nullptr);
  stop = true;
  forks.join();
  const std::string set =
      "/proc/self/fdinfo/" + std::to_string(node.internals().liveness.processes.get());
  EXPECT_FALSE(own_process::number_in(set, "tfd").has_value());
  for (const pid_t pid : forked) {
    (void)kill(pid, SIGKILL);
    (void)waitpid(pid, nullptr, 0);
  }
}

// ---- marks of accesses ----

TEST(SoftverbsForgedAccess, AMarkInALaneWithoutASenderHoldsNoMemory) {
  Link link;
  sv::Segment& segment = *link.b.internals().segment;
  segment.lanes_used = 100;
  for (std::uint32_t i = 50; i < 100; ++i) segment.lanes[i].control.access_serial = 1;
  EXPECT_EQ(sv::dereg_mr(std::exchange(link.b.mr, nullptr)), 0);
}

TEST(SoftverbsForgedAccess, AMarkOfAPeerWithoutAQueuePairHoldsNoMemory) {
  Node node(small());
  Child child([](int socket) {
    Node theirs(small());
    put(socket, theirs.internals().gid);
    const Handle handle(theirs, way_to(get<ibv_gid>(socket)));
    sv::begin_access(*theirs.internals().peers[0]);
    put(socket, 'd');
    (void)get<char>(socket);
  });
  const Handle handle(node, way_to(get<ibv_gid>(child.socket())));
  put(child.socket(), node.internals().gid);
  (void)get<char>(child.socket());
  control(node);
  ASSERT_NE(node.internals().peers[0]->in, nullptr);
  EXPECT_EQ(sv::dereg_mr(std::exchange(node.mr, nullptr)), 0);
}

TEST(SoftverbsForgedAccess, AThreadOfOurOwnIsNotHidden) {
  Link link;
  sv::Peer& peer = *link.a.internals().peers[0];
  sv::begin_access(peer);
  sv::Segment& segment = *link.b.internals().segment;
  segment.lanes[peer.out.index].control.access_serial = 4;
  segment.directory[peer.out.index].state = 0;
  link.a.internals().segment->closed = 1;
  ASSERT_TRUE(until([&] { link.control(); }, [&] { return link.b.internals().peers[0]->gone; }));
  EXPECT_EQ(sv::dereg_mr(link.b.mr), EBUSY);
  EXPECT_FALSE(sv::wait_for_local_accesses(link.b.context, std::chrono::milliseconds(1)));
  sv::end_access(peer);
  EXPECT_TRUE(sv::wait_for_local_accesses(link.b.context, std::chrono::milliseconds(1)));
  EXPECT_EQ(sv::dereg_mr(std::exchange(link.b.mr, nullptr)), 0);
}

TEST(SoftverbsForgedAccess, APeerThatNeverLeavesIsGivenUp) {
  std::uint64_t now = 1;
  NodeOptions options = small();
  options.clock = spinwire::Clock::manual(&now);
  Node node(options);
  sv::Context& c = node.internals();
  ibv_qp* qp = node.make_qp();
  const AccessingPeer peer(node, qp, small());
  ASSERT_EQ(Send(1, node.sge(0, 8)).post(qp), 0);
  ASSERT_EQ(sv::dereg_mr(node.mr), EBUSY);
  now += 59'000'000'000;
  ASSERT_EQ(sv::dereg_mr(node.mr), EBUSY);
  control(node);
  ASSERT_EQ(state_of(qp), IBV_QPS_RTS);
  now += 2'000'000'000;
  ASSERT_EQ(sv::dereg_mr(node.mr), EBUSY);
  control(node);
  EXPECT_EQ(sv::dereg_mr(std::exchange(node.mr, nullptr)), 0);
  ibv_wc wc{};
  ASSERT_TRUE(node.poll(wc));
  EXPECT_EQ(wc.status, IBV_WC_RETRY_EXC_ERR);
  // Its process may still write to its lane, which stays its own until the process has ended.
  node.destroy(qp);
  const std::uint32_t lane = c.peers[0]->in->index;
  for (int i = 0; i < 20; ++i) {
    now += 2'000'000;
    control(node);
  }
  ASSERT_EQ(c.peers.size(), 1u);
  EXPECT_NE(c.lanes[lane], nullptr);
  peer.child.kill_only();
  EXPECT_TRUE(until(
      [&] {
        now += 2'000'000;
        control(node);
      },
      [&] { return c.peers.empty(); }));
  EXPECT_EQ(c.lanes[lane], nullptr);
}

}  // namespace softverbs_test::hostile_lanes
