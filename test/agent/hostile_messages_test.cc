// Malformed messages, field by field. Each ends the peer's connection with a reason and does not
// affect other connections. hostile_state_test.cc sends valid messages in the wrong state.
#include "agent/hostile_peer.h"

namespace hostile_test {
namespace {

using namespace hostile_peer;  // NOLINT: a test's helpers

Bytes cut(Bytes bytes, std::size_t size) {
  bytes.resize(size);
  return bytes;
}
template <typename Body>
Bytes with_byte(MessageKind kind, const Body& body, std::size_t at, std::uint8_t value) {
  auto bytes = wire::encode(body);
  bytes[at] = static_cast<std::byte>(value);
  return message(kind, bytes);
}

constexpr MessageKind kWithBody[] = {
    MessageKind::rendezvous_offer,   MessageKind::rendezvous_answer,
    MessageKind::lease_request,      MessageKind::lease_grant,
    MessageKind::lease_push,         MessageKind::lease_call,
    MessageKind::lease_reply,        MessageKind::tagged_lease_request,
    MessageKind::tagged_lease_grant, MessageKind::tagged_lease_push,
    MessageKind::lease_denial};

std::vector<Bad> bad_headers() {
  std::vector<Bad> all;
  for (std::size_t size = 0; size < wire::kMessageHeaderBytes; ++size)
    all.push_back({"truncated", cut(header(1, 0, 0, 0), size), kNoHeader});
  for (const int kind : {0, 17, 18, 128, 255})
    all.push_back({"kind", header(static_cast<std::uint8_t>(kind), 0, 0, 0), kNoHeader});
  for (const int flags : {2, 4, 8, 16, 32, 64, 128, 255})
    all.push_back({"flags", header(1, static_cast<std::uint8_t>(flags), 4, 4), kNoHeader});
  for (const std::uint32_t length : {0u, 3u, 5u, 0x7fffffffu, 0xffffffffu, 0xfffffffcu})
    all.push_back({"length", header(1, 0, length, 4), kNoHeader});
  all.push_back({"goodbye with bytes", header(3, 0, 1, 1), kNoHeader});
  all.push_back({"goodbye with a reason and bytes", header(3, 0, 2, 1), kNoHeader});
  for (const std::uint32_t number : {1u, 4u, 255u, 1u << 8, 3'600'001u << 8 | 2u, 1u << 31})
    all.push_back(
        {"goodbye without a known reason, or for too long", header(3, 0, number, 0), kNoHeader});
  for (const std::uint8_t kind : {std::uint8_t{11}, std::uint8_t{12}}) {
    all.push_back({"credit with bytes", header(kind, 0, 1, 1), kNoHeader});
    all.push_back({"credit with a length", header(kind, 0, 1, 0), kNoHeader});
    all.push_back({"credit's flags", header(kind, 2, 0, 0), kNoHeader});
  }
  all.push_back({"return with bytes", header(2, 0, 0, 1), kNoHeader});
  all.push_back({"return of all", header(2, 0, 1, 0), kNoHeader});
  all.push_back({"return of more", header(2, 0, 0x8000, 0), kNoHeader});
  all.push_back({"return of too much", header(2, 0, 0x8001, 0), kNoHeader});
  for (const MessageKind kind : kWithBody) {
    const auto size = static_cast<std::uint32_t>(wire::body_bytes(kind));
    const auto k = static_cast<std::uint8_t>(kind);
    all.push_back({"body short", header(k, 0, size - 1, size - 1), kNoHeader});
    all.push_back({"body long", header(k, 0, size + 1, size + 1), kNoHeader});
    all.push_back({"body's length", header(k, 0, size - 1, size), kNoHeader});
    all.push_back({"no body", header(k, 0, size, 0), kNoHeader});
  }
  return all;
}

std::vector<Bad> bad_transfers(const Peer& peer) {
  constexpr const char* kWords = "malformed";
  const wire::RendezvousOffer offer = peer.offer(5000, 1);
  wire::RendezvousOffer empty = offer, around = offer, longer = offer;
  empty.length = 0;
  around.address = ~std::uint64_t{0} - 100;
  longer.length = kLongest + 1;
  const auto say = [](MessageKind kind, const auto& body) {
    return message(kind, wire::encode(body));
  };
  return {
      {"offer of nothing", say(MessageKind::rendezvous_offer, empty), kWords},
      {"offer beyond memory", say(MessageKind::rendezvous_offer, around), kWords},
      {"offer's flags", with_byte(MessageKind::rendezvous_offer, offer, 20, 2), kWords},
      {"offer's flags", with_byte(MessageKind::rendezvous_offer, offer, 23, 0x80), kWords},
      {"offer too long", say(MessageKind::rendezvous_offer, longer), "max_message_bytes"},
      {"answer to none", say(MessageKind::rendezvous_answer, wire::RendezvousAnswer{65536}),
       kWords},
      {"answer to none", say(MessageKind::rendezvous_answer, wire::RendezvousAnswer{0xffffffff}),
       kWords},
      {"answer's verdict",
       with_byte(MessageKind::rendezvous_answer, wire::RendezvousAnswer{65536}, 4, 4), kWords},
      {"answer's rest",
       with_byte(MessageKind::rendezvous_answer, wire::RendezvousAnswer{65536}, 7, 1), kWords},
  };
}

std::vector<Bad> bad_leases() {
  constexpr const char* kMalformed = "malformed";
  wire::LeaseRequest request{4096, 1'000'000, 1, 8, 3};
  wire::LeaseGrant grant;
  grant.bytes = grant.address = 4096;
  grant.time = 10'000'000;
  grant.rkey = 1;
  grant.access = 3;
  wire::LeaseGrant no = grant;
  no.verdict = wire::LeaseVerdict::no_room;
  const wire::LeaseCall call{0, 65537, 1, wire::LeaseAction::took, wire::LeaseVerdict::granted};
  const wire::LeaseReply reply{0, 1, wire::LeaseVerdict::granted};
  const auto say = [](MessageKind kind, const auto& body) {
    return message(kind, wire::encode(body));
  };
  wire::LeaseRequest nothing = request;
  nothing.bytes = 0;
  return {
      {"request of nothing", say(MessageKind::lease_request, nothing), kMalformed},
      {"request's rest", with_byte(MessageKind::lease_request, request, 31, 1), kMalformed},
      {"grant of what nobody asked", say(MessageKind::lease_grant, grant), "answers no request"},
      {"refusal of it", say(MessageKind::lease_grant, no), "answers no request"},
      {"grant's verdict", with_byte(MessageKind::lease_grant, grant, 37, 11), kMalformed},
      {"push's flags", with_byte(MessageKind::lease_push, grant, 38, 2), kMalformed},
      {"push without rights", with_byte(MessageKind::lease_push, grant, 36, 0), kMalformed},
      {"push of nothing", say(MessageKind::lease_push, no), "leases nothing"},
      {"took what was not given", say(MessageKind::lease_call, call), "not leased to it"},
      {"call's action", with_byte(MessageKind::lease_call, call, 16, 5), kMalformed},
      {"call's rest", with_byte(MessageKind::lease_call, call, 23, 1), kMalformed},
      {"reply's verdict", with_byte(MessageKind::lease_reply, reply, 12, 11), kMalformed},
      {"reply's time", with_byte(MessageKind::lease_reply, reply, 7, 0xff), kMalformed},
  };
}

void expect_each_refused(Attacked& t, const std::vector<Bad>& all) {
  for (const Bad& one : all) {
    SCOPED_TRACE(std::string(one.name) + ", " + testing::PrintToString(one.bytes.size()) +
                 " bytes");
    t.begin();
    ASSERT_TRUE(t.peer.send(one.bytes, one.how));
    t.expect_refused(one.words);
    EXPECT_EQ(t.delivered, 0u);
    if (testing::Test::HasFailure()) return;
  }
  t.finish();
}

TEST_F(HostilePeer, EveryFieldOfAHeaderIsChecked) {
  Attacked t;
  expect_each_refused(t, bad_headers());
}

TEST_F(HostilePeer, OffersAndAnswersAreChecked) {
  Attacked t;
  expect_each_refused(t, bad_transfers(t.peer));
}

TEST_F(HostilePeer, MessagesAboutLeasesAreChecked) {
  Attacked t;
  expect_each_refused(t, bad_leases());
}

TEST_F(HostilePeer, MessagesWithAnImmediateAreChecked) {
  Attacked t;
  std::vector<Bad> all = bad_transfers(t.peer);
  all.push_back({"flags", header(1, 2, 4, 4), kNoHeader});
  all.push_back({"truncated", Bytes(3), kNoHeader});
  for (Bad& one : all) one.how = {IBV_WR_SEND_WITH_IMM, 77};
  expect_each_refused(t, all);
}

TEST_F(HostilePeer, AMessageLongerThanAReceiveIsRefused) {
  Attacked t;
  const std::uint32_t eager = t.node.engine.config().connections.eager_bytes;
  const Bytes most = header(1, 0, eager, eager);
  t.begin();
  ASSERT_TRUE(t.peer.send(most));
  ASSERT_TRUE(t.until([&] { return t.delivered == 1; }));
  EXPECT_EQ(t.bytes, eager);
  for (const std::uint32_t more : {1u, 1000u}) {
    ASSERT_TRUE(t.peer.send(header(1, 0, eager + more, eager + more)));
    t.expect_refused("more than the limit");
    t.begin();
  }
  (void)t.victim.close();
  t.expect_ended(Status::ok, "", 0);
  t.finish();
}

}  // namespace
}  // namespace hostile_test
