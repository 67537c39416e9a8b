#include "rpc/call_samples.h"

#include <algorithm>

#include "agent/operation_samples.h"

namespace spinwire::rpc {
namespace {

using observe::TimedStage;
using observe::TimedWork;

void end_sample(Rpc& r, std::uint32_t index, Reply& reply) noexcept {
  CallSample& sample = r.samples[index];
  const agent::EngineContext& ctx = r.context;
  if (reply.status() == Status::ok) {
    const std::uint64_t delivered = ctx.clock.now();
    const auto time = [&](std::uint64_t from, std::uint64_t to) {
      return ctx.clock.duration(to - std::min(from, to));
    };
    observe::Latencies& latencies = r.context.latencies;
    latencies.record(TimedWork::call, TimedStage::total, time(sample.accepted, delivered));
    latencies.record(TimedWork::call, TimedStage::transfer, time(sample.accepted, ctx.now));
    latencies.record(TimedWork::call, TimedStage::delivery, time(ctx.now, delivered));
    latencies.record(TimedWork::call, sample.method, time(sample.accepted, delivered));
  }
  const ReplyCallback done = sample.done;
  sample.in_use = false;
  done(reply);
}

}  // namespace

CallSample* begin_sample(Rpc& r, Method method, const ReplyCallback& done,
                         ReplyCallback& measuring) noexcept {
  agent::set_next_sample(r.context);
  if (!r.context.latencies.is_open()) return nullptr;
  const auto free = std::find_if(r.samples.begin(), r.samples.end(),
                                 [](const CallSample& sample) { return !sample.in_use; });
  if (free == r.samples.end()) return nullptr;
  *free = {done, r.context.clock.now(), method, true};
  const auto index = static_cast<std::uint32_t>(free - r.samples.begin());
  measuring = [&r, index](Reply& reply) { end_sample(r, index, reply); };
  return &*free;
}

void run_sampled_handler(Rpc& r, Request& request) noexcept {
  agent::set_next_sample(r.context);
  const Method method = request.method();
  const std::uint64_t begin = r.context.clock.now();
  r.handlers[method](request);
  const Nanoseconds time = r.context.clock.duration(r.context.clock.now() - begin);
  r.context.latencies.record(TimedWork::handler, TimedStage::total, time);
  r.context.latencies.record(TimedWork::handler, method, time);
}

}  // namespace spinwire::rpc
