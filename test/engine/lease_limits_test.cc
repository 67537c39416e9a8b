// Which lease calls are refused and why, and the keys of leased and exposed memory.
#include "engine/lease_ends.h"
#include "wire/region_token.h"

namespace lease_limits_test {
namespace {

using namespace leases;  // NOLINT: a test's helpers

TEST(EngineLeasesLimits, EachRefusalTellsItsReason) {
  Config c = lease_config();
  c.leases.max_bytes = 64u << 10;
  c.leases.total_bytes = 100u << 10;
  c.leases.count = 3;
  c.leases.max_alignment = 1024;
  c.leases.max_duration = 2s;
  Leases t(c);
  LeaseOptions good;
  good.duration = 1s;
  const auto refused = [&](std::size_t bytes, const LeaseOptions& options, LeaseRefusal why,
                           Status status) {
    SCOPED_TRACE(to_string(why));
    EXPECT_FALSE(t.request(bytes, options));
    EXPECT_EQ(t.reply->refusal, why) << to_string(t.reply->refusal);
    EXPECT_EQ(t.reply->status, status);
  };
  refused((64u << 10) + 1, good, LeaseRefusal::too_long, Status::limit);
  for (const std::uint32_t alignment : {0u, 3u, 2048u}) {
    LeaseOptions o = good;
    o.alignment = alignment;
    refused(8, o, LeaseRefusal::misaligned, Status::limit);
  }
  LeaseOptions late = good;
  late.duration = 3s;
  refused(8, late, LeaseRefusal::bad_duration, Status::limit);
  LeaseOptions aligned = good;
  aligned.alignment = 1024;
  RemoteMemory first = t.request(64u << 10, aligned);
  ASSERT_TRUE(first);
  EXPECT_EQ(first.region().address % 1024, 0u);
  refused((36u << 10) + 1, good, LeaseRefusal::too_much, Status::limit);
  const RemoteMemory second = t.request(36u << 10, good);
  ASSERT_TRUE(second);
  refused(1, good, LeaseRefusal::too_much, Status::limit);
  first.release();
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
  const RemoteMemory third = t.request(8, good), fourth = t.request(8, good);
  ASSERT_TRUE(third && fourth);
  refused(8, good, LeaseRefusal::too_many, Status::limit);
  t.finish();
}

TEST(EngineLeasesLimits, APoolThatIsDryIsToldAndServesAgain) {
  Config c = lease_config();
  c.leases.max_bytes = 4u << 20;
  Leases t(c);
  RemoteMemory most = t.request(3u << 20);
  ASSERT_TRUE(most) << to_string(t.reply->refusal);
  EXPECT_FALSE(t.request(2u << 20));
  EXPECT_EQ(t.reply->refusal, LeaseRefusal::no_room);
  EXPECT_EQ(t.reply->status, Status::no_buffer);
  most.release();
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
  EXPECT_TRUE(t.request(2u << 20));
  t.finish();
}

TEST(EngineLeasesLimits, AConnectionHasItsOwn) {
  Leases t;
  spinwire::ConnectionSettings tight;
  LeaseLimits limits;
  limits.max_bytes = 16;
  limits.max_alignment = 3;
  tight.leases = limits;
  bool told = false;
  t.server.on_accept = [&](Connection c) {
    const auto bad = c.configure(tight);
    ASSERT_FALSE(bad);
    EXPECT_EQ(bad.error().status, Status::invalid_argument);
    tight.leases->max_alignment = 4;
    EXPECT_TRUE(c.configure(tight));
    told = true;
  };
  const Ends other = connect(t.client, t.server);
  ASSERT_TRUE(told);
  std::optional<LeaseRefusal> why;
  ASSERT_EQ(other.client.state(), ConnectionState::ready);
  Connection second = other.client;
  ASSERT_EQ(second.request_memory(17, {}, [&](LeaseReply& r) { why = r.refusal; }), Status::ok);
  ASSERT_TRUE(t.until([&] { return why.has_value(); }));
  EXPECT_EQ(*why, LeaseRefusal::too_long);
  EXPECT_TRUE(t.request(17));  // the first connection has the engine's limits
  t.finish();
}

TEST(EngineLeasesLimits, RightsAreThoseThatBothWant) {
  Config c = lease_config();
  c.queue_pair.access = Access::remote_read;
  Leases t(c);
  LeaseOptions options;
  RemoteMemory memory = t.request(64, options);
  ASSERT_TRUE(memory);
  EXPECT_EQ(memory.access(), Access::remote_read);
  EXPECT_EQ(t.write(memory.region(), 1), Status::remote_access);
  EXPECT_EQ(t.read(memory.region()), zeroes(64));
  options.access = Access::remote_write;
  EXPECT_FALSE(t.request(64, options));
  EXPECT_EQ(t.reply->refusal, LeaseRefusal::no_right);
  EXPECT_EQ(t.reply->status, Status::remote_access);
  memory.release();
  // Our own limit: no more than the connection may give.
  Buffer b = t.server.filled(64, 1);
  EXPECT_EQ(t.ends.server.lease(b.slice(), options), Status::invalid_argument);
  t.finish(b);
}

TEST(EngineLeasesLimits, WhatIsNoLeaseIsNotAsked) {
  Leases t;
  const LeaseCallback never = [](LeaseReply&) { ADD_FAILURE() << "a refused call is told of"; };
  LeaseOptions o;
  EXPECT_EQ(t.ends.client.request_memory(0, o, never), Status::invalid_argument);
  o.access = Access::local;
  EXPECT_EQ(t.ends.client.request_memory(8, o, never), Status::invalid_argument);
  o.access = static_cast<Access>(9);
  EXPECT_EQ(t.ends.client.request_memory(8, o, never), Status::invalid_argument);
  o = {};
  o.duration = t.client.engine.config().leases.guard;
  EXPECT_EQ(t.ends.client.request_memory(8, o, never), Status::invalid_argument);
  o.duration = 2h;
  EXPECT_EQ(t.ends.client.request_memory(8, o, never), Status::invalid_argument);
  EXPECT_EQ(t.ends.client.lease({}, {}, never), Status::out_of_bounds);
  EXPECT_EQ(t.ends.client.recall(LeaseId{}), Status::invalid_argument);
  EXPECT_EQ(t.ends.client.recall(LeaseId{0x10001}), Status::invalid_argument);
  EXPECT_EQ(Connection().request_memory(8, {}, never), Status::not_connected);
  RemoteMemory none;
  EXPECT_EQ(none.renew(1s), Status::not_connected);
  EXPECT_EQ(none.give_back(), Status::not_connected);
  EXPECT_FALSE(none.detach());
  EXPECT_EQ(none.time_left(), 0s);
  none.release();
  // As many leases as there are records; the rest waits.
  std::vector<RemoteMemory> held;
  std::size_t accepted = 0;
  Status last = Status::ok;
  for (int i = 0; i < 200 && last == Status::ok; ++i) {
    last = t.ends.client.request_memory(
        8, {}, [&](LeaseReply& r) { held.push_back(std::move(r.memory)); });
    accepted += last == Status::ok ? 1 : 0;
  }
  EXPECT_EQ(last, Status::would_block);
  EXPECT_GE(accepted, 32u);
  ASSERT_TRUE(t.until([&] { return held.size() == accepted; }));
  held.clear();
  ASSERT_TRUE(t.until([&] { return t.returned.size() == accepted; }));
  t.finish();
}

TEST(EngineLeasesKeys, WithoutAWindowItIsARegistration) {
  Config c = lease_config();
  c.memory.windows = 2;
  Leases t(c);
  std::vector<RemoteMemory> held;
  for (int i = 0; i < 6; ++i) {
    held.push_back(t.request(64));
    ASSERT_TRUE(held.back());
    EXPECT_EQ(t.write(held.back().region(), 1), Status::ok);
  }
  held.clear();
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 6; }));
  t.finish();
}

