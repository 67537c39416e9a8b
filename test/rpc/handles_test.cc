#include <gtest/gtest.h>

#include <stdexcept>
#include <utility>

#include "rpc/ends.h"

namespace handles_test {
namespace {

using namespace rpc_test;  // names of a test namespace of its own
using spinwire::Connection;
using spinwire::ConnectionState;
using spinwire::ConnectOptions;
using spinwire::Engine;
using spinwire::ListenOptions;

Engine open_engine() {
  auto engine = Engine::open(rpc_config());
  EXPECT_TRUE(engine) << engine.error().message();
  return engine ? std::move(*engine) : Engine();
}

/// Two engines with a connection and a session, and a call whose answer is deferred.
struct World {
  World() : server(open_engine()), client(open_engine()) {
    EXPECT_TRUE(server.serve(1, [this](Request& r) { pending = r.defer(); }));
    EXPECT_TRUE(server.serve(2, [](Request&) { throw std::runtime_error("a handler fails"); }));
    ListenOptions listen;
    listen.handlers.on_message = [](Connection, spinwire::Message&) {
      throw std::runtime_error("a message cannot be read");
    };
    auto made = server.listen("127.0.0.1:0", listen);
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
    const auto end = std::chrono::steady_clock::now() + 20s;
    while (!done()) {
      (void)server.poll();
      (void)client.poll();
      if (std::chrono::steady_clock::now() > end) return false;
    }
    return true;
  }
  int closed = 0;
  int ended = 0;
  Status outcome = Status::system;
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

/// What a function of a handle answers.
struct Answer {
  const char* function;
  Status status;
};
template <typename T>
Status status_of(const spinwire::Result<T>& result) {
  return result ? Status::ok : result.error().status;
}

TEST(RpcHandles, AnswerNotConnectedOnceTheirEngineIsGone) {
  using spinwire::Access;
  using spinwire::KeyScope;
  World w;
  CallId id;
  ASSERT_EQ(w.session.call(
                1, std::span<const std::byte>(), [&w](Reply&) { ++w.ended; }, {}, &id),
            Status::ok);
  EXPECT_EQ(id.number, w.session.last_call().number);
  spinwire::RemoteMemory memory;
  ASSERT_EQ(w.connection.request_memory(
                64, {}, [&memory](spinwire::LeaseReply& r) { memory = std::move(r.memory); }),
            Status::ok);
  ListenOptions listen;
  listen.settings.raw = spinwire::RawSettings{};
  auto raw_listener = w.server.listen("127.0.0.1:0", listen);
  ASSERT_TRUE(raw_listener) << raw_listener.error().message();
  ConnectOptions connect;
  connect.settings.raw = spinwire::RawSettings{};
  Connection raw = w.client.connect(raw_listener->address(), connect).value_or(Connection());
  ASSERT_TRUE(w.until([&] { return w.pending.max_reply() != 0 && memory && raw.ready(); }));
  const spinwire::Buffer buffer = w.client.allocate(8);
  const spinwire::RemoteRegion region = memory.region();
  ASSERT_TRUE(buffer && region);
  w.client = Engine();
  w.server = Engine();
  EXPECT_EQ(w.ended, 1);
  EXPECT_EQ(w.closed, 1);
  const Engine another = open_engine();  // reuses no slot

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
      {"expose", status_of(c.expose(buffer.slice(), Access::remote_read))},
      {"expose to the peer",
       status_of(c.expose(buffer.slice(), Access::remote_read, KeyScope::connection))},
      {"revoke", c.revoke(region)},
      {"token", status_of(c.token(region))},
      {"import_token", status_of(c.import_token(none))},
      {"request_memory", c.request_memory(64, {}, {})},
      {"lease", c.lease(buffer.slice(), {})},
      {"recall", c.recall({})},
      {"register_memory", status_of(c.register_memory({}, Access::local))},
      {"close", c.close()},
      {"set_handlers", c.set_handlers({})},
      {"query_state", status_of(c.query_state())},
      {"post_receive", raw.post_receive(buffer.slice())},
      {"send_raw", raw.send_raw(buffer.slice())},
      {"send_raw_with_imm", raw.send_raw_with_imm(buffer.slice(), 1)},
      {"close of a raw connection", raw.close()},
      {"call", w.session.call(1, none, done)},
      {"call with options", w.session.call(1, buffer.slice(), done, {})},
      {"cancel of a call", w.session.cancel(id)},
      {"close of a session", w.session.close()},
      {"reply", w.pending.reply(none)},
      {"reply of a slice", w.pending.reply(buffer.slice())},
      {"refuse", w.pending.refuse("no")},
      {"commit_reply", w.pending.commit_reply(1)},
      {"renew", memory.renew(10s)},
      {"give_back", memory.give_back()},
  };
  for (const Answer& answer : answers)
    EXPECT_EQ(answer.status, Status::not_connected) << answer.function;

