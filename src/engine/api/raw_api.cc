// Public API of raw connections. Hot.
#include "agent/agent.h"
#include "engine/api/operate.h"
#include "spinwire/connection.h"
#include "spinwire/raw.h"

namespace spinwire {

using agent::Agent;
using detail::EngineCore;
using engine::locate;
using engine::with_agent;
using engine::with_operation;

Status Connection::post_receive(std::span<const BufferSlice> into,
                                const RawReceiveCallback& on_received,
                                const RawPostedCallback& on_posted, Post post) {
  return with_operation(
      slot_, index_, generation_, post, [&](EngineCore& core, Agent& a, bool defer) {
        return agent::post_receive(core.context, a, {into, on_received, on_posted, defer});
      });
}

Status Connection::submit_send_raw(std::span<const BufferSlice> data,
                                   const CompletionCallback& done, Post post) {
  return with_operation(slot_, index_, generation_, post,
                        [&](EngineCore& core, Agent& a, bool defer) {
                          return agent::send_raw(core.context, a, {data, {}, done, defer});
                        });
}

Status Connection::submit_send_raw_with_imm(std::span<const BufferSlice> data,
                                            std::uint32_t immediate, const CompletionCallback& done,
                                            Post post) {
  return with_operation(slot_, index_, generation_, post,
                        [&](EngineCore& core, Agent& a, bool defer) {
                          return agent::send_raw(core.context, a, {data, immediate, done, defer});
                        });
}

}  // namespace spinwire
