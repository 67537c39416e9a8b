// What a process and its engine hold, which must be the same before and after many peers came and
// died.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <fstream>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "kill/victim_orders.h"
#include "own_process.h"
#include "softverbs/lane/segment.h"

namespace kill_test {

struct Resources {
  long descriptors = 0;
  long shared_mappings = 0;  ///< of memfds: ours and those of peers
  long mappings = 0;         ///< all; the heap's own come and go
  long hugepages = 0;        ///< that this process has mapped, its own and its peers'
  long send_blocks = 0;
  long lease_blocks = 0;
  long connections = 0;
  long operations = 0;
  long receives_missing = 0;  ///< not posted now: fewer than a batch of posts
  long credits = 0;
  // In the engine's segment, which peers map.
  long lanes = 0;
  long queue_pairs = 0;
  long keys = 0;

  friend bool operator==(const Resources&, const Resources&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Resources& r) {
    return out << "descriptors " << r.descriptors << ", shared mappings " << r.shared_mappings
               << ", mappings " << r.mappings << ", hugepages " << r.hugepages << ", blocks "
               << r.send_blocks << " + " << r.lease_blocks << ", connections " << r.connections
               << ", operations " << r.operations << ", receives missing " << r.receives_missing
               << ", credits " << r.credits << ", lanes " << r.lanes << ", queue pairs "
               << r.queue_pairs << ", keys " << r.keys;
  }
};

/// Counts the entries in the segment at `segment`, if it is one of this process.
inline void count_segment(const spinwire::softverbs::Segment& segment, Resources& r) {
  using namespace spinwire::softverbs;  // NOLINT: a test's function
  if (segment.magic != kSegmentMagic || segment.pid != static_cast<std::uint32_t>(getpid())) return;
  // Not the whole tables: reading unused parts would allocate memory for them.
  constexpr std::uint32_t kQueuePairs = 1024;
  constexpr std::uint32_t kRegions = 4096;
  for (const LaneEntry& entry : segment.directory)
    r.lanes += lane_state(entry.state.load()) != LaneState::free ? 1 : 0;
  for (std::uint32_t i = 0; i < kQueuePairs; ++i) {
    const std::uint64_t ident = segment.queue_pairs[i].rights.ident.load();
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

/// Those that this process has touched: a page counts from its first access on.
inline long hugepages_mapped() {
  std::ifstream rollup("/proc/self/smaps_rollup");
  long kib = 0;
  for (std::string line; std::getline(rollup, line);) {
    long more = 0;
    if (std::sscanf(line.c_str(), "Shared_Hugetlb: %ld", &more) == 1 ||
        std::sscanf(line.c_str(), "Private_Hugetlb: %ld", &more) == 1)
      kib += more;
  }
  return kib / 2048;
}

/// Touches every hugepage in this process's address space, so that traffic which reaches more of a
/// peer's memory does not change the count.
inline void touch_hugepages() {
#ifndef MADV_POPULATE_READ
  constexpr int MADV_POPULATE_READ = 22;  // NOLINT: the name in newer headers
#endif
  std::ifstream smaps("/proc/self/smaps");
  std::vector<std::pair<unsigned long, unsigned long>> huge;
  unsigned long from = 0;
  unsigned long to = 0;
  for (std::string line; std::getline(smaps, line);) {
    long kib = 0;
    if (std::sscanf(line.c_str(), "KernelPageSize: %ld", &kib) == 1) {
      if (kib >= 2048) huge.emplace_back(from, to);
    } else {
      (void)std::sscanf(line.c_str(), "%lx-%lx ", &from, &to);
    }
  }
  for (const auto& [begin, end] : huge)
    (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_READ);
}

inline Resources count_resources(const spinwire::Engine& engine) {
  Resources r;
  r.descriptors = static_cast<long>(own_process::open_descriptors());
  count_mappings(r);
  r.hugepages = hugepages_mapped();
  r.send_blocks = static_cast<long>(engine.memory_stats(spinwire::Pool::send).blocks_used);
  r.lease_blocks = static_cast<long>(engine.memory_stats(spinwire::Pool::lease).blocks_used);
  const spinwire::EngineStats stats = engine.stats();
  r.connections = stats.connections;
  r.operations = stats.operations;
  const auto& queues = engine.config().queues;
  r.receives_missing = queues.receive_depth - stats.receives < queues.receive_postlist
                           ? 0
                           : static_cast<long>(queues.receive_depth - stats.receives);
  r.credits = stats.reserved_receives;
  return r;
}

/// What a later count must have come back to. The heap may have grown by a few mappings.
inline bool back_at(const Resources& before, Resources now) {
  constexpr long kHeap = 8;
  if (now.mappings <= before.mappings + kHeap) now.mappings = before.mappings;
  return now == before;
}

}  // namespace kill_test
