// The retransmission queue and the tables of sessions, compared with simple models.
#include "rpc/retransmission_queue.h"

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
using spinwire::rpc::RetransmissionQueue;
using spinwire::rpc::SessionTable;

/// Sessions by their names.
class WatchedSessions {
 public:
  explicit WatchedSessions(std::uint32_t most) : queue_(most) {}

  void begin(std::uint64_t now) {
    if (queue_.full()) {
      queue_.make_room([this](const RetransmissionQueue::Entry& entry, std::uint16_t place) {
        places_.at(entry.session) = place;
      });
    }
    ASSERT_FALSE(queue_.full());
    places_[next_] = queue_.add(now, next_);
    ++next_;
  }
  void end(std::uint32_t name) {
    queue_.end(places_.at(name));
    places_.erase(name);
  }
  /// Checks that each entry is where its session says.
  void check() const {
    for (const auto& [name, place] : places_) ASSERT_EQ(queue_.at(place).session, name);
  }
  [[nodiscard]] RetransmissionQueue& watch() noexcept { return queue_; }
  [[nodiscard]] const std::map<std::uint32_t, std::uint16_t>& sessions() const { return places_; }

 private:
  RetransmissionQueue queue_;
  std::map<std::uint32_t, std::uint16_t> places_;
  std::uint32_t next_ = 1;
};

TEST(RpcRetransmissionQueue, TellsOfSessionsInTheOrderInWhichTheyBegan) {
  constexpr std::uint32_t kMost = 300;
  WatchedSessions t(kMost);
  Random random(11);
  for (std::uint64_t now = 1; now < 20'000; ++now) {
    // Alternates between few and the maximum; old sessions may still be present.
    const std::uint64_t wanted = now / 1000 % 2 == 0 ? kMost : 3;
    if (t.sessions().size() < wanted) {
      t.begin(now);
    } else {
      auto session = t.sessions().begin();
      std::advance(session, static_cast<std::ptrdiff_t>(random.below(t.sessions().size())));
      t.end(session->first);
    }
    if (now % 61 == 0) t.check();
    const RetransmissionQueue::Entry* const first = t.watch().first();
    ASSERT_EQ(first == nullptr, t.sessions().empty());
    if (first != nullptr) {
      ASSERT_EQ(first->session, t.sessions().begin()->first);
    }
  }
  while (const RetransmissionQueue::Entry* const first = t.watch().first()) t.end(first->session);
  EXPECT_TRUE(t.sessions().empty());
}

TEST(RpcRetransmissionQueue, HoldsAsManyAsItWasMadeFor) {
  for (const std::uint32_t most : {1u, 48u, 64u, 65u, 768u, 24'576u}) {
    WatchedSessions t(most);
    for (std::uint32_t i = 0; i < most; ++i) t.begin(i);
    t.check();
    for (std::uint32_t i = 1; i <= most; ++i) {
      t.end(i);
      t.begin(most + i);
    }
    t.check();
  }
}

/// The ring fills with ended entries behind one that stays.
TEST(RpcRetransmissionQueue, ThoseThatStayAreFoundWhereverTheyAreMoved) {
  WatchedSessions t(300);
  t.begin(1);
  t.begin(2);
  for (std::uint32_t name = 3; name < 1000; ++name) {
    t.begin(name);
    if (name % 50 != 0) t.end(name);
    if (name % 50 == 25 && name > 100) t.end(name / 50 * 50 - 50);
    ASSERT_NO_FATAL_FAILURE(t.check());
    ASSERT_EQ(t.watch().first()->session, 1u);
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
    table.prefetch(indices.front(), 5);  // an empty slot is harmless
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
