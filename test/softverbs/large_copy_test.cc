// Copies of many bytes: which go past the cache, and that they copy the right bytes.
#include "softverbs/memory/large_copy.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "base/random.h"
#include "softverbs/rc_link.h"

namespace softverbs_test::large_copy {
namespace {

using sv::LargeCopies;

constexpr std::size_t kMiB = 1u << 20;

std::vector<std::byte> random_bytes(std::size_t length) {
  spinwire::base::Random random(length);
  std::vector<std::byte> bytes(length);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.next() & 0xff);
  return bytes;
}

TEST(LargeCopy, CopiesEveryAlignmentAndLengthAndNothingBeside) {
  constexpr std::size_t kRoom = 1024;
  const std::vector<std::byte> from = random_bytes(kRoom);
  for (std::size_t length : {0u, 1u, 63u, 64u, 127u, 128u, 129u, 191u, 192u, 500u, 640u}) {
    for (std::size_t begin = 0; begin < 128; ++begin) {
      const std::size_t source = (7 * begin) % 64;
      std::vector<std::byte> to(kRoom, std::byte{0xee});
      std::vector<std::byte> expected = to;
      std::memcpy(expected.data() + begin, from.data() + source, length);
      sv::copy_past_cache(to.data() + begin, from.data() + source, length);
      ASSERT_EQ(to, expected) << length << " bytes to " << begin << " from " << source;
    }
  }
}

TEST(LargeCopy, CopiesRangesThatOverlap) {
  const std::vector<std::byte> before = random_bytes(4096);
  for (const std::size_t apart : {0u, 1u, 32u, 64u, 100u, 1000u}) {
    for (const bool forward : {false, true}) {
      std::vector<std::byte> bytes = before;
      std::vector<std::byte> expected = before;
      const std::size_t from = forward ? 0 : apart;
      const std::size_t to = forward ? apart : 0;
      std::memmove(expected.data() + to, expected.data() + from, 3000);
      sv::copy_past_cache(bytes.data() + to, bytes.data() + from, 3000);
      ASSERT_EQ(bytes, expected) << apart << " apart, forward: " << forward;
    }
  }
}

// A peer would otherwise have one poll copy as many of its longest messages as a lane holds.
TEST(SoftverbsTurn, EndsWithAMessageThatTakesLongToCopy) {
  for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND}) {
    constexpr std::uint32_t kMessages = 16;
    Link link;
    link.batch = 64;
    link.control();
    fill(link.a.bytes(0, kMiB), 5);
    for (std::uint32_t i = 0; i < kMessages; ++i) {
      ASSERT_EQ(link.b.post_recv(i, kMiB, kMiB), 0);
      Send send(i, link.a.sge(0, kMiB), opcode);
      send.to(link.b.address(kMiB), link.b.mr->rkey);
      ASSERT_EQ(send.post(link.qa), 0);
    }
    for (std::uint32_t i = 1; i <= kMessages; ++i) {
      link.poll_b();
      ASSERT_EQ(link.at_b.size(), i) << "one in each poll, and none waits for more than that";
    }
    EXPECT_TRUE(holds(link.b.bytes(kMiB, kMiB), 5));
    ASSERT_TRUE(link.run(kMessages, kMessages));
  }
}

// The second element's key ends while the message is under way, so that its receiver copies the
// first and then fails. A peer could otherwise have one poll copy that for each of its queue pairs.
TEST(SoftverbsTurn, EndsWithAMessageWhoseCopyFails) {
  for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND}) {
    constexpr std::size_t kMessages = 3;
    Link link({}, {.srq_depth = 0});
    link.batch = 64;
    for (std::size_t i = 1; i < kMessages; ++i)
      connect(link.a, link.a.make_qp(), link.b, link.b.make_qp());
    link.control();
    const std::span<std::byte> second = link.a.bytes(2 * kMiB, 4096);
    ibv_mr* const ended =
        sv::reg_mr(link.a.pd, second.data(), second.size(), IBV_ACCESS_LOCAL_WRITE);
    ASSERT_NE(ended, nullptr);
    fill(link.a.bytes(0, kMiB), 5);
    ibv_sge parts[] = {
        link.a.sge(0, kMiB),
        {link.a.address(2 * kMiB), static_cast<std::uint32_t>(second.size()), ended->lkey}};
    const std::size_t whole = kMiB + second.size();
    for (std::size_t i = 0; i < kMessages; ++i) {
      ASSERT_EQ(link.b.post_recv(i, i * kMiB, static_cast<std::uint32_t>(whole), link.b.qps[i]), 0);
      Send send(i, {}, opcode);
      send.wr.sg_list = parts;
      send.wr.num_sge = 2;
      send.to(link.b.address(i * kMiB), link.b.mr->rkey);
      ASSERT_EQ(send.post(link.a.qps[i]), 0);
    }
    ASSERT_EQ(sv::dereg_mr(ended), 0);
    for (std::size_t copied = 1; copied <= kMessages; ++copied) {
      link.poll_b();
      EXPECT_TRUE(holds(link.b.bytes((copied - 1) * kMiB, kMiB), 5)) << copied;
      EXPECT_TRUE(all_are(link.b.bytes(copied * kMiB, kMiB), 0)) << "one in each poll";
    }
    ASSERT_TRUE(link.run(kMessages, 0));
    for (const ibv_wc& wc : link.at_a) EXPECT_EQ(wc.status, IBV_WC_REM_OP_ERR);
  }
}

