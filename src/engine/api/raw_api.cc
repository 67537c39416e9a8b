// The public face of raw connections. Hot.
#include "agent/agent.h"
#include "engine/api/operate.h"
#include "spinwire/connection.h"
#include "spinwire/raw.h"

namespace spinwire {

using agent::Agent;
using engine::deferred;
using engine::diagnose;
using engine::locate;

Status Connection::post_receive(std::span<const BufferSlice> into,
                                const RawReceiveCallback& on_received,
                                const RawPostedCallback& on_posted, Post post) {
  Agent* const a = locate(core_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(core_);
  return agent::post_receive(core_->context, *a,
                             {into, on_received, on_posted, deferred(*core_, post)});
}

Status Connection::send_raw(std::span<const BufferSlice> data, const CompletionCallback& done,
                            Post post) {
  Agent* const a = locate(core_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(core_);
  return agent::send_raw(core_->context, *a, {data, {}, done, deferred(*core_, post)});
}

Status Connection::send_raw_with_imm(std::span<const BufferSlice> data, std::uint32_t immediate,
                                     const CompletionCallback& done, Post post) {
  Agent* const a = locate(core_, index_, generation_);
  if (a == nullptr) [[unlikely]]
    return diagnose(core_);
  return agent::send_raw(core_->context, *a, {data, immediate, done, deferred(*core_, post)});
}

}  // namespace spinwire
