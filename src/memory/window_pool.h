// The engine's memory windows of type 2B. A window opens part of the slab to one queue pair. It is
// bound and invalidated by work requests (remote_key.h), so a key costs no system call.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <vector>

#include "spinwire/buffer.h"
#include "spinwire/status.h"
#include "verbs/provider.h"

namespace spinwire::memory {

/// A pool of windows. The window that has been free longest is used first, so a key that a peer may
/// remember is used again as late as possible. One thread. The pool must be closed before the
/// protection domain.
class WindowPool {
 public:
  static constexpr std::uint32_t kNone = 0xffff'ffff;

  /// Makes `count` windows. Set-up; may throw std::bad_alloc. Errors: limit, with the number of
  /// windows that the device gave; system.
  static Result<WindowPool> make(const verbs::Provider& provider, ibv_pd* pd, std::uint32_t count);

  WindowPool() noexcept = default;
  WindowPool(WindowPool&& other) noexcept;
  WindowPool& operator=(WindowPool&& other) noexcept;
  ~WindowPool() { close(); }

  /// Takes a free window, to be bound under next_key(); kNone if all are in use. Hot.
  [[nodiscard]] std::uint32_t take() noexcept {
    if (free_ == 0) [[unlikely]]
      return kNone;
    const std::uint32_t index = ring_[first_];
    first_ = after(first_);
    --free_;
    return index;
  }
  /// Frees a window that was never bound, or whose key is invalid at the device. Hot.
  void give(std::uint32_t index) noexcept {
    std::uint32_t at = first_ + free_;
    if (at >= ring_.size()) at -= static_cast<std::uint32_t>(ring_.size());
    ring_[at] = index;
    ++free_;
  }
  [[nodiscard]] ibv_mw* at(std::uint32_t index) noexcept { return windows_[index]; }
  /// The key for the next binding. Hot.
  [[nodiscard]] std::uint32_t next_key(std::uint32_t index) noexcept {
    ibv_mw& window = *windows_[index];
    return window.rkey = ibv_inc_rkey(window.rkey);
  }

  /// Frees a window whose queue pair takes no work requests any more; poll() makes a new one in its
  /// place. Takes over a reference to `block` and drops it when no access can be under way. Returns
  /// whether that was at once. One control verb.
  bool discard(std::uint32_t index, detail::Block* block) noexcept;
  /// Makes a missing window, or tries again to free one; at most one control verb. Returns whether
  /// it used one. For the control step.
  bool poll() noexcept;
  [[nodiscard]] bool pending() const noexcept { return !held_up_.empty() || !to_replace_.empty(); }

  /// Frees all windows. A window that the device does not free keeps its block. Does nothing when
  /// called again.
  void close() noexcept;

  [[nodiscard]] std::uint32_t size() const noexcept {
    return static_cast<std::uint32_t>(windows_.size());
  }
  [[nodiscard]] std::uint32_t free() const noexcept { return free_; }
  /// Windows that were discarded and have not been replaced.
  [[nodiscard]] std::uint32_t replacing() const noexcept {
    return static_cast<std::uint32_t>(held_up_.size() + to_replace_.size());
  }

 private:
  struct HeldUp {
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
  std::vector<ibv_mw*> windows_;     ///< null while being replaced
  std::vector<std::uint32_t> ring_;  ///< the free windows in the order of use
  std::uint32_t first_ = 0;
  std::uint32_t free_ = 0;
  std::vector<HeldUp> held_up_;            ///< a peer's access delays freeing them
  std::vector<std::uint32_t> to_replace_;  ///< indices without a window
};

}  // namespace spinwire::memory
