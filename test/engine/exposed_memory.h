// A connection, and memory of the server that the client can access.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/harness.h"

namespace engine_test {

struct ExposedMemory : Pair {
  explicit ExposedMemory(const Config& config = small_config(),
                         const std::uint64_t* ticks = nullptr)
      : Pair(config, ticks) {}
  void expose(std::size_t bytes, Access access) {
    memory = server.buffer(bytes, Pool::lease);
    region = server.engine.expose(memory.slice(), access).value();
  }
  /// Sends messages until the client has credit for more than eight, and all have ended.
  void warm_up() {
    const Buffer one = client.filled(1, 1);
    EXPECT_TRUE(until([&] {
      (void)ends.client.send(one);
      return ends.client.stats().send_credits > 8;
    }));
    EXPECT_TRUE(until([&] { return ends.client.stats().outstanding == 0; }));
    settle();
  }
  void finish() {
    EXPECT_EQ(server.engine.revoke(region), Status::ok);
    memory.reset();
    Pair::finish();
  }
  Buffer memory;
  RemoteRegion region;
};

}  // namespace engine_test