TEST(EngineLeasesKeys, AKeyOfOneConnectionIsRefusedToOthers) {
  Leases t;
  Buffer b = t.server.filled(64, 3);
  const auto region =
      t.ends.server.expose(b.slice(), Access::remote_write, spinwire::KeyScope::connection);
  ASSERT_TRUE(region) << region.error().message();
  const auto token = t.ends.server.token(*region);
  ASSERT_TRUE(token) << token.error().message();
  // Granted by a message behind the bind.
  std::optional<RemoteRegion> came;
  t.client.on_message = [&](Connection c, Message& m) {
    auto imported = c.import_token(m.bytes());
    ASSERT_TRUE(imported) << imported.error().message();
    came = *imported;
  };
  ASSERT_EQ(t.ends.server.send_copy(*token), Status::ok);
  ASSERT_TRUE(t.until([&] { return came.has_value(); }));
  EXPECT_EQ(t.write(*came, 6), Status::ok);
  EXPECT_TRUE(Node::holds(b.slice().bytes(), 6));
  const Ends other = connect(t.client, t.server);
  const auto elsewhere = other.client.import_token(*token);
  if (on_softverbs()) {
    ASSERT_FALSE(elsewhere);
    EXPECT_EQ(elsewhere.error().status, Status::invalid_argument);
    // A client that does not check loses that connection.
    Connection second = other.client;
    const Buffer mine = t.client.filled(64, 7);
    std::optional<Status> ended;
    ASSERT_EQ(second.write(mine.slice(), *came, [&](const Completion& c) { ended = c.status; }),
              Status::ok);
    ASSERT_TRUE(t.until([&] { return ended.has_value(); }));
    EXPECT_EQ(*ended, Status::remote_access);
    EXPECT_TRUE(Node::holds(b.slice().bytes(), 6));
    ASSERT_TRUE(t.until([&] { return t.client.closed.size() == 1; }));
    t.client.closed.clear();
  }
  EXPECT_EQ(t.ends.server.revoke(RemoteRegion{}), Status::invalid_argument);
  EXPECT_EQ(t.ends.server.revoke(*region), Status::would_block);
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
  EXPECT_EQ(t.ends.server.revoke(*region), Status::ok);
  EXPECT_EQ(t.ends.server.revoke(*region), Status::invalid_argument);
  EXPECT_EQ(t.returned[0].how, ReturnedBy::recall);
  EXPECT_EQ(t.write(*came, 8, Status::remote_access), Status::ok);
  EXPECT_TRUE(Node::holds(b.slice().bytes(), 6));
  t.returned.clear();
  b.reset();
  engine_test::finish(t.client, t.server);
}

