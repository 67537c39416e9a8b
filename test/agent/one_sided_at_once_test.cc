// READs and WRITEs that the device runs at once: when their callbacks run, and in which order.
#include <gtest/gtest.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "base/internals.h"
#include "engine/engine_core.h"
#include "engine/harness.h"

namespace one_sided_at_once_test {
namespace {

using namespace engine_test;  // the names of a test namespace

/// A client whose numbered operations write to a buffer of the server.
struct Nodes {
  Node server, client;
  Ends ends;
  Buffer from, to;
  RemoteRegion target;
  std::vector<int> ended;
  std::vector<Status> statuses;
  std::deque<std::function<void()>> thens;

  Nodes() {
    server.listen();
    ends = connect(client, server);
    from = client.filled(64, 1);
    to = server.buffer(64, Pool::lease);
    auto exposed = server.engine.expose(to.slice(), Access::remote_all);
    EXPECT_TRUE(exposed);
    target = *exposed;
  }
  CompletionCallback note(int number, std::function<void()> then = {}) {
    thens.push_back(std::move(then));
    return [this, number, then = &thens.back()](const Completion& c) {
      ended.push_back(number);
      statuses.push_back(c.status);
      if (*then) (*then)();
    };
  }
  void write(int number, Post post = Post::automatic, std::function<void()> then = {}) {
    EXPECT_EQ(ends.client.write(from.slice(), target, note(number, std::move(then)), post),
              Status::ok);
  }
  [[nodiscard]] bool is_written() const { return Node::holds(to.bytes(), 1); }
  void audit() {
    const auto audit = client.engine.audit();
    EXPECT_TRUE(audit) << audit.error().message();
  }
  template <typename Done>
  bool until(Done&& done) {
    return engine_test::until({&client, &server}, std::forward<Done>(done));
  }
};

class EngineOneSidedAtOnce : public testing::Test {
 protected:
  void SetUp() override {
    if (!sends_directly()) GTEST_SKIP() << kSoftverbsOnly << "READs and WRITEs at once";
  }
};

TEST_F(EngineOneSidedAtOnce, CallBackInTheNextPollWhichCountsThem) {
  Nodes t;
  t.write(1);
  EXPECT_TRUE(t.is_written());
  EXPECT_EQ(t.ended, std::vector<int>{}) << "never inside of write()";
  t.audit();
  t.write(2, Post::defer);
  t.write(3, Post::defer);
  EXPECT_EQ(t.client.engine.flush(), Status::ok);
  t.audit();
  EXPECT_EQ(t.client.poll(), 3);
  EXPECT_EQ(t.ended, (std::vector<int>{1, 2, 3}));
  t.write(4, Post::defer);
  EXPECT_EQ(t.ends.client.flush(), Status::ok);
  EXPECT_EQ(t.client.poll(), 1);
  t.write(5, Post::defer);  // the poll posts it
  ASSERT_TRUE(t.until([&] { return t.ended.size() == 5; }));
  EXPECT_EQ(t.ended, (std::vector<int>{1, 2, 3, 4, 5}));
  EXPECT_EQ(t.client.engine.stats().operations, 0u);
}

TEST_F(EngineOneSidedAtOnce, APollCountsThoseThatEndInItsControlStep) {
  Nodes t;
  // A timer's callback runs in the control step, which posts what it defers.
  ASSERT_TRUE(t.client.engine.after(0ns, [&] { t.write(1); }));
  int events = 0;
  ASSERT_TRUE(engine_test::until({}, [&] {
    events = t.client.engine.poll();
    return !t.ended.empty();
  }));
  EXPECT_GE(events, 2) << "the timer, and the WRITE";
  t.audit();
}

TEST_F(EngineOneSidedAtOnce, TheEngineDoesNotSleepBeforeTheirCallbacks) {
  Nodes t;
  for (int i = 0; i < 1000; ++i) (void)t.client.poll();
  t.write(1);
  ASSERT_EQ(t.client.engine.wait(60s * slowness()), Status::ok);
  ASSERT_TRUE(engine_test::until({&t.client}, [&] { return t.ended.size() == 1; }));
}

TEST_F(EngineOneSidedAtOnce, ThoseOfACallbackDoNotKeepAPollBusy) {
  Nodes t;
  int next = 1;
  std::function<void()> again = [&] {
    if (++next <= 9) t.write(next, Post::now, again);
  };
  t.write(1, Post::now, again);
  for (std::size_t before = 0; before != 9; before = t.ended.size()) {
    (void)t.client.poll();
    EXPECT_GT(t.ended.size(), before);
    EXPECT_LE(t.ended.size(), before + 2) << "the poll, and its control step";
    t.audit();
  }
}

TEST_F(EngineOneSidedAtOnce, EndInOrderWithOperationsThatHaveCompletions) {
  Nodes t;
  int next = 0;
  for (int round = 0; round < 50; ++round) {
    t.write(++next, Post::defer);
    t.write(++next, Post::defer);
    ASSERT_EQ(t.ends.client.fetch_add(t.target.slice(0, 8), 0, t.note(++next), Post::defer),
              Status::ok);
    t.write(++next, round % 2 == 0 ? Post::now : Post::defer);
    ASSERT_EQ(t.ends.client.read(t.from.slice(), t.target, t.note(++next)), Status::ok);
    if (round % 3 == 0) (void)t.client.poll();
    t.audit();
    ASSERT_TRUE(t.until([&] { return t.client.engine.stats().operations < 20; }));
  }
  ASSERT_TRUE(t.until([&] { return t.ended.size() == static_cast<std::size_t>(next); }));
  for (int i = 0; i < next; ++i) {
    ASSERT_EQ(t.ended[static_cast<std::size_t>(i)], i + 1);
    ASSERT_EQ(t.statuses[static_cast<std::size_t>(i)], Status::ok);
  }
}

TEST_F(EngineOneSidedAtOnce, OneThatFailsEndsTheConnectionAfterThoseBefore) {
  Nodes t;
  t.write(1, Post::defer);
  const RemoteRegion sound = t.target;
  ++t.target.rkey;
  t.write(2, Post::defer);
  t.target = sound;
  t.write(3, Post::defer);
  ASSERT_TRUE(t.until([&] { return t.client.closed.size() == 1; }));
  EXPECT_EQ(t.ended, (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(t.statuses, (std::vector<Status>{Status::ok, Status::remote_access, Status::flushed}));
}

TEST_F(EngineOneSidedAtOnce, ACancelledOneIsReportedAsCancelled) {
  Nodes t;
  t.write(1);
  EXPECT_EQ(t.ends.client.cancel(t.ends.client.last_operation()), Status::ok);
  t.write(2);
  t.audit();
  ASSERT_TRUE(t.until([&] { return t.ended.size() == 2; }));
  for (std::size_t i = 0; i < 2; ++i)
    EXPECT_EQ(t.statuses[i], t.ended[i] == 1 ? Status::cancelled : Status::ok);
  EXPECT_TRUE(t.until([&] { return t.client.engine.stats().operations == 0; }));
  t.audit();
}

TEST_F(EngineOneSidedAtOnce, EndBeforeTheirConnectionOrEngineDoes) {
  {
    Nodes t;
    t.write(1);
    EXPECT_EQ(t.ends.client.close(), Status::ok);
    ASSERT_TRUE(t.until([&] { return t.client.closed.size() == 1; }));
    EXPECT_EQ(t.statuses, std::vector<Status>{Status::ok});
  }
  {
    Nodes t;
    t.write(1);
    t.client.engine = Engine();
    EXPECT_EQ(t.statuses, std::vector<Status>{Status::ok});
  }
  {
    Nodes t;  // the connection is closed by the first callback
    t.write(1, Post::defer, [&] { EXPECT_EQ(t.ends.client.close(), Status::ok); });
    t.write(2, Post::defer);
    ASSERT_TRUE(t.until([&] { return t.client.closed.size() == 1; }));
    EXPECT_EQ(t.statuses, (std::vector<Status>{Status::ok, Status::ok}));
  }
  {
    Nodes t;  // and the engine
    t.write(1, Post::defer, [&] { t.client.engine = Engine(); });
    t.write(2, Post::defer);
    while (t.client.engine) (void)t.client.engine.poll();
    EXPECT_EQ(t.statuses, (std::vector<Status>{Status::ok, Status::ok}));
  }
}

TEST_F(EngineOneSidedAtOnce, ALongMessageIsReadPollByPoll) {
  Config config = small_config();
  config.engine.control = ControlMode::manual;
  config.memory.rendezvous_bytes = 8u << 20;
  config.connections.max_message_bytes = 2u << 20;
  Node server(config), client(config);
  server.listen();
  Ends ends = connect(client, server);
  const Buffer message = client.filled(2u << 20, 3);
  ASSERT_EQ(client.tally.run([&](auto done) { return ends.client.send(message.slice(), done); }),
            Status::ok);
  // Without a control step, which must not be needed.
  for (int i = 0; i < 50; ++i) {
    (void)client.engine.poll();
    (void)server.engine.poll();
  }
  EXPECT_EQ(server.messages, 1u);
  ASSERT_TRUE(until({&client, &server}, [&] { return client.tally.completed == 1; }));
}

}  // namespace
}  // namespace one_sided_at_once_test
