// Which inbound handshake comes first when one has to give way, against a plain search.
#include "control/eviction_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace eviction_order_test {
namespace {

using spinwire::control::EvictionOrder;
using spinwire::control::HandshakeGroup;
using spinwire::control::Source;
using spinwire::control::WaitsFor;

constexpr HandshakeGroup kStranger{WaitsFor::peer, false, false};
constexpr HandshakeGroup kProved{WaitsFor::peer, true, false};

Source source(std::uint8_t number) { return {number}; }
bool any(HandshakeGroup) { return true; }

/// The same, by a search of all.
class Model {
 public:
  struct Handshake {
    std::uint32_t name;
    Source source;
    HandshakeGroup group;
    std::uint64_t since;
  };
  [[nodiscard]] std::uint32_t count_of(const Source& of) const {
    return static_cast<std::uint32_t>(
        std::count_if(all.begin(), all.end(), [&](const Handshake& h) { return h.source == of; }));
  }
  template <typename IsWanted>
  [[nodiscard]] const Handshake* first(IsWanted&& is_wanted, std::uint64_t latest) const {
    const Handshake* best = nullptr;
    for (const Handshake& h : all) {
      if (!is_wanted(h.group) || h.since > latest) continue;
      const auto ahead = [&] {
        const std::uint32_t mine = count_of(h.source), most = count_of(best->source);
        return mine != most ? mine > most : h.since < best->since;
      };
      if (best == nullptr || ahead()) best = &h;
    }
    return best;
  }
  std::vector<Handshake> all;
};

class Pair {
 public:
  Pair(std::uint32_t most, std::uint32_t sources, std::uint32_t seed)
      : most_(most), sources_(sources), random_(seed), order_(2 * most, most) {
    for (std::uint32_t name = 0; name < 2 * most; ++name) free_.push_back(name);
  }

  void step() {
    now_ += pick(3);
    const std::uint32_t act = pick(8);
    if (act < 3 && model_.all.size() < most_) return add();
    if (model_.all.empty()) return;
    if (act < 5) return remove();
    move(pick(2) == 0);
  }
  void check() {
    const std::uint32_t wanted = pick(1u << 16);
    const auto is_wanted = [&](HandshakeGroup group) {
      const auto bit = static_cast<std::uint32_t>(group.waits_for) * 4 +
                       (group.is_proved ? 2u : 0u) + (group.is_request ? 1u : 0u);
      return (wanted >> bit & 1) != 0;
    };
    const std::uint64_t latest = pick(4) == 0 ? EvictionOrder::kAnyTime : now_ - pick(200);
    const auto found = order_.first(is_wanted, latest);
    const Model::Handshake* const expected = model_.first(is_wanted, latest);
    ASSERT_EQ(found.has_value(), expected != nullptr);
    if (found) {
      const auto member = order_.find(found->name);
      ASSERT_TRUE(member);
      EXPECT_TRUE(is_wanted(member->group));
      EXPECT_EQ(member->since, found->since);
      EXPECT_EQ(found->since, expected->since);
      EXPECT_EQ(found->count, model_.count_of(expected->source));
      EXPECT_EQ(found->count, model_.count_of(member->source));
    }
    EXPECT_EQ(order_.size(), model_.all.size());
    const Source some = source(static_cast<std::uint8_t>(pick(sources_)));
    EXPECT_EQ(order_.count_of(some), model_.count_of(some));
  }
  void audit() {
    EXPECT_EQ(order_.audit(), "");
    for (const Model::Handshake& h : model_.all) {
      const auto member = order_.find(h.name);
      ASSERT_TRUE(member);
      EXPECT_EQ(member->source, h.source);
      EXPECT_TRUE(member->group == h.group);
      EXPECT_EQ(member->since, h.since);
      EXPECT_EQ(order_.count_beside(h.name), model_.count_of(h.source));
    }
    for (const std::uint32_t name : free_) EXPECT_FALSE(order_.find(name));
  }