TEST(SoftverbsTurn, TakesAllShorterMessages) {
  constexpr std::uint32_t kMessages = 16, kBytes = 32u << 10;
  Link link;
  link.batch = 64;
  link.control();
  for (std::uint32_t i = 0; i < kMessages; ++i) {
    ASSERT_EQ(link.b.post_recv(i, 0, kBytes), 0);
    ASSERT_EQ(Send(i, link.a.sge(0, kBytes)).post(link.qa), 0);
  }
  link.poll_b();
  EXPECT_EQ(link.at_b.size(), kMessages);
}

/// Copies to `count` places of `length` bytes, round after round. How many copies of the last round
/// went past a cache of `cache` bytes.
int streamed(std::size_t cache, std::size_t length, std::size_t count, std::size_t gap) {
  LargeCopies copies(cache);
  const auto* const memory = reinterpret_cast<const std::byte*>(std::uintptr_t{1} << 40);
  int result = 0;
  for (int round = 0; round < 4; ++round) {
    result = 0;
    for (std::size_t i = 0; i < count; ++i)
      result += copies.left_cache(memory + i * (length + gap), length) ? 1 : 0;
  }
  return result;
}

TEST(LargeCopy, GoesPastTheCacheWhenTheCopiesAreMoreThanItHolds) {
  // Copies read as much as they write, so 32 MiB hold 16 MiB of destinations.
  EXPECT_EQ(streamed(32 * kMiB, 8 * kMiB, 1, 0), 0);
  EXPECT_EQ(streamed(32 * kMiB, 8 * kMiB, 2, 0), 0);
  EXPECT_EQ(streamed(32 * kMiB, 8 * kMiB, 3, 0), 3);
  EXPECT_EQ(streamed(32 * kMiB, kMiB, 8, 0), 0);
  EXPECT_EQ(streamed(32 * kMiB, kMiB, 17, 0), 17);
  EXPECT_EQ(streamed(32 * kMiB, kMiB, 100, 4096), 100);
  EXPECT_EQ(streamed(32 * kMiB, LargeCopies::kLeast, 200, 4096), 200);
  EXPECT_EQ(streamed(32 * kMiB, LargeCopies::kLeast, 100, 4096), 0);
}

TEST(LargeCopy, ANeighbourThatWasJustWrittenDoesNotHideThatTheRangeLeftTheCache) {
  EXPECT_EQ(streamed(32 * kMiB, 8 * kMiB, 8, 4096), 8);
  EXPECT_EQ(streamed(32 * kMiB, LargeCopies::kLeast + 1000, 256, 0), 256);
}

// Regions far apart share some parts, but not all of them with the same other one.
TEST(LargeCopy, RegionsAPowerOfTwoApartDoNotHideEachOther) {
  EXPECT_GE(streamed(32 * kMiB, 8 * kMiB, 8, 56 * kMiB), 6);
  EXPECT_GE(streamed(32 * kMiB, 8 * kMiB, 8, 120 * kMiB), 6);
  EXPECT_GE(streamed(32 * kMiB, kMiB, 32, 1023 * kMiB), 24);
}

TEST(LargeCopy, CopiesThatTheCacheHoldsAndThoseOfAnUnknownCacheAreOrdinary) {
  LargeCopies copies(32 * kMiB);
  const auto* const memory = reinterpret_cast<const std::byte*>(std::uintptr_t{1} << 40);
  EXPECT_FALSE(copies.left_cache(memory, 8 * kMiB));
  EXPECT_FALSE(copies.left_cache(memory + 8 * kMiB, 8 * kMiB));
  EXPECT_EQ(streamed(0, 8 * kMiB, 100, 0), 0);
}

