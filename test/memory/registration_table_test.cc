#include "memory/registration_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/internals.h"
#include "base/random.h"
#include "memory/arena.h"

namespace registration_test {

using spinwire::Access;
using spinwire::BufferSlice;
using spinwire::RemoteRegion;
using spinwire::Status;
using spinwire::detail::Block;
using spinwire::memory::RegisteredMemory;
using spinwire::memory::RegistrationTable;

/// A device that records calls and refuses those that it was told to refuse.
struct FakeDevice {
  struct Call {
    ibv_pd* pd;
    void* address;
    std::size_t length;
    int access;
  };
  struct Mr {
    ibv_mr mr{};
    int access = 0;
  };

  static FakeDevice* current;

  FakeDevice() {
    current = this;
    provider.name = "fake";
    provider.reg_mr = [](ibv_pd* on, void* address, std::size_t length, int access) {
      return current->reg(on, address, length, access);
    };
    provider.dereg_mr = [](ibv_mr* mr) { return current->dereg(mr); };
  }
  FakeDevice(const FakeDevice&) = delete;
  FakeDevice& operator=(const FakeDevice&) = delete;
  ~FakeDevice() { current = nullptr; }

  ibv_mr* reg(ibv_pd* on, void* address, std::size_t length, int access) {
    registered.push_back({on, address, length, access});
    if (reg_error != 0) {
      errno = reg_error;
      return nullptr;
    }
    auto mr = std::make_unique<Mr>();
    mr->mr.pd = on;
    mr->mr.addr = address;
    mr->mr.length = length;
    mr->mr.lkey = next_key + 1;
    mr->mr.rkey = next_key;
    next_key += 0x100;
    living.push_back(std::move(mr));
    return &living.back()->mr;
  }

  int dereg(ibv_mr* mr) {
    ++dereg_calls;
    const auto at = std::find_if(living.begin(), living.end(),
                                 [&](const auto& known) { return &known->mr == mr; });
    if (at == living.end()) {
      ADD_FAILURE() << "deregistered what is not registered";
      return EINVAL;
    }
    if (busy.count(mr->rkey) != 0) return dereg_error;
    living.erase(at);
    return 0;
  }

