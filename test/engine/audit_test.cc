// The audit of an engine detects each kind of damage, and reports none without damage.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "base/internals.h"
#include "engine/engine_core.h"
#include "engine/harness.h"

namespace audit_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::agent::Agent;
using spinwire::agent::EngineContext;
using spinwire::agent::OperationKind;
using spinwire::detail::Block;
using spinwire::detail::EngineCore;

/// An engine with reachable internals, a connection to a server, and work in flight.
struct Open {
  explicit Open(const Config& config = small_config())
      : server(config),
        core(config, Clock::real(), std::move(*spinwire::base::OwnerGuard::create())) {
    EXPECT_TRUE(core.open());
    server.listen();
    c = core.connect(server.listener.address(), {}).value();
    EXPECT_TRUE(until([&] { return c.ready() && !server.ready.empty(); }));
    memory = server.buffer(4096, Pool::lease);
    region = server.engine.expose(memory.slice(), Access::remote_read_write).value();
    own.resize(4096);
    registered = core.context.registrations->register_memory(own, Access::remote_read).value();
    message = spinwire::detail::make<Buffer>(
        core.context.arena->allocate(spinwire::memory::PoolId::send, 100), 100);
    exposed = c.expose(message.slice(), Access::remote_read).value();
    // A message and a write are deferred, so that nothing completes by itself.
    EXPECT_EQ(c.send(message, {}, Post::defer), Status::ok);
    EXPECT_EQ(c.write(message.slice(), region, {}, Post::defer), Status::ok);
  }
  template <typename Done>
  bool until(Done&& done) {
    return engine_test::until({&server}, [&] {
      (void)core.poll();
      return done();
    });
  }
  [[nodiscard]] Agent& agent() {
    return *core.find(c.index(), spinwire::detail::Internals::generation(c));
  }
  [[nodiscard]] EngineContext& context() { return core.context; }

  Node server;
  EngineCore core;
  Connection c;
  Buffer memory;
  RemoteRegion region;
  std::vector<std::byte> own;
  spinwire::memory::RegisteredMemory registered;
  Buffer message;
  RemoteRegion exposed;
};

/// With `value` changed to `wrong`, the audit must report an error that contains `words`.
template <typename Value>
void expect_found(Open& o, Value& value, std::type_identity_t<Value> wrong, const char* words) {
  ASSERT_TRUE(o.core.audit()) << o.core.audit().error().message();
  const Value right = std::exchange(value, wrong);
  const auto found = o.core.audit();
  value = right;
  ASSERT_FALSE(found) << "not found: " << words;
  EXPECT_EQ(found.error().status, Status::system);
  EXPECT_NE(found.error().found.find(words), std::string::npos) << found.error().message();
  ASSERT_TRUE(o.core.audit());
}

TEST(EngineAudit, FindsWrongCountsOfLongMessages) {
  Config config = small_config();
  config.memory.rendezvous_bytes = 2u << 20;
  config.memory.windows = 4;
  config.connections.max_message_bytes = 1u << 20;
  Open o(config);
  ASSERT_TRUE(o.until([&] { return o.c.stats().send_credits != 0; }));
  const Buffer data = spinwire::detail::make<Buffer>(
      o.context().arena->allocate(spinwire::memory::PoolId::send, 5000), 5000);
  ASSERT_EQ(o.c.send(data, {}, Post::defer), Status::ok);
  Agent& a = o.agent();
  auto& offered = *a.rendezvous.sends.front();
  const auto none = spinwire::memory::WindowPool::kNone;
  expect_found(o, a.rendezvous.send_count, 2, "1 rendezvous messages are outstanding, 2 counted");
  expect_found(o, offered.agent, nullptr, "rendezvous message 0 is another connection's");
  expect_found(o, offered.block, nullptr, "rendezvous message 0 uses memory that is free");
  if (offered.key.is_window())
    expect_found(o, offered.key.window, none,
                 "of 4 windows 3 are free, 0 in use and 0 being replaced");
  expect_found(o, offered.due, true, "a callback is due for nothing");
  ASSERT_EQ(o.c.cancel(o.c.last_operation()), Status::ok);
  expect_found(o, a.credit.in_end_of_poll_list, false,
               "no poll will run the callback of what was cancelled");
  expect_found(o, o.context().cancellations, {},
               "1 callbacks of cancelled messages are due, 0 listed");
}

