// Reads and writes the bytes of packets in a lane, and of scatter/gather lists. Hot.
#pragma once

#include <infiniband/verbs.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/copy.h"
#include "softverbs/lane/segment.h"
#include "softverbs/objects.h"

namespace spinwire::softverbs {

using base::copy_small;

inline std::byte* pointer(std::uint64_t address) noexcept {
  return reinterpret_cast<std::byte*>(address);  // verbs carry addresses as integers
}

/// Selects the messages of a loop: only those that fit into a line, which takes few registers, or
/// also longer ones.
enum class Sizes : std::uint8_t { line, any };

/// Which acknowledgements of the peer a sender has applied. Polls do not watch for those of direct
/// packets: only apply_peer_acks() finds them all. With `known` the sender comes again with `all`.
/// Work requests are `all`, because polls watch for theirs.
enum class Acks : std::uint8_t { known, all };

/// Makes room for a packet's bytes in the lane's data, as far as acknowledgements are applied;
/// false if there is none. Cold: one call frees all that the peer has consumed. `most`: the part in
/// use does not grow beyond it, and not beyond kLaneData without all acknowledgements; only
/// messages have more than kLaneData.
bool make_data_room(OutLane& out, std::uint32_t bytes, Acks acks,
                    std::uint32_t most = kLaneData) noexcept;

/// Whether the lane has room for a packet's bytes, in the line or in the data.
inline bool has_data_room(OutLane& out, std::uint32_t bytes, Acks acks,
                          std::uint32_t most = kLaneData) noexcept {
  return bytes <= kLinePayload || out.data_next + bytes <= out.data_bound ||
         make_data_room(out, bytes, acks, most);
}

/// The place in the lane's data that place_in_data() returns next. A sender that writes the bytes
/// first needs fewer registers.
inline std::byte* next_in_data(const OutLane& out) noexcept { return out.data + out.data_next; }
/// Returns the place in the lane's data for the bytes of a packet that do not fit into its line, at
/// `position`, after has_data_room(). Writes their offset to the line.
inline std::byte* place_in_data(OutLane& out, Line& line, std::uint64_t position,
                                std::uint32_t bytes) noexcept {
  constexpr std::uint32_t kAligned = 64;
  const std::uint32_t begin = out.data_next;
  out.placed[position % kLaneLines] = {position, begin};
  out.data_end = position + 1;
  out.data_next = (begin + bytes + kAligned - 1) & ~(kAligned - 1);
  std::memcpy(line.payload + kOffsetAt, &begin, sizeof begin);
  return out.data + begin;
}
/// Returns the place for a packet's bytes, in its line or in the data.
inline std::byte* place_packet(OutLane& out, Line& line, std::uint64_t position,
                               std::uint32_t bytes) noexcept {
  return bytes <= kLinePayload ? line.payload : place_in_data(out, line, position, bytes);
}

/// The bytes of a received packet; null if a hostile sender's line names none.
inline const std::byte* packet_bytes(const InLane& lane, const Line& line,
                                     std::uint64_t length) noexcept {
  return length <= kLinePayload ? line.payload : packet_data(lane.data, line, length);
}

/// Reads the bytes of a packet from front to back.
struct PacketBytes {
  const std::byte* at;

  void read(void* to, std::size_t n) noexcept {
    std::memcpy(to, at, n);
    at += n;
  }
};

/// Walks a scatter list piece by piece.
class ScatterCursor {
 public:
  ScatterCursor(const ibv_sge* sges, std::uint32_t count) noexcept
      : sge_(sges), end_(sges + count) {
    skip_empty();
  }
  /// The next piece of at most n bytes; length 0 at the end of the list.
  struct Piece {
    std::byte* data;
    std::size_t length;
  };
  Piece next(std::size_t n) noexcept {
    if (sge_ == end_) return {nullptr, 0};
    const std::size_t part = std::min<std::size_t>(n, sge_->length - used_);
    const Piece piece{pointer(sge_->addr) + used_, part};
    used_ += part;
    skip_empty();
    return piece;
  }

 private:
  void skip_empty() noexcept {
    while (sge_ != end_ && used_ == sge_->length) {
      ++sge_;
      used_ = 0;
    }
  }
  const ibv_sge* sge_;
  const ibv_sge* end_;
  std::size_t used_ = 0;
};

/// Writes bytes into the elements of a list, as far as there is room.
inline void scatter_bytes(ScatterCursor& to, const std::byte* from, std::size_t n) noexcept {
  while (n != 0) {
    const ScatterCursor::Piece piece = to.next(n);
    if (piece.length == 0) return;
    std::memcpy(piece.data, from, piece.length);
    from += piece.length;
    n -= piece.length;
  }
}

/// Copies the bytes of all elements.
inline void gather_bytes(std::byte* to, const ibv_sge* sges, std::uint32_t count) noexcept {
  for (const ibv_sge* const end = sges + count; sges != end; ++sges) {
    if (sges->length <= kLinePayload) {
      copy_small(to, pointer(sges->addr), sges->length);
    } else {
      std::memcpy(to, pointer(sges->addr), sges->length);
    }
    to += sges->length;
  }
}

/// Copies an inline work request's bytes beside the queue: the user may reuse the memory at once.
inline void keep_inline(Qp& qp, SendWr& kept, const ibv_send_wr& wr) noexcept {
  std::byte* const at =
      &qp.sq_inline[static_cast<std::size_t>(&kept - qp.sq.get()) * qp.max_inline];
  kept.first = {reinterpret_cast<std::uint64_t>(at), kept.length, 0};
  kept.sge_count = 1;
  gather_bytes(at, wr.sg_list, static_cast<std::uint32_t>(wr.num_sge));
}
/// Stores the elements of a work request that is not inline.
inline void keep_elements(Qp& qp, SendWr& kept, const ibv_send_wr& wr) noexcept {
  kept.sge_count = static_cast<std::uint16_t>(wr.num_sge);
  if (wr.num_sge == 1) {
    kept.first = *wr.sg_list;
  } else {
    std::copy_n(wr.sg_list, wr.num_sge,
                &qp.sq_sges[static_cast<std::size_t>(&kept - qp.sq.get()) * qp.max_sge]);
  }
}

}  // namespace spinwire::softverbs
