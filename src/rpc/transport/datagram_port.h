// The datagram queue pair of an engine's sessions: a ring of prebuilt sends, each with a line of
// its own for header and short payload, so that no datagram depends on what its session does next;
// and a ring of receives. Both are as short as may be: what is used again soon is in the caches.
// Where the device has base::DirectDatagrams, short ones go out and come in by that. Hot.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "agent/engine_context.h"
#include "base/direct_datagrams.h"
#include "spinwire/rpc.h"
#include "verbs/work_requests.h"
#include "wire/handshake.h"
#include "wire/rpc_datagram.h"

namespace spinwire::rpc {

using detail::Block;

inline constexpr std::size_t kLineBytes = 64;
static_assert(wire::kRpcHeaderBytes + kShortCall == kLineBytes);

/// In a receive's block: what the device puts in front of a datagram, and our header, end where a
/// cacheline begins, in which the payload does.
inline constexpr std::size_t kGrhBytes = 40;
inline constexpr std::size_t kReceiveOffset = 8;
inline constexpr std::size_t kPayloadOffset = kReceiveOffset + kGrhBytes + wire::kRpcHeaderBytes;
static_assert(kPayloadOffset == 64);
/// What then fits into a block of 4 KiB.
inline constexpr std::uint32_t kLongestDatagram = 4096 - kReceiveOffset - kGrhBytes;

struct DatagramPortOptions {
  std::uint32_t send_depth = 0;  ///< a power of two
  std::uint32_t receive_depth = 0;
  std::uint32_t qkey = 0;
};

class DatagramPort {
 public:
  /// Errors: no_memory, system, limit (the receive pool has not enough blocks).
  static Result<std::unique_ptr<DatagramPort>> open(agent::EngineContext& s,
                                                    const DatagramPortOptions& options);
  DatagramPort(const DatagramPort&) = delete;
  DatagramPort& operator=(const DatagramPort&) = delete;
  ~DatagramPort();

  [[nodiscard]] std::uint32_t qp_num() const noexcept { return qp_->qp_num; }
  /// What `to` says of an address, and how datagrams go there directly, if they can.
  void resolve(base::DatagramAddress& to) noexcept;

  // Sends: each in turn, as one datagram. Not while full().
  [[nodiscard]] bool full() const noexcept { return sent_ == limit_; }
  /// Whether the device can do without work requests.
  [[nodiscard]] bool sends_directly() const noexcept { return direct_.sender != nullptr; }
  /// Sends a datagram so, if this is true; else send() is to do it. Up to kDirectPayload bytes
  /// count, all of which are read. It goes out with flush(), or with others of its kind.
  [[nodiscard, gnu::always_inline]] bool send_direct(const base::DatagramAddress& to,
                                                     wire::RpcWords words, std::uint32_t length,
                                                     const std::byte* payload) noexcept {
    if (length > base::kDirectPayload || posted_ != sent_) [[unlikely]]
      return false;
    switch (base::send(direct_, to, words.low, words.high, payload, length)) {
      case base::Sent::no:
        return false;
      case base::Sent::first:
        unpublished_ = true;
        to.lane->last = to.lane->tail + list_length_ - 2;
        if (list_length_ == 1) publish();
        return true;
      case base::Sent::behind:
        return true;
      case base::Sent::last:
        publish();
        return true;
    }
    return false;
  }
  /// Up to kShortCall bytes, which are copied, whatever lies behind them as well: a fixed number is
  /// quicker.
  void send(const base::DatagramAddress& to, wire::RpcWords words, std::uint32_t length,
            const std::byte (&payload)[kShortCall]) noexcept {
    Entry& e = next(to);
    std::byte* const line = line_of(sent_);
    std::memcpy(line, &words.low, sizeof words.low);
    std::memcpy(line + sizeof words.low, &words.high, sizeof words.high);
    std::memcpy(line + sizeof words, payload, kShortCall);
    e.sges[0].length = static_cast<std::uint32_t>(sizeof words) + length;
    append();
  }
  /// Longer: sent from where it lies, with a reference to its block until the device is done. The
  /// header goes into the block, right before the payload, if that is free for it: one element.
  /// Else, as where one buffer goes to many at once, it is one of two.
  void send(const base::DatagramAddress& to, wire::RpcWords words, std::uint32_t length,
            Block* block, const std::byte* payload) noexcept {
    static_assert(sizeof block->header == wire::kRpcHeaderBytes);
    Entry& e = next(to);
    const bool header_in_headroom =
        block->header_in_use == 0 && payload == block->header + sizeof block->header;
    if (header_in_headroom) {
      block->header_in_use = 1;
      std::memcpy(block->header, &words, sizeof words);
      e.sges[0] = {reinterpret_cast<std::uint64_t>(block->header),
                   static_cast<std::uint32_t>(sizeof words) + length, block->lkey};
    } else {
      wire::RpcWords* const header_staged = &headers_[sent_ & mask_];
      *header_staged = words;
      e.sges[0] = {reinterpret_cast<std::uint64_t>(header_staged), sizeof words,
                   lines_block_->lkey};
      e.sges[1] = {reinterpret_cast<std::uint64_t>(payload), length, block->lkey};
      e.wr.num_sge = 2;
    }
    e.wr.send_flags &= ~unsigned{IBV_SEND_INLINE};
    detail::retain(block);
    held_blocks_[sent_ & mask_] = {block, header_in_headroom};
    ++held_;
    holds_ = true;
    append();
  }
  /// Posts what was sent.
  void flush() noexcept {
    if (unpublished_) publish();
    if (posted_ != sent_) post();
  }
  [[nodiscard]] bool unposted() const noexcept { return unpublished_ || posted_ != sent_; }
  void on_sent(const ibv_wc& wc) noexcept;

