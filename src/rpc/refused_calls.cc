#include "rpc/refused_calls.h"

#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>

#include "rpc/backlog.h"
#include "rpc/client_session.h"
#include "rpc/session_reconnect.h"
#include "rpc/slots.h"
#include "rpc/transport/connection_call.h"

namespace spinwire::rpc {
namespace {

/// Whether there may be a next server.
bool may_find_server(const Rpc& r, const ClientSession& c) noexcept {
  if (c.reconnect == nullptr || c.reconnect->is_over) return false;
  if (c.state != SessionState::ready) return c.state == SessionState::opening;
  return c.is_leaving ? comes_back(c) : can_reconnect(r, c, Error{Status::flushed, {}, {}, {}});
}

/// Makes an entry for a call before those that were made later. The ring has room for all calls of
/// the window, and its next entry must exist.
template <typename Owner>
auto& insert_into_backlog(Owner& o, std::uint32_t id, std::uint32_t last_id) noexcept {
  std::uint32_t i = o.backlog_count++;
  for (; i != 0 && last_id - backlog_at(o, i - 1).id < last_id - id; --i)
    backlog_at(o, i) = std::exchange(backlog_at(o, i - 1), {});
  return backlog_at(o, i);
}

/// The session sends nothing more to a server that refuses a call.
void await_next_server(Rpc& r, ClientSession& c) noexcept {
  if (c.state != SessionState::ready || takes_no_calls(c)) return;
  c.reconnect->refused_at = std::max<std::uint64_t>(r.context.clock.now(), 1);
  update_send_window(c);
  schedule_check(r, c, time_without_goodbye(r, c));
}

/// Moves a long call from its slot to the backlog.
void return_to_backlog(Rpc& r, ClientSession& c, ConnectionClientSlot& k) noexcept {
  ConnectionClient& b = *c.connection;
  if (k.asked_deadline != 0) k.call.deadline = k.asked_deadline;
  k.call.outcome = {};
  b.active &= ~bit(k.number & (b.window - 1));
  k.number += b.window;
  --r.stats.long_calls;  // occupy_slot() counts it again
  ConnectionCall& w = insert_into_backlog(b, k.call.id, c.last_call_id);
  w = std::exchange(k.call, {});
  schedule_check(r, c, w.deadline);
}

}  // namespace

std::uint64_t time_without_goodbye(const Rpc& r, const ClientSession& c) noexcept {
  const bool has_refused = c.reconnect != nullptr && c.reconnect->refused_at != 0;
  return has_refused && !c.is_leaving ? c.reconnect->refused_at + r.timeouts.close
                                      : ~std::uint64_t{0};
}

bool wait_again(Rpc& r, ClientSession& c, std::uint32_t slot) noexcept {
  ClientSlot& k = c.slots[slot];
  const bool waits = waits_until_ready(c, {}) != ((k.flags & kOverridesSession) != 0);
  if (!waits || k.outcome || !may_find_server(r, c)) return false;
  await_next_server(r, c);
  if (c.backlog == nullptr && !allocate_backlog(r, c)) return false;
  new (&backlog_at(c, c.backlog_count)) BackloggedCall;
  BackloggedCall& w = insert_into_backlog(c, k.id, c.last_call_id);
  w = {k.method, k.size, k.id, true, k.deadline, k.done, {}, k.payload};
  k.payload.block = nullptr;
  k.payload.in = {};  // the slot's next peer may see these bytes
  release_slot(r, c, k, slot);
  schedule_check(r, c, w.deadline);
  return true;
}

bool wait_again(Rpc& r, ConnectionClient& b, ConnectionClientSlot& k) noexcept {
  ClientSession& c = *find_client(r, b.session);
  if (!k.call.waits_until_ready || !may_find_server(r, c)) return false;
  await_next_server(r, c);
  return_to_backlog(r, c, k);
  return true;
}

void keep_unsent_calls(Rpc& r, ClientSession& c) noexcept {
  if (c.reconnect == nullptr) return;  // its ring has no room for the calls of the window
  ConnectionClient& b = *c.connection;
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    ConnectionClientSlot& k = b.slots[slot];
    const bool is_unsent = k.sent == ConnectionClientSlot::Sent::nothing;
    if (!is_active(b, slot) || k.call.outcome || !is_unsent) continue;
    k.key_open = false;
    return_to_backlog(r, c, k);
  }
}

bool end_without_goodbye(Rpc& r, ClientSession& c, std::uint64_t now) noexcept {
  if (now < time_without_goodbye(r, c)) return false;
  end_session(r, c, Status::peer_lost,
              "it refuses calls because the session ends, but says no goodbye",
              "see whether the server is a Spinwire engine of this release");
  return true;
}

}  // namespace spinwire::rpc
