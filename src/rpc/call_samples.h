// Calls whose latency is measured, for EngineParts::latencies: one in observability.sample. Cold,
// except for the count in EngineParts::until_sample.
#pragma once

#include "rpc/rpc_state.h"

namespace spinwire::rpc {

/// Whether this call or handler is to be sampled. Hot.
[[gnu::always_inline]] inline bool is_sample_due(Rpc& r) noexcept {
  return observe::kObservesHotPath && --r.context.until_sample == 0;
}
/// Replaces the callback of a call by one that measures, and then runs it. Null: too many calls are
/// being measured, or latencies are not observed. A call that is refused gives the record back by
/// drop_sample().
[[gnu::cold, gnu::noinline]] CallSample* begin_sample(Rpc& r, Method method,
                                                      const ReplyCallback& done,
                                                      ReplyCallback& measuring) noexcept;
inline void drop_sample(CallSample& sample) noexcept { sample.in_use = false; }
/// Runs a handler, and records how long it took.
[[gnu::cold, gnu::noinline]] void run_sampled_handler(Rpc& r, Request& request) noexcept;

}  // namespace spinwire::rpc
