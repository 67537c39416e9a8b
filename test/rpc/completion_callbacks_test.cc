// Completion callbacks of every kind of operation, and of replies: each may destroy its engine, and
// may throw.
#include <gtest/gtest.h>

#include <array>
#include <stdexcept>
#include <string_view>

#include "rpc/counted_exceptions.h"
#include "rpc/rpc_ends.h"

namespace completion_callbacks_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using spinwire::Access;
using spinwire::CompletionCallback;
using spinwire::OperationId;
using spinwire::RemoteRegion;

constexpr std::size_t kBytes = 8192;
constexpr spinwire::Method kAnswer = 9;

Config config() {
  Config c = rpc_config();
  c.memory.rendezvous_bytes = 4u << 20;
  c.connections.max_message_bytes = 1u << 16;
  return c;
}

/// Two engines with a session and a connection. Memory of the server is open to the client.
struct Ground : Calls {
  explicit Ground(std::uint32_t window = 0) : Calls(config(), nullptr, window) {
    ends = connect(client, server);
    theirs = server.buffer(kBytes, Pool::lease);
    opened = server.engine.expose(theirs, Access::remote_all).value_or(RemoteRegion{});
    EXPECT_TRUE(opened);
    ours = client.filled(kBytes, 1);
    answer = server.buffer(kBytes);
  }
  void close_key() {
    ASSERT_TRUE(until([&] { return server.engine.revoke(opened) != Status::would_block; }));
    theirs.reset();
  }
  [[nodiscard]] RemoteRegion word() const { return opened.slice(0, 8); }

  Ends ends;
  Buffer theirs;
  RemoteRegion opened;
  Buffer ours;
  Buffer answer;
  int ran = 0;
  int others = 0;
};

struct Operation {
  const char* name;
  Status (*start)(Ground&, const CompletionCallback&);
};

const Operation kOperations[] = {
    {"message",
     [](Ground& g, const CompletionCallback& done) {
       return g.ends.client.send(g.ours.slice(0, 10), done);
     }},
    {"message of several parts",
     [](Ground& g, const CompletionCallback& done) {
       const std::array parts{g.ours.slice(0, 300), g.ours.slice(1000, 300)};
       return g.ends.client.send(parts, done);
     }},
    {"message above the eager limit",
     [](Ground& g, const CompletionCallback& done) { return g.ends.client.send(g.ours, done); }},
    {"message with a time-out",
     [](Ground& g, const CompletionCallback& done) {
       OperationId id;
       const Status status = g.ends.client.send(g.ours.slice(0, 10), done, Post::defer, &id);
       EXPECT_TRUE(status != Status::ok || g.ends.client.set_timeout(id, 0ns) == Status::ok);
       return status;
     }},
    {"WRITE",
     [](Ground& g, const CompletionCallback& done) {
       return g.ends.client.write(g.ours, g.opened, done);
     }},
    {"WRITE of several parts",
     [](Ground& g, const CompletionCallback& done) {
       const std::array parts{g.ours.slice(0, 300), g.ours.slice(1000, 300)};
       return g.ends.client.write(parts, g.opened, done);
     }},
    {"WRITE with an immediate",
     [](Ground& g, const CompletionCallback& done) {
       return g.ends.client.write_with_imm(g.ours, g.opened, 7, done);
     }},
    {"WRITE with a notice",
     [](Ground& g, const CompletionCallback& done) {
       return g.ends.client.write_and_send(g.ours, g.opened, filled(5, 2), done);
     }},
    {"READ",
     [](Ground& g, const CompletionCallback& done) {
       return g.ends.client.read(g.ours, g.opened, done);
     }},
    {"READ that is cancelled",
     [](Ground& g, const CompletionCallback& done) {
       OperationId id;
       const Status status = g.ends.client.read(g.ours, g.opened, done, Post::defer, &id);
       EXPECT_TRUE(status != Status::ok || g.ends.client.cancel(id) == Status::ok);
       return status;
     }},
    {"compare and swap",
     [](Ground& g, const CompletionCallback& done) {
       return g.ends.client.compare_swap(g.word(), 0, 1, done);
     }},
    {"fetch and add",
     [](Ground& g, const CompletionCallback& done) {
       return g.ends.client.fetch_add(g.word(), 1, done);
     }},
};

