// Prebuilt, linked work requests: a postlist is filled in place and only its last link is cut. Hot.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstdint>

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

/// Receive work requests waiting to be reposted together.
class ReceiveList {
 public:
  static constexpr std::uint32_t kCapacity = 64;

  ReceiveList() noexcept {
    for (std::uint32_t i = 0; i < kCapacity; ++i) {
      wrs_[i] = {0, i + 1 < kCapacity ? &wrs_[i + 1] : nullptr, &sges_[i], 1};
    }
  }
  ReceiveList(const ReceiveList&) = delete;
  ReceiveList& operator=(const ReceiveList&) = delete;

  /// There is room: a list is posted when it reaches the postlist's length, at most kCapacity.
  void add(std::uint64_t wr_id, void* address, std::uint32_t length, std::uint32_t lkey) noexcept {
    wrs_[count_].wr_id = wr_id;
    sges_[count_] = {reinterpret_cast<std::uint64_t>(address), length, lkey};
    ++count_;
  }
  [[nodiscard]] std::uint32_t count() const noexcept { return count_; }

  /// Posts all; 0, or an errno value and what was not taken is kept.
  int post(ibv_srq* srq) noexcept {
    if (count_ == 0) return 0;
    ibv_recv_wr* const link = wrs_[count_ - 1].next;
    wrs_[count_ - 1].next = nullptr;
    ibv_recv_wr* bad = nullptr;
    const int error = ibv_post_srq_recv(srq, wrs_.data(), &bad);
    wrs_[count_ - 1].next = link;
    if (error == 0) [[likely]] {
      count_ = 0;
      return 0;
    }
    keep_from(static_cast<std::uint32_t>(bad - wrs_.data()));
    return error;
  }

 private:
  void keep_from(std::uint32_t first) noexcept {
    for (std::uint32_t i = first; i < count_; ++i) {
      wrs_[i - first].wr_id = wrs_[i].wr_id;
      sges_[i - first] = sges_[i];
    }
    count_ -= first;
  }

  std::array<ibv_recv_wr, kCapacity> wrs_;
  std::array<ibv_sge, kCapacity> sges_{};
  std::uint32_t count_ = 0;
};

}  // namespace spinwire::verbs
