// Checks that the records of sessions, slots and connections agree with each other.

#include <iterator>
#include <string>

#include "base/error.h"
#include "rpc/backlog.h"
#include "rpc/receive_reservation.h"
#include "rpc/rpc.h"
#include "rpc/transport/connection_call.h"

namespace spinwire::rpc {
namespace {

tl::unexpected<Error> audit_error(std::string found) {
  return base::fail(Status::system, "audit the remote calls", std::move(found),
                    "a defect of the library, or memory that something has overwritten");
}

tl::unexpected<Error> connection_audit_error(std::string found) {
  return base::fail(Status::system, "audit the long calls", std::move(found),
                    "a defect of the library, or memory that something has overwritten");
}

/// Empty: all is as it should be.
std::string find_fault(const Rpc& r, const ConnectionClient& b) {
  const agent::Agent* const a = agent_of(r, b);
  std::uint32_t key_open = 0;
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    const ConnectionClientSlot& k = b.slots[slot];
    const bool active = is_active(b, slot);
    if (k.number % b.window != slot) return base::format("slot {} has call {}", slot, k.number);
    if (active != static_cast<bool>(k.call.done))
      return base::format("slot {} is free and has a callback, or lacks one", slot);
    if (!active && (k.key_open || k.request_in_flight || k.reply_message || k.call.reply))
      return base::format("slot {} is free and holds memory", slot);
    if (active && a == nullptr) return base::format("slot {} has no connection", slot);
    key_open += k.key_open ? 1 : 0;
  }
  if (a != nullptr && a->leases.granted_count != key_open)
    return base::format("{} replies have keys, the connection has {}", key_open,
                        a->leases.granted_count);
  if (b.backlog_count > r.context.config.rpc.backlog)
    return base::format("{} calls wait", b.backlog_count);
  return {};
}

std::string find_fault(const Rpc& r, const ConnectionServer& b) {
  if (agent_of(r, b) == nullptr) return "its connection is gone";
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    const ConnectionServerSlot& v = b.slots[slot];
    if ((v.state == ConnectionServerSlot::State::answering) != (v.block != nullptr))
      return base::format("slot {} has an answer that nobody waits for, or none", slot);
  }
  return {};
}

}  // namespace

Result<void> audit_connections(Rpc& r) {
  std::uint32_t due = 0;
  std::uint32_t connections_wanted = 0;
  for (std::uint32_t i = 0; i < r.clients.capacity(); ++i) {
    if (!r.clients.in_use(i) || r.clients.at(i).connection == nullptr) continue;
    const ConnectionClient& b = *r.clients.at(i).connection;
    if (auto fault = find_fault(r, b); !fault.empty())
      return connection_audit_error(base::format("session {}: {}", i, fault));
    due += b.queued ? 1 : 0;
    connections_wanted += b.wants_connection ? 1 : 0;
  }
  for (std::uint32_t i = 0; i < r.servers.capacity(); ++i) {
    if (!r.servers.in_use(i) || r.servers.at(i).connection == nullptr) continue;
    const ConnectionServer& b = *r.servers.at(i).connection;
    if (auto fault = find_fault(r, b); !fault.empty())
      return connection_audit_error(base::format("served session {}: {}", i, fault));
    due += b.queued ? 1 : 0;
  }
  const auto listed = std::distance(r.connection_queue.begin(), r.connection_queue.end());
  if (listed != due)
    return connection_audit_error(base::format("{} sessions are due, {} listed", due, listed));
  if (connections_wanted != r.connections_wanted)
    return connection_audit_error(
        base::format("{} want a connection, {} counted", connections_wanted, r.connections_wanted));
  return {};
}

Result<void> audit(Rpc& r) {
  std::uint32_t reserved_receives = 0;
  std::uint32_t granted = 0;
  std::uint32_t pending = 0;
  for (std::uint32_t i = 0; i < r.clients.capacity(); ++i) {
    if (!r.clients.in_use(i)) continue;
    const ClientSession& c = r.clients.at(i);
    std::uint32_t active = 0;
    bool has_cancelled = false;
    for (std::uint32_t slot = 0; slot < c.window; ++slot) {
      const bool busy = (c.free_slots >> slot & 1) == 0;
      active += busy ? 1 : 0;
      has_cancelled = has_cancelled || (busy && c.slots[slot].outcome);
      if (c.slots[slot].number % c.window != slot)
        return audit_error(
            base::format("session {}: slot {} has call {}", i, slot, c.slots[slot].number));
      if (!busy && c.slots[slot].payload.block != nullptr && c.slots[slot].size > kShortCall)
        return audit_error(base::format("session {}: slot {} is free and holds a block", i, slot));
    }
    for (std::uint32_t w = 0; w < c.backlog_count; ++w)
      has_cancelled = has_cancelled || backlog_at(r, c, w).outcome;
    if (has_cancelled && !c.cancellation_pending)
      return audit_error(base::format("session {}: a cancelled call has no callback due", i));
    pending += c.cancellation_pending ? 1 : 0;
    if (active != c.in_flight)
      return audit_error(
          base::format("session {}: {} calls under way, {} counted", i, active, c.in_flight));
    if (active != 0 && r.retransmission_queue.at(c.retransmission_place).session != c.name)
      return audit_error(base::format("session {}: nobody watches its {} calls", i, active));
    if (c.backlog_count > r.context.config.rpc.backlog)
      return audit_error(base::format("session {}: {} calls wait", i, c.backlog_count));
    reserved_receives += active;
  }
  for (std::uint32_t i = 0; i < r.servers.capacity(); ++i) {
    if (r.servers.in_use(i) && r.servers.at(i).advertised_window != 1)
      granted += r.servers.at(i).advertised_window;
  }
  const auto listed = std::distance(r.pending_cancellations.begin(), r.pending_cancellations.end());
  if (listed != pending)
    return audit_error(
        base::format("{} sessions have cancelled calls, {} listed", pending, listed));
  reserved_receives += granted;
  if (reserved_receives != r.reserved_receives || granted != r.server_reserved_receives) {
    return audit_error(
        base::format("{} receives are promised, {} of them granted; {} and {} counted",
                     reserved_receives, granted, r.reserved_receives, r.server_reserved_receives));
  }
  if (reserved_receives > r.receive_budget)
    return audit_error(
        base::format("{} receives are promised, of {}", reserved_receives, r.receive_budget));
  const std::uint32_t needed = reserved_receives + r.servers.size() + kUnsolicitedReceives;
  if (r.port != nullptr && !r.port->all_posted() && r.port->posted_receives() < needed)
    return audit_error(base::format("{} receives are open, of {} that may be needed",
                                    r.port->posted_receives(), needed));
  return audit_connections(r);
}

}  // namespace spinwire::rpc