TEST(EngineLeasesKeys, TokensAreCheckedBeforeUse) {
  Leases t;
  Buffer b = t.server.filled(64, 3);
  const auto region = t.ends.server.expose(b.slice(), Access::remote_read);
  ASSERT_TRUE(region);
  const auto token = t.ends.server.token(*region);
  ASSERT_TRUE(token);
  const auto good = t.ends.client.import_token(*token);
  ASSERT_TRUE(good) << good.error().message();
  EXPECT_EQ(good->address, region->address);
  EXPECT_EQ(good->rkey, region->rkey);
  EXPECT_EQ(t.read(*good), filled(64, 3));
  for (std::size_t at = 0; at < token->size(); ++at) {
    spinwire::RegionToken bad = *token;
    bad[at] ^= std::byte{1};
    const auto refused = t.ends.client.import_token(bad);
    ASSERT_FALSE(refused) << "byte " << at;
    EXPECT_EQ(refused.error().status, Status::protocol);
  }
  EXPECT_FALSE(t.ends.client.import_token(std::span(*token).first(47)));
  EXPECT_FALSE(t.ends.client.import_token({}));
  // A token of another engine: our own.
  const auto own = t.ends.server.import_token(*token);
  ASSERT_FALSE(own);
  EXPECT_EQ(own.error().status, Status::invalid_argument);
  EXPECT_FALSE(t.ends.server.token({}));
  const RemoteMemory leased = t.request(8);
  ASSERT_TRUE(leased);
  EXPECT_FALSE(t.ends.client.token(leased.region()));
  EXPECT_EQ(t.server.engine.revoke(*region), Status::ok);
  t.finish(b);
}

