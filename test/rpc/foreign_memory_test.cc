// Memory of another engine is refused by every function that takes memory, whatever kind of memory
// it is. A refused call has taken nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "rpc/rpc_ends.h"

namespace foreign_memory_test {
namespace {

using namespace rpc_test;  // the names of a test namespace
using spinwire::KeyScope;
using spinwire::Offer;

/// The result of a function.
struct Answer {
  const char* function;
  Status status;
};
template <typename T>
Status status_of(const Result<T>& result) {
  return result ? Status::ok : result.error().status;
}

Config config() {
  Config c = rpc_config();
  c.memory.rendezvous_bytes = 8u << 20;
  c.connections.max_message_bytes = 1u << 16;
  return c;
}

/// A client and a server with a session, a connection, a raw connection, and a call that waits for
/// its reply.
struct World : Calls {
  World() : Calls(config()) {
    ends = connect(client, server);
    ListenOptions listen;
    listen.handlers = server.handlers();
    listen.settings.raw = spinwire::RawSettings{};
    raw_listener = server.engine.listen("127.0.0.1:0", listen).value_or(Listener());
    ConnectOptions options;
    options.settings.raw = spinwire::RawSettings{};
    raw = client.engine.connect(raw_listener.address(), options).value_or(Connection());
    (void)call(kEcho, {});  // until its first reply, a session has one call in flight
    EXPECT_EQ(begin(kLater, filled(5, 1)), Status::ok);
    EXPECT_TRUE(
        until([&] { return raw.ready() && server.ready.size() == 2 && later.size() == 1; }));
    target = server.buffer(128, Pool::lease);
    region = server.engine.expose(target, Access::remote_all).value_or(spinwire::RemoteRegion{});
    EXPECT_TRUE(region);
  }
  std::vector<Answer> by_connection(const BufferSlice& foreign);
  std::vector<Answer> by_raw_connection(const BufferSlice& foreign);
  std::vector<Answer> by_call(const BufferSlice& foreign);
  /// Checks that all functions refuse memory that is neither the client's nor the server's.
  void expect_refused(const char* kind, const BufferSlice& to_client, const BufferSlice& to_server);
  /// Answers the waiting call and closes everything. Nothing must be left.
  void end() {
    EXPECT_EQ(later[0].call.reply(filled(3, 3)), Status::ok);
    EXPECT_TRUE(until([&] { return all_ended() && client.engine.stats().operations == 0; }));
    EXPECT_EQ(ended[1].bytes, filled(3, 3)) << "the call was not answered before";
    EXPECT_EQ(raw.close(), Status::ok);
    for (Connection c : server.ready) EXPECT_EQ(c.close(), Status::ok);
    EXPECT_EQ(server.engine.revoke(region), Status::ok);
    target.reset();
    finish();
  }

