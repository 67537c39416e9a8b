// Opens engines whose pools have no pages until they are touched. Tests open thousands of engines
// and touch little of their pools; the kernel's work of making the other pages took more time than
// the tests themselves.
#pragma once

#include <memory>
#include <utility>

#include "base/internals.h"
#include "base/owner_guard.h"
#include "engine/engine_core.h"
#include "spinwire/engine.h"

namespace engine_test {

/// As Engine::open(), with sparse pools where the configuration asks for no hugepages. Errors: the
/// same.
inline spinwire::Result<spinwire::Engine> open_engine(
    const spinwire::Config& config, const spinwire::Clock& clock = spinwire::Clock::real()) {
  using spinwire::detail::EngineCore;
  const bool sparse = config.memory.hugepages == spinwire::HugepagePolicy::off &&
                      config.memory.lock != spinwire::LockPolicy::require;
  if (!sparse) return spinwire::Engine::open(config, clock);
  if (auto good = config.check(); !good) return tl::unexpected(good.error());
  auto guard = spinwire::base::OwnerGuard::create();
  if (!guard) return tl::unexpected(guard.error());
  auto core = std::make_unique<EngineCore>(config, clock, std::move(*guard));
  if (auto opened = core->open({.sparse = true}); !opened) return tl::unexpected(opened.error());
  return spinwire::detail::make<spinwire::Engine>(std::move(core));
}

}  // namespace engine_test
