// Settings that ask for more memory than there is end in an error that says so, before the memory
// is touched: the kernel would end a process otherwise.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <functional>
#include <string>

#include "base/available_memory.h"
#include "engine/harness.h"
#include "softverbs/lane/segment.h"

namespace absurd_sizes_test {
namespace {

using namespace engine_test;  // the names of a test namespace

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kTiB = std::uint64_t{1} << 40;

TEST(EngineAbsurdSizes, OfPoolsAreRefused) {
  if (spinwire::base::available_memory().bytes >= kTiB)
    GTEST_SKIP() << "this machine has a TiB to give";
  struct Case {
    const char* pool;
    std::uint64_t Config::Memory::*bytes;
  };
  const Case cases[] = {
      {"send", &Config::Memory::send_bytes},
      {"receive", &Config::Memory::receive_bytes},
      {"lease", &Config::Memory::lease_bytes},
      {"rendezvous", &Config::Memory::rendezvous_bytes},
  };
  for (const Case& test : cases) {
    for (const HugepagePolicy policy :
         {HugepagePolicy::off, HugepagePolicy::prefer, HugepagePolicy::require}) {
      SCOPED_TRACE(test.pool);
      Config config = small_config();
      config.memory.hugepages = policy;
      config.memory.*test.bytes = kTiB;
      const auto engine = Engine::open(config);
      ASSERT_FALSE(engine);
      const Error& e = engine.error();
      EXPECT_EQ(e.status, Status::no_memory) << e.message();
      EXPECT_NE(e.asked.find("of memory"), std::string::npos) << e.asked;
      EXPECT_FALSE(e.found.empty());
      EXPECT_FALSE(e.remedy.empty());
    }
  }
  Node still_opens;
}

/// Address space that this process uses, in bytes.
std::uint64_t address_space() {
  std::FILE* const file = std::fopen("/proc/self/statm", "re");
  unsigned long long pages = 0;
  EXPECT_EQ(std::fscanf(file, "%llu", &pages), 1);
  std::fclose(file);
  return pages * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}
void allow_more(std::uint64_t bytes) {
  rlimit most{};
  EXPECT_EQ(getrlimit(RLIMIT_AS, &most), 0);
  most.rlim_cur = address_space() + bytes;
  EXPECT_EQ(setrlimit(RLIMIT_AS, &most), 0);
}

/// Runs `body` in a child process that may take only `bytes` more of address space.
void in_a_small_process(std::uint64_t bytes, const std::function<void()>& body) {
#if SPINWIRE_ASAN || SPINWIRE_TSAN
  GTEST_SKIP() << "a sanitizer needs address space of its own";
#endif
  Child child([&](int, int) {
    allow_more(bytes);
    body();
    return testing::Test::HasFailure() ? 1 : 0;
  });
  EXPECT_EQ(child.wait(), 0);
}

void expect_refused(const Error& e, const char* asked) {
  EXPECT_EQ(e.status, Status::no_memory) << e.message();
  EXPECT_NE(e.asked.find(asked), std::string::npos) << e.message();
  EXPECT_NE(e.found.find("of address space (ulimit -v)"), std::string::npos) << e.message();
  EXPECT_NE(e.remedy.find("lower"), std::string::npos) << e.message();
}
void expect_refused(const Config& config, const char* asked) {
  const auto engine = Engine::open(config);
  ASSERT_FALSE(engine);
  expect_refused(engine.error(), asked);
}

// An engine on softverbs maps a segment and private tables, few pages of which exist.
constexpr std::uint64_t kSegment = sizeof(spinwire::softverbs::Segment) + 64 * kMiB;

TEST(EngineAbsurdSizes, InASmallProcessAreRefusedByName) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "it knows what its device maps";
  in_a_small_process(kSegment + 100 * kMiB, [] { Node fits; });
  in_a_small_process(kSegment + 100 * kMiB, [] {
    Config config = small_config();
    config.memory.send_bytes = 128 * kMiB;
    expect_refused(config, "of memory for the pools");
  });
  in_a_small_process(kSegment + 100 * kMiB, [] {
    Config config = small_config();
    config.queues.completion_depth = 1u << 22;
    expect_refused(config, "a completion queue of 4194304 entries");
  });
  in_a_small_process(100 * kMiB, [] {
    Config config = small_config();
    config.queues.operations = 1u << 20;
    config.queues.completion_depth = 1u << 21;
    expect_refused(config, "for a table of records");
    config = small_config();
    config.connections.maximum = 65536;
    config.queues.completion_depth = 1u << 22;
    expect_refused(config, "for a table of records");
  });
}

TEST(EngineAbsurdSizes, OfSessionsAreRefusedWhenTheyAreFirstNeeded) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "it knows what its device maps";
  // The engine needs room for its tables, however much of the heap other tests have left free.
  in_a_small_process(kSegment + 400 * kMiB, [] {
    Config config = small_config();
    config.memory.receive_bytes = 8u << 20;
    config.queues.completion_depth = 8192;
    config.rpc.sessions = (1u << 20) - 1;
    Node node(config);
    allow_more(8 * kMiB);
    const auto served = node.engine.serve(1, [](spinwire::Request&) {});
    ASSERT_FALSE(served);
    expect_refused(served.error(), "for a table of records");
    const auto session = node.engine.open_session("127.0.0.1:1", {});
    ASSERT_FALSE(session);
    expect_refused(session.error(), "for a table of records");
    node.expect_clean();
    allow_more(512 * kMiB);
    EXPECT_TRUE(node.engine.serve(1, [](spinwire::Request&) {})) << "the engine goes on";
  });
}

}  // namespace
}  // namespace absurd_sizes_test
