// The datagram queue pair of an engine: a ring of prebuilt sends and a ring of receives. Each send
// has its own line for header and short payload, so a session may continue while a datagram is in
// flight. Both rings are short, so that they stay in the caches. If the device has
// verbs::DirectDatagrams, these carry all datagrams that they can. Hot.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "agent/engine_context.h"
#include "rpc/session.h"
#include "spinwire/rpc.h"
#include "verbs/direct_datagrams.h"
#include "verbs/work_requests.h"
#include "wire/handshake.h"
#include "wire/rpc_datagram.h"

namespace spinwire::rpc {

using detail::Block;

inline constexpr std::size_t kLineBytes = 64;
static_assert(wire::kRpcHeaderBytes + kSlotPayloadBytes == kLineBytes);

/// In a receive's block, the GRH and our header end at a cacheline, where the payload begins.
inline constexpr std::size_t kGrhBytes = 40;
inline constexpr std::size_t kReceiveOffset = 8;
inline constexpr std::size_t kPayloadOffset = kReceiveOffset + kGrhBytes + wire::kRpcHeaderBytes;
static_assert(kPayloadOffset == 64);
/// The longest datagram that fits into a block of 4 KiB.
inline constexpr std::uint32_t kLongestDatagram = 4096 - kReceiveOffset - kGrhBytes;
/// Bytes of a receive's block in its chunk, at most.
inline constexpr std::size_t kReceiveBlockBytes =
    memory::small_block_bytes(kReceiveOffset + kGrhBytes + kLongestDatagram);

static_assert(wire::kBlockDatagramBytes == verbs::kLongestDirect);

/// The wr_id of the completion that reports direct datagrams. No other completion has it.
inline constexpr std::uint64_t kBatchCompletion = ~std::uint64_t{0};
constexpr bool is_batch_completion(std::uint64_t wr_id) noexcept {
  return wr_id == kBatchCompletion;
}

struct DatagramPortOptions {
  std::uint32_t send_depth = 0;  ///< a power of two
  std::uint32_t receive_depth = 0;
  std::uint32_t qkey = 0;
};

class DatagramPort {
 public:
  /// Errors: no_memory, system, limit (the receive pool has too few blocks).
  static Result<std::unique_ptr<DatagramPort>> open(agent::EngineContext& ctx,
                                                    const DatagramPortOptions& options);
  DatagramPort(const DatagramPort&) = delete;
  DatagramPort& operator=(const DatagramPort&) = delete;
  ~DatagramPort();

  [[nodiscard]] std::uint32_t qp_num() const noexcept { return qp_->qp_num; }
  /// Fills in the lane of direct datagrams to an address; a lane without room if there is none.
  void resolve(verbs::DatagramAddress& to) noexcept;
  /// The longest datagram that work requests carry, in bytes.
  [[nodiscard]] std::uint32_t mtu() const noexcept { return mtu_; }
  /// The longest direct datagram that may arrive here: see wire::SessionEnd::direct_datagrams.
  [[nodiscard]] std::uint32_t longest_direct() const noexcept { return batches_.longest; }
  /// Whether direct datagrams can be sent to a resolved address.
  [[nodiscard]] static bool reaches_directly(const verbs::DatagramAddress& to) noexcept;

  // Sends: one datagram each. Not allowed while full().
  [[nodiscard]] bool full() const noexcept { return sent_ == limit_; }
  /// Whether the device has direct datagrams.
  [[nodiscard]] bool sends_directly() const noexcept { return direct_.sender != nullptr; }
  /// Sends a direct datagram. If a line holds the payload, always reads kDirectPayload bytes. The
  /// datagram is published with its group (DirectLane::group), or with flush(). False: use send(),
  /// unless it is longer than the MTU, or held back.
  [[nodiscard, gnu::always_inline]] bool send_direct(const verbs::DatagramAddress& to,
                                                     wire::RpcWords words, std::uint32_t length,
                                                     const Payload& payload) noexcept {
    if (posted_ != sent_) [[unlikely]]
      return false;
    if (length <= verbs::kDirectPayload) [[likely]]
      return verbs::send_direct(direct_, to, words.low, words.high, payload.text, length) !=
             verbs::Sent::refused;
    if (to.holds_back) [[unlikely]]
      return false;
    const std::byte* const bytes = payload.block != nullptr ? payload.in.data : payload.text;
    return direct_.device->send_long(direct_, to, words.low, words.high, bytes, length) !=
           verbs::Sent::refused;
  }
  /// Sends up to kSlotPayloadBytes bytes. Copies all kSlotPayloadBytes bytes, because a fixed size
  /// is faster.
  [[gnu::always_inline]] void send(const verbs::DatagramAddress& to, wire::RpcWords words,
                                   std::uint32_t length,
                                   const std::byte (&payload)[kSlotPayloadBytes]) noexcept {
    Entry& e = next(to);
    std::byte* const line = line_of(sent_);
    std::memcpy(line, &words.low, sizeof words.low);
    std::memcpy(line + sizeof words.low, &words.high, sizeof words.high);
    std::memcpy(line + sizeof words, payload, kSlotPayloadBytes);
    e.sges[0].length = static_cast<std::uint32_t>(sizeof words) + length;
    append();
  }
  /// Sends a longer payload from its block, and holds a reference until the device is done. If the
  /// block's headroom is free, the header goes there: one element. Otherwise, for example when one
  /// buffer is sent to many peers at once, header and payload are two elements.
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
  /// Posts the datagrams sent so far.
  void flush() noexcept {
    ++round_->number;
    if (round_->has_held_lines) direct_.device->publish(qp_);
    if (posted_ != sent_) post();
  }
  void on_sent(const ibv_wc& wc) noexcept;

