#include "memory/window_pool.h"

#include <fmt/core.h>

#include <cerrno>
#include <string>
#include <utility>

#include "base/error.h"

namespace spinwire::memory {

Result<WindowPool> WindowPool::make(const verbs::Provider& provider, ibv_pd* pd,
                                    std::uint32_t count) {
  WindowPool pool(provider, pd);
  // Later calls must not allocate.
  pool.windows_.reserve(count);
  pool.ring_.reserve(count);
  pool.held_up_.reserve(count);
  pool.to_replace_.reserve(count);
  for (std::uint32_t i = 0; i < count; ++i) {
    errno = 0;
    ibv_mw* const window = provider.alloc_mw(pd, IBV_MW_TYPE_2);
    if (window == nullptr) {
      const int error = errno;
      return base::fail_errno(
          error == ENOMEM ? Status::limit : Status::system,
          base::format("make {} memory windows", count), "ibv_alloc_mw", error,
          base::format("the device gave {}: set memory.windows to that, or to 0", i));
    }
    pool.windows_.push_back(window);
    pool.ring_.push_back(i);
  }
  pool.free_ = count;
  return pool;
}

WindowPool::WindowPool(WindowPool&& other) noexcept { *this = std::move(other); }

WindowPool& WindowPool::operator=(WindowPool&& other) noexcept {
  std::swap(provider_, other.provider_);
  std::swap(pd_, other.pd_);
  std::swap(windows_, other.windows_);
  std::swap(ring_, other.ring_);
  std::swap(first_, other.first_);
  std::swap(free_, other.free_);
  std::swap(held_up_, other.held_up_);
  std::swap(to_replace_, other.to_replace_);
  return *this;
}

bool WindowPool::deallocate(std::uint32_t index) noexcept {
  if (provider_->dealloc_mw(windows_[index]) != 0) return false;
  windows_[index] = nullptr;
  return true;
}

bool WindowPool::discard(std::uint32_t index, detail::Block* block) noexcept {
  if (!deallocate(index)) {
    held_up_.push_back({index, block});
    return false;
  }
  to_replace_.push_back(index);
  detail::release(block);
  return true;
}

bool WindowPool::poll() noexcept {
  if (!to_replace_.empty()) {
    const std::uint32_t index = to_replace_.back();
    ibv_mw* const window = provider_->alloc_mw(pd_, IBV_MW_TYPE_2);
    if (window == nullptr) return true;  // the next control step tries again
    to_replace_.pop_back();
    windows_[index] = window;
    give(index);
    return true;
  }
  if (held_up_.empty()) return false;
  const HeldUp oldest = held_up_.front();
  held_up_.erase(held_up_.begin());
  (void)discard(oldest.index, oldest.block);
  return true;
}

void WindowPool::close() noexcept {
  for (const HeldUp& each : std::exchange(held_up_, {})) {
    if (deallocate(each.index)) detail::release(each.block);
  }
  for (std::uint32_t i = 0; i < windows_.size(); ++i) {
    if (windows_[i] != nullptr) (void)deallocate(i);
  }
  windows_.clear();
  to_replace_.clear();
  free_ = 0;
}

}  // namespace spinwire::memory