TEST(RpcCompletionCallbacks, OfEachOperationMayDestroyTheEngine) {
  for (const Operation& operation : kOperations) {
    SCOPED_TRACE(operation.name);
    Ground g;
    ASSERT_EQ(g.begin(kLater, filled(5, 1)), Status::ok);
    ASSERT_TRUE(g.until([&] { return g.later.size() == 1; }));
    const auto destroy = [&g](const Completion&) {
      ++g.ran;
      g.client.engine = Engine();
    };
    ASSERT_EQ(operation.start(g, destroy), Status::ok);
    ASSERT_EQ(g.ends.client.read(g.ours, g.opened, [&g](const Completion&) { ++g.others; }),
              Status::ok);
    ASSERT_TRUE(g.until([&] { return g.ran != 0; }));
    EXPECT_EQ(g.ran, 1);
    EXPECT_EQ(g.others, 1) << "the operation behind it ends, too";
    EXPECT_EQ(g.ended[0].status, Status::flushed);
    EXPECT_EQ(g.ends.client.state(), ConnectionState::closed);
    EXPECT_EQ(g.client.engine.poll(), -static_cast<int>(Status::not_connected));
    EXPECT_TRUE(g.ours.unique());
    g.ours.reset();
    g.answer.reset();
    g.later.clear();
    g.server.stale_allowed = true;
    ASSERT_TRUE(engine_test::until({&g.server}, [&] {
      return g.server.engine.stats().connections == 0 &&
             g.server.engine.rpc_stats().served_sessions == 0;
    }));
    g.close_key();
    g.server.expect_clean();
  }
}

class RpcThrowingCompletions : public CountsThrownExceptions {};

TEST_F(RpcThrowingCompletions, OfEachOperationCloseNothing) {
  Ground g;
  for (const Operation& operation : kOperations) {
    SCOPED_TRACE(operation.name);
    logged = g.others = 0;
    Status status = Status::would_block;
    ASSERT_TRUE(g.until([&] {
      status = operation.start(g, [](const Completion&) { fail(); });
      return status != Status::would_block;
    }));
    ASSERT_EQ(status, Status::ok);
    ASSERT_EQ(g.ends.client.read(g.ours, g.opened, [&g](const Completion&) { ++g.others; }),
              Status::ok);
    ASSERT_TRUE(g.until([&] { return logged != 0 && g.others != 0; }));
    ASSERT_TRUE(g.until([&] { return g.ends.client.stats().outstanding == 0; }));
    EXPECT_EQ(logged, 1);
    EXPECT_EQ(g.others, 1);
    EXPECT_TRUE(g.ends.client.ready());
  }
  EXPECT_EQ(g.call(kEcho, filled(5, 1)).status, Status::ok);
  g.ours.reset();
  g.answer.reset();
  g.close_key();
  EXPECT_EQ(g.ends.client.close(), Status::ok);
  g.finish();
}

/// Replies of this size, with a callback, until that has run.
template <typename Done>
void answer_calls(Ground& g, std::size_t size, Done&& has_run, void (*done)(Ground&)) {
  ASSERT_TRUE(g.server.engine.serve(kAnswer, [&g, size, done](Request& r) {
    EXPECT_EQ(r.reply(g.answer.slice(0, size), [&g, done](Status) { done(g); }), Status::ok);
  }));
  ASSERT_EQ(g.begin(kAnswer, filled(5, 1)), Status::ok);
  ASSERT_TRUE(g.until([&] { return has_run() || g.all_ended(); }));
  // A reply that may be sent again is over with the next call in its slot.
  ASSERT_EQ(g.begin(kEcho, filled(5, 2)), Status::ok);
  ASSERT_TRUE(g.until([&] { return has_run(); }));
}

TEST(RpcCompletionCallbacks, OfAReplyMayDestroyTheServersEngine) {
  for (const std::size_t size : {10u, 1000u}) {
    SCOPED_TRACE(size);
    Ground g(1);
    ASSERT_NO_FATAL_FAILURE(answer_calls(
        g, size, [&] { return g.ran != 0; },
        [](Ground& ground) {
          ++ground.ran;
          ground.server.engine = Engine();
        }));
    EXPECT_EQ(g.ran, 1);
    EXPECT_EQ(g.server.engine.poll(), -static_cast<int>(Status::not_connected));
    EXPECT_TRUE(g.answer.unique());
    g.answer.reset();
    g.theirs.reset();
    g.ours.reset();
    g.client.stale_allowed = true;
    ASSERT_TRUE(engine_test::until({&g.client}, [&] {
      return g.client.engine.stats().connections == 0 && g.client.engine.rpc_stats().sessions == 0;
    }));
    EXPECT_TRUE(g.all_ended());
    g.client.expect_clean();
  }
}

TEST_F(RpcThrowingCompletions, OfAReplyCloseNothing) {
  for (const std::size_t size : {10u, 1000u}) {
    SCOPED_TRACE(size);
    logged = 0;
    Ground g(1);
    ASSERT_NO_FATAL_FAILURE(answer_calls(
        g, size, [] { return logged != 0; }, [](Ground&) { fail(); }));
    ASSERT_TRUE(g.until([&] { return g.all_ended(); }));
    EXPECT_EQ(logged, 1);
    EXPECT_EQ(g.call(kEcho, filled(5, 3)).status, Status::ok);
    EXPECT_TRUE(g.answer.unique());
    g.answer.reset();
    g.ours.reset();
    g.close_key();
    EXPECT_EQ(g.ends.client.close(), Status::ok);
    g.finish();
  }
}

}  // namespace
}  // namespace completion_callbacks_test
