// Two processes: mapped memory, memory that only the kernel reaches, and death.
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "base/unique_fd.h"
#include "own_process.h"
#include "softverbs/memory/remote_access.h"
#include "softverbs/peer_process.h"
#include "softverbs/rc_link.h"

namespace softverbs_test::process {

constexpr std::uint32_t kMegabyte = 1u << 20;

NodeOptions for_echo(bool private_memory) {
  NodeOptions options;
  options.memory = 8 * kMegabyte;
  options.private_memory = private_memory;
  return options;
}

/// The child of the echo tests: sends back what it receives until released.
void echo(int socket, bool private_memory) {
  Node node(for_echo(private_memory));
  ibv_qp* qp = node.make_qp();
  for (std::uint64_t i = 0; i < 2; ++i)
    must(node.post_recv(i, i * kMegabyte, kMegabyte) == 0, "recv");
  fill(node.bytes(4 * kMegabyte, kMegabyte), 99);
  meet(node, qp, socket);
  while (!hung_up(socket)) {
    for (int i = 0; i < 1000; ++i) {
      ibv_wc wc{};
      if (!node.poll(wc)) {
        std::this_thread::yield();
        continue;
      }
      must(wc.status == IBV_WC_SUCCESS, "status");
      if (wc.opcode != IBV_WC_RECV) {
        must(node.post_recv(wc.wr_id, wc.wr_id * kMegabyte, kMegabyte) == 0, "recv");
        continue;
      }
      must(Send(wc.wr_id, node.sge(wc.wr_id * kMegabyte, wc.byte_len)).post(qp) == 0, "send");
    }
    sv::control_device(node.context);
  }
}

class SoftverbsProcesses : public testing::TestWithParam<bool> {};

TEST_P(SoftverbsProcesses, MessagesOfAllSizes) {
  const bool private_memory = GetParam();
  if (private_memory && !children_may_look()) GTEST_SKIP() << "kernel.yama.ptrace_scope forbids it";
  Child child([&](int socket) { echo(socket, private_memory); });
  Node node(for_echo(private_memory));
  ibv_qp* qp = node.make_qp();
  const Card theirs = meet(node, qp, child.socket());
  for (const std::uint32_t size :
       {0u, 1u, 47u, 48u, 49u, 104u, 105u, 440u, 441u, 1088u, 1089u, 4096u, kMegabyte}) {
    SCOPED_TRACE(size);
    for (int round = 0; round < 20; ++round) {
      const std::uint64_t seed = size + static_cast<std::uint64_t>(round);
      fill(node.bytes(0, size), seed);
      ASSERT_EQ(node.post_recv(1, 2 * kMegabyte, kMegabyte), 0);
      ASSERT_EQ(Send(2, node.sge(0, size)).post(qp), 0);
      int done = 0;
      ASSERT_TRUE(until(
          [&] {
            ibv_wc wc{};
            if (!node.poll(wc)) return std::this_thread::yield();
            EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
            if (wc.opcode == IBV_WC_RECV) {
              EXPECT_EQ(wc.byte_len, size);
            }
            ++done;
          },
          [&] { return done == 2; }));
      ASSERT_TRUE(holds(node.bytes(2 * kMegabyte, size), seed));
    }
  }
  // One-sided, without the peer's processor.
  const auto run = [&](ibv_wr_opcode opcode, std::size_t ours, std::size_t remote,
                       std::uint32_t size) {
    ASSERT_EQ(Send(7, node.sge(ours, size), opcode).to(theirs.memory + remote, theirs.key).post(qp),
              0);
    ibv_wc wc{};
    bool got = false;
    ASSERT_TRUE(until([&] { got = node.poll(wc); }, [&] { return got; }));
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  };
  run(IBV_WR_RDMA_READ, 3 * kMegabyte, 4 * kMegabyte, kMegabyte);
  EXPECT_TRUE(holds(node.bytes(3 * kMegabyte, kMegabyte), 99));
  for (const std::uint32_t size : {1u, 4097u, kMegabyte}) {
    fill(node.bytes(0, size), ~std::uint64_t{size});
    run(IBV_WR_RDMA_WRITE, 0, 6 * kMegabyte + 3, size);
    run(IBV_WR_RDMA_READ, 3 * kMegabyte, 6 * kMegabyte + 3, size);
    EXPECT_TRUE(holds(node.bytes(3 * kMegabyte, size), ~std::uint64_t{size}));
  }
  // The path in the test's name: mapped or not.
  EXPECT_EQ(node.internals().peers[0]->objects.empty(), private_memory);
  EXPECT_FALSE(node.internals().peers[0]->same_process);
  EXPECT_EQ(child.wait(), 0);
}

INSTANTIATE_TEST_SUITE_P(All, SoftverbsProcesses, testing::Bool(), [](const auto& p) {
  return std::string(p.param ? "PrivateMemory" : "SharedMemory");
});

using own_process::open_descriptors;
/// Mappings of shared segments.
std::size_t mappings() { return own_process::mappings("memfd:spinwire"); }

/// A child that connects, does `more`, and then stays.
std::unique_ptr<Child> guest(const std::function<void(Node&, ibv_qp*, const Card&)>& more = {}) {
  return std::make_unique<Child>([more](int socket) {
    Node node(for_echo(false));
    ibv_qp* qp = node.make_qp();
    const Card theirs = meet(node, qp, socket);
    if (more) more(node, qp, theirs);
    put(socket, 'd');
    (void)get<char>(socket);
  });
}

TEST(SoftverbsDeath, NoticedReportedAndForgotten) {
  Link link;  // the others, which continue
  Node& node = link.a;
  const std::size_t peers = node.internals().peers.size();
  const std::size_t files = open_descriptors(), maps = mappings();
  for (const bool reaped : {true, false}) {
    SCOPED_TRACE(reaped);
    auto child = guest();
    ibv_qp* qp = node.make_qp();
    const Card theirs = meet(node, qp, child->socket());
    (void)get<char>(child->socket());
    // Accesses its memory, so that it is mapped.
    ASSERT_EQ(Send(1, node.sge(0, 64), IBV_WR_RDMA_WRITE).to(theirs.memory, theirs.key).post(qp),
              0);
    ASSERT_TRUE(link.run(1, 0));
    EXPECT_EQ(link.at_a[0].status, IBV_WC_SUCCESS);
    EXPECT_GT(mappings(), maps + 1);
    link.at_a.clear();
    const std::uint32_t lane = node.internals().peers.back()->in->index;
    for (std::uint64_t i = 0; i < 3; ++i) ASSERT_EQ(Send(10 + i, node.sge(0, 8)).post(qp), 0);
    if (reaped) {
      child->kill_and_reap();
    } else {
      child->kill_only();
    }
    ASSERT_TRUE(until(
        [&] {
          link.control();
          link.step();
        },
        [&] { return link.at_a.size() == 3; }));
    for (std::uint64_t i = 0; i < 3; ++i) {
      EXPECT_EQ(link.at_a[i].wr_id, 10 + i);
      EXPECT_EQ(link.at_a[i].status, i == 0 ? IBV_WC_RETRY_EXC_ERR : IBV_WC_WR_FLUSH_ERR);
    }
    link.at_a.clear();
    // The others continue, and nothing is reported twice.
    ASSERT_EQ(link.b.post_recv(5, 0, 64), 0);
    ASSERT_EQ(Send(6, node.sge(0, 8)).post(link.qa), 0);
    ASSERT_TRUE(link.run(1, 1));
    link.steps(10);
    EXPECT_EQ(link.at_a.size(), 1u);
    link.at_a.clear();
    link.at_b.clear();
    node.destroy(qp);
    EXPECT_TRUE(
        until([&] { link.control(); }, [&] { return node.internals().peers.size() == peers; }));
    EXPECT_EQ(node.internals().lanes[lane], nullptr);
    EXPECT_EQ(sv::lane_state(node.internals().segment->directory[lane].state.load()),
              sv::LaneState::free);
    child.reset();
    EXPECT_EQ(open_descriptors(), files);
    EXPECT_EQ(mappings(), maps);
  }
}

TEST(SoftverbsDeath, LeftMessagesArrive) {
  Node node;
  ASSERT_EQ(node.post_recv(4, 0, 512), 0);
  ASSERT_EQ(node.post_recv(5, 512, 512), 0);
  auto child = guest([](Node& theirs, ibv_qp* qp, const Card&) {
    fill(theirs.bytes(0, 200), 3);
    must(Send(1, theirs.sge(0, 40)).post(qp) == 0, "send");
    must(Send(2, theirs.sge(0, 200)).post(qp) == 0, "send");
  });
  ibv_qp* qp = node.make_qp();
  meet(node, qp, child->socket());
  (void)get<char>(child->socket());
  child->kill_and_reap();
  sv::control_device(node.context);
  for (const std::uint32_t size : {40u, 200u}) {
    ibv_wc wc{};
    ASSERT_TRUE(node.poll(wc));
    EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
    EXPECT_EQ(wc.byte_len, size);
    EXPECT_TRUE(holds(node.bytes((wc.wr_id - 4) * 512, size), 3));
  }
}

TEST(SoftverbsDeath, InTheMidstOfAnAccess) {
  // Deregistering waits for the busy peer, but not after its death is known.
  Node node;
  AccessingPeer peer(node, node.make_qp());
  ibv_mr* mr = sv::reg_mr(node.pd, node.memory.data(), 64, Node::kAllAccess);
  ASSERT_EQ(sv::dereg_mr(mr), EBUSY);
  peer.child.kill_and_reap();
  int result = EBUSY;
  EXPECT_TRUE(until(
      [&] {
        sv::control_device(node.context);
        result = sv::dereg_mr(mr);
      },
      [&] { return result == 0; }));
}

TEST(SoftverbsDeath, BeforeItWasMet) {
  // It connected and died before we checked our lanes: the lane is found and reclaimed.
  Node node;
  ibv_qp* qp = node.make_qp();
  Child child([&](int socket) {
    Node theirs;
    ibv_qp* own = theirs.make_qp();
    const Card card = get<Card>(socket);
    must(theirs.init(own) == 0 && theirs.rtr(own, card.endpoint) == 0 && theirs.rts(own) == 0,
         "connect");
    must(Send(1, theirs.sge(0, 8)).post(own) == 0, "send");
    put(socket, 'd');
    (void)get<char>(socket);
  });
  put(child.socket(), Card{node.endpoint(qp), 0, 0});
  (void)get<char>(child.socket());
  child.kill_only();
  const sv::LaneEntry& entry = node.internals().segment->directory[0];
  ASSERT_EQ(sv::lane_state(entry.state.load()), sv::LaneState::active);
  EXPECT_TRUE(until(
      [&] {
        sv::control_device(node.context);
        ibv_wc wc{};
        EXPECT_FALSE(node.poll(wc));
      },
      [&] { return sv::lane_state(entry.state.load()) == sv::LaneState::free; }));
  EXPECT_TRUE(node.internals().peers.empty());
  EXPECT_EQ(node.internals().awake_count, 0u);
}

TEST(SoftverbsDeath, HalfWayThroughAClaim) {
  Node node;
  Child child([](int) {});
  const auto pid = static_cast<std::uint32_t>(child.pid());
  sv::LaneEntry& entry = node.internals().segment->directory[0];
  entry.state.store(sv::lane_word(pid, sv::LaneState::claimed));
  node.internals().segment->lanes_used.store(1);
  child.kill_and_reap();
  for (int i = 0; i < 3; ++i) sv::control_device(node.context);
  EXPECT_EQ(sv::lane_state(entry.state.load()), sv::LaneState::free);
}

TEST(SlowSoftverbsDeath, AtAnyInstruction) {
  // Children that send and write as fast as they can are killed; this process survives.
  Node node;
  for (std::uint64_t i = 0; i < 64; ++i) ASSERT_EQ(node.post_recv(i, i * 2048, 2048), 0);
  const std::size_t files = open_descriptors(), maps = mappings();
  for (int round = 0; round < 60; ++round) {
    Child child([](int socket) {
      Node theirs;
      ibv_qp* qp = theirs.make_qp();
      const Card card = meet(theirs, qp, socket);
      for (std::uint32_t i = 0;; ++i) {
        (void)Send(i, theirs.sge(0, i % 2048)).post(qp);
        (void)Send(i, theirs.sge(0, 4096), IBV_WR_RDMA_WRITE)
            .to(card.memory + kMegabyte, card.key)
            .post(qp);
        ibv_wc wc[16];
        if (ibv_poll_cq(theirs.cq, 16, wc) == 0) std::this_thread::yield();
      }
    });
    ibv_qp* qp = node.make_qp();
    meet(node, qp, child.socket());
    int messages = 0;
    const auto step = [&] {
      sv::control_device(node.context);
      ibv_wc wc{};
      if (!node.poll(wc)) return std::this_thread::yield();
      // A message by reference of a dead peer cannot be pulled: its queue pair fails, but no
      // receive is lost.
      ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
      ASSERT_EQ(node.post_recv(wc.wr_id, wc.wr_id * 2048, 2048), 0);
      ++messages;
    };
    ASSERT_TRUE(until(step, [&] { return messages > round % 8; }));
    child.kill_and_reap();
    ASSERT_TRUE(until(step, [&] { return node.internals().peers[0]->gone; }));
    node.destroy(qp);
    ASSERT_TRUE(until(step, [&] { return node.internals().peers.empty(); }));
  }
  EXPECT_EQ(open_descriptors(), files);
  EXPECT_EQ(mappings(), maps);
  EXPECT_EQ(node.internals().awake_count, 0u);
}

}  // namespace softverbs_test::process
