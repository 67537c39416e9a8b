// When leases begin, what ends calls about them, and what the device is asked to do.
#include <infiniband/verbs.h>

#include <set>
#include <string>

#include "agent/agent.h"
#include "base/internals.h"
#include "base/owner_guard.h"
#include "engine/engine_core.h"
#include "engine/lease_ends.h"

namespace lease_calls_test {
namespace {

using namespace leases;  // NOLINT: a test's helpers
using spinwire::KeyScope;
using spinwire::detail::EngineCore;

constexpr Nanoseconds kOnTheWay = 100ms;

/// Advances the time before the peer hears of it.
void on_the_way() { Timed::now += static_cast<std::uint64_t>(kOnTheWay.count()); }

/// Long enough to see effects of the time: devices report late what peers have received.
void pass(Timed& t, Nanoseconds time) {
  t.pass(time);
  t.settle();
}

TEST(EngineLeasesCalls, TheHolderCountsFromWhenItAsked) {
  Timed t(By::window);
  const Nanoseconds guard = t.client.engine.config().leases.guard;
  LeaseOptions options;
  options.duration = 500ms;
  RemoteMemory memory;
  ASSERT_EQ(t.ends.client.request_memory(64, options,
                                         [&](LeaseReply& r) { memory = std::move(r.memory); }),
            Status::ok);
  on_the_way();
  ASSERT_TRUE(t.until([&] { return static_cast<bool>(memory); }));
  EXPECT_EQ(memory.time_left(), 500ms - kOnTheWay - guard);
  bool renewed = false;
  ASSERT_EQ(memory.renew(800ms, [&](LeaseReply& r) { renewed = r.status == Status::ok; }),
            Status::ok);
  on_the_way();
  ASSERT_TRUE(t.until([&] { return renewed; }));
  EXPECT_EQ(memory.time_left(), 800ms - kOnTheWay - guard);
  memory.release();
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
  t.finish();
}

TEST(EngineLeasesCalls, TheOwnerCountsFromWhenItHears) {
  if (device_name() != "softverbs")
    GTEST_SKIP() << kSoftverbsOnly << "elsewhere the device has a clock of its own to hear by";
  Timed t(By::window);
  Buffer b = t.server.filled(64, 3);
  LeaseOptions options;
  options.duration = 500ms;
  const Nanoseconds most = 500ms + max_retry_ticks(t.server.engine.config());
  for (const bool renewed : {false, true}) {
    t.returned.clear();
    t.leased.clear();
    ASSERT_EQ(t.ends.server.lease(b.slice(), options), Status::ok);
    ASSERT_TRUE(t.until([&] { return t.leased.size() == 1; }));
    t.settle(20);
    if (renewed) {
      t.pass(400ms);
      ASSERT_EQ(t.leased[0].renew(500ms), Status::ok);
      t.settle(20);
    }
    const RemoteRegion key = t.leased[0].detach();
    pass(t, most - 10ms);
    EXPECT_TRUE(t.returned.empty());
    EXPECT_EQ(t.write(key, 4), Status::ok);
    t.pass(20ms);
    ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
    EXPECT_EQ(t.returned[0].how, ReturnedBy::expiry);
  }
  t.finish(b);
}

TEST(EngineLeasesCalls, ARecalledOneIsLeftForAllThatMayBeUnderWay) {
  Timed t(By::window);
  const Config& c = t.server.engine.config();
  Buffer b = t.server.filled(64, 3);
  const Nanoseconds after = max_retry_ticks(c);
  // The lease's remaining time or the time that it takes to close, whichever is less.
  for (const Nanoseconds time : {Nanoseconds(60s), Nanoseconds(100ms)}) {
    t.returned.clear();
    t.leased.clear();
    LeaseOptions options;
    options.duration = time;
    LeaseId id;
    ASSERT_EQ(t.ends.server.lease(b.slice(), options, [&](LeaseReply& r) { id = r.lease; }),
              Status::ok);
    ASSERT_TRUE(t.until([&] { return static_cast<bool>(id); }));
    const RemoteRegion key = t.leased.at(0).detach();
    ASSERT_EQ(t.ends.server.recall(id), Status::ok);
    pass(t, std::min<Nanoseconds>(time, c.connections.close_timeout) + after - 10ms);
    EXPECT_TRUE(t.returned.empty());
    EXPECT_EQ(t.write(key, 4), Status::ok);
    t.pass(20ms);
    ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
    EXPECT_EQ(t.returned[0].how, ReturnedBy::recall);
  }
  t.finish(b);
}

TEST(EngineLeasesCalls, WhatEndsTheLeaseEndsTheCallAboutIt) {
  Leases t;
  Buffer b = t.server.filled(64, 3);
  LeaseId id;
  std::vector<Status> told;
  std::optional<LeaseRefusal> why;
  const LeaseCallback done = [&](LeaseReply& r) {
    told.push_back(r.status);
    why = r.refusal;
  };
  for (const bool recalled : {true, false}) {
    told.clear();
    ASSERT_EQ(t.ends.server.lease(b.slice(), {}, [&](LeaseReply& r) { id = r.lease; }), Status::ok);
    ASSERT_TRUE(t.until([&] { return t.leased.size() == 1 && id; }));
    // Both calls cross.
    ASSERT_EQ(t.leased[0].renew(10s, done), Status::ok);
    if (recalled) {
      ASSERT_EQ(t.ends.server.recall(id), Status::ok);
    } else {
      t.leased[0].release();
      EXPECT_TRUE(told.empty());  // no callback runs inside the call
    }
    ASSERT_TRUE(t.until([&] { return t.returned.size() == 1 && !told.empty(); }));
    t.settle();
    ASSERT_EQ(told.size(), 1u);
    EXPECT_EQ(told[0], recalled ? Status::lease_expired : Status::cancelled);
    EXPECT_EQ(*why, recalled ? LeaseRefusal::over : LeaseRefusal::none);
    EXPECT_EQ(t.returned[0].how, recalled ? ReturnedBy::recall : ReturnedBy::release);
    EXPECT_TRUE(t.ends.client.ready());
    t.leased.clear();
    t.returned.clear();
    id = {};
  }
  t.finish(b);
}

TEST(EngineLeasesCalls, ALeaseIsRecalledBeforeItsCallback) {
  for (const By by : {By::window, By::registration, By::own_domain}) {
    SCOPED_TRACE(static_cast<int>(by));
    Leases t(by);
    Buffer b = t.server.filled(64, 3);
    LeaseId id;
    std::optional<LeaseReply> told;
    EXPECT_EQ(t.ends.server.lease({}, {}, {}, &id), Status::out_of_bounds);
    EXPECT_FALSE(id) << "nothing was leased";
    ASSERT_EQ(t.ends.server.lease(
                  b, {}, [&](LeaseReply& r) { told.emplace(std::move(r)); }, &id),
              Status::ok);
    ASSERT_TRUE(id);
    EXPECT_EQ(t.ends.server.recall(id), Status::ok);
    EXPECT_EQ(t.ends.server.recall(id), Status::invalid_argument);
    EXPECT_FALSE(told.has_value()) << "no callback runs inside the call";
    ASSERT_TRUE(t.until([&] { return t.returned.size() == 1 && told.has_value(); }));
    EXPECT_EQ(t.returned[0].lease, id);
    EXPECT_EQ(t.returned[0].how, ReturnedBy::recall);
    // By a window, the offer was under way already. Else a control step would have made the key.
    const bool offered = by == By::window && t.server.engine.device().memory_windows;
    EXPECT_EQ(told->status, offered ? Status::ok : Status::lease_expired);
    EXPECT_EQ(told->refusal, offered ? LeaseRefusal::none : LeaseRefusal::over);
    EXPECT_EQ(told->lease, offered ? id : LeaseId{});
    EXPECT_TRUE(t.leased.empty() || !t.leased[0]);
    t.finish(b);
  }
}

/// Connection::revoke() has one contract for every kind of key, whichever function exposed the
/// memory.
TEST(EngineRevoke, AnswersOkOnceWhenNoPeerCanReachTheMemory) {
  for (const By by : {By::window, By::registration, By::own_domain}) {
    for (const auto scope : {KeyScope::domain, KeyScope::connection}) {
      Leases t(by);
      Buffer b = t.server.filled(64, 3);
      const auto region = t.ends.server.expose(b.slice(), Access::remote_write, scope);
      ASSERT_TRUE(region) << region.error().message();
      t.settle();
      bool inside = false;
      t.server.on_returned = [&](Connection, const Returned&) { EXPECT_FALSE(inside); };
      std::vector<Status> answers;
      ASSERT_TRUE(t.until([&] {
        inside = true;
        answers.push_back(t.ends.server.revoke(*region));
        inside = false;
        return answers.back() != Status::would_block;
      }));
      EXPECT_EQ(answers.back(), Status::ok);
      EXPECT_EQ(spinwire::detail::block_of(b)->refs, 1u);  // the key's reference is gone
      EXPECT_EQ(t.ends.server.revoke(*region), Status::invalid_argument);
      EXPECT_EQ(t.server.engine.revoke(*region), Status::invalid_argument);
      t.server.on_returned = nullptr;
      t.finish(b);
    }
  }
}

/// A key for one peer is closed through its own connection only, whatever opens it.
TEST(EngineRevoke, OfAnotherHandleClosesNoKeyForOnePeer) {
  for (const By by : {By::window, By::registration, By::own_domain}) {
    for (const bool registered : {false, true}) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(by) << registered);
      Leases t(by);
      Connection other = connect(t.client, t.server).server;
      std::vector<std::byte> own(64);
      MemoryRegion region;
      Buffer b = t.server.filled(64, 3);
      if (registered) {
        auto made = by == By::own_domain ? t.ends.server.register_memory(own, Access::local)
                                         : t.server.engine.register_memory(own, Access::local);
        ASSERT_TRUE(made) << made.error().message();
        region = std::move(*made);
      }
      const auto key = t.ends.server.expose(registered ? region.slice() : b.slice(),
                                            Access::remote_write, KeyScope::connection);
      ASSERT_TRUE(key) << key.error().message();
      const auto expect_refused = [&] {
        EXPECT_EQ(t.server.engine.revoke(*key), Status::invalid_argument);
        EXPECT_EQ(other.revoke(*key), Status::invalid_argument);
      };
      expect_refused();
      t.settle();
      expect_refused();
      EXPECT_EQ(t.write(*key, 4), Status::ok) << "it is still open";
      EXPECT_EQ(t.ends.server.snapshot().leased_out, 1u);
      EXPECT_EQ(t.ends.server.revoke(*key), Status::would_block);
      expect_refused();
      ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
      expect_refused();  // nor do they take its ok
      EXPECT_EQ(t.ends.server.revoke(*key), Status::ok);
      EXPECT_EQ(t.ends.server.revoke(*key), Status::invalid_argument);
      expect_refused();
      region = {};
      t.finish(b);
    }
  }
}

