// Operations that the application cancels. A cancelled operation keeps its record until its
// callback has run and the device is done with it. Cold.
#include <utility>

#include "agent/completion.h"
#include "agent/gathered.h"
#include "agent/operation_id.h"
#include "agent/rendezvous.h"
#include "agent/submit.h"

namespace spinwire::agent {
namespace {

/// Schedules the callback for the end of the next poll, which visits the agents in
/// `end_of_poll_list`.
void report_later(EngineContext& ctx, Agent& a, Cancellation& cancellation,
                  Status status) noexcept {
  cancellation.due = true;
  cancellation.status = status;
  ctx.cancellations.push_back(cancellation);
  visit_at_end_of_poll(ctx, a);
}

void mark_cancelled(EngineContext& ctx, Agent& a, Operation& op, bool with_device,
                    Status status) noexcept {
  op.was = op.kind;
  op.kind = OperationKind::cancelled;
  op.with_device = with_device;
  op.succeeded = false;
  op.cancellation.of_send = false;
  report_later(ctx, a, op.cancellation, status);
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

/// Takes back the message's credit. Its header would have advertised this engine's grants, so a
/// credit write does.
void return_credit(Agent& a, OperationKind kind) noexcept {
  if (!uses_credit(kind)) return;
  --a.credit.sent;
  if (has_header(kind)) a.credit.write_again = true;
}

/// Frees a record that neither the device nor the application waits for. The caller releases the
/// block.
Block* free_record(EngineContext& ctx, Agent& a, Operation& op) noexcept {
  --a.send_queue.used;
  Block* const block = op.block;
  if (op.header_in_headroom) block->header_in_use = 0;
  op.kind = op.was;
  if (has_parts(op.kind, op)) release_parts(ctx, op);
  count_end(a, tally_kind(op.kind), op, op.succeeded);
  ctx.operations.release(op);
  return block;
}

OperationId name_of(const EngineContext& ctx, const RendezvousSend& t) noexcept {
  return {id_of_message(t.index, ctx.rendezvous->sends.generation(t.index))};
}

RendezvousSend* find_cancellable_send(const EngineContext& ctx, const Agent& a,
                                      std::uint64_t name) noexcept {
  RendezvousSend* const t = find_message(ctx, name);
  return t != nullptr && t->agent == &a ? t : nullptr;
}

constexpr bool is_offer_kind(OperationKind kind) noexcept {
  return kind == OperationKind::rendezvous_offer || kind == OperationKind::rendezvous_offer_imm;
}

/// Drops an operation that was never posted.
void drop_unposted(EngineContext& ctx, Agent& a, Operation* before, Operation& op) noexcept {
  unlink(a, before, op);
  op.was = op.kind;
  op.succeeded = false;
  if (Block* const block = free_record(ctx, a, op); block != nullptr) detail::release(block);
}

/// Drops an offer that is still deferred, with the binding of its window right before it. Returns
/// false if the offer is posted.
bool drop_deferred_offer(EngineContext& ctx, Agent& a, const RendezvousSend& t) noexcept {
  Operation* before_bind = nullptr;
  Operation* before = nullptr;
  Operation* op = a.send_queue.deferred;
  while (op != nullptr && !(is_offer_kind(op->kind) && find_rendezvous_send(ctx, a, *op) == &t)) {
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

bool cancel_rendezvous(EngineContext& ctx, Agent& a, std::uint64_t name, Status status) noexcept {
  RendezvousSend* const t = find_cancellable_send(ctx, a, name);
  if (t == nullptr) return false;
  if (drop_deferred_offer(ctx, a, *t)) drop_unposted_offer(ctx, *t);
  t->cancelled = true;
  report_later(ctx, a, *t, status);
  return true;
}

/// A send that was offered keeps its record, its key and its block until the peer answers.
void run_cancel_callback(EngineContext& ctx, RendezvousSend& t) noexcept {
  if (t.never_posted) return complete_rendezvous_send(ctx, *t.agent, t, t.status);
  const CompletionCallback done = std::exchange(t.done, {});
  Completion completion;
  completion.status = t.status;
  if (done) done(completion);
}

void run_cancel_callback(EngineContext& ctx, Operation& op) noexcept {
  Agent& a = *op.agent;
  const bool calls_back = op.calls_back;
  CompletionCallback done;
  if (calls_back) done = op.done;
  const bool over = !op.with_device;
  const Status status = op.cancellation.status;
  const std::uint32_t list = over && is_raw(op.was) ? detach_elements(a, op) : kNone;
  Block* const block = over ? free_record(ctx, a, op) : nullptr;
  Completion completion;
  completion.status = status;
  if (calls_back) done(completion);
  if (block != nullptr) detail::release(block);
  if (list != kNone) release_elements(a, list);
  if (over && is_drained(a)) continue_close(ctx, a);
}

}  // namespace

bool cancel(EngineContext& ctx, Agent& a, std::uint64_t name, Status status) noexcept {
  if (names_message(name)) return cancel_rendezvous(ctx, a, name, status);
  Operation* before_last = nullptr;
  Operation* before = nullptr;
  for (Operation* op = a.send_queue.deferred; op != nullptr;) {
    if (op->wr.wr_id == name && is_users(op->kind)) {
      unlink(a, before, *op);
      // The WRITE of a notice goes with it.
      if (op->kind == OperationKind::notice && before != nullptr)
        drop_unposted(ctx, a, before_last, *before);
      return_credit(a, op->kind);
      mark_cancelled(ctx, a, *op, false, status);
      return true;
    }
    before_last = before;
    before = op;
    op = op == a.send_queue.deferred_last ? nullptr : op->next();
  }
  for (Operation* op = a.send_queue.posted; op != nullptr; op = op->next()) {
    if (op->wr.wr_id == name && is_users(op->kind)) {
      mark_cancelled(ctx, a, *op, true, status);
      return true;
    }
  }
  return false;
}

[[gnu::noinline]] void run_cancel_callbacks(EngineContext& ctx) noexcept {
  ctx.cancellations.run_round([&ctx](Cancellation& next) {
    next.due = false;
    next.of_send ? run_cancel_callback(ctx, static_cast<RendezvousSend&>(next))
                 : run_cancel_callback(ctx, Operation::of(next));
  });
}

void end_cancelled(EngineContext& ctx, Agent& a, Operation& op, Status status) noexcept {
  op.succeeded = status == Status::ok;
  op.with_device = false;
  if (op.cancellation.due) return;  // it ends when its callback has run
  if (const std::uint32_t list = is_raw(op.was) ? detach_elements(a, op) : kNone; list != kNone)
    release_elements(a, list);
  if (Block* const block = free_record(ctx, a, op); block != nullptr) detail::release(block);
}

namespace {

/// The newest rendezvous message that is neither cancelled nor ended; null if there is none.
const RendezvousSend* last_rendezvous(const Agent& a) noexcept {
  for (const RendezvousSend& t : a.rendezvous.sends) {
    if (!t.cancelled) return &t;
  }
  return nullptr;
}

/// The application's id of an operation; empty for an operation of the agent, and for an offer
/// whose message has ended.
OperationId name_of(const EngineContext& ctx, const Agent& a, const Operation& op) noexcept {
  if (is_users(op.kind)) return {op.wr.wr_id};
  const RendezvousSend* const t =
      is_offer_kind(op.kind) ? find_rendezvous_send(ctx, a, op) : nullptr;
  return t != nullptr && !t->cancelled ? name_of(ctx, *t) : OperationId{};
}

}  // namespace

OperationId last_operation(const EngineContext& ctx, const Agent& a) noexcept {
  const RendezvousSend* const sent = last_rendezvous(a);
  // A message whose offer was not a work request stands behind the newest one of then.
  const std::uint64_t behind =
      sent != nullptr && sent->is_direct ? sent->behind : RendezvousSend::kNoRequest;
  const Operation* const last =
      a.send_queue.deferred != nullptr ? a.send_queue.deferred_last : a.send_queue.posted_last;
  if (last != nullptr && (a.send_queue.deferred != nullptr || a.send_queue.posted != nullptr) &&
      is_users(last->kind))
    return last->wr.wr_id == behind ? name_of(ctx, *sent) : OperationId{last->wr.wr_id};
  // The newest operations may be the agent's own.
  OperationId found;
  const auto look = [&](const Operation& op) {
    if (const OperationId name = name_of(ctx, a, op)) found = name;
    if (op.wr.wr_id == behind) found = name_of(ctx, *sent);
  };
  for (const Operation* op = a.send_queue.posted; op != nullptr; op = op->next()) look(*op);
  for (const Operation* op = a.send_queue.deferred; op != nullptr;
       op = op == a.send_queue.deferred_last ? nullptr : op->next())
    look(*op);
  // Any other message whose offer has completed is older than all operations at the device.
  return found || sent == nullptr ? found : name_of(ctx, *sent);
}

}  // namespace spinwire::agent
