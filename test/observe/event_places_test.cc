// Which event of the ring of all subjects gives way to a new one.
#include "observe/event_places.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <set>
#include <vector>

#include "base/random.h"

namespace observe_test {
namespace {

using spinwire::base::Random;
using spinwire::observe::EventPlaces;
using spinwire::observe::EventSource;
using spinwire::observe::kPartKept;
using spinwire::observe::kPartKeptOfSource;
using spinwire::observe::kPartOfSource;

/// 0 is the engine. The numbers lie where those of addresses do.
EventSource source(std::uint32_t number) {
  EventSource bytes{};
  std::memcpy(bytes.data() + (number % 2 == 0 ? 12 : 4), &number, sizeof number);
  return bytes;
}

/// Checks each place against the rule, from a list of all events.
class CheckedPlaces {
 public:
  explicit CheckedPlaces(std::uint32_t count) : size_(count), places_(count) {}

  void take(std::uint32_t by) {
    const std::uint32_t place = places_.take(source(by));
    ++numbers_;
    if (events_.size() < size_) {
      ASSERT_EQ(place, events_.size()) << "the ring has room";
    } else {
      const auto expected =
          count(by) >= std::max(size_ / kPartOfSource, 1u) ? oldest_of(by) : first_of_others();
      ASSERT_NE(expected, events_.end());
      ASSERT_EQ(place, expected->place);
      events_.erase(expected);
    }
    events_.push_back({by, place, numbers_, 0});
    if (kept(by) > std::max(size_ / kPartKeptOfSource, 1u))
      keep_no_more([&](const Event& event) { return event.by == by; });
    if (kept() > size_ / kPartKept) keep_no_more([](const Event&) { return true; });
  }
  [[nodiscard]] std::size_t count(std::uint32_t of) const {
    return count_if([&](const Event& event) { return event.by == of; });
  }
  /// The numbers of a source's events, counted over all sources from 1 on.
  [[nodiscard]] std::set<std::uint64_t> numbers(std::uint32_t of) const {
    std::set<std::uint64_t> found;
    for (const Event& event : events_)
      if (event.by == of) found.insert(event.number);
    return found;
  }
  [[nodiscard]] std::uint64_t oldest() const { return events_.front().number; }
  [[nodiscard]] std::uint64_t newest() const { return numbers_; }

 private:
  struct Event {
    std::uint32_t by;
    std::uint32_t place;
    std::uint64_t number;
    std::uint64_t left;  ///< when it was kept no more; 0: it is
  };
  using Events = std::vector<Event>;  // the oldest first

  template <typename Is>
  [[nodiscard]] std::size_t count_if(Is&& is) const {
    return static_cast<std::size_t>(std::count_if(events_.begin(), events_.end(), is));
  }
  [[nodiscard]] std::size_t kept() const {
    return count_if([](const Event& event) { return event.left == 0; });
  }
  [[nodiscard]] std::size_t kept(std::uint32_t by) const {
    return count_if([&](const Event& event) { return event.left == 0 && event.by == by; });
  }
  template <typename Is>
  void keep_no_more(Is&& is) {
    std::find_if(events_.begin(), events_.end(), [&](const Event& event) {
      return event.left == 0 && is(event);
    })->left = ++left_;
  }
  [[nodiscard]] Events::iterator oldest_of(std::uint32_t by) {
    return std::find_if(events_.begin(), events_.end(),
                        [&](const Event& event) { return event.by == by; });
  }
  [[nodiscard]] Events::iterator first_of_others() {
    Events::iterator first = events_.end();
    for (auto i = events_.begin(); i != events_.end(); ++i)
      if (i->left != 0 && (first == events_.end() || i->left < first->left)) first = i;
    return first;
  }

