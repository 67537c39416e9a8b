// Packets that connections lose: detected by later packets or by the timer, retransmitted, and
// delayed accordingly.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

#include "softverbs/fault_link.h"

namespace softverbs_test::faults_loss {

using std::chrono::nanoseconds;

constexpr std::uint32_t kMtu = 4096;  // of Node
constexpr std::uint64_t kRoundTrip = 10'000;
constexpr std::size_t kThere = std::size_t{2} << 20;  ///< the upper half of each end's memory

/// The outcome of some work, and when it ended.
struct Outcome {
  std::uint64_t ns = 0;
  std::uint64_t lost = 0, retransmitted = 0, timeouts = 0, bytes = 0;
  bool operator==(const Outcome&) const = default;
};

constexpr ConnectOptions kManyRetries{
    .rnr_timer = kFaultRnrTimer, .timeout = kFaultTimeout, .retries = 7};

struct LossyLink : FaultyLink {
  explicit LossyLink(double loss, const ConnectOptions& how = kFaultConnection)
      : FaultyLink({.packet_loss = loss, .round_trip = nanoseconds(kRoundTrip)}, how) {}

  /// Restarts the plan's random numbers with this seed.
  void begin(std::uint64_t seed) {
    plan.seed = seed;
    must(sv::set_faults(a.context, plan).has_value(), "set_faults");
    link.at_a.clear();
    link.at_b.clear();
    begun_ = now;
    before_ = statistics();
  }
  /// Runs until `completions` work requests have completed, advancing to each due time.
  void run(std::size_t completions) {
    for (settle(); link.at_a.size() < completions; settle()) {
      const std::uint64_t due = sv::next_due(a.context);
      must(due != ~std::uint64_t{0}, "nothing is due");
      now = std::max(now, due);
    }
  }
  [[nodiscard]] Outcome outcome() const {
    const sv::FaultStatistics s = statistics();
    return {now - begun_, s.packets_lost - before_.packets_lost,
            s.packets_retransmitted - before_.packets_retransmitted,
            s.loss_timeouts - before_.loss_timeouts, s.bytes - before_.bytes};
  }
  int post(std::uint64_t id, ibv_wr_opcode opcode, std::uint32_t length) {
    return Send(id, a.sge(0, length), opcode).to(b.address(kThere), b.mr->rkey).post(link.qa);
  }
  Outcome work(std::uint64_t seed, ibv_wr_opcode opcode, std::uint32_t length) {
    begin(seed);
    if (opcode == IBV_WR_SEND) receive(0, 1);
    must(post(0, opcode, length) == 0, "post");
    run(1);
    must(link.at_a[0].status == IBV_WC_SUCCESS, "success");
    return outcome();
  }
  /// Finds a seed with which the work turns out as wanted. The caller repeats the work.
  std::uint64_t seed_for(ibv_wr_opcode opcode, std::uint32_t length,
                         const std::function<bool(const Outcome&)>& wanted) {
    for (std::uint64_t seed = 1; seed < 500; ++seed) {
      if (wanted(work(seed, opcode, length))) return seed;
    }
    throw std::runtime_error("no seed does that");
  }

