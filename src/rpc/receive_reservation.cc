// Receives reserved for replies and requests, so that none of these finds the receive queue empty,
// and the receives posted for them.
#include "rpc/receive_reservation.h"

#include <algorithm>

#include "rpc/client_call.h"
#include "rpc/server_session.h"

namespace spinwire::rpc {

bool try_post_more_receives(Rpc& r) noexcept {
  if (r.reserved_receives >= r.receive_budget) return false;
  post_reserved_receives(r);
  return true;
}

void post_reserved_receives(Rpc& r) noexcept {
  if (r.port == nullptr) return;
  // Datagrams without a reservation: one call of each session, and pings.
  const std::uint32_t others = r.servers.size() + kUnsolicitedReceives;
  if (r.reserved_receives + others >= r.port->posted_receives())
    r.port->post_receives_up_to(
        std::max(r.reserved_receives + 1 + others, 2 * r.port->posted_receives()));
  r.posted_receives = r.port->all_posted()
                          ? r.receive_budget
                          : std::min(r.receive_budget, r.port->posted_receives() - others);
}

void reserve_window_receives(Rpc& r, ServerSession& s) noexcept {
  if ((s.advertised_window & ~kTakesNoCalls) == 0) {  // the session's first request
    mark_used(r, s);
    s.advertised_window |= 1;
    if (s.window == 1) return;
  }
  if (is_leaving(s)) return;
  if (r.reserved_receives + s.window > r.receive_budget ||
      r.server_reserved_receives + s.window > served_receive_budget(r.receive_budget))
    return;
  r.reserved_receives += s.window;
  r.server_reserved_receives += s.window;
  s.advertised_window = s.window;
  post_reserved_receives(r);
}

void return_receives(Rpc& r, ServerSession& s) noexcept {
  const std::uint32_t reserved = s.advertised_window & ~kTakesNoCalls;
  if (reserved <= 1) return;
  r.reserved_receives -= reserved;
  r.server_reserved_receives -= reserved;
  s.advertised_window = 1 | (s.advertised_window & kTakesNoCalls);
}

}  // namespace spinwire::rpc
