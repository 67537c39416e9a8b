// Prebuilt, linked work requests: a postlist is filled in place and only its last link is cut. Hot.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstdint>
#include <memory>

namespace spinwire::verbs {

/// Send work requests of one engine, filled anew for each doorbell.
class SendList {
 public:
  static constexpr std::uint32_t kCapacity = 32;

  SendList() noexcept {
    for (std::uint32_t i = 0; i < kCapacity; ++i) {
      wrs_[i] = {};
      wrs_[i].sg_list = sges_[i].data();
      wrs_[i].next = i + 1 < kCapacity ? &wrs_[i + 1] : nullptr;
    }
  }
  SendList(const SendList&) = delete;
  SendList& operator=(const SendList&) = delete;

  [[nodiscard]] ibv_send_wr& wr(std::uint32_t i) noexcept { return wrs_[i]; }
  [[nodiscard]] ibv_sge* sges(std::uint32_t i) noexcept { return sges_[i].data(); }

  /// Posts the first `count` with one doorbell. Answers 0 or an errno value; `posted` then tells
  /// how many the device took.
  int post(ibv_qp* qp, std::uint32_t count, std::uint32_t& posted) noexcept {
    ibv_send_wr* const link = wrs_[count - 1].next;
    wrs_[count - 1].next = nullptr;
    ibv_send_wr* bad = nullptr;
    const int error = ibv_post_send(qp, wrs_.data(), &bad);
    wrs_[count - 1].next = link;
    posted = error == 0 ? count : static_cast<std::uint32_t>(bad - wrs_.data());
    return error;
  }

 private:
  std::array<ibv_send_wr, kCapacity> wrs_;
  std::array<std::array<ibv_sge, 2>, kCapacity> sges_{};
};

/// The receives of one engine, a prebuilt work request per slot, and the chain of those waiting to
/// be posted again together.
class ReceiveSlots {
 public:
  ReceiveSlots() noexcept = default;
  ReceiveSlots(const ReceiveSlots&) = delete;
  ReceiveSlots& operator=(const ReceiveSlots&) = delete;

  /// Makes `count` slots, whose receives carry wr_id(slot). May throw std::bad_alloc. Set-up.
  template <typename WrId>
  void make(std::uint32_t count, WrId wr_id) {
    slots_ = std::make_unique<Slot[]>(count);
    for (std::uint32_t i = 0; i < count; ++i) slots_[i].wr = {wr_id(i), nullptr, &slots_[i].sge, 1};
  }

  /// Where the slot's next messages go.
  void aim(std::uint32_t slot, void* address, std::uint32_t length, std::uint32_t lkey) noexcept {
    slots_[slot].sge = {reinterpret_cast<std::uint64_t>(address), length, lkey};
  }
  /// Appends the slot to the chain.
  void add(std::uint32_t slot) noexcept {
    ibv_recv_wr* wr = &slots_[slot].wr;
    *link_ = wr;
    link_ = &wr->next;
    ++count_;
  }
  [[nodiscard]] std::uint32_t count() const noexcept { return count_; }

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
};

}  // namespace spinwire::verbs
