// Operations that the application gives up: out of the ordinary, so that the others need not know.
#include <utility>

#include "agent/completion.h"
#include "agent/rendezvous.h"
#include "agent/submit.h"

namespace spinwire::agent {
namespace {

/// Its callback is due in the next poll, which finds the agent in a list of those with work.
void give_up(EngineContext& ctx, Agent& a, Operation& op, bool with_device) noexcept {
  op.was = op.kind;
  op.kind = OperationKind::cancelled;
  op.with_device = with_device;
  op.succeeded = false;
  op.untold = true;
  op.next_untold = nullptr;
  (ctx.first_cancelled == nullptr ? ctx.first_cancelled : ctx.last_cancelled->next_untold) = &op;
  ctx.last_cancelled = &op;
  ++ctx.pending_cancellations;
  list_grant(ctx, a);
}

/// Takes a deferred operation out of its agent's order.
void unlink(Agent& a, Operation* before, Operation& op) noexcept {
  const bool last = &op == a.send_queue.deferred_last;
  if (before == nullptr) {
    a.send_queue.deferred = last ? nullptr : op.next();
  } else {
    before->wr.next = op.wr.next;
    if (last) a.send_queue.deferred_last = before;
  }
}

/// What the message was built with: a credit, and the telling of ours, which the peer may not have
/// heard of otherwise.
void take_credit_back(Agent& a, OperationKind kind) noexcept {
  if (!uses_credit(kind)) return;
  --a.credit.sent;
  if (has_header(kind)) a.credit.write_again = true;
}

/// Neither the device nor the application is owed anything: the record is free, the block is the
/// caller's to release.
Block* give_back(EngineContext& ctx, Agent& a, Operation& op) noexcept {
  --a.send_queue.used;
  Block* const block = op.block;
  if (op.beside) block->header_in_use = 0;
  op.kind = op.was;
  count_end(a, op, op.succeeded);
  ctx.operations.release(op);
  return block;
}

// Long messages outlive the work requests that they were offered by: their names are those of
// their records, and end with the bit that no operation's ends with.

OperationId name_of(const EngineContext& ctx, const RendezvousSend& t) noexcept {
  return {std::uint64_t{ctx.rendezvous->sends.generation(t.index)} << 32 |
          std::uint64_t{t.index} << 1 | 1};
}
constexpr bool names_long(std::uint64_t name) noexcept { return (name & 1) != 0; }

RendezvousSend* find_long(const EngineContext& ctx, const Agent& a, std::uint64_t name) noexcept {
  RendezvousSend* const t = ctx.rendezvous->sends.find(static_cast<std::uint32_t>(name) >> 1,
                                                       static_cast<std::uint32_t>(name >> 32));
  return t != nullptr && t->agent == &a && !t->cancelled ? t : nullptr;
}

constexpr bool is_offer(OperationKind kind) noexcept {
  return kind == OperationKind::rendezvous_offer || kind == OperationKind::rendezvous_offer_imm;
}

/// Neither the device nor the peer hears of it.
void drop_unposted(EngineContext& ctx, Agent& a, Operation* before, Operation& op) noexcept {
  unlink(a, before, op);
  op.was = op.kind;
  op.succeeded = false;
  if (Block* const block = give_back(ctx, a, op); block != nullptr) detail::release(block);
}

/// Takes back an offer that is still deferred, and what binds its window right before it; answers
/// whether it was.
bool withdraw(EngineContext& ctx, Agent& a, const RendezvousSend& t) noexcept {
  Operation* before_bind = nullptr;
  Operation* before = nullptr;
  Operation* op = a.send_queue.deferred;
  while (op != nullptr && !(is_offer(op->kind) && find_rendezvous_send(ctx, a, *op) == &t)) {
    before_bind = before;
    before = op;
    op = op == a.send_queue.deferred_last ? nullptr : op->next();
  }
  if (op == nullptr) return false;
  const bool bound = t.key.is_window();
  if (bound && (before == nullptr || before->kind != OperationKind::rendezvous_bind)) return false;
  drop_unposted(ctx, a, before, *op);
  if (bound) drop_unposted(ctx, a, before_bind, *before);
  --a.credit.sent;
  a.credit.write_again = true;
  return true;
}

bool cancel_long(EngineContext& ctx, Agent& a, std::uint64_t name) noexcept {
  RendezvousSend* const t = find_long(ctx, a, name);
  if (t == nullptr) return false;
  if (withdraw(ctx, a, *t)) drop_unposted_offer(ctx, *t);
  t->cancelled = t->cancel_pending = true;
  ctx.rendezvous->pending_cancellations.push_back(*t);
  ++ctx.pending_cancellations;
  list_grant(ctx, a);
  return true;
}

/// One that the peer was offered keeps its record, its key and its block until that has answered.
void tell(EngineContext& ctx, RendezvousSend& t) noexcept {
  if (t.never_posted) return complete_rendezvous_send(ctx, *t.agent, t, Status::cancelled);
  const CompletionCallback done = std::exchange(t.done, {});
  Completion completion;
  completion.status = Status::cancelled;
  if (done) done(completion);
}

/// At most so many, as callbacks may give up more; any of the list may end in them.
void tell_cancelled_long(EngineContext& ctx, std::uint32_t most) noexcept {
  auto& pending = ctx.rendezvous->pending_cancellations;
  for (; most != 0 && !pending.empty(); --most) {
    RendezvousSend& t = pending.pop_front();
    t.cancel_pending = false;
    tell(ctx, t);
  }
}

void tell(EngineContext& ctx, Operation& op) noexcept {
  Agent& a = *op.agent;
  op.untold = false;
  const bool calls_back = op.calls_back;
  CompletionCallback done;
  if (calls_back) done = op.done;
  const bool over = !op.with_device;
  const std::uint32_t list = over && is_raw(op.was) ? detach_list(a, op) : kNone;
  Block* const block = over ? give_back(ctx, a, op) : nullptr;
  Completion completion;
  completion.status = Status::cancelled;
  if (calls_back) done(completion);
  if (block != nullptr) detail::release(block);
  if (list != kNone) drop_list(a, list);
  if (over && is_drained(a)) on_drained(ctx, a);
}

}  // namespace

bool cancel(EngineContext& ctx, Agent& a, std::uint64_t name) noexcept {
  if (names_long(name)) return cancel_long(ctx, a, name);
  Operation* before = nullptr;
  for (Operation* op = a.send_queue.deferred; op != nullptr;) {
    if (op->wr.wr_id == name && is_users(op->kind)) {
      unlink(a, before, *op);
      take_credit_back(a, op->kind);
      give_up(ctx, a, *op, false);
      return true;
    }
    before = op;
    op = op == a.send_queue.deferred_last ? nullptr : op->next();
  }
  for (Operation* op = a.send_queue.posted; op != nullptr; op = op->next()) {
    if (op->wr.wr_id == name && is_users(op->kind)) {
      give_up(ctx, a, *op, true);
      return true;
    }
  }
  return false;
}

void run_cancel_callbacks(EngineContext& ctx) noexcept {
  const std::uint32_t due = std::exchange(ctx.pending_cancellations, 0);
  // Those that callbacks give up meanwhile come into a list of their own: the next poll's.
  Operation* op = ctx.first_cancelled;
  ctx.first_cancelled = nullptr;
  while (op != nullptr) {
    Operation* const next = op->next_untold;
    tell(ctx, *op);
    op = next;
  }
  tell_cancelled_long(ctx, due);
}

void end_cancelled(EngineContext& ctx, Agent& a, Operation& op, Status status) noexcept {
  op.succeeded = status == Status::ok;
  op.with_device = false;
  if (op.untold) return;  // it ends when its callback has run
  if (const std::uint32_t list = is_raw(op.was) ? detach_list(a, op) : kNone; list != kNone)
    drop_list(a, list);
  if (Block* const block = give_back(ctx, a, op); block != nullptr) detail::release(block);
}

namespace {

/// The newest long message that is neither cancelled nor ended.
OperationId last_long(const EngineContext& ctx, const Agent& a) noexcept {
  for (const RendezvousSend& t : a.rendezvous.sends) {
    if (!t.cancelled) return name_of(ctx, t);
  }
  return {};
}

/// What the application knows a record by; that of nothing if it is none of the application's, or
/// what it stands for has ended.
OperationId name_of(const EngineContext& ctx, const Agent& a, const Operation& op) noexcept {
  if (is_users(op.kind)) return {op.wr.wr_id};
  const RendezvousSend* const t = is_offer(op.kind) ? find_rendezvous_send(ctx, a, op) : nullptr;
  return t != nullptr && !t->cancelled ? name_of(ctx, *t) : OperationId{};
}

}  // namespace

OperationId last_operation(const EngineContext& ctx, const Agent& a) noexcept {
  const Operation* const last =
      a.send_queue.deferred != nullptr ? a.send_queue.deferred_last : a.send_queue.posted_last;
  if (last != nullptr && (a.send_queue.deferred != nullptr || a.send_queue.posted != nullptr) &&
      is_users(last->kind))
    return {last->wr.wr_id};
  // The agent's own come between.
  OperationId found;
  const auto look = [&](const Operation& op) {
    if (const OperationId name = name_of(ctx, a, op)) found = name;
  };
  for (const Operation* op = a.send_queue.posted; op != nullptr; op = op->next()) look(*op);
  for (const Operation* op = a.send_queue.deferred; op != nullptr;
       op = op == a.send_queue.deferred_last ? nullptr : op->next())
    look(*op);
  // Long messages whose offers the device is done with are older than what it has.
  return found ? found : last_long(ctx, a);
}

}  // namespace spinwire::agent
