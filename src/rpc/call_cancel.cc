#include "rpc/call_cancel.h"

#include <algorithm>
#include <utility>

#include "rpc/backlog.h"
#include "rpc/client_call.h"
#include "rpc/client_session.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire::rpc {
namespace {

void set_outcome(ClientSlot& k, Status outcome) noexcept {
  k.outcome = outcome;
  k.resends = 1;  // on_round_trip() then checks a reply closely
}

void list_pending(Rpc& r, ClientSession& c) noexcept {
  if (!std::exchange(c.cancellation_pending, true)) r.pending_cancellations.push_back(c);
  r.may_have_deferred_work = true;
}

void run_cancel_callbacks(Rpc& r, ClientSession& c) noexcept {
  const std::uint32_t name = c.name;
  for (std::uint32_t slot = 0; slot < c.window; ++slot) {
    if (is_busy(c, slot) && c.slots[slot].outcome) end_call_in_slot(r, c, slot, Status::cancelled);
  }
  run_backlog_callbacks(c);
  send_backlog(r, c);
  if (c.connection != nullptr) run_cancel_callbacks(r, *c.connection);
  if (c.name == name && c.state == SessionState::closing && c.deadline == 0)
    end_session_in_order(r, c);
}

}  // namespace

Status cancel(Rpc& r, ClientSession& c, std::uint32_t id) noexcept {
  for (std::uint32_t slot = 0; slot < c.window; ++slot) {
    ClientSlot& k = c.slots[slot];
    if (!is_busy(c, slot) || k.id != id || k.outcome) continue;
    set_outcome(k, Status::cancelled);
    return list_pending(r, c), Status::ok;
  }
  const bool found =
      cancel_in_backlog(c, id) || (c.connection != nullptr && cancel_on_connection(r, c, id));
  if (!found) return Status::invalid_argument;
  return list_pending(r, c), Status::ok;
}

CallId last_call(const ClientSession& c) noexcept {
  std::uint32_t age = age_of_newest(c, c.last_call_id);
  for (std::uint32_t slot = 0; slot < c.window; ++slot) {
    const ClientSlot& k = c.slots[slot];
    if (is_busy(c, slot) && !k.outcome) age = std::min(age, c.last_call_id - k.id);
  }
  if (c.connection != nullptr)
    age = std::min(age, age_of_newest_long(*c.connection, c.last_call_id));
  return age != kNone ? CallId{c.last_call_id - age} : CallId{};
}

void cancel_all(Rpc& r, ClientSession& c, Status outcome) noexcept {
  for (std::uint32_t slot = 0; slot < c.window; ++slot) {
    if (is_busy(c, slot) && !c.slots[slot].outcome) set_outcome(c.slots[slot], outcome);
  }
  cancel_backlog(c, outcome);
  list_pending(r, c);
}

void cancel_waiting(Rpc& r, ClientSession& c, Status outcome) noexcept {
  cancel_backlog(c, outcome);
  if (c.connection != nullptr) cancel_backlog(*c.connection, outcome);
  list_pending(r, c);
}

void run_cancel_callbacks(Rpc& r) noexcept {
  r.pending_cancellations.run_round([&r](ClientSession& c) {
    c.cancellation_pending = false;
    run_cancel_callbacks(r, c);
  });
}

void end_call_in_slot(Rpc& r, ClientSession& c, std::uint32_t slot, Status status) noexcept {
  ClientSlot& k = c.slots[slot];
  const ReplyCallback done = k.done;
  const Status outcome = std::exchange(k.outcome, {}).value_or(status);
  release_slot(r, c, k, slot);
  end_call(done, outcome);
}

void end_calls(Rpc& r, ClientSession& c, Status status, Status unsent) noexcept {
  for (std::uint32_t slot = 0; slot < c.window; ++slot) {
    if (is_busy(c, slot)) end_call_in_slot(r, c, slot, status);
  }
  end_backlog(c, unsent);
}

}  // namespace spinwire::rpc
