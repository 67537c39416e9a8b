// Order within a queue pair: fences, checked by the bytes sent, and flushes of work requests of
// every kind.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <vector>

#include "softverbs/memory/atomic_lock.h"
#include "softverbs/memory/memory_window.h"
#include "softverbs/rc_link.h"

namespace softverbs_test::order {

constexpr std::size_t kResult = 512;     ///< at a: results of READs and atomics
constexpr std::size_t kWord = 4096;      ///< at b: their target
constexpr std::size_t kReceived = 8192;  ///< at b: destination of messages and writes
constexpr std::uint64_t kStale = 0x5757575757575757;
constexpr std::uint64_t kFresh = 0x0123456789abcdef;

std::uint64_t load(const Node& node, std::size_t offset) {
  std::uint64_t value = 0;
  std::memcpy(&value, &node.memory[offset], sizeof value);
  return value;
}
void store(const Node& node, std::size_t offset, std::uint64_t value) {
  std::memcpy(&node.memory[offset], &value, sizeof value);
}

/// How the result of the first operation returns to b.
enum class Then { send, send_imm, write, write_imm };
constexpr Then kThen[] = {Then::send, Then::send_imm, Then::write, Then::write_imm};

int post_fenced(const Link& link, Then then, std::uint32_t length) {
  constexpr ibv_wr_opcode kOpcodes[] = {IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE,
                                        IBV_WR_RDMA_WRITE_WITH_IMM};
  Send send(30, link.a.sge(kResult, length), kOpcodes[static_cast<int>(then)],
            IBV_SEND_SIGNALED | IBV_SEND_FENCE);
  return send.to(link.b.address(kReceived), link.b.mr->rkey).post(link.qa);
}

TEST(SoftverbsFence, WaitsForAReadThatWaits) {
  // The READ cannot run before a message is taken, for which b has no receive. Sizes: one line,
  // several lines, and a reference to the memory that the READ changes.
  for (const Then then : kThen) {
    for (const std::uint32_t length : {8u, 200u, 2000u}) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(then) << ", " << length << " bytes");
      Link link;
      fill(link.b.bytes(kWord, length), 5);
      fill(link.a.bytes(kResult, length), 6);
      ASSERT_EQ(Send(10, link.a.sge(0, 8)).post(link.qa), 0);
      Send read(20, link.a.sge(kResult, length), IBV_WR_RDMA_READ);
      ASSERT_EQ(read.to(link.b.address(kWord), link.b.mr->rkey).post(link.qa), 0);
      ASSERT_EQ(post_fenced(link, then, length), 0);
      link.steps(2);
      ASSERT_TRUE(holds(link.a.bytes(kResult, length), 6)) << "the READ was to wait";
      ASSERT_TRUE(all_are(link.b.bytes(kReceived, length), 0));
      ASSERT_EQ(link.b.post_recv(1, 0, 64), 0);
      ASSERT_EQ(link.b.post_recv(2, kReceived, 2000), 0);
      ASSERT_TRUE(link.run(3, then == Then::write ? 1 : 2));
      for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_EQ(link.at_a[i].wr_id, 10 * (i + 1));
        EXPECT_EQ(link.at_a[i].status, IBV_WC_SUCCESS);
      }
      EXPECT_TRUE(holds(link.b.bytes(kReceived, length), 5));
    }
  }
}

TEST(SoftverbsFence, WaitsForAnAtomicThatWaits) {
  // A living process holds the lock of the word, in private memory.
  for (const Then then : kThen) {
    SCOPED_TRACE(static_cast<int>(then));
    NodeOptions options;
    options.private_memory = true;
    Link link(options);
    store(link.b, kWord, kFresh);
    store(link.a, kResult, kStale);
    sv::Peer& peer = *link.a.internals().peers.front();
    std::atomic<std::uint64_t>& lock = *sv::lock_of(peer, link.b.address(kWord));
    lock = sv::process_word(static_cast<std::uint32_t>(getpid()));
    ASSERT_EQ(link.b.post_recv(1, kReceived, 64), 0);
    Send add(20, link.a.sge(kResult, 8), IBV_WR_ATOMIC_FETCH_AND_ADD);
    add.wr.wr.atomic = {link.b.address(kWord), 1, 0, link.b.mr->rkey};
    ASSERT_EQ(add.post(link.qa), 0);
    ASSERT_EQ(post_fenced(link, then, 8), 0);
    link.steps(2);
    ASSERT_TRUE(link.at_a.empty());
    ASSERT_TRUE(link.at_b.empty());
    ASSERT_EQ(load(link.b, kReceived), 0u);
    lock = 0;
    ASSERT_TRUE(link.run(2, then == Then::write ? 0 : 1));
    EXPECT_EQ(link.at_a[0].wr_id, 20u);
    EXPECT_EQ(link.at_a[1].wr_id, 30u);
    EXPECT_EQ(load(link.b, kReceived), kFresh);
    EXPECT_EQ(load(link.b, kWord), kFresh + 1);
  }
}

