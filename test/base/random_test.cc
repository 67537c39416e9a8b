#include "base/random.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <set>

#include "forbidden_call.h"

namespace random_test {
namespace {

using spinwire::base::Random;

TEST(Random, SeedsDiffer) {
  std::set<std::uint64_t> seeds;
  for (int i = 0; i < 100; ++i) seeds.insert(spinwire::base::random_seed());
  EXPECT_EQ(seeds.size(), 100u);
}

TEST(Random, SecretsAreTheKernelsOrAnError) {
  const auto secret = spinwire::base::random_secret();
  ASSERT_TRUE(secret) << secret.error().message();
  EXPECT_NE(*secret, 0u);
  EXPECT_NE(*secret, *spinwire::base::random_secret());
  const pid_t child = fork();
  if (child == 0) {
    if (!forbid_call(SYS_getrandom, EPERM)) _exit(2);
    const auto none = spinwire::base::random_secret();
    std::array<std::byte, 32> room{};
    if (spinwire::base::random_bytes(room)) _exit(3);
    const bool refused = !none && none.error().status == spinwire::Status::system;
    // What is no secret goes on.
    const bool goes_on = spinwire::base::random_seed() != spinwire::base::random_seed();
    _exit(refused && goes_on ? 0 : 1);
  }
  int ended = 0;
  ASSERT_EQ(waitpid(child, &ended, 0), child);
  ASSERT_TRUE(WIFEXITED(ended));
  if (WEXITSTATUS(ended) == 2) GTEST_SKIP() << "this system has no filters of system calls";
  EXPECT_EQ(WEXITSTATUS(ended), 0);
}

TEST(Random, BytesAreAllRandom) {
  // Each byte of each place takes on more than one value; the two halves differ.
  std::array<std::byte, 35> first{}, next{};
  std::array<bool, 35> changes{};
  ASSERT_TRUE(spinwire::base::random_bytes(first));
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(spinwire::base::random_bytes(next));
    for (std::size_t at = 0; at < next.size(); ++at) changes[at] |= next[at] != first[at];
  }
  for (std::size_t at = 0; at < changes.size(); ++at) EXPECT_TRUE(changes[at]) << at;
  std::array<std::array<std::byte, 35>, 2> seeded{};
  for (auto& bytes : seeded) {
    const spinwire::base::SeedSource source(5);
    ASSERT_TRUE(spinwire::base::random_bytes(bytes));
  }
  EXPECT_EQ(seeded[0], seeded[1]);
  EXPECT_NE(seeded[0][34], std::byte{});
}

TEST(Random, ASourceOfSeedsReplacesTheKernels) {
  using spinwire::base::random_seed;
  using spinwire::base::SeedSource;
  std::array<std::uint64_t, 2> drawn{};
  for (std::uint64_t& each : drawn) {
    EXPECT_FALSE(SeedSource::there());
    const SeedSource source(5);
    EXPECT_TRUE(SeedSource::there());
    each = random_seed();
    EXPECT_NE(random_seed(), each);
  }
  EXPECT_EQ(drawn[0], drawn[1]);
  EXPECT_EQ(drawn[0], Random(5).next());
  EXPECT_NE(random_seed(), random_seed());
}

TEST(Random, SameSeedGivesSameSequence) {
  // Reference values of SplitMix64, so that recorded seeds stay valid.
  Random random(1234567);
  EXPECT_EQ(random.next(), 6457827717110365317u);
  EXPECT_EQ(random.next(), 3203168211198807973u);
  EXPECT_EQ(random.next(), 9817491932198370423u);
}

TEST(Random, BelowStaysBelowAndReachesEverything) {
  Random random(1);
  std::array<int, 7> seen{};
  for (int i = 0; i < 7000; ++i) {
    const std::uint64_t n = random.below(7);
    ASSERT_LT(n, 7u);
    ++seen[n];
  }
  for (const int count : seen) {
    EXPECT_GT(count, 800);
    EXPECT_LT(count, 1200);
  }
  EXPECT_EQ(random.below(0), 0u);
  EXPECT_EQ(random.below(1), 0u);
}

TEST(Random, ChanceIsInPartsOfAMillion) {
  Random random(2);
  int hits = 0;
  for (int i = 0; i < 100'000; ++i) hits += random.chance(250'000) ? 1 : 0;
  EXPECT_GT(hits, 24'000);
  EXPECT_LT(hits, 26'000);
  EXPECT_FALSE(random.chance(0));
  EXPECT_TRUE(random.chance(1'000'000));
}

TEST(Random, BitsAreBalanced) {
  Random random(3);
  int ones = 0;
  for (int i = 0; i < 10'000; ++i) ones += std::popcount(random.next());
  EXPECT_NEAR(ones, 320'000, 3'000);
}

}  // namespace
}  // namespace random_test