TEST(EngineTokens, AreUsableUntilTheirDeadlineLessTheGuard) {
  Config c = lease_config();
  c.leases.guard = std::chrono::milliseconds(2);
  Timed t(c);
  Buffer b = t.server.filled(64, 3);
  const auto region = t.ends.server.expose(b.slice(), Access::remote_all);
  ASSERT_TRUE(region);
  const auto token = t.ends.server.token(*region, std::chrono::milliseconds(100));
  ASSERT_TRUE(token) << token.error().message();
  const auto came = t.ends.client.import_token(*token);
  ASSERT_TRUE(came) << came.error().message();
  const Nanoseconds whole = t.ends.client.time_left(*came);
  EXPECT_LE(whole, std::chrono::milliseconds(98));
  EXPECT_GE(whole, std::chrono::milliseconds(97));
  EXPECT_EQ(t.read(*came), filled(64, 3));
  EXPECT_EQ(t.write(came->slice(8, 8), 6), Status::ok);
  Buffer gathered = t.client.filled(16, 9);
  std::vector parts{gathered.slice(0, 8), gathered.slice(8, 8)};
  ASSERT_EQ(t.ends.client.write(parts, came->slice(16, 16)), Status::ok);
  ASSERT_EQ(t.ends.client.write_and_send(gathered, came->slice(32, 16), {}), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.ends.client.stats().outstanding == 0; }));
  EXPECT_TRUE(Node::holds(b.slice(16, 16).bytes(), 9));
  EXPECT_TRUE(Node::holds(b.slice(32, 16).bytes(), 9));
  t.now += static_cast<std::uint64_t>(whole.count()) - 1;
  EXPECT_EQ(t.ends.client.time_left(*came), Nanoseconds{1});
  EXPECT_EQ(t.write(came->slice(0, 8), 7), Status::ok) << "the last nanosecond";
  t.now += 1;
  EXPECT_EQ(t.ends.client.time_left(*came), Nanoseconds{0});
  EXPECT_EQ(t.write(*came, 8), Status::lease_expired);
  EXPECT_EQ(t.ends.client.write(parts, came->slice(16, 16)), Status::lease_expired);
  EXPECT_EQ(t.ends.client.write_and_send(gathered, *came, {}), Status::lease_expired);
  Buffer mine = t.client.filled(8, 1);
  EXPECT_EQ(t.ends.client.read(mine, came->slice(0, 8)), Status::lease_expired);
  EXPECT_EQ(t.ends.client.write_with_imm(mine, came->slice(0, 8), 1), Status::lease_expired);
  EXPECT_EQ(t.ends.client.fetch_add(came->slice(0, 8), 1), Status::lease_expired);
  const auto late = t.ends.client.import_token(*token);
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().status, Status::lease_expired);
  // The key is still open, and the connection unharmed.
  EXPECT_TRUE(Node::holds(b.slice(0, 8).bytes(), 7));
  EXPECT_EQ(t.read(*t.ends.client.import_token(*t.ends.server.token(*region))).size(), 64u);
  EXPECT_EQ(t.server.engine.revoke(*region), Status::ok);
  parts.clear();
  t.finish(b, mine, gathered);
}

