#include "peers/harness/slices.h"

#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "peers/harness/quantile.h"

namespace spinwire::bench {
namespace {

/// Objects keep their members in order.
using Json = nlohmann::ordered_json;

double hundredths(double ns) { return std::round(ns * 100) / 100; }

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

  Json placements = Json::object();
  for (std::size_t p = 0; p < kPlacements; ++p) {
    if (placed[p].empty()) continue;
    placements[kPlacementNames[p]] = {{"ns", hundredths(median(placed[p]))},
                                      {"slices", placed[p].size()}};
  }
  return Json{{"peer", peer},
              {"what", to_string(options.what)},
              {"mode", to_string(options.mode)},
              {"window", options.window},
              {"batch", options.batch},
              {"size", options.size},
              {"reply_size", options.reply_size},
              {"seconds", std::round(seconds * 1000) / 1000},
              {"operations", operations},
              {"bad", bad},
              {"ns", hundredths(median(all))},
              {"p10_ns", hundredths(quantile(all, 0.1))},
              {"p90_ns", hundredths(quantile(all, 0.9))},
              {"slices", all.size()},
              {"preempted", preempted},
              {"moved", moved},
              {"busy", is_busy},
              {"placements", placements}}
      .dump();
}

}  // namespace spinwire::bench
