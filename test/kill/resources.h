// What a process and its engine hold: to be the same before and after many peers came and died.
#pragma once

#include <dirent.h>
#include <unistd.h>

#include <fstream>
#include <ostream>
#include <string>

#include "kill/page.h"
#include "softverbs/lane/segment.h"

namespace kill_test {

/// Hugepages are not reserved on every machine: where they are not, their return is not shown.
inline constexpr long kNoneReserved = -1;

struct Resources {
  long descriptors = 0;
  long shared_mappings = 0;  ///< of memfds: ours and those of peers
  long mappings = 0;         ///< all; the heap's own come and go
  long hugepages_used = 0;   ///< or kNoneReserved
  long send_blocks = 0;
  long lease_blocks = 0;
  long connections = 0;
  long operations = 0;
  long receives_missing = 0;  ///< not posted now: fewer than a postlist
  long credits = 0;
  // Of the engine's segment, which its peers see.
  long lanes = 0;
  long queue_pairs = 0;
  long keys = 0;

  friend bool operator==(const Resources&, const Resources&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Resources& r) {
    return out << "descriptors " << r.descriptors << ", shared mappings " << r.shared_mappings
               << ", mappings " << r.mappings << ", hugepages "
               << (r.hugepages_used == kNoneReserved ? "none reserved"
                                                     : std::to_string(r.hugepages_used))
               << ", blocks " << r.send_blocks << " + " << r.lease_blocks << ", connections "
               << r.connections << ", operations " << r.operations << ", receives missing "
               << r.receives_missing << ", credits " << r.credits << ", lanes " << r.lanes
               << ", queue pairs " << r.queue_pairs << ", keys " << r.keys;
  }
};

/// Counts what peers may find in the segment at `segment`, if it is one of this process.
inline void count_segment(const spinwire::softverbs::Segment& segment, Resources& r) {
  using namespace spinwire::softverbs;  // NOLINT: a test's function
  if (segment.magic != kSegmentMagic || segment.pid != static_cast<std::uint32_t>(getpid())) return;
  // Not all of the tables: reading what was never written would make the kernel take memory for it.
  constexpr std::uint32_t kQueuePairs = 1024;
  constexpr std::uint32_t kRegions = 4096;
  for (const LaneEntry& entry : segment.directory)
    r.lanes += lane_state(entry.state.load()) != LaneState::free ? 1 : 0;
  for (std::uint32_t i = 0; i < kQueuePairs; ++i) {
    const std::uint64_t ident = segment.queue_pairs[i].ident.load();
    r.queue_pairs += ident != 0 && (ident & spinwire::softverbs::kDestroyed) == 0 ? 1 : 0;
  }
  for (std::uint32_t i = 0; i < kRegions; ++i) r.keys += segment.regions[i].key.load() != 0 ? 1 : 0;
}

inline void count_mappings(Resources& r) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    ++r.mappings;
    if (line.find("memfd:") == std::string::npos) continue;
    ++r.shared_mappings;
    unsigned long from = 0;
    unsigned long to = 0;
    if (line.find("memfd:spinwire-softverbs") == std::string::npos ||
        std::sscanf(line.c_str(), "%lx-%lx", &from, &to) != 2 ||
        to - from < sizeof(spinwire::softverbs::Segment))
      continue;
    count_segment(*reinterpret_cast<const spinwire::softverbs::Segment*>(from), r);
  }
}

inline long hugepages_used() {
  std::ifstream info("/proc/meminfo");
  long total = 0;
  long free = 0;
  for (std::string line; std::getline(info, line);) {
    (void)std::sscanf(line.c_str(), "HugePages_Total: %ld", &total);
    (void)std::sscanf(line.c_str(), "HugePages_Free: %ld", &free);
  }
  return total == 0 ? kNoneReserved : total - free;
}

inline Resources count_resources(const spinwire::Engine& engine) {
  Resources r;
  if (DIR* list = opendir("/proc/self/fd"); list != nullptr) {
    while (readdir(list) != nullptr) ++r.descriptors;
    closedir(list);
  }
  count_mappings(r);
  r.hugepages_used = hugepages_used();
  r.send_blocks = static_cast<long>(engine.memory_stats(spinwire::Pool::send).blocks_used);
  r.lease_blocks = static_cast<long>(engine.memory_stats(spinwire::Pool::lease).blocks_used);
  const spinwire::EngineStats stats = engine.stats();
  r.connections = stats.connections;
  r.operations = stats.operations;
  const auto& queues = engine.config().queues;
  r.receives_missing = queues.receive_depth - stats.receives < queues.receive_postlist
                           ? 0
                           : static_cast<long>(queues.receive_depth - stats.receives);
  r.credits = stats.credits_granted;
  return r;
}

/// What a later count must have come back to. The heap may have grown by a few mappings, and
/// other programs use hugepages, too.
inline bool back_at(const Resources& before, Resources now) {
  constexpr long kHeap = 8;
  if (now.mappings <= before.mappings + kHeap) now.mappings = before.mappings;
  if (now.hugepages_used <= before.hugepages_used) now.hugepages_used = before.hugepages_used;
  return now == before;
}

}  // namespace kill_test
