// Prebuilt receive work requests: posting one again only links it. Hot.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>

namespace spinwire::verbs {

/// The receives of one engine, a prebuilt work request per slot, and the chain of those waiting to
/// be posted again together. `Memory` is what the user of a slot keeps with it.
template <typename Memory>
class ReceiveSlots {
 public:
  ReceiveSlots() noexcept = default;
  ReceiveSlots(const ReceiveSlots&) = delete;
  ReceiveSlots& operator=(const ReceiveSlots&) = delete;

  /// Makes `count` slots, whose receives carry wr_id(slot). May throw std::bad_alloc. Set-up.
  template <typename WrId>
  void make(std::uint32_t count, WrId wr_id) {
    slots_ = std::make_unique<Slot[]>(count);
    size_ = count;
    for (std::uint32_t i = 0; i < count; ++i) slots_[i].wr = {wr_id(i), nullptr, &slots_[i].sge, 1};
  }
  [[nodiscard]] std::uint32_t size() const noexcept { return size_; }  ///< slots made

  /// Where the slot's next messages go.
  void aim(std::uint32_t slot, void* address, std::uint32_t length, std::uint32_t lkey) noexcept {
    slots_[slot].sge = {reinterpret_cast<std::uint64_t>(address), length, lkey};
  }
  [[nodiscard]] Memory*& memory(std::uint32_t slot) noexcept { return slots_[slot].memory; }
  /// Appends the slot to the chain.
  void add(std::uint32_t slot) noexcept {
    ibv_recv_wr* wr = &slots_[slot].wr;
    *link_ = wr;
    link_ = &wr->next;
    ++count_;
  }
  [[nodiscard]] std::uint32_t count() const noexcept { return count_; }  ///< in the chain

  /// Posts the chain; 0, or an errno value and what was not taken stays chained.
  int post(ibv_srq* srq) noexcept {
    if (count_ == 0) return 0;
    *link_ = nullptr;
    ibv_recv_wr* bad = nullptr;
    const int error = ibv_post_srq_recv(srq, first_, &bad);
    if (error != 0) [[unlikely]] {
      keep_from(bad);
      return error;
    }
    link_ = &first_;
    count_ = 0;
    return 0;
  }

 private:
  struct alignas(64) Slot {
    ibv_recv_wr wr;
    ibv_sge sge;
    Memory* memory;
  };

  void keep_from(ibv_recv_wr* bad) noexcept {
    first_ = bad;
    link_ = &first_;
    count_ = 0;
    for (; bad != nullptr; bad = bad->next, ++count_) link_ = &bad->next;
  }

  std::unique_ptr<Slot[]> slots_;
  ibv_recv_wr* first_ = nullptr;
  ibv_recv_wr** link_ = &first_;  ///< where the next one is hung up
  std::uint32_t count_ = 0;
  std::uint32_t size_ = 0;
};

}  // namespace spinwire::verbs
