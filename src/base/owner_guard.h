// Tells a call of the owning thread from calls of other threads, calls from inside poll() and calls
// in a forked child, at the price of one compare.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "base/thread_id.h"
#include "spinwire/status.h"

namespace spinwire::base {

/// Holds one word on a page of its own that a fork empties: the owning thread's id, plus one while
/// it polls, and 0 in a forked child.
class OwnerGuard {
 public:
  enum class ForkDetection : std::uint8_t {
    automatic,  ///< wiped by the kernel (MADV_WIPEONFORK), else by a handler
    handler,    ///< wiped by a pthread_atfork handler, which a bare clone() does not run
  };

  /// The calling thread becomes the owner. Set-up. Errors: no_memory, system.
  static Result<OwnerGuard> create(ForkDetection detection = ForkDetection::automatic);

  OwnerGuard(OwnerGuard&& other) noexcept
      : word_(std::exchange(other.word_, nullptr)),
        registered_(std::exchange(other.registered_, false)) {}
  OwnerGuard& operator=(OwnerGuard&& other) noexcept {
    std::swap(word_, other.word_);
    std::swap(registered_, other.registered_);
    return *this;
  }
  ~OwnerGuard();

  /// Begins to poll: true, and the caller must leave(), if the owner calls and is not polling
  /// already. diagnose() tells why it is false. Hot.
  [[nodiscard]] bool enter() noexcept {
    const std::uintptr_t id = thread_id();
    if (word_->load(std::memory_order_relaxed) != id) [[unlikely]]
      return false;
    word_->store(id | kPolling, std::memory_order_relaxed);
    return true;
  }
  /// Whether enter() would succeed. Hot.
  [[nodiscard]] bool may_enter() const noexcept {
    return word_->load(std::memory_order_relaxed) == thread_id();
  }
  /// Ends what enter() began. In a child that was forked meanwhile it leaves the word empty. Hot.
  void leave() noexcept {
    word_->store(word_->load(std::memory_order_relaxed) & ~kPolling, std::memory_order_relaxed);
  }
  /// Whether the owner calls, polling or not. diagnose() tells why it is false. Hot.
  [[nodiscard]] bool owned() const noexcept { return standing() <= kPolling; }
  /// Whether the owner is between enter() and leave(). Meaningful on the owner's thread. Hot.
  [[nodiscard]] bool polling() const noexcept {
    return (word_->load(std::memory_order_relaxed) & kPolling) != 0;
  }

  /// What the two say, by one look at the word: 0 of the owner, kPolling if it polls, else more.
  /// Hot.
  static constexpr std::uintptr_t kPolling = 1;
  [[nodiscard]] std::uintptr_t standing() const noexcept {
    return word_->load(std::memory_order_relaxed) ^ thread_id();
  }

  /// Why the calling thread may not poll: forked_child, wrong_thread, reentrant; ok if it may.
  /// Cold.
  [[nodiscard]] Status diagnose() const noexcept;

 private:
  using Word = std::atomic<std::uintptr_t>;

  OwnerGuard(Word* word, bool registered) noexcept : word_(word), registered_(registered) {}

  Word* word_ = nullptr;     ///< at the start of a page of its own; null when moved from
  bool registered_ = false;  ///< the fork handler knows it
};

}  // namespace spinwire::base
