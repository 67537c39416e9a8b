// ConnectionHandlers::on_writable: an operation that found no room is told when there is room.
#include <gtest/gtest.h>

#include <vector>

#include "engine/harness.h"

namespace writable_test {
namespace {

using namespace engine_test;  // the names of a test namespace

/// A client whose connection has on_writable, and a server that polls when the test lets it.
struct Writing {
  explicit Writing(const Config& c = small_config()) : server(c), client(c) {
    server.listen();
    ConnectOptions options;
    options.handlers = client.handlers();
    options.handlers.on_writable = [this](Connection w) {
      ++writable;
      if (on_writable) on_writable(w);
    };
    connection = client.engine.connect(server.listener.address(), options).value();
    EXPECT_TRUE(
        until({&client, &server}, [&] { return connection.ready() && server.ready.size() == 1; }));
  }
  Status send() {
    return client.tally.run([&](auto done) {
      return connection.send_copy(std::as_bytes(std::span("hello", 5)), done);
    });
  }
  /// Sends until there is no room. Returns the last answer.
  Status fill() {
    Status status = Status::ok;
    while (status == Status::ok) status = send();
    return status;
  }
  void finish() {
    EXPECT_EQ(connection.close(), Status::ok);
    EXPECT_TRUE(until({&client, &server},
                      [&] { return client.closed.size() == 1 && server.closed.size() == 1; }));
    client.expect_clean();
    server.expect_clean();
  }