TEST(EngineAudit, FindsWrongCountsOfOperations) {
  Open o(without_direct_messages());
  Agent& a = o.agent();
  expect_found(o, a.send_queue.used, 3,
               "3 operations are outstanding: 0 posted, 2 deferred and 0 given up");
  expect_found(o, a.send_queue.used, 1, "1 operations are outstanding");
  auto& writes = a.tallies[static_cast<std::size_t>(OperationKind::write)];
  expect_found(o, writes.begun, 2,
               "2 operations were accepted, 0 are done, 0 failed, 1 outstanding");
  expect_found(o, writes.done, 1, "1 are done");
  expect_found(o, writes.failed, 1, "1 failed");
}

TEST(EngineAudit, FindsBrokenListsOfOperations) {
  Open o(without_direct_messages());
  Agent& a = o.agent();
  spinwire::agent::Operation* const none = nullptr;
  expect_found(o, a.send_queue.deferred, none, "operations are outstanding");
  expect_found(o, a.send_queue.deferred_last, a.send_queue.deferred, "1 deferred");
  expect_found(o, a.send_queue.posted, a.send_queue.deferred, "record ");
  Agent* const nobody = nullptr;
  expect_found(o, a.send_queue.deferred->agent, nobody, "is another connection's");
  expect_found(o, a.send_queue.deferred->kind, static_cast<OperationKind>(77), "is of no kind");
  expect_found(o, a.send_queue.deferred->kind, OperationKind::read, "operations were accepted");
  expect_found(o, a.send_queue.deferred->wr.wr_id, a.send_queue.deferred->wr.wr_id + 2,
               "has lost its name");
  expect_found(o, a.in_flush_queue, false, "nobody will post them");
  spinwire::agent::Operation* const beyond =
      a.send_queue.deferred + o.context().operations.capacity();
  expect_found(o, a.send_queue.deferred, beyond, "leads out of the records");
}

TEST(EngineAudit, FindsRecordsThatAreLost) {
  Open o;
  spinwire::agent::Operation* const lost = o.context().operations.acquire();
  auto found = o.core.audit();
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().found,
            "record " + std::to_string(o.context().operations.index_of(*lost)) + " is lost");
  lost->kind = OperationKind::send;
  o.context().operations.release(*lost);
  // Freed while in use.
  Agent& a = o.agent();
  const std::uint64_t name = a.send_queue.deferred->wr.wr_id;
  auto* const first = a.send_queue.deferred;
  auto* const next = first->wr.next;
  o.context().operations.release(*first);
  found = o.core.audit();
  ASSERT_FALSE(found);
  EXPECT_EQ(o.context().operations.acquire(), first);
  first->wr.next = next;
  first->wr.wr_id = name;
  ASSERT_TRUE(o.core.audit());
}

TEST(EngineAudit, FindsCreditThatIsNotThere) {
  Open o;
  Agent& a = o.agent();
  expect_found(o, a.credit.sent, a.credit.send_limit + 1, "messages were sent with credit for");
  expect_found(o, a.credit.granted, a.credit.granted + 1, "receives are kept for it");
  expect_found(o, a.credit.advertised, a.credit.granted + 1, "the peer was told of");
  expect_found(o, a.credit.received, a.credit.received + 2, "receives are kept for it");
  expect_found(o, o.context().reserved_receives, o.context().reserved_receives + 1,
               "receives are reserved for peers");
  expect_found(o, o.context().reservable_receives, 0, "receives are reserved for peers, of 0");
}

