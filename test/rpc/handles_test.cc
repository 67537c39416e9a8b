#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "rpc/rpc_ends.h"

namespace handles_test {
namespace {

using namespace rpc_test;  // the names of a test namespace
using spinwire::Connection;
using spinwire::ConnectionState;
using spinwire::ConnectOptions;
using spinwire::Engine;
using spinwire::ListenOptions;

Engine open_engine(const spinwire::Config& config = rpc_config()) {
  auto engine = Engine::open(config);
  EXPECT_TRUE(engine) << engine.error().message();
  return engine ? std::move(*engine) : Engine();
}

/// Two engines with a connection, a session, and a deferred call.
struct World {
  explicit World(const spinwire::Config& config = rpc_config())
      : server(open_engine(config)), client(open_engine(config)) {
    EXPECT_TRUE(server.serve(1, [this](Request& r) { pending = r.defer(); }));
    auto made = server.listen("127.0.0.1:0", {});
    EXPECT_TRUE(made);
    listener = std::move(*made);
    ConnectOptions options;
    options.handlers.on_closed = [this](Connection, const Error&) { ++closed; };
    connection = *client.connect(listener.address(), options);
    session = *client.open_session(listener.address(), {});
    EXPECT_TRUE(until([&] { return connection.ready() && session.ready(); }));
  }
  template <typename Done>
  bool until(Done done) {
    return engine_test::until({}, [&] {
      (void)server.poll();
      (void)client.poll();
      return done();
    });
  }
  int closed = 0;
  int ended = 0;
  PendingCall pending;
  Connection connection;
  Session session;
  Engine server;
  Engine client;
  spinwire::Listener listener;
};

TEST(RpcHandles, AMovedEngineKeepsItsHandles) {
  World w;
  Engine moved = std::move(w.client);
  EXPECT_EQ(w.client.poll(), -static_cast<int>(Status::not_connected));
  EXPECT_EQ(w.client.poll_control(), -static_cast<int>(Status::not_connected));
  EXPECT_EQ(w.client.flush(), Status::not_connected);
  EXPECT_EQ(w.client.allocate_status(), Status::not_connected);
  EXPECT_EQ(w.client.connect("127.0.0.1:1", {}).error().status, Status::not_connected);
  EXPECT_TRUE(w.connection.ready());
  EXPECT_TRUE(w.session.ready());
  w.client = std::move(moved);
  EXPECT_EQ(w.session.close(), Status::ok);
  EXPECT_TRUE(w.until([&] { return w.session.state() == SessionState::closed; }));
}

/// The result of a handle's function.
struct Answer {
  const char* function;
  Status status;
};
template <typename T>
Status status_of(const spinwire::Result<T>& result) {
  return result ? Status::ok : result.error().status;
}

/// One handle of each kind, all of living objects.
struct Handles {
  explicit Handles(World& world) : w(world) {
    EXPECT_EQ(w.session.call(
                  1, std::span<const std::byte>(), [&w = world](Reply&) { ++w.ended; }, {}, &id),
              Status::ok);
    EXPECT_TRUE(id && id == w.session.last_call());
    EXPECT_EQ(w.connection.request_memory(
                  64, {}, [this](spinwire::LeaseReply& r) { memory = std::move(r.memory); }),
              Status::ok);
    ListenOptions listen;
    listen.settings.raw = spinwire::RawSettings{};
    auto made = w.server.listen("127.0.0.1:0", listen);
    EXPECT_TRUE(made);
    if (!made) return;
    raw_listener = std::move(*made);
    ConnectOptions connect;
    connect.settings.raw = spinwire::RawSettings{};
    raw = w.client.connect(raw_listener.address(), connect).value_or(Connection());
    EXPECT_TRUE(w.until([&] { return w.pending.max_reply() != 0 && memory && raw.ready(); }));
    buffer = w.client.allocate(8);
    servers = w.server.allocate(8);
    region = memory.region();
    EXPECT_TRUE(buffer && servers && region);
  }
  void expect_not_connected();
  void expect_empty();

