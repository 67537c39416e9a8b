// Strangers use up the descriptors of a process that allows more handshakes than it can open files.
#include <gtest/gtest.h>

#include <vector>

#include "attack/victim.h"

namespace attack_test {
namespace {

constexpr const char* kSilentCrowd = "127.0.0.2:0";  // another source than the honest client's
constexpr rlim_t kDescriptors = 32;
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
  const std::vector<Stream> strangers = take_all_descriptors(victim);
  for (int i = 0; i < 8; ++i) {
    client.closed.clear();
    const Connection c = client.begin(victim.address());
    ASSERT_TRUE(until({&client}, [&] { return c.ready() || !client.closed.empty(); }));
    ASSERT_TRUE(c.ready()) << client.closed.back().message();
  }
  (void)victim.stop();
}

}  // namespace
}  // namespace attack_test
