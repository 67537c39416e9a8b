// Engines whose internals a test can reach.
#pragma once

#include <memory>
#include <utility>

#include "base/owner_guard.h"
#include "engine/engine_core.h"
#include "rpc/rpc_ends.h"
#include "softverbs/faults/fault_plan.h"

namespace rpc_test {

using spinwire::detail::EngineCore;

/// An engine without its handle, so that tests can make its device fail and send through its port.
struct Bare {
  /// With `device`, opens that device only.
  explicit Bare(const Config& c, const std::uint64_t* ticks = nullptr,
                const spinwire::verbs::Provider* device = nullptr) {
    core = std::make_unique<EngineCore>(c, ticks != nullptr ? Clock::manual(ticks) : Clock::real(),
                                        std::move(*spinwire::base::OwnerGuard::create()));
    const spinwire::verbs::Provider* const all[] = {device};
    const auto opened = device != nullptr ? core->open({.providers = all}) : core->open();
    EXPECT_TRUE(opened) << opened.error().message();
  }
  void set(const spinwire::softverbs::FaultPlan& plan) const {
    const auto set = spinwire::softverbs::set_faults(core->context.device->context(), plan);
    EXPECT_TRUE(set) << set.error().message();
  }
  void expect_clean() const {
    const auto good = core->audit();
    EXPECT_TRUE(good) << good.error().message();
  }
  std::unique_ptr<EngineCore> core;
};

}  // namespace rpc_test