 private:
  std::uint64_t begun_ = 0;
  sv::FaultStatistics before_;
};

bool one_gap(const Outcome& o) { return o.lost == 1 && o.timeouts == 0; }
bool one_timeout(const Outcome& o) { return o.lost == 1 && o.timeouts == 1; }

TEST(SoftverbsPacketLoss, AGapIsShownByWhatFollowsAfterARoundTrip) {
  LossyLink t(0.02);
  fill(t.b.bytes(kThere, 64 * kMtu), 5);
  const std::uint64_t seed = t.seed_for(IBV_WR_RDMA_READ, 64 * kMtu, one_gap);
  std::fill_n(t.a.memory.begin(), 64 * kMtu, std::byte{0});
  t.begin(seed);
  ASSERT_EQ(t.post(7, IBV_WR_RDMA_READ, 64 * kMtu), 0);
  t.pass(kRoundTrip - 1);
  EXPECT_TRUE(t.link.at_a.empty());
  t.pass(1);
  ASSERT_EQ(t.link.at_a.size(), 1u);
  EXPECT_EQ(t.link.at_a[0].wr_id, 7u);
  EXPECT_EQ(t.link.at_a[0].status, IBV_WC_SUCCESS);
  EXPECT_TRUE(holds(t.a.bytes(0, 64 * kMtu), 5));
  EXPECT_GT(t.outcome().retransmitted, 2u) << "the question, the lost one, and those behind it";
}

TEST(SoftverbsPacketLoss, TheLastOneIsShownByTheTimeout) {
  LossyLink t(0.05);
  for (const ibv_wr_opcode opcode : {IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ}) {
    const std::uint64_t seed = t.seed_for(opcode, 32, one_timeout);
    t.begin(seed);
    if (opcode == IBV_WR_SEND) t.receive(0, 1);
    ASSERT_EQ(t.post(7, opcode, 32), 0);
    t.pass(kFaultTimeoutNs - 1);
    EXPECT_TRUE(t.link.at_a.empty()) << opcode;
    t.pass(1);
    ASSERT_EQ(t.link.at_a.size(), 1u) << opcode;
    const Outcome o = t.outcome();
    EXPECT_EQ(o.ns, kFaultTimeoutNs);
    if (opcode == IBV_WR_RDMA_READ) {  // the request or the response was lost
      EXPECT_EQ(o.bytes, 32 * o.retransmitted);
    } else {
      EXPECT_EQ(o.bytes, 64u);
      EXPECT_EQ(o.retransmitted, 1u);
    }
  }
}

TEST(SoftverbsPacketLoss, EachLossCostsARoundTripOrATimeout) {
  LossyLink t(0.05);
  std::uint64_t timeouts = 0, gaps = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ}) {
      const Outcome o = t.work(seed, opcode, 100 * kMtu - 1);
      const std::uint64_t rest = o.ns - o.timeouts * kFaultTimeoutNs;
      ASSERT_EQ(rest % kRoundTrip, 0u);
      // A NAK may also be lost; a READ needs none.
      const std::uint64_t told = rest / kRoundTrip + o.timeouts;
      EXPECT_GE(o.lost, told);
      EXPECT_LE(o.lost, told + (opcode == IBV_WR_RDMA_READ ? 0 : o.timeouts));
      EXPECT_GE(o.retransmitted, told);
      timeouts += o.timeouts;
      gaps += rest / kRoundTrip;
    }
  }
  EXPECT_GT(timeouts, 10u);
  EXPECT_GT(gaps, 400u);
}

TEST(SoftverbsPacketLoss, TriesInARowAreCounted) {
  for (const ibv_wr_opcode opcode : {IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM,
                                     IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD}) {
    LossyLink t(1);  // three retries
    t.receive(0, 2);
    t.begin(1);
    const std::uint32_t length = opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ? 8 : 3 * kMtu;
    fill(t.a.bytes(0, length), 3);
    ASSERT_EQ(t.post(1, opcode, length), 0);
    ASSERT_EQ(t.post(2, IBV_WR_SEND, 8), 0);
    for (int tries = 0; tries < 4; ++tries) {
      EXPECT_TRUE(t.link.at_a.empty()) << tries;
      t.pass(kFaultTimeoutNs - 1);
      EXPECT_TRUE(t.link.at_a.empty()) << tries;
      t.pass(1);
    }
    ASSERT_EQ(t.link.at_a.size(), 2u) << opcode;
    EXPECT_EQ(t.link.at_a[0].wr_id, 1u);
    EXPECT_EQ(t.link.at_a[0].status, IBV_WC_RETRY_EXC_ERR);
    EXPECT_EQ(t.link.at_a[1].wr_id, 2u);
    EXPECT_EQ(t.link.at_a[1].status, IBV_WC_WR_FLUSH_ERR);
    EXPECT_EQ(state_of(t.link.qa), IBV_QPS_ERR);
    EXPECT_TRUE(t.link.at_b.empty());
    EXPECT_TRUE(all_are(t.b.bytes(kThere, 3 * kMtu), 0));
    EXPECT_EQ(t.outcome().lost, 4u);
    EXPECT_EQ(t.outcome().timeouts, 4u);
    EXPECT_EQ(t.statistics().failed, 0u);
  }
}