  spinwire::verbs::Provider provider{};
  ibv_pd pd{};
  std::vector<Call> registered;
  std::vector<std::unique_ptr<Mr>> living;
  std::set<std::uint32_t> busy;  ///< keys with an access in progress
  int dereg_error = EBUSY;       ///< the error for those
  int reg_error = 0;
  int dereg_calls = 0;
  std::uint32_t next_key = 0x100;
};
FakeDevice* FakeDevice::current = nullptr;

/// A block in the test's own memory that shows whether it is held.
struct FakeBlock {
  FakeBlock() {
    block.refs = 1;
    block.capacity = bytes.size();
    block.payload = bytes.data();
    block.owner = this;
    block.recycle = [](Block* b) { static_cast<FakeBlock*>(b->owner)->recycled = true; };
    slice = spinwire::detail::make<BufferSlice>(&block, bytes.data(), bytes.size());
    spinwire::detail::release(&block);
  }
  std::vector<std::byte> bytes{4096};
  Block block{};
  BufferSlice slice;
  bool recycled = false;
};

TEST(RegistrationTest, RegistersOwnMemoryWithTheRightsAsked) {
  FakeDevice device;
  RegistrationTable table(device.provider, &device.pd, 8);
  std::vector<std::byte> bytes(1000);
  const struct {
    Access access;
    int flags;
  } cases[] = {
      {Access::local, IBV_ACCESS_LOCAL_WRITE},
      {Access::remote_read, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ},
      {Access::remote_write, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE},
      {Access::remote_read_write,
       IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE},
      {Access::remote_atomic, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC},
      {Access::remote_all, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ |
                               IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC},
  };
  for (const auto& c : cases) {
    const std::uint32_t key = device.next_key;
    auto memory = table.register_memory(bytes, c.access);
    ASSERT_TRUE(memory.has_value()) << memory.error().message();
    const FakeDevice::Call& call = device.registered.back();
    EXPECT_EQ(call.pd, &device.pd);
    EXPECT_EQ(call.address, bytes.data());
    EXPECT_EQ(call.length, bytes.size());
    EXPECT_EQ(call.access, c.flags);
    EXPECT_EQ(memory->whole.data(), bytes.data());
    EXPECT_EQ(memory->whole.size(), bytes.size());
    EXPECT_EQ(spinwire::detail::block_of(memory->whole)->lkey, key + 1);
    EXPECT_EQ(spinwire::detail::block_of(memory->whole)->capacity, bytes.size());
    if (c.access == Access::local) {
      EXPECT_FALSE(memory->remote) << "no key leaves for local memory";
    } else {
      EXPECT_EQ(memory->remote.address, reinterpret_cast<std::uint64_t>(bytes.data()));
      EXPECT_EQ(memory->remote.length, bytes.size());
      EXPECT_EQ(memory->remote.rkey, key);
      EXPECT_EQ(memory->remote.access, c.access);
    }
  }
  EXPECT_EQ(device.living.size(), 0u);
}

TEST(RegistrationTest, OwnMemoryIsDeregisteredWithItsLastSlice) {
  FakeDevice device;
  RegistrationTable table(device.provider, &device.pd, 8);
  std::vector<std::byte> bytes(1000);
  auto memory = table.register_memory(bytes, Access::local);
  ASSERT_TRUE(memory.has_value());
  BufferSlice part = memory->whole.slice(10, 20);
  memory->whole = {};
  EXPECT_EQ(device.living.size(), 1u);
  EXPECT_EQ(table.size(), 1u);
  part = {};
  EXPECT_EQ(device.living.size(), 0u);
  EXPECT_EQ(table.size(), 0u);
}

TEST(RegistrationTest, DroppedMemoryUnderAccessIsRetried) {
  FakeDevice device;
  RegistrationTable table(device.provider, &device.pd, 1);
  std::vector<std::byte> bytes(1000);
  auto memory = table.register_memory(bytes, Access::remote_write);
  ASSERT_TRUE(memory.has_value());
  device.busy = {memory->remote.rkey};
  memory->whole = {};
  EXPECT_EQ(table.pending(), 1u);
  EXPECT_FALSE(table.register_memory(bytes, Access::local).has_value()) << "its slot is taken";
  EXPECT_FALSE(table.poll_revocations());
  EXPECT_EQ(table.revoke(memory->remote.rkey), Status::invalid_argument) << "not an exposure";
  device.busy.clear();
  EXPECT_TRUE(table.poll_revocations());
  EXPECT_FALSE(table.poll_revocations());
  EXPECT_EQ(table.size(), 0u);
  EXPECT_EQ(device.living.size(), 0u);
  EXPECT_TRUE(table.register_memory(bytes, Access::local).has_value());
}

TEST(RegistrationTest, OwnMemorySurvivesTheTable) {
  FakeDevice device;
  std::vector<std::byte> bytes(1000);
  std::optional<RegistrationTable> table(std::in_place, device.provider, &device.pd, 8u);
  auto memory = table->register_memory(bytes, Access::remote_read_write);
  auto dropped = table->register_memory(bytes, Access::local);
  ASSERT_TRUE(memory.has_value() && dropped.has_value());
  dropped->whole = {};
  table->close();
  EXPECT_EQ(device.living.size(), 0u);
  const int calls = device.dereg_calls;
  EXPECT_EQ(calls, 2);
  table->close();
  table.reset();
  EXPECT_EQ(memory->whole.size(), 1000u);
  BufferSlice part = memory->whole.slice(1, 2);
  memory->whole = {};
  part = {};
  EXPECT_EQ(device.dereg_calls, calls) << "no verb after the device is gone";
}

TEST(RegistrationTest, ClosedTableRegistersNothing) {
  FakeDevice device;
  RegistrationTable table(device.provider, &device.pd, 8);
  table.close();
  std::vector<std::byte> bytes(10);
  auto memory = table.register_memory(bytes, Access::local);
  ASSERT_FALSE(memory.has_value());
  EXPECT_EQ(memory.error().status, Status::no_device);
  EXPECT_TRUE(device.registered.empty());
}

TEST(RegistrationTest, ExposesExactlyTheSliceUnderAKeyOfItsOwn) {
  FakeDevice device;
  FakeBlock memory;
  RegistrationTable table(device.provider, &device.pd, 8);
  const struct {
    Access access;
    int flags;
  } cases[] = {
      {Access::remote_read, IBV_ACCESS_REMOTE_READ},
      {Access::remote_write, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE},
      {Access::remote_read_write,
       IBV_ACCESS_REMOTE_READ | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE},
      {Access::remote_atomic, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC},
      {Access::remote_read | Access::remote_atomic,
       IBV_ACCESS_REMOTE_READ | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC},
  };
  std::set<std::uint32_t> keys;
  for (const auto& c : cases) {
    auto region = table.expose(memory.slice.slice(100, 50), c.access);
    ASSERT_TRUE(region.has_value()) << region.error().message();
    const FakeDevice::Call& call = device.registered.back();
    EXPECT_EQ(call.address, memory.bytes.data() + 100);
    EXPECT_EQ(call.length, 50u);
    EXPECT_EQ(call.access, c.flags);
    EXPECT_EQ(region->address, reinterpret_cast<std::uint64_t>(memory.bytes.data() + 100));
    EXPECT_EQ(region->length, 50u);
    EXPECT_EQ(region->access, c.access);
    keys.insert(region->rkey);
  }
  EXPECT_EQ(keys.size(), 5u);
  memory.slice = {};
  EXPECT_FALSE(memory.recycled) << "exposures hold the block";
  for (const std::uint32_t key : keys) {
    EXPECT_FALSE(memory.recycled);
    EXPECT_EQ(table.revoke(key), Status::ok);
    EXPECT_EQ(table.revoke(key), Status::invalid_argument) << "it is over";
  }
  EXPECT_TRUE(memory.recycled);
  EXPECT_EQ(device.living.size(), 0u);
}

TEST(RegistrationTest, RevokingUnderAccessHoldsTheBlockUntilItEnds) {
  FakeDevice device;
  FakeBlock memory;
  RegistrationTable table(device.provider, &device.pd, 8);
  auto region = table.expose(memory.slice, Access::remote_write);
  ASSERT_TRUE(region.has_value());
  memory.slice = {};
  device.busy = {region->rkey};
  EXPECT_EQ(table.revoke(region->rkey), Status::would_block);
  EXPECT_EQ(table.revoke(region->rkey), Status::would_block);
  EXPECT_EQ(table.pending(), 1u);
  EXPECT_FALSE(memory.recycled);
  device.busy.clear();
  EXPECT_EQ(table.revoke(region->rkey), Status::ok);
  EXPECT_TRUE(memory.recycled);
  EXPECT_EQ(table.pending(), 0u);
  EXPECT_EQ(table.size(), 0u);
}

TEST(RegistrationTest, RevocationThatEndsInTheControlStepIsStillToldOnce) {
  FakeDevice device;
  FakeBlock memory;
  RegistrationTable table(device.provider, &device.pd, 8);
  auto region = table.expose(memory.slice, Access::remote_read);
  ASSERT_TRUE(region.has_value());
  memory.slice = {};
  EXPECT_FALSE(table.poll_revocations()) << "nothing is being revoked";
  EXPECT_EQ(device.dereg_calls, 0);
  device.busy = {region->rkey};
  EXPECT_EQ(table.revoke(region->rkey), Status::would_block);
  EXPECT_FALSE(table.poll_revocations());
  EXPECT_FALSE(memory.recycled);
  device.busy.clear();
  EXPECT_TRUE(table.poll_revocations());
  EXPECT_TRUE(memory.recycled);
  EXPECT_EQ(table.size(), 0u);
  const int calls = device.dereg_calls;
  EXPECT_EQ(table.revoke(region->rkey), Status::ok);
  EXPECT_EQ(table.revoke(region->rkey), Status::invalid_argument);
  EXPECT_EQ(device.dereg_calls, calls);
}

TEST(RegistrationTest, AskingWhetherItHasEndedTakesNoVerb) {
  constexpr auto kLibrary = RegistrationTable::kLibrary;
  FakeDevice device;
  FakeBlock memory;
  FakeBlock other;
  RegistrationTable table(device.provider, &device.pd, 8);
  const std::uint32_t key =
      table.expose(memory.slice, Access::remote_read, nullptr, kLibrary)->rkey;
  memory.slice = {};
  device.busy = {key};
  EXPECT_EQ(table.revoke(key, kLibrary), Status::would_block);
  const int calls = device.dereg_calls;
  EXPECT_FALSE(table.has_ended(key));
  device.busy.clear();
  EXPECT_FALSE(table.has_ended(key)) << "only the device can tell";
  EXPECT_EQ(device.dereg_calls, calls);
  EXPECT_TRUE(table.poll_revocations());
  EXPECT_TRUE(table.has_ended(key));
  EXPECT_EQ(table.revoke(key, kLibrary), Status::invalid_argument) << "it is over";
  EXPECT_TRUE(table.has_ended(key));
  // The new owner of the key is not affected either.
  device.next_key = key;
  ASSERT_EQ(table.expose(other.slice, Access::remote_read)->rkey, key);
  EXPECT_TRUE(table.has_ended(key));
  EXPECT_EQ(table.revoke(key), Status::ok);
}

TEST(RegistrationTest, OnlyItsOwnerRevokesAnExposure) {
  constexpr RegistrationTable::Owner kOwners[] = {RegistrationTable::kApplication,
                                                  RegistrationTable::kLibrary, 7, 8};
  FakeDevice device;
  FakeBlock memory;
  RegistrationTable table(device.provider, &device.pd, 4);
  const auto revoke_as_others = [&](std::uint32_t key, RegistrationTable::Owner owner) {
    for (const RegistrationTable::Owner other : kOwners) {
      if (other == owner) continue;
      EXPECT_EQ(table.revoke(key, other), Status::invalid_argument) << owner << ' ' << other;
    }
  };
  for (const RegistrationTable::Owner owner : kOwners) {
    const std::uint32_t key = table.expose(memory.slice, Access::remote_read, nullptr, owner)->rkey;
    revoke_as_others(key, owner);
    device.busy.insert(key);
    EXPECT_EQ(table.revoke(key, owner), Status::would_block);
    revoke_as_others(key, owner);
    device.busy.clear();
    EXPECT_TRUE(table.poll_revocations());
    revoke_as_others(key, owner);
    EXPECT_EQ(table.revoke(key, owner), Status::ok);
    EXPECT_EQ(table.revoke(key, owner), Status::invalid_argument);
  }
  // A key that was closed elsewhere: of the owner that closed it last.
  table.remember_ended(5, 7);
  table.remember_ended(5, 8);
  revoke_as_others(5, 8);
  EXPECT_EQ(table.revoke(5, 8), Status::ok);
  // One that the library revokes for another owner, and one that is in use again.
  const std::uint32_t key =
      table.expose(memory.slice, Access::remote_read, nullptr, RegistrationTable::kLibrary)->rkey;
  table.remember_ended(key, 7);
  EXPECT_EQ(table.revoke(key, 7), Status::invalid_argument) << "it is another exposure";
  device.busy.insert(key);
  EXPECT_EQ(table.revoke(key, RegistrationTable::kLibrary), Status::would_block);
  table.remember_ended(key, 7);
  EXPECT_EQ(table.revoke(key, 7), Status::would_block);
  EXPECT_TRUE(table.has_ended(key)) << "not the library's any more";
  device.busy.clear();
  EXPECT_EQ(table.revoke(key, 7), Status::ok);
  EXPECT_EQ(memory.block.refs, 1u);
}

TEST(RegistrationTest, ControlStepRetriesOneAtATimeAndAllInTurn) {
  FakeDevice device;
  FakeBlock memory;
  RegistrationTable table(device.provider, &device.pd, 8);
  std::vector<std::uint32_t> keys;
  for (int i = 0; i < 3; ++i) {
    keys.push_back(table.expose(memory.slice, Access::remote_read)->rkey);
    device.busy.insert(keys.back());
    EXPECT_EQ(table.revoke(keys.back()), Status::would_block);
  }
  device.busy = {keys[0], keys[2]};
  int calls = device.dereg_calls;
  EXPECT_FALSE(table.poll_revocations());  // the first, which stays
  EXPECT_EQ(device.dereg_calls, ++calls);
  EXPECT_TRUE(table.poll_revocations()) << "one that is stuck must not keep others waiting";
  EXPECT_EQ(device.dereg_calls, ++calls);
  device.busy.clear();
  EXPECT_TRUE(table.poll_revocations());
  EXPECT_TRUE(table.poll_revocations());
  EXPECT_EQ(table.pending(), 0u);
  EXPECT_TRUE(device.living.empty());
}

TEST(RegistrationTest, EndedRevocationsGiveWayToNewOnes) {
  FakeDevice device;
  FakeBlock memory;
  RegistrationTable table(device.provider, &device.pd, 2);
  std::uint32_t keys[2];
  for (std::uint32_t& key : keys) {
    key = table.expose(memory.slice, Access::remote_read)->rkey;
    device.busy = {key};
    EXPECT_EQ(table.revoke(key), Status::would_block);
    device.busy.clear();
    EXPECT_TRUE(table.poll_revocations());
  }
  auto fresh = table.expose(memory.slice, Access::remote_read);
  ASSERT_TRUE(fresh.has_value()) << "nobody asked about the ended ones";
  EXPECT_EQ(table.revoke(keys[0]), Status::invalid_argument) << "the oldest is forgotten";
  EXPECT_EQ(table.revoke(keys[1]), Status::ok);
  EXPECT_EQ(table.revoke(fresh->rkey), Status::ok);
}

TEST(RegistrationTest, KeyThatTheDeviceReusesMeansItsNewUse) {
  FakeDevice device;
  FakeBlock first;
  FakeBlock second;
  RegistrationTable table(device.provider, &device.pd, 8);
  const std::uint32_t key = table.expose(first.slice, Access::remote_read)->rkey;
  device.busy = {key};
  EXPECT_EQ(table.revoke(key), Status::would_block);
  device.busy.clear();
  EXPECT_TRUE(table.poll_revocations());
  device.next_key = key;
  ASSERT_EQ(table.expose(second.slice, Access::remote_read)->rkey, key);
  second.slice = {};
  EXPECT_EQ(table.revoke(key), Status::ok);
  EXPECT_TRUE(second.recycled);
  EXPECT_TRUE(device.living.empty());
  EXPECT_EQ(table.revoke(key), Status::invalid_argument);
}

TEST(RegistrationTest, OpensTheBytesOfKeysInForce) {
  FakeDevice device;
  FakeBlock block;
  RegistrationTable table(device.provider, &device.pd, 8);
  RegistrationTable::Group group{&device.pd, {}};
  std::vector<std::byte> bytes(1000);
  auto own = table.register_memory(bytes, Access::remote_read);
  auto of_group = table.register_memory(bytes, Access::remote_read, &group);
  const RemoteRegion exposed = *table.expose(block.slice, Access::remote_read);
  const RemoteRegion from_zero =
      *table.expose(block.slice, Access::remote_read, nullptr, RegistrationTable::kApplication,
                    spinwire::MemoryFlags::zero_based);
  EXPECT_EQ(from_zero.address, 0u);
  for (const RemoteRegion& region : {own->remote, of_group->remote, exposed, from_zero}) {
    const bool grouped = region.rkey == of_group->remote.rkey;
    const auto opens = [&](const RemoteRegion& r) {
      return table.opens(r, grouped ? &group : nullptr);
    };
    EXPECT_FALSE(table.opens(region, grouped ? nullptr : &group)) << "of another domain";
    EXPECT_TRUE(opens(region));
    EXPECT_TRUE(opens(region.slice(8, 8)));
    const auto [address, length, rkey, access, lease, timed, deadline] = region;
    EXPECT_FALSE(opens({address, length, rkey + 1, access}));
    EXPECT_FALSE(opens({address + 1, length, rkey, access}));
    EXPECT_FALSE(opens({address - 1, length, rkey, access}));
    EXPECT_FALSE(opens({address, length + 1, rkey, access}));
    EXPECT_FALSE(opens({address, length, rkey, Access::remote_write})) << "another right";
  }
  const auto local = table.register_memory(bytes, Access::local);
  EXPECT_FALSE(
      table.opens({local->remote.address, 8, local->remote.rkey, Access::remote_read}, nullptr))
      << "no peer may use it";
  EXPECT_FALSE(table.opens({}, nullptr));
  EXPECT_EQ(table.revoke(own->remote.rkey), Status::invalid_argument);
  const RemoteRegion was_own = own->remote;
  own->whole = {};
  EXPECT_FALSE(table.opens(was_own, nullptr));
  EXPECT_TRUE(table.end_next(group));
  EXPECT_FALSE(table.opens(of_group->remote, &group));
  EXPECT_EQ(table.revoke(exposed.rkey), Status::ok);
  EXPECT_FALSE(table.opens(exposed, nullptr));
  device.busy = {from_zero.rkey};
  EXPECT_EQ(table.revoke(from_zero.rkey), Status::would_block);
  EXPECT_FALSE(table.opens(from_zero, nullptr)) << "an access is under way, but the key is closed";
  EXPECT_TRUE(table.audit());
  device.busy.clear();
}

TEST(RegistrationTest, RegisteredMemoryWithAReusedKeyIsItsNewUse) {
  FakeDevice device;
  FakeBlock block;
  RegistrationTable table(device.provider, &device.pd, 8);
  const RemoteRegion former = *table.expose(block.slice, Access::remote_read);
  device.busy = {former.rkey};
  EXPECT_EQ(table.revoke(former.rkey), Status::would_block);
  device.busy.clear();
  EXPECT_TRUE(table.poll_revocations());
  device.next_key = former.rkey;
  std::vector<std::byte> bytes(100);
  const auto own = table.register_memory(bytes, Access::remote_read);
  ASSERT_EQ(own->remote.rkey, former.rkey);
  EXPECT_TRUE(table.opens(own->remote, nullptr));
  EXPECT_FALSE(table.opens(former, nullptr));
  EXPECT_EQ(table.revoke(former.rkey), Status::invalid_argument);
  EXPECT_TRUE(table.audit());
}

TEST(RegistrationTest, DeviceThatRefusesKeepsTheMemoryHeld) {
  FakeDevice device;
  FakeBlock memory;
  RegistrationTable table(device.provider, &device.pd, 8);
  const std::uint32_t key = table.expose(memory.slice, Access::remote_read)->rkey;
  memory.slice = {};
  device.busy = {key};
  device.dereg_error = EIO;
  EXPECT_EQ(table.revoke(key), Status::local_error);
  EXPECT_FALSE(table.poll_revocations());
  EXPECT_FALSE(memory.recycled);
  device.busy.clear();
  EXPECT_EQ(table.revoke(key), Status::ok);
  EXPECT_TRUE(memory.recycled);
}

TEST(RegistrationTest, ClosingEndsExposuresAndIsBounded) {
  FakeDevice device;
  FakeBlock memory;
  RegistrationTable table(device.provider, &device.pd, 8);
  const std::uint32_t stuck = table.expose(memory.slice, Access::remote_read)->rkey;
  const std::uint32_t revoked = table.expose(memory.slice, Access::remote_read)->rkey;
  ASSERT_TRUE(table.expose(memory.slice, Access::remote_read).has_value());
  memory.slice = {};
  device.busy = {revoked};
  EXPECT_EQ(table.revoke(revoked), Status::would_block);
  device.busy = {stuck};
  table.close();
  EXPECT_TRUE(memory.recycled);
  ASSERT_EQ(device.living.size(), 1u) << "all but what the device refuses to give up";
  EXPECT_EQ(device.living[0]->mr.rkey, stuck);
  EXPECT_EQ(table.size(), 0u);
  EXPECT_EQ(table.revoke(stuck), Status::invalid_argument);
  EXPECT_FALSE(table.poll_revocations());
}

TEST(RegistrationTest, ExposureMayHoldTheLastReferenceToOwnMemory) {
  FakeDevice device;
  std::vector<std::byte> bytes(100);
  {
    RegistrationTable table(device.provider, &device.pd, 8);
    for (const bool revoke : {true, false}) {
      auto memory = table.register_memory(bytes, Access::local);
      auto region = table.expose(memory->whole.slice(10, 10), Access::remote_read);
      memory->whole = {};
      EXPECT_EQ(device.living.size(), 2u);
      if (!revoke) continue;
      EXPECT_EQ(table.revoke(region->rkey), Status::ok);
      EXPECT_EQ(device.living.size(), 0u);
    }
  }
  EXPECT_EQ(device.living.size(), 0u);
}

TEST(RegistrationTest, RefusesMisuseWithoutAskingTheDevice) {
  FakeDevice device;
  FakeBlock memory;
  RegistrationTable table(device.provider, &device.pd, 8);
  std::vector<std::byte> bytes(10);
  const Status invalid = Status::invalid_argument;
  EXPECT_EQ(table.register_memory({}, Access::local).error().status, invalid);
  EXPECT_EQ(table.register_memory(bytes, static_cast<Access>(8)).error().status, invalid);
  EXPECT_EQ(table.expose(BufferSlice(), Access::remote_read).error().status, invalid);
  EXPECT_EQ(table.expose(memory.slice.slice(5, 0), Access::remote_read).error().status, invalid);
  EXPECT_EQ(table.expose(memory.slice, Access::local).error().status, invalid);
  EXPECT_EQ(table.expose(memory.slice, static_cast<Access>(9)).error().status, invalid);
  EXPECT_TRUE(device.registered.empty());
  EXPECT_EQ(table.revoke(0), invalid);
  EXPECT_EQ(table.revoke(12345), invalid);
  EXPECT_EQ(memory.block.refs, 1u) << "refused calls take no reference";
}

TEST(RegistrationTest, LimitIsAnErrorThatNamesIt) {
  FakeDevice device;
  FakeBlock memory;
  RegistrationTable table(device.provider, &device.pd, 2);
  auto one = table.expose(memory.slice, Access::remote_read);
  auto two = table.register_memory(memory.bytes, Access::local);
  ASSERT_TRUE(one.has_value() && two.has_value());
  auto three = table.expose(memory.slice, Access::remote_read);
  ASSERT_FALSE(three.has_value());
  EXPECT_EQ(three.error().status, Status::limit);
  EXPECT_NE(three.error().found.find("all 2 registrations"), std::string::npos);
  EXPECT_EQ(device.registered.size(), 2u);
  two->whole = {};
  EXPECT_TRUE(table.expose(memory.slice, Access::remote_read).has_value());
}

TEST(RegistrationTest, DeviceErrorsAreTranslated) {
  FakeDevice device;
  FakeBlock memory;
  RegistrationTable table(device.provider, &device.pd, 1);
  const struct {
    int error;
    Status status;
    const char* found;
  } cases[] = {
      {ENOMEM, Status::no_memory, "RLIMIT_MEMLOCK"},
      {EFAULT, Status::invalid_argument, "EFAULT"},
      {EINVAL, Status::invalid_argument, "EINVAL"},
      {ENOSPC, Status::limit, "ENOSPC"},
      {EIO, Status::system, "EIO"},
  };
  // More cases than slots: a failure must free its slot.
  for (const auto& c : cases) {
    device.reg_error = c.error;
    const auto own = table.register_memory(memory.bytes, Access::local);
    const auto exposed = table.expose(memory.slice, Access::remote_read);
    ASSERT_FALSE(own.has_value() || exposed.has_value());
    EXPECT_EQ(own.error().status, c.status);
    EXPECT_EQ(exposed.error().status, c.status);
    EXPECT_NE(own.error().found.find(c.found), std::string::npos) << own.error().message();
    EXPECT_NE(own.error().asked.find("4KiB"), std::string::npos) << own.error().message();
    EXPECT_FALSE(own.error().remedy.empty());
  }
  EXPECT_EQ(memory.block.refs, 1u);
  device.reg_error = 0;
  EXPECT_TRUE(table.expose(memory.slice, Access::remote_read).has_value());
}

TEST(RegistrationTest, RandomExposuresKeepReferencesAndKeysInStep) {
  FakeDevice device;
  constexpr std::uint32_t kLimit = 16;
  FakeBlock memory;
  RegistrationTable table(device.provider, &device.pd, kLimit);
  spinwire::base::Random random(7);
  std::set<std::uint32_t> live;     // exposed
  std::set<std::uint32_t> pending;  // would_block so far
  for (int step = 0; step < 20000; ++step) {
    const auto pick = [&](const std::set<std::uint32_t>& from) {
      auto at = from.begin();
      std::advance(at, static_cast<long>(random.below(from.size())));
      return *at;
    };
    const std::uint64_t action = random.below(8);
    if (action < 3) {
      auto region = table.expose(memory.slice, Access::remote_read);
      ASSERT_EQ(region.has_value(), live.size() + pending.size() < kLimit);
      if (region) live.insert(region->rkey);
    } else if (action < 6 && !live.empty()) {
      const std::uint32_t key = pick(live);
      const bool busy = random.below(2) == 0;
      if (busy) device.busy.insert(key);
      ASSERT_EQ(table.revoke(key), busy ? Status::would_block : Status::ok);
      live.erase(key);
      if (busy) pending.insert(key);
    } else if (action == 6 && !pending.empty()) {
      const std::uint32_t key = pick(pending);
      device.busy.erase(key);
      if (random.below(2) == 0) {
        ASSERT_EQ(table.revoke(key), Status::ok);
        pending.erase(key);
      } else {
        for (std::size_t i = 0; i < pending.size(); ++i) table.poll_revocations();
        pending.erase(key);
      }
    }
    ASSERT_EQ(device.living.size(), live.size() + pending.size());
    ASSERT_EQ(memory.block.refs, 1 + live.size() + pending.size());
    ASSERT_EQ(table.size(), live.size() + pending.size());
    ASSERT_EQ(table.pending(), pending.size());
  }
}

}  // namespace registration_test