/// Keys of leases are the library's own: the application may know them, but does not close them.
TEST(EngineRevoke, ClosesNoLease) {
  for (const By by : {By::window, By::registration, By::own_domain}) {
    SCOPED_TRACE(static_cast<int>(by));
    Leases t(by);
    Buffer b = t.server.filled(64, 3);
    ASSERT_EQ(t.ends.server.lease(b, {}), Status::ok);
    ASSERT_TRUE(t.until([&] { return t.leased.size() == 1; }));
    t.settle();
    const RemoteRegion key = t.leased[0].detach();
    EXPECT_EQ(t.server.engine.revoke(key), Status::invalid_argument);
    EXPECT_EQ(t.ends.server.revoke(key), Status::invalid_argument);
    EXPECT_EQ(t.write(key, 4), Status::ok) << "it is still open";
    t.finish(b);
  }
}

TEST(EngineRevoke, OfTheEngineAnswersAlike) {
  Leases t;
  Buffer b = t.server.filled(64, 3);
  const auto region = t.server.engine.expose(b.slice(), Access::remote_write);
  ASSERT_TRUE(region);
  Status status = Status::would_block;
  ASSERT_TRUE(t.until([&] {
    status = t.server.engine.revoke(*region);
    return status != Status::would_block;
  }));
  EXPECT_EQ(status, Status::ok);
  EXPECT_EQ(spinwire::detail::block_of(b)->refs, 1u);
  EXPECT_EQ(t.server.engine.revoke(*region), Status::invalid_argument);
  EXPECT_EQ(t.server.engine.revoke(RemoteRegion{}), Status::invalid_argument);
  t.finish(b);
}

