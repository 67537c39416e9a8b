// The engine's memory windows of type 2B: keys to part of its slab that hold for one queue pair.
// Bound and invalidated by work requests, so that a key costs no system call.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <vector>

#include "spinwire/buffer.h"
#include "spinwire/status.h"
#include "verbs/provider.h"

namespace spinwire::memory {

/// All free windows, the one free longest first: a key that a peer may remember is used again as
/// late as can be. One thread. The pool must go, or close(), before the protection domain.
class WindowPool {
 public:
  static constexpr std::uint32_t kNone = 0xffff'ffff;

  /// Makes `count` windows. Set-up; may throw std::bad_alloc. Errors: limit, naming how many there
  /// were; system.
  static Result<WindowPool> make(const verbs::Provider& provider, ibv_pd* pd, std::uint32_t count);

  WindowPool() noexcept = default;
  WindowPool(WindowPool&& other) noexcept;
  WindowPool& operator=(WindowPool&& other) noexcept;
  ~WindowPool() { close(); }

  /// A window, to be bound under the key next_key() answers; kNone if all are in use. Hot.
  [[nodiscard]] std::uint32_t take() noexcept {
    if (free_ == 0) [[unlikely]]
      return kNone;
    const std::uint32_t index = ring_[first_];
    first_ = after(first_);
    --free_;
    return index;
  }
  /// It was never bound, or its key is invalid at the device. Hot.
  void give(std::uint32_t index) noexcept {
    std::uint32_t at = first_ + free_;
    if (at >= ring_.size()) at -= static_cast<std::uint32_t>(ring_.size());
    ring_[at] = index;
    ++free_;
  }
  [[nodiscard]] ibv_mw* at(std::uint32_t index) noexcept { return windows_[index]; }
  /// The key for the next binding: the device's part, and a new consumer's part. Hot.
  [[nodiscard]] std::uint32_t next_key(std::uint32_t index) noexcept {
    ibv_mw& window = *windows_[index];
    return window.rkey = ibv_inc_rkey(window.rkey);
  }

  /// The queue pair that it may be bound to takes no work requests any more: the window goes, and a
  /// new one takes its place by and by. Takes over a reference to `block`, until no peer can be in
  /// the midst of an access to it, and answers whether that was at once. One control verb.
  bool discard(std::uint32_t index, detail::Block* block) noexcept;
  /// Goes on with that; at most one control verb. Answers whether there was any. For the control
  /// step.
  bool poll() noexcept;
  [[nodiscard]] bool pending() const noexcept { return !leaving_.empty() || !missing_.empty(); }

  /// No verb follows. What the device does not give up is left to it, with its block. A no-op when
  /// called again.
  void close() noexcept;

  [[nodiscard]] std::uint32_t size() const noexcept {
    return static_cast<std::uint32_t>(windows_.size());
  }
  [[nodiscard]] std::uint32_t free() const noexcept { return free_; }
  /// Those discarded, until a new one is there.
  [[nodiscard]] std::uint32_t lacking() const noexcept {
    return static_cast<std::uint32_t>(leaving_.size() + missing_.size());
  }

 private:
  struct Leaving {
    std::uint32_t index;
    detail::Block* block;
  };

  WindowPool(const verbs::Provider& provider, ibv_pd* pd) noexcept
      : provider_(&provider), pd_(pd) {}
  [[nodiscard]] std::uint32_t after(std::uint32_t i) const noexcept {
    return i + 1 < ring_.size() ? i + 1 : 0;
  }
  bool deallocate(std::uint32_t index) noexcept;

  const verbs::Provider* provider_ = nullptr;
  ibv_pd* pd_ = nullptr;
  std::vector<ibv_mw*> windows_;     ///< null: being replaced
  std::vector<std::uint32_t> ring_;  ///< of the free ones, in the order of their use
  std::uint32_t first_ = 0;
  std::uint32_t free_ = 0;
  std::vector<Leaving> leaving_;        ///< a peer was in the midst of an access
  std::vector<std::uint32_t> missing_;  ///< to be made anew
};

}  // namespace spinwire::memory
