// What agents tell the flight recorder. Cold.
#pragma once

#include <initializer_list>
#include <string_view>

#include "agent/engine_context.h"
#include "observe/recorder.h"
#include "wire/credit_word.h"

namespace spinwire::agent {

/// Whether a message, or a word in the credit cell, has come from the peer.
inline bool was_heard(const Agent& a) noexcept {
  if (a.activity.messages_received != 0 || a.credit.received != 0) return true;
  const std::uint32_t token = a.credit.token;  // 0: there is no cell yet
  return token != 0 && a.liveness.cell_word != wire::encode(wire::CreditWord{}, token);
}
/// Whether the peer's device has carried out an operation of ours on a raw connection. From a raw
/// peer that only receives, nothing else comes.
inline bool was_answered(const Agent& a) noexcept {
  return a.raw != nullptr && a.liveness.last_completion != 0;
}
/// The ring of the connection's events, besides its own. A peer that has asked for the connection
/// is a stranger until it is heard or answers, because the frames of a handshake need no device,
/// and so is the peer of an endpoint, which is its own word. A peer that the application has
/// chosen, or that a key speaks for, is none.
inline observe::EventRing event_ring_of(const Agent& a) noexcept {
  const bool was_chosen = a.setup.outbound && !a.setup.out_of_band;
  const bool is_known = was_chosen || !a.peer.key.empty() || was_heard(a) || was_answered(a);
  return is_known ? observe::EventRing::all : observe::EventRing::strangers;
}
inline observe::EventOrigin event_origin_of(const Agent& a) noexcept {
  return {a.source->address, event_ring_of(a)};
}
/// Records an event of the connection.
inline void record(EngineContext& ctx, const Agent& a, observe::EventKind kind,
                   std::initializer_list<std::string_view> text) noexcept {
  ctx.recorder.record(kind, observe::EventSubject::connection, a.index, a.generation, text,
                      event_origin_of(a));
}
/// Records why the connection ends.
inline void record(EngineContext& ctx, const Agent& a, const Error& cause) noexcept {
  record(ctx, a, observe::EventKind::error, {to_string(cause.status), ": ", cause.found});
}

}  // namespace spinwire::agent