TEST(EngineExposeToPeer, TellsWhatIsWrongWithItsArguments) {
  Leases t;
  Buffer b = t.server.filled(64, 3);
  Connection& c = t.ends.server;
  Connection early = t.client.begin(t.server);
  const auto expose = [](Connection& to, const BufferSlice& slice, Access access) {
    return to.expose(slice, access, KeyScope::connection).error();
  };
  Buffer ours = t.client.filled(64, 3);
  std::set<std::string> found;
  for (const Error& e :
       {expose(c, {}, Access::remote_read), expose(c, b.slice(0, 0), Access::remote_read),
        expose(c, b.slice(60, 5), Access::remote_read)}) {
    EXPECT_EQ(e.status, Status::invalid_argument) << e.message();
    found.insert(e.found);
  }
  EXPECT_EQ(found.size(), 1u) << "all three have no bytes";
  const Error rights = expose(c, b.slice(), Access::local);
  EXPECT_EQ(rights.status, Status::invalid_argument) << rights.message();
  const Error not_ready = expose(early, ours.slice(), Access::remote_read);
  EXPECT_EQ(not_ready.status, Status::not_connected) << not_ready.message();
  found.insert(rights.found);
  found.insert(not_ready.found);
  EXPECT_EQ(found.size(), 3u) << "each has a text of its own";
  ASSERT_TRUE(t.until([&] { return early.ready(); }));
  const auto many = [&] { return c.expose(b.slice(), Access::remote_read, KeyScope::connection); };
  for (std::uint32_t i = 0; i < t.server.engine.config().leases.maximum; ++i) {
    if (!many()) break;
    t.settle(4);
  }
  EXPECT_EQ(many().error().status, Status::would_block) << many().error().message();
  t.finish(b, ours);
}

