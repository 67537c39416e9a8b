#include "agent/goodbye.h"

#include "agent/agent.h"
#include "agent/recording.h"
#include "base/error.h"
#include "wire/goodbye.h"

namespace spinwire::agent {

void close(EngineContext& ctx, Agent& a, const Goodbye& goodbye) noexcept {
  a.goodbyes.ours = wire::encode(goodbye);
  const bool lossless =
      is_ready(a) && a.raw == nullptr && a.peer.takes_goodbye_reasons && goodbye.invites_back();
  if (!lossless) return close(ctx, a);
  a.closing = a.goodbyes.by_us = a.goodbyes.awaits_peer = true;
  enter(ctx, a, ConnectionState::draining);
  if (idle(a)) continue_close(ctx, a);
}

void close_half_open(EngineContext& ctx, Agent& a, const Goodbye& goodbye) noexcept {
  if (a.stage != Stage::up) return close(ctx, a, goodbye);
  a.goodbyes.ours = wire::encode(goodbye);  // for the refusal, if it fails
}

void stop_reconnecting(Agent& a) noexcept {
  if (a.reconnect != nullptr) a.reconnect->is_over = true;
}

bool send_goodbye(EngineContext& ctx, Agent& a) noexcept {
  a.goodbye_sent = submit_internal(ctx, a, OperationKind::goodbye);
  if (a.goodbye_sent) record(ctx, a, observe::EventKind::goodbye, {"sent"});
  return a.goodbye_sent;
}

void close_at_once(EngineContext& ctx, Agent& a, const Goodbye& goodbye) noexcept {
  stop_reconnecting(a);
  a.goodbyes.awaits_peer = false;
  if (!a.goodbye_sent) {
    a.goodbyes.ours = wire::encode(goodbye);
    if (a.stage == Stage::up && a.raw == nullptr) {
      (void)send_goodbye(ctx, a);
      flush(ctx, a);
    }
  }
  if (!is_ending(a)) return close(ctx, a);
  if (idle(a)) continue_close(ctx, a);
}

std::uint32_t goodbye_number(const Agent& a) noexcept {
  if (!a.peer.takes_goodbye_reasons) return 0;
  return a.goodbyes.ours | (a.goodbyes.awaits_peer ? wire::kAwaitsGoodbye : 0);
}

Goodbye goodbye_of(const Agent& a) noexcept {
  Goodbye goodbye;
  (void)wire::decode(a.goodbyes.ours, goodbye);
  return goodbye;
}

bool note_goodbye(Agent& a, std::uint32_t number) noexcept {
  Goodbye goodbye;
  if (!wire::decode(number, goodbye, a.goodbyes.peer_awaits)) return false;
  if (a.goodbyes.by_us || a.cause.status != Status::ok) return true;
  a.cause =
      base::goodbye_error(Status::ok, base::format("talk with {}", a.peer.name.data()), goodbye);
  return true;
}

}  // namespace spinwire::agent
