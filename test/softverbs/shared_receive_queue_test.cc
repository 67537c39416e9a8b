// Shared receive queues: the limit, queries, and refused receives.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "softverbs/rc_link.h"

namespace softverbs_test::srq {

constexpr std::uint32_t kDepth = 16;

NodeOptions shallow() {
  NodeOptions options;
  options.srq_depth = kDepth;
  options.recv_depth = kDepth;
  return options;
}

int arm(ibv_srq* srq, std::uint32_t limit) {
  ibv_srq_attr attr{};
  attr.srq_limit = limit;
  return sv::modify_srq(srq, &attr, IBV_SRQ_LIMIT);
}
std::uint32_t limit_of(ibv_srq* srq) {
  ibv_srq_attr attr{};
  must(sv::query_srq(srq, &attr) == 0, "query_srq");
  return attr.srq_limit;
}

/// A link whose b has receives 0..n-1 posted; send() uses the next one.
struct Fixture {
  Link link{shallow()};
  std::uint64_t posted = 0;
  std::uint64_t taken = 0;

  explicit Fixture(std::uint32_t n) { post(n); }
  void post(std::uint32_t n) {
    for (; n != 0; --n) must(link.b.post_recv(posted++, 0, 1024) == 0, "post_recv");
  }
  /// Sends messages that arrive in one batch, in one line each or not.
  void send(std::uint32_t n, std::uint32_t size = 8, ibv_wr_opcode opcode = IBV_WR_SEND) {
    for (std::uint32_t i = 0; i < n; ++i)
      must(Send(i, link.a.sge(2048, size), opcode).post(link.qa) == 0, "post_send");
    link.at_b.clear();
    link.steps(3);
    ASSERT_EQ(link.at_b.size(), n);
    for (const ibv_wc& wc : link.at_b) {
      EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
      EXPECT_EQ(wc.wr_id, taken++);
    }
  }
  void expect_event() {
    const Event event = next_event(link.b);
    EXPECT_EQ(event.type, IBV_EVENT_SRQ_LIMIT_REACHED);
    EXPECT_EQ(event.element, link.b.srq);
    expect_none();
    EXPECT_EQ(limit_of(link.b.srq), 0u);
  }
  void expect_none() { EXPECT_EQ(next_event(link.b).type, -1); }
};

TEST(SoftverbsSrqLimit, ToldOnceWhenFewerAreLeft) {
  for (const std::uint32_t size : {8u, 100u, 1000u}) {
    for (const bool together : {false, true}) {
      SCOPED_TRACE(testing::Message() << size << (together ? " together" : ""));
      Fixture f(10);
      ASSERT_EQ(arm(f.link.b.srq, 4), 0);
      if (together) {
        f.send(6, size);
      } else {
        for (int i = 0; i < 6; ++i) f.send(1, size);
      }
      f.expect_none();  // 4 are left
      EXPECT_EQ(limit_of(f.link.b.srq), 4u);
      f.send(1, size);
      f.expect_event();
      f.send(3, size);
      f.expect_none();
    }
  }
}

TEST(SoftverbsSrqLimit, PassedInTheMidstOfARun) {
  Fixture f(12);
  ASSERT_EQ(arm(f.link.b.srq, 5), 0);
  f.send(12);
  f.expect_event();
  // Empty: the next message waits for a receive, without an event.
  ASSERT_EQ(Send(1, f.link.a.sge(0, 8)).post(f.link.qa), 0);
  f.link.at_b.clear();
  f.link.steps(2);
  EXPECT_TRUE(f.link.at_b.empty());
  f.expect_none();
}

TEST(SoftverbsSrqLimit, PostingCountsWhileItIsArmed) {
  Fixture f(4);
  ASSERT_EQ(arm(f.link.b.srq, 4), 0);
  f.post(3);
  f.send(3);
  f.expect_none();
  f.post(1);
  f.send(1);
  f.expect_none();
  f.send(1);
  f.expect_event();
  // Armed again.
  f.post(5);
  ASSERT_EQ(arm(f.link.b.srq, 2), 0);
  f.send(6);
  f.expect_none();
  f.send(2);
  f.expect_event();
}

TEST(SoftverbsSrqLimit, ArmedOnAnEmptyQueue) {
  Fixture f(0);
  ASSERT_EQ(arm(f.link.b.srq, 2), 0);
  f.expect_none();
  f.post(3);
  f.send(1);
  f.expect_none();
  f.send(1);
  f.expect_event();
}

TEST(SoftverbsSrqLimit, ArmedAboveWhatIsPostedTellsWithTheNext) {
  Fixture f(2);
  ASSERT_EQ(arm(f.link.b.srq, kDepth), 0);
  f.expect_none();
  f.send(1);
  f.expect_event();
}

TEST(SoftverbsSrqLimit, DisarmedAndMoved) {
  Fixture f(10);
  ASSERT_EQ(arm(f.link.b.srq, 9), 0);
  ASSERT_EQ(arm(f.link.b.srq, 0), 0);
  EXPECT_EQ(limit_of(f.link.b.srq), 0u);
  f.send(5);
  f.expect_none();
  ASSERT_EQ(arm(f.link.b.srq, 5), 0);
  ASSERT_EQ(arm(f.link.b.srq, 3), 0);
  f.send(2);
  f.expect_none();
  f.send(1);
  f.expect_event();
  f.send(2);
}

TEST(SoftverbsSrqLimit, AnyKindOfReceiveCounts) {
  Fixture f(4);
  ASSERT_EQ(arm(f.link.b.srq, 2), 0);
  f.send(1, 8, IBV_WR_SEND_WITH_IMM);
  // A failed receive counts as well.
  Send bad(1, f.link.a.sge(0, 1025));
  ASSERT_EQ(bad.post(f.link.qa), 0);
  f.link.at_b.clear();
  f.link.steps(2);
  ASSERT_EQ(f.link.at_b.size(), 1u);
  EXPECT_EQ(f.link.at_b[0].status, IBV_WC_LOC_LEN_ERR);
  EXPECT_EQ(next_event(f.link.b).type, IBV_EVENT_QP_LAST_WQE_REACHED);
  f.expect_none();  // 2 are left
  ibv_qp* qa = f.link.a.make_qp();
  ibv_qp* qb = f.link.b.make_qp();
  connect(f.link.a, qa, f.link.b, qb);
  ASSERT_EQ(Send(2, f.link.a.sge(0, 1025)).post(qa), 0);
  f.link.steps(2);
  const Event event = next_event(f.link.b);
  EXPECT_EQ(event.type, IBV_EVENT_SRQ_LIMIT_REACHED);
  EXPECT_EQ(event.element, f.link.b.srq);
}

TEST(SoftverbsSrqLimit, EventsGoWithTheirQueue) {
  Fixture f(1);
  ASSERT_EQ(arm(f.link.b.srq, 1), 0);
  f.send(1);
  f.link.b.destroy(f.link.qb);
  ASSERT_EQ(sv::destroy_srq(f.link.b.srq), 0);
  f.link.b.srq = nullptr;
  f.expect_none();
}

TEST(SoftverbsSrq, RoomIsTheSameWithALimit) {
  Fixture f(kDepth - 1);
  ASSERT_EQ(arm(f.link.b.srq, 8), 0);
  f.post(1);
  EXPECT_EQ(f.link.b.post_recv(99, 0, 64), ENOMEM);
  f.send(2);
  f.post(2);
  EXPECT_EQ(f.link.b.post_recv(99, 0, 64), ENOMEM);
}

TEST(SoftverbsSrq, ModifyAndQuery) {
  Node node(shallow());
  ibv_srq_attr attr{};
  ASSERT_EQ(sv::query_srq(node.srq, &attr), 0);
  EXPECT_EQ(attr.max_wr, kDepth);
  EXPECT_EQ(attr.max_sge, 4u);
  EXPECT_EQ(attr.srq_limit, 0u);
  attr.max_wr = 2 * kDepth;
  attr.srq_limit = 3;
  EXPECT_EQ(sv::modify_srq(node.srq, &attr, IBV_SRQ_MAX_WR), EINVAL);
  EXPECT_EQ(sv::modify_srq(node.srq, &attr, IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT), EINVAL);
  EXPECT_EQ(sv::modify_srq(node.srq, &attr, 1 << 5), EINVAL);
  EXPECT_EQ(sv::modify_srq(node.srq, &attr, 0), 0);
  EXPECT_EQ(arm(node.srq, kDepth + 1), EINVAL);
  EXPECT_EQ(limit_of(node.srq), 0u);
  EXPECT_EQ(arm(node.srq, kDepth), 0);
  EXPECT_EQ(limit_of(node.srq), kDepth);
}

/// A list of receives, the result of posting it, and the first one not posted.
struct Chain {
  std::vector<ibv_recv_wr> wrs;
  ibv_sge sges[5]{};
  explicit Chain(const Node& node, std::size_t n) : wrs(n) {
    for (ibv_sge& sge : sges) sge = node.sge(0, 64);
    for (std::size_t i = 0; i < n; ++i) wrs[i] = {i, i + 1 < n ? &wrs[i + 1] : nullptr, sges, 1};
  }
  std::size_t bad_index(const ibv_recv_wr* bad) const {
    return static_cast<std::size_t>(bad - wrs.data());
  }
};

TEST(SoftverbsPostReceive, NamesTheFirstThatIsNotPosted) {
  NodeOptions own = shallow();
  own.srq_depth = 0;
  for (const bool shared : {true, false}) {
    for (const bool armed : {false, true}) {
      if (armed && !shared) continue;
      SCOPED_TRACE(testing::Message() << shared << armed);
      Link link(shared ? shallow() : own);
      if (armed) {
        ASSERT_EQ(arm(link.b.srq, 3), 0);
      }
      const auto post = [&](ibv_recv_wr* wr, ibv_recv_wr** bad) {
        return shared ? ibv_post_srq_recv(link.b.srq, wr, bad) : ibv_post_recv(link.qb, wr, bad);
      };
      ibv_recv_wr* bad = nullptr;
      // Too many elements, and a negative number: those before are posted.
      for (const int count : {5, -1}) {
        Chain chain(link.b, 3);
        chain.wrs[1].num_sge = count;
        EXPECT_EQ(post(chain.wrs.data(), &bad), EINVAL);
        EXPECT_EQ(chain.bad_index(bad), 1u);
      }
      // As many as fit.
      Chain chain(link.b, kDepth);
      EXPECT_EQ(post(chain.wrs.data(), &bad), ENOMEM);
      EXPECT_EQ(chain.bad_index(bad), kDepth - 2u);
      EXPECT_EQ(post(chain.wrs.data(), &bad), ENOMEM);
      EXPECT_EQ(chain.bad_index(bad), 0u);
      for (std::uint64_t i = 0; i < kDepth; ++i)
        ASSERT_EQ(Send(i, link.a.sge(128, 8)).post(link.qa), 0);
      ASSERT_TRUE(link.run(kDepth, kDepth));
      for (std::size_t i = 0; i < kDepth; ++i) EXPECT_EQ(link.at_b[i].wr_id, i < 2 ? 0 : i - 2);
    }
  }
}

TEST(SoftverbsPostReceive, RefusedWhereThereIsNoQueue) {
  Link link(shallow());
  Chain chain(link.b, 1);
  ibv_recv_wr* bad = nullptr;
  EXPECT_EQ(ibv_post_recv(link.qb, chain.wrs.data(), &bad), EINVAL);  // it has a shared queue
  EXPECT_EQ(bad, chain.wrs.data());
  NodeOptions own;
  own.srq_depth = 0;
  Node node(own);
  Chain early(node, 1);
  bad = nullptr;
  EXPECT_EQ(ibv_post_recv(node.make_qp(), early.wrs.data(), &bad), EINVAL);  // RESET
  EXPECT_EQ(bad, early.wrs.data());
}

}  // namespace softverbs_test::srq
