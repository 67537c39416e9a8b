// Direct datagrams: when work requests must be used instead; lanes that sleep, wrap and end; and
// lines that were not published.
#include <gtest/gtest.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/random.h"
#include "softverbs/direct_datagram_link.h"
#include "softverbs/peer_process.h"

namespace softverbs_test::direct {

constexpr std::uint64_t kFit = sv::kLaneLines - sv::kConnectedLines;

class SoftverbsDirectLane : public DirectPair {
 protected:
  /// Sends until a work request must be used.
  std::uint64_t send_while_it_goes() {
    std::uint64_t sent = 0;
    while (sent < 1000 && send(sent)) ++sent;
    return sent;
  }
  [[nodiscard]] const sv::Peer& peer_b() const { return *a_.node.internals().peers[0]; }
  /// Checks that a work request must be used and that nothing was sent.
  void refuses(ibv_qp* by, const Handle& to) {
    const std::uint64_t tail = static_cast<const sv::Ah*>(to.get())->peer->out.tail;
    EXPECT_FALSE(DirectEnd::send_by(by, to, b_.qp->qp_num, 999));
    EXPECT_EQ(static_cast<const sv::Ah*>(to.get())->peer->out.tail, tail);
    EXPECT_TRUE(peers_with_open_line(a_.node).empty());
  }
  /// Checks that a datagram can be sent, and arrives.
  void goes(std::uint64_t number) {
    ASSERT_TRUE(send(number));
    a_.publish();
    EXPECT_EQ(b_.steps(), numbers(number, number + 1));
  }
};

// ---- room ---------------------------------------------------------------------------------------

TEST_F(SoftverbsDirectLane, WithoutRoomTheVerbsWait) {
  ThirdEnd c(&now_, a_);
  ibv_qp* const second = ready_ud(a_.node, false);
  for (int round = 0; round < 3; ++round) {
    EXPECT_EQ(send_while_it_goes(), kFit);
    a_.publish();
    for (std::uint64_t i = 0; i < 10; ++i) ASSERT_EQ(a_.post(to_b_, b_.qp, kFit + i), 0);
    refuses(a_.qp, to_b_);
    refuses(second, to_b_);
    // Datagrams to others could be sent, but must not overtake those that wait in the queue.
    refuses(a_.qp, c.from_other);
    ASSERT_TRUE(DirectEnd::send_by(second, c.from_other, c.qp->qp_num, 5));
    a_.publish();
    EXPECT_EQ(c.steps(), numbers(5, 6));
    EXPECT_EQ(b_.steps(), numbers(0, kFit));
    refuses(a_.qp, to_b_);  // the room belongs to the waiting ones
    refuses(second, to_b_);
    now_ += 10'000;
    EXPECT_EQ(a_.steps(), Numbers{});
    EXPECT_EQ(a_.sends_completed, 10u);
    a_.sends_completed = 0;
    EXPECT_EQ(b_.steps(), numbers(kFit, kFit + 10));
    goes(7);
  }
  EXPECT_EQ(dropped(a_.node, sv::Drop::no_room), 0u);
}

TEST_F(SoftverbsDirectLane, AShortOneDoesNotPassALongOneThatWaits) {
  ibv_qp* const second = ready_ud(a_.node, false);
  goes(0);
  b_.forget_receives();  // drops the long ones there
  constexpr std::uint64_t kLongest = sv::kLaneData / sv::kDatagramBytes;
  for (std::uint64_t i = 0; i < kLongest + 1; ++i) {
    ASSERT_EQ(Datagram(i, a_.node.sge(0, sv::kDatagramBytes), to_b_, b_.qp->qp_num).post(a_.qp), 0);
  }
  ASSERT_EQ(peer_b().datagrams_waiting, 1u);
  ASSERT_LT(peer_b().out.tail, peer_b().out.head + kFit);  // a line would fit
  refuses(second, to_b_);
  (void)b_.steps();
  EXPECT_EQ(dropped(b_.node, sv::Drop::no_receive), kLongest);
  now_ += 10'000;
  (void)a_.steps();
  (void)b_.steps();
  EXPECT_EQ(dropped(b_.node, sv::Drop::no_receive), kLongest + 1);
  goes(1);
}

TEST_F(SoftverbsDirectLane, OnlyWhatTheVerbsDropIsLost) {
  EXPECT_EQ(send_while_it_goes(), kFit);
  a_.publish();
  for (std::uint64_t i = 0; i < 10; ++i) ASSERT_EQ(a_.post(to_b_, b_.qp, 500 + i), 0);
  (void)a_.steps();
  now_ += a_.node.internals().datagram_timeout;
  (void)a_.steps();
  EXPECT_EQ(dropped(a_.node, sv::Drop::no_room), 10u);
  EXPECT_EQ(a_.sends_completed, 10u);
  refuses(a_.qp, to_b_);
  EXPECT_EQ(dropped(a_.node, sv::Drop::no_room), 10u);
  EXPECT_EQ(b_.steps(), numbers(0, kFit));
  goes(3);
}

TEST_F(SoftverbsDirectLane, RoomComesBackWithoutAPoll) {
  // No operation waits for acknowledgements of direct datagrams, so they are checked when room is
  // short.
  std::uint64_t next = 0;
  for (int round = 0; round < 50; ++round) {
    const std::uint64_t first = next;
    while (send(next)) ++next;
    EXPECT_EQ(next - first, kFit);
    a_.publish();
    EXPECT_EQ(b_.steps(64), numbers(first, next));
  }
  EXPECT_EQ(a_.node.internals().pending.unacked, 0u);
}

TEST_F(SoftverbsDirectLane, ConnectedMessagesThatWaitGoFirst) {
  ibv_qp* const ra = a_.node.make_qp();
  ibv_qp* const rb = b_.node.make_qp();
  connect(a_.node, ra, b_.node, rb);
  for (std::uint64_t i = 0; i < 300; ++i) ASSERT_EQ(b_.node.post_recv(i, 0, 64), 0);
  send_all(0, 100);
  a_.publish();
  for (std::uint64_t i = 0; i < 300; ++i) ASSERT_EQ(Send(i, a_.node.sge(0, 8)).post(ra), 0);
  ASSERT_FALSE(peer_b().stalled.empty());
  refuses(a_.qp, to_b_);
  Numbers all;
  ASSERT_TRUE(until(
      [&] {
        for (const std::uint64_t n : b_.step()) all.push_back(n);
        (void)a_.step();
      },
      [&] { return all.size() == 100 && b_.others.size() == 300; }));
  EXPECT_EQ(all, numbers(0, 100));
  (void)a_.steps();
  EXPECT_EQ(a_.sends_completed, 300u);
  EXPECT_TRUE(peer_b().stalled.empty());
  goes(1);
}

// ---- acknowledgements ---------------------------------------------------------------------------

TEST_F(SoftverbsDirectLane, ItAcknowledgesWhatCameTheOtherWay) {
  ibv_qp* const ra = a_.node.make_qp();
  ibv_qp* const rb = b_.node.make_qp();
  connect(a_.node, ra, b_.node, rb);
  goes(0);  // the next ones take the fast path
  for (std::uint64_t i = 1; i <= 5; ++i) {
    ASSERT_EQ(a_.node.post_recv(i, 0, 64), 0);
    ASSERT_EQ(Send(i, b_.node.sge(0, 8)).post(rb), 0);
    b_.node.internals().ack_countdown = sv::kAckInterval;
    EXPECT_EQ(a_.step(), Numbers{});
    ASSERT_EQ(a_.others.size(), i);
    send_all(i, i + 1);
    a_.publish();
    EXPECT_EQ(b_.step(), numbers(i, i + 1));
    EXPECT_EQ(b_.step(), Numbers{});
    EXPECT_EQ(b_.sends_completed, i);  // long before the lane is checked
  }
}

TEST_F(SoftverbsDirectLane, ItDoesNotAcknowledgeWhatWasNotTaken) {
  ibv_qp* const ra = a_.node.make_qp();
  ibv_qp* const rb = b_.node.make_qp();
  connect(a_.node, ra, b_.node, rb);
  goes(0);
  for (std::uint64_t i = 1; i <= 5; ++i) {
    ASSERT_EQ(Send(i, b_.node.sge(0, 8)).post(rb), 0);
    b_.node.internals().ack_countdown = sv::kAckInterval;
    EXPECT_EQ(a_.step(), Numbers{});  // there is no receive for it
    refuses(a_.qp, to_b_);            // it would report how far the lane was consumed
    ASSERT_EQ(a_.post(to_b_, b_.qp, i), 0);
    EXPECT_EQ(b_.step(), numbers(i, i + 1));
    EXPECT_EQ(b_.steps(), Numbers{});
    EXPECT_EQ(b_.sends_completed, i - 1);
    ASSERT_EQ(a_.node.post_recv(i, 0, 64), 0);
    now_ += 1'000'000'000;
    EXPECT_EQ(b_.steps(), Numbers{});
    EXPECT_EQ(a_.steps(), Numbers{});
    ASSERT_EQ(a_.others.size(), i);
    EXPECT_EQ(b_.steps(), Numbers{});
    EXPECT_EQ(b_.sends_completed, i);
  }
  EXPECT_EQ(b_.by_receives, 0u);
  // A lane's length later, no line can be mistaken.
  for (std::uint64_t i = 0; i < sv::kLaneLines; ++i) {
    ASSERT_EQ(b_.post(to_a_, a_.qp, i), 0);
    if (i % 64 == 63) (void)a_.steps();
  }
  goes(6);
}

// ---- other reasons for work requests ------------------------------------------------------------

TEST_F(SoftverbsDirectLane, OnlyAQueuePairInRtsSends) {
  ibv_qp* const qp = make_ud(a_.node, false);
  refuses(qp, to_b_);
  ASSERT_EQ(ud_init(qp), 0);
  refuses(qp, to_b_);
  ASSERT_EQ(ud_rtr(qp), 0);
  refuses(qp, to_b_);
  ASSERT_EQ(ud_rts(qp), 0);
  const auto goes_by_it = [&](std::uint64_t number) {
    ASSERT_TRUE(DirectEnd::send_by(qp, to_b_, b_.qp->qp_num, number));
    sv::direct_datagrams().publish(qp);
    EXPECT_EQ(b_.steps(), numbers(number, number + 1));
  };
  goes_by_it(1);
  ibv_sge nowhere = a_.node.sge(0, 8);
  nowhere.lkey ^= 1;
  ASSERT_EQ(Datagram(1, nowhere, to_b_, b_.qp->qp_num).post(qp), 0);
  ASSERT_EQ(state_of(qp), IBV_QPS_SQE);
  refuses(qp, to_b_);
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTS;
  ASSERT_EQ(sv::modify_qp(qp, &attr, IBV_QP_STATE), 0);
  goes_by_it(2);
  a_.node.fail(qp);
  refuses(qp, to_b_);
  attr.qp_state = IBV_QPS_RESET;
  ASSERT_EQ(sv::modify_qp(qp, &attr, IBV_QP_STATE), 0);
  refuses(qp, to_b_);
  ASSERT_TRUE(ud_init(qp) == 0 && ud_rtr(qp) == 0 && ud_rts(qp) == 0);
  goes_by_it(3);
  goes(4);
}

TEST_F(SoftverbsDirectLane, FaultsBefallWhatTheVerbsSend) {
  goes(0);
  send_all(1, 3);  // posted before there was a plan
  sv::FaultPlan plan;
  plan.drop = 1;
  ASSERT_TRUE(sv::set_faults(a_.node.context, plan));
  EXPECT_FALSE(send(3));
  a_.publish();
  EXPECT_EQ(b_.steps(), numbers(1, 3));
  refuses(a_.qp, to_b_);
  ASSERT_EQ(a_.post(to_b_, b_.qp, 4), 0);
  EXPECT_EQ(a_.steps(), Numbers{});
  EXPECT_EQ(b_.steps(), Numbers{});
  EXPECT_EQ(sv::fault_statistics(a_.node.context).dropped, 1u);
  {
    const ThirdEnd c(&now_, a_);  // connected since then
    refuses(a_.qp, c.from_other);
  }
  sv::clear_faults(a_.node.context);
  goes(5);
  ASSERT_EQ(sv::set_link(a_.node.context, gid_of(b_.node), sv::LinkState::down), 0);
  refuses(a_.qp, to_b_);
  ASSERT_EQ(a_.post(to_b_, b_.qp, 6), 0);
  EXPECT_EQ(b_.steps(), Numbers{});
  sv::clear_faults(a_.node.context);
  goes(7);
}

TEST_F(SoftverbsDirectLane, AWayThatHasToBeToldIsLeftToTheVerbs) {
  goes(0);
  for (int what = 0; what < 3; ++what) {
    ibv_ah_attr attr = plain_way(b_.node);
    if (what == 0) attr.grh.traffic_class = 1;
    if (what == 1) attr.grh.flow_label = 1;
    if (what == 2) attr.grh.hop_limit = 64;
    const Handle way(a_.node, attr);
    refuses(a_.qp, way);
    ASSERT_EQ(a_.post(way, b_.qp, 1), 0);
    EXPECT_EQ(b_.steps(), numbers(1, 2));
  }
  goes(2);
}

TEST_F(SoftverbsDirectLane, BeforeThePeersLaneIsKnownTheVerbsSend) {
  DirectEnd c(&now_);
  const Handle way(c.node, plain_way(b_.node));
  EXPECT_FALSE(c.send(way, b_.qp, 1));
  ASSERT_EQ(c.post(way, b_.qp, 2), 0);
  sv::control_device(b_.node.context);
  EXPECT_FALSE(c.send(way, b_.qp, 3));  // it exists, and c has not checked
  EXPECT_EQ(b_.steps(), numbers(2, 3));
  sv::control_device(c.node.context);
  ASSERT_TRUE(c.send(way, b_.qp, 4));
  c.publish();
  EXPECT_EQ(b_.steps(), numbers(4, 5));
}

TEST_F(SoftverbsDirectLane, NothingGoesToOneThatHasClosed) {
  auto c = std::make_unique<ThirdEnd>(&now_, a_);
  const Handle way(a_.node, plain_way(c->node));
  const sv::Peer& peer = *static_cast<const sv::Ah*>(way.get())->peer;
  ASSERT_TRUE(a_.send(way, c->qp, 1));
  a_.publish();
  for (std::uint64_t i = 2; i < 4; ++i) ASSERT_TRUE(a_.send(way, c->qp, i));
  ASSERT_EQ(peers_with_held_line(a_.node), 1u);
  c.reset();
  ASSERT_TRUE(until(
      [&] {
        now_ += 10'000'000;
        sv::control_device(a_.node.context);
      },
      [&] { return peer.gone; }));
  EXPECT_FALSE(a_.send(way, b_.qp, 3));
  EXPECT_EQ(dropped(a_.node, sv::Drop::peer_gone), 0u);
  ASSERT_EQ(a_.post(way, b_.qp, 3), 0);
  EXPECT_EQ(dropped(a_.node, sv::Drop::peer_gone), 1u);
  a_.publish();
  refuses(a_.qp, way);
  goes(4);
}

TEST_F(SoftverbsDirectLane, NothingGoesToOneWhoseLaneWasTakenBack) {
  // It has closed, which is still unknown, although its lane was found released.
  auto c = std::make_unique<ThirdEnd>(&now_, a_);
  const ibv_ah_attr there = plain_way(c->node);
  ASSERT_TRUE(a_.send(c->from_other, c->qp, 1));
  a_.publish();
  sv::control_device(a_.node.context);
  const sv::Peer& peer = *static_cast<const sv::Ah*>(c->from_other.get())->peer;
  ASSERT_NE(peer.in, nullptr);
  c.reset();
  for (int i = 0; i < 4; ++i) sv::control_device(a_.node.context);
  ASSERT_EQ(a_.node.internals().peers.size(), 2u);
  ASSERT_FALSE(peer.gone);
  ASSERT_EQ(peer.in, nullptr);
  const Handle way(a_.node, there);
  ASSERT_EQ(static_cast<const sv::Ah*>(way.get())->peer, &peer);
  refuses(a_.qp, way);
  goes(2);
}

// ---- sleep --------------------------------------------------------------------------------------

TEST(SoftverbsDirectSleep, PublishingWakesALane) {
  constexpr std::size_t kPeers = 12;
  std::uint64_t now = 1'000'000'000;
  DirectEnd hub(&now);
  std::vector<std::unique_ptr<ThirdEnd>> others;
  for (std::size_t i = 0; i < kPeers; ++i) {
    others.push_back(std::make_unique<ThirdEnd>(&now, hub));
    ASSERT_TRUE(others[i]->send(others[i]->to_other, hub.qp, i));
    others[i]->publish();
  }
  EXPECT_EQ(hub.steps(64).size(), kPeers);
  const auto fall_asleep = [&hub] {
    for (std::uint32_t i = 0; i <= hub.node.internals().idle_rounds; ++i)
      sv::control_device(hub.node.context);
    ASSERT_EQ(hub.node.internals().awake_count, 2u);
  };
  std::vector<std::uint64_t> next(kPeers, 0);
  const auto expect_all_awake = [&](std::uint64_t sent) {
    for (const std::uint64_t number : hub.steps(64)) EXPECT_EQ(number % 100, next[number / 100]++);
    EXPECT_EQ(next, std::vector<std::uint64_t>(kPeers, sent));
    EXPECT_EQ(hub.node.internals().awake_count, kPeers);
  };
  const auto send_from_all = [&](std::uint64_t number) {
    for (std::size_t i = 0; i < kPeers; ++i)
      ASSERT_TRUE(others[i]->send(others[i]->to_other, hub.qp, 100 * i + number));
  };
  fall_asleep();
  send_from_all(0);
  expect_all_awake(1);  // a group
  fall_asleep();
  send_from_all(1);
  // Unpublished lines must not wake the receiver.
  EXPECT_EQ(hub.steps(), Numbers{});
  EXPECT_EQ(hub.node.internals().awake_count, 2u);
  send_from_all(2);
  expect_all_awake(3);  // the next group
  fall_asleep();
  send_from_all(3);
  for (auto& other : others) other->publish();
  expect_all_awake(4);
}

// ---- objects destroyed while a line is held -----------------------------------------------------

TEST_F(SoftverbsDirectLane, ItOutlivesQueuePairAndHandle) {
  for (const bool publishes : {true, false}) {
    ibv_qp* const qp = ready_ud(a_.node, false);
    {
      const Handle way(a_.node, plain_way(b_.node));
      for (std::uint64_t i = 0; i < 2; ++i)
        ASSERT_TRUE(DirectEnd::send_by(qp, way, b_.qp->qp_num, i));
    }
    a_.node.destroy(qp);
    EXPECT_EQ(b_.steps(), Numbers{0});
    if (publishes) {
      a_.publish();
    } else {
      ASSERT_EQ(a_.post(to_b_, b_.qp, 2), 0);
    }
    EXPECT_EQ(b_.steps(), numbers(1, publishes ? 2 : 3));
    goes(5);
  }
}

TEST_F(SoftverbsDirectLane, OneThatClosesPublishes) {
  auto c = std::make_unique<ThirdEnd>(&now_, b_);
  for (std::uint64_t i = 0; i < 2; ++i) ASSERT_TRUE(c->send(c->to_other, b_.qp, i));
  ASSERT_EQ(peers_with_held_line(c->node), 1u);
  EXPECT_EQ(b_.steps(), Numbers{0});
  c.reset();
  EXPECT_EQ(b_.steps(), Numbers{1});
}

TEST_F(SoftverbsDirectLane, APeerIsForgottenThatALineIsHeldFor) {
  for (const bool listed_first : {true, false}) {
    const std::size_t known = a_.node.internals().peers.size();
    auto c = std::make_unique<ThirdEnd>(&now_, a_);
    ThirdEnd d(&now_, a_);
    if (listed_first) send_all(0, 5);
    for (std::uint64_t i = 0; i < 2; ++i) ASSERT_TRUE(a_.send(c->from_other, c->qp, i));
    if (!listed_first) send_all(0, 5);
    for (std::uint64_t i = 0; i < 2; ++i) ASSERT_TRUE(a_.send(d.from_other, d.qp, i));
    ASSERT_EQ(peers_with_open_line(a_.node).size(), 3u);
    ASSERT_EQ(peers_with_held_line(a_.node), 3u);
    c.reset();
    ASSERT_TRUE(until(
        [&] {
          now_ += 10'000'000;
          sv::control_device(a_.node.context);
        },
        [&] { return a_.node.internals().peers.size() == known + 1; }));
    for (const sv::Peer* held : peers_with_open_line(a_.node)) EXPECT_FALSE(held->gone);
    a_.publish();
    EXPECT_TRUE(peers_with_open_line(a_.node).empty());
    EXPECT_EQ(b_.steps(), numbers(0, 5));
    EXPECT_EQ(d.steps(), numbers(0, 2));
    goes(4);
    ASSERT_TRUE(a_.send(d.from_other, d.qp, 5));
    a_.publish();
    EXPECT_EQ(d.steps(), numbers(5, 6));
  }
}

/// What a child must know of its parent, and the reverse.
struct DirectCard {
  ibv_gid gid;
  std::uint32_t qpn;
};

/// A child that publishes some datagrams and holds others.
void send_from_child(int socket, std::uint64_t published, std::uint64_t held) {
  DirectEnd own{NodeOptions{}};
  put(socket, DirectCard{gid_of(own.node), own.qp->qp_num});
  const auto card = get<DirectCard>(socket);
  ibv_ah_attr attr = way_to(card.gid);
  attr.grh.hop_limit = sv::kUsualHops;
  const Handle way(own.node, attr);
  ibv_qp there{};
  there.qp_num = card.qpn;
  const auto send = [&](std::uint64_t number) {
    bool sent = false;
    const auto step = [&] {
      sv::control_device(own.node.context);  // until the parent's lane is known
      sent = own.send(way, &there, number);
    };
    must(until(step, [&] { return sent; }), "a direct send");
  };
  for (std::uint64_t i = 0; i < published; ++i) send(i);
  own.publish();
  for (std::uint64_t i = 0; i < held; ++i) send(published + i);
  put(socket, 'd');
  (void)get<char>(socket);
}

TEST(SoftverbsDirectDeath, WhatWasHeldIsNeverSeenNorInTheWay) {
  DirectEnd node{NodeOptions{}};
  std::uint64_t now = 1'000'000'000;
  ThirdEnd other(&now, node);  // stays alive
  std::uint32_t lane = 0;
  struct Case {
    std::uint64_t published, held;
  };
  for (const Case each : {Case{0, 2}, Case{2, 5}, Case{4, 0}}) {
    SCOPED_TRACE(each.published);
    Child child([&](int socket) { send_from_child(socket, each.published, each.held); });
    const auto card = get<DirectCard>(child.socket());
    put(child.socket(), DirectCard{gid_of(node.node), node.qp->qp_num});
    Numbers seen;
    const auto step = [&] {
      sv::control_device(node.node.context);
      for (const std::uint64_t number : node.step()) seen.push_back(number);
    };
    ASSERT_TRUE(until(step, [&] { return hung_up(child.socket()); }));
    (void)get<char>(child.socket());
    ASSERT_EQ(node.node.internals().peers.size(), 2u);
    const std::uint32_t index = node.node.internals().peers.back()->in->index;
    if (lane == 0) lane = index;
    EXPECT_EQ(index, lane);  // the earlier child left it unchanged
    {
      ibv_ah_attr attr = way_to(card.gid);
      attr.grh.hop_limit = sv::kUsualHops;
      const Handle way(node.node, attr);
      ibv_qp there{};
      there.qp_num = card.qpn;
      // We hold a line, too: the second.
      for (std::uint64_t i = 0; i < 2; ++i) ASSERT_TRUE(node.send(way, &there, i));
    }
    child.kill_and_reap();
    ASSERT_TRUE(until(step, [&] { return node.node.internals().peers.size() == 1; }));
    EXPECT_EQ(seen, numbers(0, each.published + in_whole_groups(each.held)));
    EXPECT_EQ(node.node.internals().lanes[lane], nullptr);
    node.publish();
    ASSERT_TRUE(other.send(other.to_other, node.qp, 8));
    ASSERT_TRUE(node.send(other.from_other, other.qp, 9));
    other.publish();
    node.publish();
    EXPECT_EQ(node.steps(), numbers(8, 9));
    EXPECT_EQ(other.steps(), numbers(9, 10));
  }
}

// ---- the lane's array wraps ---------------------------------------------------------------------

/// One direction of a random exchange.
struct Stream {
  DirectEnd& from;
  DirectEnd& to;
  const Handle& way;
  ibv_qp* message_from;
  ibv_qp* message_to;
  std::uint64_t datagrams_sent = 0, datagrams_seen = 0;
  std::uint64_t messages_sent = 0, messages_seen = 0;
  std::uint64_t direct = 0, by_verbs = 0;