TEST(EngineLeasesCalls, AWindowServesAgainWhenTheDeviceHasEndedItsKey) {
  Leases t;
  if (!t.server.engine.device().memory_windows) GTEST_SKIP() << "the device has no windows";
  const auto free = [&] { return t.server.engine.stats().windows_free; };
  const std::uint32_t before = free();
  Buffer b = t.server.filled(64, 3);
  const auto region = t.ends.server.expose(b.slice(), Access::remote_write, KeyScope::connection);
  ASSERT_TRUE(region);
  EXPECT_EQ(free(), before - 1);
  t.settle();
  ASSERT_EQ(t.ends.server.revoke(*region), Status::would_block);
  // The window is free only after its completion is handled.
  EXPECT_EQ(free(), before - 1);
  EXPECT_TRUE(t.returned.empty());
  EXPECT_EQ(spinwire::detail::block_of(b)->refs, 2u);
  ASSERT_TRUE(t.until([&] { return t.returned.size() == 1; }));
  EXPECT_EQ(free(), before);
  EXPECT_EQ(spinwire::detail::block_of(b)->refs, 1u);
  t.finish(b);
}

/// Counts what is posted to an engine's device, by opcode.
class Posted {
 public:
  explicit Posted(ibv_qp* qp) : ops_(qp->context->ops) {
    real_ = ops_.post_send;
    all.clear();
    ops_.post_send = [](ibv_qp* to, ibv_send_wr* wr, ibv_send_wr** bad) {
      for (const ibv_send_wr* each = wr; each != nullptr; each = each->next)
        all.push_back({each->opcode, each->send_flags});
      return real_(to, wr, bad);
    };
  }
  Posted(const Posted&) = delete;
  Posted& operator=(const Posted&) = delete;
  ~Posted() { ops_.post_send = real_; }

  struct One {
    ibv_wr_opcode opcode;
    unsigned flags;
  };
  static inline std::vector<One> all;

 private:
  static inline int (*real_)(ibv_qp*, ibv_send_wr*, ibv_send_wr**);
  ibv_context_ops& ops_;
};

TEST(EngineLeasesCalls, GivingUpIsFencedBehindReads) {
  for (const By by : {By::window, By::registration}) {
    Node owner(lease_config(by));
    owner.listen();
    Config config = lease_config(by);
    config.connections.direct_messages = spinwire::DirectPath::off;  // runs no READ at once
    EngineCore holder(config, Clock::real(), std::move(*spinwire::base::OwnerGuard::create()));
    ASSERT_TRUE(holder.open());
    Connection c = holder.connect(owner.listener.address(), ConnectOptions{}).value();
    const auto until = [&](auto done) {
      return engine_test::until({&owner}, [&] {
        (void)holder.poll();
        return done();
      });
    };
    ASSERT_TRUE(until([&] { return c.ready() && !owner.ready.empty(); }));
    const bool window = by == By::window && owner.engine.device().memory_windows;
    for (const bool gives_back : {true, false}) {
      RemoteMemory memory;
      ASSERT_EQ(c.request_memory(64, {}, [&](LeaseReply& r) { memory = std::move(r.memory); }),
                Status::ok);
      ASSERT_TRUE(until([&] { return static_cast<bool>(memory); }));
      const Buffer b = spinwire::detail::make<Buffer>(
          holder.context.arena->allocate(spinwire::memory::PoolId::send, 64), 64);
      ASSERT_TRUE(b);
      bool read = false;
      const Posted posted(holder.find(c.index(), spinwire::detail::Internals::generation(c))->qp);
      ASSERT_EQ(
          c.read(
              b.slice(), memory.region(), [&](const Completion&) { read = true; }, Post::defer),
          Status::ok);
      gives_back ? (void)memory.give_back() : memory.release();
      ASSERT_EQ(Posted::all.size(), 2u);
      EXPECT_EQ(Posted::all[0].opcode, IBV_WR_RDMA_READ);
      EXPECT_EQ(Posted::all[1].opcode, window ? IBV_WR_SEND_WITH_INV : IBV_WR_SEND);
      EXPECT_NE(Posted::all[1].flags & IBV_SEND_FENCE, 0u);
      ASSERT_TRUE(until([&] { return read && owner.ready[0].snapshot().leased_out == 0; }));
    }
    holder.end();
  }
}

}  // namespace
}  // namespace lease_calls_test
