// Credit: the number of messages that a peer may send. Each end grants the other as many as it has
// reserved receives. Hot, except for the functions of credit.cc.
//
// Every connection starts with one reserved receive. A message that uses the last credit carries a
// flag that asks for more; the shared receive queue gives more, in fair shares when it is short.
// Idle connections return credit.
//
// Grants are cumulative counts. Messages carry them. When no message goes that way, the engine
// writes the count into the peer's credit cell, 8 bytes in exposed memory: by a store where the
// device can (verbs/direct_messages.h), else by a WRITE. Neither uses a receive, so advertising
// credit never needs credit. Goodbyes need no credit either: they use receives that are never
// reserved.
//
// The cell is opened to its own queue pair alone if the device can register memory so
// (Provider::reg_mr_for_qp); the embedded device can. A memory window cannot replace that: it is
// bound by a work request, so not before RTS, but the peer is told the key before RTR. On other
// devices every peer of the engine can write the cell if it finds the key. So each word proves that
// its writer knows the token, which the cell's owner gave to its own peer alone
// (wire/credit_word.h). An end that finds any other word stops reading the cell and gets credit by
// messages (CreditByMessages): it sends `credit_ask`, and the peer answers, once it has something
// to report, with one `credit` in place of the next write; each `credit` is followed by the next
// `credit_ask`. A forged or hidden word thus costs that connection a few messages, and no other
// connection anything.
#pragma once

#include <cstdint>

#include "agent/engine_context.h"

