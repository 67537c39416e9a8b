// The part of a lane's data that messages use: it grows with what is in flight, and shrinks again.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

#include "base/random.h"
#include "softverbs/direct_message_link.h"
#include "softverbs/queues.h"

namespace softverbs_test {

class SoftverbsLaneData : public MessagePair {
 protected:
  static constexpr std::uint32_t kWhole = sv::kWideLaneData / kLongMessage;

  bool send(std::uint32_t bytes) {
    if (!a_.send(number_of(serial_, bytes))) return false;
    sent_.push_back(number_of(serial_++, bytes));
    return true;
  }
  void send_all(std::uint32_t count) {
    for (; count != 0; --count) ASSERT_TRUE(send(kLongMessage)) << serial_;
    a_.publish();
  }
  void read(std::uint32_t count) {
    for (std::uint32_t some = 0; count != 0; count -= some) {
      some = std::min(count, 32u);
      ASSERT_EQ(b_.poll(static_cast<int>(some)), static_cast<int>(some));
      b_.release();
    }
  }
  /// Sends and reads in turn with a few messages in flight, for so many laps of the ring.
  void keep_up(std::uint32_t laps) {
    for (std::uint32_t before = out().data_next; laps != 0; before = out().data_next) {
      send_all(1);
      if (HasFatalFailure()) return;
      read(1);
      laps -= out().data_next < before ? 1 : 0;
    }
  }
  /// Has so much in flight that all of the data is used, and ends with two messages in flight.
  void hold_the_peer_up() {
    send_all(kWhole);
    read(kWhole - 2);
    ASSERT_EQ(out().data_size, sv::kWideLaneData);
  }
  /// Laps with so many calm ones before that the last one shrinks the ring.
  void be_calm(std::uint32_t laps) {
    out().data_calm_laps = sv::kCalmLaps - laps;
    keep_up(laps);
  }
  [[nodiscard]] sv::OutLane& out() const { return a_.out(); }

