#include "rpc/session_failover.h"

#include "agent/reconnect.h"
#include "base/error.h"
#include "config/local_paths.h"
#include "rpc/client_session.h"

namespace spinwire::rpc {

Result<void> check_local_paths(const agent::EngineContext& ctx,
                               const std::vector<LocalPath>& paths) {
  const std::uint16_t pkey_index = ctx.attributes.queue_pair.path.pkey_index;
  if (auto good = config::check_local_paths(*ctx.device, paths, pkey_index); !good) return good;
  if (ctx.config.rpc.transport != RpcTransport::datagram) return {};
  for (const LocalPath& path : paths) {
    if (config::is_engines_own(*ctx.device, path)) continue;
    const LocalPath own = config::engines_own(*ctx.device);
    return base::fail(
        Status::unsupported, base::format("open a session through local port {}", path.port),
        base::format("rpc.transport = \"datagram\", and datagrams leave by port {}, GID index {}",
                     own.port, *own.gid_index),
        "set rpc.transport to \"automatic\": calls then travel over a connection there");
  }
  return {};
}

Result<void> use_local_path(const agent::EngineContext& ctx, ClientSession& c) {
  if (c.reconnect == nullptr) return {};
  c.reconnect->place.reset();
  const LocalPath* const path = c.reconnect->plan.local_path();
  if (path == nullptr) return {};
  verbs::QueuePairOptions used = ctx.attributes.queue_pair;
  if (auto usable = config::use_local_path(used, *ctx.device, *path); !usable) return usable;
  if (!config::is_engines_own(*ctx.device, *path)) c.reconnect->place = used.place;
  return {};
}

LocalPath local_path_of(const Rpc& r, const ClientSession& c) noexcept {
  if (!has_own_place(c)) return config::engines_own(*r.context.device);
  const verbs::Place& place = *c.reconnect->place;
  return {place.port, static_cast<std::uint32_t>(place.gid_index)};
}

void on_port_down(Rpc& r, std::uint8_t port) noexcept {
  r.clients.for_each([&r, port](ClientSession& c) {
    const bool is_open = c.state == SessionState::opening || c.state == SessionState::ready;
    if (!is_open || c.reconnect == nullptr || c.reconnect->backing_off || c.reconnect->is_over)
      return;
    const agent::AttemptEnd end{c.state == SessionState::ready, false, c.reconnect->ready_at};
    const agent::ReconnectPlan& plan = c.reconnect->plan;
    if (!plan.can_leave(port) || !plan.has_next(end, r.context.clock.now())) return;
    end_session(r, c, Status::local_error, base::format("the link of local port {} is down", port),
                agent::kPortDownRemedy);
  });
}

}  // namespace spinwire::rpc
