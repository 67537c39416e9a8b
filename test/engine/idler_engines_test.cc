// Several engines that sleep together: the callbacks of one engine use another that is about to
// sleep.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <vector>

#include "base/internals.h"
#include "engine/engine_core.h"
#include "engine/sleeping.h"
#include "spinwire/idler.h"

namespace idler_engines_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::Idler;
using spinwire::IdlerOptions;
using spinwire::Nanoseconds;

/// An engine with a connection, and what it may write at the peer.
struct Writer {
  Writer() {
    server.listen();
    ConnectOptions options;
    options.handlers = client.handlers();
    options.handlers.on_writable = [this](Connection) {
      if (on_writable) on_writable();
    };
    connection = client.engine.connect(server.listener.address(), options).value();
    EXPECT_TRUE(
        until({&client, &server}, [&] { return connection.ready() && server.ready.size() == 1; }));
    from = client.filled(kBytes, 1);
    to = server.buffer(kBytes, Pool::lease);
    target = server.engine.expose(to.slice(), Access::remote_all).value();
    for (int i = 0; i < 1000; ++i) (void)(client.poll() + server.poll());
  }
  [[nodiscard]] spinwire::detail::EngineCore& core() const {
    return *spinwire::detail::core_of(client.engine);
  }
  /// Polls until the engine may sleep for long.
  [[nodiscard]] bool armed() {
    return until({&client, &server},
                 [&] { return client.engine.arm() && client.engine.next_deadline() > 5ms; });
  }
  void write(Post post = Post::automatic) {
    EXPECT_EQ(connection.write(
                  from.slice(), target,
                  [this](const Completion& c) { ended += c.status == Status::ok; }, post),
              Status::ok);
  }
  /// Has on_writable run in the next poll.
  void become_writable() {
    constexpr std::array<std::byte, 100> kNotice{};
    for (const std::size_t size : {std::size_t{1} << 20, kNotice.size()}) {
      while (Buffer b = client.engine.allocate(size)) taken.push_back(std::move(b));
    }
    EXPECT_EQ(connection.write_and_send(from.slice(), target, kNotice), Status::no_buffer);
    taken.clear();
  }

  static constexpr std::size_t kBytes = 4096;
  Node server{lenient_config()}, client{lenient_config()};
  std::function<void()> on_writable;
  std::vector<Buffer> taken;
  Connection connection;
  Buffer from, to;
  RemoteRegion target;
  int ended = 0;
};

TEST(IdlersOfEngines, AnEngineThatWasUsedDoesNotStayArmed) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "an adapter's completions wake";
  Writer t;
  EXPECT_FALSE(t.core().stays_armed()) << "it was not armed";
  const std::vector<std::function<void()>> uses{
      [&] { t.write(); },
      [&] { t.write(Post::defer); },
      [&] { t.become_writable(); },
      [&] { EXPECT_EQ(t.connection.close(), Status::ok); },
  };
  for (std::size_t i = 0; i < uses.size(); ++i) {
    SCOPED_TRACE(i);
    ASSERT_TRUE(t.armed());
    EXPECT_TRUE(t.core().stays_armed());
    EXPECT_TRUE(t.core().stays_armed());
    uses[i]();
    EXPECT_FALSE(t.core().stays_armed());
  }
}

TEST(IdlersOfEngines, AnEngineDoesNotSleepBeforeACallbackThatIsDue) {
  if (!sends_directly()) GTEST_SKIP() << kSoftverbsOnly << "READs and WRITEs at once";
  Writer t;
  t.on_writable = [&] { t.write(); };
  for (int i = 1; i <= 100; ++i) {
    t.become_writable();
    ASSERT_FALSE(t.client.engine.arm());
    ASSERT_TRUE(until({&t.client}, [&] { return t.ended == i; }));
  }
}

TEST(IdlersOfEngines, NoneSleepsWhenAnothersCallbackHasUsedIt) {
  Writer first, second;
  Engine* const engines[] = {&first.client.engine, &second.client.engine};
  IdlerOptions options;
  options.pauses = 0;
  options.timeout = 1h;
  bool is_used = false;
  // The callback runs in every poll until it finds the first engine armed, for the second's arm().
  second.on_writable = [&] {
    if (!first.core().schedule.is_armed) return second.become_writable();
    first.write();
    is_used = true;
  };
  Idler idler(options);
  EXPECT_LT(shortest_of(10,
                        [&] {
                          ASSERT_TRUE(first.armed());
                          ASSERT_TRUE(second.armed());
                          is_used = false;
                          const int before = first.ended;
                          second.become_writable();
                          while (first.ended == before) {
                            ASSERT_EQ(idler.turn(engines), Status::ok);
                          }
                          EXPECT_TRUE(is_used);
                        }),
            100ms);
}

}  // namespace
}  // namespace idler_engines_test
