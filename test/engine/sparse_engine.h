// Opens engines whose pools have no pages until they are touched. Tests open thousands of engines
// and touch little of their pools; the kernel's work of making the other pages took more time than
// the tests themselves.
#pragma once

#include "engine/engine_core.h"
#include "spinwire/engine.h"

namespace engine_test {

/// Opens an engine as Engine::open() does. Its pools are sparse if the configuration asks for no
/// hugepages. Errors: the same.
inline spinwire::Result<spinwire::Engine> open_engine(
    const spinwire::Config& config, const spinwire::Clock& clock = spinwire::Clock::real()) {
  const bool sparse = config.memory.hugepages == spinwire::HugepagePolicy::off &&
                      config.memory.lock != spinwire::LockPolicy::require;
  return spinwire::detail::open_engine(config, clock, {.sparse = sparse});
}

}  // namespace engine_test
