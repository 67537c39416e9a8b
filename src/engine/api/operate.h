// Finds the engine and the agent behind a handle. Hot.
#pragma once

#include <array>
#include <string_view>
#include <utility>

#include "agent/connecting.h"
#include "base/error.h"
#include "engine/engine_core.h"

namespace spinwire::engine {

/// The engine of a handle; null if the call is not on the engine's thread.
inline detail::EngineCore* checked_core_of(const detail::EngineSlot* slot) noexcept {
  return slot != nullptr && base::OwnerGuard::is_owned(*slot) ? detail::core_at(slot) : nullptr;
}

struct Located {
  detail::EngineCore* core;
  agent::Agent* agent;  ///< null: there is no agent, or the call is not allowed here
};
inline Located locate(const detail::EngineSlot* slot, std::uint32_t index,
                      std::uint32_t generation) noexcept {
  if (slot == nullptr || !base::OwnerGuard::is_owned(*slot)) [[unlikely]]
    return {nullptr, nullptr};
  detail::EngineCore* const core = detail::core_at(slot);
  return {core, core->find(index, generation)};
}
/// Why there is no agent.
[[gnu::cold, gnu::noinline]] inline Status diagnose(const detail::EngineSlot* slot) noexcept {
  return slot != nullptr && !base::OwnerGuard::is_owned(*slot) ? base::OwnerGuard::diagnose(*slot)
                                                               : Status::not_connected;
}

/// Answers `run(core, agent)` for the connection of a handle, or why there is none.
template <typename Run>
[[gnu::always_inline]] inline Status with_agent(const detail::EngineSlot* slot, std::uint32_t index,
                                                std::uint32_t generation, Run&& run) noexcept {
  const auto [core, a] = locate(slot, index, generation);
  if (a == nullptr) [[unlikely]]
    return diagnose(slot);
  return run(*core, *a);
}

/// Answers `run(core, agent, defer)` for an operation, like with_agent(). `defer` is the meaning of
/// `post` inside or outside of poll().
template <typename Run>
[[gnu::always_inline]] inline Status with_operation(const detail::EngineSlot* slot,
                                                    std::uint32_t index, std::uint32_t generation,
                                                    Post post, Run&& run) noexcept {
  if (slot == nullptr) [[unlikely]]
    return Status::not_connected;
  const std::uintptr_t standing = base::OwnerGuard::standing(*slot);  // one load serves both checks
  if (standing > base::OwnerGuard::kPolling) [[unlikely]]
    return diagnose(slot);
  detail::EngineCore& core = *detail::core_at(slot);
  agent::Agent* const a = core.find(index, generation);
  if (a == nullptr) [[unlikely]]
    return Status::not_connected;
  return run(core, *a, post == Post::defer || (post == Post::automatic && standing != 0));
}

/// Runs a set-up call on the engine's thread. Its exceptions become errors.
template <typename Run>
auto set_up(const detail::EngineSlot& slot, const char* asked, Run&& run) -> decltype(run()) {
  if (!base::OwnerGuard::is_owned(slot)) return misused(base::OwnerGuard::diagnose(slot), asked);
  return base::no_throw(asked, std::forward<Run>(run));
}

/// Answers `run(core, agent)` for a set-up call on the connection of a handle. Errors: those of
/// locate(), and those of `run`.
template <typename Run>
auto set_up_agent(const detail::EngineSlot* slot, std::uint32_t index, std::uint32_t generation,
                  const char* asked, Run&& run) {
  return base::no_throw(asked, [&] {
    return detail::locate(slot, index, generation, asked).and_then([&](agent::Agent* a) {
      return run(*detail::core_at(slot), *a);
    });
  });
}

/// The name of an enumerator.
template <typename E, std::size_t N>
std::string_view name_of(const std::array<std::string_view, N>& names, E value) noexcept {
  const auto i = static_cast<std::size_t>(value);
  return i < N ? names[i] : "unknown";
}

/// Whether an end may close with this goodbye.
inline bool is_valid(const Goodbye& goodbye) noexcept {
  if (goodbye.reason == GoodbyeReason::closed) return goodbye.retry_after.count() == 0;
  return goodbye.invites_back() && goodbye.retry_after.count() >= 0 &&
         goodbye.retry_after <= kMaxRetryAfter;
}

inline bool deferred(const detail::EngineCore& core, Post post) noexcept {
  return post == Post::defer || (post == Post::automatic && core.guard.polling());
}

}  // namespace spinwire::engine
