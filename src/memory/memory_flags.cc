// Flags of registered memory, checked against what the device has. Set-up.
#include <unistd.h>

#include <string>

#include "base/error.h"
#include "memory/registration_table.h"

namespace spinwire::memory {
namespace {

struct FlagName {
  MemoryFlags flag;
  const char* name;
  int access;
  const char* remedy;
};
constexpr FlagName kNames[] = {
    {MemoryFlags::on_demand, "on_demand", IBV_ACCESS_ON_DEMAND,
     "leave it out, and allow as much locked memory as the device pins"},
    {MemoryFlags::relaxed_ordering, "relaxed_ordering", IBV_ACCESS_RELAXED_ORDERING, ""},
    {MemoryFlags::zero_based, "zero_based", IBV_ACCESS_ZERO_BASED,
     "leave it out, and send the peer the region's address"},
    {MemoryFlags::huge_pages, "huge_pages", IBV_ACCESS_HUGETLB,
     "leave it out: the device takes memory in hugepages as any other"},
};

tl::unexpected<Error> wrong(const char* found, const char* remedy) {
  return base::fail(Status::invalid_argument, "register memory with MemoryFlags", found, remedy);
}

}  // namespace

int memory_access_flags(MemoryFlags flags) noexcept {
  int access = 0;
  for (const FlagName& each : kNames) access |= contains(flags, each.flag) ? each.access : 0;
  return access;
}

Result<MemoryFlags> check_memory_flags(MemoryFlags asked, const DeviceInfo& device,
                                       std::span<const std::byte> bytes, bool exposed) {
  MemoryFlags known = MemoryFlags::none;
  MemoryFlags usable = MemoryFlags::none;
  for (const FlagName& each : kNames) {
    known = known | each.flag;
    if (!contains(asked, each.flag)) continue;
    if (contains(device.memory_flags, each.flag)) {
      usable = usable | each.flag;
    } else if (each.flag != MemoryFlags::relaxed_ordering) {
      return base::fail(Status::unsupported,
                        base::format("register memory with MemoryFlags::{}", each.name),
                        base::format("device {} does not have it", device.name), each.remedy);
    }
  }
  if (!contains(known, asked)) return wrong("unknown flags", "combine the named ones");
  if (!contains(asked, MemoryFlags::zero_based)) return usable;
  if (!exposed) {
    return wrong("zero_based, but our own operations name the memory by its address",
                 "register the memory without it, and expose() it with it");
  }
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  if (reinterpret_cast<std::uintptr_t>(bytes.data()) % page != 0) {
    return wrong("zero_based memory that begins within a page",
                 "allocate it with an alignment of a page");
  }
  return usable;
}

}  // namespace spinwire::memory
