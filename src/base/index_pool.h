// Objects in a fixed array, named by index and generation. wr_ids and handles carry both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>

#include "base/check.h"
#include "base/large_memory.h"

namespace spinwire::base {

/// `capacity` objects of type T, made at construction and never again; acquire and release only
/// hand them out, so resetting an object is its user's business.
/// Each slot has a generation, never 0, that changes at release: (index, generation) names one use
/// of a slot and cannot be mistaken for a later one until 2^32 - 1 releases of it. The slot
/// released last, whose memory is in the cache, is used first. One thread. All calls but the
/// constructor are hot: O(1), no allocation.
template <typename T>
class IndexPool {
 public:
  /// acquire()'s result when every slot is in use.
  static constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();

  /// `capacity` is at most 2^32 - 3. May throw std::bad_alloc. Set-up.
  explicit IndexPool(std::uint32_t capacity)
      : objects_(capacity),
        slots_(std::make_unique<Slot[]>(capacity)),
        capacity_(capacity),
        free_(capacity == 0 ? kEnd : 0) {
    SPINWIRE_CHECK(capacity < kEnd, "the last indices have other meanings");
    for (std::uint32_t i = 0; i < capacity; ++i) {
      slots_[i].next_free = i + 1 == capacity ? kEnd : i + 1;
    }
  }
  IndexPool(const IndexPool&) = delete;
  IndexPool& operator=(const IndexPool&) = delete;

  /// Takes a free slot; kNone when all are in use.
  [[nodiscard]] std::uint32_t acquire() noexcept {
    const std::uint32_t index = free_;
    if (index == kEnd) [[unlikely]]
      return kNone;
    free_ = slots_[index].next_free;
    slots_[index].next_free = kUsed;
    ++size_;
    return index;
  }

  /// Frees a slot in use and ends its generation.
  void release(std::uint32_t index) noexcept {
    SPINWIRE_CHECK(index < capacity_ && slots_[index].next_free == kUsed,
                   "a slot is released once per use");
    Slot& slot = slots_[index];
    if (++slot.generation == 0) slot.generation = 1;
    slot.next_free = free_;
    free_ = index;
    --size_;
  }

  /// The object of this use of a slot; null if the use has ended or never began. Accepts any
  /// values, such as those from a peer.
  [[nodiscard]] T* find(std::uint32_t index, std::uint32_t generation) noexcept {
    return lives(index, generation) ? &objects_[index] : nullptr;
  }
  [[nodiscard]] const T* find(std::uint32_t index, std::uint32_t generation) const noexcept {
    return lives(index, generation) ? &objects_[index] : nullptr;
  }

  /// The object of a slot, in use or not. `index` < capacity() is not checked.
  [[nodiscard]] T& at(std::uint32_t index) noexcept { return objects_[index]; }
  [[nodiscard]] const T& at(std::uint32_t index) const noexcept { return objects_[index]; }
  /// The slot's generation, or the generation of its next use if the slot is free. `index` is not
  /// checked.
  [[nodiscard]] std::uint32_t generation(std::uint32_t index) const noexcept {
    return slots_[index].generation;
  }
  [[nodiscard]] bool in_use(std::uint32_t index) const noexcept {
    return index < capacity_ && slots_[index].next_free == kUsed;
  }
  /// The slot of an object of this pool.
  [[nodiscard]] std::uint32_t index_of(const T& object) const noexcept {
    return static_cast<std::uint32_t>(&object - objects_.begin());
  }

  /// Visits the objects in use, in the order of their slots. The loop's body may acquire and
  /// release.
  template <typename Pool, typename Object>
  class Iterator {
   public:
    Iterator(Pool& pool, std::uint32_t index) noexcept : pool_(&pool), index_(index) { skip(); }
    Object& operator*() const noexcept { return pool_->at(index_); }
    Iterator& operator++() noexcept {
      ++index_;
      skip();
      return *this;
    }
    bool operator==(const Iterator& other) const noexcept { return index_ == other.index_; }

   private:
    void skip() noexcept {
      while (index_ < pool_->capacity() && !pool_->in_use(index_)) ++index_;
    }
    Pool* pool_;
    std::uint32_t index_;
  };
  [[nodiscard]] auto begin() noexcept { return Iterator<IndexPool, T>(*this, 0); }
  [[nodiscard]] auto end() noexcept { return Iterator<IndexPool, T>(*this, capacity_); }
  [[nodiscard]] auto begin() const noexcept { return Iterator<const IndexPool, const T>(*this, 0); }
  [[nodiscard]] auto end() const noexcept {
    return Iterator<const IndexPool, const T>(*this, capacity_);
  }

  [[nodiscard]] std::uint32_t size() const noexcept { return size_; }  ///< slots in use
  [[nodiscard]] std::uint32_t capacity() const noexcept { return capacity_; }
  [[nodiscard]] bool full() const noexcept { return free_ == kEnd; }

 private:
  static constexpr std::uint32_t kUsed = kNone;
  static constexpr std::uint32_t kEnd = kNone - 1;

  struct Slot {
    std::uint32_t generation = 1;
    std::uint32_t next_free = kEnd;  ///< kUsed while in use
  };

  [[nodiscard]] bool lives(std::uint32_t index, std::uint32_t generation) const noexcept {
    if (index >= capacity_) [[unlikely]]
      return false;
    const Slot& slot = slots_[index];
    return slot.generation == generation && slot.next_free == kUsed;
  }

  LargeArray<T> objects_;
  std::unique_ptr<Slot[]> slots_;
  std::uint32_t capacity_ = 0;
  std::uint32_t size_ = 0;
  std::uint32_t free_ = kEnd;
};

}  // namespace spinwire::base
