// Agents by the number of their queue pair: what is found, and what memory the map takes.
#include "agent/qpn_map.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>

namespace {

using spinwire::agent::Agent;
using spinwire::agent::QpnMap;

/// The map only stores pointers.
Agent* agent(std::uintptr_t n) { return reinterpret_cast<Agent*>(n * 64); }

TEST(AgentQpnMap, FindsWhatWasSetAndNotCleared) {
  QpnMap map;
  const std::array<std::uint32_t, 5> numbers{0, 1, 1023, 1024, (1u << 24) - 1};
  for (std::uintptr_t i = 0; i < numbers.size(); ++i) map.set(numbers[i], agent(i + 1));
  for (std::uintptr_t i = 0; i < numbers.size(); ++i) EXPECT_EQ(map.find(numbers[i]), agent(i + 1));
  EXPECT_EQ(map.find(2), nullptr);
  EXPECT_EQ(map.find(5000), nullptr);
  map.set(1, agent(9));  // in place of another
  EXPECT_EQ(map.find(1), agent(9));
  map.clear(1);
  map.clear(1);
  map.clear(5000);
  EXPECT_EQ(map.find(1), nullptr);
  EXPECT_EQ(map.find(0), agent(1)) << "its page has others";
  map.clear(0);
  map.clear(1023);
  EXPECT_EQ(map.find(1023), nullptr);
  EXPECT_EQ(map.find(1024), agent(4));
}

TEST(AgentQpnMap, TakesNoMoreMemoryAsNumbersGoOn) {
  QpnMap map;
  map.set(7, agent(7));  // a connection that stays
  for (std::uint32_t qpn = 1000; qpn < 200'000; ++qpn) {
    map.set(qpn, agent(1));
    if (qpn >= 1300) map.clear(qpn - 300);  // 300 others at a time
  }
  EXPECT_EQ(map.find(7), agent(7));
  EXPECT_EQ(map.find(199'999), agent(1));
  EXPECT_LE(map.pages(), 4u);
}

}  // namespace
