// The datagram queue pair of an engine: a ring of prebuilt sends and a ring of receives. Each send
// has a line of its own for header and short payload, so a session may go on while a datagram is on
// its way. Both rings are short, so that the caches hold them. Where the device has
// verbs::DirectDatagrams, short datagrams use those. Hot.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "agent/engine_context.h"
#include "spinwire/rpc.h"
#include "verbs/direct_datagrams.h"
#include "verbs/work_requests.h"
#include "wire/handshake.h"
#include "wire/rpc_datagram.h"

namespace spinwire::rpc {

using detail::Block;

inline constexpr std::size_t kLineBytes = 64;
static_assert(wire::kRpcHeaderBytes + kShortCall == kLineBytes);

/// In a receive's block the GRH and our header end at a cacheline, where the payload begins.
inline constexpr std::size_t kGrhBytes = 40;
inline constexpr std::size_t kReceiveOffset = 8;
inline constexpr std::size_t kPayloadOffset = kReceiveOffset + kGrhBytes + wire::kRpcHeaderBytes;
static_assert(kPayloadOffset == 64);
/// The longest datagram for a block of 4 KiB.
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
  /// Fills in the lane of direct datagrams to an address; a lane without room if there is none.
  void resolve(verbs::DatagramAddress& to) noexcept;

  // Sends, one datagram each. Not while full().
  [[nodiscard]] bool full() const noexcept { return sent_ == limit_; }
  /// Whether the device has direct datagrams.
  [[nodiscard]] bool sends_directly() const noexcept { return direct_.sender != nullptr; }
  /// Sends a direct datagram of up to kDirectPayload bytes; always reads that many. It goes out
  /// with flush(), or when the list is full. False: use send().
  [[nodiscard, gnu::always_inline]] bool send_direct(const verbs::DatagramAddress& to,
                                                     wire::RpcWords words, std::uint32_t length,
                                                     const std::byte* payload) noexcept {
    if (length > verbs::kDirectPayload || posted_ != sent_) [[unlikely]]
      return false;
    switch (verbs::send_direct(direct_, to, words.low, words.high, payload, length)) {
      case verbs::Sent::refused:
        return false;
      case verbs::Sent::first:
        unpublished_ = true;
        to.lane->last = to.lane->tail + list_length_ - 2;
        if (list_length_ == 1) publish();
        return true;
      case verbs::Sent::queued:
        return true;
      case verbs::Sent::last:
        publish();
        return true;
    }
    return false;
  }
  /// Sends up to kShortCall bytes. Copies all kShortCall bytes, since a fixed size is quicker.
  void send(const verbs::DatagramAddress& to, wire::RpcWords words, std::uint32_t length,
            const std::byte (&payload)[kShortCall]) noexcept {
    Entry& e = next(to);
    std::byte* const line = line_of(sent_);
    std::memcpy(line, &words.low, sizeof words.low);
    std::memcpy(line + sizeof words.low, &words.high, sizeof words.high);
    std::memcpy(line + sizeof words, payload, kShortCall);
    e.sges[0].length = static_cast<std::uint32_t>(sizeof words) + length;
    append();
  }
  /// Sends a longer payload from its block, and holds a reference until the device is done. The
  /// header goes into the block's headroom if that is free: one element. Else, as when one buffer
  /// is sent to many peers at once, header and payload are two elements.
  void send(const verbs::DatagramAddress& to, wire::RpcWords words, std::uint32_t length,
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
  /// Posts the datagrams that were sent.
  void flush() noexcept {
    if (unpublished_) publish();
    if (posted_ != sent_) post();
  }
  [[nodiscard]] bool unposted() const noexcept { return unpublished_ || posted_ != sent_; }
  void on_sent(const ibv_wc& wc) noexcept;

  // Receives. Direct datagrams take none.
  [[nodiscard]] verbs::DirectRuns& runs() noexcept { return runs_; }
  /// Whether a completion reports direct datagrams.
  [[nodiscard]] bool is_run_completion(std::uint64_t wr_id) const noexcept {
    return wr_id == runs_.wr_id;
  }
  void give_back(const verbs::DirectRun& run, std::uint32_t count) noexcept {
    direct_.device->release_run(qp_, run, count);
  }
  /// A block for a direct datagram that is kept, or that has to be copied; not null while there are
  /// runs.
  [[nodiscard]] Block* spare() const noexcept { return spare_; }
  /// Replaces the spare block, which was kept. Null: the pool is empty, and datagrams take receives
  /// until it is not.
  Block* renew_spare() noexcept;
  /// Copies a direct datagram to the spare block as a receive would have it. Returns its GRH.
  [[nodiscard]] std::byte* copy_to_spare(const verbs::DirectRun& run, const verbs::Line& line,
                                         std::uint32_t length) const noexcept;
  [[nodiscard]] Block* block(std::uint32_t slot) noexcept { return receives_.memory(slot); }
  /// The memory of a receive: the GRH, then the datagram.
  [[nodiscard]] std::byte* arrival(std::uint32_t slot) const noexcept {
    return receives_.address(slot);
  }
  /// Posts receives until `count`, or all, are posted.
  void post_receives_up_to(std::uint32_t count) noexcept;
  [[nodiscard]] std::uint32_t posted_receives() const noexcept { return receives_posted_; }
  [[nodiscard]] bool all_posted() const noexcept { return receives_posted_ == receive_depth_; }
  /// Posts a slot's receive again, with another block if this one was kept.
  void give_back(std::uint32_t slot, bool kept) noexcept {
    if (kept) [[unlikely]]
      return replace(slot);
    receives_.add(slot);
    if (receives_.count() >= list_length_) post_receives();
  }
  /// Posts the receives that were collected.
  void post_receives() noexcept;
  /// Work for the control step: blocks for receives that have none, a queue pair that has failed.
  void upkeep() noexcept;
  [[nodiscard]] std::uint32_t missing() const noexcept {
    return static_cast<std::uint32_t>(missing_.size());
  }
  // For audits.
  [[nodiscard]] const ibv_qp* queue_pair() const noexcept { return qp_; }
  /// Receives collected for the next post.
  [[nodiscard]] std::uint32_t receives_waiting() const noexcept { return receives_.count(); }
  /// Visits all blocks that the port holds.
  template <typename Visit>
  void visit_blocks(Visit&& visit) {
    visit(lines_block_);
    if (spare_ != nullptr) visit(spare_);
    for (std::uint32_t i = 0; i < receives_.size(); ++i) visit(receives_.memory(i));
    for (std::uint32_t i = done_; i != sent_; ++i) visit(held_blocks_[i & mask_].block);
  }

  std::uint64_t send_failures = 0;  ///< sends that the device refused or failed

 private:
  /// A prebuilt send of a short datagram, linked to the next. The work request is free as soon as
  /// it was posted; so is its line if it was sent inline.
  struct Entry {
    ibv_send_wr wr;
    ibv_sge sges[2];
  };
  /// The block that a datagram in flight refers to.
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
  Entry& next(const verbs::DatagramAddress& to) noexcept {
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
  wire::RpcWords* headers_ = nullptr;  ///< staged headers, one per send entry
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
  verbs::DirectEnd direct_;
  verbs::DirectRuns runs_;
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
