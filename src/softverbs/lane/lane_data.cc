// Allocates room in the data of a lane to a peer. Only the sender keeps records: the peer reads the
// bytes that lines name, and consumes lines.
//
// Allocation starts at the beginning when no bytes are in flight, and goes on as a ring otherwise.
// So a pair with little in flight touches little memory, which stays in the caches. The part in use
// doubles when it was too small, or when the ring would wrap around with a quarter of it in flight,
// if that is more than the smallest ring. Beyond kLaneData it grows only when it was too small:
// what lies in the caches is faster. Then it also grows while the ring wraps around: the next bytes
// go behind the part that was in use, and the ring wraps around again only when what lay in front
// of its beginning is consumed.
#include "softverbs/lane/lane_data.h"

#include <algorithm>

namespace spinwire::softverbs {
namespace {

/// Moves data_scanned to the oldest line in flight that has bytes in the data. False: none has. A
/// run of lines may end behind OutLane::tail while it is being written.
bool find_oldest(OutLane& out) noexcept {
  std::uint64_t line = std::max(out.data_scanned, out.head);
  while (line < out.data_end && out.placed[line % kLaneLines].line != line) ++line;
  out.data_scanned = line;
  return line < out.data_end;
}

/// Doubles the part in use, up to kLaneData first.
void grow(OutLane& out, std::uint32_t most) noexcept {
  out.data_size = std::min(2 * out.data_size, out.data_size < kLaneData ? kLaneData : most);
}

/// Has a ring that wraps around go on behind the part in use.
void go_on_behind(OutLane& out, std::uint32_t bytes, std::uint32_t most) noexcept {
  if (out.data_size >= most || most <= kLaneData) return;
  out.data_next = out.data_size;
  while (out.data_next + bytes > out.data_size && out.data_size < most) grow(out, most);
  out.data_bound = out.data_size;
}

}  // namespace

bool make_data_room(OutLane& out, std::uint32_t bytes, std::uint32_t most) noexcept {
  if (bytes > kLaneData) return false;  // also where there is more, so that lanes do not differ
  if (!find_oldest(out)) {
    out.data_next = 0;
    // Room for several long packets, because a message that does not fit takes a slower way.
    const std::uint32_t wanted = bytes > kLeastData / 2 ? std::min(8 * bytes, kLaneData) : bytes;
    while (out.data_size < wanted) grow(out, kLaneData);
    out.data_bound = out.data_size;
    return true;
  }
  const std::uint32_t oldest = out.placed[out.data_scanned % kLaneLines].begin;
  const bool much_in_flight =
      out.data_size < kLaneData && out.data_next - oldest > std::max(kLeastData, out.data_size / 4);
  if (oldest >= out.data_next) {  // the ring wraps around already
    out.data_bound = oldest;
    if (out.data_next + bytes > oldest) go_on_behind(out, bytes, most);
  } else if (out.data_next + bytes <= out.data_size) {
    out.data_bound = out.data_size;
  } else if (out.data_size < most && (out.data_was_short || bytes > oldest || much_in_flight)) {
    out.data_was_short = false;
    while (out.data_next + bytes > out.data_size && out.data_size < most) grow(out, most);
    out.data_bound = out.data_size;
  } else if (bytes <= oldest && out.data_scanned >= out.data_turn) {
    out.data_turn = out.data_end;
    out.data_next = 0;
    out.data_bound = oldest;
  }
  const bool fits = out.data_next + bytes <= out.data_bound;
  out.data_was_short = out.data_was_short || !fits;
  return fits;
}

}  // namespace spinwire::softverbs