  std::uint32_t size_;
  Events events_;
  std::uint64_t numbers_ = 0;
  std::uint64_t left_ = 0;
  EventPlaces places_;
};

constexpr std::uint32_t kPlaces = 256;
constexpr std::uint32_t kShare = kPlaces / kPartOfSource;
constexpr std::uint32_t kKept = kPlaces / kPartKeptOfSource;

/// As many events of each of so many sources, one source after the other.
void take_of_each(CheckedPlaces& places, std::uint32_t first, std::uint32_t sources,
                  std::uint32_t events) {
  for (std::uint32_t i = 0; i < sources * events && !testing::Test::HasFatalFailure(); ++i)
    places.take(first + i / events);
}

TEST(ObserveEventPlaces, FollowTheRuleWhateverTheOrder) {
  for (const std::uint32_t places : {1u, 2u, 7u, 16u, 64u, kPlaces}) {
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
  CheckedPlaces checked(kPlaces);
  take_of_each(checked, 1, 1, 4 * kPlaces);
  EXPECT_EQ(checked.count(1), kPlaces);
}

TEST(ObserveEventPlaces, ASourceTakesAnEighthFromAnother) {
  CheckedPlaces checked(kPlaces);
  take_of_each(checked, 1, 1, 4 * kPlaces);
  take_of_each(checked, 2, 1, 4 * kPlaces);
  EXPECT_EQ(checked.count(2), kShare);
  // So does the engine.
  take_of_each(checked, 0, 1, 4 * kPlaces);
  EXPECT_EQ(checked.count(0), kShare);
  EXPECT_EQ(checked.count(1), kPlaces - 2 * kShare);
}

TEST(ObserveEventPlaces, ManySourcesDisplaceNoneOfASourceWithFew) {
  CheckedPlaces checked(kPlaces);
  take_of_each(checked, 1, 1, kKept);
  for (std::uint32_t i = 0; i < 20 * kPlaces; ++i) checked.take(2 + i % 20);
  EXPECT_EQ(checked.count(1), kKept);
}

// Whatever sources that have gone leave, those that go on have an eighth each.
TEST(ObserveEventPlaces, SourcesThatHaveGoneLeaveRoom) {
  for (const std::uint32_t gone : {1u, 7u, 8u, 20u, 64u, 128u, kPlaces, 4 * kPlaces}) {
    for (const std::uint32_t events : {1u, kKept, kPlaces / 20, kShare}) {
      CheckedPlaces checked(kPlaces);
      take_of_each(checked, 10, gone, events);
      for (std::uint32_t i = 0; i < 4 * kPlaces; ++i) checked.take(i % 4);
      for (std::uint32_t live = 0; live < 4; ++live) {
        const auto numbers = checked.numbers(live);
        EXPECT_GE(numbers.size(), kShare) << gone << " have left " << events << " each";
        EXPECT_GT(*numbers.begin() + 4 * numbers.size(), checked.newest() - 4)
            << "these are its newest ones";
      }
    }
  }
}

TEST(ObserveEventPlaces, ManySourcesThatComeAndGoLeaveTheLastEvents) {
  CheckedPlaces checked(kPlaces);
  take_of_each(checked, 10, 4 * kPlaces, 1);
  EXPECT_EQ(checked.oldest(), checked.newest() - kPlaces + 1) << "an ordinary ring";
  for (std::uint32_t i = 0; i < kPlaces / 8; ++i) checked.take(i % 2);
  EXPECT_EQ(checked.count(0), kPlaces / 16);
  EXPECT_EQ(checked.count(1), kPlaces / 16);
  EXPECT_EQ(checked.oldest(), checked.newest() - kPlaces + 1);
  // The newest ones of each are kept, so those of sources that have gone stay a little longer.
  take_of_each(checked, 10'000, 4 * kPlaces, 5);
  EXPECT_GT(checked.oldest() + 3 * kPlaces, checked.newest());
}

// Addresses of attackers that differ in both halves: no two share their places.
TEST(ObserveEventPlaces, SourcesThatDifferInBothHalvesAreTwo) {
  for (int bit = 0; bit < 64; ++bit) {
    const std::uint64_t high = std::uint64_t{1} << 63, other = std::uint64_t{1} << bit;
    const std::array<std::uint64_t, 2> first{high, other}, second{0, 0};
    EventPlaces places(16);
    for (int i = 0; i < 16; ++i) (void)places.take(EventSource{1});
    EventSource one, two;
    std::memcpy(one.data(), first.data(), sizeof one);
    std::memcpy(two.data(), second.data(), sizeof two);
    // Each takes two places from the first, and its own from then on.
    std::set<std::uint32_t> taken;
    for (int i = 0; i < 8; ++i) taken.insert(places.take(i % 2 == 0 ? one : two));
    EXPECT_EQ(taken.size(), 4u) << bit;
  }
}

}  // namespace
}  // namespace observe_test
