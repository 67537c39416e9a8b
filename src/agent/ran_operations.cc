// READs and WRITEs that the device has run at once, without a completion: their callbacks run in
// the next poll. Hot.
#include <utility>

#include "agent/completion.h"
#include "agent/submit.h"

namespace spinwire::agent {

Agent*& next_that_ran(Agent& a) noexcept { return a.ran.next; }

void run_deferred(EngineContext& ctx, Agent& a) noexcept {
  SendQueue& queue = a.send_queue;
  // Operations end in order.
  if (queue.posted != nullptr && !queue.posted_last->has_run) return;
  Operation& first = *queue.deferred;
  queue.deferred_last->wr.next = nullptr;
  ibv_send_wr* const rest = ctx.direct->run(a.qp, &first.wr);
  if (rest == &first.wr) return;
  Operation* last = nullptr;
  for (ibv_send_wr* wr = &first.wr; wr != rest; wr = wr->next) {
    last = Operation::of(wr);
    last->has_run = true;
  }
  last->wr.next = nullptr;
  if (queue.posted == nullptr) {
    queue.posted = &first;
  } else {
    queue.posted_last->wr.next = &first.wr;
  }
  queue.posted_last = last;
  queue.deferred = rest == nullptr ? nullptr : Operation::of(rest);
  if (rest == nullptr) ++ctx.stats.doorbells;  // else the rest is posted with another one
  if (!std::exchange(a.ran.is_listed, true)) ctx.ran_agents.push_back(a);
}

namespace {

std::uint32_t end_ran_operations_of(EngineContext& ctx, Agent& a) noexcept {
  // Those that a callback begins end in the next poll.
  const std::uint32_t most = a.send_queue.used;
  std::uint32_t ended = 0;
  for (; ended != most; ++ended) {
    const Operation* const op = a.send_queue.posted;
    if (op == nullptr || !op->has_run) break;
    end_posted(ctx, a, Status::ok);
  }
  if (ended == 0) return 0;
  a.liveness.last_completion = ctx.now;
  if (is_drained(a)) [[unlikely]]
    continue_close(ctx, a);
  return ended;
}

}  // namespace

std::uint32_t end_ran_operations(EngineContext& ctx) noexcept {
  std::uint32_t ended = 0;
  ctx.ran_agents.run_round([&](Agent& a) {
    a.ran.is_listed = false;
    ended += end_ran_operations_of(ctx, a);
  });
  ctx.stats.completions += ended;
  return ended;
}

void await_ran_operations(EngineContext& ctx) noexcept {
  ctx.ran_agents.for_each([&ctx](Agent& first) {
    queue_flush(ctx, first);  // makes the next poll do its whole work
    return false;
  });
}

void forget_ran_operations(EngineContext& ctx, Agent& a) noexcept {
  if (std::exchange(a.ran.is_listed, false)) ctx.ran_agents.erase(a);
}

}  // namespace spinwire::agent
