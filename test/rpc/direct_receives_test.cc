// The port's receives where the device takes them directly: what polls tell of later than it comes.
#include "rpc/direct_receives.h"

#include <gtest/gtest.h>

#include <deque>
#include <utility>

#include "engine/core.h"
#include "engine/harness.h"

namespace rpc_test::direct_receives {

using namespace engine_test;  // names of a test namespace of its own
using spinwire::base::DirectReceive;
using spinwire::base::DirectReceives;
using spinwire::detail::EngineCore;

TEST(RpcDirectReceives, TheListHasRoomThoughPollsAlwaysTellOfSomeLater) {
  // As when completions of sends fill the array at each poll: one that arrived is told of by the
  // next, and meanwhile others are posted again.
  constexpr std::uint32_t kDepth = 8;
  Config config = small_config();
  config.memory.receive_bytes = 8u << 20;
  EngineCore core(config, Clock::real(), std::move(*spinwire::base::OwnerGuard::create()));
  ASSERT_TRUE(core.open());
  spinwire::rpc::DirectReceives receives(core.shared, kDepth, 64, 256);
  ASSERT_EQ(receives.made(), kDepth);
  receives.open(kDepth);
  DirectReceives& lists = receives.lists();
  std::deque<const DirectReceive*> untold;
  const auto arrive = [&] {
    DirectReceive* const receive = lists.posted[--lists.posted_count];
    lists.arrived[lists.arrived_count++] = receive;
    untold.push_back(receive);
  };
  for (int round = 0; round < 100; ++round) {
    for (int n = 0; n < 2 + round % 3; ++n) arrive();
    ASSERT_LE(lists.arrived_count + lists.posted_count, kDepth) << round;
    std::uint32_t told = 0;
    for (std::size_t left = static_cast<std::size_t>(round) % 4; untold.size() > left; ++told) {
      ASSERT_EQ(&receives.arrived(told), untold.front());
      untold.pop_front();
    }
    receives.give_back(told);
    ASSERT_EQ(lists.arrived_count, untold.size());
    ASSERT_EQ(lists.posted_count + untold.size(), kDepth);
  }
}

}  // namespace rpc_test::direct_receives