TEST(SoftverbsPacketLoss, NoRetryIsNoSecondTry) {
  ConnectOptions how = kFaultConnection;
  how.retries = 0;
  LossyLink t(0.2, how);
  t.receive(0, 200);
  t.begin(3);
  std::uint64_t sent = 0;
  while (state_of(t.link.qa) == IBV_QPS_RTS && sent < 200) {
    ASSERT_EQ(t.send(sent++), 0);
    t.run(sent);
  }
  EXPECT_EQ(t.link.at_a.back().status, IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(t.link.at_b.size(), sent - 1) << "all that were before it";
  EXPECT_EQ(t.outcome().lost, 1u);
  EXPECT_EQ(t.outcome().retransmitted, 0u);
}

TEST(SoftverbsPacketLoss, WhatGetsFurtherMayTryAgainAndAgain) {
  LossyLink t(0.1);
  const Outcome o = t.work(2, IBV_WR_RDMA_WRITE, 256 * kMtu);
  EXPECT_GT(o.lost, 15u) << "many more than three retries";
}

TEST(SoftverbsPacketLoss, MessagesKeepTheirOrderAndBytes) {
  LossyLink t(0.1);
  t.begin(11);
  t.receive(0, 400);
  for (std::uint64_t i = 0; i < 400; ++i) {
    ASSERT_EQ(t.send(i, i % 3 == 0 ? 4000 : 32), 0);
    if (i % 200 == 199) t.run(i + 1);
  }
  ASSERT_EQ(t.link.at_b.size(), 400u);
  for (std::uint64_t i = 0; i < 400; ++i) {
    EXPECT_EQ(t.link.at_a[i].wr_id, i);
    EXPECT_EQ(t.link.at_a[i].status, IBV_WC_SUCCESS);
    EXPECT_EQ(t.link.at_b[i].wr_id, i);
    EXPECT_TRUE(t.arrived(i, i, i % 3 == 0 ? 4000 : 32)) << i;
  }
  EXPECT_NEAR(static_cast<double>(t.outcome().lost), 85, 40);
}

TEST(SoftverbsPacketLoss, AllKindsOfWorkAreWholeInTheEnd) {
  LossyLink t(0.03);
  t.begin(5);
  const std::size_t words = kThere + 200 * kMtu;
  std::uint64_t counter = 0;
  for (std::uint64_t round = 0; round < 40; ++round) {
    const auto length = static_cast<std::uint32_t>(20 * kMtu + round * 77);
    fill(t.a.bytes(0, length), round);
    t.receive(round, 1);
    ASSERT_EQ(t.post(4 * round, IBV_WR_RDMA_WRITE, length), 0);
    ASSERT_EQ(Send(4 * round + 1, t.a.sge(1 << 20, length), IBV_WR_RDMA_READ)
                  .to(t.b.address(kThere), t.b.mr->rkey)
                  .post(t.link.qa),
              0);
    Send add(4 * round + 2, t.a.sge(kThere - 8, 8), IBV_WR_ATOMIC_FETCH_AND_ADD);
    add.wr.wr.atomic = {t.b.address(words), 3, 0, t.b.mr->rkey};
    ASSERT_EQ(add.post(t.link.qa), 0);
    ASSERT_EQ(Send(4 * round + 3, t.a.sge(0, 2000)).post(t.link.qa), 0);
    t.run(4 * (round + 1));
    EXPECT_TRUE(holds(t.b.bytes(kThere, length), round));
    EXPECT_TRUE(holds(t.a.bytes(1 << 20, length), round)) << "read behind the write";
    std::memcpy(&counter, &t.a.memory[kThere - 8], sizeof counter);
    EXPECT_EQ(counter, 3 * round) << "once, whatever was lost";
    EXPECT_TRUE(holds(t.b.bytes(round * 4096, 2000), round));
  }
  for (std::uint64_t i = 0; i < t.link.at_a.size(); ++i) EXPECT_EQ(t.link.at_a[i].wr_id, i);
  EXPECT_GT(t.outcome().lost, 20u);
  EXPECT_GT(t.outcome().timeouts, 0u);
}

TEST(SoftverbsPacketLoss, IsAsProbableAsThePlanSays) {
  struct Case {
    double loss;
    ibv_wr_opcode opcode;
  };
  for (const Case& each : {Case{1e-3, IBV_WR_RDMA_READ}, Case{1e-2, IBV_WR_RDMA_READ},
                           Case{1e-3, IBV_WR_RDMA_WRITE}, Case{1e-2, IBV_WR_RDMA_WRITE}}) {
    LossyLink t(each.loss);
    std::uint64_t lost = 0;
    for (std::uint64_t seed = 1; seed <= 100; ++seed)
      lost += t.work(seed, each.opcode, 256 * kMtu).lost;
    const double mean = 100 * 257 * each.loss;  // one more for the request or the response
    EXPECT_NEAR(static_cast<double>(lost), mean, 5 * std::sqrt(mean)) << each.loss;
  }
}

TEST(SoftverbsPacketLoss, WhatIsPostedLaterShowsItToo) {
  LossyLink t(0.2, kManyRetries);
  constexpr std::uint64_t kLater = 300'000;
  std::map<std::uint64_t, int> waits;
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    if (!one_timeout(t.work(seed, IBV_WR_SEND, 32))) continue;
    t.begin(seed);
    t.receive(0, 2);
    ASSERT_EQ(t.send(0), 0);
    t.pass(kLater);
    ASSERT_TRUE(t.link.at_a.empty());
    ASSERT_EQ(t.send(1), 0);
    t.run(2);
    EXPECT_EQ(t.link.at_a[0].wr_id, 0u);
    EXPECT_EQ(t.link.at_b.size(), 2u);
    const Outcome o = t.outcome();
    if (o.lost != 1) continue;  // further packets were lost
    ASSERT_LE(o.timeouts, 1u);  // the later one may have been lost with it
    if (o.timeouts == 1) continue;
    EXPECT_EQ(o.retransmitted, o.ns == kLater ? 0u : 1u);
    ++waits[o.ns];
  }
  // The message was lost and is retransmitted; or its acknowledgement was, and the later one
  // suffices.
  ASSERT_EQ(waits.size(), 2u);
  EXPECT_GT(waits[kLater], 0);
  EXPECT_GT(waits[kLater + kRoundTrip], 0);
}

