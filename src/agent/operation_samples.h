// Operations whose stages are timed, for EngineParts::latencies: one in observability.sample. A
// sampled operation has a callback of the library, which runs the application's. Cold.
// EngineContext::is_sample_due() counts operations on the hot path.
#pragma once

#include <array>
#include <cstdint>

#include "agent/operation_pool.h"
#include "observe/latency.h"

namespace spinwire::agent {

struct EngineContext;

struct OperationSample {
  const Agent* agent = nullptr;  ///< null: a free record
  CompletionCallback done;
  bool calls_back = false;  ///< `done` is set
  observe::TimedWork work = observe::TimedWork::message;
  std::uint64_t accepted = 0;  ///< tick
  std::uint64_t posted = 0;    ///< tick; 0: not known
};

struct OperationSamples {
  static constexpr std::size_t kMost = 16;
  std::array<OperationSample, kMost> samples;
  std::uint64_t random = 0x9e3779b97f4a7c15;
};

/// From now on operations and calls are sampled. May throw std::bad_alloc. Set-up.
void open_samples(EngineContext& ctx);
/// Sets the number of operations until the next one that is sampled.
void set_next_sample(EngineContext& ctx) noexcept;
/// The operation, which has just begun, is to be sampled. It stays as it is if too many are.
[[gnu::cold, gnu::noinline]] void begin_sample(EngineContext& ctx, const Agent& a,
                                               Operation& op) noexcept;
/// As begin_sample() for an operation, for a rendezvous message with this callback.
[[gnu::cold, gnu::noinline]] void begin_long_sample(EngineContext& ctx, const Agent& a,
                                                    CompletionCallback& done) noexcept;
/// Operations of the agent have been posted, and one of EngineContext::unposted_sample may be among
/// them.
[[gnu::cold, gnu::noinline]] void note_posted(EngineContext& ctx, const Agent& a) noexcept;

}  // namespace spinwire::agent
