// A hostile peer that writes its messages into the victim's memory by itself.
#include <limits>

#include "agent/hostile_peer.h"
#include "base/internals.h"
#include "base/random.h"
#include "softverbs/memory/remote_access.h"
#include "softverbs/rc/rc_direct.h"

namespace hostile_direct_test {
namespace {

using namespace hostile_peer;  // NOLINT: a test's helpers
namespace sv = spinwire::softverbs;

class HostileDirect : public HostilePeer {
 protected:
  Attacked t;

  void SetUp() override {
    HostilePeer::SetUp();
    if (!sends_directly()) GTEST_SKIP() << kSoftverbsOnly << "messages without work requests";
  }
  sv::Qp& qp() { return t.peer.queue_pair(); }
  sv::OutLane& out() { return qp().peer->out; }
  /// Writes a message as the device does, of any length.
  bool send(std::uint64_t header, std::size_t payload) {
    static const Bytes bytes(65536);
    const sv::Sent sent = sv::direct_messages().send(
        &qp(), header, bytes.data(), static_cast<std::uint32_t>(payload), sv::kNoCompletion);
    sv::direct_messages().publish(qp().context);
    return sent != sv::Sent::refused;
  }
  static std::uint64_t header_of(MessageKind kind, std::uint32_t length) {
    return wire::encode({kind, 0, 0, length});
  }
  static std::uint64_t data_header(std::size_t length) {
    return header_of(MessageKind::data, static_cast<std::uint32_t>(length));
  }
  /// Writes a line with the word of the next message.
  void forge(std::uint16_t length, std::uint32_t offset) {
    sv::OutLane& o = out();
    sv::Line& line = o.lines[o.tail % sv::kLaneLines];
    std::memcpy(line.payload + sv::kOffsetAt, &offset, sizeof offset);
    line.set_trailer(length, o.ack_on_top);
    line.word.store(sv::lane_mark(o.tail) << 56 | sv::packet_kind(sv::Packet::send, 0) << 48 |
                        std::uint64_t{qp().next_psn} << 24 | qp().dest_qpn,
                    std::memory_order_release);
    ++o.tail;
    qp().next_psn = sv::psn_add(qp().next_psn, 1);
  }
  /// The device has refused a line, which ends the victim's connection; the other goes on, and
  /// nothing is left.
  void expect_ended() {
    ASSERT_TRUE(t.until([&] { return !t.node.closed.empty(); }));
    EXPECT_EQ(t.node.closed.size(), 1u);
    EXPECT_EQ(t.node.closed[0].status, Status::remote_error) << t.node.closed[0].message();
    EXPECT_EQ(t.victim.state(), ConnectionState::closed);
    t.peer.close();
    ASSERT_NO_FATAL_FAILURE(t.talk());
    EXPECT_TRUE(t.honest.server.ready());
    const auto audit = t.node.engine.audit();
    EXPECT_TRUE(audit) << audit.error().message();
    EXPECT_EQ(t.node.engine.stats().connections, 1u);
  }
};

TEST_F(HostileDirect, LengthsAndOffsetsOutsideTheData) {
  const struct {
    std::uint16_t length;
    std::uint32_t offset;
  } cases[] = {{100, sv::kWideLaneData - 99},
               {100, sv::kWideLaneData},
               {100, std::numeric_limits<std::uint32_t>::max()},
               {49, sv::kWideLaneData - 48},
               {0xffff, sv::kWideLaneData - 0xfffe}};
  for (const auto& one : cases) {
    SCOPED_TRACE(one.offset);
    t.begin();
    ASSERT_TRUE(send(data_header(8), 8));
    ASSERT_TRUE(t.until([&] { return t.delivered == 1; }));
    forge(one.length, one.offset);
    ASSERT_NO_FATAL_FAILURE(expect_ended());
    EXPECT_EQ(t.delivered, 1u);
  }
  t.finish();
}

TEST_F(HostileDirect, LongerThanAgreed) {
  const std::size_t eager = t.node.engine.config().connections.eager_bytes;
  t.begin();
  ASSERT_TRUE(send(data_header(eager), eager));
  ASSERT_TRUE(t.until([&] { return t.delivered == 1; }));
  ASSERT_TRUE(send(data_header(eager + 1), eager + 1));
  t.expect_refused(kNoHeader);
  for (const std::size_t size : {eager + 1, std::size_t{16000}, std::size_t{65527}}) {
    for (const MessageKind kind : {MessageKind::data, MessageKind::goodbye,
                                   MessageKind::rendezvous_offer, MessageKind::lease_request}) {
      t.begin();
      ASSERT_TRUE(
          t.until([&] { return send(header_of(kind, static_cast<std::uint32_t>(size)), size); }));
      t.expect_refused(kNoHeader);
      EXPECT_EQ(t.delivered, 0u);
    }
  }
  t.finish();
}

TEST_F(HostileDirect, WithoutCredit) {
  t.begin();
  std::uint64_t sent = 0;
  while (send(data_header(8), 8)) ++sent;
  EXPECT_GT(sent, 100u);
  t.expect_ended(Status::protocol, kNoHeader, 1);
  EXPECT_EQ(t.delivered, 1u);  // the first receive is granted in the handshake
  t.finish();
}

TEST_F(HostileDirect, AHeaderThatChangesAfterThePoll) {
  const std::uint64_t changed[] = {data_header(9),
                                   data_header(0xffffffff),
                                   header_of(MessageKind::goodbye, 0),
                                   header_of(MessageKind::credit_return, 0x8000),
                                   header_of(MessageKind::rendezvous_offer, 24),
                                   header_of(MessageKind::lease_grant, 40),
                                   0,
                                   ~std::uint64_t{0}};
  for (const std::uint64_t header : changed) {
    SCOPED_TRACE(header);
    t.begin();
    // More credit first.
    ASSERT_TRUE(send(wire::encode({MessageKind::data, wire::message_flag::kWantCredit, 0, 8}), 8));
    ASSERT_TRUE(t.until([&] { return t.delivered == 1 && t.peer.granted() > 4; }));
    sv::Line* line = nullptr;
    auto before = std::exchange(t.node.on_message, [&](Connection, Message& m) {
      ++t.delivered;
      EXPECT_EQ(m.size(), 8u);
      if (line != nullptr)
        std::memcpy(std::exchange(line, nullptr)->payload, &header, sizeof header);
    });
    ASSERT_TRUE(send(data_header(8), 8));
    line = &out().lines[out().tail % sv::kLaneLines];
    ASSERT_TRUE(send(data_header(8), 8));
    ASSERT_TRUE(t.until([&] { return line == nullptr; }));
    t.node.on_message = before;
    ASSERT_TRUE(t.until([&] { return !t.node.closed.empty(); }));
    EXPECT_EQ(t.node.closed[0].status, Status::protocol) << t.node.closed[0].message();
    EXPECT_EQ(t.delivered, 2u);
    t.peer.close();
    ASSERT_NO_FATAL_FAILURE(t.talk());
    const auto audit = t.node.engine.audit();
    EXPECT_TRUE(audit) << audit.error().message();
  }
  t.finish();
}

/// The place of a connection among the records of its engine.
std::uint32_t place_of(const spinwire::agent::EngineContext& context, std::uint32_t qp_num) {
  std::uint32_t place = 0;
  while (context.queue_pairs[place] == nullptr || context.queue_pairs[place]->qp_num != qp_num)
    ++place;
  return place;
}

// A peer that stays in the midst of a READ holds up the queue pair of a connection whose end has
// taken too long. The connection's record belongs to another one by then.
TEST_F(HostileDirect, WhatComesWhileAnEndIsHeldUpReachesNoOtherConnection) {
  spinwire::agent::EngineContext& context = spinwire::detail::core_of(t.node.engine)->context;
  t.begin();
  ASSERT_TRUE(send(data_header(8), 8));
  ASSERT_TRUE(t.until([&] { return t.delivered == 1; }));
  ASSERT_EQ(t.victim.send(t.node.filled(64u << 10, 1)), Status::ok);
  ASSERT_TRUE(t.until(
      [&] { return !t.peer.heard.empty() && wire::is_offer(t.peer.heard.back().header.kind); }));
  sv::begin_access(*qp().peer);
  const std::uint32_t place = place_of(context, t.victim.endpoint()->qp_num);
  EXPECT_EQ(t.victim.close(), Status::ok);
  advance(context, context.agents.at(place), spinwire::agent::Event::timeout);
  ASSERT_TRUE(t.until([&] { return t.victim.state() == ConnectionState::closed; }));
  Ends next = connect(t.friendly, t.node);
  ASSERT_NE(context.queue_pairs[place], nullptr) << "the new connection has the place";
  (void)send(data_header(8), 8);
  ASSERT_NO_FATAL_FAILURE(t.settle());
  EXPECT_EQ(t.delivered, 1u);
  EXPECT_EQ(t.counted(), 0u);
  EXPECT_TRUE(next.server.ready());
  sv::end_access(*qp().peer);
  t.peer.close();
  EXPECT_EQ(next.client.close(), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.node.engine.stats().connections == 1; }));
  t.finish();
}

