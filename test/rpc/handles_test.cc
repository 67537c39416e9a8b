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

TEST(RpcHandles, AnswerNotConnectedOnceTheirEngineIsGone) {
  World w;
  CallId id;
  ASSERT_EQ(w.session.call(
                1, std::span<const std::byte>(), [&w](Reply&) { ++w.ended; }, {}, &id),
            Status::ok);
  EXPECT_EQ(id.number, w.session.last_call().number);
  ASSERT_TRUE(w.until([&] { return w.pending.max_reply() != 0; }));
  {
    const Engine moved = std::move(w.client);
    EXPECT_EQ(w.client.poll(), -static_cast<int>(Status::not_connected));
    EXPECT_EQ(w.client.flush(), Status::not_connected);
    EXPECT_FALSE(w.client.connect("127.0.0.1:1", {}));
    EXPECT_TRUE(w.connection.ready()) << "its engine has only moved";
  }
  w.server = Engine();
  EXPECT_EQ(w.ended, 1);
  EXPECT_EQ(w.closed, 1);
  const Engine another = open_engine();  // none of its slots are the old ones'
  EXPECT_EQ(w.connection.state(), ConnectionState::closed);
  EXPECT_EQ(w.connection.send_copy({}), Status::not_connected);
  EXPECT_EQ(w.connection.close(), Status::not_connected);
  EXPECT_EQ(w.connection.max_message(), 0u);
  EXPECT_EQ(w.connection.endpoint().error().status, Status::not_connected);
  EXPECT_EQ(w.session.state(), SessionState::closed);
  EXPECT_EQ(w.session.call(1, std::span<const std::byte>(), [](Reply&) {}), Status::not_connected);
  EXPECT_EQ(w.session.cancel(id), Status::not_connected);
  EXPECT_EQ(w.session.close(), Status::not_connected);
  EXPECT_EQ(w.pending.reply(std::span<const std::byte>()), Status::not_connected);
  EXPECT_EQ(w.pending.commit_reply(1), Status::not_connected);
  EXPECT_TRUE(w.pending.reserve_reply(1).empty());
  EXPECT_EQ(w.pending.max_reply(), 0u);
  EXPECT_EQ(w.listener.address(), "");
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
  EXPECT_EQ(w.connection.write(ours, region), Status::ok);
  EXPECT_TRUE(w.until([&] { return ours.unique(); }));
  EXPECT_EQ(w.server.revoke(region), Status::ok);
}

}  // namespace
}  // namespace handles_test