TEST(EngineTokens, AForgedDeadlineLastsNoLongerThanATokenCan) {
  for (const bool is_timed : {false, true}) {
    std::uint64_t ticks = 1'000'000'000;
    Leases t(lease_config(), is_timed ? &ticks : nullptr);
    Buffer b = t.server.filled(64, 3);
    const auto region = t.ends.server.expose(b.slice(), Access::remote_read);
    ASSERT_TRUE(region);
    const auto sound = t.ends.server.token(*region, std::chrono::hours(24));
    ASSERT_TRUE(sound);
    spinwire::wire::Token token;
    ASSERT_TRUE(spinwire::wire::decode(*sound, token));
    const std::uint64_t latest = token.deadline;
    constexpr std::uint64_t kMostMilliseconds = 9'223'372'036'854;  // as nanoseconds in 63 bits
    for (const std::uint64_t deadline :
         {latest + 100'000, kMostMilliseconds, kMostMilliseconds + 1, 2 * kMostMilliseconds,
          std::uint64_t{18'446'744'073'710 + 60'000}, spinwire::wire::kLatestTokenDeadline}) {
      SCOPED_TRACE(deadline);
      token.deadline = deadline;
      const auto came = t.ends.client.import_token(spinwire::wire::encode(token));
      ASSERT_TRUE(came) << came.error().message();
      EXPECT_LE(t.ends.client.time_left(*came), Nanoseconds{std::chrono::hours(24)});
      EXPECT_GT(t.ends.client.time_left(*came), Nanoseconds{std::chrono::hours(23)});
      EXPECT_EQ(t.read(*came), filled(64, 3));
    }
    token.deadline = 1;  // long ago
    EXPECT_EQ(t.ends.client.import_token(spinwire::wire::encode(token)).error().status,
              Status::lease_expired);
    EXPECT_EQ(t.server.engine.revoke(*region), Status::ok);
    t.finish(b);
  }
}

TEST(EngineTokens, TheTimeIsChecked) {
  Leases t;
  Buffer b = t.server.filled(64, 3);
  const auto region = t.ends.server.expose(b.slice(), Access::remote_read);
  ASSERT_TRUE(region);
  for (const Nanoseconds wrong : {Nanoseconds{-1}, Nanoseconds{0}, Nanoseconds{999'999},
                                  Nanoseconds{std::chrono::hours(24)} + Nanoseconds{1}}) {
    const auto refused = t.ends.server.token(*region, wrong);
    ASSERT_FALSE(refused) << wrong.count();
    EXPECT_EQ(refused.error().status, Status::invalid_argument);
  }
  // With the real clock the deadline is a time of the system's clock.
  const auto token = t.ends.server.token(*region, std::chrono::hours(24));
  ASSERT_TRUE(token);
  const auto came = t.ends.client.import_token(*token);
  ASSERT_TRUE(came) << came.error().message();
  EXPECT_LE(t.ends.client.time_left(*came), Nanoseconds{std::chrono::hours(24)});
  EXPECT_GT(t.ends.client.time_left(*came), Nanoseconds{std::chrono::hours(23)});
  EXPECT_EQ(t.read(*came), filled(64, 3));
  EXPECT_FALSE(t.ends.client.token(*came)) << "the region is the peer's";
  EXPECT_EQ(t.ends.client.time_left(*region), Nanoseconds::max());
  EXPECT_EQ(t.ends.client.time_left({}), Nanoseconds{0});
  EXPECT_EQ(t.server.engine.revoke(*region), Status::ok);
  t.finish(b);
}

TEST(EngineTokens, AreMadeOnlyOfMemoryThatThisEndHasOpened) {
  for (const By by : {By::window, By::registration, By::own_domain}) {
    SCOPED_TRACE(static_cast<int>(by));
    Leases t(by);
    Connection& server = t.ends.server;
    Connection& client = t.ends.client;
    const auto refused = [](Connection& by_whom, const RemoteRegion& region) {
      const auto token = by_whom.token(region);
      const auto timed = by_whom.token(region, std::chrono::seconds(1));
      return !token && !timed && token.error().status == Status::invalid_argument &&
             timed.error().status == Status::invalid_argument;
    };
    Buffer b = t.server.filled(64, 3), mine = t.client.filled(64, 4);
    std::vector<std::byte> bytes(4096);
    auto registered = server.register_memory(bytes, Access::remote_read);
    ASSERT_TRUE(registered) << registered.error().message();
    const auto shared = server.expose(b.slice(), Access::remote_read);
    const auto narrow =
        server.expose(b.slice(), Access::remote_read, spinwire::KeyScope::connection);
    const auto own = client.expose(mine.slice(), Access::remote_read);
    ASSERT_TRUE(shared && narrow && own);
    for (const RemoteRegion& region : {*shared, *narrow, registered->remote()}) {
      for (const RemoteRegion& part : {region, region.slice(region.length - 8, 8)}) {
        const auto token = server.token(part);
        ASSERT_TRUE(token) << token.error().message();
        const auto came = client.import_token(*token);
        ASSERT_TRUE(came) << came.error().message();
        EXPECT_TRUE(refused(client, *came)) << "the region is the peer's";
        RemoteRegion alike = *came;
        alike.rkey = own->rkey;  // engines give keys of the same numbers
        EXPECT_TRUE(refused(client, alike)) << "the key has the number of one of ours";
      }
      EXPECT_TRUE(refused(server, {region.address + 8, region.length, region.rkey, region.access}));
      EXPECT_TRUE(refused(server, {region.address - 8, region.length, region.rkey, region.access}));
    }
    if (by == By::own_domain) {
      Ends other = connect(t.client, t.server);
      const auto of_engine = other.server.expose(b.slice(), Access::remote_read);
      ASSERT_TRUE(of_engine);
      EXPECT_TRUE(refused(other.server, *shared)) << "the key is of another domain";
      EXPECT_TRUE(refused(server, *of_engine)) << "the key is of another domain";
      EXPECT_EQ(other.server.revoke(*of_engine), Status::ok);
      EXPECT_EQ(other.client.close(), Status::ok);
      ASSERT_TRUE(t.until([&] { return t.server.engine.stats().connections == 1; }));
    }
    EXPECT_EQ(server.revoke(registered->remote()), Status::invalid_argument);
    const RemoteRegion dropped = registered->remote();
    *registered = {};
    EXPECT_TRUE(refused(server, dropped));
    EXPECT_EQ(server.revoke(*shared), Status::ok);
    EXPECT_TRUE(refused(server, *shared)) << "it was revoked";
    EXPECT_EQ(server.revoke(*narrow), Status::would_block);
    EXPECT_TRUE(refused(server, *narrow)) << "it is being revoked";
    EXPECT_EQ(client.revoke(*own), Status::ok);
    ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
    t.returned.clear();
    t.finish(b, mine);
  }
}

}  // namespace
}  // namespace lease_limits_test
