// How an operation's call finds its agent. Hot.
#pragma once

#include "engine/engine_core.h"

namespace spinwire::engine {

/// The connection's agent, for a call of the engine's thread; else null.
inline agent::Agent* locate(detail::EngineCore* core, std::uint32_t index,
                            std::uint32_t generation) noexcept {
  return core != nullptr && core->guard.owned() ? core->find(index, generation) : nullptr;
}
/// Why it is null.
[[gnu::cold, gnu::noinline]] inline Status diagnose(const detail::EngineCore* core) noexcept {
  return core != nullptr && !core->guard.owned() ? core->guard.diagnose() : Status::not_connected;
}

inline bool deferred(const detail::EngineCore& core, Post post) noexcept {
  return post == Post::defer || (post == Post::automatic && core.guard.polling());
}

}  // namespace spinwire::engine