  // Receives. Direct datagrams use none.
  [[nodiscard]] verbs::DirectBatches& batches() noexcept { return batches_; }
  /// A block for a direct datagram of up to wire::kPageDatagramBytes that is kept, or that must be
  /// copied. Not null while there are batches.
  [[nodiscard]] Block* spare() const noexcept { return spare_; }
  /// Takes a block for a longer one out of the port, with its reference; null if the rendezvous
  /// pool has none now.
  [[nodiscard]] Block* take_long_spare() noexcept;
  /// Gives it back, if it was not kept.
  void give_long_spare(Block* block) noexcept { long_spare_ = block; }
  void release_long_spare() noexcept;
  /// Replaces the spare block, which was kept. Null: the pool is empty, and datagrams use receives
  /// until it has blocks.
  Block* renew_spare() noexcept;
  /// Copies a direct datagram to a spare block in the layout of a receive, up to the MTU. Returns
  /// its GRH.
  [[nodiscard]] std::byte* copy_to_spare(Block& spare, const verbs::DirectBatch& batch,
                                         const std::byte* bytes,
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
  /// Work of the control step: finds blocks for receives without one, and restarts a failed queue
  /// pair.
  void upkeep() noexcept;
  [[nodiscard]] std::uint32_t receive_shortage() const noexcept {
    return static_cast<std::uint32_t>(empty_slots_.size());
  }
  /// Whether upkeep() has something to mend.
  [[nodiscard]] bool is_short() const noexcept { return failed_ || !empty_slots_.empty(); }
  /// Visits the block of each datagram that the device may still read.
  template <typename Visit>
  void for_each_held_block(Visit&& visit) const {
    for (std::uint32_t i = done_; held_ != 0 && i != sent_; ++i) {
      if (const Block* const block = held_blocks_[i & mask_].block; block != nullptr) visit(*block);
    }
  }
  // For audits.
  [[nodiscard]] const ibv_qp* queue_pair() const noexcept { return qp_; }
  /// Receives collected for the next post.
  [[nodiscard]] std::uint32_t receives_waiting() const noexcept { return receives_.count(); }

  std::uint64_t send_failures = 0;  ///< sends that the device refused or failed

 private:
  /// A prebuilt send of a short datagram, linked to the next. The work request is free once posted;
  /// the line is free once posted inline.
  struct Entry {
    ibv_send_wr wr;
    ibv_sge sges[2];
  };
  /// The block of a datagram in flight.
  struct HeldBlock {
    Block* block = nullptr;
    bool header_in_headroom = false;  ///< the header is in the block
  };
  DatagramPort(agent::EngineContext& ctx, const DatagramPortOptions& options) noexcept;
  Result<void> make_sends();
  Result<void> make_receives();
  void post() noexcept;
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
  std::uint32_t sent_ = 0;             ///< datagrams sent, modulo 2^32
  std::uint32_t posted_ = 0;           ///< the part that the device has
  std::uint32_t done_ = 0;             ///< the part that has completed
  std::uint32_t limit_ = 0;            ///< maximum of `sent_`: done_ + depth_
  std::uint32_t held_ = 0;             ///< datagrams in flight with a block
  std::uint32_t depth_;
  std::uint32_t mask_;        ///< of held_blocks_
  std::uint32_t entry_mask_;  ///< of entries_ and lines_
  std::uint32_t list_length_;
  std::uint32_t signaled_ = 0;  ///< sends before this end with the last signaled send
  bool holds_ = false;          ///< something in the list holds a block
  unsigned inline_ = 0;         ///< IBV_SEND_INLINE if lines can be sent inline
  verbs::DirectEnd direct_;
  verbs::DirectRound* round_ = &no_round_;  ///< of the device, if it has direct datagrams
  verbs::DirectBatches batches_;
  Block* spare_ = nullptr;
  Block* long_spare_ = nullptr;
  verbs::ReceiveSlots<Block> receives_;
  std::unique_ptr<HeldBlock[]> held_blocks_;  ///< one for each entry of the send queue
  // Cold.
  std::uint32_t receive_depth_;
  std::uint32_t receives_posted_ = 0;  ///< slots in use: the first ones
  agent::EngineContext& context_;
  verbs::DirectRound no_round_;
  Block* lines_block_ = nullptr;
  std::vector<std::uint32_t> empty_slots_;  ///< slots without a block; has room for all
  std::uint32_t mtu_ = 0;
  bool failed_ = false;  ///< sends nothing until upkeep() has restarted it
};

}  // namespace spinwire::rpc
