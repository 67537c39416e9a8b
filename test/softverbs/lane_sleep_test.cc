// Sleeping lanes, and closing contexts of this process.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "softverbs/rc_link.h"

namespace softverbs_test::liveness {

/// One node connected to several others.
struct Star {
  Node hub;
  std::vector<std::unique_ptr<Node>> others;
  std::vector<ibv_qp*> out;  ///< of others[i], to the hub
  std::vector<ibv_qp*> in;   ///< of the hub, from others[i]

  explicit Star(std::size_t size, const NodeOptions& options = small()) : hub(options) {
    for (std::size_t i = 0; i < size; ++i) {
      others.push_back(std::make_unique<Node>(options));
      out.push_back(others[i]->make_qp());
      in.push_back(hub.make_qp());
      connect(*others[i], out[i], hub, in[i]);
    }
  }
  static NodeOptions small() {
    NodeOptions options;
    options.memory = 1u << 16;
    return options;
  }
  [[nodiscard]] sv::Context& context() const { return hub.internals(); }
  void control(int times) const {
    while (times-- > 0) sv::control_device(hub.context);
  }
  /// Sends a message from others[i]. Returns whether it arrives by polls alone.
  bool message(std::size_t i, std::uint64_t id) {
    if (hub.post_recv(id, 0, 64) != 0) return false;
    if (Send(id, others[i]->sge(0, 8)).post(out[i]) != 0) return false;
    ibv_wc wc{};
    for (int polls = 0; polls < 3; ++polls) {
      if (!hub.poll(wc)) continue;
      const bool good = wc.wr_id == id && wc.qp_num == in[i]->qp_num && wc.status == IBV_WC_SUCCESS;
      for (int looks = 0; looks < kLook; ++looks) {
        if (others[i]->poll(wc)) return good && wc.status == IBV_WC_SUCCESS;
      }
    }
    return false;
  }
};

TEST(SoftverbsSleep, IdleLanesSleepAndWake) {
  Star star(5);
  for (std::size_t i = 0; i < 5; ++i) ASSERT_TRUE(star.message(i, i));
  EXPECT_EQ(star.context().awake_count, 5u);
  star.control(static_cast<int>(star.context().idle_rounds) + 1);
  EXPECT_EQ(star.context().awake_count, 2u) << "the last ones stay awake";
  for (std::uint64_t i = 0; i < 5; ++i) ASSERT_TRUE(star.message(i, i));
  EXPECT_EQ(star.context().awake_count, 5u);
}

TEST(SoftverbsSleep, BusyLanesStayAwake) {
  Star star(5);
  for (std::uint64_t round = 0; round < 200; ++round) {
    for (std::size_t i = 0; i < 4; ++i) ASSERT_TRUE(star.message(i, i));
    star.control(1);
  }
  EXPECT_EQ(star.context().awake_count, 4u);
  EXPECT_EQ(star.context().lanes_slept, 1u);
}

TEST(SoftverbsSleep, ManyTimes) {
  Star star(6);
  star.context().idle_rounds = 1;
  for (std::uint64_t round = 0; round < 3000; ++round) {
    star.control(3);
    ASSERT_EQ(star.context().awake_count, 2u);
    ASSERT_TRUE(star.message(round % 6, round)) << round;
  }
  EXPECT_GT(star.context().lanes_slept, 1000u);
}

TEST(SoftverbsSleep, UnreadPacketKeepsTheLaneAwake) {
  Star star(5);
  for (std::size_t i = 0; i < 5; ++i) ASSERT_TRUE(star.message(i, i));
  // All send, and nothing is read while the control steps pass.
  for (std::size_t i = 0; i < 5; ++i) {
    ASSERT_EQ(star.hub.post_recv(i, 0, 64), 0);
    ASSERT_EQ(Send(i, star.others[i]->sge(0, 8)).post(star.out[i]), 0);
  }
  star.control(200);
  EXPECT_EQ(star.context().awake_count, 5u);
  std::vector<ibv_wc> wc(16);
  EXPECT_EQ(ibv_poll_cq(star.hub.cq, 16, wc.data()), 5);
}

TEST(SoftverbsSleep, SenderThatStoppedBeforeItRang) {
  // Its message is in a sleeping lane, and no doorbell reports it. When the sender is gone, the
  // lane is still read to its end and reclaimed.
  Star star(5);
  for (std::size_t i = 0; i < 5; ++i) ASSERT_TRUE(star.message(i, i));
  star.control(static_cast<int>(star.context().idle_rounds) + 1);
  std::size_t asleep = 0;
  while (star.context().peers[asleep]->in->awake) ++asleep;
  const std::uint32_t index = star.context().peers[asleep]->in->index;
  ASSERT_EQ(star.hub.post_recv(77, 0, 64), 0);
  star.context().segment->lanes[index].control.asleep.store(0);  // so that it does not ring
  ASSERT_EQ(Send(77, star.others[asleep]->sge(0, 8)).post(star.out[asleep]), 0);
  star.context().segment->lanes[index].control.asleep.store(1);
  ibv_wc wc{};
  ASSERT_FALSE(star.hub.poll(wc));
  star.others[asleep].reset();
  EXPECT_TRUE(until(
      [&] {
        star.control(1);
        if (!star.hub.poll(wc)) return;
        EXPECT_EQ(wc.wr_id, 77u);
        star.hub.destroy(star.in[asleep]);
      },
      [&] { return star.context().peers.size() == 4; }));
  EXPECT_EQ(wc.wr_id, 77u);
  EXPECT_EQ(star.context().lanes[index], nullptr);
}

TEST(SoftverbsClose, NoticedAndForgotten) {
  Star star(3);
  for (std::size_t i = 0; i < 3; ++i) ASSERT_TRUE(star.message(i, i));
  // The hub has outstanding work to each; one of them closes.
  for (std::size_t i = 0; i < 3; ++i) {
    ASSERT_EQ(Send(10 + i, star.hub.sge(0, 8)).post(star.in[i]), 0);
    ASSERT_EQ(Send(20 + i, star.hub.sge(0, 8)).post(star.in[i]), 0);
  }
  const std::uint32_t lane = star.context().peers[1]->in->index;
  star.others[1].reset();
  std::vector<ibv_wc> done;
  const auto step = [&] {
    star.control(1);
    ibv_wc wc{};
    if (star.hub.poll(wc)) done.push_back(wc);
  };
  ASSERT_TRUE(until(step, [&] { return done.size() == 2; }));
  EXPECT_EQ(done[0].wr_id, 11u);
  EXPECT_EQ(done[0].status, IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(done[1].wr_id, 21u);
  EXPECT_EQ(done[1].status, IBV_WC_WR_FLUSH_ERR);
  // Kept while a queue pair is connected to it.
  for (int i = 0; i < 100; ++i) step();
  EXPECT_EQ(star.context().peers.size(), 3u);
  EXPECT_EQ(done.size(), 2u);
  star.hub.destroy(star.in[1]);
  ASSERT_TRUE(until(step, [&] { return star.context().peers.size() == 2; }));
  EXPECT_EQ(star.context().lanes[lane], nullptr);
  EXPECT_EQ(sv::lane_state(star.context().segment->directory[lane].state.load()),
            sv::LaneState::free);
  EXPECT_TRUE(star.message(0, 30));
  EXPECT_TRUE(star.message(2, 31));
  // The lane serves the next context.
  Node next(Star::small());
  ibv_qp* theirs = next.make_qp();
  ibv_qp* ours = star.hub.make_qp();
  connect(next, theirs, star.hub, ours);
  EXPECT_EQ(next.internals().peers[0]->out.index, lane);
  ASSERT_EQ(star.hub.post_recv(1, 0, 64), 0);
  ASSERT_EQ(Send(1, next.sge(0, 8)).post(theirs), 0);
  ASSERT_TRUE(until(step, [&] { return done.size() == 3; }));
  EXPECT_EQ(done[2].qp_num, ours->qp_num);
}

TEST(SoftverbsClose, WhatWasTakenBeforeIsNoError) {
  auto link = std::make_unique<Link>();
  ASSERT_EQ(link->b.post_recv(1, 0, 64), 0);
  ASSERT_EQ(Send(1, link->a.sge(0, 8)).post(link->qa), 0);
  ASSERT_EQ(Send(2, link->a.sge(0, 8), IBV_WR_RDMA_WRITE)
                .to(link->b.address(0), link->b.mr->rkey)
                .post(link->qa),
            0);
  link->poll_b();
  // b has taken the message; a has not checked for the acknowledgement when b closes.
  link->b.internals().segment->closed.store(1);
  sv::Context& a = link->a.internals();
  ASSERT_TRUE(until([&] { sv::control_device(&a.verbs); }, [&] { return a.peers[0]->gone; }));
  link->poll_a();
  ASSERT_EQ(link->at_a.size(), 2u);
  EXPECT_EQ(link->at_a[0].status, IBV_WC_SUCCESS);
  EXPECT_EQ(link->at_a[1].status, IBV_WC_RETRY_EXC_ERR);
}

TEST(SoftverbsClose, WhatASenderLeftBehindIsDelivered) {
  Star star(1);
  ASSERT_EQ(star.hub.post_recv(5, 0, 64), 0);
  ASSERT_EQ(Send(1, star.others[0]->sge(0, 8)).post(star.out[0]), 0);
  star.others[0].reset();
  star.control(3);
  ibv_wc wc{};
  ASSERT_TRUE(star.hub.poll(wc));
  EXPECT_EQ(wc.wr_id, 5u);
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
}

/// Sends from a node that is gone before the hub has seen its lane. Returns whether the message
/// arrives. `rings`: whether the doorbell reports it.
bool arrives_from_an_unseen_lane(bool rings) {
  Node hub(Star::small());
  auto other = std::make_unique<Node>(Star::small());
  ibv_qp* in = hub.make_qp();
  ibv_qp* out = other->make_qp();
  must(hub.init(in) == 0 && other->init(out) == 0, "INIT");
  must(hub.rtr(in, other->endpoint(out)) == 0 && other->rtr(out, hub.endpoint(in)) == 0, "RTR");
  must(hub.rts(in) == 0 && other->rts(out) == 0, "RTS");
  must(hub.internals().peers[0]->in == nullptr, "the lane came after the hub had looked");
  must(hub.post_recv(5, 0, 64) == 0 && Send(1, other->sge(0, 8)).post(out) == 0, "post");
  other.reset();
  if (!rings) {
    hub.internals().segment->doorbell.store(0);
    for (auto& bells : hub.internals().segment->doorbells) bells.store(0);
  }
  ibv_wc wc{};
  for (int i = 0; i < 4 && wc.wr_id == 0; ++i) {
    sv::control_device(hub.context);
    (void)hub.poll(wc);
  }
  return wc.wr_id == 5 && wc.status == IBV_WC_SUCCESS;
}

TEST(SoftverbsClose, WhatASenderLeftInANewLaneIsDelivered) {
  EXPECT_TRUE(arrives_from_an_unseen_lane(true));
  EXPECT_TRUE(arrives_from_an_unseen_lane(false));
}

TEST(SoftverbsClose, PostingToOneThatIsGone) {
  Star star(1);
  star.others[0].reset();
  ASSERT_TRUE(until([&] { star.control(1); }, [&] { return star.context().peers[0]->gone; }));
  ASSERT_EQ(Send(1, star.hub.sge(0, 8)).post(star.in[0]), 0);
  ibv_wc wc{};
  ASSERT_TRUE(star.hub.poll(wc));
  EXPECT_EQ(wc.status, IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(state_of(star.in[0]), IBV_QPS_ERR);
}

TEST(SoftverbsClose, WhatItSentBeforeIsTakenFirst) {
  Star star(1);
  ASSERT_EQ(star.hub.post_recv(5, 0, 64), 0);
  ASSERT_EQ(Send(1, star.hub.sge(0, 8)).post(star.in[0]), 0);  // never answered
  ASSERT_EQ(Send(2, star.others[0]->sge(0, 8)).post(star.out[0]), 0);
  star.others[0].reset();
  star.control(100);
  ibv_wc wc{};
  ASSERT_TRUE(star.hub.poll(wc));
  EXPECT_EQ(wc.wr_id, 5u);
  EXPECT_EQ(wc.status, IBV_WC_SUCCESS);
  const auto step = [&] {
    star.control(1);
    (void)star.hub.poll(wc);
  };
  ASSERT_TRUE(until(step, [&] { return wc.wr_id == 1; }));
  EXPECT_EQ(wc.status, IBV_WC_RETRY_EXC_ERR);
}

/// Two ends whose users do not drive the device: their polls do.
struct Unaware {
  static constexpr std::uint64_t kPeriod = 4096u << 4;  ///< of a retry, in ns
  static constexpr std::uint64_t kRetries = 3;
  std::uint64_t now = 1'000'000'000;
  Link link{options(&now), ConnectOptions{.timeout = 4, .retries = kRetries}};

  static NodeOptions options(const std::uint64_t* clock) {
    NodeOptions o;
    o.clock = spinwire::Clock::manual(clock);
    o.driving = sv::Driving::by_poll;
    return o;
  }
  void pass(std::uint64_t ns) {
    now += ns;
    for (int i = 0; i < 3000; ++i) link.poll_a();  // includes every control step
  }
};

TEST(SoftverbsClose, UnawareProgramsAreToldAfterTheRetries) {
  Unaware u;
  ASSERT_EQ(u.link.b.post_recv(1, 0, 64), 0);
  ASSERT_EQ(u.link.b.post_recv(2, 64, 64), 0);
  ASSERT_EQ(Send(1, u.link.a.sge(0, 8)).post(u.link.qa), 0);
  u.link.poll_b();
  ASSERT_EQ(
      Send(2, u.link.a.sge(0, 8), IBV_WR_SEND, IBV_SEND_SIGNALED | IBV_SEND_INLINE).post(u.link.qa),
      0);
  u.link.b.internals().segment->closed.store(1);
  u.pass(2'000'000);  // long enough to notice it
  ASSERT_TRUE(u.link.a.internals().peers[0]->gone);
  ASSERT_EQ(u.link.at_a.size(), 1u);  // taken earlier, so no error
  EXPECT_EQ(u.link.at_a[0].status, IBV_WC_SUCCESS);
  for (std::uint64_t i = 1; i < Unaware::kRetries; ++i) u.pass(Unaware::kPeriod);
  EXPECT_EQ(u.link.at_a.size(), 1u);
  EXPECT_EQ(state_of(u.link.qa), IBV_QPS_RTS);
  u.pass(Unaware::kPeriod);
  ASSERT_EQ(u.link.at_a.size(), 2u);
  EXPECT_EQ(u.link.at_a[1].wr_id, 2u);
  EXPECT_EQ(u.link.at_a[1].status, IBV_WC_RETRY_EXC_ERR);
  EXPECT_EQ(state_of(u.link.qa), IBV_QPS_ERR);
}

TEST(SoftverbsClose, PostedToOneThatIsGoneTooIsTriedAgain) {
  Unaware u;
  u.link.b.internals().segment->closed.store(1);
  u.pass(2'000'000);
  ASSERT_TRUE(u.link.a.internals().peers[0]->gone);
  ASSERT_EQ(Send(1, u.link.a.sge(0, 8), IBV_WR_RDMA_WRITE)
                .to(u.link.b.address(0), u.link.b.mr->rkey)
                .post(u.link.qa),
            0);
  for (std::uint64_t i = 1; i < Unaware::kRetries; ++i) u.pass(Unaware::kPeriod);
  EXPECT_TRUE(u.link.at_a.empty());
  u.pass(Unaware::kPeriod);
  ASSERT_EQ(u.link.at_a.size(), 1u);
  EXPECT_EQ(u.link.at_a[0].status, IBV_WC_RETRY_EXC_ERR);
}

TEST(SoftverbsClose, AMessageLeftInASendersMemoryGoesWithItsQueuePair) {
  Link link;
  ASSERT_EQ(link.b.post_recv(1, 0, 4096), 0);
  ASSERT_EQ(Send(1, link.b.sge(8192, 64)).post(link.qb), 0);  // ours, not answered yet
  ASSERT_EQ(link.a.post_recv(2, 8192, 64), 0);
  ASSERT_EQ(Send(3, link.a.sge(0, 4096)).post(link.qa), 0);  // pulled by its receiver
  link.poll_a();
  link.a.destroy(link.qa);
  link.steps(3);
  ASSERT_EQ(link.at_b.size(), 1u);
  EXPECT_EQ(link.at_b[0].wr_id, 1u);
  EXPECT_EQ(link.at_b[0].opcode, IBV_WC_SEND);
  EXPECT_EQ(link.at_b[0].status, IBV_WC_SUCCESS);
  EXPECT_EQ(state_of(link.qb), IBV_QPS_RTS);
  EXPECT_EQ(next_event(link.b).type, -1);
  // The receive was not used.
  ibv_qp* again = link.a.make_qp();
  ibv_qp* theirs = link.b.make_qp();
  connect(link.a, again, link.b, theirs);
  fill(link.a.bytes(0, 4096), 9);
  ASSERT_EQ(Send(4, link.a.sge(0, 4096)).post(again), 0);
  ASSERT_TRUE(link.run(0, 2));
  EXPECT_EQ(link.at_b[1].wr_id, 1u);
  EXPECT_TRUE(holds(link.b.bytes(0, 4096), 9));
}

TEST(SoftverbsClose, SenderThatWasGoneBeforeItWasMet) {
  // A context connects and closes before the hub checks its lanes at all.
  Node hub(Star::small());
  ibv_qp* qp = hub.make_qp();
  {
    Node other(Star::small());
    ibv_qp* theirs = other.make_qp();
    ASSERT_EQ(other.init(theirs), 0);
    ASSERT_EQ(other.rtr(theirs, hub.endpoint(qp)), 0);
  }
  sv::Context& c = hub.internals();
  ASSERT_EQ(c.segment->lanes_used.load(), 1u);
  for (int i = 0; i < 4; ++i) sv::control_device(hub.context);
  EXPECT_EQ(sv::lane_state(c.segment->directory[0].state.load()), sv::LaneState::free);
  EXPECT_TRUE(c.peers.empty());
  EXPECT_EQ(c.awake_count, 0u);
}

TEST(SoftverbsClose, DrivenByPollsAlone) {
  // A context whose user never calls control(): its polls do.
  auto opened = sv::open_device(spinwire::Clock::real(), sv::Driving::by_poll);
  ASSERT_TRUE(opened.has_value());
  sv::Context& c = sv::context_of(*opened);
  ibv_cq* cq = sv::create_cq(*opened, 16);
  ibv_pd* pd = sv::alloc_pd(*opened);
  {
    Node other(Star::small());
    ibv_qp* theirs = other.make_qp();
    ASSERT_EQ(other.init(theirs), 0);
    Endpoint self{c.segment->gid, 99, 0};
    ASSERT_EQ(other.rtr(theirs, self), 0);
    ibv_wc wc{};
    EXPECT_TRUE(until([&] { (void)ibv_poll_cq(cq, 1, &wc); }, [&] { return c.awake_count == 1; }));
    EXPECT_EQ(c.peers.size(), 1u);
    other.destroy(theirs);
  }
  ibv_wc wc{};
  EXPECT_TRUE(until([&] { (void)ibv_poll_cq(cq, 1, &wc); }, [&] { return c.peers.empty(); }));
  EXPECT_EQ(sv::destroy_cq(cq), 0);
  EXPECT_EQ(sv::dealloc_pd(pd), 0);
  EXPECT_EQ(sv::close_device(*opened), 0);
}

}  // namespace softverbs_test::liveness