namespace spinwire::agent {

// Credit to send.

/// Counts the grants in the headers of the peer's messages. Returns false if all known credit is
/// used.
inline bool count_header_grants(Agent& a) noexcept {
  const auto news = static_cast<std::uint16_t>(a.credit.header_granted -
                                               static_cast<std::uint16_t>(a.credit.granted_to_us));
  if (news < 0x8000) {  // else the header is older than the credit cell
    a.credit.granted_to_us += news;
    a.credit.send_limit = a.credit.granted_to_us - a.credit.returned_by_us;
  }
  return a.credit.sent != a.credit.send_limit;
}
[[nodiscard]] inline std::uint32_t send_credits(const Agent& a) noexcept {
  return a.credit.send_limit - a.credit.sent;
}
/// Credit to send, including uncounted grants in headers and in the credit cell.
std::uint32_t visible_credits(const Agent& a) noexcept;
/// Counts the grants in headers and in the credit cell. Returns false if there is no credit.
bool count_grants(EngineContext& ctx, Agent& a) noexcept;
/// Whether there is credit for a message. `is_last`: one is known, so the message asks for more.
bool has_credit(EngineContext& ctx, Agent& a, bool& is_last) noexcept;
/// Whether there is credit for a message.
inline bool has_credit(EngineContext& ctx, Agent& a) noexcept {
  return send_credits(a) != 0 || count_grants(ctx, a);
}
/// Reads the word that the peer wrote into the credit cell, checks its proof, and counts its
/// grants. Returns false, and ends the connection, if the count violates the protocol.
bool read_credit_cell(EngineContext& ctx, Agent& a) noexcept;

// Credit that the peer has.

[[nodiscard]] inline std::uint32_t peer_credits(const Agent& a) noexcept {
  return a.credit.granted - a.credit.returned - a.credit.received;
}
/// The peer's credit as far as the peer knows it. Negative if the peer has used unadvertised
/// credit.
[[nodiscard]] inline std::int32_t advertised_credits(const Agent& a) noexcept {
  return static_cast<std::int32_t>(a.credit.advertised - a.credit.returned - a.credit.received);
}
/// The receives reserved for all peers whose receives are in the agent's kind of queue.
inline std::uint32_t& reserved_total(EngineContext& ctx, const Agent& a) noexcept {
  return a.own_queue != kNone ? ctx.own_queues->reserved_receives : ctx.reserved_receives;
}
/// Takes reserved receives from a peer.
void unreserve_receives(EngineContext& ctx, Agent& a, std::uint32_t count) noexcept;
/// Reserves a new connection's first receive. Returns false if none is left.
[[nodiscard]] bool reserve_first_receive(EngineContext& ctx, Agent& a) noexcept;
/// Reserves up to `wanted` receives for the peer, within the budget.
void reserve_more_receives(EngineContext& ctx, Agent& a, std::uint32_t wanted) noexcept;
/// Sets ReceiveState::yield_above, when receives were refused or the number of connections has
/// changed.
void find_yielding_peers(EngineContext& ctx) noexcept;
/// Takes a receive from an agent that has more than its fair share while receives are short.
void yield_credit(EngineContext& ctx, Agent& a) noexcept;
/// Lists the agent for the end of the poll, which advertises its credit and posts its control
/// messages.
void visit_at_end_of_poll(EngineContext& ctx, Agent& a) noexcept;
/// Advertises the credit of listed agents that no message carried, and posts their control
/// messages.
void visit_listed_agents(EngineContext& ctx) noexcept;
/// Connections that wait for credit, or for a record, and are looked at in one poll. A peer may
/// grant credit by a WRITE or a store, which nothing reports; peers that grant nothing can make
/// many wait.
inline constexpr std::uint32_t kCreditWaitersPerPoll = 4;
/// Lists the agent again in a later poll, in its turn, because it lacks credit or a record.
void wait_for_credit(EngineContext& ctx, Agent& a) noexcept;
/// The device has written the credit; lists the agent again if more was granted meanwhile.
inline void on_credit_written(EngineContext& ctx, Agent& a) noexcept {
  a.credit.write_pending = false;
  if (a.credit.advertised != a.credit.granted || a.credit.write_again) visit_at_end_of_poll(ctx, a);
}
/// The agent ends.
void stop_waiting_for_credit(EngineContext& ctx, Agent& a) noexcept;
/// Grants the credit that waited for receives.
void grant_to_waiters(EngineContext& ctx) noexcept;
/// Writes what is granted, and a sign of our polls, into the peer's credit cell, or sends a message
/// in its place. False: that has to wait.
[[nodiscard]] bool write_credit(EngineContext& ctx, Agent& a) noexcept;
/// A client's first word: posted before the application is called, which may take long. Without a
/// record, the end of a poll writes it.
void write_first_word(EngineContext& ctx, Agent& a) noexcept;
/// The peer returns credit, by a message that used one itself.
void on_credit_return(EngineContext& ctx, Agent& a, std::uint32_t credits) noexcept;

// Credit by messages: credit_by_messages.cc.

/// Our credit cell holds a word that the peer did not write: reads the cell no more, and asks the
/// peer for messages.
void distrust_cell(EngineContext& ctx, Agent& a) noexcept;
/// Advertises credit, and asks for it, where either is done by messages. False: that has to wait.
bool advertise_by_messages(EngineContext& ctx, Agent& a, bool has_news) noexcept;
/// Sends `credit` or `credit_ask`. False: all records are in use.
[[nodiscard]] bool submit_credit_message(EngineContext& ctx, Agent& a,
                                         wire::MessageKind kind) noexcept;
/// The device is done with a credit message.
void on_credit_message_sent(EngineContext& ctx, Agent& a, wire::MessageKind kind) noexcept;
/// The peer asks for a message, or has sent one. False: it may not.
bool on_credit_ask(EngineContext& ctx, Agent& a) noexcept;
bool on_credit_message(EngineContext& ctx, Agent& a) noexcept;

/// Whether fewer receives are posted than this agent's peer might be granted.
[[nodiscard]] inline bool has_receive_shortage(EngineContext& ctx, const Agent& a) noexcept {
  return a.own_queue != kNone ? has_own_receive_shortage(ctx, a)
                              : ctx.receive_shortage > kUnreservedReceives;
}
/// Defers a grant until receives are posted for it.
void wait_for_receives(EngineContext& ctx, Agent& a) noexcept;
/// The word that tells the peer what is granted now. It differs from the last one that was sent.
std::uint64_t next_credit_word(const Agent& a) noexcept;
/// The peer's cell has that word, or a WRITE of it is posted.
void on_credit_word_sent(EngineContext& ctx, Agent& a) noexcept;
/// Raises the grant to the reserved receives. Returns false if there is nothing to raise.
inline bool raise_grant(Agent& a) noexcept {
  const std::uint32_t target = a.credit.received + a.credit.returned + a.credit.reserved;
  if (static_cast<std::int32_t>(target - a.credit.granted) <= 0) return false;
  a.credit.granted = target;
  return true;
}
/// Lists the agent if its peer has asked for credit, and has older grants that it does not know of.
void advertise_to_waiting_peer(EngineContext& ctx, Agent& a) noexcept;
/// Grants the peer all receives that are reserved for it, if they are posted.
[[gnu::always_inline]] inline void grant_credit(EngineContext& ctx, Agent& a) noexcept {
  if (ctx.receive_shortage > ctx.shortage_allowed && has_receive_shortage(ctx, a)) [[unlikely]]
    return wait_for_receives(ctx, a);
  if (!raise_grant(a)) return advertise_to_waiting_peer(ctx, a);
  // A message may carry the grant. For half of the reserved receives, write it at once.
  if (a.credit.peer_needs_credit ||
      (a.credit.granted - a.credit.advertised) * 2 > a.credit.reserved)
    visit_at_end_of_poll(ctx, a);
}

}  // namespace spinwire::agent
