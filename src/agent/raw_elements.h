// Lists of elements that the application posts on a raw connection. Hot.
#pragma once

#include <cstdint>
#include <span>

#include "agent/engine_context.h"
#include "agent/raw_queue.h"
#include "base/internals.h"

namespace spinwire::agent {

/// Bytes of a list of elements, or the list's error.
struct Extent {
  Status status = Status::ok;
  std::uint32_t bytes = 0;
};

/// Whether the agent's queue pair has a key to the block's memory.
inline bool has_key(const EngineContext& ctx, const Agent& a, const Block& block) noexcept {
  if (!ctx.owns(block)) return false;
  if (!a.attributes.own_domain) return true;
  // Nothing can be registered in a domain that is not made yet.
  return a.domain != nullptr ? reaches(ctx, *a.domain, block)
                             : block.lkey == ctx.staging_block->lkey;
}

inline Extent measure(const EngineContext& ctx, const Agent& a,
                      std::span<const BufferSlice> elements, std::uint32_t most) noexcept {
  if (elements.size() > most) [[unlikely]]
    return {Status::invalid_argument};
  Extent extent;
  for (const BufferSlice& e : elements) {
    if (detail::block_of(e) == nullptr || e.size() == 0) [[unlikely]]
      return {Status::out_of_bounds};
    if (e.size() > ctx.max_transfer - extent.bytes) [[unlikely]]
      return {Status::message_too_long};
    if (!has_key(ctx, a, *detail::block_of(e))) [[unlikely]]
      return {Status::invalid_argument};
    extent.bytes += static_cast<std::uint32_t>(e.size());
  }
  return extent;
}

/// Takes references to the memory of a list, and fills in its elements.
inline void hold_elements(std::span<const BufferSlice> elements, ibv_sge* sges,
                          Block** blocks) noexcept {
  for (std::size_t i = 0; i < elements.size(); ++i) {
    const BufferSlice& e = elements[i];
    detail::retain(detail::block_of(e));
    blocks[i] = detail::block_of(e);
    sges[i] = {reinterpret_cast<std::uint64_t>(e.data()), static_cast<std::uint32_t>(e.size()),
               detail::block_of(e)->lkey};
  }
}

inline void release_all(Block** blocks, int count) noexcept {
  for (int i = 0; i < count; ++i) detail::release(blocks[i]);
}

}  // namespace spinwire::agent
