// Memory that is revoked while a peer copies. Once the device reports success, only the new holder
// accesses it. Two processes; the peer copies whole blocks as fast as it can until it is refused.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "base/random.h"
#include "forbidden_call.h"
#include "long_run.h"
#include "softverbs/memory/memory_window.h"
#include "softverbs/memory/remote_access.h"
#include "softverbs/peer_process.h"
#include "softverbs/rc_link.h"

namespace softverbs_test::revocation {

using Steady = std::chrono::steady_clock;

/// How the peer loses its access.
enum class By : std::uint32_t { key, window, queue_pair, rights };

struct Scale {
  std::size_t block;
  std::uint32_t rounds;
  std::uint32_t whole_every;  ///< every so often the block is one work request
  std::uint32_t chunk;        ///< size of the others
};

/// Shared by the two.
struct Page {
  alignas(64) std::atomic<std::uint32_t> round{0};  ///< from 1; the following fields are valid
  std::uint32_t key = 0;
  std::uint32_t chunk = 0;
  ibv_wr_opcode opcode{};
  alignas(64) std::atomic<std::uint32_t> begun{0};  ///< the round in which the peer copies
  std::atomic<std::uint32_t> refused{0};            ///< the round in which the peer was refused
  std::atomic<std::uint64_t> copies{0};             ///< work requests that succeeded
  std::atomic<std::uint32_t> fault{0};
};

/// The last word of each step is checked: a peer that still copied after the handover would write
/// there.
constexpr std::size_t kStep = 64 * 1024;
constexpr std::uint64_t kPeers = 0x1111111111111111;  ///< written by the peer
constexpr std::uint64_t kOwners = 0x2222222222222222;
/// The content of the block's next holder. Nobody else may see it.
constexpr std::uint64_t secret(std::uint32_t round) { return 0x5ec2e70000000000 | round; }
constexpr std::uint64_t kSecretMask = 0xffffffff00000000;

std::uint64_t& word_at(std::span<std::byte> block, std::size_t end) {
  return *reinterpret_cast<std::uint64_t*>(&block[end - sizeof(std::uint64_t)]);
}
void stamp(std::span<std::byte> block, std::uint64_t value) {
  for (std::size_t end = kStep; end <= block.size(); end += kStep) word_at(block, end) = value;
}
bool any_secret(std::span<std::byte> block) {
  for (std::size_t end = kStep; end <= block.size(); end += kStep) {
    if ((word_at(block, end) & kSecretMask) == (secret(0) & kSecretMask)) return true;
  }
  return false;
}
bool all_stamped(std::span<std::byte> block, std::uint64_t value) {
  for (std::size_t end = kStep; end <= block.size(); end += kStep) {
    if (word_at(block, end) != value) return false;
  }
  return true;
}

NodeOptions with(const Scale& scale, bool private_memory) {
  NodeOptions options;
  options.memory = scale.block;
  options.private_memory = private_memory;
  options.send_depth = 256;
  return options;
}

/// Gives up at once without a response, which ends a round.
constexpr ConnectOptions kHasty = {.rnr_timer = 1, .timeout = 1, .retries = 0, .rnr_retry = 0};

void connect_again(Node& node, ibv_qp* qp, const Endpoint& peer) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RESET;
  int error = EBUSY;
  while (error == EBUSY) error = sv::modify_qp(qp, &attr, IBV_QP_STATE);
  must(error == 0 && node.init(qp) == 0 && node.rtr(qp, peer) == 0 &&
           node.rts(qp, kHasty.timeout, kHasty.retries) == 0,
       "connect again");
}

/// Copies the block once, in one postlist. Returns the first status other than success.
ibv_wc_status copy_block(Node& node, ibv_qp* qp, const Page& page, std::uint64_t address) {
  std::vector<Send> list;
  const auto count = static_cast<std::uint32_t>(node.memory.size() / page.chunk);
  list.reserve(count);
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::size_t at = std::size_t{i} * page.chunk;
    list.emplace_back(i, node.sge(at, page.chunk), page.opcode);
    list.back().to(address + at, page.key);
    list.back().wr.sg_list = &list.back().sge;
    if (i != 0) list[i - 1].wr.next = &list[i].wr;
  }
  must(list.front().post(qp) == 0, "post_send");
  ibv_wc_status status = IBV_WC_SUCCESS;
  for (std::uint32_t done = 0; done < count;) {
    ibv_wc wc{};
    if (!node.poll(wc)) continue;
    ++done;
    if (status == IBV_WC_SUCCESS) status = wc.status;
  }
  return status;
}

