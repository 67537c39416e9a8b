#include "peers/harness/slices.h"

#include <fmt/core.h>

#include <array>

#include "peers/harness/quantile.h"

namespace spinwire::bench {
namespace {

/// With fewer quiet slices than this, the preempted ones count as well.
constexpr std::size_t kEnoughQuiet = 3;

}  // namespace

void Slices::add(double ns, Placement before, Placement after, bool preempted) {
  slices_.push_back({ns, after, before != after, preempted});
}

std::string Slices::to_json(std::string_view peer, const Options& options, double seconds,
                            std::uint64_t operations, std::uint64_t bad) const {
  std::size_t preempted = 0;
  std::size_t moved = 0;
  for (const Slice& s : slices_) {
    preempted += s.preempted ? 1 : 0;
    moved += s.moved ? 1 : 0;
  }
  const bool is_busy = preempted != 0 && slices_.size() - preempted < kEnoughQuiet;
  std::vector<double> all;
  std::array<std::vector<double>, kPlacements> placed;
  for (const Slice& s : slices_) {
    if (s.preempted && !is_busy) continue;
    all.push_back(s.ns);
    if (!s.moved) placed[static_cast<std::size_t>(s.placement)].push_back(s.ns);
  }

  std::string placements;
  for (std::size_t p = 0; p < kPlacements; ++p) {
    if (placed[p].empty()) continue;
    placements +=
        fmt::format("{}\"{}\": {{\"ns\": {:.2f}, \"slices\": {}}}", placements.empty() ? "" : ", ",
                    kPlacementNames[p], median(placed[p]), placed[p].size());
  }
  return fmt::format(
      "{{\"peer\": \"{}\", \"what\": \"{}\", \"mode\": \"{}\", \"window\": {}, \"batch\": {}, "
      "\"size\": {}, \"reply_size\": {}, \"seconds\": {:.3f}, \"operations\": {}, \"bad\": {}, "
      "\"ns\": {:.2f}, \"p10_ns\": {:.2f}, \"p90_ns\": {:.2f}, \"slices\": {}, \"preempted\": {}, "
      "\"moved\": {}, \"busy\": {}, \"placements\": {{{}}}}}",
      peer, to_string(options.what), to_string(options.mode), options.window, options.batch,
      options.size, options.reply_size, seconds, operations, bad, median(all), quantile(all, 0.1),
      quantile(all, 0.9), all.size(), preempted, moved, is_busy, placements);
}

}  // namespace spinwire::bench