  World& w;
  CallId id;
  spinwire::RemoteMemory memory;
  spinwire::Listener raw_listener;
  Connection raw;
  spinwire::Buffer buffer;   ///< of the client
  spinwire::Buffer servers;  ///< of the server, which has the pending call
  spinwire::RemoteRegion region;
};

void Handles::expect_not_connected() {
  using spinwire::Access;
  using spinwire::KeyScope;
  Connection& c = w.connection;
  const auto done = [](Reply&) {};
  const std::span<const std::byte> none;
  const Answer answers[] = {
      {"send", c.send(buffer)},
      {"send_with_imm", c.send_with_imm(buffer, 1)},
      {"send_copy", c.send_copy(none)},
      {"write", c.write(buffer, region)},
      {"write_with_imm", c.write_with_imm(buffer, region, 1)},
      {"read", c.read(buffer, region)},
      {"compare_swap", c.compare_swap(region.slice(0, 8), 0, 1)},
      {"fetch_add", c.fetch_add(region.slice(0, 8), 1)},
      {"flush", c.flush()},
      {"cancel", c.cancel({})},
      {"join", status_of(c.join({}))},
      {"endpoint", status_of(c.endpoint())},
      {"configure", status_of(c.configure({}))},
      {"expose", status_of(c.expose(buffer, Access::remote_read))},
      {"expose to the peer",
       status_of(c.expose(buffer, Access::remote_read, KeyScope::connection))},
      {"revoke", c.revoke(region)},
      {"token", status_of(c.token(region))},
      {"import_token", status_of(c.import_token(none))},
      {"request_memory", c.request_memory(64, {}, {})},
      {"lease", c.lease(buffer, {})},
      {"recall", c.recall({})},
      {"register_memory", status_of(c.register_memory({}, Access::local))},
      {"close", c.close()},
      {"set_handlers", c.set_handlers({})},
      {"query_state", status_of(c.query_state())},
      {"post_receive", raw.post_receive(buffer)},
      {"send_raw", raw.send_raw(buffer)},
      {"send_raw_with_imm", raw.send_raw_with_imm(buffer, 1)},
      {"close of a raw connection", raw.close()},
      {"call", w.session.call(1, none, done)},
      {"call with options", w.session.call(1, buffer, done, {})},
      {"cancel of a call", w.session.cancel(id)},
      {"close of a session", w.session.close()},
      {"reply", w.pending.reply(none)},
      {"reply of a slice", w.pending.reply(servers)},
      {"refuse", w.pending.refuse("no")},
      {"commit_reply", w.pending.commit_reply(1)},
      {"renew", memory.renew(10s)},
      {"give_back", memory.give_back()},
  };
  for (const Answer& answer : answers)
    EXPECT_EQ(answer.status, Status::not_connected) << answer.function;
}

void Handles::expect_empty() {
  const Connection& c = w.connection;
  EXPECT_EQ(c.state(), ConnectionState::closed);
  EXPECT_FALSE(c.last_operation());
  EXPECT_EQ(c.max_message(), 0u);
  EXPECT_EQ(c.stats().messages_sent, 0u);
  EXPECT_EQ(c.snapshot().state, ConnectionState::closed);
  EXPECT_EQ(c.peer(), "");
  c.prefetch();
  EXPECT_EQ(w.session.state(), SessionState::closed);
  EXPECT_EQ(w.session.max_call() + w.session.max_inline_call(), 0u);
  EXPECT_FALSE(w.session.last_call());
  w.session.prefetch();
  EXPECT_EQ(w.pending.max_reply(), 0u);
  EXPECT_TRUE(w.pending.reserve_reply(1).empty());
  EXPECT_FALSE(memory);
  EXPECT_EQ(memory.time_left(), 0s);
  EXPECT_FALSE(memory.connection().ready());
  EXPECT_FALSE(memory.detach());
  memory.release();
  EXPECT_TRUE(buffer.unique());
}

TEST(RpcHandles, AnswerNotConnectedOnceTheirEngineIsGone) {
  World w;
  Handles all(w);
  w.client = Engine();
  w.server = Engine();
  EXPECT_EQ(w.ended, 1);
  EXPECT_EQ(w.closed, 1);
  const Engine another = open_engine();  // reuses no slot
  all.expect_not_connected();
  all.expect_empty();
  EXPECT_EQ(w.listener.address(), "");
  EXPECT_FALSE(w.listener);
  EXPECT_FALSE(all.raw_listener);
}

TEST(RpcHandles, AnswerNotConnectedOnceTheirObjectIsGone) {
  World w;
  Handles all(w);
  EXPECT_EQ(w.session.close(), Status::ok);
  EXPECT_EQ(w.connection.close(), Status::ok);
  EXPECT_EQ(all.raw.close(), Status::ok);
  ASSERT_TRUE(w.until([&] {
    return w.session.state() == SessionState::closed && w.pending.max_reply() == 0 &&
           w.connection.state() == ConnectionState::closed && !all.memory &&
           all.raw.state() == ConnectionState::closed;
  }));
  all.expect_not_connected();
  all.expect_empty();
  const spinwire::Listener moved = std::move(w.listener);
  EXPECT_TRUE(moved);
  EXPECT_NE(moved.address(), "");
  EXPECT_EQ(w.listener.address(), "");  // NOLINT(bugprone-use-after-move): what it then answers
  EXPECT_FALSE(w.listener);
}

/// A World whose engines also take long messages.
struct LongWorld : World {
  static spinwire::Config config() {
    spinwire::Config c = rpc_config();
    c.memory.rendezvous_bytes = 4u << 20;
    c.connections.max_message_bytes = 1u << 16;
    return c;
  }
  LongWorld() : World(config()) {}
};

TEST(RpcHandles, MemoryOfAnotherEngineIsRefused) {
  LongWorld w;
  Handles all(w);
  const spinwire::Buffer theirs = w.server.allocate(64);
  spinwire::Buffer ours = w.client.allocate(64);
  ASSERT_TRUE(theirs && ours);
  const spinwire::RemoteRegion region =
      w.server.expose(theirs, spinwire::Access::remote_all).value_or(spinwire::RemoteRegion{});
  const auto done = [](Reply&) {};
  const auto read = spinwire::Access::remote_read;
  CallOptions options;
  options.reply_into = theirs;
  const Answer answers[] = {
      {"send", w.connection.send(theirs)},
      {"send_with_imm", w.connection.send_with_imm(theirs, 1)},
      {"write", w.connection.write(theirs, region)},
      {"write_with_imm", w.connection.write_with_imm(theirs, region, 1)},
      {"read", w.connection.read(theirs, region)},
      {"post_receive", all.raw.post_receive(theirs)},
      {"send_raw", all.raw.send_raw(theirs)},
      {"send_raw_with_imm", all.raw.send_raw_with_imm(theirs, 1)},
      {"lease", w.connection.lease(theirs, {})},
      {"call", w.session.call(1, theirs, done)},
      {"call with options", w.session.call(1, theirs, done, CallOptions{})},
      {"reply_into", w.session.call(1, std::span<const std::byte>(), done, options)},
      {"reply", w.pending.reply(ours)},
      {"expose by the engine", status_of(w.client.expose(theirs, read))},
      {"expose", status_of(w.connection.expose(theirs, read))},
      {"expose to the peer",
       status_of(w.connection.expose(theirs, read, spinwire::KeyScope::connection))},
  };
  for (const Answer& answer : answers)
    EXPECT_EQ(answer.status, Status::invalid_argument) << answer.function;
  EXPECT_EQ(w.connection.write(ours, region), Status::ok);
  EXPECT_TRUE(w.until([&] { return ours.unique(); }));
  EXPECT_EQ(w.server.revoke(region), Status::ok);
}

TEST(RpcHandles, ALongMessageIsNotPlacedInMemoryOfAnotherEngine) {
  LongWorld w;
  const std::size_t size = w.client.config().connections.eager_bytes + 1;
  spinwire::Buffer ours = w.client.allocate(size);
  ASSERT_TRUE(ours);
  std::memset(ours.data(), 7, size);
  struct {
    spinwire::Buffer* ours;
    Status answer = Status::ok;
    const std::byte* at = nullptr;
    bool right = false;
  } seen{&ours};
  ListenOptions listen;
  listen.handlers.on_offer = [&seen](Connection, spinwire::Offer& o) {
    seen.answer = o.place(*seen.ours);
  };
  listen.handlers.on_message = [&seen](Connection, spinwire::Message& m) {
    seen.at = m.data();
    seen.right = std::all_of(m.bytes().begin(), m.bytes().end(),
                             [](std::byte b) { return b == std::byte{7}; });
  };
  const auto listener = w.server.listen("127.0.0.1:0", listen);
  ASSERT_TRUE(listener);
  Connection c = w.client.connect(listener->address(), {}).value_or(Connection());
  ASSERT_TRUE(w.until([&] { return c.ready(); }));
  ASSERT_EQ(c.send(ours), Status::ok);
  ASSERT_TRUE(w.until([&] { return seen.at != nullptr; }));
  EXPECT_EQ(seen.answer, Status::invalid_argument);
  EXPECT_NE(seen.at, ours.data()) << "it arrives in the server's pool";
  EXPECT_TRUE(seen.right);
}

}  // namespace
}  // namespace handles_test
