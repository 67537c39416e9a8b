// A peer that violates the protocol of leases with well-formed messages: in the wrong state, about
// leases of other connections, or beyond the limits.
#include "agent/hostile_peer.h"
#include "spinwire/lease.h"

namespace hostile_leases_test {
namespace {

using namespace hostile_peer;  // NOLINT: a test's helpers
using spinwire::KeyScope;
using spinwire::LeaseOptions;
using spinwire::LeaseReply;
using spinwire::RemoteMemory;
using spinwire::Returned;
using spinwire::ReturnedBy;
using wire::LeaseAction;
using wire::LeaseVerdict;

/// The name of an engine's first lease: see agent::LeaseRecords.
constexpr std::uint32_t kFirst = 1;

constexpr std::uint64_t kTag = ~std::uint64_t{0};

/// The peer as a holder and an owner of leases. It sends each message once it has credit.
struct Talk : Attacked {
  explicit Talk(const Config& c = hostile_config()) : Attacked(c) {
    node.on_returned = [this](Connection, const Returned& r) { returned.push_back(r.how); };
    begin();
  }
  ~Talk() {
    for (Node* each : {&node, &friendly}) {
      each->on_returned = nullptr;
      each->on_lease = nullptr;
    }
  }
  template <typename Body>
  void say(MessageKind kind, const Body& body, const How& how = {}) {
    ASSERT_TRUE(until([&] { return peer.granted() > said; }));
    ASSERT_TRUE(peer.send(message(kind, wire::encode(body), wire::message_flag::kWantCredit), how));
    ++said;
  }
  void call(std::uint32_t which, LeaseAction action, std::uint64_t time = 0, const How& how = {}) {
    say(MessageKind::lease_call, wire::LeaseCall{time, which, 77, action, LeaseVerdict::granted},
        how);
  }
  /// The engine's next message of this kind.
  template <typename Body>
  Body hear(MessageKind kind) {
    Body body;
    const auto next = [&] {
      while (taken < peer.heard.size() && peer.heard[taken].header.kind != kind) ++taken;
      return taken < peer.heard.size();
    };
    EXPECT_TRUE(until(next));
    if (next()) {
      EXPECT_TRUE(wire::decode(peer.heard[taken++].body, body));
    }
    peer.grant(1);
    return body;
  }
  LeaseVerdict replied() { return hear<wire::LeaseReply>(MessageKind::lease_reply).verdict; }
  /// Leases memory of the engine to the peer.
  wire::LeaseGrant push(const Buffer& b) {
    EXPECT_EQ(victim.lease(b.slice(), {}, [this](LeaseReply& r) { lease = r.lease; }), Status::ok);
    return hear<wire::LeaseGrant>(MessageKind::lease_push);
  }
  wire::LeaseGrant take(const Buffer& b) {
    const wire::LeaseGrant grant = push(b);
    lease = {};
    call(grant.lease, LeaseAction::took);
    EXPECT_TRUE(until([&] { return static_cast<bool>(lease); }));
    return grant;
  }
  /// A lease that the peer grants, as an answer or unasked.
  [[nodiscard]] wire::LeaseGrant grant(std::uint64_t size, spinwire::Nanoseconds time,
                                       std::uint32_t id = 0) {
    wire::LeaseGrant g;
    g.address = peer.offer(1, 1).address;
    g.bytes = size;
    g.time = static_cast<std::uint64_t>(time.count());
    g.id = id;
    g.lease = 1;
    g.rkey = peer.rkey();
    g.access = static_cast<std::uint8_t>(Access::remote_read_write);
    return g;
  }
  /// Sends a message as it is, or as the one of its kind that has a tag.
  void send_tagged(bool tagged, MessageKind kind, const wire::LeaseGrant& g) {
    if (!tagged) return say(kind, g);
    wire::TaggedLeaseGrant with{g};
    with.tag = kTag;
    say(kind == MessageKind::lease_grant ? MessageKind::tagged_lease_grant
                                         : MessageKind::tagged_lease_push,
        with);
  }
  void send_tagged(bool tagged, const wire::LeaseRequest& r) {
    if (!tagged) return say(MessageKind::lease_request, r);
    wire::TaggedLeaseRequest with{r};
    with.tag = kTag;
    say(MessageKind::tagged_lease_request, with);
  }
  void deny(std::uint32_t id) {
    wire::LeaseDenial denial{id, 99, {}};
    wire::set_text(denial, "no");
    say(MessageKind::lease_denial, denial);
  }
  void end() {
    (void)victim.close();
    expect_ended(Status::ok, "", 0);
    finish();
  }