// ---- flushes ----

struct Posted {
  std::uint64_t id;
  ibv_wc_opcode opcode;
};

/// One work request of each kind, alternately signaled and unsignaled, with ids from 100.
class Mixture {
 public:
  Mixture(Node& from, const Node& to, bool first_signaled)
      : from_(from), to_(to), signaled_(first_signaled), mw_(sv::alloc_mw(from.pd, IBV_MW_TYPE_2)) {
    must(mw_ != nullptr, "alloc_mw");
  }
  Mixture(const Mixture&) = delete;
  Mixture& operator=(const Mixture&) = delete;
  ~Mixture() { (void)sv::dealloc_mw(mw_); }

  void post(ibv_qp* qp) {
    struct Kind {
      ibv_wr_opcode opcode;
      ibv_wc_opcode completes_as;
      unsigned flags = 0;
      std::uint32_t length = 8;
    };
    constexpr Kind kKinds[] = {
        {IBV_WR_RDMA_WRITE, IBV_WC_RDMA_WRITE},
        {IBV_WR_SEND, IBV_WC_SEND},
        {IBV_WR_RDMA_READ, IBV_WC_RDMA_READ},
        {IBV_WR_SEND_WITH_IMM, IBV_WC_SEND, IBV_SEND_INLINE},
        {IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WC_FETCH_ADD},
        {IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WC_COMP_SWAP, IBV_SEND_FENCE},
        {IBV_WR_SEND, IBV_WC_SEND, IBV_SEND_FENCE, 3000},
        {IBV_WR_BIND_MW, IBV_WC_BIND_MW},
        {IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WC_RDMA_WRITE},
        {IBV_WR_LOCAL_INV, IBV_WC_LOCAL_INV},
        {IBV_WR_SEND_WITH_INV, IBV_WC_SEND, IBV_SEND_SOLICITED},
        {IBV_WR_SEND, IBV_WC_SEND, IBV_SEND_INLINE},
    };
    for (int twice = 0; twice < 2; ++twice) {
      for (const Kind& kind : kKinds) {
        post_one(qp, kind.opcode, kind.flags, kind.length);
        posted.push_back({100 + posted.size(), kind.completes_as});
      }
      signaled_ = !signaled_;
    }
  }

  std::vector<Posted> posted;

 private:
  void post_one(ibv_qp* qp, ibv_wr_opcode opcode, unsigned flags, std::uint32_t length) {
    signaled_ = !signaled_;
    Send send(100 + posted.size(), from_.sge(0, length), opcode,
              flags | (signaled_ ? unsigned{IBV_SEND_SIGNALED} : 0u));
    send.to(to_.address(kReceived), to_.mr->rkey);
    if (opcode == IBV_WR_BIND_MW) {
      send.wr.bind_mw = {mw_, ibv_inc_rkey(mw_->rkey), {from_.mr, from_.address(0), 64, 0}};
    } else if (opcode == IBV_WR_LOCAL_INV || opcode == IBV_WR_SEND_WITH_INV) {
      send.wr.invalidate_rkey = mw_->rkey;
    } else if (opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
      send.wr.wr.atomic = {to_.address(kReceived), 1, 1, to_.mr->rkey};
    }
    must(send.post(qp) == 0, "post_send");
  }

  Node& from_;
  const Node& to_;
  bool signaled_;
  ibv_mw* mw_;
};

void expect_flushed(const std::vector<ibv_wc>& got, std::size_t from, const Mixture& mixture) {
  ASSERT_GE(got.size(), from + mixture.posted.size());
  for (std::size_t i = 0; i < mixture.posted.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(got[from + i].wr_id, mixture.posted[i].id);
    EXPECT_EQ(got[from + i].opcode, mixture.posted[i].opcode);
    EXPECT_EQ(got[from + i].status, IBV_WC_WR_FLUSH_ERR);
  }
}

