// Duplicate requests, and the calls that a server may forget.
#include "rpc/at_most_once.h"

#include "rpc/server_call.h"

namespace spinwire::rpc {

void on_duplicate_request(Rpc& r, ServerSession& s, const ServerSlot& v,
                          std::uint32_t number) noexcept {
  if (number != v.number || v.state != ServerSlotState::answered) {
    ++r.stats.duplicates;
    return;
  }
  ++r.stats.retransmitted_replies;
  send_reply(r, s, v, kServerTimeUnknown, number, v.status, v.size);
}

void drop_replies_below(ServerSession& s, std::uint32_t below) noexcept {
  if (s.window > 1 && (below & wire::kNoCallsOver) != 0) return;
  below &= ~(s.window - 1);
  if (std::exchange(s.calls_over_below, below) == below) return;
  for (std::uint32_t slot = 0; slot < s.window; ++slot) {
    ServerSlot& v = s.slots[slot];
    if (static_cast<std::int32_t>(v.number - below) >= 0) continue;
    release_payload(v.payload);
    v.number = below - s.window + slot;
    v.state = ServerSlotState::none;
    if (s.reply_buffers != nullptr) release_reply_buffer(s.reply_buffers[slot]);
  }
}

}  // namespace spinwire::rpc