  std::uint32_t serial_ = 0;
  Numbers sent_;
};

// Nobody tells the sender what the peer has consumed before it asks.
TEST_F(SoftverbsLaneData, ASenderWhosePeerKeepsUpStaysInTheSmallerRing) {
  send_all(4);
  keep_up(6);
  EXPECT_EQ(out().data_size, sv::kLaneData);
  EXPECT_GT(sent_.size(), kWhole);  // enough to need the larger ring, if none had been consumed
  read(4);
  EXPECT_EQ(b_.taken(), sent_);
}

TEST_F(SoftverbsLaneData, ARingShrinksAfterManyLapsWithLittleInFlight) {
  hold_the_peer_up();
  keep_up(1);
  for (std::uint32_t size = sv::kWideLaneData / 2; size >= sv::kLaneData; size /= 2) {
    out().data_calm_laps = sv::kCalmLaps - 2;
    keep_up(1);
    EXPECT_EQ(out().data_size, 2 * size);
    keep_up(1);
    EXPECT_EQ(out().data_size, size);
  }
  be_calm(1);
  keep_up(1);
  EXPECT_EQ(out().data_size, sv::kLaneData);
  read(2);
  EXPECT_EQ(b_.taken(), sent_);
}

TEST_F(SoftverbsLaneData, ARingShrinksAlsoIfNothingIsInFlight) {
  hold_the_peer_up();
  read(2);
  keep_up(1);
  be_calm(2);
  EXPECT_EQ(out().data_size, sv::kWideLaneData / 2);
}

TEST_F(SoftverbsLaneData, ARingThatWasFullStaysSmallOnceItHasShrunk) {
  send_all(kWhole);
  ASSERT_FALSE(send(kLongMessage));
  read(kWhole - 2);
  keep_up(1);
  be_calm(2);
  keep_up(3);
  EXPECT_EQ(out().data_size, sv::kWideLaneData / 2);
}

TEST_F(SoftverbsLaneData, ARefusalOrGrowthBeginsTheCountOfCalmLapsAnew) {
  hold_the_peer_up();
  keep_up(1);
  be_calm(2);
  keep_up(1);
  ASSERT_EQ(out().data_size, sv::kWideLaneData / 2);
  out().data_calm_laps = sv::kCalmLaps - 2;
  while (out().data_size != sv::kWideLaneData) ASSERT_TRUE(send(kLongMessage));
  EXPECT_EQ(out().data_calm_laps, 0u);
  while (send(kLongMessage)) {
  }
  out().data_calm_laps = 5;
  EXPECT_FALSE(send(kLongMessage));
  EXPECT_EQ(out().data_calm_laps, 0u);
}

/// The ring goes on behind only where it gains more than it leaves unused until the last lap is
/// consumed.
TEST_F(SoftverbsLaneData, AShrunkRingTakesWhatThePeerGivesBack) {
  constexpr std::uint32_t kKept = 16;
  send_all(kWhole);
  read(kWhole - kKept);
  keep_up(1);
  be_calm(1);
  ASSERT_EQ(out().data_size, sv::kWideLaneData / 2);
  std::uint32_t in_flight = kKept;
  // A slow peer: messages reach far behind the part in use, which does not grow.
  for (; out().data_next < sv::kWideLaneData * 7 / 8; ++in_flight) send_all(1);
  ASSERT_EQ(out().data_size, sv::kWideLaneData / 2);
  read(in_flight - 40);
  while (send(kLongMessage)) {
  }
  a_.publish();
  std::uint32_t refused = 0;
  for (int i = 0; i < 30; ++i) {
    read(1);
    refused += send(kLongMessage) ? 0 : 1;
    a_.publish();
  }
  EXPECT_LE(refused, 1u);
}

TEST_F(SoftverbsLaneData, ALapWithMuchInFlightKeepsTheRing) {
  hold_the_peer_up();
  keep_up(1);
  out().data_calm_laps = sv::kCalmLaps - 1;
  send_all(kWhole / 4 + 1);
  keep_up(1);
  EXPECT_EQ(out().data_size, sv::kWideLaneData);
  EXPECT_EQ(out().data_calm_laps, 0u);
}

/// A ring that has shrunk may have bytes in flight behind its end.
TEST_F(SoftverbsLaneData, NothingInFlightIsOverwrittenWhileTheRingGrowsAndShrinks) {
  spinwire::base::Random random(7);
  std::uint64_t read_so_far = 0, shrinks = 0, overhangs = 0, growths = 0;
  for (int round = 0; round < 6000; ++round) {
    if (random.below(4) != 0) out().data_calm_laps = sv::kCalmLaps - 1;
    const std::uint32_t size = out().data_size;
    const bool burst = random.below(40) == 0;
    for (std::uint64_t n = random.below(burst ? 120 : 8); n != 0; --n) {
      const bool is_long = random.below(burst ? 2 : 8) == 0;
      if (!send(static_cast<std::uint32_t>(is_long ? 1 + random.below(16) : 1 + random.below(4)) *
                1024))
        break;  // no room
    }
    a_.publish();
    shrinks += out().data_size < size ? 1 : 0;
    growths += out().data_size > size ? 1 : 0;
    overhangs += out().data_lap_end > out().data_size ? 1 : 0;
    // Some are always in flight, so that the ring does not begin anew.
    const std::uint64_t in_flight = sent_.size() - read_so_far;
    if (in_flight < 2) continue;
    read_so_far += static_cast<std::uint64_t>(
        b_.poll(static_cast<int>(random.below(std::min<std::uint64_t>(in_flight, 32)))));
    b_.release();
  }
  read(static_cast<std::uint32_t>(sent_.size() - read_so_far));
  EXPECT_EQ(b_.taken(), sent_);
  EXPECT_GT(shrinks, 20u);
  EXPECT_GT(growths, 20u);
  EXPECT_GT(overhangs, 20u);
}

}  // namespace softverbs_test