TEST(SoftverbsFlushOrder, AtErrEveryKindOfWorkRequest) {
  for (const bool first_signaled : {false, true}) {
    for (const bool shared : {false, true}) {
      SCOPED_TRACE(testing::Message() << first_signaled << shared);
      NodeOptions options;
      options.srq_depth = shared ? 64 : 0;
      Link link(options);
      // Taken: a signaled one and an unsignaled one. Then one for which b has no receive.
      ibv_qp* const own_b = shared ? nullptr : link.qb;
      ASSERT_EQ(link.b.post_recv(1, 0, 64, own_b), 0);
      ASSERT_EQ(link.b.post_recv(2, 0, 64, own_b), 0);
      for (std::uint64_t i = 0; i < 6; ++i)
        ASSERT_EQ(link.a.post_recv(50 + i, 64 * i, 64, shared ? nullptr : link.qa), 0);
      ASSERT_EQ(Send(1, link.a.sge(0, 8)).post(link.qa), 0);
      ASSERT_EQ(Send(2, link.a.sge(0, 8), IBV_WR_SEND, 0).post(link.qa), 0);
      ASSERT_EQ(Send(3, link.b.sge(0, 8)).post(link.qb), 0);
      ASSERT_TRUE(link.run(2, 3));
      link.at_a.clear();
      ASSERT_EQ(Send(99, link.a.sge(0, 8)).post(link.qa), 0);
      Mixture mixture(link.a, link.b, first_signaled);
      mixture.post(link.qa);
      link.steps(1);
      ASSERT_TRUE(link.at_a.empty());
      link.a.fail(link.qa);
      link.steps(2);
      ASSERT_EQ(link.at_a.size(), 1 + mixture.posted.size() + (shared ? 0 : 5));
      EXPECT_EQ(link.at_a[0].wr_id, 99u);
      EXPECT_EQ(link.at_a[0].status, IBV_WC_WR_FLUSH_ERR);
      expect_flushed(link.at_a, 1, mixture);
      for (std::size_t i = 1 + mixture.posted.size(), id = 51; i < link.at_a.size(); ++i, ++id) {
        EXPECT_EQ(link.at_a[i].wr_id, id);
        EXPECT_EQ(link.at_a[i].opcode, IBV_WC_RECV);
        EXPECT_EQ(link.at_a[i].status, IBV_WC_WR_FLUSH_ERR);
      }
      const Event event = next_event(link.a);
      EXPECT_EQ(event.type, shared ? IBV_EVENT_QP_LAST_WQE_REACHED : -1);
      EXPECT_EQ(event.element, shared ? link.qa : nullptr);
      EXPECT_EQ(next_event(link.a).type, -1);
      EXPECT_EQ(link.at_b.size(), 3u) << "nothing of it reaches b";
      EXPECT_TRUE(all_are(link.b.bytes(kReceived, 64), 0));
    }
  }
}

TEST(SoftverbsFlushOrder, BehindOneThatFailed) {
  for (const bool signaled : {false, true}) {
    SCOPED_TRACE(signaled);
    Link link;
    store(link.a, 0, kFresh);
    ASSERT_EQ(Send(98, link.a.sge(0, 8), IBV_WR_RDMA_WRITE)
                  .to(link.b.address(kReceived), link.b.mr->rkey)
                  .post(link.qa),
              0);
    // The queue waits for a message, so all are posted before it fails.
    ASSERT_EQ(Send(99, link.a.sge(0, 8)).post(link.qa), 0);
    const unsigned flags = signaled ? unsigned{IBV_SEND_SIGNALED} : 0u;
    ASSERT_EQ(Send(77, link.a.sge(0, 8), IBV_WR_RDMA_WRITE, flags)
                  .to(link.b.address(64), link.b.mr->rkey ^ 1)
                  .post(link.qa),
              0);
    Mixture mixture(link.a, link.b, true);
    mixture.post(link.qa);
    ASSERT_EQ(link.b.post_recv(1, 0, 64), 0);
    ASSERT_TRUE(link.run(3 + mixture.posted.size(), 1));
    link.steps(1);
    ASSERT_EQ(link.at_a.size(), 3 + mixture.posted.size());
    EXPECT_EQ(link.at_a[0].wr_id, 98u);
    EXPECT_EQ(link.at_a[0].status, IBV_WC_SUCCESS);
    EXPECT_EQ(link.at_a[1].wr_id, 99u);
    EXPECT_EQ(link.at_a[1].status, IBV_WC_SUCCESS);
    EXPECT_EQ(link.at_a[2].wr_id, 77u);
    EXPECT_EQ(link.at_a[2].status, IBV_WC_REM_ACCESS_ERR);
    expect_flushed(link.at_a, 3, mixture);
    EXPECT_EQ(load(link.b, kReceived), kFresh) << "nothing behind it ran";
    // Work requests posted now are flushed, too, in order.
    link.at_a.clear();
    Mixture late(link.a, link.b, signaled);
    late.post(link.qa);
    link.steps(1);
    ASSERT_EQ(link.at_a.size(), late.posted.size());
    expect_flushed(link.at_a, 0, late);
  }
}

}  // namespace softverbs_test::order
