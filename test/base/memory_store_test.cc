// Memory kept for the next user: it is zeroed and shared with nobody.
#include "base/memory_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "base/shared_memory.h"

namespace memory_store_test {
namespace {

using spinwire::base::find_shared_memory;
using spinwire::base::MemoryStore;
using spinwire::base::SharedMemory;

constexpr std::size_t kSize = std::size_t{64} << 20;

SharedMemory make(std::size_t size = kSize, bool populate = false) {
  auto made = SharedMemory::create(
      size, {.name = "test", .page_size = 0, .populate = populate, .kernel_populates = true});
  EXPECT_TRUE(made);
  return made ? std::move(*made) : SharedMemory();
}

struct Kept {
  std::shared_ptr<MemoryStore> store = std::make_shared<MemoryStore>(2);
  std::optional<MemoryStore::Scope> scope{std::in_place, store};
};

TEST(MemoryStore, WhatComesBackIsZeroed) {
  const Kept kept;
  const std::byte* before = nullptr;
  {
    SharedMemory memory = make();
    before = memory.data();
    // Writes in several places and across page boundaries.
    std::memset(memory.data(), 1, 10'000);
    memory.data()[kSize / 2] = std::byte{2};
    memory.data()[kSize - 1] = std::byte{3};
  }
  const SharedMemory memory = make();
  ASSERT_EQ(memory.data(), before);
  EXPECT_TRUE(std::all_of(memory.data(), memory.data() + 16'384,
                          [](std::byte b) { return b == std::byte{0}; }));
  EXPECT_EQ(memory.data()[kSize / 2], std::byte{0});
  EXPECT_EQ(memory.data()[kSize - 1], std::byte{0});
  EXPECT_EQ(memory.size(), kSize);
  const auto found = find_shared_memory(memory.data() + 5, 10);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->fd, memory.fd());
}

TEST(MemoryStore, NobodyElseGetsIt) {
  Kept kept;
  const SharedMemory first = make();
  const SharedMemory second = make();
  EXPECT_NE(first.data(), second.data());
  const std::byte* before = nullptr;
  {
    const SharedMemory third = make();
    before = third.data();
  }
  const SharedMemory other = make(kSize / 2);
  EXPECT_EQ(other.size(), kSize / 2);
  const SharedMemory populated = make(kSize / 2, true);
  EXPECT_NE(populated.data(), other.data());
  kept.scope.reset();
  EXPECT_EQ(MemoryStore::of_thread(), nullptr);
  const SharedMemory outside = make();
  EXPECT_NE(outside.data(), before);
  EXPECT_EQ(kept.store->take(kSize).data(), before);  // the store kept it
}

TEST(MemoryStore, TooMuchIsNotKept) {
  const Kept kept;
  {
    const SharedMemory touched = make();
    std::memset(touched.data(), 1, MemoryStore::kMostBytes + 1);
  }
  EXPECT_FALSE(kept.store->take(kSize));
  { const SharedMemory a = make(), b = make(), c = make(); }
  const SharedMemory a = kept.store->take(kSize), b = kept.store->take(kSize);
  EXPECT_TRUE(a && b);
  EXPECT_FALSE(kept.store->take(kSize));
}

TEST(MemoryStore, MemoryMayOutliveIt) {
  std::optional<Kept> kept(std::in_place);
  SharedMemory memory = make();
  const void* const at = memory.data();
  kept.reset();
  memory.data()[0] = std::byte{1};
  memory = SharedMemory();
  EXPECT_FALSE(find_shared_memory(at, 1));
}

}  // namespace
}  // namespace memory_store_test
