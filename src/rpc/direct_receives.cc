#include "rpc/direct_receives.h"

#include <algorithm>

namespace spinwire::rpc {

DirectReceives::DirectReceives(agent::Shared& s, std::uint32_t depth, std::size_t offset,
                               std::uint32_t room)
    : offset_(offset),
      shared_(s),
      receives_(std::make_unique<Receive[]>(depth)),
      posted_(std::make_unique<Receive*[]>(depth)),
      arrived_(std::make_unique<Receive*[]>(depth)) {
  kept_.reserve(depth);
  missing_.reserve(depth);
  lists_.posted = posted_.get();
  lists_.arrived = arrived_.get();
  lists_.room = room;
  lists_.wr_id = agent::receive_id(0);
  while (made_ < depth && fill(receives_[made_])) ++made_;
}

DirectReceives::~DirectReceives() {
  visit_blocks([](Block* block) { detail::release(block); });
}

bool DirectReceives::fill(Receive& receive) noexcept {
  Block* const block = shared_.arena->allocate(memory::PoolId::receive, offset_ + lists_.room);
  receive.owner = block;
  if (block != nullptr) receive.to = block->payload + offset_;
  return block != nullptr;
}

void DirectReceives::open(std::uint32_t count) noexcept {
  for (count = std::min(count, made_); open_ < count; ++open_) post(receives_[open_]);
}

/// Gives those that were kept other blocks; answers how many have one, which lie in front then.
std::uint32_t DirectReceives::replace_kept(Receive** first, std::uint32_t count) noexcept {
  for (const std::uint32_t i : kept_) {
    Receive& receive = *first[i];
    detail::release(static_cast<Block*>(receive.owner));  // whoever kept it holds a reference
    if (fill(receive)) continue;
    missing_.push_back(&receive);
    first[i] = nullptr;
  }
  kept_.clear();
  return static_cast<std::uint32_t>(std::remove(first, first + count, nullptr) - first);
}

void DirectReceives::upkeep() noexcept {
  while (!missing_.empty() && fill(*missing_.back())) {
    post(*missing_.back());
    missing_.pop_back();
  }
}

}  // namespace spinwire::rpc