/// The peer's loop: each round copies until it is refused.
void copy_until_killed(int socket, Page& page, const Scale& scale) {
  Node node(with(scale, false));
  ibv_qp* qp = node.make_qp();
  const Card owner = meet(node, qp, socket, kHasty);
  stamp(node.memory, kPeers);
  for (std::uint32_t round = 1;; ++round) {
    while (page.round.load(std::memory_order_acquire) != round) sched_yield();
    const bool reads = page.opcode == IBV_WR_RDMA_READ;
    page.begun.store(round, std::memory_order_release);
    ibv_wc_status status = IBV_WC_SUCCESS;
    while (status == IBV_WC_SUCCESS) {
      status = copy_block(node, qp, page, owner.memory);
      page.copies.fetch_add(1, std::memory_order_relaxed);
      if (reads && any_secret(node.memory)) page.fault = 1;
    }
    if (reads) stamp(node.memory, kPeers);
    if (status != IBV_WC_REM_ACCESS_ERR && status != IBV_WC_RETRY_EXC_ERR) page.fault = 2;
    connect_again(node, qp, owner.endpoint);
    page.refused.store(round, std::memory_order_release);
  }
}

/// The owner's side.
class Owner {
 public:
  Owner(Node& node, ibv_qp* qp, Page& page, By by) : node_(node), qp_(qp), page_(page), by_(by) {
    if (by == By::window) mw_ = sv::alloc_mw(node.pd, IBV_MW_TYPE_2);
  }
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;
  ~Owner() {
    if (mw_ != nullptr) (void)sv::dealloc_mw(mw_);
    if (mr_ != nullptr) (void)sv::dereg_mr(mr_);
  }

  void grant() {
    if (by_ == By::window) return bind();
    if (by_ == By::rights) change_rights(Node::kAllAccess);
    mr_ = sv::reg_mr(node_.pd, node_.memory.data(), node_.memory.size(), Node::kAllAccess);
    must(mr_ != nullptr, "reg_mr");
    page_.key = mr_->rkey;
  }

  /// Repeats until the device reports that the peer has no access.
  void revoke() {
    const sv::Segment& segment = *node_.internals().segment;
    const auto& peer = *node_.internals().peers.front();
    if ((segment.lanes[peer.in->index].control.access_serial.load() & 1) != 0) ++in_progress_;
    switch (by_) {
      case By::key:
        return until_done([this] { return sv::dereg_mr(mr_); }, true);
      case By::window:
        return invalidate();
      case By::queue_pair: {
        ibv_qp_attr attr{};
        attr.qp_state = IBV_QPS_ERR;
        return until_done([&] { return sv::modify_qp(qp_, &attr, IBV_QP_STATE); }, false);
      }
      case By::rights:
        return until_done([this] { return try_rights(IBV_ACCESS_LOCAL_WRITE); }, false);
    }
  }

  /// Prepares the next round. The peer's refusal has also ended our queue pair.
  void prepare(const Endpoint& peer) {
    connect_again(node_, qp_, peer);
    if (mr_ != nullptr) until_done([this] { return sv::dereg_mr(mr_); }, true);
  }

  [[nodiscard]] std::uint32_t in_progress() const { return in_progress_; }
  [[nodiscard]] std::uint64_t waits() const { return waits_; }

 private:
  template <typename Verb>
  void until_done(Verb verb, bool ends_registration) {
    int error = verb();
    if (error == EBUSY) ++waits_;
    while (error == EBUSY) error = verb();
    must(error == 0, "revoke");
    if (ends_registration) mr_ = nullptr;
  }
  int try_rights(unsigned rights) {
    ibv_qp_attr attr{};
    attr.qp_access_flags = rights;
    return sv::modify_qp(qp_, &attr, IBV_QP_ACCESS_FLAGS);
  }
  void change_rights(unsigned rights) { must(try_rights(rights) == 0, "rights"); }

  ibv_wc_status run(ibv_send_wr& wr) {
    wr.send_flags = IBV_SEND_SIGNALED;
    ibv_send_wr* bad = nullptr;
    must(ibv_post_send(qp_, &wr, &bad) == 0, "post_send");
    ibv_wc wc{};
    if (!node_.poll(wc)) {
      ++waits_;
      while (!node_.poll(wc)) {
      }
    }
    return wc.status;
  }
  void bind() {
    ibv_send_wr wr{};
    wr.opcode = IBV_WR_BIND_MW;
    page_.key = wr.bind_mw.rkey = mw_->rkey = ibv_inc_rkey(mw_->rkey);
    wr.bind_mw.mw = mw_;
    wr.bind_mw.bind_info = {node_.mr, node_.address(0), node_.memory.size(),
                            IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ};
    must(run(wr) == IBV_WC_SUCCESS, "bind");
  }
  void invalidate() {
    ibv_send_wr wr{};
    wr.opcode = IBV_WR_LOCAL_INV;
    wr.invalidate_rkey = mw_->rkey;
    if (run(wr) == IBV_WC_SUCCESS) return;
    // The peer was refused while our queue pair waited for it to leave, so the window is returned
    // in another way.
    until_done([this] { return sv::dealloc_mw(mw_); }, false);
    mw_ = sv::alloc_mw(node_.pd, IBV_MW_TYPE_2);
    must(mw_ != nullptr, "alloc_mw");
  }