  std::function<void(Connection)> on_writable;
  int writable = 0;
  Node server, client;
  Connection connection;
};

TEST(EngineWritable, ANewConnectionMaySendOneMessageBeforeThePeerPolls) {
  Writing t;
  EXPECT_EQ(t.connection.stats().send_credits, 1u);
  EXPECT_EQ(t.send(), Status::ok);
  EXPECT_EQ(t.send(), Status::would_block);
  EXPECT_EQ(t.connection.snapshot().blocked_by, spinwire::Blocker::credit);
  ASSERT_TRUE(until({&t.client, &t.server}, [&] { return t.connection.stats().send_credits > 1; }));
  EXPECT_EQ(t.send(), Status::ok);
  EXPECT_EQ(t.send(), Status::ok);
  ASSERT_TRUE(until({&t.client, &t.server}, [&] { return t.client.tally.idle(); }));
  t.finish();
}

TEST(EngineWritable, RunsOnceWhenCreditComes) {
  Writing t;
  ASSERT_EQ(t.fill(), Status::would_block);
  EXPECT_EQ(t.send(), Status::would_block);
  EXPECT_EQ(t.writable, 0);
  if (on_softverbs()) {  // an adapter completes sends without the peer's polls
    for (int i = 0; i < 1000; ++i) (void)t.client.poll();
    EXPECT_EQ(t.writable, 0);
  }
  ASSERT_TRUE(until({&t.client, &t.server}, [&] { return t.writable == 1; }));
  EXPECT_EQ(t.send(), Status::ok);
  ASSERT_TRUE(until({&t.client, &t.server}, [&] { return t.client.tally.idle(); }));
  for (int i = 0; i < 100; ++i) (void)(t.client.poll() + t.server.poll());
  EXPECT_EQ(t.writable, 1);
  ASSERT_EQ(t.fill(), Status::would_block);
  ASSERT_TRUE(until({&t.client, &t.server}, [&] { return t.writable == 2; }));
  t.finish();
}

TEST(EngineWritable, ASenderNeedsNoQueueOfItsOwn) {
  Writing t;
  std::uint32_t sent = 0;
  const auto go_on = [&] {
    while (sent < 20'000) {
      if (const Status status = t.send(); status != Status::ok) {
        EXPECT_EQ(status, Status::would_block);
        return;
      }
      ++sent;
    }
  };
  t.on_writable = [&](Connection) { go_on(); };
  go_on();
  ASSERT_TRUE(until({&t.client, &t.server}, [&] { return t.server.messages == 20'000; }));
  ASSERT_TRUE(until({&t.client, &t.server}, [&] { return t.client.tally.idle(); }));
  EXPECT_GT(t.writable, 10);
  t.finish();
}

TEST(EngineWritable, WritesWaitForTheSendQueueAlone) {
  Writing t;
  const Buffer memory = t.server.buffer(64, Pool::lease);
  const auto region = t.server.engine.expose(memory, Access::remote_write).value();
  const Buffer data = t.client.filled(64, 1);
  Status status = Status::ok;
  while (status == Status::ok) {
    status = t.client.tally.run(
        [&](auto done) { return t.connection.write(data, region, done, Post::defer); });
  }
  EXPECT_EQ(status, Status::would_block);
  EXPECT_EQ(t.writable, 0);
  ASSERT_TRUE(until({&t.client, &t.server}, [&] { return t.writable == 1; }));
  ASSERT_TRUE(until({&t.client, &t.server}, [&] { return t.client.tally.idle(); }));
  ASSERT_TRUE(until({&t.server}, [&] { return t.server.engine.revoke(region) == Status::ok; }));
}

TEST(EngineWritable, ACopyWaitsForABlock) {
  Writing t(without_direct_messages());
  std::vector<Buffer> taken;
  for (const std::size_t size : {std::size_t{1} << 20, std::size_t{4096}, std::size_t{1}}) {
    for (;;) {
      Buffer b = t.client.engine.allocate(size);
      if (!b) break;
      taken.push_back(std::move(b));
    }
  }
  ASSERT_EQ(t.send(), Status::no_buffer);
  for (int i = 0; i < 100; ++i) (void)(t.client.poll() + t.server.poll());
  EXPECT_EQ(t.writable, 0);
  taken.clear();
  ASSERT_TRUE(until({&t.client, &t.server}, [&] { return t.writable == 1; }));
  EXPECT_EQ(t.send(), Status::ok);
  ASSERT_TRUE(until({&t.client, &t.server}, [&] { return t.client.tally.idle(); }));
  t.finish();
}

/// Asks for memory until too many control messages wait. `take` gets what the peer grants.
Status request_all(Writing& t, const spinwire::LeaseCallback& take) {
  Status status = Status::ok;
  while (status == Status::ok) status = t.connection.request_memory(64, {}, take);
  return status;
}

TEST(EngineWritable, CallsAboutLeasesWaitForControlMessages) {
  std::vector<spinwire::RemoteMemory> leases;
  Writing t;
  const auto take = [&leases](spinwire::LeaseReply& reply) {
    if (reply.status == Status::ok) leases.push_back(std::move(reply.memory));
  };
  ASSERT_EQ(t.connection.request_memory(64, {}, take), Status::ok);
  ASSERT_TRUE(until({&t.client, &t.server}, [&] { return leases.size() == 1; }));
  ASSERT_EQ(request_all(t, take), Status::would_block);
  Buffer ours = t.client.buffer(64, Pool::lease);
  EXPECT_EQ(t.connection.lease(ours.slice(), {}), Status::would_block);
  EXPECT_EQ(t.writable, 0);
  ASSERT_TRUE(until({&t.client, &t.server}, [&] { return t.writable == 1; }));
  EXPECT_EQ(t.connection.lease(ours.slice(), {}), Status::ok);
  ASSERT_EQ(request_all(t, take), Status::would_block);
  ASSERT_TRUE(until({&t.client, &t.server}, [&] { return t.writable == 2; }));
  // A renewal and a return are refused for the same reason. The first refusal is forgotten.
  ASSERT_EQ(request_all(t, take), Status::would_block);
  ASSERT_TRUE(until({&t.client, &t.server}, [&] { return t.writable == 3; }));
  ASSERT_EQ(request_all(t, take), Status::would_block);
  EXPECT_EQ(leases.front().renew(std::chrono::seconds(2)), Status::would_block);
  EXPECT_EQ(leases.front().give_back(), Status::would_block);
  ASSERT_TRUE(until({&t.client, &t.server}, [&] { return t.writable == 4; }));
  EXPECT_EQ(leases.front().give_back(), Status::ok);
  leases.clear();
  ours = {};
  t.finish();
}

TEST(EngineWritable, AFullTableOfLeasesIsNoReasonToWait) {
  std::vector<spinwire::RemoteMemory> leases;
  Config config = small_config();
  config.leases.maximum = 1;
  Writing t(config);
  const auto take = [&leases](spinwire::LeaseReply& reply) {
    leases.push_back(std::move(reply.memory));
  };
  ASSERT_EQ(t.connection.request_memory(64, {}, take), Status::ok);
  ASSERT_TRUE(until({&t.client, &t.server}, [&] { return leases.size() == 1; }));
  EXPECT_EQ(t.connection.request_memory(64, {}, take), Status::would_block);
  for (int i = 0; i < 1000; ++i) (void)(t.client.poll() + t.server.poll());
  EXPECT_EQ(t.writable, 0);
  leases.clear();
  t.finish();
}

TEST(EngineWritable, AConnectionThatEndsFirstIsNotWritable) {
  Writing t;
  ASSERT_EQ(t.fill(), Status::would_block);
  EXPECT_EQ(t.connection.close(), Status::ok);
  ASSERT_TRUE(until({&t.client, &t.server},
                    [&] { return t.client.closed.size() == 1 && t.server.closed.size() == 1; }));
  EXPECT_EQ(t.writable, 0);
  t.client.expect_clean();
}

TEST(EngineWritable, AnEngineGoesWhileConnectionsWait) {
  Writing t;
  ASSERT_EQ(t.fill(), Status::would_block);
  t.client.engine = Engine();
  EXPECT_EQ(t.writable, 0);
}

TEST(EngineWritable, WaitingEnginesSleepBriefly) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "an adapter grants at once";
  Writing t;
  ASSERT_EQ(t.fill(), Status::would_block);
  for (int i = 0; i < 3; ++i) {
    (void)t.client.engine.wait(std::chrono::hours(1));  // does not return late
    (void)t.server.poll();
  }
  ASSERT_TRUE(until({&t.server}, [&] {
    (void)t.client.engine.wait(std::chrono::hours(1));
    return t.writable == 1;
  }));
}

}  // namespace
}  // namespace writable_test
