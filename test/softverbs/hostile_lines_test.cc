// Peers write anything into the lines of their lanes. What a line says of acknowledgements, places
// and queue pairs counts only as far as the receiver's own records allow it.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>

#include "softverbs/direct_datagram_link.h"
#include "softverbs/direct_message_link.h"
#include "softverbs/lane/attached_peer.h"
#include "softverbs/ud_link.h"

namespace softverbs_test::hostile_lines {

// ---- acknowledgements ---------------------------------------------------------------------------

/// b sends a message whose line acknowledges so many lines, and a applies that.
void acknowledge(Link& link, std::uint64_t lines) {
  ASSERT_EQ(link.a.post_recv(1, 0, 64), 0);
  ASSERT_EQ(Send(2, link.b.sge(0, 8)).post(link.qb), 0);
  const sv::OutLane& out = link.b.internals().peers[0]->out;
  out.lines[(out.tail - 1) % sv::kLaneLines].ack = static_cast<std::uint16_t>(lines);
  const std::size_t before = link.at_a.size();
  link.poll_a();  // reads the acknowledgement
  ASSERT_EQ(link.at_a.size(), before + 1);
  link.poll_a();  // applies it
}

TEST(SoftverbsHostileLine, AnAcknowledgementGoesNeitherBeyondWhatWasSentNorBack) {
  Link link;
  for (std::uint64_t i = 0; i < 3; ++i) ASSERT_EQ(link.b.post_recv(i, 0, 64), 0);
  ASSERT_EQ(Send(10, link.a.sge(0, 8)).post(link.qa), 0);
  ASSERT_TRUE(link.run(1, 1));
  for (std::uint64_t i = 11; i < 13; ++i) ASSERT_EQ(Send(i, link.a.sge(0, 8)).post(link.qa), 0);
  const sv::OutLane& out = link.a.internals().peers[0]->out;
  const std::uint64_t head = out.head;
  ASSERT_EQ(out.tail, head + 2);
  const std::uint64_t forged[] = {out.tail + 1, head + sv::kLaneLines, head + 0x7fff, head + 0x8000,
                                  head - 1};
  for (const std::uint64_t lines : forged) {
    ASSERT_NO_FATAL_FAILURE(acknowledge(link, lines));
    EXPECT_EQ(out.acked, head) << lines;
    EXPECT_EQ(out.head, head) << lines;
  }
  EXPECT_EQ(link.at_a.size(), 1 + std::size(forged)) << "a message that b has not taken has ended";
  // What b says in truth counts.
  ASSERT_NO_FATAL_FAILURE(acknowledge(link, head + 1));
  EXPECT_EQ(out.head, head + 1);
  EXPECT_TRUE(link.run(1 + std::size(forged) + 1 + 2, 3 + std::size(forged) + 1));
}

// ---- places in the data -------------------------------------------------------------------------

/// The next peers get narrow lanes: the wide ones are being claimed.
void take_wide_lanes(const Node& node) {
  sv::Context& c = node.internals();
  for (std::uint32_t i = 0; i < sv::kWideLanes; ++i)
    c.segment->directory[i].state = sv::lane_word(c.pid, sv::LaneState::claimed);
  c.segment->lanes_used = sv::kWideLanes;
}

constexpr std::uint32_t kForgedBytes = 100;
/// The last place in a narrow lane for so many bytes, and some behind it that a wide lane has.
constexpr std::uint32_t kLastPlace = sv::kLaneData - kForgedBytes;
constexpr std::uint32_t kBehind[] = {kLastPlace + 1, sv::kLaneData,
                                     sv::kWideLaneData - kForgedBytes};

/// Writes the next line of a lane like a hostile peer. `word`: without the mark.
void forge(sv::OutLane& out, std::uint64_t word, std::uint32_t length, std::uint32_t offset,
           std::uint32_t imm = 0) {
  sv::Line& line = out.lines[out.tail % sv::kLaneLines];
  std::memcpy(line.payload + sv::kOffsetAt, &offset, sizeof offset);
  line.set_trailer(length, out.ack_on_top, imm);
  line.word.store(sv::lane_mark(out.tail) << 56 | word, std::memory_order_release);
  ++out.tail;
}
/// The word of a packet for a queue pair that expects it.
std::uint64_t expected_word(const sv::Qp& qp, sv::Packet packet = sv::Packet::send,
                            std::uint64_t flags = 0) {
  return sv::packet_kind(packet, flags) << 48 | qp.expected;
}

/// Two ends, of which b has a narrow lane from a.
struct NarrowPair {
  std::uint64_t now = 1'000'000'000;
  MessageEnd a{&now}, b{&now};
  explicit NarrowPair(bool in_place) {
    take_wide_lanes(b.node);
    connect(a.node, a.qp, b.node, b.qp);
    if (in_place) b.read_in_place();
  }
};

void reject_a_message_behind(std::uint32_t offset, bool in_place) {
  NarrowPair pair(in_place);
  MessageEnd& b = pair.b;
  ASSERT_EQ(b.in().index, sv::kWideLanes);
  const std::uint64_t number = number_of(1, kForgedBytes);
  NumberedMessage(number).write(pair.a.out().data + kLastPlace);
  forge(pair.a.out(), expected_word(b.internals()), kForgedBytes, kLastPlace);
  b.steps();
  EXPECT_EQ(b.taken(), Numbers{number});
  forge(pair.a.out(), expected_word(b.internals()), kForgedBytes, offset);
  b.steps();
  EXPECT_EQ(b.taken(), Numbers{});
  EXPECT_EQ(b.internals().entry->nak, sv::Nak::invalid_request);
  EXPECT_EQ(state_of(b.qp), IBV_QPS_ERR);
}

TEST(SoftverbsHostileLine, AMessageBehindTheDataOfANarrowLane) {
  for (const bool in_place : {false, true}) {
    for (const std::uint32_t offset : kBehind) {
      SCOPED_TRACE(testing::Message() << offset << (in_place ? " in place" : ""));
      ASSERT_NO_FATAL_FAILURE(reject_a_message_behind(offset, in_place));
    }
  }
}

TEST(SoftverbsHostileLine, ADatagramBehindTheDataOfANarrowLane) {
  std::uint64_t now = 1'000'000'000;
  DirectEnd a(&now), b(&now);
  take_wide_lanes(b.node);
  const Handle to_b(a.node, plain_way(b.node));
  const Handle to_a(b.node, plain_way(a.node));
  meet(a.node, b.node);
  sv::OutLane& out = a.node.internals().peers[0]->out;
  ASSERT_EQ(out.index, sv::kWideLanes);
  std::uint64_t number = kLong;
  while (NumberedDatagram(number).length() != kForgedBytes) ++number;
  const std::uint64_t word = static_cast<sv::Qp*>(a.qp)->datagram_word | b.qp->qp_num;
  std::uint64_t malformed = 0;
  for (const std::uint32_t longest : {std::uint32_t{0}, sv::kLongestDirect}) {  // by receives first
    SCOPED_TRACE(longest);
    b.batches.longest = longest;
    NumberedDatagram(number).write(out.data + kLastPlace);
    std::memcpy(out.lines[out.tail % sv::kLaneLines].payload, out.data + kLastPlace,
                sv::kDirectHeader);
    forge(out, word, kForgedBytes, kLastPlace, kQkey);
    EXPECT_EQ(b.steps(), Numbers{number});
    for (const std::uint32_t offset : kBehind) forge(out, word, kForgedBytes, offset, kQkey);
    EXPECT_EQ(b.steps(), Numbers{});
    malformed += std::size(kBehind);
    EXPECT_EQ(dropped(b.node, sv::Drop::malformed), malformed);
  }
  EXPECT_EQ(b.by_receives, 1u);
  ASSERT_TRUE(a.send(to_b, b.qp, number));
  a.publish();
  EXPECT_EQ(b.steps(), Numbers{number});
}

// ---- queue pairs of others ----------------------------------------------------------------------

/// A connection of a and b, and c, with which b has another one.
struct Intrusion {
  std::uint64_t now = 1'000'000'000;
  MessageEnd a{&now}, b{&now}, c{&now};
  explicit Intrusion(bool in_place) {
    connect(a.node, a.qp, b.node, b.qp);
    connect(c.node, c.qp, b.node, b.node.make_qp());
    if (in_place) b.read_in_place();
  }
  [[nodiscard]] std::uint32_t answers() const { return b.internals().entry->nak_serial; }
  /// From now on b's polls read only the lane from c.
  void put_other_lane_to_sleep() const {
    sv::InLane& other = *b.internals().peer->in;
    other.control->asleep = 1;
    sv::sleep_lane(b.node.internals(), other);
    ASSERT_EQ(b.node.internals().awake_count, 1u);
  }
};

struct ForgedPacket {
  sv::Packet packet;
  std::uint64_t flags;
  std::uint32_t length;
};

/// c names the connection of a and b in its own lane, with the number that it expects.
void intrude(const ForgedPacket& as, bool in_place, bool lone) {
  Intrusion all(in_place);
  if (lone) {
    ASSERT_NO_FATAL_FAILURE(all.put_other_lane_to_sleep());
  }
  sv::OutLane& out = all.c.out();
  NumberedMessage(number_of(1, as.length)).write(out.data);
  std::memcpy(out.lines[out.tail % sv::kLaneLines].payload, out.data, sv::kLinePayload);
  const std::uint64_t expected = all.b.internals().expected;
  forge(out, expected_word(all.b.internals(), as.packet, as.flags), as.length, 0);
  all.b.steps(4);
  EXPECT_EQ(all.b.taken(), Numbers{});
  EXPECT_TRUE(all.b.failed.empty());
  EXPECT_EQ(all.b.internals().expected, expected);
  EXPECT_EQ(all.answers(), 0u) << "an answer that a would take for its own";
  EXPECT_EQ(state_of(all.b.qp), IBV_QPS_RTS);
  EXPECT_EQ(out.control->head, out.tail) << "the line is passed over";
  // The connection goes on with what its peer sends.
  ASSERT_TRUE(all.a.send(number_of(2, 32)));
  all.a.publish();
  ASSERT_TRUE(until([&] { all.b.step(); }, [&] { return !all.b.order.empty(); }));
  EXPECT_EQ(all.b.taken(), Numbers{number_of(2, 32)});
}

TEST(SoftverbsHostileLine, NamesAConnectionOfAnotherPeer) {
  constexpr std::uint32_t kReference = sizeof(sv::Reference);
  for (const ForgedPacket& as :
       {ForgedPacket{sv::Packet::send, 0, 32}, ForgedPacket{sv::Packet::send, 0, kForgedBytes},
        ForgedPacket{sv::Packet::send, sv::line_flag::kReference, kReference},
        ForgedPacket{sv::Packet::send_imm, 0, 32}, ForgedPacket{sv::Packet::write_imm, 0, 32},
        ForgedPacket{sv::Packet::send_inv, 0, 32}}) {
    for (const bool in_place : {false, true}) {
      for (const bool lone : {false, true}) {
        SCOPED_TRACE(testing::Message()
                     << static_cast<int>(as.packet) << ' ' << as.length << ' ' << as.flags
                     << (in_place ? " in place" : "") << (lone ? " lone" : ""));
        ASSERT_NO_FATAL_FAILURE(intrude(as, in_place, lone));
      }
    }
  }
}

/// A lane whose sender is gone has no peer, nor has a queue pair that is not connected.
TEST(SoftverbsHostileLine, NamesAQueuePairWithoutAPeer) {
  Node b;
  ibv_qp* const idle = b.make_qp();
  ASSERT_EQ(b.init(idle), 0);
  sv::Context& c = b.internals();
  sv::OutLane out;
  out.lines = c.segment->lanes[0].lines;
  for (const ibv_qp* const qp : {idle, ready_ud(b, true)}) {
    forge(out, sv::packet_kind(sv::Packet::send, 0) << 48 | qp->qp_num, 32, 0);
    forge(out, sv::packet_kind(sv::Packet::write_imm, 0) << 48 | qp->qp_num, 32, 0);
  }
  ASSERT_EQ(b.post_recv(1, 0, 64), 0);
  c.segment->directory[0].sender = sv::make_gid({c.pid, 0xfffff0, 1});
  c.segment->directory[0].state = sv::lane_word(c.pid, sv::LaneState::active);
  c.segment->lanes_used = 1;
  c.segment->doorbells[0] = 1;
  c.segment->doorbell = 1;
  sv::control_device(b.context);
  EXPECT_TRUE(completions(b).empty());
  EXPECT_EQ(c.segment->lanes[0].control.head, out.tail);
  for (const ibv_qp* const qp : b.qps)
    EXPECT_EQ(static_cast<const sv::Qp*>(qp)->entry->nak_serial, 0u);
}

}  // namespace softverbs_test::hostile_lines
