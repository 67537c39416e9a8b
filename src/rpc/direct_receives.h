// The port's receives where the device takes them directly: a block for each, which the device has
// while it is posted. Hot.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "agent/shared.h"
#include "base/direct_datagrams.h"

namespace spinwire::rpc {

class DirectReceives {
 public:
  using Block = detail::Block;
  using Receive = base::DirectReceive;

  /// `depth` receives, of which none is posted yet, for datagrams of up to `room` bytes, which
  /// begin at `offset` in their blocks. May throw std::bad_alloc. Set-up.
  DirectReceives(agent::Shared& s, std::uint32_t depth, std::size_t offset, std::uint32_t room);
  DirectReceives(const DirectReceives&) = delete;
  DirectReceives& operator=(const DirectReceives&) = delete;
  ~DirectReceives();

  /// For the device.
  [[nodiscard]] base::DirectReceives& lists() noexcept { return lists_; }
  /// Those with a block; as many as were asked for unless the pool was dry.
  [[nodiscard]] std::uint32_t made() const noexcept { return made_; }
  [[nodiscard]] std::uint32_t missing() const noexcept {
    return static_cast<std::uint32_t>(missing_.size());
  }

  /// Number `i` of those that arrived and were not given back.
  [[nodiscard]] const Receive& arrived(std::uint32_t i) const noexcept {
    return *lists_.arrived[i];
  }
  /// The block of that one was kept: it needs another when it is given back.
  void keep(std::uint32_t i) noexcept { kept_.push_back(i); }
  /// The first `count` are posted again. There may be more, which a later poll tells of.
  void give_back(std::uint32_t count) noexcept {
    Receive** const first = lists_.arrived;
    const std::uint32_t good = kept_.empty() ? count : replace_kept(first, count);
    std::copy_n(first, good, lists_.posted + lists_.posted_count);
    lists_.posted_count += good;
    lists_.arrived_count -= count;
    if (lists_.arrived_count != 0) [[unlikely]]
      std::copy_n(first + count, lists_.arrived_count, first);
  }
  /// Posts more until there are `count`. Cold.
  void open(std::uint32_t count) noexcept;
  /// Blocks for receives that have none. A part of the control step.
  void upkeep() noexcept;

  template <typename Visit>
  void visit_blocks(Visit&& visit) {
    for (std::uint32_t i = 0; i < made_; ++i)
      if (auto* block = static_cast<Block*>(receives_[i].owner); block != nullptr) visit(block);
  }

 private:
  void post(Receive& receive) noexcept { lists_.posted[lists_.posted_count++] = &receive; }
  std::uint32_t replace_kept(Receive** first, std::uint32_t count) noexcept;
  bool fill(Receive& receive) noexcept;

  base::DirectReceives lists_;
  std::vector<std::uint32_t> kept_;  ///< numbers of those arrived; has room for all
  // Cold.
  std::uint32_t made_ = 0;
  std::uint32_t open_ = 0;  ///< were posted
  std::size_t offset_;
  agent::Shared& shared_;
  std::unique_ptr<Receive[]> receives_;
  std::unique_ptr<Receive*[]> posted_;
  std::unique_ptr<Receive*[]> arrived_;
  std::vector<Receive*> missing_;  ///< without a block; has room for all
};

}  // namespace spinwire::rpc
