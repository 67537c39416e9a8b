// Malformed messages, field by field. Each ends the peer's connection with a reason and does not
// affect other connections. hostile_state_test.cc sends valid messages in the wrong state.
#include <type_traits>
#include <utility>

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
    MessageKind::lease_denial,       MessageKind::local_offer};

std::vector<Bad> bad_headers() {
  std::vector<Bad> all;
  for (std::size_t size = 0; size < wire::kMessageHeaderBytes; ++size)
    all.push_back({"truncated", cut(header(1, 0, 0, 0), size), kNoHeader});
  for (const int kind : {0, 18, 19, 128, 255})
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
  const wire::LocalOffer local = peer.local_offer(5000, 1);
  wire::LocalOffer local_empty = local, local_around = local, local_longer = local;
  wire::LocalOffer immediate = local;
  local_empty.length = 0;
  local_around.address = ~std::uint64_t{0} - 100;
  local_longer.length = kLongest + 1;
  immediate.immediate = 7;
  const auto say = [](MessageKind kind, const auto& body) {
    return message(kind, wire::encode(body));
  };
  return {
      {"offer of nothing", say(MessageKind::rendezvous_offer, empty), kWords},
      {"offer beyond memory", say(MessageKind::rendezvous_offer, around), kWords},
      {"offer's flags", with_byte(MessageKind::rendezvous_offer, offer, 20, 2), kWords},
      {"offer's flags", with_byte(MessageKind::rendezvous_offer, offer, 23, 0x80), kWords},
      {"offer too long", say(MessageKind::rendezvous_offer, longer), "max_message_bytes"},
      {"local offer of nothing", say(MessageKind::local_offer, local_empty), kWords},
      {"local offer beyond memory", say(MessageKind::local_offer, local_around), kWords},
      {"local offer's immediate", say(MessageKind::local_offer, immediate), kWords},
      {"local offer's flags", with_byte(MessageKind::local_offer, local, 24, 2), kWords},
      {"local offer's rest", with_byte(MessageKind::local_offer, local, 27, 0x80), kWords},
      {"local offer too long", say(MessageKind::local_offer, local_longer), "max_message_bytes"},
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

/// A message about a lease with one field changed.
template <typename Body, typename Change>
Bad changed(const char* name, MessageKind kind, Body body, Change&& change,
            const char* words = "malformed") {
  change(body);
  return {name, message(kind, wire::encode(body)), words};
}

/// Grants and pushes of which one field is impossible.
template <typename Grant>
void add_bad_grants(std::vector<Bad>& all, MessageKind kind) {
  Grant good;
  good.bytes = good.address = 4096;
  good.time = 10'000'000;
  good.lease = 1;
  good.rkey = 1;
  good.access = 3;
  good.tag = 7;
  const auto with = [&](const char* name, auto&& change) {
    all.push_back(changed(name, kind, good, change));
  };
  with("grant beyond memory", [](auto& g) { g.address = ~std::uint64_t{0} - 4095; });
  with("grant around memory", [](auto& g) { g.bytes = ~std::uint64_t{0}; });
  with("grant of no bytes", [](auto& g) { g.bytes = 0; });
  with("grant without a key", [](auto& g) { g.rkey = 0; });
  with("grant for no time", [](auto& g) { g.time = 0; });
  with("grant for too long", [](auto& g) { g.time = wire::kLongestLease + 1; });
  with("grant for ever", [](auto& g) { g.time = ~std::uint64_t{0}; });
  for (const int access : {0, 8, 255})
    with("grant's rights", [access](auto& g) { g.access = static_cast<std::uint8_t>(access); });
  for (const int verdict : {11, 255})
    with("grant's verdict",
         [verdict](auto& g) { g.verdict = static_cast<wire::LeaseVerdict>(verdict); });
  all.push_back({"grant's flags", with_byte(kind, good, 38, 2), "malformed"});
  all.push_back({"grant's rest", with_byte(kind, good, 39, 1), "malformed"});
  if (std::is_same_v<Grant, wire::TaggedLeaseGrant>)
    with("grant's tag", [](auto& g) { g.tag = 0; });
}

/// Grants of no request, by each of the names that a record may have had, and pushes of nothing.
template <typename Grant>
void add_grants_of_nothing(std::vector<Bad>& all, MessageKind kind, MessageKind push) {
  Grant grant;
  grant.bytes = grant.address = 4096;
  grant.time = 10'000'000;
  grant.rkey = 1;
  grant.access = 3;
  grant.tag = ~std::uint64_t{0};
  for (const std::uint32_t id : {0u, 1u, 65536u, 0xffffffffu}) {
    const auto named = [id](auto& g) { g.id = id; };
    all.push_back(changed("grant of nothing", kind, grant, named, "answers no request"));
    Grant refused = grant;
    refused.verdict = wire::LeaseVerdict::unwanted;
    all.push_back(changed("refusal of nothing", kind, refused, named, "answers no request"));
  }
  for (int verdict = 1; verdict <= 10; ++verdict) {
    all.push_back(changed(
        "push of nothing", push, grant,
        [verdict](auto& g) { g.verdict = static_cast<wire::LeaseVerdict>(verdict); },
        "leases nothing"));
  }
}

std::vector<Bad> bad_tagged_leases() {
  std::vector<Bad> all;
  const wire::TaggedLeaseRequest request{{4096, 1'000'000, 1, 8, 3, 7}};
  constexpr auto kRequest = MessageKind::tagged_lease_request;
  all.push_back(changed("request of nothing", kRequest, request, [](auto& r) { r.bytes = 0; }));
  all.push_back(changed("request's tag", kRequest, request, [](auto& r) { r.tag = 0; }));
  for (std::size_t at = 25; at < wire::kLeaseRequestBytes; ++at)
    all.push_back({"request's rest", with_byte(kRequest, request, at, 0x80), "malformed"});
  for (const auto kind : {MessageKind::tagged_lease_grant, MessageKind::tagged_lease_push})
    add_bad_grants<wire::TaggedLeaseGrant>(all, kind);
  for (const auto kind : {MessageKind::lease_grant, MessageKind::lease_push})
    add_bad_grants<wire::LeaseGrant>(all, kind);
  add_grants_of_nothing<wire::TaggedLeaseGrant>(all, MessageKind::tagged_lease_grant,
                                                MessageKind::tagged_lease_push);
  add_grants_of_nothing<wire::LeaseGrant>(all, MessageKind::lease_grant, MessageKind::lease_push);
  // A tag where none is, and none where one is.
  const std::pair<MessageKind, std::size_t> swapped[] = {
      {MessageKind::lease_request, wire::kTaggedLeaseRequestBytes},
      {MessageKind::lease_grant, wire::kTaggedLeaseGrantBytes},
      {MessageKind::lease_push, wire::kTaggedLeaseGrantBytes},
      {kRequest, wire::kLeaseRequestBytes},
      {MessageKind::tagged_lease_grant, wire::kLeaseGrantBytes},
      {MessageKind::tagged_lease_push, wire::kLeaseGrantBytes}};
  for (const auto& [kind, size] : swapped)
    all.push_back({"tag's length", message(kind, Bytes(size, std::byte{1})), kNoHeader});
  return all;
}

std::vector<Bad> bad_denials() {
  constexpr auto kDenial = MessageKind::lease_denial;
  std::vector<Bad> all;
  wire::LeaseDenial denial;
  denial.code = 0xffffffff;
  wire::set_text(denial, "not for you");
  for (const std::uint32_t id : {0u, 1u, 65536u, 0xffffffffu}) {
    all.push_back(changed(
        "denial of nothing", kDenial, denial, [id](auto& d) { d.id = id; }, "answers no request"));
  }
  for (const int c : {0x01, 0x0a, 0x1b, 0x1f, 0x7f, 0x80, 0xff}) {
    for (const std::size_t at : {std::size_t{0}, std::size_t{10}}) {
      const auto put = [c, at](auto& d) { d.text[at] = static_cast<std::uint8_t>(c); };
      all.push_back(changed("denial's text", kDenial, denial, put));
    }
  }
  for (const std::size_t at : {std::size_t{12}, wire::kDenialTextMax - 1}) {
    const auto put = [at](auto& d) { d.text[at] = 'x'; };
    all.push_back(changed("text behind its end", kDenial, denial, put));
  }
  return all;
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

TEST_F(HostilePeer, MessagesAboutLeasesWithATagAreChecked) {
  Attacked t;
  expect_each_refused(t, bad_tagged_leases());
}

TEST_F(HostilePeer, DenialsOfLeasesAreChecked) {
  Attacked t;
  expect_each_refused(t, bad_denials());
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
