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
  void finish() {
    EXPECT_EQ(server.engine.revoke(region), Status::ok);
    memory.reset();
    Pair::finish();
  }
  Buffer memory;
  RemoteRegion region;
};

}  // namespace engine_test
