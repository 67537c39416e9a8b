// Flags of registered memory: a device that has them gets them, another refuses.
#include <gtest/gtest.h>

#include <cerrno>
#include <string>
#include <vector>

#include "base/internals.h"
#include "engine/devices.h"
#include "memory/registration_table.h"
#include "verbs/opened_device.h"

namespace memory_flags_test {
namespace {

using spinwire::Access;
using spinwire::DeviceInfo;
using spinwire::MemoryFlags;
using spinwire::Status;
using spinwire::memory::check_memory_flags;
using spinwire::memory::RegistrationTable;
using spinwire::verbs::Provider;

constexpr MemoryFlags kAll = MemoryFlags::on_demand | MemoryFlags::relaxed_ordering |
                             MemoryFlags::zero_based | MemoryFlags::huge_pages;
alignas(4096) std::byte page[4096];

DeviceInfo device_with(MemoryFlags flags) {
  DeviceInfo info;
  info.name = "mlx5_7";
  info.memory_flags = flags;
  return info;
}

TEST(MemoryFlags, ADeviceThatHasThemTakesThem) {
  const auto usable = check_memory_flags(kAll, device_with(kAll), page, true);
  ASSERT_TRUE(usable);
  EXPECT_EQ(*usable, kAll);
  EXPECT_EQ(*check_memory_flags(MemoryFlags::none, device_with(kAll), page, false),
            MemoryFlags::none);
}

TEST(MemoryFlags, OneThatHasThemNotRefusesAndNamesThem) {
  const struct {
    MemoryFlags flag;
    const char* name;
  } cases[] = {{MemoryFlags::on_demand, "on_demand"},
               {MemoryFlags::zero_based, "zero_based"},
               {MemoryFlags::huge_pages, "huge_pages"}};
  for (const auto& c : cases) {
    const auto refused = check_memory_flags(c.flag, device_with(MemoryFlags::none), page, true);
    ASSERT_FALSE(refused) << c.name;
    EXPECT_EQ(refused.error().status, Status::unsupported);
    EXPECT_EQ(refused.error().asked, std::string("register memory with MemoryFlags::") + c.name);
    EXPECT_EQ(refused.error().found, "device mlx5_7 does not have it");
  }
}

TEST(MemoryFlags, RelaxedOrderingIsAHintThatAnyDeviceMayIgnore) {
  const auto usable = check_memory_flags(MemoryFlags::relaxed_ordering,
                                         device_with(MemoryFlags::none), page, false);
  ASSERT_TRUE(usable);
  EXPECT_EQ(*usable, MemoryFlags::none);
}

TEST(MemoryFlags, WhatNoDeviceCanDoIsAnArgument) {
  const auto status = [](MemoryFlags flags, std::span<const std::byte> bytes, bool exposed) {
    const auto checked = check_memory_flags(flags, device_with(kAll), bytes, exposed);
    return checked ? Status::ok : checked.error().status;
  };
  EXPECT_EQ(status(static_cast<MemoryFlags>(16), page, true), Status::invalid_argument);
  EXPECT_EQ(status(MemoryFlags::zero_based, page, false), Status::invalid_argument);
  EXPECT_EQ(status(MemoryFlags::zero_based, std::span(page).subspan(64), true),
            Status::invalid_argument);
}

/// The embedded device as if it had all flags.
struct FlaggedDevice {
  static inline int access = 0;
  static inline std::vector<std::byte*> registered;

  FlaggedDevice() : provider(spinwire::verbs::softverbs_provider()) {
    provider.memory_flags = [](ibv_context*) { return kAll; };
    provider.reg_mr = [](ibv_pd* pd, void* address, std::size_t length, int flags) {
      access = flags;
      constexpr int kRights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                              IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC |
                              IBV_ACCESS_MW_BIND;
      return spinwire::verbs::softverbs_provider().reg_mr(pd, address, length, flags & kRights);
    };
    const Provider* const all[] = {&provider};
    auto opened = spinwire::verbs::Device::open(
        spinwire::engine::device_options({}, spinwire::Clock::real()), all);
    EXPECT_TRUE(opened) << opened.error().message();
    if (opened) device = std::move(*opened);
  }

  Provider provider;
  std::unique_ptr<spinwire::verbs::Device> device;
};

TEST(MemoryFlags, ReachTheDevice) {
  FlaggedDevice flagged;
  ASSERT_NE(flagged.device, nullptr);
  EXPECT_EQ(flagged.device->info().memory_flags, kAll);
  RegistrationTable table(flagged.provider, flagged.device->pd(), 8);
  constexpr MemoryFlags kOwn =
      MemoryFlags::on_demand | MemoryFlags::relaxed_ordering | MemoryFlags::huge_pages;
  const auto own = table.register_memory(page, Access::local, nullptr, kOwn);
  ASSERT_TRUE(own);
  EXPECT_EQ(FlaggedDevice::access, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND |
                                       IBV_ACCESS_RELAXED_ORDERING | IBV_ACCESS_HUGETLB);
  const auto region = table.expose(own->whole, Access::remote_read, nullptr,
                                   RegistrationTable::kApplication, MemoryFlags::zero_based);
  ASSERT_TRUE(region);
  EXPECT_EQ(FlaggedDevice::access, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_ZERO_BASED);
  EXPECT_EQ(region->address, 0u);
  EXPECT_EQ(region->length, sizeof page);
  EXPECT_EQ(region->slice(8, 8).address, 8u);
  const auto plain = table.expose(own->whole, Access::remote_read);
  ASSERT_TRUE(plain);
  EXPECT_EQ(FlaggedDevice::access, IBV_ACCESS_REMOTE_READ);
  EXPECT_EQ(plain->address, reinterpret_cast<std::uint64_t>(page));
  table.close();
}

}  // namespace
}  // namespace memory_flags_test