TEST(LargeCopy, ALargeCacheHasLargerParts) {
  EXPECT_EQ(streamed(1024 * kMiB, 64 * kMiB, 8, 4096), 0);
  EXPECT_EQ(streamed(1024 * kMiB, 64 * kMiB, 9, 4096), 9);
  EXPECT_EQ(streamed(1024 * kMiB, LargeCopies::kLeast, 8000, 0),
            0);  // they are shorter than a part
}

struct Transfer {
  ibv_wr_opcode opcode;
  const char* name;
};
class LargeCopyOf : public testing::TestWithParam<Transfer> {};

// With so small a cache all of these copies go past it.
TEST_P(LargeCopyOf, MovesTheBytesPastTheCacheAndNothingBeside) {
  constexpr std::uint32_t kLength = 3 * kMiB / 2 + 24;
  constexpr std::size_t kSource = kMiB / 2 + 8;
  constexpr std::size_t kTarget = 2 * kMiB + 40;
  const bool read = GetParam().opcode == IBV_WR_RDMA_READ;
  Link link;
  link.a.internals().large_copies = LargeCopies(kMiB);
  Node& from = read ? link.b : link.a;
  Node& to = read ? link.a : link.b;
  for (std::uint64_t round = 1; round <= 4; ++round) {
    const std::size_t target = kTarget + 8 * round;
    fill(from.bytes(kSource, kLength), round);
    std::memset(to.memory.data(), 0xee, to.memory.size());
    const std::size_t local = read ? target : kSource;
    const std::size_t remote = read ? kSource : target;
    ASSERT_EQ(Send(round, link.a.sge(local, kLength), GetParam().opcode)
                  .to(link.b.address(remote), link.b.mr->rkey)
                  .post(link.qa),
              0);
    ASSERT_TRUE(link.run(round, 0));
    ASSERT_EQ(link.at_a.back().status, IBV_WC_SUCCESS);
    EXPECT_TRUE(holds(to.bytes(target, kLength), round));
    EXPECT_TRUE(all_are(to.bytes(0, target), 0xee));
    EXPECT_TRUE(all_are(to.memory.subspan(target + kLength), 0xee));
  }
}

/// Whether a context counts the copies of `transfer()`, 8 MiB in all, before one to another place.
/// A place may share parts with the memory of the copies, wherever that lies, but hardly each of
/// four.
template <typename Transfer>
bool counts(const Node& node, Transfer&& transfer) {
  constexpr std::uintptr_t kFirst = std::uintptr_t{1} << 40, kApart = 4999 * kMiB;
  LargeCopies& copies = node.internals().large_copies = LargeCopies(12 * kMiB);
  const auto is_any_left = [&] {
    bool found = false;
    for (std::uintptr_t i = 0; i < 4; ++i) {
      const auto* const elsewhere = reinterpret_cast<const std::byte*>(kFirst + i * kApart);
      found = found || LargeCopies(copies).left_cache(elsewhere, kMiB);
    }
    return found;
  };
  EXPECT_FALSE(is_any_left());
  transfer();
  return is_any_left();
}

TEST_P(LargeCopyOf, EachTransferCounts) {
  for (const int elements : {1, 2}) {
    Link link;
    EXPECT_TRUE(counts(link.a, [&] {
      for (std::uint64_t round = 1; round <= 8; ++round) {
        Send send(round, link.a.sge(0, kMiB), GetParam().opcode);
        const auto half = static_cast<std::uint32_t>(kMiB / 2);
        ibv_sge halves[] = {link.a.sge(0, half), link.a.sge(half, half)};
        if (elements == 2) {
          send.wr.sg_list = halves;
          send.wr.num_sge = 2;
        }
        ASSERT_EQ(send.to(link.b.address(0), link.b.mr->rkey).post(link.qa), 0);
        ASSERT_TRUE(link.run(round, 0));
        ASSERT_EQ(link.at_a.back().status, IBV_WC_SUCCESS);
      }
    })) << elements;
  }
}
INSTANTIATE_TEST_SUITE_P(By, LargeCopyOf,
                         testing::Values(Transfer{IBV_WR_RDMA_WRITE, "Write"},
                                         Transfer{IBV_WR_RDMA_READ, "Read"}),
                         [](const testing::TestParamInfo<Transfer>& tested) {
                           return std::string(tested.param.name);
                         });

}  // namespace
}  // namespace softverbs_test::large_copy
