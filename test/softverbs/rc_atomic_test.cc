// Compare-and-swap and fetch-and-add: values, refusals, and atomicity.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "softverbs/memory/atomic_lock.h"
#include "softverbs/peer_process.h"
#include "softverbs/rc_link.h"

namespace softverbs_test::atomic {

constexpr std::size_t kWord = 4096;   ///< offset of the tested word in the target's memory
constexpr std::size_t kResult = 512;  ///< offset of the old values

NodeOptions with(bool private_memory) {
  NodeOptions options;
  options.private_memory = private_memory;
  return options;
}

std::uint64_t load(const Node& node, std::size_t offset) {
  std::uint64_t value = 0;
  std::memcpy(&value, &node.memory[offset], sizeof value);
  return value;
}
void store(const Node& node, std::size_t offset, std::uint64_t value) {
  std::memcpy(&node.memory[offset], &value, sizeof value);
}

struct Add : Send {
  Add(const Node& node, std::uint64_t address, std::uint32_t key, std::uint64_t n)
      : Send(1, node.sge(kResult, 8), IBV_WR_ATOMIC_FETCH_AND_ADD) {
    wr.wr.atomic.remote_addr = address;
    wr.wr.atomic.compare_add = n;
    wr.wr.atomic.rkey = key;
  }
};
struct Swap : Send {
  Swap(const Node& node, std::uint64_t address, std::uint32_t key, std::uint64_t expected,
       std::uint64_t value)
      : Send(2, node.sge(kResult, 8), IBV_WR_ATOMIC_CMP_AND_SWP) {
    wr.wr.atomic.remote_addr = address;
    wr.wr.atomic.compare_add = expected;
    wr.wr.atomic.swap = value;
    wr.wr.atomic.rkey = key;
  }
};

/// On mapped memory (false) and on private memory (true).
class SoftverbsAtomics : public testing::TestWithParam<bool> {};

TEST_P(SoftverbsAtomics, ValuesAreThoseOfTheHost) {
  Link link(with(GetParam()));
  fill(link.b.bytes(kWord - 8, 24), 3);
  store(link.b, kWord, 0xfffffffffffffffe);
  const auto run = [&](Send send, ibv_wc_opcode opcode) {
    store(link.a, kResult - 8, 1);
    store(link.a, kResult + 8, 1);
    link.at_a.clear();
    ASSERT_EQ(send.post(link.qa), 0);
    link.steps(1);
    ASSERT_EQ(link.at_a.size(), 1u);
    EXPECT_EQ(link.at_a[0].status, IBV_WC_SUCCESS);
    EXPECT_EQ(link.at_a[0].wr_id, send.wr.wr_id);
    EXPECT_EQ(link.at_a[0].opcode, opcode);
    EXPECT_EQ(link.at_a[0].byte_len, 8u);
    EXPECT_EQ(load(link.a, kResult - 8), 1u);
    EXPECT_EQ(load(link.a, kResult + 8), 1u);
  };
  const std::uint64_t before = load(link.b, kWord - 8);
  const std::uint64_t behind = load(link.b, kWord + 8);
  const std::uint64_t address = link.b.address(kWord);
  const std::uint32_t key = link.b.mr->rkey;
  run(Add(link.a, address, key, 5), IBV_WC_FETCH_ADD);  // beyond 2^64
  EXPECT_EQ(load(link.a, kResult), 0xfffffffffffffffe);
  EXPECT_EQ(load(link.b, kWord), 3u);
  run(Swap(link.a, address, key, 4, 100), IBV_WC_COMP_SWAP);  // the word has another value
  EXPECT_EQ(load(link.a, kResult), 3u);
  EXPECT_EQ(load(link.b, kWord), 3u);
  run(Swap(link.a, address, key, 3, 0x0102030405060708), IBV_WC_COMP_SWAP);
  EXPECT_EQ(load(link.a, kResult), 3u);
  EXPECT_EQ(load(link.b, kWord), 0x0102030405060708u);
  EXPECT_EQ(load(link.b, kWord - 8), before);
  EXPECT_EQ(load(link.b, kWord + 8), behind);
}

TEST_P(SoftverbsAtomics, TheOldValueMayBeScattered) {
  Link link(with(GetParam()));
  store(link.b, kWord, 0x1122334455667788);
  Add add(link.a, link.b.address(kWord), link.b.mr->rkey, 1);
  ibv_sge parts[] = {link.a.sge(3, 5), link.a.sge(100, 0), link.a.sge(201, 3)};
  add.wr.sg_list = parts;
  add.wr.num_sge = 3;
  ASSERT_EQ(add.post(link.qa), 0);
  link.steps(1);
  ASSERT_EQ(link.at_a.size(), 1u);
  EXPECT_EQ(link.at_a[0].status, IBV_WC_SUCCESS);
  const unsigned char low[] = {0, 0x88, 0x77, 0x66, 0x55, 0x44, 0};
  const unsigned char high[] = {0, 0x33, 0x22, 0x11, 0};
  EXPECT_EQ(std::memcmp(&link.a.memory[2], low, sizeof low), 0);
  EXPECT_EQ(std::memcmp(&link.a.memory[200], high, sizeof high), 0);
}

TEST_P(SoftverbsAtomics, RunInOrderBehindAMessage) {
  // The message waits for a receive, and the atomic behind it waits for the message.
  Link link(with(GetParam()));
  ASSERT_EQ(Send(7, link.a.sge(0, 8)).post(link.qa), 0);
  ASSERT_EQ(Add(link.a, link.b.address(kWord), link.b.mr->rkey, 9).post(link.qa), 0);
  link.steps(2);
  EXPECT_EQ(load(link.b, kWord), 0u);
  ASSERT_EQ(link.b.post_recv(1, 0, 64), 0);
  ASSERT_TRUE(link.run(2, 1));
  EXPECT_EQ(link.at_a[0].wr_id, 7u);
  EXPECT_EQ(link.at_a[1].opcode, IBV_WC_FETCH_ADD);
  EXPECT_EQ(load(link.b, kWord), 9u);
}

TEST_P(SoftverbsAtomics, ErrorsTouchNothing) {
  struct Case {
    const char* what;
    ibv_wc_status status;
    std::function<void(Link&, Send&)> spoil;
  };
  ibv_mr* other = nullptr;
  Link* owner = nullptr;
  const auto region = [&](Link& link, Node& node, std::size_t length, int access) {
    owner = &link;
    other = sv::reg_mr(node.pd, &node.memory[kWord], length, access);
    must(other != nullptr, "reg_mr");
    return other->rkey;
  };
  constexpr int kLessAccess = Node::kAllAccess & ~IBV_ACCESS_REMOTE_ATOMIC;
  const std::vector<Case> cases = {
      {"misaligned by 1", IBV_WC_REM_INV_REQ_ERR,
       [](Link&, Send& s) { s.wr.wr.atomic.remote_addr += 1; }},
      {"misaligned by 4", IBV_WC_REM_INV_REQ_ERR,
       [](Link&, Send& s) { s.wr.wr.atomic.remote_addr += 4; }},
      {"4 bytes", IBV_WC_LOC_LEN_ERR, [](Link&, Send& s) { s.sge.length = 4; }},
      {"16 bytes", IBV_WC_LOC_LEN_ERR, [](Link&, Send& s) { s.sge.length = 16; }},
      {"no element", IBV_WC_LOC_LEN_ERR, [](Link&, Send& s) { s.wr.num_sge = 0; }},
      {"local key", IBV_WC_LOC_PROT_ERR, [](Link&, Send& s) { s.sge.lkey ^= 1; }},
      {"local region may only be read", IBV_WC_LOC_PROT_ERR,
       [&](Link& link, Send& s) {
         s.sge = {link.a.address(kWord), 8, region(link, link.a, 64, 0)};
       }},
      {"remote key", IBV_WC_REM_ACCESS_ERR, [](Link&, Send& s) { s.wr.wr.atomic.rkey ^= 1; }},
      {"half outside", IBV_WC_REM_ACCESS_ERR,
       [&](Link& link, Send& s) {
         s.wr.wr.atomic.rkey = region(link, link.b, 4, Node::kAllAccess);
       }},
      {"region without the right", IBV_WC_REM_ACCESS_ERR,
       [&](Link& link, Send& s) { s.wr.wr.atomic.rkey = region(link, link.b, 64, kLessAccess); }},
      {"queue pair without the right", IBV_WC_REM_ACCESS_ERR,
       [](Link& link, Send&) {
         ibv_qp_attr attr{};
         attr.qp_access_flags = kLessAccess;
         must(sv::modify_qp(link.qb, &attr, IBV_QP_ACCESS_FLAGS) == 0, "modify_qp");
       }},
  };
  for (const Case& c : cases) {
    for (const bool swap : {false, true}) {
      SCOPED_TRACE(testing::Message() << c.what << (swap ? ", swap" : ", add"));
      Link link(with(GetParam()));
      const std::uint64_t address = link.b.address(kWord);
      Add add(link.a, address, link.b.mr->rkey, 1);
      Swap exchange(link.a, address, link.b.mr->rkey, 0, 1);
      Send& send = swap ? static_cast<Send&>(exchange) : add;
      Send next(3, link.a.sge(0, 8));
      c.spoil(link, send);
      ASSERT_EQ(send.post(link.qa), 0);
      ASSERT_EQ(next.post(link.qa), 0);
      link.steps(1);
      ASSERT_EQ(link.at_a.size(), 2u);
      EXPECT_EQ(link.at_a[0].status, c.status);
      EXPECT_EQ(link.at_a[0].wr_id, send.wr.wr_id);
      EXPECT_EQ(link.at_a[1].status, IBV_WC_WR_FLUSH_ERR);
      EXPECT_EQ(state_of(link.qa), IBV_QPS_ERR);
      EXPECT_TRUE(all_are(link.a.memory, 0));
      EXPECT_TRUE(all_are(link.b.memory, 0));
      if (owner == &link) {
        EXPECT_EQ(sv::dereg_mr(other), 0);
      }
      owner = nullptr;
    }
  }
}

TEST_P(SoftverbsAtomics, InlineIsRefused) {
  Link link(with(GetParam()));
  Add add(link.a, link.b.address(kWord), link.b.mr->rkey, 1);
  add.wr.send_flags |= IBV_SEND_INLINE;
  EXPECT_EQ(add.post(link.qa), EINVAL);
  link.steps(1);
  EXPECT_TRUE(link.at_a.empty());
  EXPECT_EQ(load(link.b, kWord), 0u);
}

/// Adds 3 to the word n times, and increments the next word by swaps as often.
void count_up(Node& node, ibv_qp* qp, std::uint64_t address, std::uint32_t key, int n) {
  const auto run = [&](Send&& send) {
    must(send.post(qp) == 0, "post_send");
    ibv_wc wc{};
    bool got = false;
    must(until([&] { got = got || node.poll(wc); }, [&] { return got; }), "no completion");
    must(wc.status == IBV_WC_SUCCESS, "status");
    return load(node, kResult);
  };
  for (int i = 0; i < n; ++i) {
    run(Add(node, address, key, 3));
    std::uint64_t seen = 0;
    for (;;) {
      const std::uint64_t old = run(Swap(node, address + 8, key, seen, seen + 1));
      if (old == seen) break;
      seen = old;
    }
  }
}

TEST_P(SoftverbsAtomics, ThreadsLoseNothing) {
  constexpr int kThreads = 3, kTimes = 3000;
  Node target(with(GetParam()));
  std::vector<std::unique_ptr<Node>> nodes;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    nodes.push_back(std::make_unique<Node>());
    connect(*nodes.back(), nodes.back()->make_qp(), target, target.make_qp());
  }
  std::atomic<int> good{0};
  for (auto& node : nodes) {
    threads.emplace_back([&, n = node.get()] {
      count_up(*n, n->qps[0], target.address(kWord), target.mr->rkey, kTimes);
      ++good;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, kThreads);
  EXPECT_EQ(load(target, kWord), std::uint64_t{3} * kThreads * kTimes);
  EXPECT_EQ(load(target, kWord + 8), std::uint64_t{kThreads} * kTimes);
}

TEST_P(SoftverbsAtomics, ProcessesLoseNothing) {
  // The owner's process on one side, another process on the other.
  constexpr int kTimes = 3000;
  if (GetParam() && !children_may_look()) GTEST_SKIP() << "kernel.yama.ptrace_scope forbids it";
  Child child([&](int socket) {
    Node node;
    ibv_qp* qp = node.make_qp();
    const Card owner = meet(node, qp, socket);
    count_up(node, qp, owner.memory + kWord, owner.key, kTimes);
    put(socket, 'd');
    (void)get<char>(socket);
  });
  Node target(with(GetParam())), node;
  meet(target, target.make_qp(), child.socket());
  connect(node, node.make_qp(), target, target.make_qp());
  count_up(node, node.qps[0], target.address(kWord), target.mr->rkey, kTimes);
  EXPECT_EQ(get<char>(child.socket()), 'd');
  EXPECT_EQ(load(target, kWord), std::uint64_t{3} * 2 * kTimes);
  EXPECT_EQ(load(target, kWord + 8), std::uint64_t{2} * kTimes);
  put(child.socket(), 'q');
  EXPECT_EQ(child.wait(), 0);
}

INSTANTIATE_TEST_SUITE_P(Memory, SoftverbsAtomics, testing::Values(false, true),
                         [](const auto& p) { return p.param ? "Private" : "Mapped"; });

/// The lock of its word.
std::atomic<std::uint64_t>& lock_of(const Node& node) {
  auto* locks = reinterpret_cast<sv::AtomicLock*>(node.internals().locks->data());
  return locks[node.address(kWord) / 8 % sv::kAtomicLocks].holder;
}

TEST(SoftverbsAtomicLock, OutlivesAHolderThatIsKilled) {
  Link link(with(true));
  // A child that shares b's segment takes the lock.
  store(link.b, kWord, 41);
  Child child([&](int socket) {
    must(sv::acquire_lock(lock_of(link.b), sv::process_word(static_cast<std::uint32_t>(getpid()))),
         "take_lock");
    put(socket, 'h');
    (void)get<char>(socket);
  });
  ASSERT_EQ(get<char>(child.socket()), 'h');
  ASSERT_EQ(Add(link.a, link.b.address(kWord), link.b.mr->rkey, 1).post(link.qa), 0);
  // While the holder lives the atomic waits, but others of the same context do not.
  ibv_qp* other_a = link.a.make_qp();
  ibv_qp* other_b = link.b.make_qp();
  connect(link.a, other_a, link.b, other_b);
  for (std::uint64_t i = 0; i < 20; ++i) {
    ASSERT_EQ(link.b.post_recv(i, 0, 64), 0);
    ASSERT_EQ(Send(50 + i, link.a.sge(64, 8)).post(other_a), 0);
    link.steps(2);
  }
  ASSERT_EQ(link.at_a.size(), 20u);
  for (const ibv_wc& wc : link.at_a) EXPECT_EQ(wc.qp_num, other_a->qp_num);
  EXPECT_EQ(load(link.b, kWord), 41u);
  child.kill_only();  // without reaping it
  ASSERT_TRUE(link.run(21, 20));
  EXPECT_EQ(link.at_a.back().status, IBV_WC_SUCCESS);
  EXPECT_EQ(link.at_a.back().opcode, IBV_WC_FETCH_ADD);
  EXPECT_EQ(load(link.a, kResult), 41u);
  EXPECT_EQ(load(link.b, kWord), 42u);
  EXPECT_EQ(lock_of(link.b).load(), 0u);
}

TEST(SoftverbsAtomicLock, IsNotFooledByAReusedPid) {
  Link link(with(true));
  const std::uint64_t self = sv::process_word(static_cast<std::uint32_t>(getpid()));
  ASSERT_NE(self >> 32, 0u);
  lock_of(link.b) = self - (std::uint64_t{1} << 32);  // this pid with an earlier start time
  ASSERT_EQ(Add(link.a, link.b.address(kWord), link.b.mr->rkey, 1).post(link.qa), 0);
  link.steps(1);
  ASSERT_EQ(link.at_a.size(), 1u);
  EXPECT_EQ(link.at_a[0].status, IBV_WC_SUCCESS);
  // Held by a living process, this one: the atomic waits, and is flushed with its queue pair.
  lock_of(link.b) = self;
  ASSERT_EQ(Add(link.a, link.b.address(kWord), link.b.mr->rkey, 1).post(link.qa), 0);
  link.steps(3);
  ASSERT_EQ(link.at_a.size(), 1u);
  link.a.fail(link.qa);
  link.steps(1);
  ASSERT_EQ(link.at_a.size(), 2u);
  EXPECT_EQ(link.at_a[1].status, IBV_WC_WR_FLUSH_ERR);
  EXPECT_EQ(link.at_a[1].opcode, IBV_WC_FETCH_ADD);
  EXPECT_EQ(load(link.b, kWord), 1u);
  EXPECT_EQ(lock_of(link.b).load(), self);
}

TEST(SoftverbsAtomicLock, MappedMemoryNeedsNone) {
  Link link(with(false));
  lock_of(link.b) = sv::process_word(static_cast<std::uint32_t>(getpid()));
  ASSERT_EQ(Add(link.a, link.b.address(kWord), link.b.mr->rkey, 1).post(link.qa), 0);
  link.steps(1);
  ASSERT_EQ(link.at_a.size(), 1u);
  EXPECT_EQ(load(link.b, kWord), 1u);
}

TEST(SoftverbsAtomicsOfTwoContexts, OfOneMemoryAreAtomicAgainstEachOther) {
  // Two devices of one process register the same private memory. Another process (if allowed) and a
  // thread of the owner access one each.
  constexpr int kTimes = 3000;
  if (!children_may_look()) GTEST_SKIP() << "kernel.yama.ptrace_scope forbids it";
  Child child([&](int socket) {
    Node node;
    ibv_qp* qp = node.make_qp();
    const Card owner = meet(node, qp, socket);
    count_up(node, qp, owner.memory + kWord, owner.key, kTimes);
    put(socket, 'd');
    (void)get<char>(socket);
  });
  Node first(with(true)), second, local;
  meet(first, first.make_qp(), child.socket());
  connect(local, local.make_qp(), second, second.make_qp());
  ibv_mr* same = sv::reg_mr(second.pd, first.memory.data(), first.memory.size(), Node::kAllAccess);
  ASSERT_NE(same, nullptr);
  count_up(local, local.qps[0], first.address(kWord), same->rkey, kTimes);
  EXPECT_EQ(get<char>(child.socket()), 'd');
  EXPECT_EQ(load(first, kWord), std::uint64_t{3} * 2 * kTimes);
  EXPECT_EQ(load(first, kWord + 8), std::uint64_t{2} * kTimes);
  put(child.socket(), 'q');
  EXPECT_EQ(child.wait(), 0);
  EXPECT_EQ(sv::dereg_mr(same), 0);
}

TEST(SoftverbsAtomicsOfTwoContexts, HaveOneLock) {
  // Held by a living process: an atomic through either context waits for it.
  Link link(with(true));
  Node other, initiator;
  connect(initiator, initiator.make_qp(), other, other.make_qp());
  ibv_mr* same = sv::reg_mr(other.pd, link.b.memory.data(), link.b.memory.size(), Node::kAllAccess);
  ASSERT_NE(same, nullptr);
  lock_of(link.b) = sv::process_word(static_cast<std::uint32_t>(getpid()));
  ASSERT_EQ(Add(initiator, link.b.address(kWord), same->rkey, 1).post(initiator.qps[0]), 0);
  ASSERT_EQ(Add(link.a, link.b.address(kWord), link.b.mr->rkey, 1).post(link.qa), 0);
  ibv_wc wc{};
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(initiator.poll(wc));
  link.steps(1);
  EXPECT_TRUE(link.at_a.empty());
  EXPECT_EQ(load(link.b, kWord), 0u);
  lock_of(link.b) = 0;
  ASSERT_TRUE(link.run(1, 0));
  ASSERT_TRUE(until([&] { (void)initiator.poll(wc); }, [&] { return wc.wr_id == 1; }));
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  EXPECT_EQ(load(link.b, kWord), 2u);
  EXPECT_EQ(sv::dereg_mr(same), 0);
}

TEST(SoftverbsAtomicsSupport, TheDeviceSaysSo) {
  Node node;
  ibv_device_attr attr{};
  ASSERT_EQ(sv::query_device(node.context, &attr), 0);
  EXPECT_EQ(attr.atomic_cap, IBV_ATOMIC_HCA);
}

}  // namespace softverbs_test::atomic
