// The fault plan itself: refusals, changes at run time, and no cost for other devices.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "softverbs/fault_link.h"

namespace softverbs_test::faults_plan {

using std::chrono::nanoseconds;

struct Wrong {
  const char* field;
  std::function<void(sv::FaultPlan&)> spoil;
};

const std::vector<Wrong>& wrong_plans() {
  static const std::vector<Wrong> all = {
      {"drop", [](sv::FaultPlan& p) { p.drop = 1.5; }},
      {"duplicate", [](sv::FaultPlan& p) { p.duplicate = -0.1; }},
      {"reorder", [](sv::FaultPlan& p) { p.reorder = std::nan(""); }},
      {"rnr", [](sv::FaultPlan& p) { p.rnr = std::numeric_limits<double>::infinity(); }},
      {"packet_loss", [](sv::FaultPlan& p) { p.packet_loss = -1e-9; }},
      {"packet_loss", [](sv::FaultPlan& p) { p.packet_loss = std::nan(""); }},
      {"round_trip", [](sv::FaultPlan& p) { p.round_trip = nanoseconds(-1); }},
      {"reorder_distance", [](sv::FaultPlan& p) { p.reorder_distance = 0; }},
      {"reorder_timeout", [](sv::FaultPlan& p) { p.reorder_timeout = nanoseconds(-1); }},
      {"held_datagrams", [](sv::FaultPlan& p) { p.held_datagrams = 0; }},
      {"held_datagrams", [](sv::FaultPlan& p) { p.held_datagrams = 1u << 20; }},
      {"rnr_in_a_row", [](sv::FaultPlan& p) { p.rnr_in_a_row = 0; }},
      {"bytes_per_second", [](sv::FaultPlan& p) { p.bytes_per_second = ~std::uint64_t{0}; }},
      {"burst_bytes", [](sv::FaultPlan& p) { p.burst_bytes = ~std::uint64_t{0}; }},
      {"fail_status", [](sv::FaultPlan& p) { p.fail_status = IBV_WC_SUCCESS; }},
      {"delay_min", [](sv::FaultPlan& p) { p.delay_min = nanoseconds(-1); }},
      {"delay_max", [](sv::FaultPlan& p) { p.delay_min = nanoseconds(1); }},
      {"datagram_delay_max",
       [](sv::FaultPlan& p) { p.datagram_delay_max = std::chrono::hours(25); }},
      {"datagram_delay_min",
       [](sv::FaultPlan& p) { p.datagram_delay_min = std::chrono::hours(-1); }},
  };
  return all;
}

bool is_plain(const Node& node) {
  return node.context->ops.post_send == &sv::post_send &&
         node.context->ops.poll_cq == &sv::poll_cq && node.internals().faults == nullptr;
}

TEST(SoftverbsFaultPlan, CostsNothingWhenAbsent) {
  Link link;
  EXPECT_TRUE(is_plain(link.a));
  EXPECT_EQ(static_cast<sv::Qp*>(link.qa)->faults, nullptr);
  sv::clear_faults(link.a.context);  // there is no plan
  EXPECT_TRUE(is_plain(link.a));
  EXPECT_EQ(sv::fault_statistics(link.a.context).bytes, 0u);
}

TEST(SoftverbsFaultPlan, RefusesWhatMakesNoSense) {
  Node node;
  for (const Wrong& wrong : wrong_plans()) {
    sv::FaultPlan plan;
    wrong.spoil(plan);
    const auto set = sv::set_faults(node.context, plan);
    ASSERT_FALSE(set.has_value()) << wrong.field;
    EXPECT_EQ(set.error().status, spinwire::Status::invalid_argument);
    EXPECT_NE(set.error().asked.find(std::string(": ") + wrong.field + " ="), std::string::npos)
        << set.error().message();
    EXPECT_TRUE(is_plain(node));
    const auto opened = sv::open_device(spinwire::Clock::real(), sv::Driving::by_user, &plan);
    EXPECT_FALSE(opened.has_value());
  }
}

TEST(SoftverbsFaultPlan, ALinkHasARate) {
  constexpr std::uint64_t kTooMuch = ~std::uint64_t{0};
  const auto refused = [](const char* name, std::uint64_t rate, std::uint64_t burst) {
    const auto link = sv::make_link(rate, burst);
    ASSERT_FALSE(link) << name;
    EXPECT_EQ(link.error().status, spinwire::Status::invalid_argument);
    EXPECT_NE(link.error().asked.find(name), std::string::npos) << link.error().message();
  };
  refused("bytes_per_second = 0", 0, 0);
  refused("bytes_per_second", kTooMuch, 0);
  refused("burst_bytes", 1, kTooMuch);
  EXPECT_TRUE(sv::make_link(1));
  EXPECT_TRUE(sv::make_link(1, std::uint64_t{1} << 40));
}

TEST(SoftverbsFaultPlan, ARefusedOneLeavesTheOldOne) {
  FaultyDatagrams d({.drop = 1});
  EXPECT_FALSE(sv::set_faults(d.a.context, {.drop = 2}).has_value());
  d.send_and_poll(10);
  EXPECT_TRUE(d.arrived.empty());
}

TEST(SoftverbsFaultPlan, ComesAndGoesAtRunTime) {
  std::uint64_t now = 1'000'000'000;
  Link link(timed(&now), kFaultConnection);
  for (std::uint64_t i = 0; i < 8; ++i) ASSERT_EQ(link.b.post_recv(i, i * 64, 64), 0);
  ASSERT_EQ(Send(0, link.a.sge(0, 8)).post(link.qa), 0);
  ASSERT_TRUE(sv::set_faults(link.a.context,
                             {.delay_min = nanoseconds(1000), .delay_max = nanoseconds(1000)})
                  .has_value());
  EXPECT_FALSE(is_plain(link.a));
  ASSERT_EQ(Send(1, link.a.sge(0, 8)).post(link.qa), 0);
  ASSERT_EQ(Send(2, link.a.sge(0, 8)).post(link.qa), 0);
  link.steps(2);
  EXPECT_EQ(link.at_b.size(), 1u);
  sv::clear_faults(link.a.context);
  EXPECT_TRUE(is_plain(link.a));
  ASSERT_EQ(Send(3, link.a.sge(0, 8)).post(link.qa), 0);
  link.steps(2);
  ASSERT_EQ(link.at_a.size(), 4u);
  EXPECT_EQ(link.at_b.size(), 4u);
  for (std::uint64_t i = 0; i < 4; ++i) EXPECT_EQ(link.at_a[i].wr_id, i);
}

TEST(SoftverbsFaultPlan, HeldDatagramsGoWhenItGoes) {
  FaultyDatagrams d(
      {.datagram_delay_min = nanoseconds(1000), .datagram_delay_max = nanoseconds(1000)});
  for (std::uint64_t i = 0; i < 5; ++i) ASSERT_EQ(d.send(i), 0);
  sv::clear_faults(d.a.context);
  d.poll();
  EXPECT_EQ(d.arrived, (std::vector<std::uint64_t>{0, 1, 2, 3, 4}));
}

TEST(SoftverbsFaultPlan, AnotherPlanLeavesTheFaultsOfWhatWasPosted) {
  FaultyLink t({.delay_min = nanoseconds(1000), .delay_max = nanoseconds(1000)});
  t.receive(0, 2);
  ASSERT_EQ(t.send(0), 0);
  ASSERT_TRUE(sv::set_faults(t.a.context, {}).has_value());
  ASSERT_EQ(t.send(1), 0);
  t.pass(999);
  EXPECT_TRUE(t.link.at_b.empty());
  t.pass(1);
  EXPECT_EQ(t.link.at_b.size(), 2u);
}

TEST(SoftverbsFaultPlan, CountsAnewWithEachPlan) {
  FaultyLink t({.fail_at = 2});
  t.receive(0, 3);
  ASSERT_EQ(t.send(0), 0);
  ASSERT_TRUE(sv::set_faults(t.a.context, {.fail_at = 2}).has_value());
  ASSERT_EQ(t.send(1), 0);
  ASSERT_EQ(t.send(2), 0);
  t.settle();
  ASSERT_EQ(t.link.at_a.size(), 3u);
  EXPECT_EQ(t.link.at_a[1].status, IBV_WC_SUCCESS);
  EXPECT_EQ(t.link.at_a[2].status, IBV_WC_GENERAL_ERR);
}

}  // namespace softverbs_test::faults_plan
