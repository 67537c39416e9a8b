// Prebuilt receive work requests: reposting one only links it. Hot.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace spinwire::verbs {

/// A chain of work requests to be posted together. Cannot be moved: it points into itself.
class ReceiveChain {
 public:
  ReceiveChain() noexcept = default;
  ReceiveChain(const ReceiveChain&) = delete;
  ReceiveChain& operator=(const ReceiveChain&) = delete;

  void add(ibv_recv_wr& wr) noexcept {
    *link_ = &wr;
    link_ = &wr.next;
    ++count_;
  }
  [[nodiscard]] std::uint32_t count() const noexcept { return count_; }
  /// The first of count() work requests; the last one's `next` is undefined.
  [[nodiscard]] const ibv_recv_wr* first() const noexcept { return first_; }
  /// Empties the chain and returns its first work request, linked to the others.
  ibv_recv_wr* take() noexcept {
    *link_ = nullptr;
    link_ = &first_;
    count_ = 0;
    return first_;
  }

  /// Posts all. Returns 0 or an errno value; refused work requests stay in the chain.
  int post(ibv_srq* srq) noexcept {
    return post_by(
        [srq](ibv_recv_wr* wr, ibv_recv_wr** bad) { return ibv_post_srq_recv(srq, wr, bad); });
  }
  int post(ibv_qp* qp) noexcept {
    return post_by([qp](ibv_recv_wr* wr, ibv_recv_wr** bad) { return ibv_post_recv(qp, wr, bad); });
  }

 private:
  template <typename Post>
  int post_by(Post call) noexcept {
    if (count_ == 0) return 0;
    *link_ = nullptr;
    ibv_recv_wr* bad = nullptr;
    const int error = call(first_, &bad);
    if (error != 0) [[unlikely]] {
      keep_from(bad);
      return error;
    }
    link_ = &first_;
    count_ = 0;
    return 0;
  }
  void keep_from(ibv_recv_wr* bad) noexcept {
    first_ = bad;
    link_ = &first_;
    count_ = 0;
    for (; bad != nullptr; bad = bad->next, ++count_) link_ = &bad->next;
  }

  ibv_recv_wr* first_ = nullptr;
  ibv_recv_wr** link_ = &first_;  ///< where the next one is linked
  std::uint32_t count_ = 0;
};

/// The receives of one engine: a prebuilt work request per slot, and the chain of slots to be
/// posted together. `Memory` is the type of the pointer that each slot holds for its user.
template <typename Memory>
class ReceiveSlots {
 public:
  ReceiveSlots() noexcept = default;
  ReceiveSlots(const ReceiveSlots&) = delete;
  ReceiveSlots& operator=(const ReceiveSlots&) = delete;

  /// Makes `count` slots; their receives carry wr_id(slot). May throw std::bad_alloc. Set-up.
  template <typename WrId>
  void make(std::uint32_t count, WrId wr_id) {
    slots_ = std::make_unique<Slot[]>(count);
    size_ = count;
    for (std::uint32_t i = 0; i < count; ++i) slots_[i].wr = {wr_id(i), nullptr, &slots_[i].sge, 1};
  }
  [[nodiscard]] std::uint32_t size() const noexcept { return size_; }  ///< slots made

  /// Sets the memory that receives the slot's next messages.
  void aim(std::uint32_t slot, void* address, std::uint32_t length, std::uint32_t lkey) noexcept {
    slots_[slot].sge = {reinterpret_cast<std::uint64_t>(address), length, lkey};
  }
  [[nodiscard]] std::byte* address(std::uint32_t slot) const noexcept {
    return reinterpret_cast<std::byte*>(slots_[slot].sge.addr);  // verbs carry it as an integer
  }
  [[nodiscard]] Memory*& memory(std::uint32_t slot) noexcept { return slots_[slot].memory; }
  /// The queue that the slot is reserved for, if there are several.
  [[nodiscard]] std::uint32_t& queue(std::uint32_t slot) noexcept { return slots_[slot].queue; }
  [[nodiscard]] std::uint32_t queue(std::uint32_t slot) const noexcept {
    return slots_[slot].queue;
  }
  [[nodiscard]] ibv_recv_wr& request(std::uint32_t slot) noexcept { return slots_[slot].wr; }
  /// Appends the slot to the chain.
  void add(std::uint32_t slot) noexcept { chain_.add(slots_[slot].wr); }
  [[nodiscard]] std::uint32_t count() const noexcept { return chain_.count(); }  ///< in the chain
  [[nodiscard]] ReceiveChain& chain() noexcept { return chain_; }

 private:
  struct alignas(64) Slot {
    ibv_recv_wr wr;
    ibv_sge sge;
    Memory* memory;
    std::uint32_t queue;
  };
  static_assert(sizeof(Slot) == 64);

  std::unique_ptr<Slot[]> slots_;
  ReceiveChain chain_;
  std::uint32_t size_ = 0;
};

}  // namespace spinwire::verbs
