// The two ports of a context that an engine drives: GIDs, paths, and the state of each.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <vector>

#include "softverbs/fault_link.h"
#include "softverbs/faults/fault_layer.h"
#include "softverbs/rc_link.h"

namespace softverbs_test::second_port {
namespace {

constexpr std::array<std::uint8_t, 2> kBothPorts{1, 2};

ibv_gid gid_at(const Node& node, std::uint8_t port) {
  ibv_gid gid{};
  EXPECT_EQ(sv::query_gid(node.context, port, 0, &gid), 0);
  return gid;
}

int to_init(ibv_qp* qp, std::uint8_t port) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = port;
  attr.qp_access_flags = Node::kAllAccess;
  return sv::modify_qp(qp, &attr,
                       IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

int to_rtr(ibv_qp* qp, std::uint8_t port, const Endpoint& remote) {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = IBV_MTU_4096;
  attr.dest_qp_num = remote.qpn;
  attr.rq_psn = remote.psn;
  attr.max_dest_rd_atomic = 1;
  attr.min_rnr_timer = 1;
  attr.ah_attr.is_global = 1;
  attr.ah_attr.port_num = port;
  attr.ah_attr.grh.dgid = remote.gid;
  return sv::modify_qp(qp, &attr,
                       IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                           IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
}

/// A queue pair of each node, at a port of its own.
struct Ports {
  Ports(std::uint8_t at_a, std::uint8_t at_b, const NodeOptions& options = {})
      : a(options), b(options), qa(a.make_qp()), qb(b.make_qp()) {
    EXPECT_EQ(to_init(qa, at_a), 0);
    EXPECT_EQ(to_init(qb, at_b), 0);
    EXPECT_EQ(to_rtr(qa, at_a, end(b, qb, at_b)), 0);
    EXPECT_EQ(to_rtr(qb, at_b, end(a, qa, at_a)), 0);
    EXPECT_EQ(a.rts(qa), 0);
    EXPECT_EQ(b.rts(qb), 0);
  }
  static Endpoint end(const Node& node, const ibv_qp* qp, std::uint8_t port) {
    Endpoint e = node.endpoint(qp);
    e.gid = gid_at(node, port);
    return e;
  }
  Node a, b;
  ibv_qp* qa;
  ibv_qp* qb;
};

TEST(SoftverbsPorts, EachHasItsGid) {
  const Node node;
  EXPECT_FALSE(sv::same_gid(gid_at(node, 1), gid_at(node, 2)));
  EXPECT_TRUE(sv::same_gid(sv::own_gid(gid_at(node, 2)), gid_at(node, 1)));
  EXPECT_EQ(sv::port_of(gid_at(node, 2)), 2);
  ibv_gid third = gid_at(node, 2);
  third.raw[3] = static_cast<std::uint8_t>(third.raw[3] + 0x10);
  EXPECT_TRUE(sv::same_gid(sv::own_gid(third), third)) << "no port of ours";
  EXPECT_FALSE(sv::parse_gid(third));
}

TEST(SoftverbsPorts, AProgramForLibibverbsSeesOne) {
  NodeOptions options;
  options.driving = sv::Driving::by_poll;
  Node node(options);
  ibv_device_attr device{};
  ASSERT_EQ(sv::query_device(node.context, &device), 0);
  EXPECT_EQ(device.phys_port_cnt, 1);
  ibv_port_attr port{};
  EXPECT_EQ(sv::query_port(node.context, 2, &port), EINVAL);
  EXPECT_EQ(to_init(node.make_qp(), 2), EINVAL);
}

TEST(SoftverbsPorts, AnyPortReachesAnyPort) {
  for (const std::uint8_t at_a : kBothPorts) {
    for (const std::uint8_t at_b : kBothPorts) {
      Ports t(at_a, at_b);
      ASSERT_EQ(t.b.post_recv(7, 4096, 64), 0);
      std::memset(t.a.bytes(0, 64).data(), 0x5a, 64);
      ASSERT_EQ(Send(1, t.a.sge(0, 64)).post(t.qa), 0);
      std::vector<ibv_wc> got;
      const auto step = [&] {
        ibv_wc wc{};
        (void)t.a.poll(wc);
        if (t.b.poll(wc)) got.push_back(wc);
      };
      ASSERT_TRUE(until(step, [&] { return !got.empty(); }));
      EXPECT_EQ(got[0].status, IBV_WC_SUCCESS);
      EXPECT_EQ(std::to_integer<int>(t.b.bytes(4096 + 63, 1)[0]), 0x5a);
      ibv_qp_attr attr{};
      ASSERT_EQ(sv::query_qp(t.qa, &attr, IBV_QP_PORT, nullptr), 0);
      EXPECT_EQ(attr.port_num, at_a);
    }
  }
}

TEST(SoftverbsPorts, AGidOfAnotherPortLeadsNowhere) {
  Node a;
  Node b;
  ibv_qp* const qa = a.make_qp();
  ibv_qp* const qb = b.make_qp();
  ASSERT_EQ(to_init(qa, 1), 0);
  ASSERT_EQ(to_init(qb, 2), 0);
  EXPECT_EQ(to_rtr(qa, 1, Ports::end(b, qb, 1)), ENODEV);
  EXPECT_EQ(to_rtr(qa, 2, Ports::end(b, qb, 2)), EINVAL) << "our own port is 1";
  EXPECT_EQ(to_rtr(qa, 1, Ports::end(b, qb, 2)), 0);
}

TEST(SoftverbsPorts, TheSecondCarriesNoDatagrams) {
  Node node;
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = node.cq;
  init.qp_type = IBV_QPT_UD;
  init.cap = {4, 4, 1, 1, 0};
  ibv_qp* const qp = sv::create_qp(node.pd, &init);
  ASSERT_NE(qp, nullptr);
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = 2;
  constexpr int kMask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
  EXPECT_EQ(sv::modify_qp(qp, &attr, kMask), EINVAL);
  attr.port_num = 1;
  EXPECT_EQ(sv::modify_qp(qp, &attr, kMask), 0);
  ibv_ah_attr path{};
  path.is_global = 1;
  path.port_num = 2;
  path.grh.dgid = gid_at(node, 1);
  EXPECT_EQ(sv::create_ah(node.pd, &path), nullptr);
  ASSERT_EQ(sv::destroy_qp(qp), 0);
}

TEST(SoftverbsPorts, APortThatGoesDownTakesItsConnectionsAlone) {
  Ports second(2, 1);
  Node& a = second.a;
  Node& b = second.b;
  ibv_qp* const q1 = a.make_qp();
  ibv_qp* const p1 = b.make_qp();
  ASSERT_EQ(to_init(q1, 1), 0);
  ASSERT_EQ(to_init(p1, 1), 0);
  ASSERT_EQ(to_rtr(q1, 1, Ports::end(b, p1, 1)), 0);
  ASSERT_EQ(to_rtr(p1, 1, Ports::end(a, q1, 1)), 0);
  ASSERT_EQ(a.rts(q1), 0);
  ASSERT_EQ(b.rts(p1), 0);
  EXPECT_EQ(sv::set_port(a.context, 3, sv::LinkState::down), EINVAL);
  ASSERT_EQ(sv::set_port(a.context, 2, sv::LinkState::down), 0);
  ASSERT_EQ(sv::set_port(a.context, 2, sv::LinkState::down), 0);
  ibv_port_attr port{};
  ASSERT_EQ(sv::query_port(a.context, 2, &port), 0);
  EXPECT_EQ(port.state, IBV_PORT_DOWN);
  ASSERT_EQ(sv::query_port(a.context, 1, &port), 0);
  EXPECT_EQ(port.state, IBV_PORT_ACTIVE);
  ibv_async_event event{};
  ASSERT_EQ(sv::get_async_event(a.context, &event), 0);
  EXPECT_EQ(event.event_type, IBV_EVENT_PORT_ERR);
  EXPECT_EQ(event.element.port_num, 2);
  EXPECT_EQ(sv::get_async_event(a.context, &event), EAGAIN) << "one event for a change";
  ASSERT_EQ(b.post_recv(7, 4096, 64), 0);
  ASSERT_EQ(Send(1, a.sge(0, 64)).post(second.qa), 0);
  ASSERT_EQ(Send(2, a.sge(0, 64)).post(q1), 0);
  std::vector<ibv_wc> ended;
  std::uint32_t received = 0;
  const auto step = [&] {
    ibv_wc wc{};
    if (a.poll(wc)) ended.push_back(wc);
    received += b.poll(wc) ? 1 : 0;
    sv::control_device(a.context);
  };
  ASSERT_TRUE(until(step, [&] { return ended.size() == 2; }));
  for (const ibv_wc& wc : ended)
    EXPECT_EQ(wc.status, wc.wr_id == 1 ? IBV_WC_RETRY_EXC_ERR : IBV_WC_SUCCESS) << wc.wr_id;
  EXPECT_EQ(received, 1u);
  ASSERT_EQ(sv::set_port(a.context, 2, sv::LinkState::up), 0);
  while (sv::get_async_event(a.context, &event) == 0 && event.event_type != IBV_EVENT_PORT_ACTIVE) {
  }
  EXPECT_EQ(event.event_type, IBV_EVENT_PORT_ACTIVE);
}

// A GID of either port names the peer, whichever port a connection uses.
TEST(SoftverbsPorts, EitherGidNamesAPeerWhoseLinkIsCut) {
  for (const std::uint8_t named : kBothPorts) {
    SCOPED_TRACE(int{named});
    Ports t(1, 2);
    ASSERT_EQ(sv::set_link(t.a.context, gid_at(t.b, named), sv::LinkState::down), 0);
    ASSERT_EQ(t.b.post_recv(7, 4096, 64), 0);
    ASSERT_EQ(Send(1, t.a.sge(0, 64)).post(t.qa), 0);
    ibv_wc ended{};
    bool has_ended = false;
    std::uint32_t received = 0;
    const auto step = [&] {
      ibv_wc wc{};
      received += t.b.poll(wc) ? 1 : 0;
      has_ended = has_ended || t.a.poll(ended);
      sv::control_device(t.a.context);
    };
    ASSERT_TRUE(until(step, [&] { return has_ended; }));
    EXPECT_EQ(ended.status, IBV_WC_RETRY_EXC_ERR);
    EXPECT_EQ(received, 0u);
    // The other GID restores it.
    const auto other = static_cast<std::uint8_t>(3 - named);
    ASSERT_EQ(sv::set_link(t.a.context, gid_at(t.b, other), sv::LinkState::up), 0);
    EXPECT_FALSE(sv::is_down(*t.a.internals().faults, gid_at(t.b, 1)));
  }
}

TEST(SoftverbsPorts, EitherGidNamesAPeerThatHasAPlan) {
  for (const std::uint8_t named : kBothPorts) {
    SCOPED_TRACE(int{named});
    Ports t(1, 2);
    sv::FaultPlan plan;
    plan.delay_min = plan.delay_max = std::chrono::hours(1);
    ASSERT_TRUE(sv::set_faults(t.a.context, gid_at(t.b, named), plan));
    ASSERT_EQ(t.b.post_recv(7, 4096, 64), 0);
    ASSERT_EQ(Send(1, t.a.sge(0, 64)).post(t.qa), 0);
    ibv_wc wc{};
    for (int i = 0; i < 1000; ++i) {
      EXPECT_FALSE(t.a.poll(wc));
      EXPECT_FALSE(t.b.poll(wc)) << "the message is delayed";
    }
    // The other GID's plan replaces it.
    const auto other = static_cast<std::uint8_t>(3 - named);
    ASSERT_TRUE(sv::set_faults(t.a.context, gid_at(t.b, other), sv::FaultPlan{}));
    EXPECT_EQ(t.a.internals().faults->peer_plans.size(), 1u);
  }
}

}  // namespace
}  // namespace softverbs_test::second_port
