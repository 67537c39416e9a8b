#include "agent/operation_timers.h"

#include "agent/agent.h"
#include "agent/operation_id.h"

namespace spinwire::agent {
namespace {

/// The agent whose operation has the name; null if the operation has ended.
Agent* agent_with(EngineContext& ctx, std::uint64_t name) noexcept {
  if (!names_message(name)) {
    const Operation* const op = ctx.operations.find(name);
    return op != nullptr && is_users(op->kind) ? op->agent : nullptr;
  }
  const RendezvousSend* const t = find_message(ctx, name);
  return t != nullptr ? t->agent : nullptr;
}

}  // namespace

OperationTimers::OperationTimers(base::TimerWheel& wheel, std::uint32_t operations,
                                 std::uint32_t messages)
    : wheel_(wheel),
      operations_(operations),
      count_(operations + messages),
      records_(std::size_t{operations} + messages) {
  for (std::uint32_t i = 0; i < count_; ++i) {
    records_[i].timer.index = i;
    records_[i].timer.kind = kOperationTimer;
  }
}

OperationTimers::~OperationTimers() {
  for (std::uint32_t i = 0; i < count_; ++i) wheel_.cancel(records_[i].timer);
}

void OperationTimers::start(std::uint64_t name, std::uint64_t deadline) noexcept {
  Record& record = records_[record_of(name) + (names_message(name) ? operations_ : 0)];
  record.name = name;
  wheel_.reschedule(record.timer, deadline);
}

bool set_deadline(EngineContext& ctx, Agent& a, std::uint64_t name, std::uint64_t deadline) {
  if (agent_with(ctx, name) != &a) return false;
  if (ctx.operation_timers == nullptr) {
    ctx.operation_timers = std::make_unique<OperationTimers>(
        ctx.timers, ctx.config.queues.operations, ctx.rendezvous->sends.capacity());
  }
  ctx.operation_timers->start(name, deadline);
  return true;
}

void on_operation_timer(EngineContext& ctx, const base::Timer& timer) noexcept {
  const std::uint64_t name = ctx.operation_timers->name_of(timer);
  if (Agent* const a = agent_with(ctx, name); a != nullptr)
    (void)cancel(ctx, *a, name, Status::timed_out);
}

}  // namespace spinwire::agent
