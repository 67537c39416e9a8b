// A request runs its handler at most once: the server's slot knows the number of its last call.
#include "rpc/at_most_once.h"

#include "rpc/server_call.h"

namespace spinwire::rpc {

/// A request that was here before: the answer went astray, or the handler is still at it.
void on_duplicate_request(Rpc& r, const ServerSession& s, const ServerSlot& v,
                          std::uint32_t number) noexcept {
  if (number != v.number || v.state != ServerSlotState::answered) {
    ++r.stats.duplicates;
    return;
  }
  ++r.stats.resent;
  send_reply(r, s, v, kServerTimeUnknown, number, v.status, v.size);
}

/// The client is done with all calls below this number: nothing that they left is needed again, and
/// a request of theirs that is late is an old one.
void forget_calls_below(ServerSession& s, std::uint32_t below) noexcept {
  if (s.window > 1 && (below & wire::kNoCallsOver) != 0) return;
  below &= ~(s.window - 1);
  if (std::exchange(s.forgotten, below) == below) return;
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
