// How a call finds the engine and the agent behind its handle. Hot.
#pragma once

#include "engine/engine_core.h"

namespace spinwire::engine {

/// The engine of a handle, for a call of the engine's thread; else null.
inline detail::EngineCore* core_of(const detail::EngineSlot* slot) noexcept {
  return slot != nullptr && base::OwnerGuard::is_owned(*slot) ? slot->core : nullptr;
}

struct Located {
  detail::EngineCore* core;
  agent::Agent* agent;  ///< null: there is none, or the call must not come from here
};
inline Located locate(const detail::EngineSlot* slot, std::uint32_t index,
                      std::uint32_t generation) noexcept {
  if (slot == nullptr || !base::OwnerGuard::is_owned(*slot)) [[unlikely]]
    return {nullptr, nullptr};
  return {slot->core, slot->core->find(index, generation)};
}
/// Why there is no agent.
[[gnu::cold, gnu::noinline]] inline Status diagnose(const detail::EngineSlot* slot) noexcept {
  return slot != nullptr && !base::OwnerGuard::is_owned(*slot) ? base::OwnerGuard::diagnose(*slot)
                                                               : Status::not_connected;
}

inline bool deferred(const detail::EngineCore& core, Post post) noexcept {
  return post == Post::defer || (post == Post::automatic && core.guard.polling());
}

}  // namespace spinwire::engine
