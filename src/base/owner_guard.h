// Tells a call of the owning thread from calls of other threads, from inside poll() and in a forked
// child, with one comparison.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "base/thread_id.h"
#include "spinwire/status.h"

namespace spinwire::detail {

/// One per engine ever opened, never freed or reused: handles point to it and so recognise a closed
/// engine. It has a cache line of its own, in pages that a fork clears.
struct alignas(64) EngineSlot {
  /// The owning thread's id, plus one while it polls; 0 in a forked child.
  std::atomic<std::uintptr_t> word{0};
  /// The object behind the handles; null once it is closed. Only engine/ knows its type.
  void* target = nullptr;
};

}  // namespace spinwire::detail

namespace spinwire::base {

/// Owns the slot of an engine. The slot's word holds the owning thread and whether it polls.
class OwnerGuard {
 public:
  enum class ForkDetection : std::uint8_t {
    automatic,  ///< the kernel clears the page (MADV_WIPEONFORK), else a handler does
    handler,    ///< a pthread_atfork handler clears it, which a bare clone() does not run
  };

  /// Makes the calling thread the owner. Errors: no_memory, system. Set-up.
  static Result<OwnerGuard> create(ForkDetection detection = ForkDetection::automatic);

  OwnerGuard(OwnerGuard&& other) noexcept
      : slot_(std::exchange(other.slot_, nullptr)),
        registered_(std::exchange(other.registered_, false)) {}
  OwnerGuard& operator=(OwnerGuard&& other) noexcept {
    std::swap(slot_, other.slot_);
    std::swap(registered_, other.registered_);
    return *this;
  }
  ~OwnerGuard();

  /// Begins to poll. True if the owner calls and is not polling already; the caller must then call
  /// leave(). If false, diagnose() says why. Hot.
  [[nodiscard]] bool enter() noexcept {
    const std::uintptr_t id = thread_id();
    if (slot_->word.load(std::memory_order_relaxed) != id) [[unlikely]]
      return false;
    slot_->word.store(id | kPolling, std::memory_order_relaxed);
    return true;
  }
  /// Begins to poll after may_enter() was true. Hot.
  void enter_checked() noexcept {
    slot_->word.store(thread_id() | kPolling, std::memory_order_relaxed);
  }
  /// Whether enter() would succeed. Hot.
  [[nodiscard]] bool may_enter() const noexcept {
    return slot_->word.load(std::memory_order_relaxed) == thread_id();
  }
  /// Ends the poll that enter() began. In a child forked meanwhile the word stays 0. Hot.
  void leave() noexcept {
    slot_->word.store(slot_->word.load(std::memory_order_relaxed) & ~kPolling,
                      std::memory_order_relaxed);
  }
  /// Whether the owner calls, polling or not. If false, diagnose() says why. Hot.
  [[nodiscard]] bool owned() const noexcept { return standing() <= kPolling; }
  /// Whether the owner is between enter() and leave(). Meaningful on the owner's thread. Hot.
  [[nodiscard]] bool polling() const noexcept {
    return (slot_->word.load(std::memory_order_relaxed) & kPolling) != 0;
  }

  /// standing() reads owner and polling with one load: 0 for the owner, kPolling for the owner
  /// while it polls, else a larger value. Hot.
  static constexpr std::uintptr_t kPolling = 1;
  /// The word of an engine that is gone.
  static constexpr std::uintptr_t kEnded = ~std::uintptr_t{0};
  [[nodiscard]] static std::uintptr_t standing(const spinwire::detail::EngineSlot& slot) noexcept {
    return slot.word.load(std::memory_order_relaxed) ^ thread_id();
  }
  [[nodiscard]] static bool is_owned(const spinwire::detail::EngineSlot& slot) noexcept {
    return standing(slot) <= kPolling;
  }
  [[nodiscard]] std::uintptr_t standing() const noexcept { return standing(*slot_); }

  /// Why the calling thread may not poll: forked_child, wrong_thread, reentrant, not_connected (the
  /// engine is gone); ok if it may. Cold.
  [[nodiscard]] Status diagnose() const noexcept { return diagnose(*slot_); }
  [[nodiscard]] static Status diagnose(const spinwire::detail::EngineSlot& slot) noexcept;

  [[nodiscard]] spinwire::detail::EngineSlot& slot() const noexcept { return *slot_; }
  /// Marks the engine as closed: from now on its handles return not_connected.
  void end() const noexcept;

 private:
  OwnerGuard(spinwire::detail::EngineSlot* slot, bool registered) noexcept
      : slot_(slot), registered_(registered) {}

  spinwire::detail::EngineSlot* slot_ = nullptr;  ///< null when moved from
  bool registered_ = false;                       ///< in the fork handler's list
};

}  // namespace spinwire::base
