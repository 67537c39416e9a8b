// A peer that sends well-formed messages in the wrong state, repeatedly, too often, or without
// credit.
#include <algorithm>

#include "agent/hostile_peer.h"

namespace hostile_state_test {
namespace {

using namespace hostile_peer;  // NOLINT: a test's helpers

TEST_F(HostilePeer, NothingComesWithoutCredit) {
  Attacked t;
  const auto offer = wire::encode(t.peer.offer(5000, 1));
  const auto local = wire::encode(t.peer.local_offer(5000, 1));
  const auto request = wire::encode(wire::LeaseRequest{64, 1'000'000, 1, 8, 3});
  const std::vector<Bad> all = {
      {"message", header(1, 0, 4, 4), kNoHeader},
      {"message that asks for more", header(1, 1, 4, 4), kNoHeader},
      {"message with immediate", header(1, 0, 0, 0), kNoHeader, {IBV_WR_SEND_WITH_IMM, 1}},
      {"notice", {}, kNoHeader, {IBV_WR_RDMA_WRITE_WITH_IMM, 1}},
      {"return", header(2, 0, 0, 0), kNoHeader},
      {"offer", message(MessageKind::rendezvous_offer, offer), kNoHeader},
      {"local offer", message(MessageKind::local_offer, local), kNoHeader},
      {"answer",
       message(MessageKind::rendezvous_answer, wire::encode(wire::RendezvousAnswer{65536})),
       kNoHeader},
      {"request", message(MessageKind::lease_request, request), kNoHeader},
  };
  for (const Bad& one : all) {
    SCOPED_TRACE(one.name);
    t.begin();
    const std::vector<Bytes> first = {header(1, 0, 4, 4)};
    for (std::uint32_t i = 0; i < t.peer.engine().credits; ++i) ASSERT_TRUE(t.peer.send(first[0]));
    ASSERT_TRUE(t.peer.send(one.bytes, one.how));
    t.expect_refused(one.words);
    EXPECT_EQ(t.delivered, t.peer.engine().credits);
  }
  t.finish();
}

TEST_F(HostilePeer, ANoticeHasNoBytesThatCouldBeRead) {
  Attacked t;
  t.begin();
  std::size_t size = 0, readable = 77;
  t.node.on_message = [&](Connection, Message& m) {
    size = m.size();
    readable = m.bytes().size();
  };
  const Endpoint& e = t.peer.engine();
  ASSERT_TRUE(t.peer.send(
      Bytes(8), {IBV_WR_RDMA_WRITE_WITH_IMM, 1, 0, e.credit_cell_address, e.credit_cell_rkey}));
  ASSERT_TRUE(t.until([&] { return readable != 77; }));
  EXPECT_EQ(size, 8u);
  EXPECT_EQ(readable, 0u);
  t.node.on_message = [&](Connection from, Message& m) { (void)from.send(m.take()); };
  (void)t.victim.close();
  t.expect_ended(Status::ok, "", 0);
  t.finish();
}

TEST_F(HostilePeer, OnlyItsOwnCreditCellIsWritable) {
  Attacked t;
  const struct {
    const char* name;
    ibv_wr_opcode opcode;
    std::int64_t offset;
    std::uint32_t key;
    std::size_t size;
  } cases[] = {
      {"behind it", IBV_WR_RDMA_WRITE, 8, 0, 8},
      {"before it", IBV_WR_RDMA_WRITE, -8, 0, 8},
      {"across its end", IBV_WR_RDMA_WRITE, 4, 0, 8},
      {"another key", IBV_WR_RDMA_WRITE, 0, 1, 8},
      {"with notice", IBV_WR_RDMA_WRITE_WITH_IMM, 8, 0, 8},
      {"read", IBV_WR_RDMA_READ, 0, 0, 8},
  };
  for (const auto& one : cases) {
    SCOPED_TRACE(one.name);
    t.begin();
    const Endpoint& e = t.peer.engine();
    ASSERT_TRUE(t.peer.send(
        Bytes(one.size),
        {one.opcode, 1, 0, e.credit_cell_address + static_cast<std::uint64_t>(one.offset),
         e.credit_cell_rkey + one.key}));
    ASSERT_TRUE(t.until([&] { return t.peer.dead(); }));
    // The device has failed the queue pair. The engine learns this by an event, or when it sends.
    const Buffer b = t.node.filled(8, 1);
    ASSERT_TRUE(t.until([&] {
      (void)t.victim.send(b);
      return !t.node.closed.empty();
    }));
    EXPECT_NE(t.node.closed[0].status, Status::ok);
    EXPECT_EQ(t.delivered, 0u);
    t.expect_ended(t.node.closed[0].status, "", 0);
  }
  t.finish();
}

TEST_F(HostilePeer, NonsenseInTheCreditCellIsFoundWhenCreditIsLookedFor) {
  Attacked t;
  for (const std::uint32_t nonsense : {1 + 0x8000 + Peer::kReceives, 0x7fffffu}) {
    t.begin();
    ASSERT_TRUE(t.peer.write_granted(nonsense));
    ASSERT_TRUE(t.until([&] { return t.peer.idle(); }));
    const Buffer b = t.node.filled(8, 1);
    std::uint32_t sent = 0;
    ASSERT_TRUE(t.until([&] {
      sent += t.node.tally.run([&](auto done) { return t.victim.send(b, done); }) == Status::ok;
      return !t.node.closed.empty();
    }));
    EXPECT_EQ(sent, Peer::kReceives);
    t.expect_ended(Status::protocol, "no peer of this protocol writes", 1);
  }
  // A count older than the latest is only late.
  t.begin();
  ASSERT_TRUE(t.peer.write_granted(1));
  t.settle();
  EXPECT_TRUE(t.victim.ready());
  EXPECT_EQ(t.victim.stats().send_credits, Peer::kReceives);
  (void)t.victim.close();
  t.expect_ended(Status::ok, "", 0);
  t.finish();
}

TEST_F(HostilePeer, CreditThatItWasNotToldOfCannotBeReturned) {
  Attacked t;
  /// The credits that the peer may still return, when the engine has granted one more and not told
  /// it.
  const auto begin = [&t]() -> std::uint32_t {
    t.begin();
    EXPECT_TRUE(t.peer.send(header(1, wire::message_flag::kWantCredit, 4, 4)));
    EXPECT_TRUE(t.until([&] { return t.peer.granted() > t.peer.engine().credits; }));
    t.settle();
    const std::uint32_t told = t.peer.granted();
    EXPECT_GT(told, 3u);
    // The engine grants a receive anew for this one, and does not advertise it.
    EXPECT_TRUE(t.peer.send(header(1, 0, 4, 4)));
    EXPECT_TRUE(t.until([&] { return t.delivered == 2; }));
    EXPECT_EQ(t.peer.granted(), told);
    return told - 3;  // two messages have used theirs, and the return uses one
  };
  constexpr auto kReturn = static_cast<std::uint8_t>(wire::MessageKind::credit_return);
  std::uint32_t most = begin();
  ASSERT_TRUE(t.peer.send(header(kReturn, 0, most, 0)));
  t.settle();
  EXPECT_TRUE(t.victim.ready());
  (void)t.victim.close();
  t.expect_ended(Status::ok, "", 0);
  most = begin();
  ASSERT_TRUE(t.peer.send(header(kReturn, 0, most + 1, 0)));
  t.expect_refused(kNoHeader);
  t.finish();
}

/// Messages of a kind that the engine has sent to the peer.
std::size_t heard(const Attacked& t, MessageKind kind) {
  return static_cast<std::size_t>(std::ranges::count_if(
      t.peer.heard, [kind](const raw_peer::Heard& h) { return h.header.kind == kind; }));
}
/// A message about credit, which says what the peer has granted.
Bytes credit_message(MessageKind kind, std::uint32_t granted) {
  return message({kind, 0, static_cast<std::uint16_t>(granted), 0});
}

TEST_F(HostilePeer, AWordWithoutProofIsNotThePeersWhoIsAskedForMessages) {
  // On some devices another peer of the engine can write the cell.
  Attacked t;
  for (const std::uint64_t change : {1ull, 0x100ull, 1ull << 32, 1ull << 63, 0x1'0000'0001ull}) {
    t.begin();
    const std::uint32_t token = t.peer.engine().credit_cell_token;
    const std::uint32_t granted = Peer::kReceives + 100;
    ASSERT_TRUE(t.peer.write_cell(wire::encode(wire::CreditWord{granted, 1}, token) ^ change));
    ASSERT_TRUE(t.until([&] { return heard(t, MessageKind::credit_ask) == 1; }));
    EXPECT_TRUE(t.victim.ready());
    EXPECT_EQ(t.victim.stats().send_credits, Peer::kReceives);
    ASSERT_TRUE(t.peer.write_granted(granted));  // the cell does not count any more
    t.settle();
    EXPECT_EQ(t.victim.stats().send_credits, Peer::kReceives);
    EXPECT_EQ(heard(t, MessageKind::credit_ask), 1u);
    for (std::uint32_t more = 1; more <= 3; ++more) {
      ASSERT_TRUE(t.peer.send(credit_message(MessageKind::credit, Peer::kReceives + more)));
      ASSERT_TRUE(t.until([&] { return heard(t, MessageKind::credit_ask) == 1 + more; }));
      EXPECT_EQ(t.victim.stats().send_credits, Peer::kReceives + more);
    }
    (void)t.victim.close();
    t.expect_ended(Status::ok, "", 0);
  }
  t.finish();
}

TEST_F(HostilePeer, CreditByMessagesThatNobodyAskedFor) {
  Attacked t;
  t.begin();
  ASSERT_TRUE(t.peer.send(credit_message(MessageKind::credit, Peer::kReceives)));
  t.expect_refused(kNoHeader);
  t.begin();
  ASSERT_TRUE(t.peer.write_cell(0));
  ASSERT_TRUE(t.until([&] { return heard(t, MessageKind::credit_ask) == 1; }));
  for (int i = 0; i < 2; ++i)
    ASSERT_TRUE(t.peer.send(credit_message(MessageKind::credit, Peer::kReceives + 1)));
  t.expect_refused(kNoHeader);
  t.finish();
}

TEST_F(HostilePeer, IsSentOneMessageAboutCreditForEachThatItAsksFor) {
  Attacked t;
  t.begin();
  for (std::uint32_t asked = 1; asked <= 3; ++asked) {
    ASSERT_TRUE(t.peer.send(credit_message(MessageKind::credit_ask, Peer::kReceives)));
    // The first is due at once, the others when there is news.
    if (asked > 1) {
      t.settle();
      EXPECT_EQ(heard(t, MessageKind::credit), asked - 1);
      const std::uint32_t known = t.peer.granted();
      ASSERT_TRUE(t.peer.send(header(1, wire::message_flag::kWantCredit, 4, 4)));
      ASSERT_TRUE(t.until([&] { return t.peer.granted() > known; }));
    }
    ASSERT_TRUE(t.until([&] { return heard(t, MessageKind::credit) == asked; }));
  }
  EXPECT_TRUE(t.victim.ready());
  // Two asks at once; the engine has sent nothing since the first.
  for (int i = 0; i < 2; ++i)
    ASSERT_TRUE(t.peer.send(credit_message(MessageKind::credit_ask, Peer::kReceives)));
  t.expect_refused(kNoHeader);
  t.finish();
}

TEST_F(HostilePeer, NonsenseInTheCreditCellIsFoundWhenUnusedCreditGoesBack) {
  Config c = hostile_config();
  c.connections.credit_idle_timeout = 5ms;
  Attacked t(c);
  t.begin();
  ASSERT_TRUE(t.peer.write_granted(0x7fffff));
  t.expect_ended(Status::protocol, "no peer of this protocol writes", 1);
  t.finish();
}

/// What a peer knows of an offer of either kind.
struct Offered {
  std::uint32_t id = 0;
  std::uint32_t key = 0;
  bool invalidate = false;  ///< the key is a window's
};

/// The victim offers a rendezvous message, and the peer knows the offer.
Offered offered_by_victim(Attacked& t, std::size_t size = 20000) {
  const Buffer b = t.node.filled(size, 3);
  EXPECT_EQ(t.node.tally.run([&](auto done) { return t.victim.send(b, done); }), Status::ok);
  EXPECT_TRUE(t.until([&] { return !t.peer.heard.empty(); }));
  if (t.peer.heard.empty()) return {};
  const raw_peer::Heard& heard = t.peer.heard.back();
  wire::LocalOffer local;
  if (heard.header.kind == MessageKind::local_offer) {
    EXPECT_TRUE(wire::decode(heard.body, local));
    return {local.id, local.lkey, false};
  }
  wire::RendezvousOffer offer;
  EXPECT_TRUE(wire::decode(heard.body, offer));
  return {offer.id, offer.rkey, offer.invalidate};
}
Bytes answer_to(std::uint32_t id,
                wire::RendezvousVerdict verdict = wire::RendezvousVerdict::received) {
  return message(MessageKind::rendezvous_answer, wire::encode(wire::RendezvousAnswer{id, verdict}));
}

/// The victim's offers open keys, or name memory by its local key.
class HostileAnswers : public HostilePeer, public testing::WithParamInterface<bool> {
 protected:
  void SetUp() override {
    HostilePeer::SetUp();
    if (is_local() && !sends_directly()) GTEST_SKIP() << kSoftverbsOnly << "offers without keys";
  }
  static bool is_local() { return GetParam(); }
  static Config config() { return is_local() ? hostile_config() : hostile_config_with_keys(); }
};
INSTANTIATE_TEST_SUITE_P(To, HostileAnswers, testing::Bool(), [](const auto& to) {
  return to.param ? "LocalOffers" : "OffersWithKeys";
});

TEST_P(HostileAnswers, AreGivenOnce) {
  Attacked t(config());
  for (const bool invalidates : {true, false}) {
    if (invalidates && is_local()) continue;  // there is no key
    t.begin();
    const Offered offer = offered_by_victim(t);
    const std::uint64_t before = t.node.tally.ended(Status::ok);
    EXPECT_EQ(offer.invalidate, !is_local());
    const How how = invalidates ? How{IBV_WR_SEND_WITH_INV, 0, offer.key} : How{};
    ASSERT_TRUE(t.peer.send(answer_to(offer.id), how));
    // If the message leaves the key open, its owner closes it. The message is still an answer.
    ASSERT_TRUE(t.until([&] { return t.node.tally.idle(); }));
    EXPECT_EQ(t.node.tally.ended(Status::ok), before + 1);
    ASSERT_TRUE(t.until([&] { return t.node.engine.stats().windows_free == t.windows(); }));
    EXPECT_TRUE(t.victim.ready());
    ASSERT_TRUE(t.peer.send(answer_to(offer.id)));
    t.expect_refused("answers none that is outstanding");
  }
  t.finish();
}

TEST_P(HostileAnswers, AreRefusedTwiceBeforeTheKeyHasEnded) {
  Attacked t(config());
  t.begin();
  const Offered offer = offered_by_victim(t);
  // The flag that asks for credit brings it for a second message.
  ASSERT_TRUE(t.peer.send(message(MessageKind::data, {}, 1)));
  ASSERT_TRUE(t.until([&] { return t.peer.granted() > 2; }));
  ASSERT_TRUE(t.peer.send(answer_to(offer.id)));
  ASSERT_TRUE(t.peer.send(answer_to(offer.id)));
  t.expect_refused("answers none that is outstanding");
  EXPECT_TRUE(t.node.tally.idle());
  t.finish();
}

TEST_F(HostilePeer, AnAnswerToAnotherConnectionsOfferIsRefused) {
  Attacked t;
  t.friendly.on_offer = [](Connection, Offer&) {};
  t.begin();
  // The first offer of the honest connection, not pulled yet.
  {
    const Buffer b = t.node.filled(20000, 3);
    ASSERT_EQ(t.node.tally.run([&](auto done) { return t.honest.server.send(b, done); }),
              Status::ok);
  }
  ASSERT_TRUE(t.peer.send(answer_to(65536)));
  ASSERT_TRUE(until({&t.node}, [&] {  // alone, so that the offer stays outstanding
    t.peer.control();
    return !t.node.closed.empty();
  }));
  EXPECT_FALSE(t.node.tally.idle());
  ASSERT_TRUE(t.until([&] { return t.node.tally.idle(); }));
  EXPECT_EQ(t.node.tally.ended(Status::ok), 1u);
  t.expect_refused("answers none that is outstanding");
  t.finish();
}

TEST_P(HostileAnswers, ThatInvalidateAnotherKeyEndTheConnection) {
  Attacked t(config());
  for (const int which : {0, 1, 2}) {
    if (which == 2 && !is_local()) continue;  // it is the right one
    t.begin();
    const Offered offer = offered_by_victim(t);
    const std::uint32_t key = which == 0   ? t.peer.engine().credit_cell_rkey
                              : which == 1 ? offer.key + 0x100
                                           : offer.key;
    ASSERT_TRUE(t.peer.send(answer_to(offer.id), {IBV_WR_SEND_WITH_INV, 0, key}));
    ASSERT_TRUE(t.until([&] { return !t.node.closed.empty(); }));
    EXPECT_NE(t.node.closed[0].status, Status::ok);
    EXPECT_TRUE(t.node.tally.idle());
    EXPECT_EQ(t.node.tally.ended(Status::ok), 0u);
    t.expect_ended(t.node.closed[0].status, "", t.counted());
  }
  t.finish();
}

TEST_F(HostilePeer, WhatCannotBePulledEndsTheConnection) {
  Attacked t;
  for (const int which : {0, 1, 2}) {
    t.begin();
    wire::RendezvousOffer offer = t.peer.offer(300000, 1);
    if (which == 0) offer.rkey += 0x10000;
    if (which == 1) offer.address = 4096;
    if (which == 2) offer.address += Peer::kMemory - Peer::kOffered - 200000;  // ends beyond
    ASSERT_TRUE(t.peer.send(MessageKind::rendezvous_offer, wire::encode(offer)));
    t.expect_ended(Status::remote_access, "the READ of a rendezvous message", 1);
    EXPECT_EQ(t.delivered, 0u);
  }
  t.finish();
}

TEST_F(HostilePeer, TheSameOfferAgainIsAnotherMessage) {
  Attacked t;
  const auto offer = wire::encode(t.peer.offer(kOfferedBytes, 9));
  t.expect_each_delivered([&] { return t.peer.send(MessageKind::rendezvous_offer, offer); });
}

TEST_F(HostilePeer, OneThatTakesNoAnswersIsEnded) {
  Attacked t;
  // Refused offers and unanswerable requests get answers. For the first of them there is credit.
  for (const MessageKind kind : {MessageKind::rendezvous_offer, MessageKind::lease_request}) {
    t.node.on_offer = [](Connection, Offer& o) { o.refuse(); };
    t.begin(1);
    const auto offer = wire::encode(t.peer.offer(20000, 9));
    const auto request = wire::encode(wire::LeaseRequest{1u << 30, 1'000'000, 1, 8, 3});
    std::uint64_t sent = 0;
    ASSERT_TRUE(t.until([&] {
      for (; sent < t.peer.granted(); ++sent) {
        if (kind == MessageKind::rendezvous_offer ? !t.peer.send(message(kind, offer, 1))
                                                  : !t.peer.send(message(kind, request, 1)))
          break;
      }
      return !t.node.closed.empty();
    }));
    EXPECT_GT(sent, 64u);
    EXPECT_LT(sent, 64u + 5 * 64u + 64u);  // what may wait, and what was granted meanwhile
    EXPECT_EQ(t.peer.heard.size(), 1u);
    t.expect_ended(Status::protocol, "answers wait for credit", 1);
  }
  t.finish();
}

TEST_F(HostilePeer, ASecondGoodbyeBehindAMessageThatIsHeldIsRefused) {
  Attacked t;
  t.begin();
  // The goodbye takes effect once the earlier message is delivered; a second one is an error.
  ASSERT_TRUE(t.peer.send(MessageKind::rendezvous_offer, wire::encode(t.peer.offer(kLongest, 1))));
  for (int i = 0; i < 40; ++i) ASSERT_TRUE(t.peer.send(MessageKind::goodbye));
  t.expect_ended(Status::ok, "", 1);
  t.finish();
}

TEST_F(HostilePeer, NothingIsDeliveredBehindAGoodbye) {
  Attacked t;
  for (const bool held : {false, true}) {
    t.begin();
    // Credit for all of it.
    ASSERT_TRUE(t.peer.send(message(MessageKind::data, {}, 1)));
    ASSERT_TRUE(t.until([&] { return t.peer.granted() > 8; }));
    if (held) {
      ASSERT_TRUE(
          t.peer.send(MessageKind::rendezvous_offer, wire::encode(t.peer.offer(kLongest, 1))));
    }
    ASSERT_TRUE(t.peer.send(MessageKind::goodbye));
    ASSERT_TRUE(t.peer.send(header(1, 0, 4, 4)));
    ASSERT_TRUE(t.peer.send({}, {IBV_WR_RDMA_WRITE_WITH_IMM, 1}));
    ASSERT_TRUE(t.peer.send(MessageKind::rendezvous_offer, wire::encode(t.peer.offer(20000, 2))));
    t.expect_ended(Status::ok, "", 0);
    EXPECT_EQ(t.delivered, held ? 2u : 1u);
  }
  t.finish();
}

TEST_P(HostileAnswers, MayComeWhileWeCloseAndAllElseIsPassedOver) {
  Attacked t(config());
  t.begin();
  ASSERT_TRUE(t.peer.send(message(MessageKind::data, {}, 1)));
  ASSERT_TRUE(t.until([&] { return t.peer.granted() > 8; }));
  const Offered offer = offered_by_victim(t);
  EXPECT_EQ(t.victim.close(), Status::ok);  // waits for the answer
  ASSERT_TRUE(t.peer.send(Bytes(3)));
  ASSERT_TRUE(t.peer.send(header(1, 0xff, 4, 4)));
  ASSERT_TRUE(t.peer.send(header(1, 0, 4, 4)));
  ASSERT_TRUE(t.peer.send({}, {IBV_WR_RDMA_WRITE_WITH_IMM, 1}));
  ASSERT_TRUE(t.peer.send(header(99, 0, 0, 0)));
  t.settle(20);
  EXPECT_EQ(t.victim.state(), ConnectionState::draining);
  const How how = offer.invalidate ? How{IBV_WR_SEND_WITH_INV, 0, offer.key} : How{};
  ASSERT_TRUE(t.peer.send(answer_to(offer.id), how));
  t.expect_ended(Status::ok, "", 0);
  EXPECT_EQ(t.delivered, 1u);
  EXPECT_EQ(t.node.tally.ended(Status::ok), 1u);
  t.finish();
}

TEST_F(HostilePeer, RequestsForMemoryHaveTheirLimits) {
  Attacked t;
  t.begin();
  const std::uint32_t most = t.node.engine.config().leases.count;
  const auto request = wire::encode(wire::LeaseRequest{4096, 100'000'000, 1, 8, 3});
  std::uint64_t granted = 0, refused = 0;
  for (std::uint32_t i = 0; i < 10 * most; ++i) {
    ASSERT_TRUE(t.peer.send(MessageKind::lease_request, request));
    ASSERT_TRUE(t.until([&] { return t.peer.heard.size() == i + 1; }));
    wire::LeaseGrant grant;
    ASSERT_TRUE(wire::decode(t.peer.heard.back().body, grant));
    if (grant.verdict == wire::LeaseVerdict::granted) {
      ++granted;
    } else {
      EXPECT_EQ(grant.verdict, wire::LeaseVerdict::too_many);
      ++refused;
    }
    t.peer.grant(1);
  }
  EXPECT_EQ(granted, most);
  EXPECT_EQ(refused, 9 * most);
  EXPECT_EQ(t.node.engine.memory_stats(Pool::lease).blocks_used, most);
  // The peer leaves without giving anything back.
  t.peer.fail();
  ASSERT_TRUE(t.until([&] {
    (void)t.victim.send_copy(std::as_bytes(std::span("?", 1)));
    return !t.node.closed.empty();
  }));
  t.expect_ended(t.node.closed[0].status, "", 0);
  t.finish();
}

}  // namespace
}  // namespace hostile_state_test
