// The device trusts nothing that peers may have written into its segment.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

#include "softverbs/lane/attached_peer.h"
#include "softverbs/memory/remote_access.h"
#include "softverbs/ud_link.h"

namespace softverbs_test::hostile {

TEST(SoftverbsHostile, ACountOfLanesBeyondTheTable) {
  Link link;
  sv::Context& c = link.b.internals();
  c.segment->lanes_used = std::numeric_limits<std::uint32_t>::max();
  // Runs everything that scans all lanes: upkeep, the end of a key and of a queue pair, a new peer.
  for (std::uint32_t i = 0; i < 2 * sv::kMaxLanes / 64; ++i) sv::control_device(link.b.context);
  ASSERT_EQ(sv::dereg_mr(sv::reg_mr(link.b.pd, link.b.memory.data(), 64, 0)), 0);
  Node other;
  const Handle handle(link.b, other);
  ibv_qp* qp = link.b.make_qp();
  ASSERT_EQ(link.b.init(qp), 0);
  ASSERT_EQ(link.b.rtr(qp, {gid_of(other), 77, 1}), 0);
  link.b.destroy(qp);
  ASSERT_EQ(link.b.post_recv(1, 0, 64), 0);
  ASSERT_EQ(Send(2, link.a.sge(0, 8)).post(link.qa), 0);
  EXPECT_TRUE(link.run(1, 1));
}

TEST(SoftverbsHostile, TwoLanesOfOneSender) {
  Node b;
  sv::Context& c = b.internals();
  std::uint32_t second = 0;
  {
    Node a;
    const Handle to_a(b, a);
    const Handle to_b(a, b);
    const std::uint32_t first = a.internals().peers[0]->out.index;
    second = first + 1;
    sv::LaneEntry& entry = c.segment->directory[second];
    ASSERT_EQ(sv::lane_state(entry.state), sv::LaneState::free);
    entry.sender = gid_of(a);
    entry.state = sv::lane_word(c.segment->pid, sv::LaneState::active);
    c.segment->lanes_used = second + 1;
    c.segment->doorbells[second / 64] = std::uint64_t{1} << (second % 64);
    c.segment->doorbell = 1;
    for (int i = 0; i < 3; ++i) sv::control_device(b.context);
    ASSERT_EQ(c.peers.size(), 1u);
    EXPECT_EQ(c.peers[0]->in->index, first);
  }
  // That peer is forgotten, and its other lane does not bring it back.
  ASSERT_TRUE(until([&] { sv::control_device(b.context); }, [&] { return c.peers.empty(); }));
  const sv::InLane* lane = c.lanes[second].get();
  EXPECT_TRUE(lane == nullptr || lane->peer == nullptr);
}

TEST(SoftverbsHostile, BytesOutsideOfTheLane) {
  for (const std::uint32_t offset : {sv::kWideLaneData - 99, sv::kWideLaneData, 0xffffffffu}) {
    Link link;
    ASSERT_EQ(link.b.post_recv(1, 0, 4096), 0);
    sv::OutLane& out = link.a.internals().peers[0]->out;
    sv::Line& line = out.lines[out.tail];
    std::memcpy(line.payload + sv::kOffsetAt, &offset, sizeof offset);
    line.length = 100;
    line.word = sv::lane_mark(out.tail) << 56 | sv::packet_kind(sv::Packet::send, 0) << 48 |
                std::uint64_t{link.a.endpoint(link.qa).psn} << 24 | link.qb->qp_num;
    link.poll_b();
    EXPECT_EQ(link.b.internals().segment->queue_pairs[link.qb->handle].nak,
              sv::Nak::invalid_request);
    EXPECT_EQ(state_of(link.qb), IBV_QPS_ERR);
  }
}

/// References that are cut, or more of them than a work request has elements.
TEST(SoftverbsHostile, ReferencesThatNoSenderWrites) {
  for (const std::uint32_t length : {std::uint32_t{sizeof(sv::Reference)} * 2 + 8,
                                     std::uint32_t{sizeof(sv::Reference)} * (sv::kMaxSge + 1)}) {
    Link link;
    ASSERT_EQ(link.b.post_recv(1, 0, 4096), 0);
    sv::OutLane& out = link.a.internals().peers[0]->out;
    sv::Line& line = out.lines[out.tail];
    std::memset(line.payload, 0, sizeof line.payload);  // of a long packet: its place in the data
    line.length = static_cast<std::uint16_t>(length);
    line.word = sv::lane_mark(out.tail) << 56 |
                sv::packet_kind(sv::Packet::send, sv::line_flag::kReference) << 48 |
                std::uint64_t{link.a.endpoint(link.qa).psn} << 24 | link.qb->qp_num;
    link.poll_b();
    EXPECT_EQ(link.b.internals().segment->queue_pairs[link.qb->handle].nak,
              sv::Nak::invalid_request)
        << length;
    EXPECT_EQ(state_of(link.qb), IBV_QPS_ERR);
  }
}

/// A count of lines that were never sent acknowledges nothing.
TEST(SoftverbsHostile, AnAcknowledgementBeyondWhatWasSent) {
  Link link;
  ASSERT_EQ(link.b.post_recv(1, 0, 64), 0);
  ASSERT_EQ(Send(2, link.a.sge(0, 8)).post(link.qa), 0);
  sv::OutLane& out = link.a.internals().peers[0]->out;
  const std::uint64_t head = out.head;
  for (const std::uint64_t forged : {out.tail + 1, std::uint64_t{1} << 40, head - 1}) {
    out.control->head = forged;
    sv::apply_peer_acks(*link.a.internals().peers[0]);
    EXPECT_EQ(out.head, head) << forged;
  }
  out.control->head = head;
  EXPECT_TRUE(link.run(1, 1));
}

/// The table of locks is an object of its owner, but no memory that operations may name.
TEST(SoftverbsHostile, ARegionInTheTableOfLocks) {
  Link link;
  sv::Peer& peer = *link.a.internals().peers[0];
  const std::uint32_t key = link.b.mr->rkey;
  sv::RegionEntry& region = peer.segment->regions[sv::region_index(key)];
  peer.same_process = false;  // its memory is resolved by what the segment says
  const auto object = region.object;
  const auto resolved = [&] {
    return sv::resolve(peer, region.pd, link.b.address(0), 8, key, IBV_ACCESS_REMOTE_WRITE, 0).kind;
  };
  region.object = sv::kNoObject;
  EXPECT_EQ(resolved(), sv::RemoteBytes::Kind::kernel);
  region.object = sv::kLockObject;
  EXPECT_EQ(resolved(), sv::RemoteBytes::Kind::refused);
  region.object = object;
  peer.same_process = true;
}

/// A process that was given up may go on. It still has its lane, so nothing connects with it.
TEST(SoftverbsHostile, AContextThatWasGivenUpConnectsNoMore) {
  Node b;
  sv::Context& c = b.internals();
  {
    Link link;
    ibv_qp* const before = b.make_qp();
    ASSERT_EQ(b.init(before), 0);
    ASSERT_EQ(b.rtr(before, {gid_of(link.a), 77, 1}), 0);
    c.peers[0]->overdue = true;
    ASSERT_TRUE(
        until([&] { sv::control_device(b.context); }, [&] { return c.peers[0]->given_up; }));
    EXPECT_EQ(c.liveness.gone, 0u) << "nothing is to be done until its process ends";
    b.destroy(before);
    ibv_qp* const again = b.make_qp();
    ASSERT_EQ(b.init(again), 0);
    EXPECT_EQ(b.rtr(again, {gid_of(link.a), 78, 1}), ESTALE);
    std::string why;
    EXPECT_EQ(sv::attach_peer(c, gid_of(link.a), why), nullptr);
    EXPECT_NE(why.find("must open its device anew"), std::string::npos) << why;
    EXPECT_EQ(c.peers.size(), 1u);
  }
  ASSERT_TRUE(until([&] { sv::control_device(b.context); }, [&] { return c.peers.empty(); }));
  Node other;
  ibv_qp* const qp = b.make_qp();
  ASSERT_EQ(b.init(qp), 0);
  EXPECT_EQ(b.rtr(qp, {gid_of(other), 77, 1}), 0);
}

TEST(SoftverbsHostile, AWriteTooShortForItsTarget) {
  for (const std::uint64_t flags : {std::uint64_t{0}, sv::line_flag::kReference}) {
    SCOPED_TRACE(flags);
    Link link;
    ASSERT_EQ(link.b.post_recv(1, 0, 64), 0);
    sv::OutLane& out = link.a.internals().peers[0]->out;
    sv::Line& line = out.lines[out.tail];
    const ibv_sge target{link.b.address(0), 8, link.b.mr->rkey};
    std::memcpy(line.payload, &target, sizeof target);
    line.length = sizeof target - 1;
    line.word = sv::lane_mark(out.tail) << 56 |
                sv::packet_kind(sv::Packet::write_imm, flags) << 48 |
                std::uint64_t{link.a.endpoint(link.qa).psn} << 24 | link.qb->qp_num;
    link.poll_b();
    EXPECT_EQ(link.b.internals().segment->queue_pairs[link.qb->handle].nak,
              sv::Nak::invalid_request);
    EXPECT_EQ(state_of(link.qb), IBV_QPS_ERR);
  }
}

}  // namespace softverbs_test::hostile
