// Ends an inline call by the reply of its server. Hot.
#pragma once

#include <cstring>
#include <optional>

#include "base/internals.h"
#include "rpc/backlog.h"
#include "rpc/client_call.h"
#include "rpc/client_session.h"
#include "rpc/congestion.h"
#include "rpc/refused_calls.h"
#include "rpc/retransmission_timeout.h"

namespace spinwire::rpc {

/// Measures the round trip of a reply, once for each batch. Returns false if the call is over, so
/// the reply is late.
[[gnu::always_inline]] inline bool on_round_trip(Rpc& r, ClientSession& c, const ClientSlot& k,
                                                 std::uint16_t server_time,
                                                 std::uint64_t now) noexcept {
  const bool first = std::exchange(c.last_heard, now) != now;
  if (k.resends != 0) [[unlikely]] {
    if (k.outcome) return ++r.stats.late_replies, false;
    on_retransmitted_reply(r, c, k, server_time);
    return true;
  }
  const std::uint64_t trip = now - std::min(k.sent_at, now);
  if (first && trip != 0) update_rto(r, c, trip);  // replies within one poll have no valid time
  if (trip > r.target_rtt || c.congestion.cwnd != c.congestion.max_cwnd) [[unlikely]]
    adjust_cwnd(r, c, trip, server_time);
  return true;
}

/// The server advertises another window. Returns false for 0, which no correct reply has.
[[gnu::cold, gnu::noinline]] inline bool set_server_window(ClientSession& c,
                                                           std::uint16_t window) noexcept {
  if (window == 0) return false;
  c.server_window = std::min(window, c.window);
  update_send_window(c);
  return true;
}

/// Whether a call waits for this reply. False while the session's server is not known.
[[gnu::always_inline]] inline bool is_awaited(const ClientSession& c,
                                              const wire::RpcWords& words) noexcept {
  const std::uint32_t number = wire::unpack(words).number;
  const std::uint32_t slot = number & (c.window - 1u);
  return c.slots[slot].number == number && (c.free_slots & bit(slot)) == 0;
}

/// Makes the reply of a datagram whose status may be any, and which may have a code.
[[gnu::cold, gnu::noinline]] inline Reply reply_with_any_status(const wire::RpcHeader& header,
                                                                Block* block,
                                                                const std::byte* payload) noexcept {
  std::optional<std::uint32_t> code;
  std::size_t size = header.length;
  if (wire::has_code(header.status)) {
    std::memcpy(&code.emplace(), payload, wire::kRefusalCodeBytes);
    payload += wire::kRefusalCodeBytes;
    size -= wire::kRefusalCodeBytes;
  }
  Reply reply = detail::make<Reply>(wire::status_in(header.status), block, payload, size);
  detail::Internals::set_code(reply, code);
  return reply;
}

/// Ends the call that waits for this reply. Returns whether the block was kept. A good reply has no
/// code, and its path does not look for one.
template <bool is_good = true>
[[gnu::always_inline]] inline bool complete_call(Rpc& r, ClientSession& c, wire::RpcWords words,
                                                 Block* block, const std::byte* payload,
                                                 std::uint64_t now) noexcept {
  const wire::RpcHeader header = wire::unpack(words);
  const std::uint32_t slot = header.number & (c.window - 1u);
  ClientSlot& k = c.slots[slot];
  if (header.window != c.server_window && !set_server_window(c, header.window)) [[unlikely]]
    return ++r.stats.bad_datagrams, false;
  if (c.last_heard != now || k.resends != 0 || c.congestion.cwnd != c.congestion.max_cwnd)
      [[unlikely]] {
    if (!on_round_trip(r, c, k, wire::server_time_of(header), now)) return false;
  }
  if (!is_good && wire::status_in(header.status) == Status::not_connected && wait_again(r, c, slot))
    return false;
  const ReplyCallback done = k.done;
  release_slot(r, c, k, slot);
  ++r.stats.replies;
  Reply reply = is_good ? detail::make<Reply>(Status::ok, block, payload, header.length)
                        : reply_with_any_status(header, block, payload);
  done(reply);
  if (c.backlog_count != 0) [[unlikely]]
    send_backlog(r, c);
  return detail::Internals::is_kept(reply);
}

}  // namespace spinwire::rpc