  EXPECT_EQ(c.state(), ConnectionState::closed);
  EXPECT_FALSE(c.last_operation());
  EXPECT_EQ(c.max_message(), 0u);
  EXPECT_EQ(c.stats().messages_sent, 0u);
  EXPECT_EQ(c.snapshot().state, ConnectionState::closed);
  EXPECT_EQ(c.peer(), "");
  EXPECT_EQ(w.session.state(), SessionState::closed);
  EXPECT_EQ(w.session.max_call() + w.session.max_inline_call(), 0u);
  EXPECT_EQ(w.session.last_call().number, 0u);
  w.session.prefetch();
  EXPECT_EQ(w.pending.max_reply(), 0u);
  EXPECT_TRUE(w.pending.reserve_reply(1).empty());
  EXPECT_FALSE(memory);
  EXPECT_EQ(memory.time_left(), 0s);
  EXPECT_FALSE(memory.detach());
  memory.release();
  EXPECT_EQ(w.listener.address(), "");
  EXPECT_TRUE(buffer.unique());
}

TEST(RpcHandles, ExceptionsEndAtTheCallback) {
  World w;
  const auto done = [&w](Reply& r) {
    w.outcome = r.status();
    ++w.ended;
  };
  ASSERT_EQ(w.session.call(2, std::span<const std::byte>(), done), Status::ok);
  ASSERT_TRUE(w.until([&] { return w.ended == 1; }));
  EXPECT_EQ(w.outcome, Status::refused);
  spinwire::OperationId id;
  const std::byte one[1] = {};
  ASSERT_EQ(w.connection.send_copy(one, {}, spinwire::Post::defer, &id), Status::ok);
  EXPECT_TRUE(id == w.connection.last_operation());
  EXPECT_TRUE(w.until([&] { return w.closed == 1; })) << "its server closes it";
}

TEST(RpcHandles, AnExceptionClosesOnlyWhatTheCallbackNames) {
  World w;
  bool ran = false;
  const auto reply = [&ran](Reply&) {
    ran = true;
    throw std::runtime_error("a reply cannot be used");
  };
  ASSERT_EQ(w.session.call(3, std::span<const std::byte>(), reply), Status::ok);
  ASSERT_TRUE(w.until([&] { return ran; }));
  EXPECT_TRUE(w.session.ready()) << "a Reply names no session";
  EXPECT_TRUE(w.connection.ready());
  spinwire::SessionOptions options;
  options.on_ready = [](Session) { throw std::runtime_error("a session is not wanted"); };
  const Session second = *w.client.open_session(w.listener.address(), options);
  EXPECT_TRUE(w.until([&] { return second.state() == SessionState::closed; }));
  EXPECT_TRUE(w.session.ready());
}

TEST(RpcHandles, MemoryOfAnotherEngineIsRefused) {
  World w;
  const spinwire::Buffer theirs = w.server.allocate(64);
  spinwire::Buffer ours = w.client.allocate(64);
  ASSERT_TRUE(theirs && ours);
  const spinwire::RemoteRegion region =
      w.server.expose(theirs.slice(), spinwire::Access::remote_all)
          .value_or(spinwire::RemoteRegion{});
  EXPECT_EQ(w.connection.send(theirs), Status::invalid_argument);
  EXPECT_EQ(w.connection.write(theirs, region), Status::invalid_argument);
  EXPECT_EQ(w.connection.read(theirs, region), Status::invalid_argument);
  EXPECT_EQ(w.session.call(1, theirs.slice(), [](Reply&) {}), Status::invalid_argument);
  const auto read = spinwire::Access::remote_read;
  EXPECT_EQ(status_of(w.client.expose(theirs.slice(), read)), Status::invalid_argument);
  EXPECT_EQ(status_of(w.connection.expose(theirs.slice(), read)), Status::invalid_argument);
  EXPECT_EQ(status_of(w.connection.expose(theirs.slice(), read, spinwire::KeyScope::connection)),
            Status::invalid_argument);
  EXPECT_EQ(w.connection.write(ours, region), Status::ok);
  EXPECT_TRUE(w.until([&] { return ours.unique(); }));
  EXPECT_EQ(w.server.revoke(region), Status::ok);
}

}  // namespace
}  // namespace handles_test
