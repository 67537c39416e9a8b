// What the ids of operations name. A rendezvous message outlives the work request of its offer: its
// id is that of its own record, with a low bit that no other operation's id has. Cold.
#pragma once

#include <cstdint>

#include "agent/engine_context.h"
#include "agent/rendezvous.h"

namespace spinwire::agent {

constexpr bool names_message(std::uint64_t id) noexcept { return (id & 1) != 0; }
constexpr std::uint64_t id_of_message(std::uint32_t index, std::uint32_t generation) noexcept {
  return std::uint64_t{generation} << 32 | std::uint64_t{index} << 1 | 1;
}
/// The index of the record, in the pool of operations or of rendezvous messages.
constexpr std::uint32_t record_of(std::uint64_t id) noexcept {
  return static_cast<std::uint32_t>(id) >> 1;
}
/// The rendezvous message of an id; null if it has ended, or was cancelled.
inline RendezvousSend* find_message(const EngineContext& ctx, std::uint64_t id) noexcept {
  RendezvousSend* const t =
      ctx.rendezvous->sends.find(record_of(id), static_cast<std::uint32_t>(id >> 32));
  return t != nullptr && !t->cancelled ? t : nullptr;
}

}  // namespace spinwire::agent
