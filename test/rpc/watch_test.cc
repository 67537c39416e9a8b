// The watch over calls under way, and the tables of sessions, against plain models of them.
#include "rpc/watch.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "base/random.h"
#include "rpc/session_table.h"

namespace watch_test {
namespace {

using spinwire::base::Random;
using spinwire::rpc::SessionTable;
using spinwire::rpc::Watch;

/// Calls by their numbers, which session they are of does not matter here.
class WatchedCalls {
 public:
  explicit WatchedCalls(std::uint32_t most) : watch_(most) {}

  void begin(std::uint64_t now) {
    if (watch_.full()) {
      watch_.make_room([this](const Watch::Entry& entry, std::uint16_t place) {
        places_.at(entry.number) = place;
      });
    }
    ASSERT_FALSE(watch_.full());
    places_[next_] = watch_.add(now, 7, next_);
    ++next_;
  }
  void end(std::uint32_t number) {
    watch_.end(places_.at(number));
    places_.erase(number);
  }
  /// Each entry is where its call says.
  void check() const {
    for (const auto& [number, place] : places_) {
      ASSERT_EQ(watch_.at(place).number, number);
      ASSERT_EQ(watch_.at(place).session, 7u);
    }
  }
  [[nodiscard]] Watch& watch() noexcept { return watch_; }
  [[nodiscard]] const std::map<std::uint32_t, std::uint16_t>& calls() const { return places_; }

 private:
  Watch watch_;
  std::map<std::uint32_t, std::uint16_t> places_;
  std::uint32_t next_ = 0;
};

TEST(RpcWatch, TellsOfCallsInTheOrderInWhichTheyBegan) {
  constexpr std::uint32_t kMost = 300;
  WatchedCalls t(kMost);
  Random random(11);
  for (std::uint64_t now = 1; now < 20'000; ++now) {
    // Now few, now as many as there may be; what began long ago may still be there.
    const std::uint64_t wanted = now / 1000 % 2 == 0 ? kMost : 3;
    if (t.calls().size() < wanted) {
      t.begin(now);
    } else {
      auto call = t.calls().begin();
      std::advance(call, static_cast<std::ptrdiff_t>(random.below(t.calls().size())));
      t.end(call->first);
    }
    if (now % 61 == 0) t.check();
    const Watch::Entry* const first = t.watch().first();
    ASSERT_EQ(first == nullptr, t.calls().empty());
    if (first != nullptr) {
      ASSERT_EQ(first->number, t.calls().begin()->first);
    }
  }
  while (const Watch::Entry* const first = t.watch().first()) t.end(first->number);
  EXPECT_TRUE(t.calls().empty());
}

TEST(RpcWatch, HoldsAsManyAsItWasMadeFor) {
  for (const std::uint32_t most : {1u, 48u, 64u, 65u, 768u, 24'576u}) {
    WatchedCalls t(most);
    for (std::uint32_t i = 0; i < most; ++i) t.begin(i);
    t.check();
    for (std::uint32_t i = 0; i < most; ++i) {
      t.end(i);
      t.begin(most + i);
    }
    t.check();
  }
}

struct alignas(64) Record {
  static constexpr std::size_t kHotBytes = 64;
  static inline int alive = 0;
  Record() { ++alive; }
  ~Record() { --alive; }
  std::uint64_t value = 0;
};
struct alignas(64) Place {
  std::uint64_t value = 0;
};

TEST(RpcSessionTable, RecordsAndPlacesAreApartAndUsedAgain) {
  {
    SessionTable<Record, Place> table(600);
    std::vector<std::uint32_t> indices;
    std::set<const void*> lines;
    for (std::uint32_t i = 0; i < 600; ++i) {
      const std::uint32_t window = 1u << i % 7;
      const std::uint32_t index = table.acquire(window);
      ASSERT_NE(index, table.kNone);
      indices.push_back(index);
      Record& record = table.at(index);
      EXPECT_TRUE(lines.insert(&record).second);
      for (std::uint32_t p = 0; p < window; ++p) {
        Place& place = table.places(record)[p];
        EXPECT_TRUE(lines.insert(&place).second);
        EXPECT_EQ(place.value, 0u);
        place.value = 1;
      }
      table.prefetch(index, ~0u);
    }
    EXPECT_EQ(table.acquire(1), table.kNone);
    EXPECT_EQ(table.find(600), nullptr);
    EXPECT_EQ(table.find(~0u), nullptr);
    for (const std::uint32_t index : indices) table.release(index);
    EXPECT_EQ(table.size(), 0u);
    EXPECT_EQ(table.find(indices.front()), nullptr);
    table.prefetch(indices.front(), 5);  // nothing there: no harm
    const int made = Record::alive;
    for (std::uint32_t i = 0; i < 600; ++i) {
      const std::uint32_t index = table.acquire(1u << i % 7);
      EXPECT_TRUE(lines.contains(&table.at(index)));
      for (std::uint32_t p = 0; p < 1u << i % 7; ++p)
        EXPECT_EQ(table.places(table.at(index))[p].value, 0u);
    }
    EXPECT_EQ(Record::alive, made);
  }
  EXPECT_EQ(Record::alive, 0);
}

}  // namespace
}  // namespace watch_test