TEST(EngineAudit, FindsReceivesThatAreNotThere) {
  Open o;
  EngineContext& ctx = o.context();
  expect_found(o, ctx.posted_receives, ctx.posted_receives - 1, "are posted");
  expect_found(o, ctx.posted_receives, ctx.posted_receives + 1, "are posted");
  expect_found(o, ctx.receive_shortage, 1, "counts as missing");
  Block* const none = nullptr;
  expect_found(o, ctx.receives.memory(3), none, "receive 3 has no block");
  expect_found(o, ctx.receives.memory(3), ctx.receives.memory(4), "receive 3 goes elsewhere");
  expect_found(o, ctx.receives.request(5).sg_list->addr, 4096, "receive 5 goes elsewhere");
  if (ctx.own_queues != nullptr) return;
  expect_found(o, ctx.receives.memory(3)->refs, 0, "receive 3 goes into a free block");
}

TEST(EngineAudit, FindsConnectionsInWrongLists) {
  Open o;
  Agent& a = o.agent();
  expect_found(o, a.credit.in_end_of_poll_list, true,
               "1 connections have credit to advertise, 0 are listed");
  expect_found(o, a.credit.waits_for_receives, true, "credit that waits for receives");
  expect_found(o, a.generation, a.generation + 1, "names another");
  o.context().by_qpn.clear(a.qp->qp_num);
  EXPECT_NE(o.core.audit().error().found.find("its queue pair is not its own"), std::string::npos);
  o.context().by_qpn.set(a.qp->qp_num, &a);
  ASSERT_TRUE(o.core.audit());
}

TEST(EngineAudit, FindsDamagedMemory) {
  Open o(without_direct_messages());
  Block& block = *spinwire::detail::block_of(o.message);
  ASSERT_EQ(block.refs, 4u);  // ours, two of operations and one of an exposure
  expect_found(o, block.refs, 0, "uses memory that is free");
  expect_found(o, block.header_in_use, 0, "may be overwritten");
  expect_found(o, block.capacity, 5, "were overwritten");
  void* const nobody = nullptr;
  expect_found(o, block.owner, nobody, "were overwritten");
  expect_found(o, spinwire::detail::block_of(o.registered.whole)->owner, nobody,
               "registered memory");
  const Buffer idle = spinwire::detail::make<Buffer>(
      o.context().arena->allocate(spinwire::memory::PoolId::send, 100), 100);
  expect_found(o, spinwire::detail::block_of(idle)->refs, 0, "has 0 references");
  expect_found(o, o.agent().own_cell.block->refs, 0, "credit cell");
}

TEST(EngineAudit, FindsNothingWhereThereIsNothing) {
  int done = 0;
  Open o;
  ASSERT_TRUE(o.core.audit());
  ASSERT_EQ(o.c.cancel(o.c.last_operation()), Status::ok);
  ASSERT_TRUE(o.core.audit()) << o.core.audit().error().message();
  ASSERT_TRUE(o.until([&] { return o.c.stats().outstanding == 0; }));
  ASSERT_TRUE(o.core.audit()) << o.core.audit().error().message();
  for (int i = 0; i < 200; ++i) {
    if (o.c.send(o.message, [&done](const Completion&) { ++done; }) == Status::ok && i % 7 == 0)
      (void)o.c.cancel(o.c.last_operation());
    ASSERT_TRUE(o.core.audit()) << o.core.audit().error().message();
    ASSERT_TRUE(o.server.engine.audit()) << o.server.engine.audit().error().message();
    (void)o.core.poll();
    (void)o.server.poll();
  }
  EXPECT_GT(done, 50);
  EXPECT_EQ(o.c.close(), Status::ok);
  ASSERT_TRUE(o.core.audit()) << o.core.audit().error().message();
}

TEST(EngineAudit, IsNotForCallbacks) {
  Pair p;
  Status inside = Status::ok;
  p.server.on_message = [&](Connection, Message&) {
    const auto asked = p.server.engine.audit();
    inside = asked ? Status::ok : asked.error().status;
  };
  const Buffer b = p.client.filled(1, 1);
  ASSERT_EQ(p.ends.client.send(b), Status::ok);
  ASSERT_TRUE(p.until([&] { return p.server.messages == 1; }));
  EXPECT_EQ(inside, Status::reentrant);
  EXPECT_TRUE(p.server.engine.audit());
}

}  // namespace
}  // namespace audit_test
