// The engine's memory windows of type 2B. A window opens part of the slab to one queue pair. Work
// requests bind and invalidate it (window_requests.h), so a key costs no system call.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <vector>

#include "spinwire/buffer.h"
#include "spinwire/status.h"
#include "verbs/provider.h"

namespace spinwire::memory {

/// A pool of windows. take() returns the window free for longest, so that a key that a peer may
/// remember is reused as late as possible. One thread. Close the pool before the protection domain.
class WindowPool {
 public:
  static constexpr std::uint32_t kNone = 0xffff'ffff;

  /// Makes `count` windows. Errors: limit or system, with the number of windows that the device
  /// gave. May throw std::bad_alloc. Set-up.
  static Result<WindowPool> make(const verbs::Provider& provider, ibv_pd* pd, std::uint32_t count);

  WindowPool() noexcept = default;
  WindowPool(WindowPool&& other) noexcept;
  WindowPool& operator=(WindowPool&& other) noexcept;
  ~WindowPool() { close(); }

  /// Takes a free window, to be bound with next_key(); kNone if all are in use. Hot.
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

  /// Frees a window whose queue pair takes no more work requests; poll() makes a new one in its
  /// place. Takes over a reference to `block` and drops it when no access can be in progress.
  /// Returns whether that was at once. One control verb.
  bool discard(std::uint32_t index, detail::Block* block) noexcept;
  /// Makes a missing window, or retries to free one. At most one control verb; returns whether it
  /// used one. For the control step.
  bool poll() noexcept;
  [[nodiscard]] bool pending() const noexcept { return !held_up_.empty() || !to_replace_.empty(); }

  /// Frees all windows. A window that the device does not free keeps its block. A no-op when called
  /// again.
  void close() noexcept;

  [[nodiscard]] std::uint32_t size() const noexcept {
    return static_cast<std::uint32_t>(windows_.size());
  }
  [[nodiscard]] std::uint32_t free() const noexcept { return free_; }
  /// Windows discarded but not yet replaced.
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
  std::vector<HeldUp> held_up_;            ///< windows that a peer's access keeps from being freed
  std::vector<std::uint32_t> to_replace_;  ///< indices without a window
};

}  // namespace spinwire::memory
