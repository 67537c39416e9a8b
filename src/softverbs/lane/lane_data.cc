// Allocates room in the data of a lane to a peer. Only the sender keeps records: the peer reads the
// bytes that lines name, and consumes lines.
//
// Allocation starts at the beginning when no bytes are in flight, and goes on as a ring otherwise.
// So a pair with little in flight touches little memory, which stays in the caches. The part in use
// doubles when it was too small, but not while the ring wraps around.
#include "softverbs/lane/lane_data.h"

namespace spinwire::softverbs {

bool make_data_room(OutLane& out, std::uint32_t bytes) noexcept {
  if (bytes > kLaneData) return false;
  while (out.placed_first != out.placed_last &&
         out.placed[out.placed_first % kLaneLines].line < out.head) {
    ++out.placed_first;
  }
  if (out.placed_first == out.placed_last) {
    out.data_next = 0;
    while (out.data_size < bytes) out.data_size *= 2;
    out.data_bound = out.data_size;
    return true;
  }
  const std::uint32_t oldest = out.placed[out.placed_first % kLaneLines].begin;
  if (oldest >= out.data_next) {  // the ring wraps around already
    out.data_bound = oldest;
  } else if (out.data_next + bytes <= out.data_size) {
    out.data_bound = out.data_size;
  } else if (out.data_size < kLaneData && (out.data_was_short || bytes > oldest)) {
    out.data_was_short = false;
    while (out.data_next + bytes > out.data_size && out.data_size < kLaneData) out.data_size *= 2;
    out.data_bound = out.data_size;
  } else if (bytes <= oldest) {
    out.data_next = 0;
    out.data_bound = oldest;
  }
  const bool fits = out.data_next + bytes <= out.data_bound;
  out.data_was_short = out.data_was_short || !fits;
  return fits;
}

}  // namespace spinwire::softverbs
