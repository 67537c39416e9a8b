// An engine is destroyed while the thread of a peer in its own process is in the midst of a copy
// from or to its memory, and is kept off its processor.
#include "base/mapped_memory.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "own_process.h"
#include "rpc/bare_engine.h"
#include "softverbs/context_gid.h"
#include "softverbs/memory/access_tracking.h"
#include "verbs/providers.h"

namespace mapped_memory_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using namespace std::chrono_literals;
namespace sv = spinwire::softverbs;

/// Reads like the device: for our own code, free blocks are poisoned.
[[gnu::no_sanitize_address]] std::byte read_as_device(const volatile std::byte* at) { return *at; }

/// How often a thread of this process has gone to sleep.
std::uint64_t sleeps_of(pid_t thread) {
  return own_process::number_in("/proc/self/task/" + std::to_string(thread) + "/status",
                                "voluntary_ctxt_switches")
      .value();
}

class AttackOnMappedMemory : public testing::Test {
 protected:
  void SetUp() override {
    if (device_name() != "softverbs") GTEST_SKIP() << kSoftverbsOnly << "threads that copy";
    owner_ = std::make_unique<Bare>(rpc_config());
    peer_ = std::make_unique<Bare>(rpc_config());
    listener_ = owner_->core->listen("127.0.0.1:0", {}).value();
    connection_ = peer_->core->connect(listener_.address(), {}).value();
    ASSERT_TRUE(engine_test::until({}, [&] {
      (void)(owner_->core->poll() + peer_->core->poll());
      return connection_.ready();
    }));
  }
  [[nodiscard]] ibv_context* device() const { return owner_->core->context.device->context(); }
  /// Odd while the peer accesses the owner's memory.
  [[nodiscard]] std::atomic<std::uint64_t>& access_serial() const {
    const ibv_gid owner = sv::context_of(device()).gid;
    for (const auto& peer : sv::context_of(peer_->core->context.device->context()).peers) {
      if (sv::same_gid(peer->gid, owner)) return *peer->out.access_serial;
    }
    throw std::logic_error("the peer is not attached");
  }

  std::unique_ptr<Bare> owner_, peer_;
  Listener listener_;
  Connection connection_;
};

TEST_F(AttackOnMappedMemory, MemoryStaysUntilTheCopyHasEnded) {
  std::atomic<std::uint64_t>& word = access_serial();
  const volatile std::byte* const memory = owner_->core->context.arena->slab().data();
  // Between its looks at the word. Nothing else sleeps so often.
  constexpr std::uint64_t kSleeps = 20;
  const pid_t destroyer = ::gettid();
  const std::uint64_t before = sleeps_of(destroyer);
  std::atomic<bool> copied = false;
  std::atomic<bool> destroyed = false;
  word.fetch_add(1);
  std::thread copier([&] {
    while (!destroyed && sleeps_of(destroyer) < before + kSleeps) std::this_thread::yield();
    (void)read_as_device(memory);
    copied = true;
    word.fetch_add(1);
  });
  owner_.reset();
  EXPECT_TRUE(copied);
  destroyed = true;
  copier.join();
}

TEST_F(AttackOnMappedMemory, TheWaitIsBounded) {
  EXPECT_TRUE(sv::wait_for_local_accesses(device(), 1ms));
  access_serial().fetch_add(1);
  EXPECT_FALSE(sv::wait_for_local_accesses(device(), 1ms));
  access_serial().fetch_add(1);
  EXPECT_TRUE(sv::wait_for_local_accesses(device(), 1ms));
}

TEST_F(AttackOnMappedMemory, MemoryStaysForACopyThatTakesTooLong) {
  spinwire::verbs::Provider slow = spinwire::verbs::softverbs_provider();
  slow.wait_for_local_accesses = [](ibv_context*, spinwire::Nanoseconds) { return false; };
  auto engine = std::make_unique<Bare>(rpc_config(), nullptr, &slow);
  spinwire::memory::Arena* const arena = engine->core->context.arena.get();
  const std::span<const std::byte> slab = arena->slab();
  std::vector<std::string> told;
  spinwire::set_log(
      [&told](spinwire::LogLevel, std::string_view text) { told.emplace_back(text); });
  engine.reset();
  spinwire::set_log({});
  EXPECT_EQ(std::ranges::count_if(
                told, [](const std::string& text) { return text.find("copies") != text.npos; }),
            1);
  ASSERT_TRUE(spinwire::base::is_mapped(slab.data(), slab.size(), true));
  (void)read_as_device(&slab.front());
  (void)read_as_device(&slab.back());
  spinwire::memory::ArenaPtr(arena).reset();  // the copy has ended
}

TEST_F(AttackOnMappedMemory, AQueuePairThatTheyDelayGoesWithoutAnother) {
  const auto connected = [&] {
    int count = 0;
    sv::for_each_queue_pair(sv::context_of(device()), [&count](const sv::Qp& qp) {
      count += qp.qp_type == IBV_QPT_RC ? 1 : 0;
    });
    return count;
  };
  const auto until = [&](auto&& done) {
    return engine_test::until({}, [&] {
      (void)(owner_->core->poll() + peer_->core->poll());
      return done();
    });
  };
  ASSERT_EQ(connected(), 1);
  std::atomic<std::uint64_t>& word = access_serial();
  word.fetch_add(1);
  EXPECT_EQ(connection_.close(), Status::ok);
  ASSERT_TRUE(until([&] { return owner_->core->context.agents.size() == 0; }));
  EXPECT_EQ(connected(), 1);
  word.fetch_add(1);
  EXPECT_TRUE(until([&] { return connected() == 0; }));
}

}  // namespace
}  // namespace mapped_memory_test
