// The datagram queue pair of an engine's sessions: a ring of prebuilt sends, each with a line of
// its own for header and short payload, so that no datagram depends on what its session does next;
// and a ring of receives. Hot.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "agent/shared.h"
#include "spinwire/rpc.h"
#include "verbs/work_requests.h"
#include "wire/handshake.h"
#include "wire/rpc.h"

namespace spinwire::rpc {

using detail::Block;

inline constexpr std::size_t kLineBytes = 64;
static_assert(wire::kRpcHeaderBytes + kShortCall == kLineBytes);

/// In a receive's block: what the device puts in front of a datagram, and our header, end where a
/// cacheline begins, in which the payload does.
inline constexpr std::size_t kRouteBytes = 40;
inline constexpr std::size_t kReceiveOffset = 8;
inline constexpr std::size_t kPayloadOffset = kReceiveOffset + kRouteBytes + wire::kRpcHeaderBytes;
static_assert(kPayloadOffset == 64);
/// What then fits into a block of 4 KiB.
inline constexpr std::uint32_t kLongestDatagram = 4096 - kReceiveOffset - kRouteBytes;

/// Where a session's datagrams go.
struct Destination {
  ibv_ah* ah = nullptr;
  std::uint32_t qp_num = 0;
  std::uint32_t qkey = 0;
};

/// By what a session's datagrams are known: queue pair numbers are each device's own, so that the
/// address in front of the datagram counts as well. Of that, two words, as far as the masks say.
struct Origin {
  std::uint32_t qp_num = 0;
  std::uint16_t lid = 0;  ///< where there is no address in front
  std::uint8_t second_at = 0;
  std::array<std::uint64_t, 2> masks{};
  std::array<std::uint64_t, 2> words{};

  [[nodiscard]] bool is_of(const ibv_wc& wc, const std::byte* route) const noexcept {
    std::uint64_t first = 0, second = 0;
    std::memcpy(&first, route + kFirstAt, sizeof first);
    std::memcpy(&second, route + second_at, sizeof second);
    const bool same = ((first & masks[0]) ^ words[0]) == 0 && ((second & masks[1]) ^ words[1]) == 0;
    const bool there = (wc.wc_flags & IBV_WC_GRH) != 0 ? same : wc.slid == lid;
    return wc.src_qp == qp_num && there;
  }
  static constexpr std::size_t kFirstAt = 8;  ///< the source's GID, InfiniBand specification, 8.3
};
Origin origin_of(const wire::SessionEnd& peer) noexcept;

struct PortOptions {
  std::uint32_t send_depth = 0;  ///< a power of two
  std::uint32_t receive_depth = 0;
};

class Port {
 public:
  /// Errors: no_memory, system, limit (the receive pool has not enough blocks).
  static Result<std::unique_ptr<Port>> open(agent::Shared& s, const PortOptions& options);
  Port(const Port&) = delete;
  Port& operator=(const Port&) = delete;
  ~Port();

  [[nodiscard]] std::uint32_t qp_num() const noexcept { return qp_->qp_num; }
  [[nodiscard]] std::uint32_t qkey() const noexcept { return qkey_; }
  [[nodiscard]] std::uint32_t mtu() const noexcept { return mtu_; }

  // Sends: each in turn, as one datagram. Not while full().
  [[nodiscard]] bool full() const noexcept { return sent_ - done_ >= depth_; }
  /// Up to kShortCall bytes, which are copied.
  void send(const Destination& to, const wire::RpcHeader& header, const void* payload) noexcept {
    Entry& e = next(to);
    std::byte* const line = line_of(sent_);
    std::memcpy(line, &header, sizeof header);
    if (header.length != 0) std::memcpy(line + sizeof header, payload, header.length);
    e.sges[0].length = static_cast<std::uint32_t>(sizeof header) + header.length;
    e.wr.num_sge = 1;
    e.wr.send_flags = inline_;
    append(e);
  }
  /// Longer: sent from where it lies, with a reference to its block until the device is done.
  void send(const Destination& to, const wire::RpcHeader& header, Block* block,
            const std::byte* payload) noexcept {
    Entry& e = next(to);
    std::memcpy(line_of(sent_), &header, sizeof header);
    e.sges[0].length = static_cast<std::uint32_t>(sizeof header);
    e.sges[1] = {reinterpret_cast<std::uint64_t>(payload), header.length, block->lkey};
    e.wr.num_sge = 2;
    e.wr.send_flags = 0;
    detail::retain(block);
    e.held = block;
    holds_ = true;
    append(e);
  }
  /// Posts what was sent.
  void flush() noexcept {
    if (first_ != nullptr) post();
  }
  [[nodiscard]] bool unposted() const noexcept { return first_ != nullptr; }
  void on_sent(const ibv_wc& wc) noexcept;

