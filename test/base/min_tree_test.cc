// Numbers at positions, searched by value, against a plain search.
#include "base/min_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace min_tree_test {
namespace {

using spinwire::base::MinTree;

TEST(MinTree, HasNoNumberAtFirst) {
  for (const std::uint32_t size : {0u, 1u, 5u, 8u}) {
    const MinTree tree(size);
    EXPECT_EQ(tree.least(), MinTree::kNone);
    for (std::uint32_t i = 0; i < size; ++i) EXPECT_EQ(tree.at(i), MinTree::kNone);
  }
}

TEST(MinTree, FindsWhatAPlainSearchFinds) {
  std::mt19937 random(7);
  for (const std::uint32_t size : {1u, 2u, 7u, 64u, 100u}) {
    MinTree tree(size);
    std::vector<std::uint64_t> plain(size, MinTree::kNone);
    for (int step = 0; step < 2000; ++step) {
      const auto position = static_cast<std::uint32_t>(random() % size);
      plain[position] = random() % 4 == 0 ? MinTree::kNone : random() % 50;
      tree.set(position, plain[position]);
      ASSERT_TRUE(tree.is_consistent());
      const std::uint64_t least = *std::min_element(plain.begin(), plain.end());
      ASSERT_EQ(tree.least(), least);
      const std::uint64_t value = random() % 50;
      if (least <= value) {
        const auto first = std::find_if(plain.begin(), plain.end(),
                                        [&](std::uint64_t each) { return each <= value; });
        ASSERT_EQ(tree.first_at_most(value), first - plain.begin());
      }
      const auto begin = static_cast<std::uint32_t>(random() % size);
      const auto end = begin + 1 + static_cast<std::uint32_t>(random() % (size - begin));
      const std::uint32_t found = tree.least_of(begin, end);
      ASSERT_TRUE(begin <= found && found < end) << found;
      ASSERT_EQ(plain[found], *std::min_element(plain.begin() + begin, plain.begin() + end));
      ASSERT_EQ(tree.at(found), plain[found]);
    }
  }
}

}  // namespace
}  // namespace min_tree_test
