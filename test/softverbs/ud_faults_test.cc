// Faults of datagrams: lost, duplicated, reordered, delayed; the sender never notices.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include "softverbs/fault_link.h"

namespace softverbs_test::faults_datagram {

using std::chrono::nanoseconds;

void expect_all_sent(const FaultyDatagrams& d, std::size_t count) {
  ASSERT_EQ(d.sent.size(), count);
  for (std::size_t i = 0; i < count; ++i) {
    EXPECT_EQ(d.sent[i].wr_id, i);
    EXPECT_EQ(d.sent[i].status, IBV_WC_SUCCESS);
  }
}

TEST(SoftverbsFaultyDatagrams, AnEmptyPlanChangesNothing) {
  FaultyDatagrams d({});
  d.send_and_poll(1000);
  expect_all_sent(d, 1000);
  ASSERT_EQ(d.arrived.size(), 1000u);
  for (std::uint64_t i = 0; i < 1000; ++i) EXPECT_EQ(d.arrived[i], i);
  EXPECT_EQ(d.statistics().bytes, 8000u);
}

TEST(SoftverbsFaultyDatagrams, APeerHasAPlanOfItsOwn) {
  FaultyDatagrams d({.seed = 1, .drop = 1});
  const ibv_gid peer = gid_of(d.b);
  ASSERT_TRUE(sv::set_faults(
      d.a.context, peer,
      {.datagram_delay_min = nanoseconds(500), .datagram_delay_max = nanoseconds(500)}));
  EXPECT_EQ(sv::set_faults(d.a.context, peer, {.drop = 2}).error().status,
            spinwire::Status::invalid_argument);
  EXPECT_EQ(sv::next_due(d.a.context), ~std::uint64_t{0});
  ASSERT_EQ(d.send(1), 0);
  d.poll();
  EXPECT_TRUE(d.arrived.empty());
  EXPECT_EQ(sv::next_due(d.a.context), d.now + 500);
  d.pass(500);
  EXPECT_EQ(d.arrived.size(), 1u);
  EXPECT_EQ(d.statistics().dropped, 0u);
  // Other peers keep the context's plan.
  ibv_gid other = peer;
  other.raw[15] ^= 1;
  ASSERT_TRUE(sv::set_faults(d.a.context, peer, {.drop = 1}));
  ASSERT_TRUE(sv::set_faults(d.a.context, other, {}));
  ASSERT_EQ(d.send(2), 0);
  d.pass(1000);
  EXPECT_EQ(d.statistics().dropped, 1u);
}

TEST(SoftverbsFaultyDatagrams, DropsAsManyAsItCounts) {
  FaultyDatagrams d({.seed = 1, .drop = 0.3});
  d.send_and_poll(10'000);
  expect_all_sent(d, 10'000);
  const std::uint64_t dropped = d.statistics().dropped;
  EXPECT_EQ(d.arrived.size() + dropped, 10'000u);
  EXPECT_NEAR(static_cast<double>(dropped), 3000, 250);  // more than five standard deviations
  EXPECT_TRUE(std::is_sorted(d.arrived.begin(), d.arrived.end()));
  EXPECT_EQ(std::set<std::uint64_t>(d.arrived.begin(), d.arrived.end()).size(), d.arrived.size());
}

TEST(SoftverbsFaultyDatagrams, ProbabilitiesOfOneAndZero) {
  FaultyDatagrams all({.drop = 1});
  all.send_and_poll(200);
  expect_all_sent(all, 200);
  EXPECT_TRUE(all.arrived.empty());
  EXPECT_EQ(all.statistics().dropped, 200u);
  FaultyDatagrams twice({.drop = 0, .duplicate = 1});
  twice.send_and_poll(200);
  EXPECT_EQ(twice.arrived.size(), 400u);
  EXPECT_EQ(twice.statistics().duplicated, 200u);
}

TEST(SoftverbsFaultyDatagrams, DuplicatesHaveTheSameBytes) {
  FaultyDatagrams d({.seed = 2, .duplicate = 0.25});
  d.send_and_poll(4000);
  expect_all_sent(d, 4000);
  std::map<std::uint64_t, int> times;
  for (const std::uint64_t number : d.arrived) ++times[number];
  ASSERT_EQ(times.size(), 4000u);
  const auto doubled = std::count_if(times.begin(), times.end(),
                                     [](const auto& entry) { return entry.second == 2; });
  EXPECT_EQ(static_cast<std::uint64_t>(doubled), d.statistics().duplicated);
  EXPECT_EQ(d.arrived.size(), 4000 + d.statistics().duplicated);
  EXPECT_NEAR(static_cast<double>(doubled), 1000, 150);
}

/// For each delayed one, the number of later ones that overtook it.
std::vector<std::uint64_t> overtakers(const std::vector<std::uint64_t>& arrived) {
  std::vector<std::uint64_t> counts;
  for (std::size_t i = 0; i < arrived.size(); ++i) {
    const auto count = std::count_if(arrived.begin(), arrived.begin() + static_cast<long>(i),
                                     [&](std::uint64_t number) { return number > arrived[i]; });
    if (count != 0) counts.push_back(static_cast<std::uint64_t>(count));
  }
  return counts;
}

TEST(SoftverbsFaultyDatagrams, ReordersWithinTheDistance) {
  FaultyDatagrams d({.seed = 3, .reorder = 0.1, .reorder_distance = 4});
  d.send_and_poll(3000);
  d.pass(100'000);  // the timeout of the last ones
  expect_all_sent(d, 3000);
  ASSERT_EQ(d.arrived.size(), 3000u);
  EXPECT_EQ(std::set<std::uint64_t>(d.arrived.begin(), d.arrived.end()).size(), 3000u);
  const std::vector<std::uint64_t> late = overtakers(d.arrived);
  EXPECT_EQ(late.size(), d.statistics().reordered);
  EXPECT_NEAR(static_cast<double>(late.size()), 300, 85);
  EXPECT_EQ(*std::max_element(late.begin(), late.end()), 4u);
  EXPECT_EQ(*std::min_element(late.begin(), late.end()), 1u);
}

TEST(SoftverbsFaultyDatagrams, OneThatIsNotOvertakenIsKeptForTheTimeout) {
  FaultyDatagrams d({.reorder = 1, .reorder_timeout = nanoseconds(5000)});
  ASSERT_EQ(d.send(7), 0);
  d.pass(4999);
  EXPECT_TRUE(d.arrived.empty());
  d.pass(1);
  EXPECT_EQ(d.arrived, std::vector<std::uint64_t>{7});
  EXPECT_EQ(d.statistics().reordered, 0u);
}

TEST(SoftverbsFaultyDatagrams, DuplicatesDoNotOvertakeEachOther) {
  FaultyDatagrams d({.duplicate = 1, .reorder = 1, .reorder_distance = 4});
  ASSERT_EQ(d.send(7), 0);
  d.pass(100'000);
  EXPECT_EQ(d.arrived, (std::vector<std::uint64_t>{7, 7}));
  EXPECT_EQ(d.statistics().reordered, 0u);
}

TEST(SoftverbsFaultyDatagrams, DelaysToTheNanosecond) {
  FaultyDatagrams d(
      {.datagram_delay_min = nanoseconds(777), .datagram_delay_max = nanoseconds(777)});
  for (std::uint64_t i = 0; i < 50; ++i) ASSERT_EQ(d.send(i), 0);
  d.poll();
  expect_all_sent(d, 50);
  d.pass(776);
  EXPECT_TRUE(d.arrived.empty());
  d.pass(1);
  ASSERT_EQ(d.arrived.size(), 50u);
  EXPECT_TRUE(std::is_sorted(d.arrived.begin(), d.arrived.end()));
  EXPECT_EQ(d.statistics().datagrams_delayed, 50u);
}

TEST(SoftverbsFaultyDatagrams, DelaysWithinTheirRange) {
  FaultyDatagrams d({.seed = 5,
                     .datagram_delay_min = nanoseconds(1000),
                     .datagram_delay_max = nanoseconds(3000)});
  const std::uint64_t start = d.now;
  for (std::uint64_t i = 0; i < 200; ++i) ASSERT_EQ(d.send(i), 0);
  for (int ns = 0; ns < 3000; ++ns) d.pass(1);
  ASSERT_EQ(d.arrived.size(), 200u);
  EXPECT_GE(d.when.front(), start + 1000);
  EXPECT_LT(d.when.front(), start + 1200) << "evenly: one of 200 is near the least";
  EXPECT_LE(d.when.back(), start + 3000);
  EXPECT_GT(d.when.back(), start + 2800);
  EXPECT_FALSE(std::is_sorted(d.arrived.begin(), d.arrived.end()));
}

TEST(SoftverbsFaultyDatagrams, HeldOnesAreCopies) {
  sv::FaultPlan plan;
  plan.datagram_delay_min = plan.datagram_delay_max = nanoseconds(100);
  FaultyDatagrams d(plan);
  constexpr std::uint32_t kLength = 3000;
  fill(d.a.bytes(0, kLength), 1);
  {
    const Handle passing(d.a, d.b);
    ibv_sge sges[2] = {d.a.sge(0, 1000), d.a.sge(1000, kLength - 1000)};
    Datagram send(9, sges[0], passing, d.qb->qp_num);
    send.wr.opcode = IBV_WR_SEND_WITH_IMM;
    send.wr.imm_data = 0x01020304;
    send.wr.sg_list = sges;
    send.wr.num_sge = 2;
    ASSERT_EQ(send.post(d.qa), 0);
  }
  std::fill_n(d.a.memory.begin(), kLength, std::byte{0});
  ibv_wc wc{};
  ASSERT_TRUE(d.a.poll(wc)) << "it completed";
  d.now += 100;
  EXPECT_FALSE(d.a.poll(wc));
  ASSERT_TRUE(d.b.poll(wc));
  EXPECT_EQ(wc.byte_len, kLength + kGrh);
  EXPECT_EQ(wc.imm_data, 0x01020304u);
  EXPECT_EQ(wc.src_qp, d.qa->qp_num);
  EXPECT_TRUE(holds(d.b.bytes(wc.wr_id * 4096 + kGrh, kLength), 1));
}

TEST(SoftverbsFaultyDatagrams, HoldsNoMoreThanItMay) {
  FaultyDatagrams d({.datagram_delay_min = nanoseconds(1000),
                     .datagram_delay_max = nanoseconds(1000),
                     .held_datagrams = 8});
  for (std::uint64_t i = 0; i < 20; ++i) ASSERT_EQ(d.send(i), 0);
  d.poll();
  expect_all_sent(d, 20);
  EXPECT_EQ(d.statistics().overflowed, 12u);
  d.pass(1000);
  EXPECT_EQ(d.arrived, (std::vector<std::uint64_t>{0, 1, 2, 3, 4, 5, 6, 7}));
  ASSERT_EQ(d.send(20), 0);  // the slots are free again
  d.pass(1000);
  EXPECT_EQ(d.arrived.back(), 20u);
}

TEST(SoftverbsFaultyDatagrams, MoreMayBeHeldByAnotherPlan) {
  sv::FaultPlan plan{.datagram_delay_min = nanoseconds(1000),
                     .datagram_delay_max = nanoseconds(1000),
                     .held_datagrams = 4};
  FaultyDatagrams d(plan);
  for (std::uint64_t i = 0; i < 4; ++i) ASSERT_EQ(d.send(i), 0);
  plan.held_datagrams = 64;
  ASSERT_TRUE(sv::set_faults(d.a.context, plan).has_value());
  for (std::uint64_t i = 4; i < 64; ++i) ASSERT_EQ(d.send(i), 0);
  d.pass(1000);
  ASSERT_EQ(d.arrived.size(), 64u);
  for (std::uint64_t i = 0; i < 64; ++i) EXPECT_EQ(d.arrived[i], i);
}

TEST(SoftverbsFaultyDatagrams, GoWithTheirQueuePair) {
  FaultyDatagrams d(
      {.datagram_delay_min = nanoseconds(1000), .datagram_delay_max = nanoseconds(1000)});
  ibv_qp* other = ready_ud(d.a, false);
  for (std::uint64_t i = 0; i < 4; ++i) {
    ASSERT_EQ(d.send(i), 0);
    ASSERT_EQ(Datagram(i, d.a.sge(0, 8), d.way, d.qb->qp_num).post(other), 0);
  }
  d.a.destroy(other);
  d.pass(1000);
  EXPECT_EQ(d.arrived, (std::vector<std::uint64_t>{0, 1, 2, 3}));
  EXPECT_EQ(d.statistics().abandoned, 4u);
}

TEST(SoftverbsFaultyDatagrams, OutliveTheirReceiver) {
  std::uint64_t now = 1'000'000'000;
  const sv::FaultPlan plan{.datagram_delay_min = nanoseconds(5'000'000),
                           .datagram_delay_max = nanoseconds(5'000'000)};
  Node a(timed(&now, &plan));
  ibv_qp* qa = ready_ud(a, false);
  {
    Node b(timed(&now));
    const Handle way(a, b);
    ASSERT_EQ(Datagram(1, a.sge(0, 8), way, 2).post(qa), 0);
  }
  for (int ms = 0; ms < 5; ++ms) {
    now += 1'000'000;
    sv::control_device(a.context);
    EXPECT_EQ(a.internals().peers.size(), 1u) << "somebody still has to do with it";
  }
  ibv_wc wc{};
  ASSERT_TRUE(a.poll(wc));
  EXPECT_EQ(a.internals().drops[static_cast<std::size_t>(sv::Drop::peer_gone)], 1u);
  now += 1'000'000;
  sv::control_device(a.context);
  EXPECT_TRUE(a.internals().peers.empty());
}

TEST(SoftverbsFaultyDatagrams, BytesPerSecondAreKept) {
  FaultyDatagrams d({.held_datagrams = 1024, .bytes_per_second = 1'000'000'000});
  const std::uint64_t start = d.now;
  for (std::uint64_t i = 0; i < 100; ++i) ASSERT_EQ(d.send(i, 500), 0);
  while (d.now < start + 100 * 500) d.pass(1);
  ASSERT_EQ(d.arrived.size(), 100u);
  for (std::uint64_t i = 0; i < 100; ++i) {
    EXPECT_EQ(d.arrived[i], i);
    EXPECT_EQ(d.when[i], start + (i + 1) * 500);
  }
}

TEST(SoftverbsFaultyDatagrams, TheNthFailsInTheMiddleOfAList) {
  FaultyDatagrams d({.fail_at = 3, .fail_status = IBV_WC_LOC_QP_OP_ERR});
  std::vector<std::unique_ptr<Datagram>> list;
  for (std::uint64_t i = 0; i < 5; ++i) {
    list.push_back(std::make_unique<Datagram>(i, d.a.sge(i * 8, 8), d.way, d.qb->qp_num));
    std::memcpy(&d.a.memory[i * 8], &i, 8);
    if (i != 0) list[i - 1]->wr.next = &list[i]->wr;
  }
  ASSERT_EQ(list[0]->post(d.qa), 0);
  d.poll();
  ASSERT_EQ(d.sent.size(), 5u);
  const ibv_wc_status expected[] = {IBV_WC_SUCCESS, IBV_WC_SUCCESS, IBV_WC_LOC_QP_OP_ERR,
                                    IBV_WC_WR_FLUSH_ERR, IBV_WC_WR_FLUSH_ERR};
  for (std::uint64_t i = 0; i < 5; ++i) {
    EXPECT_EQ(d.sent[i].wr_id, i);
    EXPECT_EQ(d.sent[i].status, expected[i]);
  }
  EXPECT_EQ(d.arrived, (std::vector<std::uint64_t>{0, 1}));
  EXPECT_EQ(state_of(d.qa), IBV_QPS_SQE);
  EXPECT_EQ(d.statistics().failed, 1u);
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTS;
  ASSERT_EQ(sv::modify_qp(d.qa, &attr, IBV_QP_STATE), 0);
  ASSERT_EQ(d.send(5), 0);
  d.poll();
  EXPECT_EQ(d.arrived.back(), 5u);
}

/// What arrives, and when, with all faults.
std::vector<std::uint64_t> trace(std::uint64_t seed) {
  FaultyDatagrams d({.seed = seed,
                     .drop = 0.1,
                     .duplicate = 0.1,
                     .reorder = 0.1,
                     .datagram_delay_max = nanoseconds(5000),
                     .held_datagrams = 64,
                     .bytes_per_second = 100'000'000});
  for (std::uint64_t i = 0; i < 2000; ++i) {
    must(d.send(i) == 0, "send");
    d.pass(i % 7 * 30);
  }
  for (int i = 0; i < 100; ++i) d.pass(5000);
  std::vector<std::uint64_t> all = d.arrived;
  all.insert(all.end(), d.when.begin(), d.when.end());
  return all;
}

TEST(SoftverbsFaultyDatagrams, TheSeedTellsEverything) {
  const std::vector<std::uint64_t> first = trace(11);
  EXPECT_EQ(trace(11), first);
  EXPECT_NE(trace(12), first);
}

TEST(SoftverbsFaultyDatagrams, OneFaultDoesNotChangeAnother) {
  FaultyDatagrams few({.seed = 4, .drop = 0.2});
  FaultyDatagrams more({.seed = 4, .drop = 0.2, .duplicate = 0.5});
  few.send_and_poll(500);
  more.send_and_poll(500);
  more.arrived.erase(std::unique(more.arrived.begin(), more.arrived.end()), more.arrived.end());
  EXPECT_EQ(few.arrived, more.arrived);
}

}  // namespace softverbs_test::faults_datagram
