// Allocates room in the data of a lane to a peer. Only the sender keeps records: the peer reads the
// bytes that lines name, and consumes lines.
//
// Allocation starts at the beginning when no bytes are in flight, and goes on as a ring otherwise.
// So a pair with little in flight touches little memory, which stays in the caches. The part in use
// doubles when it was too small, or when the ring would wrap around with a quarter of it in flight,
// if that is more than the smallest ring. Beyond kLaneData the sender first reads the peer's
// acknowledgements, and the part grows only if the packet still does not fit: what lies in the
// caches is faster. Then it also grows while the ring wraps around: the next bytes go behind the
// part that was in use, and the ring wraps around again only when what lay in front of its
// beginning is consumed. After many laps of messages with little in flight the part in use halves,
// down to kLaneData.
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
  out.data_was_short = false;
  out.data_calm_laps = 0;
}

/// Has a ring that wraps around go on behind the part in use, and behind the bytes of the last lap.
/// Until that lap is consumed, what lies between is not used: it must not be more than is gained.
void go_on_behind(OutLane& out, std::uint32_t bytes, std::uint32_t most) noexcept {
  const std::uint32_t begin = std::max(out.data_size, out.data_lap_end);
  if (out.data_size >= most || most <= kLaneData || begin + bytes > most) return;
  if (begin - out.data_next > most - begin) return;
  out.data_next = begin;
  while (out.data_next + bytes > out.data_size) grow(out, most);
  out.data_bound = out.data_size;
}

/// Ends a lap of a sender that has read all acknowledgements. After many in a row with little in
/// flight at their end, the next one takes a smaller part.
void end_lap(OutLane& out, std::uint32_t in_flight) noexcept {
  const bool is_calm = out.data_size > kLaneData && in_flight <= out.data_size / 4;
  out.data_calm_laps = is_calm ? out.data_calm_laps + 1 : 0;
  if (out.data_calm_laps < kCalmLaps) return;
  out.data_calm_laps = 0;
  out.data_was_short = false;
  out.data_size = std::max(out.data_size / 2, kLaneData);
}

/// Begins the ring at the beginning, where nothing is in flight.
void begin_ring(OutLane& out, std::uint32_t bytes) noexcept {
  out.data_next = out.data_lap_end = 0;
  // Room for several long packets, because a message that does not fit takes a slower way.
  const std::uint32_t wanted = bytes > kLeastData / 2 ? std::min(8 * bytes, kLaneData) : bytes;
  while (out.data_size < wanted) grow(out, kLaneData);
  out.data_bound = out.data_size;
}

void wrap_around(OutLane& out, std::uint32_t oldest) noexcept {
  out.data_turn = out.data_end;
  out.data_lap_end = out.data_next;
  out.data_next = 0;
  out.data_bound = oldest;
}

}  // namespace

bool make_data_room(OutLane& out, std::uint32_t bytes, Acks acks, std::uint32_t most) noexcept {
  if (bytes > kLaneData) return false;  // also where there is more, so that lanes do not differ
  const bool of_message = most > kLaneData;
  const bool is_at_end = out.data_next + bytes > out.data_size;
  if (acks == Acks::known) most = std::min(most, kLaneData);
  if (!find_oldest(out)) {
    if (of_message && is_at_end) end_lap(out, 0);
    begin_ring(out, bytes);
    return true;
  }
  const std::uint32_t oldest = out.placed[out.data_scanned % kLaneLines].begin;
  const bool much_in_flight =
      out.data_size < kLaneData && out.data_next - oldest > std::max(kLeastData, out.data_size / 4);
  const bool was_short = out.data_was_short && out.data_next + bytes <= most;
  // Bytes of two laps are in flight, so no new lap may begin.
  const bool is_second_lap = acks == Acks::all && out.data_scanned < out.data_turn;
  if (oldest >= out.data_next) {  // the ring wraps around already
    out.data_bound = oldest;
    if (out.data_next + bytes > oldest) go_on_behind(out, bytes, most);
  } else if (!is_at_end) {
    out.data_bound = out.data_size;
  } else if (of_message && acks == Acks::known && out.data_size >= kLaneData) {
    return false;  // the next lap depends on what is in flight
  } else if (out.data_size < most &&
             (was_short || bytes > oldest || much_in_flight || is_second_lap)) {
    while (out.data_next + bytes > out.data_size && out.data_size < most) grow(out, most);
    out.data_bound = out.data_size;
  } else if (bytes <= oldest && out.data_scanned >= out.data_turn) {
    if (of_message) end_lap(out, out.data_next - oldest);
    wrap_around(out, oldest);
  }
  const bool fits = out.data_next + bytes <= out.data_bound;
  if (!fits && out.data_size < most) out.data_was_short = true;
  if (!fits && acks == Acks::all) out.data_calm_laps = 0;
  return fits;
}

}  // namespace spinwire::softverbs