  // Receives. Short datagrams take none where the device has them directly.
  [[nodiscard]] base::DirectRuns& runs() noexcept { return runs_; }
  /// Whether a completion tells of those.
  [[nodiscard]] bool is_run_completion(std::uint64_t wr_id) const noexcept {
    return wr_id == runs_.wr_id;
  }
  void give_back(const base::DirectRun& run, std::uint32_t count) noexcept {
    direct_.device->give_back(qp_, run, count);
  }
  /// Memory for a datagram of theirs that is kept, or that needs more than its line; there is some
  /// while there are runs.
  [[nodiscard]] Block* spare() const noexcept { return spare_; }
  /// That was kept: answers another. Null: there is none, and what follows takes receives until
  /// there is.
  Block* renew_spare() noexcept;
  /// Copies a datagram of a run there as the verbs have it, and answers where that is.
  [[nodiscard]] std::byte* copy_to_spare(const base::DirectRun& run, const base::Line& line,
                                         std::uint32_t length) const noexcept;
  [[nodiscard]] Block* block(std::uint32_t slot) noexcept { return receives_.memory(slot); }
  /// What the device writes to: where the datagram came from, and behind that the datagram.
  [[nodiscard]] std::byte* arrival(std::uint32_t slot) const noexcept {
    return receives_.address(slot);
  }
  /// Posts more receives until there are `count`, or all that there are.
  void post_receives_up_to(std::uint32_t count) noexcept;
  [[nodiscard]] std::uint32_t posted_receives() const noexcept { return receives_posted_; }
  [[nodiscard]] bool all_posted() const noexcept { return receives_posted_ == receive_depth_; }
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
    if (spare_ != nullptr) visit(spare_);
    for (std::uint32_t i = 0; i < receives_.size(); ++i) visit(receives_.memory(i));
    for (std::uint32_t i = done_; i != sent_; ++i) visit(held_blocks_[i & mask_].block);
  }

  std::uint64_t send_failures = 0;  ///< sends that the device refused or failed

 private:
  /// As a short datagram has it when it is free, linked to the one behind it. A work request is
  /// free again as soon as it was posted; its line, too, if that is sent in line.
  struct Entry {
    ibv_send_wr wr;
    ibv_sge sges[2];
  };
  /// What a datagram under way refers to.
  struct HeldBlock {
    Block* block = nullptr;
    bool header_in_headroom = false;  ///< the header is in the block
  };
  DatagramPort(agent::EngineContext& s, const DatagramPortOptions& options) noexcept;
  Result<void> make_sends();
  Result<void> make_receives();
  void post() noexcept;
  void publish() noexcept {
    unpublished_ = false;
    direct_.device->publish(qp_);
  }
  void drop_unposted(const ibv_send_wr* bad) noexcept;
  void replace(std::uint32_t slot) noexcept;
  bool fill(std::uint32_t slot) noexcept;
  [[nodiscard]] Block* block_for_receive() noexcept;
  Entry& next(const base::DatagramAddress& to) noexcept {
    Entry& e = entries_[sent_ & entry_mask_];
    e.wr.wr_id = std::uint64_t{sent_} << 1;
    e.wr.wr.ud.ah = to.ah;
    e.wr.wr.ud.remote_qpn = to.qp_num;
    e.wr.wr.ud.remote_qkey = to.qkey;
    return e;
  }
  std::byte* line_of(std::uint32_t sequence) noexcept {
    return lines_ + std::size_t{sequence & entry_mask_} * kLineBytes;
  }
  void append() noexcept {
    if (++sent_ - posted_ == list_length_) post();
  }
  void release_held(HeldBlock& held) noexcept;
  void restore_entries() noexcept;

  ibv_qp* qp_ = nullptr;
  std::unique_ptr<Entry[]> entries_;
  std::byte* lines_ = nullptr;
  wire::RpcWords* headers_ = nullptr;  ///< of datagrams in two parts: each stays until it is sent
  std::uint32_t sent_ = 0;             ///< taken so far, modulo 2^32
  std::uint32_t posted_ = 0;           ///< of those the device has
  std::uint32_t done_ = 0;             ///< and is known to be done with
  std::uint32_t limit_ = 0;            ///< what `sent_` may not pass: done_ + depth_
  std::uint32_t held_ = 0;             ///< of those under way, with a block
  std::uint32_t depth_;
  std::uint32_t mask_;        ///< of held_blocks_
  std::uint32_t entry_mask_;  ///< of entries_ and lines_
  std::uint32_t list_length_;
  std::uint32_t signaled_ = 0;  ///< up to here all are done when the last signaled one is
  bool unpublished_ = false;    ///< something was sent directly since publish()
  bool holds_ = false;          ///< something in the list holds a block
  unsigned inline_ = 0;         ///< the flag, if lines can be sent so
  base::DirectEnd direct_;
  base::DirectRuns runs_;
  Block* spare_ = nullptr;
  verbs::ReceiveSlots<Block> receives_;
  std::unique_ptr<HeldBlock[]> held_blocks_;  ///< as many as the send queue is deep
  // Cold.
  std::uint32_t receive_depth_;
  std::uint32_t receives_posted_ = 0;  ///< slots in use: the first so many
  agent::EngineContext& shared_;
  Block* lines_block_ = nullptr;
  std::vector<std::uint32_t> missing_;  ///< slots without a block; has room for all
  std::uint32_t mtu_ = 0;
  bool failed_ = false;  ///< it sends nothing until upkeep() has restarted it
};

}  // namespace spinwire::rpc
