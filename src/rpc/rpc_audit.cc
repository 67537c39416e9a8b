// Checks that the records of sessions, slots and connections agree with each other.

#include <iterator>
#include <string>

#include "base/auditor.h"
#include "rpc/backlog.h"
#include "rpc/receive_reservation.h"
#include "rpc/reply_completion.h"
#include "rpc/rpc_state.h"
#include "rpc/slots.h"
#include "rpc/transport/connection_call.h"

namespace spinwire::rpc {
namespace {

/// Checks everything and keeps the first fault.
class RpcAuditor : public base::Auditor {
 public:
  explicit RpcAuditor(Rpc& r) : r_(r) {}

  std::string run() {
    for (std::uint32_t i = 0; i < r_.clients.capacity(); ++i) {
      if (r_.clients.in_use(i)) check_client(r_.clients.at(i), i);
    }
    for (std::uint32_t i = 0; i < r_.servers.capacity(); ++i) {
      if (r_.servers.in_use(i)) check_server(r_.servers.at(i), i);
    }
    set_place({});
    std::uint32_t listed = 0;
    r_.pending_cancellations.for_each([&](const ClientSession&) { return ++listed <= pending_; });
    expect(listed == pending_, "{} sessions have cancelled calls, {} listed", pending_, listed);
    check_receives();
    check_connection_queues();
    const auto requests =
        std::distance(r_.connection_requests.begin(), r_.connection_requests.end());
    expect(requests == connections_wanted_, "{} want a connection, {} listed", connections_wanted_,
           requests);
    check_waiting_peers();
    return take_fault();
  }

 private:
  void check_connection_queues() {
    std::uint32_t queued = 0;
    r_.connection_queue.for_each([&](const ConnectionEnd&) { return ++queued <= due_; });
    expect(queued == due_, "{} connections have a turn, {} listed", due_, queued);
    const auto blocked =
        std::distance(r_.blocked_connections.begin(), r_.blocked_connections.end());
    expect(blocked == blocked_, "{} connections are blocked, {} listed", blocked_, blocked);
  }

  void check_waiting_peers() {
    std::ptrdiff_t sessions = 0;
    std::ptrdiff_t peers = 0;
    for (const auto& [key, peer] : r_.peer_addresses) {
      const auto waiting =
          std::distance(peer->unsent_requests.begin(), peer->unsent_requests.end()) +
          std::distance(peer->unsent_replies.begin(), peer->unsent_replies.end());
      expect((waiting != 0) == peer->destination.holds_back,
             "{} sessions wait for room to a peer that holds back others, or does not", waiting);
      sessions += waiting;
      peers += waiting != 0 ? 1 : 0;
    }
    expect(sessions == unsent_, "{} sessions have unsent datagrams, {} listed", unsent_, sessions);
    const auto listed = std::distance(r_.waiting_peers.begin(), r_.waiting_peers.end());
    expect(listed == peers, "datagrams to {} peers wait, {} listed", peers, listed);
  }

  void check_client(const ClientSession& c, std::uint32_t index) {
    set_place(base::format("session {}: ", index));
    std::uint32_t active = 0;
    bool has_cancelled = false;
    for (std::uint32_t slot = 0; slot < c.window; ++slot) {
      const ClientSlot& k = c.slots[slot];
      const bool busy = is_busy(c, slot);
      active += busy ? 1 : 0;
      has_cancelled = has_cancelled || (busy && k.outcome);
      expect(k.number % c.window == slot, "slot {} has call {}", slot, k.number);
      expect(!busy || k.outcome || k.resends != kNotSent || (c.unsent.slots >> slot & 1) != 0,
             "the request in slot {} is never sent", slot);
      expect(busy || k.payload.block == nullptr || k.size <= kSlotPayloadBytes,
             "slot {} is free and holds a block", slot);
    }
    unsent_ += c.unsent.slots != 0 ? 1 : 0;
    for (std::uint32_t w = 0; w < c.backlog_count; ++w)
      has_cancelled = has_cancelled || backlog_at(c, w).outcome;
    expect(!has_cancelled || c.cancellation_pending, "a cancelled call has no callback due");
    pending_ += c.cancellation_pending ? 1 : 0;
    expect(active == c.in_flight, "{} calls under way, {} counted", active, c.in_flight);
    expect(active == 0 || r_.retransmission_queue.at(c.retransmission_place).session == c.name,
           "nobody watches its {} calls", active);
    expect(c.backlog_count <= c.backlog_room, "{} calls wait", c.backlog_count);
    reserved_ += active;
    if (c.connection != nullptr) check_connection(*c.connection);
  }

  void count_turn(const ConnectionEnd& e) {
    due_ += e.turn == ConnectionEnd::Turn::due ? 1 : 0;
    blocked_ += e.turn == ConnectionEnd::Turn::blocked ? 1 : 0;
  }