  static constexpr std::uint32_t kSlot = 1024;
  static constexpr std::size_t kIn = 1u << 20;
  static constexpr std::uint64_t kReceives = 400;

  static std::uint32_t message_length(std::uint64_t number) {
    return static_cast<std::uint32_t>(8 + number * 31 % (number % 9 == 0 ? 800 : 60));
  }
  void post_receives() {
    for (std::uint64_t i = 0; i < kReceives; ++i)
      must(to.node.post_recv(i, kIn + i * kSlot, kSlot) == 0, "post_recv");
  }
  void send_datagram(bool direct_first) {
    if (direct_first && from.send(way, to.qp, datagrams_sent)) {
      ++direct;
    } else {
      must(from.post(way, to.qp, datagrams_sent) == 0, "post");
      ++by_verbs;
    }
    ++datagrams_sent;
  }
  void send_message() {
    const std::uint32_t length = message_length(messages_sent);
    const std::size_t at = kSlot * (1 + messages_sent % 512);
    fill(from.node.bytes(at, length), messages_sent);
    must(Send(messages_sent, from.node.sge(at, length)).post(message_from) == 0, "send");
    ++messages_sent;
  }
  void look(int entries) {
    for (const std::uint64_t number : to.step(entries)) ASSERT_EQ(number, datagrams_seen++);
    ASSERT_EQ(dropped(from.node, sv::Drop::no_room), 0u);
    for (const ibv_wc& wc : to.others) {
      const std::uint32_t length = message_length(messages_seen);
      ASSERT_EQ(wc.qp_num, message_to->qp_num);
      ASSERT_EQ(wc.byte_len, length);
      ASSERT_TRUE(holds(to.node.bytes(kIn + wc.wr_id * kSlot, length), messages_seen++));
      must(to.node.post_recv(wc.wr_id, kIn + wc.wr_id * kSlot, kSlot) == 0, "post_recv");
    }
    to.others.clear();
  }
  [[nodiscard]] bool over() const {
    return datagrams_seen == datagrams_sent && messages_seen == messages_sent;
  }
};

TEST_F(SoftverbsDirectLane, EverythingArrivesInOrderWhileTheLaneWraps) {
  constexpr std::uint64_t kDatagrams = 30'000;  // more than a hundred laps
  ibv_qp* const ra = a_.node.make_qp();
  ibv_qp* const rb = b_.node.make_qp();
  connect(a_.node, ra, b_.node, rb);
  Stream there{a_, b_, to_b_, ra, rb}, back{b_, a_, to_a_, rb, ra};
  there.post_receives();
  back.post_receives();
  spinwire::base::Random random(11);
  const auto act = [&](Stream& s) {
    // No more than the receiver's posted receives and the send queues hold.
    for (std::uint64_t n = random.below(random.below(4) == 0 ? 90 : 12); n != 0; --n) {
      if (s.datagrams_sent - s.datagrams_seen < 400 && s.datagrams_sent < kDatagrams)
        s.send_datagram(random.below(12) != 0);
      if (random.below(5) == 0 && s.messages_sent - s.messages_seen < 200) s.send_message();
    }
    if (random.below(6) != 0) s.from.publish();
  };
  const auto step = [&] {
    act(there);
    if (random.below(3) == 0) act(back);
    now_ += 300;
    if (random.below(4) != 0) there.look(1 + static_cast<int>(random.below(40)));
    if (random.below(3) != 0) back.look(1 + static_cast<int>(random.below(40)));
  };
  ASSERT_TRUE(until(step, [&] {
    return HasFatalFailure() || (there.datagrams_sent == kDatagrams && back.messages_sent > 1000);
  }));
  const auto settle = [&] {
    a_.publish();
    b_.publish();
    now_ += 300;
    there.look(16);
    back.look(16);
  };
  ASSERT_TRUE(until(settle, [&] { return HasFatalFailure() || (there.over() && back.over()); }));
  for (int i = 0; i < 4 * kLook; ++i) settle();
  for (const Stream* s : {&there, &back}) {
    EXPECT_TRUE(s->over());
    EXPECT_GT(s->direct, 400u);
    EXPECT_GT(s->by_verbs, 100u);
    EXPECT_GT(s->messages_sent, 1000u);
    EXPECT_EQ(s->from.sends_completed, s->by_verbs + s->messages_sent);
    for (std::size_t reason = 0; reason < static_cast<std::size_t>(sv::Drop::count); ++reason)
      EXPECT_EQ(dropped(s->from.node, static_cast<sv::Drop>(reason)), 0u) << reason;
    EXPECT_TRUE(peers_with_open_line(s->from.node).empty());
  }
}

}  // namespace softverbs_test::direct
