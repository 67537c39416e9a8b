#include "memory/chunk_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/random.h"

namespace chunk_map_test {

using spinwire::base::Random;
using spinwire::memory::ChunkMap;

TEST(ChunkMapTest, FindsWhatAModelFinds) {
  for (const std::uint32_t count : {1u, 63u, 64u, 65u, 300u, 5000u}) {
    ChunkMap map(count);
    std::vector<bool> model(count, true);
    EXPECT_EQ(map.free(), count);
    Random random(count);
    for (int step = 0; step < 2000; ++step) {
      const auto first = static_cast<std::uint32_t>(random.below(count));
      const auto length = static_cast<std::uint32_t>(1 + random.below(count - first));
      const bool to = random.below(2) == 0;
      for (std::uint32_t i = first; i < first + (length + 7) / 8; ++i) {
        to ? map.set(i) : map.clear(i);
        model[i] = to;
      }
      const auto one = std::find(model.begin(), model.end(), true);
      ASSERT_EQ(map.find_one(), one == model.end()
                                    ? ChunkMap::kNone
                                    : static_cast<std::uint32_t>(one - model.begin()));
      ASSERT_EQ(map.free(),
                static_cast<std::uint32_t>(std::count(model.begin(), model.end(), true)));
      const auto wanted = static_cast<std::uint32_t>(1 + random.below(100));
      std::uint32_t run = 0;
      std::uint32_t found = ChunkMap::kNone;
      for (std::uint32_t i = count; i-- > 0;) {
        run = model[i] ? run + 1 : 0;
        if (run == wanted) {
          found = i;
          break;
        }
      }
      ASSERT_EQ(map.find_run(wanted), found) << "run of " << wanted;
    }
  }
  EXPECT_EQ(ChunkMap(0).find_one(), ChunkMap::kNone);
  EXPECT_EQ(ChunkMap(10).find_run(0), ChunkMap::kNone);
}

}  // namespace chunk_map_test
