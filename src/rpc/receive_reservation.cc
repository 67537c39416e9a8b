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

namespace {

/// Receives that are reserved for the session's calls.
std::uint32_t reserved_for(const ServerSession& s) noexcept {
  const std::uint32_t calls = s.advertised_window & ~kTakesNoCalls;
  return calls > 1 ? calls : 0;
}

/// Receives that nobody has reserved, and served sessions may.
std::uint32_t free_receives(const Rpc& r) noexcept {
  const std::uint32_t served = served_receive_budget(r.receive_budget);
  return std::min(r.receive_budget - r.reserved_receives, served - r.server_reserved_receives);
}

/// Of `free` receives, those that the session may reserve, so that others find some.
std::uint64_t room_for(const ServerSession& s, std::uint32_t free) noexcept {
  return s.source->has_share ? control::room_of_source(s.source->reserved_receives, free) : free;
}

void count_reserved(Rpc& r, ServerSession& s, std::uint32_t change) noexcept {
  r.reserved_receives += change;
  r.server_reserved_receives += change;
  s.source->reserved_receives += change;
}

/// The session's window, or the half, a quarter and so on, as far as `free` and its share go.
[[gnu::cold, gnu::noinline]] void reserve_part(Rpc& r, ServerSession& s,
                                               std::uint32_t free) noexcept {
  const std::uint32_t reserved = reserved_for(s);
  const std::uint64_t most = reserved + room_for(s, free);
  std::uint32_t calls = s.window;
  while (calls > most) calls /= 2;
  if (calls <= std::max(reserved, 1u)) return;
  count_reserved(r, s, calls - reserved);
  s.advertised_window = calls;
  post_reserved_receives(r);
}

}  // namespace

void reserve_window_receives(Rpc& r, ServerSession& s) noexcept {
  if ((s.advertised_window & ~kTakesNoCalls) == 0) {  // the session's first request
    mark_used(r, s);
    s.advertised_window |= 1;
    if (s.window == 1) return;
  }
  // With many sessions, most requests find none. One is of no use: a session has that anyhow, and
  // the next part of its window takes at least two more.
  const std::uint32_t free = free_receives(r);
  if (free > 1 && !is_leaving(s)) reserve_part(r, s, free);
}

void return_receives(Rpc& r, ServerSession& s) noexcept {
  const std::uint32_t reserved = reserved_for(s);
  if (reserved == 0) return;
  count_reserved(r, s, 0 - reserved);
  s.advertised_window = 1 | (s.advertised_window & kTakesNoCalls);
}

}  // namespace spinwire::rpc
