#include <gtest/gtest.h>

#include <array>
#include <cerrno>

#include "memory/arena.h"
#include "memory/window_requests.h"

namespace remote_key_test {

using spinwire::Access;
using namespace spinwire::memory;

/// A device that counts registrations and windows, and can report an access in progress.
struct FakeDevice {
  static FakeDevice* current;

  FakeDevice() {
    current = this;
    provider.name = "fake";
    provider.reg_mr = [](ibv_pd*, void*, std::size_t, int) { return current->reg(); };
    provider.dereg_mr = [](ibv_mr*) { return current->busy ? EBUSY : 0; };
    provider.alloc_mw = [](ibv_pd*, ibv_mw_type) { return &current->windows[current->made++]; };
    provider.dealloc_mw = [](ibv_mw*) { return current->busy ? EBUSY : 0; };
  }
  ibv_mr* reg() {
    mr.rkey = ++keys;
    return refuse ? nullptr : &mr;
  }

  spinwire::verbs::Provider provider{};
  ibv_pd pd{};
  ibv_mr mr{};
  std::array<ibv_mw, 8> windows{};
  std::size_t made = 0;
  std::uint32_t keys = 0;
  bool busy = false;
  bool refuse = false;
};
FakeDevice* FakeDevice::current = nullptr;

class RemoteKeyTest : public testing::Test {
 protected:
  RemoteKeyTest()
      : table_(device_.provider, &device_.pd, 4),
        windows_(std::move(*WindowPool::make(device_.provider, &device_.pd, 2))) {
    ArenaOptions options;
    options.pool_bytes.fill(kChunkBytes);
    options.hugepages = spinwire::HugepagePolicy::off;
    arena_ = std::move(*Arena::make(options));
    slab_.lkey = 7;
    arena_->set_lkey(slab_.lkey);
    block_ = arena_->allocate(PoolId::send, 256);
    target_ = {block_, block_->payload, 100, Access::remote_read};
  }
  ~RemoteKeyTest() override {
    device_.busy = false;
    spinwire::detail::release(block_);
  }

  KeySource keys() { return {windows_, table_, &slab_}; }

  FakeDevice device_;
  ArenaPtr arena_;
  ibv_mr slab_{};
  RegistrationTable table_;
  WindowPool windows_;
  spinwire::detail::Block* block_ = nullptr;
  KeyTarget target_;
  RemoteKey key_;
};

TEST_F(RemoteKeyTest, ARegistrationOpensTheBytesUntilItIsClosed) {
  ASSERT_TRUE(open_key(keys(), target_, nullptr, key_));
  EXPECT_EQ(key_.state, KeyState::open);
  EXPECT_FALSE(key_.is_window());
  EXPECT_EQ(key_.rkey, 1u);
  EXPECT_EQ(block_->refs, 2u);
  close_key(keys(), key_, block_);
  EXPECT_EQ(key_.state, KeyState::closed);
  EXPECT_EQ(block_->refs, 1u);
}

TEST_F(RemoteKeyTest, AnAccessDelaysTheEndOfARegistration) {
  ASSERT_TRUE(open_key(keys(), target_, nullptr, key_));
  device_.busy = true;
  close_key(keys(), key_, block_);
  EXPECT_EQ(key_.state, KeyState::closing);
  EXPECT_EQ(block_->refs, 2u);
  close_key(keys(), key_, block_);
  EXPECT_EQ(key_.state, KeyState::closing);
  device_.busy = false;
  EXPECT_TRUE(table_.poll_revocations());
  close_key(keys(), key_, block_);
  EXPECT_EQ(key_.state, KeyState::closed);
  EXPECT_EQ(block_->refs, 1u);
}

TEST_F(RemoteKeyTest, AKeyThatTheDeviceRefusesIsNotOpen) {
  device_.refuse = true;
  EXPECT_FALSE(open_key(keys(), target_, nullptr, key_));
  EXPECT_EQ(key_.state, KeyState::none);
  EXPECT_EQ(block_->refs, 1u);
}

TEST_F(RemoteKeyTest, AWindowIsBoundByAWorkRequestAndFreedWhenUnbound) {
  ASSERT_TRUE(keys().can_bind(*block_));
  ibv_send_wr request{};
  bind_window(keys(), target_, key_, request);
  EXPECT_EQ(key_.state, KeyState::open);
  EXPECT_TRUE(key_.is_window());
  EXPECT_EQ(request.opcode, IBV_WR_BIND_MW);
  EXPECT_EQ(request.bind_mw.rkey, key_.rkey);
  EXPECT_EQ(request.bind_mw.bind_info.mr, &slab_);
  EXPECT_EQ(request.bind_mw.bind_info.addr, reinterpret_cast<std::uint64_t>(target_.data));
  EXPECT_EQ(request.bind_mw.bind_info.length, target_.bytes);
  EXPECT_EQ(request.bind_mw.bind_info.mw_access_flags, unsigned{IBV_ACCESS_REMOTE_READ});
  EXPECT_EQ(windows_.free(), 1u);
  unbind_window(key_, request);
  EXPECT_EQ(request.opcode, IBV_WR_LOCAL_INV);
  EXPECT_EQ(request.invalidate_rkey, key_.rkey);
  on_window_unbound(keys(), key_);
  EXPECT_EQ(key_.state, KeyState::closed);
  EXPECT_EQ(windows_.free(), 2u);
}

TEST_F(RemoteKeyTest, AWindowOfAFailedQueuePairIsReplaced) {
  ibv_send_wr request{};
  bind_window(keys(), target_, key_, request);
  device_.busy = true;
  close_key(keys(), key_, block_);
  EXPECT_EQ(key_.state, KeyState::closing);
  EXPECT_EQ(block_->refs, 2u);
  EXPECT_EQ(windows_.replacing(), 1u);
  device_.busy = false;
  while (windows_.pending()) EXPECT_TRUE(windows_.poll());
  EXPECT_EQ(block_->refs, 1u);
  EXPECT_EQ(windows_.free(), 2u);
}

TEST_F(RemoteKeyTest, WindowsOpenTheSlabOnly) {
  block_->lkey = 8;
  EXPECT_FALSE(keys().can_bind(*block_));
}

}  // namespace remote_key_test
