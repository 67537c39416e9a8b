// Shared and exclusive access to memory of calls and replies.
#include <vector>

#include "rpc/long_calls.h"
#include "spinwire/memory_access.h"

namespace memory_access_calls_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using spinwire::ExclusiveAccess;
using spinwire::SharedAccess;

enum class Use : std::uint8_t { none, read, changed };
/// What the checks find that is done with the memory.
Use use_of(const Node& node, const BufferSlice& memory) {
  if (ExclusiveAccess::try_open(node.engine, memory)) return Use::none;
  return SharedAccess::try_open(node.engine, memory) ? Use::read : Use::changed;
}

/// A call of a test, and whether it has ended.
struct Begun {
  bool ended = false;
  Status begin(const Calls& t, spinwire::Method method, const BufferSlice& request,
               const CallOptions& options = {}) {
    Session session = t.session;
    return session.call(
        method, request,
        [this](Reply& r) {
          EXPECT_EQ(r.status(), Status::ok);
          ended = true;
        },
        options);
  }
};

TEST(RpcMemoryAccess, ACallReadsItsRequestUntilItEnds) {
  Calls t;
  {
    const Buffer b = t.client.filled(4096, 1), other = t.client.filled(4096, 2);
    Begun call, copied;
    ASSERT_EQ(call.begin(t, kLater, b.slice(0, 500)), Status::ok);
    EXPECT_EQ(use_of(t.client, b.slice(499, 1)), Use::read);
    EXPECT_EQ(use_of(t.client, other), Use::none);
    ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
    EXPECT_EQ(use_of(t.client, b.slice(0, 1)), Use::read) << "it may be sent again";
    ASSERT_EQ(copied.begin(t, kEcho, other.slice(0, kSlotPayloadBytes)), Status::ok);
    EXPECT_EQ(use_of(t.client, other), Use::none);
    EXPECT_EQ(t.later[0].call.reply(filled(3, 1)), Status::ok);
    ASSERT_TRUE(t.until([&] { return call.ended && copied.ended; }));
    EXPECT_TRUE(t.until([&] { return use_of(t.client, b) == Use::none; }));
  }
  t.finish();
}

TEST(RpcMemoryAccess, ACallThatWaitsReadsItsRequest) {
  Calls t(rpc_config(), nullptr, 1);
  {
    const Buffer b = t.client.filled(4096, 1);
    Begun second;
    ASSERT_EQ(t.begin(kLater, filled(3, 1)), Status::ok);
    ASSERT_EQ(second.begin(t, kEcho, b.slice(1000, 500)), Status::ok);
    ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
    EXPECT_EQ(use_of(t.client, b.slice(1000, 1)), Use::read);
    EXPECT_EQ(use_of(t.client, b.slice(0, 1000)), Use::none);
    EXPECT_EQ(t.later[0].call.reply(filled(3, 1)), Status::ok);
    ASSERT_TRUE(t.until([&] { return second.ended; }));
    EXPECT_TRUE(t.until([&] { return use_of(t.client, b) == Use::none; }));
  }
  t.finish();
}