  // Receives.
  [[nodiscard]] Block* block(std::uint32_t slot) noexcept { return receives_.memory(slot); }
  /// What a received datagram's header begins at.
  static std::byte* route(Block* block) noexcept { return block->payload + kReceiveOffset; }
  static std::byte* datagram(Block* block) noexcept {
    return block->payload + kPayloadOffset - wire::kRpcHeaderBytes;
  }
  /// The slot's receive is to be posted again, with another block if this one was kept.
  void give_back(std::uint32_t slot, bool kept) noexcept {
    if (kept) [[unlikely]]
      return replace(slot);
    receives_.add(slot);
    if (receives_.count() >= list_length_) post_receives();
  }
  /// Posts the receives that wait for others.
  void post_receives() noexcept;
  /// Work for the control step: blocks for receives that have none, a queue pair that has failed.
  void upkeep() noexcept;
  [[nodiscard]] std::uint32_t missing() const noexcept {
    return static_cast<std::uint32_t>(missing_.size());
  }
  // For audits.
  [[nodiscard]] const ibv_qp* queue_pair() const noexcept { return qp_; }
  /// Receives to be posted together with others.
  [[nodiscard]] std::uint32_t receives_waiting() const noexcept { return receives_.count(); }
  /// Blocks held.
  template <typename Visit>
  void visit_blocks(Visit&& visit) {
    visit(lines_block_);
    for (std::uint32_t i = 0; i < receives_.size(); ++i) visit(receives_.memory(i));
    for (std::uint32_t i = done_; i != sent_; ++i) visit(entries_[i & mask_].held);
  }

  std::uint64_t failures = 0;  ///< sends that the device refused or failed

 private:
  struct Entry {
    ibv_send_wr wr;
    ibv_sge sges[2];
    Block* held;
  };
  Port(agent::Shared& s, const PortOptions& options) noexcept;
  Result<void> make_sends();
  Result<void> make_receives(std::uint32_t depth);
  void post() noexcept;
  void take_back(const ibv_send_wr* bad) noexcept;
  void replace(std::uint32_t slot) noexcept;
  bool fill(std::uint32_t slot) noexcept;
  Entry& next(const Destination& to) noexcept {
    Entry& e = entries_[sent_ & mask_];
    e.wr.wr.ud.ah = to.ah;
    e.wr.wr.ud.remote_qpn = to.qp_num;
    e.wr.wr.ud.remote_qkey = to.qkey;
    return e;
  }
  std::byte* line_of(std::uint32_t sequence) noexcept {
    return lines_ + std::size_t{sequence & mask_} * kLineBytes;
  }
  void append(Entry& e) noexcept {
    ++sent_;
    // Some entry among any `depth_` in a row is signaled, so that a full ring empties again.
    if ((sent_ & signal_mask_) == 0) [[unlikely]]
      e.wr.send_flags |= IBV_SEND_SIGNALED;
    if (first_ == nullptr) {
      first_ = &e.wr;
    } else {
      last_->next = &e.wr;
    }
    last_ = &e.wr;
    if (++listed_ == list_length_) post();
  }

  ibv_qp* qp_ = nullptr;
  std::unique_ptr<Entry[]> entries_;
  std::byte* lines_ = nullptr;
  std::uint32_t sent_ = 0;  ///< taken so far, modulo 2^32
  std::uint32_t done_ = 0;  ///< of those the device is known to be done with
  std::uint32_t depth_;
  std::uint32_t mask_;
  std::uint32_t signal_mask_;
  std::uint32_t list_length_;
  std::uint32_t listed_ = 0;
  bool holds_ = false;   ///< something in the list holds a block
  unsigned inline_ = 0;  ///< the flag, if lines can be sent so
  ibv_send_wr* first_ = nullptr;
  ibv_send_wr* last_ = nullptr;
  verbs::ReceiveSlots<Block> receives_;
  // Cold.
  agent::Shared& shared_;
  Block* lines_block_ = nullptr;
  std::vector<std::uint32_t> missing_;  ///< slots without a block; has room for all
  std::uint32_t qkey_ = 0;
  std::uint32_t mtu_ = 0;
  bool failed_ = false;  ///< it sends nothing until upkeep() has restarted it
};

}  // namespace spinwire::rpc
