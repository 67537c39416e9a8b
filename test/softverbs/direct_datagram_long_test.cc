// Direct datagrams that do not fit into a line: their bytes lie in the lane's data, and are read in
// place.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "base/random.h"
#include "softverbs/direct_datagram_link.h"

namespace softverbs_test::direct {

class SoftverbsDirectLong : public DirectPair {
 protected:
  void SetUp() override { b_.batches.longest = sv::kLongestDirect; }
  /// Writes a line like a hostile peer, with the word of a direct datagram.
  void forge(std::uint16_t length, std::uint32_t offset) {
    sv::OutLane& out = a_.node.internals().peers[0]->out;
    sv::Line& line = out.lines[out.tail % sv::kLaneLines];
    std::memcpy(line.payload + sv::kOffsetAt, &offset, sizeof offset);
    line.set_trailer(length, out.ack_on_top, kQkey);
    line.word.store(
        sv::lane_mark(out.tail) << 56 | static_cast<sv::Qp*>(a_.qp)->datagram_word | b_.qp->qp_num,
        std::memory_order_release);
    ++out.tail;
  }
};

TEST_F(SoftverbsDirectLong, TheyLieInRunsWithShortOnes) {
  b_.forget_receives();
  Numbers sent;
  for (std::uint64_t i = 0; i < 30; ++i) {
    for (const std::uint64_t number : {i, kLong + i, kLongest + i * 37}) {
      if (number >= kLongest && i % 5 != 0) continue;
      ASSERT_TRUE(send(number)) << number;
      sent.push_back(number);
    }
  }
  Numbers seen = b_.steps();
  EXPECT_EQ(seen.size(), in_whole_groups(sent.size()));
  a_.publish();
  for (const std::uint64_t number : b_.steps()) seen.push_back(number);
  EXPECT_EQ(seen, sent);
  EXPECT_EQ(b_.by_receives, 0u);
}

TEST_F(SoftverbsDirectLong, TheLineOfAWorkRequestHasTheHeaderToo) {
  for (const std::uint64_t number : {kLong, kLong + 1, kLong + 200}) {
    const NumberedDatagram sent(number);
    sent.write(a_.node.bytes(0, sent.length()).data());
    Datagram d(1, a_.node.sge(0, sent.length()), to_b_, b_.qp->qp_num, kQkey);
    ASSERT_EQ(d.post(a_.qp), 0);
    EXPECT_EQ(b_.step(), Numbers{number});
    (void)a_.step();
  }
}

TEST_F(SoftverbsDirectLong, TheLongestAndOneByteMore) {
  const auto& direct = sv::direct_datagrams();
  const std::vector<std::byte> payload(sv::kLongestDirect);
  EXPECT_EQ(direct.send_long({&direct, a_.qp, direct.sender(a_.qp)},
                             {to_b_.get(), b_.qp->qp_num, kQkey, direct.lane(to_b_.get())}, 1, 2,
                             payload.data(), sv::kLongestDirect - sv::kDirectHeader + 1),
            sv::Sent::refused);
  std::uint64_t longest = kLongest;
  while (NumberedDatagram(longest).length() != sv::kLongestDirect) ++longest;
  ASSERT_TRUE(send(longest));
  a_.publish();
  EXPECT_EQ(b_.steps(), Numbers{longest});
}

TEST_F(SoftverbsDirectLong, LongerThanTheReaderTakesGoesToAReceive) {
  b_.batches.longest = 100;
  std::uint64_t fits = kLong, exceeds = kLong;
  while (NumberedDatagram(fits).length() != 100) ++fits;
  while (NumberedDatagram(exceeds).length() != 101) ++exceeds;
  for (const std::uint64_t number : {std::uint64_t{1}, fits, exceeds, std::uint64_t{2}})
    ASSERT_TRUE(send(number));
  a_.publish();
  EXPECT_EQ(b_.steps(), (Numbers{1, fits, exceeds, 2}));
  EXPECT_EQ(b_.by_receives, 1u);
}

TEST_F(SoftverbsDirectLong, HostileLengthsAndOffsetsAreDropped) {
  send_all(1, 2);
  a_.publish();
  EXPECT_EQ(b_.steps(), numbers(1, 2));
  constexpr std::uint32_t kNowhere = 0xffffffff;
  forge(100, sv::kWideLaneData - 99);
  forge(100, sv::kWideLaneData);
  forge(100, kNowhere);
  forge(0xffff, 0);
  forge(sv::kLongestDirect + 1, 0);
  forge(sv::kLongestDirect, sv::kWideLaneData - sv::kLongestDirect + 1);
  EXPECT_EQ(b_.steps(), Numbers{});
  EXPECT_EQ(dropped(b_.node, sv::Drop::malformed), 6u);
  ASSERT_TRUE(send(kLong) && send(2));
  a_.publish();
  EXPECT_EQ(b_.steps(), (Numbers{kLong, 2}));
}

TEST_F(SoftverbsDirectLong, AStreamOfAllSizesGoesRoundAndRound) {
  constexpr std::uint64_t kDatagrams = 20'000;
  spinwire::base::Random random(5);
  std::uint64_t sent = 0, seen = 0, rounds = 0;
  const sv::OutLane& out = a_.node.internals().peers[0]->out;
  Numbers expected;
  const auto step = [&] {
    for (std::uint64_t n = random.below(random.below(8) == 0 ? 60 : 6); n != 0; --n) {
      const std::uint64_t kind = random.below(8);
      const std::uint64_t number = sent + (kind < 3 ? 0 : kind < 6 ? kLong : kLongest);
      const std::uint32_t before = out.data_next;
      if (sent == kDatagrams || !send(number)) break;  // without room, later
      rounds += out.data_next < before ? 1 : 0;
      expected.push_back(number);
      ++sent;
    }
    if (random.below(3) != 0) a_.publish();
    if (random.below(3) == 0) return;
    for (const std::uint64_t number : b_.step()) {
      ASSERT_EQ(number, expected[seen]);
      ++seen;
    }
  };
  ASSERT_TRUE(until(step, [&] { return HasFatalFailure() || sent == kDatagrams; }));
  a_.publish();
  for (const std::uint64_t number : b_.steps()) ASSERT_EQ(number, expected[seen++]);
  EXPECT_EQ(seen, kDatagrams);
  EXPECT_EQ(b_.by_receives, 0u);
  EXPECT_GT(rounds, 50u);
  EXPECT_GT(out.data_size, sv::kLeastData);  // at times, so much was in flight
}

}  // namespace softverbs_test::direct
