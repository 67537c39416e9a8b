// Which event of the ring of all subjects gives way to a new one.
#include "observe/event_places.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "base/random.h"

namespace observe_test {
namespace {

using spinwire::base::Random;
using spinwire::observe::EventPlaces;
using spinwire::observe::EventSource;
using spinwire::observe::kPartOfSource;

/// 0 is the engine. The numbers lie where those of addresses do.
EventSource source(std::uint32_t number) {
  EventSource bytes{};
  bytes[number % 2 == 0 ? 15 : 7] = static_cast<std::uint8_t>(number);
  return bytes;
}

/// Checks each place against the rule, from a list of all places of each source.
class CheckedPlaces {
 public:
  explicit CheckedPlaces(std::uint32_t count) : owners_(count), places_(count) {}

  void take(std::uint32_t by) {
    const std::uint32_t place = places_.take(source(by));
    ASSERT_LT(place, owners_.size());
    auto& own = places_of_[by];
    if (used_ < owners_.size()) {
      ASSERT_EQ(place, used_++) << "the ring has room";
    } else {
      const std::size_t share = std::max<std::size_t>(owners_.size() / kPartOfSource, 1);
      const bool yields = own.size() == most() || (by != 0 && own.size() >= share);
      auto& others = places_of_[owners_[place]];
      if (yields) {
        ASSERT_EQ(owners_[place], by);
      } else {
        ASSERT_EQ(others.size(), most()) << "of a source with fewer";
      }
      ASSERT_EQ(place, others.front()) << "not its oldest";
      others.pop_front();
    }
    owners_[place] = by;
    own.push_back(place);
  }
  [[nodiscard]] std::size_t count(std::uint32_t of) { return places_of_[of].size(); }

 private:
  [[nodiscard]] std::size_t most() const {
    std::size_t most = 0;
    for (const auto& [by, places] : places_of_) most = std::max(most, places.size());
    return most;
  }

  std::vector<std::uint32_t> owners_;
  std::map<std::uint32_t, std::deque<std::uint32_t>> places_of_;
  std::uint32_t used_ = 0;
  EventPlaces places_;
};

TEST(ObserveEventPlaces, FollowTheRuleWhateverTheOrder) {
  for (const std::uint32_t places : {1u, 2u, 7u, 16u, 64u}) {
    Random random(places);
    CheckedPlaces checked(places);
    for (int round = 0; round < 40; ++round) {
      // Few sources or many, of which some have much to say.
      const std::uint64_t sources = 1 + random.below(round % 2 == 0 ? 4 : 200);
      for (int i = 0; i < 200; ++i) {
        const std::uint64_t any = random.below(sources);
        checked.take(static_cast<std::uint32_t>(random.chance(300'000) ? any % 3 : any));
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(ObserveEventPlaces, ASingleSourceHasAll) {
  CheckedPlaces checked(64);
  for (int i = 0; i < 1000; ++i) checked.take(1);
  EXPECT_EQ(checked.count(1), 64u);
}

TEST(ObserveEventPlaces, ASourceTakesAnEighthFromAnother) {
  CheckedPlaces checked(64);
  for (int i = 0; i < 1000; ++i) checked.take(1);
  for (int i = 0; i < 1000; ++i) checked.take(2);
  EXPECT_EQ(checked.count(2), 8u);
  // The engine takes what it needs, up to an equal share.
  for (int i = 0; i < 1000; ++i) checked.take(0);
  EXPECT_EQ(checked.count(1), 28u);
  EXPECT_EQ(checked.count(2), 8u);
}

TEST(ObserveEventPlaces, ManySourcesDisplaceNoneWithFewEvents) {
  CheckedPlaces checked(64);
  checked.take(1);
  for (std::uint32_t i = 0; i < 1000; ++i) checked.take(2 + i % 20);
  EXPECT_EQ(checked.count(1), 1u);
}

}  // namespace
}  // namespace observe_test
