// Operations that the application gives up: out of the ordinary, so that the others need not know.
#include "agent/completion.h"
#include "agent/submit.h"

namespace spinwire::agent {
namespace {

/// Its callback is due in the next poll, which finds the agent in a list of those with work.
void give_up(Shared& s, Agent& a, Operation& op, bool with_device) noexcept {
  op.was = op.kind;
  op.kind = OperationKind::cancelled;
  op.with_device = with_device;
  op.succeeded = false;
  op.untold = true;
  op.next_untold = nullptr;
  (s.untold_first == nullptr ? s.untold_first : s.untold_last->next_untold) = &op;
  s.untold_last = &op;
  list_grant(s, a);
}

/// Takes a deferred operation out of its agent's order.
void unlink(Agent& a, Operation* before, Operation& op) noexcept {
  const bool last = &op == a.deferred_last;
  if (before == nullptr) {
    a.deferred = last ? nullptr : op.next();
  } else {
    before->wr.next = op.wr.next;
    if (last) a.deferred_last = before;
  }
}

/// What the message was built with: a credit, and the telling of ours, which the peer may not have
/// heard of otherwise.
void take_credit_back(Agent& a, OperationKind kind) noexcept {
  if (!uses_credit(kind)) return;
  --a.sent;
  if (has_header(kind)) a.tell_again = true;
}

/// Neither the device nor the application is owed anything: the record is free, the block is the
/// caller's to release.
Block* give_back(Shared& s, Agent& a, Operation& op) noexcept {
  --a.sq_used;
  Block* const block = op.block;
  if (op.beside) block->header_in_use = 0;
  op.kind = op.was;
  count_end(a, op, op.succeeded);
  s.operations.release(op);
  return block;
}

void tell(Shared& s, Operation& op) noexcept {
  Agent& a = *op.agent;
  op.untold = false;
  const bool calls_back = op.calls_back;
  CompletionCallback done;
  if (calls_back) done = op.done;
  const bool over = !op.with_device;
  const std::uint32_t list = over && is_raw(op.was) ? detach_list(a, op) : kNone;
  Block* const block = over ? give_back(s, a, op) : nullptr;
  Completion completion;
  completion.status = Status::cancelled;
  if (calls_back) done(completion);
  if (block != nullptr) detail::release(block);
  if (list != kNone) drop_list(a, list);
  if (over && is_drained(a)) on_drained(s, a);
}

}  // namespace

bool cancel(Shared& s, Agent& a, std::uint64_t wr_id) noexcept {
  Operation* before = nullptr;
  for (Operation* op = a.deferred; op != nullptr;) {
    if (op->wr.wr_id == wr_id && is_users(op->kind)) {
      unlink(a, before, *op);
      take_credit_back(a, op->kind);
      give_up(s, a, *op, false);
      return true;
    }
    before = op;
    op = op == a.deferred_last ? nullptr : op->next();
  }
  for (Operation* op = a.posted; op != nullptr; op = op->next()) {
    if (op->wr.wr_id == wr_id && is_users(op->kind)) {
      give_up(s, a, *op, true);
      return true;
    }
  }
  return false;
}

void tell_cancelled(Shared& s) noexcept {
  // Those that callbacks give up meanwhile come into a list of their own: the next poll's.
  Operation* op = s.untold_first;
  s.untold_first = nullptr;
  while (op != nullptr) {
    Operation* const next = op->next_untold;
    tell(s, *op);
    op = next;
  }
}

void end_cancelled(Shared& s, Agent& a, Operation& op, Status status) noexcept {
  op.succeeded = status == Status::ok;
  op.with_device = false;
  if (op.untold) return;  // it ends when its callback has run
  if (const std::uint32_t list = is_raw(op.was) ? detach_list(a, op) : kNone; list != kNone)
    drop_list(a, list);
  if (Block* const block = give_back(s, a, op); block != nullptr) detail::release(block);
}

const Operation* last_operation(const Agent& a) noexcept {
  // The agent's own come between; a long message, whose parts cannot be cancelled, hides what it is
  // behind.
  const auto accepted = [](const Operation* found, const Operation& op) {
    return takes_users_record(op.kind) ? &op : found;
  };
  const Operation* const last = a.deferred != nullptr ? a.deferred_last : a.posted_last;
  if (last != nullptr && (a.deferred != nullptr || a.posted != nullptr) && is_users(last->kind))
    return last;
  const Operation* found = nullptr;
  for (const Operation* op = a.posted; op != nullptr; op = op->next()) found = accepted(found, *op);
  for (const Operation* op = a.deferred; op != nullptr;
       op = op == a.deferred_last ? nullptr : op->next())
    found = accepted(found, *op);
  return found != nullptr && is_users(found->kind) ? found : nullptr;
}

}  // namespace spinwire::agent