  void check_connection(const ConnectionClient& b) {
    count_turn(b);
    connections_wanted_ += b.wants_connection ? 1 : 0;
    const agent::Agent* const a = agent_of(r_, b);
    std::uint32_t keys_open = 0;
    for (std::uint32_t slot = 0; slot < b.window; ++slot) {
      const ConnectionClientSlot& k = b.slots[slot];
      const bool active = is_active(b, slot);
      expect(k.number % b.window == slot, "slot {} has call {}", slot, k.number);
      expect(active == static_cast<bool>(k.call.done),
             "slot {} is free and has a callback, or lacks one", slot);
      expect(active || !(k.key_open || k.request_in_flight || k.reply_message || k.call.reply),
             "slot {} is free and holds memory", slot);
      expect(!k.placing || (active && k.places_reply), "slot {} places a reply of no call", slot);
      expect(!active || !(k.places_reply && k.key_open), "slot {} has a key that it needs not",
             slot);
      expect(!active || a != nullptr, "slot {} has no connection", slot);
      keys_open += k.key_open ? 1 : 0;
    }
    const std::uint32_t granted = a != nullptr ? agent::leases_granted(*a) : keys_open;
    expect(granted == keys_open, "{} replies have keys, the connection has {}", keys_open, granted);
    expect(b.backlog_count <= b.backlog_room, "{} calls wait", b.backlog_count);
  }

  void check_server(const ServerSession& s, std::uint32_t index) {
    const std::uint32_t reserved = s.advertised_window & ~kTakesNoCalls;
    if (reserved > 1) granted_ += reserved;
    unsent_ += s.unsent.slots != 0 ? 1 : 0;
    for (std::uint32_t slot = 0; slot < s.window; ++slot) {
      expect(s.slots[slot].state != ServerSlotState::unsent || (s.unsent.slots >> slot & 1) != 0,
             "the reply in slot {} of served session {} is never sent", slot, index);
    }
    for (const ReplyCompletion& c : s.completions)
      expect(c.session == &s && c.view.refs != 0, "served session {} lists a finished reply",
             index);
    if (s.connection == nullptr) return;
    set_place(base::format("served session {}: ", index));
    const ConnectionServer& b = *s.connection;
    count_turn(b);
    expect(agent_of(r_, b) != nullptr, "its connection is gone");
    expect(b.waiting == 0 || b.turn != ConnectionEnd::Turn::none || !is_connected(r_, s),
           "slots {:#x} wait, and have no turn", b.waiting);
    for (std::uint32_t slot = 0; slot < b.window; ++slot) {
      const ConnectionServerSlot& v = b.slots[slot];
      expect((v.state == ConnectionServerSlot::State::answering) == static_cast<bool>(v.reply),
             "slot {} has an answer that nobody waits for, or none", slot);
      expect(v.state != ConnectionServerSlot::State::answering || (b.waiting >> slot & 1) != 0,
             "the reply in slot {} is never sent", slot);
    }
  }

  void check_receives() {
    std::uint32_t of_sources = 0;
    for (const auto& [address, source] : r_.sources) of_sources += source.reserved_receives;
    expect(of_sources == granted_, "{} receives are granted, {} counted for sources", granted_,
           of_sources);
    reserved_ += granted_;
    expect(reserved_ == r_.reserved_receives && granted_ == r_.server_reserved_receives,
           "{} receives are reserved, {} of them granted; {} and {} counted", reserved_, granted_,
           r_.reserved_receives, r_.server_reserved_receives);
    expect(reserved_ <= r_.receive_budget, "{} receives are reserved, of {}", reserved_,
           r_.receive_budget);
    if (r_.port == nullptr || r_.port->all_posted()) return;
    const std::uint32_t needed = reserved_ + r_.servers.size() + kUnsolicitedReceives;
    const std::uint32_t posted = r_.port->posted_receives();
    expect(posted >= needed, "{} receives are open, of {} that may be needed", posted, needed);
  }

  Rpc& r_;
  std::uint32_t pending_ = 0;   ///< sessions with cancelled calls
  std::uint32_t reserved_ = 0;  ///< receives
  std::uint32_t granted_ = 0;   ///< the part that servers have granted
  std::uint32_t due_ = 0;       ///< connections in the connection queue
  std::ptrdiff_t blocked_ = 0;  ///< connections that could send nothing
  std::ptrdiff_t connections_wanted_ = 0;
  std::ptrdiff_t unsent_ = 0;  ///< sessions with datagrams that wait for room
};

}  // namespace

Result<void> audit(Rpc& r) {
  return base::run_audit("audit of the remote calls", [&] { return RpcAuditor(r).run(); });
}

}  // namespace spinwire::rpc