  std::vector<ReturnedBy> returned;
  spinwire::LeaseId lease;
  std::uint64_t said = 0;
  std::size_t taken = 0;
};

class HostileLeases : public HostilePeer {};

TEST_F(HostileLeases, OneIsTakenOnceAndNotCalledAboutBefore) {
  const std::pair<std::vector<LeaseAction>, const char*> cases[] = {
      {{LeaseAction::took, LeaseAction::took}, "not leased to it"},
      {{LeaseAction::release}, "does not have"},
      {{LeaseAction::give_back}, "does not have"},
      {{LeaseAction::renew}, "does not have"},
  };
  for (const auto& [actions, words] : cases) {
    SCOPED_TRACE(static_cast<int>(actions.back()));
    Talk t;
    {
      const Buffer b = t.node.filled(64, 1);
      const wire::LeaseGrant grant = t.push(b);
      for (const LeaseAction action : actions) t.call(grant.lease, action, 1'000'000);
    }
    t.expect_refused(words);
    EXPECT_EQ(t.returned, std::vector{ReturnedBy::end});
    t.finish();
  }
}

TEST_F(HostileLeases, WhatWasOnlyExposedIsNoLease) {
  Talk t;
  {
    const Buffer b = t.node.filled(64, 1);
    ASSERT_TRUE(t.victim.expose(b.slice(), Access::remote_write, KeyScope::connection));
  }
  t.call(kFirst, LeaseAction::release);
  t.expect_refused("does not have");
  EXPECT_EQ(t.returned, std::vector{ReturnedBy::end});
  t.finish();
}

TEST_F(HostileLeases, OneThatIsRecalledIsNotRenewed) {
  Talk t;
  {
    const Buffer b = t.node.filled(64, 1);
    const wire::LeaseGrant grant = t.take(b);
    t.call(grant.lease, LeaseAction::renew, 1'000'000'000);
    EXPECT_EQ(t.replied(), LeaseVerdict::granted);
    ASSERT_EQ(t.victim.recall(t.lease), Status::ok);
    const auto recall = t.hear<wire::LeaseCall>(MessageKind::lease_call);
    EXPECT_EQ(recall.action, LeaseAction::recall);
    EXPECT_EQ(recall.lease, grant.lease);
    t.call(grant.lease, LeaseAction::renew, 1'000'000'000);
    EXPECT_EQ(t.replied(), LeaseVerdict::over);
    t.call(grant.lease, LeaseAction::release);
    ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
    EXPECT_EQ(t.returned[0], ReturnedBy::recall);
  }
  t.end();
}

TEST_F(HostileLeases, OneThatIsRecalledBeforeItIsTakenEndsByItself) {
  Config c = hostile_config();
  c.connections.close_timeout = 100ms;
  c.queue_pair.ack_timeout = 8;
  Talk t(c);
  {
    const Buffer b = t.node.filled(64, 1);
    LeaseOptions options;
    options.duration = 1h;
    spinwire::LeaseId id;
    ASSERT_EQ(t.victim.lease(b, options, {}, &id), Status::ok);
    ASSERT_TRUE(id);
    const auto grant = t.hear<wire::LeaseGrant>(MessageKind::lease_push);
    ASSERT_EQ(t.victim.recall(id), Status::ok);
    EXPECT_EQ(t.hear<wire::LeaseCall>(MessageKind::lease_call).action, LeaseAction::recall);
    t.call(grant.lease, LeaseAction::took);  // and the peer never returns it
    ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
    EXPECT_EQ(t.returned[0], ReturnedBy::recall);
  }
  t.end();
}

TEST_F(HostileLeases, ThoseOfOtherConnectionsAreOutOfReach) {
  Talk t;
  RemoteMemory theirs;
  t.friendly.on_lease = [&](Connection, RemoteMemory& m) { theirs = std::move(m); };
  spinwire::LeaseId id;
  {
    const Buffer b = t.node.filled(64, 1);
    ASSERT_EQ(t.honest.server.lease(b.slice(), {}, [&](LeaseReply& r) { id = r.lease; }),
              Status::ok);
  }
  ASSERT_TRUE(t.until([&] { return static_cast<bool>(id); }));
  t.call(id.value, LeaseAction::release);
  t.call(id.value, LeaseAction::give_back);
  EXPECT_EQ(t.replied(), LeaseVerdict::over);
  t.call(id.value, LeaseAction::renew, 1'000'000'000);
  EXPECT_EQ(t.replied(), LeaseVerdict::over);
  EXPECT_TRUE(t.returned.empty());
  theirs.release();
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
  EXPECT_EQ(t.returned[0], ReturnedBy::release);
  t.end();
}

TEST_F(HostileLeases, RequestsOfOtherConnectionsAreNotAnsweredByIt) {
  for (const auto kind :
       {MessageKind::lease_grant, MessageKind::tagged_lease_grant, MessageKind::lease_denial}) {
    SCOPED_TRACE(static_cast<int>(kind));
    Talk t;
    RemoteMemory memory;
    int told = 0;
    bool back = false;
    t.friendly.on_returned = [&](Connection, const Returned&) { back = true; };
    ASSERT_EQ(t.honest.server.request_memory(64, {},
                                             [&](LeaseReply& r) {
                                               ++told;
                                               memory = std::move(r.memory);
                                             }),
              Status::ok);
    if (kind == MessageKind::lease_denial) {
      t.deny(kFirst);
    } else {
      t.send_tagged(kind != MessageKind::lease_grant, MessageKind::lease_grant,
                    t.grant(64, 1s, kFirst));
    }
    ASSERT_TRUE(until({&t.node}, [&] {  // alone, so that the peer does not answer
      t.peer.control();
      return !t.node.closed.empty();
    }));
    EXPECT_EQ(told, 0);
    ASSERT_TRUE(t.until([&] { return static_cast<bool>(memory); }));
    memory.release();
    ASSERT_TRUE(t.until([&] { return back; }));
    t.expect_refused("answers no request");
    EXPECT_EQ(told, 1);
    t.finish();
  }
}

/// A request of the engine that the peer has heard, and what came of it.
struct Request {
  explicit Request(Talk& t) {
    LeaseOptions options;
    options.duration = 1s;
    EXPECT_EQ(t.victim.request_memory(64, options,
                                      [this](LeaseReply& r) {
                                        told = r.status;
                                        code = r.code;
                                        text = std::string(r.text);
                                        memory = std::move(r.memory);
                                      }),
              Status::ok);
    id = t.hear<wire::LeaseRequest>(MessageKind::lease_request).id;
  }
  std::uint32_t id = 0;
  std::optional<std::uint32_t> code;
  std::string text;
  RemoteMemory memory;
  std::optional<Status> told;
};

TEST_F(HostileLeases, AGrantIsOfWhatWasAsked) {
  const auto all = static_cast<std::uint8_t>(Access::remote_all);
  for (const int which : {0, 1, 2, 3, 4, 10, 11, 12, 13, 14}) {
    SCOPED_TRACE(which);
    const bool tagged = which >= 10;
    Talk t;
    Request request(t);
    wire::LeaseGrant grant = t.grant(64, 1s, request.id);
    if (which % 10 == 1) ++grant.bytes;
    if (which % 10 == 2) --grant.bytes;
    if (which % 10 == 3) grant.access = all;
    if (which % 10 == 4) grant.time += 1'000'000;
    t.send_tagged(tagged, MessageKind::lease_grant, grant);
    if (which % 10 != 0) {
      t.expect_refused("grants what was not asked for");
      EXPECT_EQ(request.told, Status::flushed);
      EXPECT_FALSE(request.memory);
      t.finish();
      continue;
    }
    ASSERT_TRUE(t.until([&] { return static_cast<bool>(request.memory); }));
    EXPECT_EQ(request.memory.tag(), tagged ? kTag : 0);
    request.memory.release();
    EXPECT_EQ(t.hear<wire::LeaseCall>(MessageKind::lease_call).action, LeaseAction::release);
    t.end();
  }
}

TEST_F(HostileLeases, ARequestIsAnsweredOnce) {
  enum class Answer : std::uint8_t { grant, tagged_grant, denial };
  constexpr Answer kAnswers[] = {Answer::grant, Answer::tagged_grant, Answer::denial};
  for (const Answer first : kAnswers) {
    for (const Answer second : kAnswers) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(first) << static_cast<int>(second));
      Talk t;
      Request request(t);
      const auto answer = [&](Answer how) {
        if (how == Answer::denial) return t.deny(request.id);
        t.send_tagged(how == Answer::tagged_grant, MessageKind::lease_grant,
                      t.grant(64, 1s, request.id));
      };
      answer(first);
      ASSERT_TRUE(t.until([&] { return request.told.has_value(); }));
      const bool denied = first == Answer::denial;
      EXPECT_EQ(request.told, denied ? Status::refused : Status::ok);
      EXPECT_EQ(request.code, denied ? std::optional(99u) : std::nullopt);
      EXPECT_EQ(request.text, denied ? "no" : "");
      EXPECT_EQ(static_cast<bool>(request.memory), !denied);
      answer(second);
      t.expect_refused("answers no request");
      EXPECT_EQ(request.told, denied ? Status::refused : Status::ok);
      t.finish();
    }
  }
}

TEST_F(HostileLeases, ARenewalIsNotForLongerThanWasAsked) {
  for (const std::uint64_t more :
       {std::uint64_t{0}, std::uint64_t{1'000'000}, wire::kLongestLease}) {
    SCOPED_TRACE(more);
    Talk t;
    RemoteMemory memory;
    std::optional<Status> told;
    LeaseOptions options;
    options.duration = 1s;
    ASSERT_EQ(
        t.victim.request_memory(64, options, [&](LeaseReply& r) { memory = std::move(r.memory); }),
        Status::ok);
    const auto asked = t.hear<wire::LeaseRequest>(MessageKind::lease_request);
    t.say(MessageKind::lease_grant, t.grant(64, 1s, asked.id));
    ASSERT_TRUE(t.until([&] { return static_cast<bool>(memory); }));
    ASSERT_EQ(memory.renew(2s, [&](LeaseReply& r) { told = r.status; }), Status::ok);
    const auto call = t.hear<wire::LeaseCall>(MessageKind::lease_call);
    EXPECT_EQ(call.action, LeaseAction::renew);
    const std::uint64_t time = std::min(call.time + more, wire::kLongestLease);
    t.say(MessageKind::lease_reply, wire::LeaseReply{time, call.id, LeaseVerdict::granted});
    if (more != 0) {
      t.expect_refused("grants what was not asked for");
      EXPECT_EQ(told, Status::flushed);
      t.finish();
      continue;
    }
    ASSERT_TRUE(t.until([&] { return told.has_value(); }));
    EXPECT_EQ(told, Status::ok);
    memory.release();
    EXPECT_EQ(t.hear<wire::LeaseCall>(MessageKind::lease_call).action, LeaseAction::release);
    t.end();
  }
}

TEST_F(HostileLeases, WhatIsPushedHasItsLimits) {
  Config c = hostile_config();
  c.leases.count = 3;
  for (const bool tagged : {false, true}) {
    SCOPED_TRACE(tagged);
    Talk t(c);
    std::vector<RemoteMemory> held;
    t.node.on_lease = [&](Connection, RemoteMemory& m) {
      EXPECT_EQ(m.tag(), tagged ? kTag : 0);
      held.push_back(std::move(m));
    };
    const auto pushed = [&](spinwire::Nanoseconds time) {
      t.send_tagged(tagged, MessageKind::lease_push, t.grant(64, time));
      return t.hear<wire::LeaseCall>(MessageKind::lease_call).verdict;
    };
    EXPECT_EQ(pushed(c.leases.guard), LeaseVerdict::bad_duration);
    EXPECT_EQ(pushed(c.leases.guard + 1us), LeaseVerdict::granted);
    EXPECT_EQ(pushed(10s), LeaseVerdict::granted);
    EXPECT_EQ(pushed(10s), LeaseVerdict::granted);
    EXPECT_EQ(pushed(10s), LeaseVerdict::too_many);
    EXPECT_EQ(held.size(), 3u);
    held.clear();
    EXPECT_EQ(pushed(10s), LeaseVerdict::granted);
    held.clear();
    t.end();
  }
}

TEST_F(HostileLeases, RequestsAreJudgedToTheLastByte) {
  Config c = hostile_config();
  c.leases.max_bytes = 8192;
  c.leases.max_duration = 2s;
  c.leases.max_alignment = 256;
  c.queue_pair.access = Access::remote_read;
  Talk t(c);
  const std::uint64_t longest = 2'000'000'000;
  const std::pair<wire::LeaseRequest, LeaseVerdict> cases[] = {
      {{8192, longest, 1, 256, 1}, LeaseVerdict::granted},
      {{8193, longest, 1, 256, 1}, LeaseVerdict::too_long},
      {{8192, longest + 1, 1, 256, 1}, LeaseVerdict::bad_duration},
      {{8192, 0, 1, 256, 1}, LeaseVerdict::bad_duration},
      {{8192, longest, 1, 512, 1}, LeaseVerdict::misaligned},
      {{8192, longest, 1, 24, 1}, LeaseVerdict::misaligned},
      {{8192, longest, 1, 0, 1}, LeaseVerdict::misaligned},
      {{8192, longest, 1, 1, 0}, LeaseVerdict::no_right},
      {{8192, longest, 1, 1, 2}, LeaseVerdict::no_right},
      {{8192, longest, 1, 1, 9}, LeaseVerdict::no_right},
      {{8192, longest, 1, 1, 255}, LeaseVerdict::no_right},
      {{~std::uint64_t{0}, longest, 1, 1, 1}, LeaseVerdict::too_long},
      {{8192, ~std::uint64_t{0}, 1, 1, 1}, LeaseVerdict::bad_duration},
      {{8192, longest, 1, 0x80000000, 1}, LeaseVerdict::misaligned},
      {{8192, longest, 0xffffffff, 256, 1}, LeaseVerdict::granted},
      {{8192, longest, 1, 1, 7}, LeaseVerdict::granted},
  };
  for (std::size_t i = 0; i < 2 * std::size(cases); ++i) {
    SCOPED_TRACE(i);
    const bool tagged = i % 2 != 0;
    const auto& [request, verdict] = cases[i / 2];
    t.send_tagged(tagged, request);
    // A refusal has no tag.
    wire::LeaseGrant grant;
    if (tagged && verdict == LeaseVerdict::granted) {
      const auto with = t.hear<wire::TaggedLeaseGrant>(MessageKind::tagged_lease_grant);
      EXPECT_EQ(with.tag, kTag);
      grant = with;
    } else {
      grant = t.hear<wire::LeaseGrant>(MessageKind::lease_grant);
    }
    EXPECT_EQ(grant.verdict, verdict);
    if (grant.verdict != LeaseVerdict::granted) continue;
    EXPECT_EQ(grant.access, static_cast<std::uint8_t>(Access::remote_read));
    EXPECT_EQ(grant.address % request.alignment, 0u);
    t.call(grant.lease, LeaseAction::renew, longest);
    EXPECT_EQ(t.replied(), LeaseVerdict::granted);
    t.call(grant.lease, LeaseAction::renew, longest + 1);
    EXPECT_EQ(t.replied(), LeaseVerdict::bad_duration);
    t.call(grant.lease, LeaseAction::renew, 0);
    EXPECT_EQ(t.replied(), LeaseVerdict::bad_duration);
    t.call(grant.lease, LeaseAction::give_back);
    EXPECT_EQ(t.replied(), LeaseVerdict::granted);
  }
  t.end();
}

TEST_F(HostileLeases, InvalidatingAnothersKeyEndsNotItsOwn) {
  Talk t;
  Buffer first = t.node.filled(64, 1), second = t.node.filled(64, 2);
  const wire::LeaseGrant a = t.take(first), b = t.take(second);
  ASSERT_TRUE(a.invalidate && b.invalidate);
  t.call(a.lease, LeaseAction::release, 0, {IBV_WR_SEND_WITH_INV, 0, b.rkey});
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
  // The lease is returned: the key is closed, but not by the peer's action.
  ASSERT_TRUE(t.peer.send(Bytes(8), {IBV_WR_RDMA_WRITE, 0, 0, a.address, a.rkey}));
  ASSERT_TRUE(t.until([&] { return t.peer.dead(); }));
  EXPECT_TRUE(Node::holds(first.bytes(), 1));
  ASSERT_TRUE(t.until([&] {
    (void)t.victim.send_copy(std::as_bytes(std::span("?", 1)));
    return !t.node.closed.empty();
  }));
  t.expect_ended(t.node.closed[0].status, "", 0);
  EXPECT_EQ(t.returned.size(), 2u);
  first.reset();
  second.reset();
  t.finish();
}

TEST_F(HostileLeases, SilenceIsNoMessageAndEndsTheConnectionInTime) {
  Config c = hostile_config();
  c.connections.peer_timeout = 50ms;
  c.connections.keepalive_interval = 10ms;
  for (const bool pushes : {true, false}) {
    Talk t(c);
    {
      const Buffer b = t.node.filled(64, 1);
      ASSERT_EQ(pushes ? t.victim.lease(b.slice(), {})
                       : t.victim.request_memory(64, {}, [](LeaseReply&) {}),
                Status::ok);
    }
    t.expect_ended(Status::peer_lost, "no answer came in time", 0);
    EXPECT_EQ(t.returned.size(), pushes ? 1u : 0u);
    t.finish();
  }
}

TEST_F(HostileLeases, AWindowWhoseEndIsHeldUpEndsTheConnectionInTime) {
  Config c = hostile_config();
  c.connections.close_timeout = 50ms;
  Talk t(c);
  {
    const Buffer b = t.node.filled(64, 1);
    const auto region = t.victim.expose(b.slice(), Access::remote_write, KeyScope::connection);
    ASSERT_TRUE(region);
    ASSERT_EQ(t.victim.send(b), Status::ok);  // which the peer does not pull
    ASSERT_EQ(t.victim.revoke(*region), Status::would_block);
  }
  ASSERT_TRUE(until({&t.node, &t.friendly}, [&] { return !t.node.closed.empty(); }));
  t.expect_ended(Status::peer_lost, "does not end in time", 0);
  EXPECT_EQ(t.returned.size(), 1u);
  t.finish();
}

}  // namespace
}  // namespace hostile_leases_test