  Node& node_;
  ibv_qp* qp_;
  Page& page_;
  By by_;
  ibv_mr* mr_ = nullptr;
  ibv_mw* mw_ = nullptr;
  std::uint32_t in_progress_ = 0;  ///< revocations that found the peer copying
  std::uint64_t waits_ = 0;        ///< those that waited longer than one call
};

constexpr std::chrono::seconds kLongest{240};

void revoke_again_and_again(By by, const Scale& scale, bool private_memory = false) {
  if (private_memory && !children_may_look()) GTEST_SKIP() << "kernel.yama.ptrace_scope forbids it";
  void* at = mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(at, MAP_FAILED);
  Page& page = *new (at) Page;
  Child child([&](int socket) { copy_until_killed(socket, page, scale); });
  Node node(with(scale, private_memory));
  ibv_qp* qp = node.make_qp();
  const Card peer = meet(node, qp, child.socket(), kHasty);
  Owner owner(node, qp, page, by);
  spinwire::base::Random random(7);
  std::uint32_t touched = 0;
  const Steady::time_point began = Steady::now();
  // As many rounds as it takes to strike the peer amid its copying often enough. On a busy machine
  // it is off its processor at most moments.
  const auto proved = [&] {
    return owner.in_progress() >= scale.rounds / 4 && owner.waits() >= scale.rounds / 20;
  };
  std::uint32_t round = 1;
  for (; touched == 0 && (round <= scale.rounds || !proved()); ++round) {
    if (round > scale.rounds && Steady::now() - began > kLongest) break;
    stamp(node.memory, kOwners);
    owner.grant();
    const bool whole = random.below(scale.whole_every) == 0;
    page.chunk = whole ? static_cast<std::uint32_t>(scale.block) : scale.chunk;
    page.opcode = random.below(4) == 0 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
    page.round.store(round, std::memory_order_release);
    ASSERT_TRUE(until([] { sched_yield(); }, [&] { return page.begun.load() == round; }));
    // At any moment of the peer's copying.
    const auto moment =
        Steady::now() + std::chrono::nanoseconds(random.below(whole ? scale.block / 4 : 400'000));
    while (Steady::now() < moment) {
    }
    owner.revoke();
    // Now another holder has it.
    stamp(node.memory, secret(round));
    ASSERT_TRUE(until([] { sched_yield(); }, [&] { return page.refused.load() == round; }));
    if (!all_stamped(node.memory, secret(round))) ++touched;
    owner.prepare(peer.endpoint);
  }
  const std::chrono::duration<double> took = Steady::now() - began;
  std::printf("%u revocations in %.1f s: %u of a peer that was copying, %llu waited; %llu copies\n",
              round - 1, took.count(), owner.in_progress(),
              static_cast<unsigned long long>(owner.waits()),
              static_cast<unsigned long long>(page.copies.load()));
  EXPECT_EQ(touched, 0u);
  EXPECT_EQ(page.fault, 0u);
  EXPECT_GE(owner.in_progress(), scale.rounds / 4) << "the proof is in the copies that were struck";
  EXPECT_GE(owner.waits(), scale.rounds / 20);
  child.kill_and_reap();
  munmap(at, sizeof(Page));
}

Scale large() { return {std::size_t{64} << 20, rounds_of(10'000), 64, 512u << 10}; }
constexpr Scale kSmall = {std::size_t{2} << 20, 30, 8, 256u << 10};

TEST(SoftverbsRevoked, ByItsKey) { revoke_again_and_again(By::key, kSmall); }
TEST(SoftverbsRevoked, ByItsWindow) { revoke_again_and_again(By::window, kSmall); }
TEST(SoftverbsRevoked, ByItsQueuePair) { revoke_again_and_again(By::queue_pair, kSmall); }
TEST(SoftverbsRevoked, ByItsRights) { revoke_again_and_again(By::rights, kSmall); }

TEST(SlowSoftverbsRevoked, ByKeys) { revoke_again_and_again(By::key, large()); }
TEST(SlowSoftverbsRevoked, PrivateMemory) {
  revoke_again_and_again(By::key, {std::size_t{64} << 20, 500, 32, 1u << 20}, true);
}
TEST(SlowSoftverbsRevoked, ByWindows) { revoke_again_and_again(By::window, large()); }
TEST(SlowSoftverbsRevoked, QueuePairs) {
  revoke_again_and_again(By::queue_pair, {std::size_t{64} << 20, 2'000, 32, 1u << 20});
}

// ---- step by step: a peer that is stopped during an access ----

/// b's queue pair, which a is accessing.
struct Entered : Link {
  sv::Peer& peer = *a.internals().peers.front();
  Entered() : Link(with_own_queue()) {
    must(b.post_recv(3, 0, 64, qb) == 0 && Send(4, b.sge(0, 8)).post(qb) == 0, "post");
    sv::begin_access(peer);
  }
  static NodeOptions with_own_queue() {
    NodeOptions options;
    options.srq_depth = 0;
    return options;
  }
  [[nodiscard]] int modify(ibv_qp_state state) const {
    ibv_qp_attr attr{};
    attr.qp_state = state;
    return sv::modify_qp(qb, &attr, IBV_QP_STATE);
  }
  /// The status of a's next write.
  ibv_wc_status write() {
    at_a.clear();
    must(Send(9, a.sge(0, 8), IBV_WR_RDMA_WRITE).to(b.address(0), b.mr->rkey).post(qa) == 0,
         "post_send");
    must(run(1, 0), "one completion");
    return at_a[0].status;
  }
};

TEST(SoftverbsLeaving, ErrWaitsForThePeer) {
  Entered link;
  ASSERT_EQ(link.modify(IBV_QPS_ERR), EBUSY);
  EXPECT_EQ(state_of(link.qb), IBV_QPS_ERR);
  link.poll_b();
  EXPECT_EQ(link.at_b.size(), 2u) << "flushed at once";
  EXPECT_EQ(link.modify(IBV_QPS_ERR), EBUSY);
  EXPECT_EQ(sv::destroy_qp(link.qb), EBUSY);
  sv::end_access(link.peer);
  EXPECT_EQ(link.modify(IBV_QPS_ERR), 0);
  link.poll_b();
  EXPECT_EQ(link.at_b.size(), 2u);
  // During another access, which cannot be through this queue pair.
  sv::begin_access(link.peer);
  EXPECT_EQ(link.modify(IBV_QPS_ERR), 0);
  link.b.destroy(link.qb);
  sv::end_access(link.peer);
}

TEST(SoftverbsLeaving, ResetAndDestroyWaitToo) {
  for (const bool destroy : {false, true}) {
    Entered link;
    ASSERT_EQ(destroy ? sv::destroy_qp(link.qb) : link.modify(IBV_QPS_RESET), EBUSY);
    EXPECT_EQ(state_of(link.qb), IBV_QPS_ERR);
    sv::end_access(link.peer);
    // No new access began.
    EXPECT_EQ(link.write(), IBV_WC_RETRY_EXC_ERR);
    if (destroy) {
      link.b.destroy(link.qb);
      continue;
    }
    ASSERT_EQ(link.modify(IBV_QPS_RESET), 0);
    EXPECT_EQ(state_of(link.qb), IBV_QPS_RESET);
    sv::begin_access(link.peer);
    link.b.destroy(link.qb);
    sv::end_access(link.peer);
  }
}

TEST(SoftverbsLeaving, WhatFailedByItselfIsWaitedForAtItsEnd) {
  Link link;
  ASSERT_EQ(Send(1, link.b.sge(0, 8), IBV_WR_RDMA_WRITE)
                .to(link.a.address(0), link.a.mr->rkey ^ 1)
                .post(link.qb),
            0);
  link.steps(1);
  ASSERT_EQ(state_of(link.qb), IBV_QPS_ERR);
  sv::Peer& peer = *link.a.internals().peers.front();
  sv::begin_access(peer);
  EXPECT_EQ(sv::destroy_qp(link.qb), EBUSY);
  sv::end_access(peer);
  link.b.destroy(link.qb);
}

TEST(SoftverbsLeaving, RightsLostOnTheWayToRts) {
  // Meanwhile the peer accesses through another queue pair. The same call is repeated until it
  // succeeds.
  Entered link;
  ibv_qp* const qp = link.b.make_qp();
  ASSERT_EQ(link.b.init(qp), 0);
  ASSERT_EQ(link.b.rtr(qp, link.a.endpoint(link.qa)), 0);
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTS;
  attr.qp_access_flags = IBV_ACCESS_LOCAL_WRITE;
  constexpr int kMask = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                        IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_ACCESS_FLAGS;
  for (int i = 0; i < 2; ++i) {
    ASSERT_EQ(sv::modify_qp(qp, &attr, kMask), EBUSY);
    EXPECT_EQ(state_of(qp), IBV_QPS_RTR);
    EXPECT_EQ(static_cast<sv::Qp*>(qp)->rights->access,
              IBV_ACCESS_LOCAL_WRITE | 1u << sv::kPortShift);
  }
  sv::end_access(link.peer);
  EXPECT_EQ(sv::modify_qp(qp, &attr, kMask), 0);
  EXPECT_EQ(state_of(qp), IBV_QPS_RTS);
}

TEST(SoftverbsLeaving, RightsAreLostByWhoUsesThem) {
  Entered link;
  ibv_qp_attr attr{};
  attr.qp_access_flags = IBV_ACCESS_LOCAL_WRITE;
  ASSERT_EQ(sv::modify_qp(link.qb, &attr, IBV_QP_ACCESS_FLAGS), EBUSY);
  EXPECT_EQ(state_of(link.qb), IBV_QPS_RTS);
  EXPECT_EQ(sv::modify_qp(link.qb, &attr, IBV_QP_ACCESS_FLAGS), EBUSY);
  sv::end_access(link.peer);
  EXPECT_EQ(sv::modify_qp(link.qb, &attr, IBV_QP_ACCESS_FLAGS), 0);
  // Gaining rights, or losing none, needs no wait. An access that begins after the mark counts at
  // ERR.
  sv::begin_access(link.peer);
  attr.qp_access_flags = Node::kAllAccess;
  EXPECT_EQ(sv::modify_qp(link.qb, &attr, IBV_QP_ACCESS_FLAGS), 0);
  attr.qp_access_flags = IBV_ACCESS_LOCAL_WRITE;
  EXPECT_EQ(sv::modify_qp(link.qb, &attr, IBV_QP_ACCESS_FLAGS), EBUSY);
  sv::end_access(link.peer);
  sv::begin_access(link.peer);
  EXPECT_EQ(link.modify(IBV_QPS_ERR), EBUSY);
  sv::end_access(link.peer);
  EXPECT_EQ(link.modify(IBV_QPS_ERR), 0);
}

TEST(SoftverbsLeaving, ThePeerIsNotKnownYet) {
  // b has not checked its lanes since a connected and began an access.
  Node a, b;
  ibv_qp* qa = a.make_qp();
  ibv_qp* qb = b.make_qp();
  ASSERT_EQ(b.init(qb), 0);
  ASSERT_EQ(b.rtr(qb, a.endpoint(qa)), 0);
  ASSERT_EQ(a.init(qa), 0);
  ASSERT_EQ(a.rtr(qa, b.endpoint(qb)), 0);
  sv::Peer& peer = *a.internals().peers.front();
  sv::begin_access(peer);
  EXPECT_EQ(sv::destroy_qp(qb), EBUSY);
  sv::end_access(peer);
  b.destroy(qb);
}

TEST(SoftverbsLeaving, ADeadPeerHasLeft) {
  Node node;
  ibv_qp* qp = node.make_qp();
  AccessingPeer peer(node, qp);
  ASSERT_EQ(sv::destroy_qp(qp), EBUSY);
  peer.child.kill_and_reap();
  int result = EBUSY;
  EXPECT_TRUE(until(
      [&] {
        sv::control_device(node.context);
        result = sv::destroy_qp(qp);
      },
      [&] { return result == 0; }));
  std::erase(node.qps, qp);
}

TEST(SoftverbsWithoutMembarrier, NoDeviceAndNothingIsTakenBack) {
  Child child([](int) {
    Link link;
    must(forbid_call(SYS_membarrier, ENOSYS), "a filter of system calls");
    ibv_mr* mr = std::exchange(link.b.mr, nullptr);
    must(sv::dereg_mr(mr) == EBUSY && sv::dereg_mr(mr) == EBUSY, "a key ends unseen");
    must(sv::destroy_qp(link.qb) == EBUSY, "a queue pair ends unseen");
    const auto opened = sv::open_device(spinwire::Clock::real(), sv::Driving::by_user);
    must(!opened && opened.error().status == spinwire::Status::unsupported, "it opens");
    must(opened.error().found.find("membarrier") != std::string::npos, "it says why");
    _exit(0);  // nothing can be freed
  });
  EXPECT_EQ(child.wait(), 0);
}

}  // namespace softverbs_test::revocation
