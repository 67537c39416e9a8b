// Lanes: wrapping, full, shared by queue pairs, read in small batches; completion queues.
#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "base/random.h"
#include "softverbs/rc_link.h"

namespace softverbs_test::lane {

constexpr std::size_t kSlot = 2048;  ///< bytes of memory per message in flight

/// Keeps `window` messages of random sizes in flight from a to b, and checks each.
void stream(Link& link, std::uint64_t messages, std::uint64_t window, std::uint64_t seed) {
  spinwire::base::Random random(seed);
  std::vector<std::uint32_t> sizes(messages);
  for (std::uint32_t& size : sizes)
    size =
        static_cast<std::uint32_t>(random.below(4) == 0 ? random.below(kSlot) : random.below(100));
  std::uint64_t sent = 0;
  std::size_t checked = 0;
  for (std::uint64_t i = 0; i < window; ++i) ASSERT_EQ(link.b.post_recv(i, i * kSlot, kSlot), 0);
  const auto step = [&] {
    while (sent < messages && sent < link.at_a.size() + window) {
      const std::size_t at = sent % window * kSlot;
      fill(link.a.bytes(at, sizes[sent]), sent);
      ASSERT_EQ(Send(sent, link.a.sge(at, sizes[sent])).post(link.qa), 0);
      ++sent;
    }
    link.step();
    for (; checked < link.at_b.size(); ++checked) {
      const ibv_wc& wc = link.at_b[checked];
      ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
      ASSERT_EQ(wc.wr_id, checked % window);
      ASSERT_EQ(wc.byte_len, sizes[checked]);
      ASSERT_TRUE(holds(link.b.bytes(wc.wr_id * kSlot, wc.byte_len), checked)) << checked;
      ASSERT_EQ(link.b.post_recv(wc.wr_id, wc.wr_id * kSlot, kSlot), 0);
    }
  };
  ASSERT_TRUE(until(step, [&] {
    return testing::Test::HasFatalFailure() ||
           (link.at_a.size() == messages && checked == messages);
  }));
  for (std::uint64_t i = 0; i < link.at_a.size(); ++i) ASSERT_EQ(link.at_a[i].wr_id, i);
}

TEST(SoftverbsLane, WrapsManyTimes) {
  Link link;
  ASSERT_NO_FATAL_FAILURE(stream(link, 80'000, 32, 1));
  // Marks are 8 bits wide: beyond 256 laps they repeat.
  EXPECT_GT(link.a.internals().peers.front()->out.tail, 300u * sv::kLaneLines);
}

TEST(SoftverbsLane, OneCompletionAtATime) {
  Link link;
  link.batch = 1;
  ASSERT_NO_FATAL_FAILURE(stream(link, 5'000, 16, 2));
}

TEST(SoftverbsLane, MoreThanItHolds) {
  NodeOptions options;
  options.send_depth = options.srq_depth = 1024;
  options.cq_entries = 4096;
  Link link(options);
  ASSERT_NO_FATAL_FAILURE(stream(link, 10'000, 1000, 3));
}

TEST(SoftverbsLane, SequenceNumbersWrap) {
  Link link;
  const std::uint32_t first = link.a.endpoint(link.qa).psn;
  const std::uint64_t beyond = (std::uint64_t{1} << 24) - first + 100;
  ASSERT_LT(beyond, 100'000u);
  ASSERT_NO_FATAL_FAILURE(stream(link, beyond, 32, 4));
  ibv_qp_attr attr{};
  ASSERT_EQ(sv::query_qp(link.qa, &attr, 0, nullptr), 0);
  EXPECT_EQ(attr.sq_psn, 100u);
  ASSERT_EQ(sv::query_qp(link.qb, &attr, 0, nullptr), 0);
  EXPECT_EQ(attr.rq_psn, 100u);
}

TEST(SoftverbsLane, SequenceNumbersWrapBetweenShortAndLong) {
  // Read in one poll: the packet at the wrap must not shorten the long one behind it.
  Link link;
  const std::uint32_t first = link.a.endpoint(link.qa).psn;
  const std::uint64_t before = (std::uint64_t{1} << 24) - first - 4;
  ASSERT_LT(before, 100'000u);
  ASSERT_NO_FATAL_FAILURE(stream(link, before, 32, 4));
  fill(link.a.bytes(0, kSlot), 5);
  link.at_b.clear();
  // The stream has left a window of receives.
  for (std::uint64_t i = 0; i < 8; ++i)
    ASSERT_EQ(Send(i, link.a.sge(0, i < 4 ? 8 : kSlot)).post(link.qa), 0);
  link.steps(2);
  ASSERT_EQ(link.at_b.size(), 8u);
  for (std::uint64_t i = 4; i < 8; ++i) {
    EXPECT_EQ(link.at_b[i].byte_len, kSlot);
    EXPECT_TRUE(holds(link.b.bytes(link.at_b[i].wr_id * kSlot, kSlot), 5));
  }
}

TEST(SoftverbsLane, SequenceNumbersWrapWithinARetry) {
  std::uint64_t now = 1'000'000;
  NodeOptions options;
  options.clock = spinwire::Clock::manual(&now);
  Node a(options), b(options);
  ibv_qp* qa = a.make_qp();
  ibv_qp* qb = b.make_qp();
  Endpoint ea = a.endpoint(qa), eb = b.endpoint(qb);
  ea.psn = 0xfffffe;
  ASSERT_EQ(a.init(qa), 0);
  ASSERT_EQ(b.init(qb), 0);
  ASSERT_EQ(b.rtr(qb, ea), 0);
  ASSERT_EQ(a.rtr(qa, eb), 0);
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTS;
  attr.timeout = 4;
  attr.rnr_retry = 7;
  attr.sq_psn = ea.psn;
  ASSERT_EQ(sv::modify_qp(qa, &attr,
                          IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                              IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
            0);
  sv::control_device(b.context);
  for (std::uint64_t i = 0; i < 6; ++i) ASSERT_EQ(Send(i, a.sge(0, 8)).post(qa), 0);
  std::vector<std::uint64_t> done;
  for (std::uint64_t i = 0; i < 6; ++i) {
    // One receive at a time: each refusal affects the next number.
    ASSERT_EQ(b.post_recv(i, 0, 64), 0);
    ibv_wc wc{};
    for (int polls = 0; polls < 4 * kLook; ++polls) {
      (void)b.poll(wc);
      if (a.poll(wc)) {
        EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
        done.push_back(wc.wr_id);
      }
      now += 20'000;
    }
  }
  EXPECT_EQ(done, (std::vector<std::uint64_t>{0, 1, 2, 3, 4, 5}));
}

/// Several queue pairs from a to b, each with more to send than the lane holds.
struct Crowd {
  static NodeOptions options() {
    NodeOptions o;
    o.srq_depth = 4096;
    o.send_depth = 512;
    o.cq_entries = 1 << 14;
    return o;
  }
  Link link{options()};
  std::vector<ibv_qp*> from{link.qa};
  std::vector<ibv_qp*> to{link.qb};
  explicit Crowd(std::size_t size) {
    while (from.size() < size) {
      from.push_back(link.a.make_qp());
      to.push_back(link.b.make_qp());
      connect(link.a, from.back(), link.b, to.back());
    }
  }
  [[nodiscard]] std::size_t index(const ibv_wc& wc) const {
    for (std::size_t i = 0; i < from.size(); ++i) {
      if (from[i]->qp_num == wc.qp_num) return i;
    }
    return from.size();
  }
};

TEST(SoftverbsLane, FullAndSharedAllGoOn) {
  Crowd crowd(5);
  Link& link = crowd.link;
  constexpr std::uint64_t kEach = 200;
  for (std::size_t q = 0; q < 5; ++q) {
    for (std::uint64_t i = 0; i < kEach; ++i)
      ASSERT_EQ(Send(i, link.a.sge(0, static_cast<std::uint32_t>(q * 90))).post(crowd.from[q]), 0);
  }
  for (std::uint64_t i = 0; i < 5 * kEach; ++i) ASSERT_EQ(link.b.post_recv(i, 0, 512), 0);
  ASSERT_TRUE(link.run(5 * kEach, 5 * kEach));
  std::vector<std::uint64_t> next(5, 0);
  for (const ibv_wc& wc : link.at_a) {
    ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
    ASSERT_EQ(wc.wr_id, next[crowd.index(wc)]++);
  }
  for (const std::uint64_t n : next) EXPECT_EQ(n, kEach);
}

TEST(SoftverbsLane, NobodyStarvesWhenItIsAlwaysFull) {
  // Each queue pair always has more to send. The large messages need many lines at once.
  Crowd crowd(4);
  Link& link = crowd.link;
  link.batch = 1;  // room comes line by line
  std::vector<std::uint64_t> done(4, 0);
  std::size_t seen = 0, taken = 0;
  const auto post = [&](std::size_t q) {
    const std::uint32_t size = q == 3 ? 440 : 16;
    ASSERT_EQ(Send(1, link.a.sge(0, size)).post(crowd.from[q]), 0);
  };
  for (std::uint64_t i = 0; i < 4000; ++i) ASSERT_EQ(link.b.post_recv(i, 0, 512), 0);
  for (std::size_t q = 0; q < 4; ++q) {
    for (int i = 0; i < 400; ++i) post(q);
  }
  for (int round = 0; round < 20'000; ++round) {
    link.step();
    for (; taken < link.at_b.size(); ++taken) ASSERT_EQ(link.b.post_recv(1, 0, 512), 0);
    for (; seen < link.at_a.size(); ++seen) {
      const std::size_t q = crowd.index(link.at_a[seen]);
      ++done[q];
      post(q);
    }
  }
  for (std::size_t q = 0; q < 4; ++q) EXPECT_GT(done[q], 900u) << q;
}

TEST(SoftverbsLane, SilentReceiversAnswerIsSeenWhileAnotherTalks) {
  // Packets of the active peer must not delay the check of the one that only receives.
  Node a, talks, silent;
  ibv_qp* const to_talks = a.make_qp();
  ibv_qp* const to_silent = a.make_qp();
  ibv_qp* const from_talks = talks.make_qp();
  connect(a, to_talks, talks, from_talks);
  connect(a, to_silent, silent, silent.make_qp());
  for (Node* n : {&a, &talks, &silent}) sv::control_device(n->context);
  ASSERT_EQ(silent.post_recv(1, 0, 64), 0);
  ASSERT_EQ(Send(7, a.sge(0, 8)).post(to_silent), 0);
  ibv_wc wc{};
  ASSERT_TRUE(silent.poll(wc));
  bool seen = false;
  for (int round = 0; !seen && round < 1000; ++round) {
    ASSERT_EQ(a.post_recv(2, 0, 64), 0);
    ASSERT_EQ(Send(3, talks.sge(0, 8)).post(from_talks), 0);
    while (a.poll(wc)) seen = seen || wc.wr_id == 7;
    while (talks.poll(wc)) ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
    ASSERT_EQ(talks.post_recv(4, 0, 64), 0);
    ASSERT_EQ(Send(5, a.sge(0, 8)).post(to_talks), 0);  // keeps something unacknowledged
    while (talks.poll(wc)) ASSERT_EQ(wc.status, IBV_WC_SUCCESS);
  }
  EXPECT_TRUE(seen);
}

TEST(SoftverbsLane, NoLaneStarvesInSmallBatches) {
  // Two peers that always have packets for b, which takes one completion per poll.
  NodeOptions options = Crowd::options();
  Link link(options);
  Node c(options);
  ibv_qp* qc = c.make_qp();
  ibv_qp* other_b = link.b.make_qp();
  connect(c, qc, link.b, other_b);
  for (std::uint64_t i = 0; i < 200; ++i) ASSERT_EQ(link.b.post_recv(i, 0, 64), 0);
  for (std::uint64_t i = 0; i < 100; ++i) {
    ASSERT_EQ(Send(i, link.a.sge(0, 8)).post(link.qa), 0);
    ASSERT_EQ(Send(i, c.sge(0, 8)).post(qc), 0);
  }
  int from_c = 0;
  for (int i = 0; i < 60; ++i) {
    ibv_wc wc{};
    ASSERT_TRUE(link.b.poll(wc));
    if (wc.qp_num == other_b->qp_num) ++from_c;
  }
  EXPECT_EQ(from_c, 30);
}

/// One completion per poll, and always a further completed send. Received messages must not wait,
/// and their acknowledgements must not be taken for later ones after 65,536 lines.
void receive_beside_sends(std::uint64_t window) {
  NodeOptions options;
  options.send_depth = options.srq_depth = 1024;
  options.cq_entries = 4096;
  Link link(options);
  for (std::uint64_t i = 0; i < 1000; ++i) ASSERT_EQ(link.b.post_recv(i, 0, 64), 0);
  ASSERT_EQ(link.a.post_recv(1, 0, 64), 0);
  ASSERT_EQ(Send(500, link.b.sge(0, 8)).post(link.qb), 0);
  std::uint64_t posted = 0, done = 0;
  for (int round = 0; round < 200'000; ++round) {
    while (posted < done + window) ASSERT_EQ(Send(posted++, link.a.sge(0, 8)).post(link.qa), 0);
    ibv_wc wc[16];
    for (int n = ibv_poll_cq(link.b.cq, 16, wc); n > 0; --n) {
      if (wc[n - 1].opcode != IBV_WC_RECV) continue;
      ASSERT_EQ(link.b.post_recv(1, 0, 64), 0);
    }
    if (!link.a.poll(wc[0])) continue;
    ASSERT_EQ(wc[0].status, IBV_WC_SUCCESS);
    if (wc[0].opcode == IBV_WC_RECV) {
      EXPECT_LT(done, 10'000u);
      return;
    }
    ASSERT_EQ(wc[0].wr_id, done++);
  }
  FAIL() << "the message was not received beside " << done << " sends";
}

TEST(SoftverbsLane, ReceivesDoNotStarveBehindSendCompletions) { receive_beside_sends(16); }

TEST(SoftverbsLane, ReceivesDoNotStarveBehindAFullLane) { receive_beside_sends(400); }

TEST(SoftverbsLane, StalledQueuePairsMayGo) {
  // Reset, failed and destroyed while they wait for room: the others continue.
  Crowd crowd(5);
  Link& link = crowd.link;
  for (std::size_t q = 0; q < 5; ++q) {
    for (std::uint64_t i = 0; i < 300; ++i)
      ASSERT_EQ(Send(i, link.a.sge(0, 60)).post(crowd.from[q]), 0);
  }
  for (std::uint64_t i = 0; i < 4000; ++i) ASSERT_EQ(link.b.post_recv(i, 0, 64), 0);
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RESET;
  ASSERT_EQ(sv::modify_qp(crowd.from[1], &attr, IBV_QP_STATE), 0);
  link.a.fail(crowd.from[2]);
  link.a.destroy(crowd.from[4]);
  ASSERT_TRUE(link.run(300 * 3, 600));
  std::size_t good = 0;
  for (const ibv_wc& wc : link.at_a) {
    if (wc.status == IBV_WC_SUCCESS) ++good;
  }
  EXPECT_EQ(good, 600u);
}

TEST(SoftverbsCompletionQueue, OverrunIsReportedOnce) {
  NodeOptions options;
  options.cq_entries = 4;
  options.srq_depth = 0;
  Link link(options);
  for (std::uint64_t i = 0; i < 4; ++i) ASSERT_EQ(link.a.post_recv(i, 0, 64, link.qa), 0);
  // Flushed at once into a ring of four, which just holds them.
  link.a.fail(link.qa);
  EXPECT_EQ(next_event(link.a).type, -1);
  for (std::uint64_t i = 4; i < 7; ++i) ASSERT_EQ(link.a.post_recv(i, 0, 64, link.qa), 0);
  const Event event = next_event(link.a);
  EXPECT_EQ(event.type, IBV_EVENT_CQ_ERR);
  EXPECT_EQ(event.element, link.a.cq);
  EXPECT_EQ(next_event(link.a).type, -1);
  link.steps(3);
  EXPECT_EQ(link.at_a.size(), 4u);
  for (std::uint64_t i = 0; i < 4; ++i) EXPECT_EQ(link.at_a[i].wr_id, i);
}

TEST(SoftverbsCompletionQueue, TwoQueuesOfOneContext) {
  // Polling one of them drives the lanes for both.
  NodeOptions options;
  Link link(options);
  ibv_cq* const first = link.b.cq;
  ibv_cq* const second = sv::create_cq(link.b.context, 64);
  link.b.cq = second;
  ibv_qp* other_b = link.b.make_qp();
  link.b.cq = first;
  ibv_qp* other_a = link.a.make_qp();
  connect(link.a, other_a, link.b, other_b);
  for (std::uint64_t i = 0; i < 20; ++i) ASSERT_EQ(link.b.post_recv(i, 0, 64), 0);
  for (std::uint64_t i = 0; i < 10; ++i) {
    ASSERT_EQ(Send(i, link.a.sge(0, 8)).post(link.qa), 0);
    ASSERT_EQ(Send(100 + i, link.a.sge(0, 16)).post(other_a), 0);
  }
  ibv_wc wc[32];
  ASSERT_EQ(ibv_poll_cq(first, 32, wc), 10);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(wc[i].byte_len, 8u);
  ASSERT_EQ(ibv_poll_cq(second, 4, wc), 4);
  ASSERT_EQ(ibv_poll_cq(second, 32, wc + 4), 6);
  for (std::uint64_t i = 0; i < 10; ++i) {
    EXPECT_EQ(wc[i].byte_len, 16u);
    EXPECT_EQ(wc[i].wr_id, 2 * i + 1);
  }
  link.b.destroy(other_b);
  EXPECT_EQ(sv::destroy_cq(second), 0);
}

TEST(SoftverbsCompletionQueue, PollForNone) {
  Link link;
  ASSERT_EQ(link.b.post_recv(1, 0, 64), 0);
  ASSERT_EQ(Send(1, link.a.sge(0, 8)).post(link.qa), 0);
  EXPECT_EQ(ibv_poll_cq(link.b.cq, 0, nullptr), 0);
  ASSERT_TRUE(link.run(1, 1));
}

}  // namespace softverbs_test::lane
