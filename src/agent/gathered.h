// Sends and writes of several parts of memory, and writes with a notice. A work request gathers the
// parts, up to queues.max_send_sge of them. A message above the eager limit is copied instead: a
// rendezvous message has one key. So is a message that goes without a work request.
//
// A write with a notice is two work requests that are accepted together: a WRITE, and a SEND behind
// it. A queue pair's responder takes them in this order, so the message is delivered after the data
// is there. The SEND's record answers for both.
//
// No other operation has a branch for these: their kinds are not plain, and have records of
// EngineContext::element_lists.
#pragma once

#include <infiniband/verbs.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "agent/element_lists.h"
#include "agent/engine_context.h"
#include "spinwire/buffer.h"
#include "spinwire/connection.h"
#include "spinwire/status.h"

namespace spinwire::agent {

/// Parts of a message or of a WRITE.
struct Gathered {
  std::span<const BufferSlice> parts;
  const CompletionCallback& done;
  bool defer;
};

/// Accepts a message. `tracked`: it has an id until it ends. Errors: those of Connection::send().
Status send_gathered(EngineContext& ctx, Agent& a, const Gathered& r, bool tracked) noexcept;
/// Accepts a WRITE. Errors: those of Connection::write().
Status write_gathered(EngineContext& ctx, Agent& a, const Gathered& r,
                      const RemoteRegion& remote) noexcept;
/// Accepts a WRITE and a message of the bytes `notice`. Errors: those of
/// Connection::write_and_send().
Status write_and_send(EngineContext& ctx, Agent& a, const Gathered& r, const RemoteRegion& remote,
                      std::span<const std::byte> notice) noexcept;

/// Most parts of a gathered operation on the agent's queue pair.
[[nodiscard]] inline std::uint32_t max_parts(const Agent& a) noexcept {
  // The header of a message takes an element.
  const std::uint32_t elements = a.attributes.queue_pair.send_elements;
  return std::min(elements - (a.raw != nullptr ? 0 : 1), kMaxParts);
}

/// Whether an operation of this kind has parts in a list.
[[nodiscard]] inline bool has_parts(OperationKind kind, const Operation& op) noexcept {
  return !is_raw(kind) && op.wr.sg_list != op.sges;
}
/// Drops the references to the parts.
void release_parts(EngineContext& ctx, Operation& op) noexcept;
/// Whether no part is free memory. For audits.
[[nodiscard]] bool are_parts_held(const EngineContext& ctx, const Operation& op) noexcept;
/// Ends an operation of one of the kinds from `send_gathered` on.
void end_gathered(EngineContext& ctx, Agent& a, Operation& op, Status status) noexcept;

}  // namespace spinwire::agent
