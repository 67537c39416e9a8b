// Direct messages bypass the verbs, as direct datagrams (ud/ud_direct.h) do. The sender writes a
// SEND of a connected queue pair into the lane without a work request: the message is in the peer's
// memory when the call returns, so no acknowledgement is awaited. The receiver reads plain messages
// where they lie, without a receive. Both are packets like any other, so either end may do without.
// The layers above use this through verbs/direct_messages.h. Hot unless marked.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "softverbs/lane/direct_lane.h"

namespace spinwire::softverbs {

/// In the wr_id of a direct message: no completion.
inline constexpr std::uint64_t kNoCompletion = ~std::uint64_t{0};

/// The wr_id of a message that is read in place: its address, marked as no receive has it.
inline constexpr std::uint64_t kInPlace = std::uint64_t{1} << 62 | 1;
constexpr bool is_in_place(std::uint64_t wr_id) noexcept { return wr_id >> 62 == 1; }
inline const std::byte* in_place_bytes(std::uint64_t wr_id) noexcept {
  return reinterpret_cast<const std::byte*>(wr_id & ~kInPlace);  // completions carry integers
}

/// The part of a record that is prefetched.
inline constexpr std::size_t kRecordLines = 4;
/// Such a completion has no route: the record takes the room.
inline constexpr std::size_t kRecordAt = offsetof(ibv_wc, pkey_index);
static_assert(kRecordAt + sizeof(void*) == sizeof(ibv_wc));
/// The record that receive_in_place() was given, in the completion of a message that is read in
/// place.
inline void* record_of(const ibv_wc& wc) noexcept {
  void* record = nullptr;
  std::memcpy(&record, reinterpret_cast<const std::byte*>(&wc) + kRecordAt, sizeof record);
  return record;
}

/// A message begins with a header of one word, which the sender has in a register.
inline constexpr std::uint32_t kDirectMessageHeader = 8;

/// In ibv_send_wr::send_flags of a READ, besides those of libibverbs: it need not wait until the
/// peer has taken earlier messages. The user sees to it that none of them changes what it reads, or
/// is sent from where it writes.
inline constexpr unsigned kMayRunAhead = 0x40;
/// Another such flag, of a READ: its key is a local one, by which the peer has named its own bytes.
inline constexpr unsigned kNamedByPeer = 0x20;

struct DirectMessages {
  /// Sends a message, unless work requests wait, the lane has no room, or the peer's queue pair is
  /// not known to receive. A peer that refuses a work request before it ends the connection. The
  /// payload may be reused at once. Others see the message with its group (DirectLane::group), and
  /// after publish() at the latest. With a `wr_id` a completion is queued at once.
  Sent (*send)(ibv_qp* qp, std::uint64_t header, const std::byte* payload, std::uint32_t length,
               std::uint64_t wr_id) noexcept;
  /// The rounds of the context.
  DirectRound& (*round)(ibv_context* context) noexcept;
  /// Publishes all held lines of the context, and begins a new round.
  void (*publish)(ibv_context* context) noexcept;
  /// Stores a word into the peer's memory at once, without a completion, with the checks of a
  /// WRITE. It does not wait for messages that are not published, or for SENDs that are not
  /// acknowledged. False, and nothing stored: work requests wait, faults are injected, a WRITE
  /// would fail, or the memory cannot be reached by one store.
  bool (*write_word)(ibv_qp* qp, std::uint64_t address, std::uint32_t rkey,
                     std::uint64_t word) noexcept;
  /// Runs READs and WRITEs at the head of a list of work requests, as posting them would, but
  /// without completions. Returns the first one that it did not run; null: it ran all. None is run
  /// while earlier work requests have not ended, or faults are injected. One that fails is left to
  /// be posted, which reports why.
  ibv_send_wr* (*run)(ibv_qp* qp, ibv_send_wr* list) noexcept;
  /// A word of the queue pair, which is 0 at first and there until the queue pair is destroyed.
  /// Once it is registered for the queue pair, write_word() of the peer reaches it by one cache
  /// line. By any other key it is memory like all. Set-up.
  std::atomic<std::uint64_t>* (*word)(ibv_qp* qp) noexcept;
  /// Prefetches what sending through the queue pair touches, without reading it.
  void (*prefetch)(ibv_context* context, const ibv_qp* qp) noexcept;
  /// Prefetches what write_word() touches of the peer's memory, if the word is the peer's
  /// word().
  void (*prefetch_word)(const ibv_qp* qp) noexcept;
  /// Longest message, with its header.
  std::uint32_t longest;
  /// From now on polls report the queue pair's plain messages by completions whose wr_id says where
  /// they lie. Their bytes stay until release_reads(). Each carries the user's record of the queue
  /// pair (record_of()), of which the poll prefetches the first kRecordLines cache lines. Messages
  /// of more than `longest_received` bytes are never put into receives. Peers learn that messages
  /// of up to `longest` bytes are read in place. Both count the header. Set-up.
  void (*receive_in_place)(ibv_qp* qp, const void* record, std::uint32_t longest_received,
                           std::uint32_t longest) noexcept;
  /// Longest message, with its header, that the peer of a connected queue pair reads in place, by
  /// what the peer says; 0: none. Cold.
  std::uint32_t (*longest_in_place)(ibv_qp* qp) noexcept;
  /// Whether the peer of a connected queue pair is in another process. Cold.
  bool (*is_between_processes)(ibv_qp* qp) noexcept;
  /// The messages of the context that are read in place.
  DirectReads& (*reads)(ibv_context* context) noexcept;
  /// The number of a queue pair whose peer refused a direct message, or ended without having taken
  /// it; 0: there is none. The queue pair sends nothing more: a work request that is posted to it
  /// fails. A caller that polls first finds everything that the peer has sent. Cold.
  std::uint32_t (*take_lost)(ibv_context* context) noexcept;
  /// Does what `send` does for a payload of several parts, `length` bytes in all. Local keys do not
  /// matter.
  Sent (*send_parts)(ibv_qp* qp, std::uint64_t header, std::span<const ibv_sge> parts,
                     std::uint32_t length, std::uint64_t wr_id) noexcept;
};

/// The device's calls for direct messages.
[[nodiscard]] const DirectMessages& direct_messages() noexcept;

}  // namespace spinwire::softverbs