TEST_F(HostileDirect, AStormOfAnything) {
  spinwire::base::Random random(11);
  for (std::uint32_t round = 0; round < amount(60); ++round) {
    SCOPED_TRACE(round);
    t.begin();
    for (int i = 0; i < 40 && t.node.closed.empty(); ++i) {
      const std::uint64_t kind = random.below(8);
      if (kind == 0) {
        forge(static_cast<std::uint16_t>(random.next()),
              static_cast<std::uint32_t>(random.below(2) == 0 ? random.next()
                                                              : random.below(sv::kWideLaneData)));
      } else if (kind < 4) {
        const auto any = static_cast<MessageKind>(random.below(17));
        const std::size_t size = random.below(2) == 0 ? wire::body_bytes(any) : random.below(200);
        (void)send(header_of(any, static_cast<std::uint32_t>(size)), size);
      } else {
        (void)send(data_header(i), static_cast<std::size_t>(i));
      }
      if (random.below(3) == 0) t.settle(2);
    }
    t.peer.fail();
    (void)t.victim.close();
    ASSERT_TRUE(t.until([&] { return t.victim.state() == ConnectionState::closed; }));
    t.peer.close();
    ASSERT_NO_FATAL_FAILURE(t.talk());
    const auto audit = t.node.engine.audit();
    ASSERT_TRUE(audit) << audit.error().message();
  }
  t.node.stale_allowed = true;
  t.finish();
}

}  // namespace
}  // namespace hostile_direct_test