TEST(RpcMemoryAccess, ALongCallReadsItsRequestAndChangesTheReplysMemory) {
  LongCalls t;
  {
    const Buffer b = t.client.filled(100'000, 1), room = t.room(5000);
    Begun call;
    ASSERT_EQ(call.begin(t, kLater, b.slice(), t.into(room)), Status::ok);
    for (const bool arrived : {false, true}) {  // first it waits for its connection
      if (arrived) {
        ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
      }
      EXPECT_EQ(use_of(t.client, b.slice(99'999, 1)), Use::read);
      EXPECT_EQ(use_of(t.client, room.slice(4999, 1)), Use::changed);
    }
    const Buffer reply = t.server.filled(5000, 2);
    EXPECT_EQ(t.later[0].call.reply(reply.slice()), Status::ok);
    EXPECT_EQ(use_of(t.server, reply.slice(4999, 1)), Use::read);
    ASSERT_TRUE(t.until([&] { return call.ended; }));
    EXPECT_EQ(use_of(t.client, b), Use::none);
    EXPECT_EQ(use_of(t.client, room), Use::none);
    EXPECT_TRUE(t.until([&] { return use_of(t.server, reply) == Use::none; }));
  }
  t.finish_long_calls();
}

TEST(RpcMemoryAccess, AReplyIsReadUntilTheServerKeepsItNoMore) {
  Calls t(rpc_config(), nullptr, 1);
  {
    const Buffer b = t.server.filled(4096, 1);
    Begun call, next;
    ASSERT_EQ(call.begin(t, kLater, t.client.filled(500, 1).slice()), Status::ok);
    ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
    EXPECT_EQ(use_of(t.server, b), Use::none);
    int completed = 0;
    EXPECT_EQ(t.later[0].call.reply(b.slice(0, 500), [&](Status) { ++completed; }), Status::ok);
    // A connection loses nothing, and may have copied the reply.
    const bool keeps = !over_connections();
    if (keeps) {
      EXPECT_EQ(use_of(t.server, b.slice(499, 1)), Use::read);
    }
    ASSERT_TRUE(t.until([&] { return call.ended; }));
    if (keeps) {
      EXPECT_EQ(use_of(t.server, b.slice(0, 1)), Use::read) << "the client may ask again";
      EXPECT_EQ(completed, 0);
    }
    ASSERT_EQ(next.begin(t, kEcho, t.client.filled(500, 2).slice()), Status::ok);
    ASSERT_TRUE(t.until([&] { return next.ended && completed == 1; }));
    EXPECT_EQ(use_of(t.server, b), Use::none);
  }
  t.finish();
}

TEST(RpcMemoryAccess, SeesSlicesOfRegisteredMemory) {
  Calls t;
  std::vector<std::byte> heap(8192);
  {
    const auto region = t.client.engine.register_memory(heap, Access::local);
    ASSERT_TRUE(region);
    Begun call;
    ASSERT_EQ(call.begin(t, kLater, region->slice(100, 600)), Status::ok);
    EXPECT_EQ(use_of(t.client, region->slice(699, 1)), Use::read);
    ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
    EXPECT_EQ(use_of(t.client, region->slice(0, 101)), Use::read);
    EXPECT_EQ(t.later[0].call.reply(filled(3, 1)), Status::ok);
    ASSERT_TRUE(t.until([&] { return call.ended; }));
    EXPECT_TRUE(t.until([&] { return use_of(t.client, region->slice(0, 8192)) == Use::none; }));
  }
  t.finish();
}

TEST(RpcMemoryAccess, SeesDatagramsThatTheDeviceIsSending) {
  if (over_connections()) GTEST_SKIP() << "there are no datagrams";
  Config c = rpc_config();
  c.rpc.direct_datagrams = spinwire::DirectPath::off;
  Calls t(c);
  {
    const Buffer b = t.client.filled(1000, 1);
    Begun call;
    ASSERT_EQ(call.begin(t, kLater, b.slice(0, 200)), Status::ok);
    EXPECT_EQ(use_of(t.client, b.slice(500, 1)), Use::read) << "all of the buffer";
    ASSERT_TRUE(t.until(
        [&] { return t.later.size() == 1 && use_of(t.client, b.slice(500, 1)) == Use::none; }));
    EXPECT_EQ(use_of(t.client, b.slice(199, 1)), Use::read);
    EXPECT_EQ(t.later[0].call.reply(filled(3, 1)), Status::ok);
    ASSERT_TRUE(t.until([&] { return call.ended; }));
    EXPECT_TRUE(t.until([&] { return use_of(t.client, b) == Use::none; }));
  }
  t.finish();
}

}  // namespace
}  // namespace memory_access_calls_test
