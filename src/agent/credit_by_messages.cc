// Credit by messages, where somebody else writes our credit cell or the peer's: see
// CreditByMessages. Cold.

#include "agent/agent.h"
#include "agent/submit.h"
#include "agent/unheard_peers.h"
#include "base/log_message.h"

namespace spinwire::agent {
namespace {

/// Whether messages about credit may still be posted.
bool can_send(const Agent& a) noexcept { return a.stage == Stage::up && !a.goodbye_sent; }

}  // namespace

void distrust_cell(EngineContext& ctx, Agent& a) noexcept {
  base::log(
      LogLevel::warning,
      "another peer of this engine writes the credit cell of the connection to {}: its credit "
      "goes by messages from now on",
      a.peer.name.data());
  a.credit.cell = nullptr;
  a.credit.by_messages.asks = a.credit.by_messages.ask_due = true;
  visit_at_end_of_poll(ctx, a);
  await_peer_anew(ctx, a);
}

bool submit_credit_message(EngineContext& ctx, Agent& a, wire::MessageKind kind) noexcept {
  Operation* const op = ctx.operations.acquire_for_agent();
  if (op == nullptr) return false;
  CreditByMessages& by = a.credit.by_messages;
  if (kind == wire::MessageKind::credit) {
    by.may_send = false;
    a.credit.write_pending = true;
    a.peer_cell.last_write = ctx.now;
  } else {
    by.ask_due = false;
    by.ask_outstanding = by.awaits_message = true;
  }
  begin_internal(a, *op, OperationKind::credit_message, static_cast<std::uint32_t>(kind));
  op->wr.num_sge = 1;
  build_staged(ctx, a, *op,
               wire::encode({kind, 0, static_cast<std::uint16_t>(a.credit.granted), 0}), nullptr,
               0);
  if (a.domain != nullptr) use_own_key(ctx, *a.domain, *op);
  a.credit.advertised = a.credit.granted;
  append(a, *op);
  queue_flush(ctx, a);
  return true;
}

void on_credit_message_sent(EngineContext& ctx, Agent& a, wire::MessageKind kind) noexcept {
  if (kind == wire::MessageKind::credit) {
    on_credit_written(ctx, a);
  } else {
    a.credit.by_messages.ask_outstanding = false;
    if (a.credit.by_messages.ask_due) visit_at_end_of_poll(ctx, a);
  }
}

bool advertise_by_messages(EngineContext& ctx, Agent& a, bool has_news) noexcept {
  CreditByMessages& by = a.credit.by_messages;
  // Without an ask the news wait for the next one, which lists the agent again.
  const bool waits_for_ask = by.answers && !by.may_send;
  const bool done = !has_news || (!waits_for_ask && write_credit(ctx, a));
  bool lacks_record = !done && !waits_for_ask && !a.credit.write_pending;
  if (by.ask_due && !by.ask_outstanding && can_send(a) &&
      !submit_credit_message(ctx, a, wire::MessageKind::credit_ask))
    lacks_record = true;
  if (lacks_record) wait_for_credit(ctx, a);
  return done;
}

bool on_credit_ask(EngineContext& ctx, Agent& a) noexcept {
  CreditByMessages& by = a.credit.by_messages;
  if (by.may_send) return false;
  // The words in the peer's cell were lost to it: what they said is said again.
  if (!by.answers) a.credit.write_again = true;
  by.answers = by.may_send = true;
  if (a.credit.write_again || a.credit.advertised != a.credit.granted) visit_at_end_of_poll(ctx, a);
  return true;
}

bool on_credit_message(EngineContext& ctx, Agent& a) noexcept {
  CreditByMessages& by = a.credit.by_messages;
  if (!by.awaits_message) return false;
  by.awaits_message = false;
  by.ask_due = true;
  visit_at_end_of_poll(ctx, a);
  return true;
}

}  // namespace spinwire::agent
