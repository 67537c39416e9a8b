// Strangers use up the descriptors of a process that allows more handshakes than it can open files.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "attack/latencies.h"
#include "attack/victim.h"

namespace attack_test {
namespace {

constexpr const char* kSilentCrowd = "127.0.0.2:0";  // another source than the honest client's
constexpr rlim_t kDescriptors = 32;
constexpr int kRetries = 4;  // of a connect, at most
constexpr int kStrangers = 3 * static_cast<int>(kDescriptors);

Config crowded_config() {
  Config c = rpc_test::rpc_config();
  c.connections.handshakes = 1024;
  return c;
}

/// Has the victim drop peers, for want of descriptors. The strangers that are left stay.
std::vector<Stream> take_all_descriptors(const Victim& victim) {
  std::vector<Stream> strangers;
  strangers.reserve(kStrangers);
  for (int i = 0; i < kStrangers; ++i) strangers.emplace_back(victim.address(), kSilentCrowd);
  victim.await_control_steps(kStrangers);
  return strangers;
}

TEST(AttackOnDescriptors, SilentStrangersKeepNoConnectionOut) {
  Victim victim(crowded_config(), kDescriptors);
  Node client(rpc_test::rpc_config());
  std::vector<Stream> strangers = take_all_descriptors(victim);
  const auto come_again = [&] {
    for (Stream& each : strangers)
      if (each.is_over()) each = Stream(victim.address(), kSilentCrowd);
    return victim.handshakes() >= kDescriptors / 2;
  };
  // The victim drops a peer for want of a descriptor now and then, and one that does not run for
  // some milliseconds gives way. Either may be the client, which then tries again, a few times.
  int all_retries = 0;
  expect_soon(victim, client, "connects", [&](Latencies& latencies) {
    for (std::uint32_t i = 0; i < std::max(amount(50), 5u); ++i) {
      Connection c;
      int retries = 0;
      const auto begin = [&] {
        client.closed.clear();
        c = client.begin(victim.address());
      };
      latencies.measure(come_again, begin, [&] {
        if (client.closed.empty()) return c.ready();
        if (retries == kRetries) return true;
        ++retries;
        begin();
        return false;
      });
      ASSERT_TRUE(c.ready()) << "connect " << i << ", after " << retries << " retries";
      all_retries += retries;
      EXPECT_EQ(c.close(), Status::ok);
      ASSERT_TRUE(until({&client}, [&] { return !client.closed.empty(); }));
    }
  });
  std::printf("%d retries\n", all_retries);
  (void)victim.stop();
}

}  // namespace
}  // namespace attack_test