 private:
  std::uint32_t pick(std::uint32_t below) { return static_cast<std::uint32_t>(random_() % below); }
  HandshakeGroup some_group() {
    return {static_cast<WaitsFor>(pick(4)), pick(2) == 0, pick(2) == 0};
  }
  void add() {
    std::swap(free_[pick(static_cast<std::uint32_t>(free_.size()))], free_.back());
    // Some sources are likelier, so that they hold much.
    const auto from = static_cast<std::uint8_t>(std::min(pick(sources_), pick(sources_)));
    model_.all.push_back({free_.back(), source(from), some_group(), now_});
    order_.add(free_.back(), source(from), model_.all.back().group, now_);
    free_.pop_back();
  }
  void remove() {
    std::swap(model_.all[pick(static_cast<std::uint32_t>(model_.all.size()))], model_.all.back());
    free_.push_back(model_.all.back().name);
    order_.remove(free_.back());
    model_.all.pop_back();
  }
  /// To another group, with its time or, if it has taken a step, with a new one.
  void move(bool has_taken_a_step) {
    Model::Handshake& h = model_.all[pick(static_cast<std::uint32_t>(model_.all.size()))];
    h.group = some_group();
    if (has_taken_a_step) h.since = now_;
    order_.move(h.name, h.group, h.since);
  }

  std::uint32_t most_, sources_;
  std::mt19937 random_;
  std::uint64_t now_ = 1000;
  EvictionOrder order_;
  Model model_;
  std::vector<std::uint32_t> free_;
};

TEST(EvictionOrder, FindsWhatAPlainSearchFinds) {
  constexpr int kSteps = 10'000;
  struct Size {
    std::uint32_t most, sources;
  };
  std::uint32_t seed = 1;
  for (const Size size : {Size{1, 2}, Size{3, 2}, Size{7, 7}, Size{48, 6}, Size{64, 40}}) {
    Pair pair(size.most, size.sources, seed++);
    for (int i = 0; i < kSteps; ++i) {
      pair.step();
      pair.check();
      if (i % 64 == 0) pair.audit();
      ASSERT_FALSE(testing::Test::HasFailure())
          << "step " << i << " of " << size.most << " handshakes, " << size.sources << " sources";
    }
  }
}

TEST(EvictionOrder, TheSourceWithTheMostComesFirstThenTheOldest) {
  EvictionOrder order(8, 8);
  order.add(0, source(1), kStranger, 10);
  order.add(1, source(2), kStranger, 30);
  order.add(2, source(2), kStranger, 20);
  order.add(3, source(3), kStranger, 5);
  EXPECT_EQ(order.first(any)->name, 2u);
  EXPECT_EQ(order.first(any)->count, 2u);
  EXPECT_EQ(order.first(any, 19)->name, 3u) << "of two sources with one, the older";
  order.remove(1);
  EXPECT_EQ(order.first(any)->name, 3u);
  order.move(3, kStranger, 40);
  EXPECT_EQ(order.first(any)->name, 0u);
  EXPECT_FALSE(order.first(any, 9));
}

TEST(EvictionOrder, ASourceCountsWithAllItsGroups) {
  EvictionOrder order(8, 8);
  const auto strangers = [](HandshakeGroup group) { return !group.is_proved; };
  order.add(0, source(1), kStranger, 10);
  order.add(1, source(2), kStranger, 20);
  order.add(2, source(2), kProved, 30);
  EXPECT_EQ(order.first(strangers)->name, 1u);
  order.move(1, kProved, 20);
  EXPECT_EQ(order.first(strangers)->name, 0u);
  EXPECT_EQ(order.first(any)->name, 1u);
}

TEST(EvictionOrder, AnOlderOneThatComesBackComesFirst) {
  EvictionOrder order(4, 4);
  order.add(0, source(1), kStranger, 10);
  order.add(1, source(1), kStranger, 20);
  order.move(0, {WaitsFor::room, false, false}, 10);
  const auto of_peers = [](HandshakeGroup group) { return group.waits_for == WaitsFor::peer; };
  EXPECT_EQ(order.first(of_peers)->name, 1u);
  order.move(0, kStranger, 10);
  EXPECT_EQ(order.first(of_peers)->name, 0u);
}

}  // namespace
}  // namespace eviction_order_test
