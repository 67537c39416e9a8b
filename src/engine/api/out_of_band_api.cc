// The public face of connections whose endpoints are exchanged out-of-band.
#include "base/error.h"
#include "engine/api/operate.h"
#include "engine/engine_core.h"

namespace spinwire {
namespace detail {

using agent::Agent;

Result<Agent*> locate(const EngineSlot* slot, std::uint32_t index, std::uint32_t generation,
                      const char* asked) {
  if (const Status why = engine::diagnose(slot); why != Status::not_connected)
    return engine::misused(why, asked);
  Agent* const a = engine::locate(slot, index, generation).agent;
  if (a != nullptr && a->state != ConnectionState::draining) return a;
  return base::fail(Status::not_connected, asked, "the connection has ended", "make another one");
}

}  // namespace detail

Result<void> Connection::join(const Endpoint& peer) {
  constexpr const char* kAsked = "join a peer's endpoint";
  auto a = detail::locate(slot_, index_, generation_, kAsked);
  if (!a) return tl::unexpected(a.error());
  return base::no_throw(kAsked, [&] { return slot_->core->join(**a, peer); });
}

Result<Endpoint> Connection::endpoint() const {
  constexpr const char* kAsked = "tell a connection's endpoint";
  auto a = detail::locate(slot_, index_, generation_, kAsked);
  if (!a) return tl::unexpected(a.error());
  if (!(*a)->setup.endpoint_delivered) {
    return base::fail(Status::not_connected, kAsked, "its queue pair is not there yet",
                      "wait for on_endpoint");
  }
  return agent::endpoint(slot_->core->context, **a);
}

}  // namespace spinwire
