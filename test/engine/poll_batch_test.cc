// queues.poll_batch: how many completions the device is asked for at once.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "base/internals.h"
#include "engine/engine_core.h"
#include "engine/harness.h"

namespace poll_batch_test {
namespace {

using namespace engine_test;  // the names of a test namespace

/// Records the polls of a device's completion queues.
struct Polls {
  explicit Polls(const Engine& engine)
      : operations(&spinwire::detail::core_of(engine)->cq->context->ops) {
    asked.clear();
    most = 0;
    poll_cq = operations->poll_cq;
    operations->poll_cq = [](ibv_cq* cq, int entries, ibv_wc* completions) {
      asked.insert(entries);
      const int found = poll_cq(cq, entries, completions);
      most = std::max(most, found);
      return found;
    };
  }
  Polls(const Polls&) = delete;
  Polls& operator=(const Polls&) = delete;
  ~Polls() { operations->poll_cq = poll_cq; }

  ibv_context_ops* operations;
  static inline int (*poll_cq)(ibv_cq*, int, ibv_wc*);
  static inline std::set<int> asked;
  static inline int most;
};

TEST(EnginePollBatch, IsWhatTheDeviceIsAskedFor) {
  for (const std::uint32_t batch : {1u, 5u, 64u}) {
    Config config = without_direct_messages();
    config.queues.poll_batch = batch;
    Pair p(config);
    // Gathers credit for the messages below.
    ASSERT_TRUE(p.until([&] {
      (void)p.client.tally.run([&](auto done) {
        return p.ends.client.send_copy(std::as_bytes(std::span("x", 1)), done);
      });
      return p.ends.client.stats().send_credits >= 12;
    }));
    ASSERT_TRUE(p.until([&] { return p.client.tally.idle(); }));
    const std::uint64_t before = p.server.messages;
    {
      const Polls polls(p.server.engine);
      for (int i = 0; i < 12; ++i) {
        ASSERT_EQ(p.ends.client.send_copy(std::as_bytes(std::span("x", 1)), {}, Post::defer),
                  Status::ok);
      }
      EXPECT_EQ(p.client.engine.flush(), Status::ok);
      ASSERT_TRUE(p.until([&] { return p.server.messages == before + 12; }));
      EXPECT_EQ(Polls::asked, std::set<int>{static_cast<int>(batch)});
      EXPECT_GE(Polls::most, 1);
      if (on_softverbs()) {
        EXPECT_EQ(Polls::most, std::min(static_cast<int>(batch), 12));
      }
    }
    p.finish();
  }
}

}  // namespace
}  // namespace poll_batch_test
