// What agents tell the flight recorder. Cold.
#pragma once

#include <initializer_list>
#include <string_view>

#include "agent/engine_context.h"
#include "observe/recorder.h"

namespace spinwire::agent {

/// Records an event of the connection.
inline void record(EngineContext& ctx, const Agent& a, observe::EventKind kind,
                   std::initializer_list<std::string_view> text) noexcept {
  ctx.recorder.record(kind, observe::EventSubject::connection, a.index, a.generation, text);
}
/// Records why the connection ends.
inline void record(EngineContext& ctx, const Agent& a, const Error& cause) noexcept {
  record(ctx, a, observe::EventKind::error, {to_string(cause.status), ": ", cause.found});
}

}  // namespace spinwire::agent
