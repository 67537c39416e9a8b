#include "agent/operation_samples.h"

#include <algorithm>
#include <utility>

#include "agent/agent.h"
#include "agent/engine_context.h"

namespace spinwire::agent {
namespace {

using observe::TimedStage;
using observe::TimedWork;

TimedWork work_of(const Agent& a, const Operation& op) noexcept {
  switch (op.kind) {
    case OperationKind::write:
    case OperationKind::write_imm:
    case OperationKind::write_gathered:
    case OperationKind::raw_write_imm:
      return TimedWork::write;
    case OperationKind::read:
      return TimedWork::read;
    case OperationKind::compare_swap:
    case OperationKind::fetch_add:
      return TimedWork::atomic;
    case OperationKind::notice:
      return TimedWork::write_and_send;
    case OperationKind::raw_send:
    case OperationKind::raw_send_imm:
      return TimedWork::raw_send;
    default:
      // The embedded device also carries messages above the limit without a rendezvous.
      return op.length > a.send_queue.max_eager ? TimedWork::long_message : TimedWork::message;
  }
}

void record_stages(EngineContext& ctx, const OperationSample& sample) noexcept {
  const std::uint64_t delivered = ctx.clock.now();
  const auto record = [&](TimedStage stage, std::uint64_t from, std::uint64_t to) {
    ctx.latencies.record(sample.work, stage, ctx.clock.duration(to - std::min(from, to)));
  };
  record(TimedStage::total, sample.accepted, delivered);
  if (sample.posted != 0) {
    record(TimedStage::posting, sample.accepted, sample.posted);
    record(TimedStage::transfer, sample.posted, std::max(ctx.now, sample.posted));
  }
  record(TimedStage::delivery, std::max(ctx.now, sample.posted), delivered);
}

void end_sample(EngineContext& ctx, std::uint32_t index, const Completion& completion) noexcept {
  OperationSample& sample = ctx.operation_samples->samples[index];
  if (completion.status == Status::ok) record_stages(ctx, sample);
  const bool calls_back = sample.calls_back;
  CompletionCallback done;
  if (calls_back) done = sample.done;
  if (ctx.unposted_sample == &sample) ctx.unposted_sample = nullptr;
  sample.agent = nullptr;
  if (calls_back) done(completion);
}

/// A free record for work that begins now; null: too many are in use.
OperationSample* take_sample(EngineContext& ctx, const Agent& a, TimedWork work) noexcept {
  set_next_sample(ctx);
  if (ctx.operation_samples == nullptr) return nullptr;
  auto& samples = ctx.operation_samples->samples;
  const auto free = std::find_if(samples.begin(), samples.end(),
                                 [](const OperationSample& s) { return s.agent == nullptr; });
  if (free == samples.end()) return nullptr;
  free->agent = &a;
  free->work = work;
  free->accepted = ctx.clock.now();
  free->posted = 0;
  ctx.unposted_sample = &*free;
  return &*free;
}

CompletionCallback measuring_callback(EngineContext& ctx, const OperationSample& sample) noexcept {
  const auto index = static_cast<std::uint32_t>(&sample - ctx.operation_samples->samples.data());
  return [&ctx, index](const Completion& completion) { end_sample(ctx, index, completion); };
}

}  // namespace

void open_samples(EngineContext& ctx) {
  ctx.latencies.open();
  ctx.operation_samples = std::make_unique<OperationSamples>();
  set_next_sample(ctx);
}

void set_next_sample(EngineContext& ctx) noexcept {
  const std::uint32_t interval = ctx.config.observability.sample;
  if (interval == 0 || ctx.operation_samples == nullptr) {
    ctx.until_sample = ~0u;  // long enough, and harmless when it is over
    return;
  }
  // A fixed interval could always find the same kind of a mix of operations.
  std::uint64_t& random = ctx.operation_samples->random;
  random ^= random << 13;
  random ^= random >> 7;
  random ^= random << 17;
  ctx.until_sample = static_cast<std::uint32_t>(1 + random % (2 * std::uint64_t{interval} - 1));
}

void begin_sample(EngineContext& ctx, const Agent& a, Operation& op) noexcept {
  OperationSample* const sample = take_sample(ctx, a, work_of(a, op));
  if (sample == nullptr) return;
  sample->calls_back = op.calls_back;
  if (op.calls_back) sample->done = op.done;
  op.calls_back = true;
  op.done = measuring_callback(ctx, *sample);
}

void begin_long_sample(EngineContext& ctx, const Agent& a, CompletionCallback& done) noexcept {
  OperationSample* const sample = take_sample(ctx, a, TimedWork::long_message);
  if (sample == nullptr) return;
  sample->calls_back = static_cast<bool>(done);
  if (done) sample->done = done;
  done = measuring_callback(ctx, *sample);
}

void note_posted(EngineContext& ctx, const Agent& a) noexcept {
  if (ctx.unposted_sample->agent != &a) return;
  std::exchange(ctx.unposted_sample, nullptr)->posted = ctx.clock.now();
}

}  // namespace spinwire::agent
