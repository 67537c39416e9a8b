// Tells a call of the owning thread from calls of other threads, calls from inside poll() and calls
// in a forked child, at the price of one compare.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "base/thread_id.h"
#include "spinwire/status.h"

namespace spinwire::detail {

class EngineCore;

/// One per engine ever opened, never freed and never used again: handles point to it, so that they
/// can tell an engine that is gone. A cacheline of its own, in pages that a fork empties.
struct alignas(64) EngineSlot {
  /// The owning thread's id, plus one while it polls; 0 in a forked child.
  std::atomic<std::uintptr_t> word{0};
  EngineCore* core = nullptr;
};

}  // namespace spinwire::detail

namespace spinwire::base {

/// Owns the slot of an engine: its word says whose the engine is and whether it polls.
class OwnerGuard {
 public:
  enum class ForkDetection : std::uint8_t {
    automatic,  ///< wiped by the kernel (MADV_WIPEONFORK), else by a handler
    handler,    ///< wiped by a pthread_atfork handler, which a bare clone() does not run
  };

  /// The calling thread becomes the owner. Set-up. Errors: no_memory, system.
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

  /// Begins to poll: true, and the caller must leave(), if the owner calls and is not polling
  /// already. diagnose() tells why it is false. Hot.
  [[nodiscard]] bool enter() noexcept {
    const std::uintptr_t id = thread_id();
    if (slot_->word.load(std::memory_order_relaxed) != id) [[unlikely]]
      return false;
    slot_->word.store(id | kPolling, std::memory_order_relaxed);
    return true;
  }
  /// Whether enter() would succeed. Hot.
  [[nodiscard]] bool may_enter() const noexcept {
    return slot_->word.load(std::memory_order_relaxed) == thread_id();
  }
  /// Ends what enter() began. In a child that was forked meanwhile it leaves the word empty. Hot.
  void leave() noexcept {
    slot_->word.store(slot_->word.load(std::memory_order_relaxed) & ~kPolling,
                      std::memory_order_relaxed);
  }
  /// Whether the owner calls, polling or not. diagnose() tells why it is false. Hot.
  [[nodiscard]] bool owned() const noexcept { return standing() <= kPolling; }
  /// Whether the owner is between enter() and leave(). Meaningful on the owner's thread. Hot.
  [[nodiscard]] bool polling() const noexcept {
    return (slot_->word.load(std::memory_order_relaxed) & kPolling) != 0;
  }

  /// What the two say, by one look at the word: 0 of the owner, kPolling if it polls, else more.
  /// Hot.
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
  /// The engine goes: from here on its handles answer not_connected.
  void end() const noexcept;

 private:
  OwnerGuard(spinwire::detail::EngineSlot* slot, bool registered) noexcept
      : slot_(slot), registered_(registered) {}

  spinwire::detail::EngineSlot* slot_ = nullptr;  ///< null when moved from
  bool registered_ = false;                       ///< the fork handler knows it
};

/// What an empty Engine has in the place of its slot.
inline spinwire::detail::EngineSlot no_engine{OwnerGuard::kEnded, nullptr};

}  // namespace spinwire::base
