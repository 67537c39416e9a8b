#include <gtest/gtest.h>

#include <utility>
#include <vector>

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

/// The result of a handle's function.
struct Answer {
  const char* function;
  Status status;
};
template <typename T>
Status status_of(const spinwire::Result<T>& result) {
  return result ? Status::ok : result.error().status;
}

/// Checks every function of an Engine without an engine.
void expect_empty_engine(Engine& engine) {
  using spinwire::Access;
  using spinwire::Pool;
  const auto answer = [](int polled) { return static_cast<Status>(-polled); };
  std::vector<std::byte> heap(64);
  const Answer answers[] = {
      {"poll", answer(engine.poll())},
      {"poll_control", answer(engine.poll_control())},
      {"flush", engine.flush()},
      {"listen", status_of(engine.listen("127.0.0.1:0", {}))},
      {"connect", status_of(engine.connect("127.0.0.1:1", {}))},
      {"prepare", status_of(engine.prepare({}))},
      {"serve", status_of(engine.serve(1, [](Request&) {}))},
      {"serve without a handler", status_of(engine.serve(1, {}))},
      {"open_session", status_of(engine.open_session("127.0.0.1:1", {}))},
      {"allocate_status", engine.allocate_status()},
      {"register_memory", status_of(engine.register_memory(heap, Access::local))},
      {"expose", status_of(engine.expose({}, Access::remote_read))},
      {"revoke", engine.revoke({})},
      {"set_device_event_handler", engine.set_device_event_handler({})},
      {"adopt_listener", status_of(engine.adopt_listener(-1, {}))},
      {"drain", status_of(engine.drain(Nanoseconds(0)))},
      {"reload_keys", status_of(engine.reload_keys())},
      {"audit", status_of(engine.audit())},
  };
  for (const Answer& a : answers) EXPECT_EQ(a.status, Status::not_connected) << a.function;
  EXPECT_FALSE(engine);
  for (const Pool pool : {Pool::send, Pool::lease, Pool::rendezvous}) {
    EXPECT_FALSE(engine.allocate(8, pool));
    EXPECT_EQ(engine.memory_stats(pool).pool_bytes, 0u);
  }
  EXPECT_EQ(engine.rpc_stats().calls, 0u);
  EXPECT_EQ(engine.set_reply_writable_handler([] {}), Status::not_connected);
  EXPECT_EQ(engine.stats().polls, 0u);
  EXPECT_EQ(engine.config().to_toml(), Config().to_toml());
  EXPECT_GT(engine.clock().now(), 0u);
  EXPECT_EQ(engine.device_name(), "");
  EXPECT_EQ(engine.device().name, "");
}

TEST(RpcHandles, AnEngineThatWasNeverOpenedAnswersNotConnected) {
  Engine engine;
  expect_empty_engine(engine);
}

TEST(RpcHandles, AMovedFromEngineAnswersNotConnected) {
  World w;
  Engine constructed = std::move(w.client);
  expect_empty_engine(w.client);  // NOLINT(bugprone-use-after-move): what it then answers
  Engine assigned;
  assigned = std::move(constructed);
  expect_empty_engine(constructed);  // NOLINT(bugprone-use-after-move)
  EXPECT_TRUE(assigned);
  w.client = std::move(assigned);
  EXPECT_TRUE(w.connection.ready());
}

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
  const spinwire::BufferSlice slice = buffer;
  const Answer answers[] = {
      {"send", c.send(buffer)},
      {"send_with_imm", c.send_with_imm(buffer, 1)},
      {"send_copy", c.send_copy(none)},
      {"write", c.write(buffer, region)},
      {"write_with_imm", c.write_with_imm(buffer, region, 1)},
      {"gathered send", c.send(std::span(&slice, 1))},
      {"gathered write", c.write(std::span(&slice, 1), region)},
      {"write_and_send", c.write_and_send(buffer, region, none)},
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
      {"close with a goodbye", c.close({spinwire::GoodbyeReason::draining, Nanoseconds(0)})},
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
  EXPECT_EQ(c.local_path(), spinwire::LocalPath{});
  c.prefetch();
  EXPECT_EQ(w.session.state(), SessionState::closed);
  EXPECT_EQ(w.session.max_call() + w.session.max_inline_call(), 0u);
  EXPECT_FALSE(w.session.last_call());
  w.session.prefetch();
  EXPECT_EQ(w.session.local_path(), spinwire::LocalPath{});
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

}  // namespace
}  // namespace handles_test