TEST(SoftverbsPacketLoss, TimeoutZeroWaitsUntilSomethingFollows) {
  ConnectOptions how = kFaultConnection;
  how.timeout = 0;
  LossyLink t(0.2, how);
  t.receive(0, 64);
  t.begin(1);
  std::uint64_t sent = 0;
  do {
    ASSERT_EQ(t.send(sent++), 0);
    t.settle();
  } while (t.link.at_a.size() == sent && sent < 60);
  ASSERT_LT(sent, 60u);
  t.pass(std::uint64_t{3600} * 1'000'000'000);
  EXPECT_EQ(t.link.at_a.size(), sent - 1);
  while (t.link.at_a.size() != sent && sent < 64) {
    ASSERT_EQ(t.send(sent++), 0);
    t.pass(kRoundTrip);
    if (t.link.at_b.size() >= sent - 1) break;
  }
  EXPECT_GE(t.link.at_b.size(), sent - 1);
  EXPECT_EQ(t.statistics().loss_timeouts, 0u);
}

TEST(SoftverbsPacketLoss, WhatIsSentAgainTakesItsTimeOnTheLink) {
  LossyLink t(0.02);
  t.plan.bytes_per_second = 1'000'000'000;  // a byte per nanosecond: 2.5 packets per round trip
  (void)t.seed_for(IBV_WR_RDMA_READ, 64 * kMtu, [](const Outcome& o) {
    return one_gap(o) && o.bytes == 65 * kMtu + kRoundTrip;  // three or more were behind it
  });
  const Outcome o = t.outcome();
  EXPECT_EQ(o.ns, 65 * kMtu + kRoundTrip);
  EXPECT_EQ(o.retransmitted, 1u + 1 + 3) << "the question, the lost one, those in vain";
  t.plan.bytes_per_second = 0;
  (void)t.seed_for(IBV_WR_RDMA_READ, 64 * kMtu, one_gap);
  EXPECT_EQ(t.outcome().ns, kRoundTrip);
}

TEST(SoftverbsPacketLoss, WhatIsBehindItIsSentAgainWithIt) {
  LossyLink t(0.02);
  const std::uint64_t seed = t.seed_for(IBV_WR_RDMA_WRITE, 64 * kMtu, one_gap);
  const Outcome alone = t.work(seed, IBV_WR_RDMA_WRITE, 64 * kMtu);
  t.begin(seed);
  ibv_send_wr* bad = nullptr;
  Send first(0, t.a.sge(0, 64 * kMtu), IBV_WR_RDMA_WRITE);
  Send second(1, t.a.sge(0, 10), IBV_WR_RDMA_WRITE);
  first.to(t.b.address(kThere), t.b.mr->rkey);
  second.to(t.b.address(kThere), t.b.mr->rkey);
  first.wr.next = &second.wr;
  ASSERT_EQ(ibv_post_send(t.link.qa, &first.wr, &bad), 0);
  t.run(2);
  ASSERT_EQ(t.outcome().lost, 1u);
  EXPECT_EQ(t.outcome().retransmitted, alone.retransmitted + 1);
  EXPECT_EQ(t.outcome().ns, kRoundTrip);
}

TEST(SoftverbsPacketLoss, QueuePairsDoNotWaitForEachOther) {
  LossyLink t(0.3, kManyRetries);
  ibv_qp* qa = t.a.make_qp();
  ibv_qp* qb = t.b.make_qp();
  connect(t.a, qa, t.b, qb, kFaultConnection);
  const std::uint64_t seed = t.seed_for(IBV_WR_SEND, 32, one_timeout);
  t.begin(seed);
  t.receive(0, 2);
  ASSERT_EQ(t.send(0), 0);
  ASSERT_TRUE(sv::set_faults(t.a.context, {}).has_value());
  ASSERT_EQ(Send(1, t.a.sge(0, 8)).post(qa), 0);
  t.settle();
  ASSERT_EQ(t.link.at_a.size(), 1u);
  EXPECT_EQ(t.link.at_a[0].wr_id, 1u);
  t.pass(kFaultTimeoutNs);
  EXPECT_EQ(t.link.at_a.size(), 2u);
}

TEST(SoftverbsPacketLoss, APeerHasAPlanOfItsOwn) {
  std::uint64_t now = 1'000'000'000;
  const sv::FaultPlan good;
  Node a(timed(&now, &good)), b(timed(&now)), c(timed(&now));
  ibv_qp* to_b = a.make_qp();
  ibv_qp* to_c = a.make_qp();
  connect(a, to_b, b, b.make_qp(), kFaultConnection);
  connect(a, to_c, c, c.make_qp(), kFaultConnection);
  ibv_gid gid{};
  ASSERT_EQ(sv::query_gid(b.context, 1, 0, &gid), 0);
  ASSERT_TRUE(sv::set_faults(a.context, gid, {.packet_loss = 1}).has_value());
  ASSERT_EQ(b.post_recv(0, 0, 64), 0);
  ASSERT_EQ(c.post_recv(0, 0, 64), 0);
  ASSERT_EQ(Send(1, a.sge(0, 8)).post(to_b), 0);
  ASSERT_EQ(Send(2, a.sge(0, 8)).post(to_c), 0);
  ibv_wc wc{};
  EXPECT_TRUE(c.poll(wc));
  EXPECT_FALSE(b.poll(wc));
  EXPECT_EQ(sv::fault_statistics(a.context).packets_lost, 1u);
  now += 4 * kFaultTimeoutNs;
  std::map<std::uint64_t, ibv_wc_status> ended;
  for (int i = 0; i < 2 * kLook; ++i) {
    if (a.poll(wc)) ended[wc.wr_id] = wc.status;
  }
  EXPECT_EQ(ended, (std::map<std::uint64_t, ibv_wc_status>{{1, IBV_WC_RETRY_EXC_ERR},
                                                           {2, IBV_WC_SUCCESS}}));
}

TEST(SoftverbsPacketLoss, TheSeedTells) {
  LossyLink t(0.05);
  std::vector<Outcome> first, second, other;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    first.push_back(t.work(seed, IBV_WR_RDMA_WRITE, 50 * kMtu));
    second.push_back(t.work(seed, IBV_WR_RDMA_WRITE, 50 * kMtu));
    other.push_back(t.work(~seed, IBV_WR_RDMA_WRITE, 50 * kMtu));
  }
  EXPECT_TRUE(first == second);
  EXPECT_FALSE(first == other);
}

TEST(SoftverbsPacketLoss, RarePollsMakeItNoSlower) {
  LossyLink t(0.05);
  const Outcome often = t.work(8, IBV_WR_RDMA_READ, 100 * kMtu);
  ASSERT_GT(often.lost, 2u);
  t.begin(8);
  ASSERT_EQ(t.post(0, IBV_WR_RDMA_READ, 100 * kMtu), 0);
  t.pass(often.ns - 1);
  EXPECT_TRUE(t.link.at_a.empty());
  t.pass(1);
  EXPECT_EQ(t.link.at_a.size(), 1u);
  EXPECT_EQ(t.outcome(), often);
}

TEST(SoftverbsPacketLoss, NothingWaitsWhenThePlanGoes) {
  LossyLink t(1);
  t.begin(1);
  t.receive(0, 2);
  ASSERT_EQ(t.send(0), 0);
  ASSERT_EQ(t.send(1), 0);
  t.settle();
  EXPECT_TRUE(t.link.at_b.empty());
  sv::clear_faults(t.a.context);
  t.settle();
  EXPECT_EQ(t.link.at_b.size(), 2u);
  EXPECT_EQ(t.link.at_a.size(), 2u);
}

}  // namespace softverbs_test::faults_loss
