#include "rpc/refused_calls.h"

#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>

#include "rpc/backlog.h"
#include "rpc/client_session.h"
#include "rpc/slots.h"
#include "rpc/transport/connection_call.h"

namespace spinwire::rpc {
namespace {

/// Whether there may be a next server. Of a ready session, its goodbye decides.
bool may_find_server(const ClientSession& c) noexcept {
  if (c.reconnect == nullptr || c.reconnect->is_over) return false;
  const SessionState state = state_of(c);
  return state == SessionState::ready || state == SessionState::opening;
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

/// The call waits for the session's next server.
void await_next_server(Rpc& r, ClientSession& c, std::uint64_t deadline) noexcept {
  schedule_check(r, c, deadline);
  if (c.state != SessionState::ready || takes_no_calls(c)) return;
  c.reconnect->refused_at = std::max<std::uint64_t>(r.context.clock.now(), 1);
  update_send_window(c);
}

}  // namespace

bool wait_again(Rpc& r, ClientSession& c, std::uint32_t slot) noexcept {
  ClientSlot& k = c.slots[slot];
  const bool waits = waits_until_ready(c, {}) != ((k.flags & kWaitsOtherwise) != 0);
  if (!waits || k.outcome || !may_find_server(c)) return false;
  if (c.backlog == nullptr && !allocate_backlog(r, c)) return false;
  new (&backlog_at(c, c.backlog_count)) BackloggedCall;
  BackloggedCall& w = insert_into_backlog(c, k.id, c.last_call_id);
  w = {k.method, k.size, k.id, true, k.deadline, k.done, {}, k.payload};
  k.payload.block = nullptr;
  release_slot(r, c, k, slot);
  await_next_server(r, c, w.deadline);
  return true;
}

bool wait_again(Rpc& r, ConnectionClient& b, ConnectionClientSlot& k) noexcept {
  ClientSession& c = *find_client(r, b.session);
  if (!k.call.waits_until_ready || !may_find_server(c)) return false;
  if (k.asked_deadline != 0) k.call.deadline = k.asked_deadline;
  k.call.outcome = {};
  b.active &= ~bit(k.number & (b.window - 1));
  k.number += b.window;
  ConnectionCall& w = insert_into_backlog(b, k.call.id, c.last_call_id);
  w = std::exchange(k.call, {});
  await_next_server(r, c, w.deadline);
  return true;
}

bool end_without_goodbye(Rpc& r, ClientSession& c, std::uint64_t now) noexcept {
  const std::uint64_t from = c.reconnect != nullptr ? c.reconnect->refused_at : 0;
  if (from == 0 || c.is_leaving || now - from < r.timeouts.close) return false;
  end_session(r, c, Status::peer_lost,
              "it refuses calls because the session ends, but says no goodbye",
              "see whether the server is a Spinwire engine of this release");
  return true;
}

}  // namespace spinwire::rpc
