
#include <string>

#include "agent/agent.h"
#include "agent/raw_queue.h"
#include "base/error.h"

namespace spinwire::agent {
namespace {

std::string audit_receives(RawQueue& q) {
  const std::uint32_t outstanding = q.accepted - q.completed;
  if (outstanding > q.depth || q.posted - q.completed > outstanding ||
      q.notified - q.completed > q.posted - q.completed) {
    return base::format("of {} receives, {} are outstanding, {} posted and {} notified of", q.depth,
                        outstanding, q.posted - q.completed, q.notified - q.completed);
  }
  std::uint32_t callbacks_due = 0;
  for (std::uint32_t i = q.completed; i != q.accepted; ++i) {
    const RawSlot& slot = q.slot(i);
    const auto count = static_cast<std::uint32_t>(slot.wr.num_sge);
    if (slot.wr.wr_id != raw_receive_id(i) || count > q.receive_elements)
      return base::format("receive {} is not its own", i - q.completed);
    for (std::uint32_t k = 0; k < count; ++k) {
      if (q.blocks_of(i)[k]->refs == 0)
        return base::format("receive {} goes into a free block", i - q.completed);
    }
    if (i - q.completed >= q.notified - q.completed && slot.on_posted) ++callbacks_due;
  }
  if (callbacks_due == q.callbacks_due) return {};
  return base::format("{} receives are to be notified of, {} counted", callbacks_due,
                      q.callbacks_due);
}

/// Each list is free, or belongs to one operation.
std::string audit_lists(const EngineContext& ctx, const Agent& a) {
  const RawQueue& q = *a.raw;
  std::uint32_t found = 0;
  for (std::uint32_t i = q.first_free_elements(); i != kNone; i = q.element_count(i)) {
    if (i >= q.lists() || ++found > q.lists()) return "the free lists of elements are broken";
  }
  const auto count = [&found](const Operation& op) { found += op.wr.sg_list != op.sges ? 1 : 0; };
  for (const Operation* op = a.send_queue.posted; op != nullptr; op = op->next()) count(*op);
  for (const Operation* op = a.send_queue.deferred; op != nullptr;
       op = op == a.send_queue.deferred_last ? nullptr : op->next())
    count(*op);
  ctx.cancellations.for_each([&](const Cancellation& each) {
    const Operation* const op = each.of_send ? nullptr : &Operation::of(each);
    if (op != nullptr && op->agent == &a && !op->with_device) count(*op);
    return true;
  });
  if (found == q.lists()) return {};
  return base::format("{} lists of elements are free or in use, of {}", found, q.lists());
}

}  // namespace

std::string audit_raw(EngineContext& ctx, const Agent& a) {
  RawQueue& q = *a.raw;
  if (std::string fault = audit_receives(q); !fault.empty()) return fault;
  if (std::string fault = audit_lists(ctx, a); !fault.empty()) return fault;
  bool listed = false;
  for (const Agent& each : ctx.raw->queue) listed |= &each == &a;
  if (listed != q.in_queue) return "its receives are listed wrongly";
  const bool waits = takes_raw_receives(a) && (q.posted != q.accepted || q.callbacks_due != 0);
  if (waits && (!listed || !a.credit.in_end_of_poll_list))
    return "receives wait and no poll will post them";
  return {};
}

}  // namespace spinwire::agent