  Ends ends;
  Listener raw_listener;
  Connection raw;
  Buffer target;
  spinwire::RemoteRegion region;
};

std::vector<Answer> World::by_connection(const BufferSlice& foreign) {
  Connection& c = ends.client;
  const auto done = [](const Completion&) { ADD_FAILURE() << "a refused operation has ended"; };
  const BufferSlice some = foreign.slice(0, std::min<std::size_t>(foreign.size(), 64));
  spinwire::OperationId id;
  std::vector<Answer> answers = {
      {"send", c.send(foreign)},
      {"send with a callback", c.send(foreign, done, Post::now, &id)},
      {"send, deferred", c.send(foreign, done, Post::defer)},
      {"send_with_imm", c.send_with_imm(foreign, 1, done)},
      {"write", c.write(some, region, done)},
      {"write_with_imm", c.write_with_imm(some, region, 1, done)},
      {"read", c.read(some, region, done)},
      {"lease", c.lease(foreign, {})},
      {"expose by the engine", status_of(client.engine.expose(foreign, Access::remote_read))},
      {"expose", status_of(c.expose(foreign, Access::remote_read))},
      {"expose to the peer",
       status_of(c.expose(foreign, Access::remote_read, KeyScope::connection))},
  };
  EXPECT_FALSE(id);
  return answers;
}

std::vector<Answer> World::by_raw_connection(const BufferSlice& foreign) {
  const Buffer ours = client.buffer(8);
  const std::array<BufferSlice, 2> list = {ours, foreign};
  const auto received = [](const spinwire::RawReceive&) {
    ADD_FAILURE() << "a refused receive has ended";
  };
  return {
      {"post_receive", raw.post_receive(foreign, received)},
      {"post_receive of a list", raw.post_receive(list, received)},
      {"send_raw", raw.send_raw(foreign)},
      {"send_raw of a list", raw.send_raw(list)},
      {"send_raw_with_imm", raw.send_raw_with_imm(foreign, 1)},
      {"send_raw_with_imm of a list", raw.send_raw_with_imm(list, 1)},
      {"write_with_imm of a raw connection", raw.write_with_imm(foreign.slice(0, 1), region, 1)},
  };
}

std::vector<Answer> World::by_call(const BufferSlice& foreign) {
  const auto done = [](Reply&) { ADD_FAILURE() << "a refused call has ended"; };
  const Bytes small = filled(4, 4);
  const Buffer ours = client.filled(64, 4);
  CallOptions into;
  into.reply_into = foreign;
  spinwire::CallId id;
  std::vector<Answer> answers = {
      {"call", session.call(kEcho, foreign, done)},
      {"call with an id", session.call(kEcho, foreign, done, &id)},
      {"call with options", session.call(kEcho, foreign, done, CallOptions{})},
      {"reply_into", session.call(kEcho, std::span<const std::byte>(small), done, into)},
      {"reply_into, with a slice", session.call(kEcho, ours.slice(), done, into)},
  };
  EXPECT_FALSE(id);
  return answers;
}

void World::expect_refused(const char* kind, const BufferSlice& to_client,
                           const BufferSlice& to_server) {
  SCOPED_TRACE(kind);
  ASSERT_TRUE(to_client && to_server);
  std::vector<Answer> answers = {{"PendingCall::reply", later[0].call.reply(to_server)}};
  for (const auto& more :
       {by_connection(to_client), by_raw_connection(to_client), by_call(to_client)})
    answers.insert(answers.end(), more.begin(), more.end());
  for (const Answer& answer : answers)
    EXPECT_EQ(answer.status, Status::invalid_argument) << answer.function;
}

TEST(ForeignMemory, OfPoolsIsRefused) {
  World w;
  Node stranger(config());
  const std::size_t more_than_eager = config().connections.eager_bytes + 1;
  for (const Pool pool : {Pool::send, Pool::lease, Pool::rendezvous}) {
    const Buffer small = stranger.buffer(32, pool);
    const Buffer large = stranger.buffer(more_than_eager, pool);
    w.expect_refused("a block", small, small);
    w.expect_refused("part of a block", small.slice(4, 8), small.slice(4, 8));
    w.expect_refused("a large block", large, large);
  }
  {
    const Buffer of_server = w.server.buffer(32);
    const Buffer of_client = w.client.buffer(32);
    w.expect_refused("the peer's block", of_server, of_client);
  }
  Buffer buffer = stranger.buffer(8);
  EXPECT_EQ(w.ends.client.send(buffer), Status::invalid_argument) << "send of a Buffer";
  EXPECT_TRUE(buffer.unique()) << "nothing holds refused memory";
  w.end();
}

TEST(ForeignMemory, ThatWasRegisteredIsRefused) {
  World w;
  std::vector<std::byte> heap(8192);
  Node stranger(config());
  const MemoryRegion region =
      stranger.engine.register_memory(heap, Access::remote_all).value_or(MemoryRegion());
  w.expect_refused("registered memory", region.slice(), region.slice());
  w.end();
}

TEST(ForeignMemory, OfAnEngineThatIsGoneIsRefused) {
  World w;
  std::vector<std::byte> heap(256);
  Buffer block;
  MemoryRegion region;
  {
    Node stranger(config());
    block = stranger.buffer(64);
    region = stranger.engine.register_memory(heap, Access::local).value_or(MemoryRegion());
  }
  w.expect_refused("a block", block, block);
  w.expect_refused("registered memory", region.slice(), region.slice());
  w.end();
}

TEST(ForeignMemory, ThatWasTakenOrKeptIsRefused) {
  constexpr spinwire::Method kKeep = 60;
  World w;
  struct Kept {
    BufferSlice request;
    BufferSlice reply;
  } kept;
  ASSERT_TRUE(w.server.engine.serve(kKeep, [&kept](Request& r) {
    kept.request = r.keep();
    // Adapters have shorter datagrams.
    EXPECT_EQ(r.reply(r.bytes().first(std::min(r.bytes().size(), r.max_reply()))), Status::ok);
  }));
  Buffer by_server, by_client;
  w.server.on_message = [&](Connection, Message& m) { by_server = m.take(); };
  w.client.on_message = [&](Connection, Message& m) { by_client = m.take(); };
  for (const std::size_t size :
       {std::size_t{40}, config().connections.eager_bytes + std::size_t{1}}) {
    kept = {};
    by_server.reset();
    by_client.reset();
    const Buffer of_client = w.client.filled(size, 1);
    const Buffer of_server = w.server.filled(size, 2);
    EXPECT_EQ(w.ends.client.send(of_client), Status::ok);
    EXPECT_EQ(w.ends.server.send(of_server), Status::ok);
    EXPECT_EQ(w.session.call(kKeep, of_client.slice(),
                             [&kept](Reply& r) {
                               EXPECT_EQ(r.status(), Status::ok);
                               kept.reply = r.keep();
                             }),
              Status::ok);
    ASSERT_TRUE(w.until([&] { return by_server && by_client && kept.request && kept.reply; }));
    w.expect_refused("a taken message", by_server, by_client);
    w.expect_refused("a kept request or reply", kept.request, kept.reply);
  }
  kept = {};
  by_server.reset();
  by_client.reset();
  w.end();
}

TEST(ForeignMemory, DoesNotAnswerACall) {
  constexpr spinwire::Method kReplies = 61;
  World w;
  Buffer foreign = w.client.filled(100, 1);
  ASSERT_TRUE(w.server.engine.serve(kReplies, [&foreign](Request& r) {
    EXPECT_EQ(r.reply(foreign), Status::invalid_argument);
    EXPECT_EQ(r.reply(r.bytes()), Status::ok) << "the call can still be answered";
  }));
  const Ended e = w.call(kReplies, filled(7, 7));
  EXPECT_EQ(e.status, Status::ok);
  EXPECT_EQ(e.bytes, filled(7, 7));
  EXPECT_TRUE(foreign.unique());
  foreign.reset();
  w.end();
}

TEST(ForeignMemory, TakesNoLongMessage) {
  World w;
  const std::size_t size = config().connections.eager_bytes + 1;
  Buffer message = w.client.filled(size, 7);
  Status answer = Status::ok;
  const std::byte* at = nullptr;
  w.server.on_offer = [&](Connection, Offer& o) { answer = o.place(message); };
  w.server.on_message = [&](Connection, Message& m) {
    at = m.data();
    EXPECT_TRUE(Node::holds(m.bytes(), 7));
  };
  ASSERT_EQ(w.ends.client.send(message), Status::ok);
  ASSERT_TRUE(w.until([&] { return at != nullptr; }));
  EXPECT_EQ(answer, Status::invalid_argument);
  EXPECT_NE(at, message.data()) << "it arrives in the server's pool";
  message.reset();
  w.end();
}

}  // namespace
}  // namespace foreign_memory_test
