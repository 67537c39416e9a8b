// Ways to move many bytes, beside memcpy of as many between the same memory: all live on one thread
// and take turns, so that each meets the same machine.
#pragma once

#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "peers/report.h"

namespace spinwire::bench {

struct Sizes {
  std::size_t mebibytes;
  std::size_t rounds = 30;
  [[nodiscard]] std::size_t bytes() const { return mebibytes << 20; }
};

inline void add_sizes(CLI::App& app, Sizes& sizes, const std::string& what, int most) {
  app.add_option("--size", sizes.mebibytes, "of " + what + ", MiB")
      ->check(CLI::Range(1, most))
      ->capture_default_str();
  app.add_option("--rounds", sizes.rounds, "to take the median of")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
}

struct Way {
  const char* name;
  std::function<double()> move;  ///< answers nanoseconds for sizes.bytes()
};

/// The first of the ways is memcpy. `begin_round` hears whether its times are left out: the first
/// rounds touch memory that the others find mapped.
inline void compare_with_memcpy(const Sizes& sizes, const std::vector<Way>& ways,
                                const std::function<void(bool)>& begin_round) {
  constexpr std::size_t kFirst = 2;
  std::vector<std::vector<double>> took(ways.size());
  for (std::size_t round = 0; round < sizes.rounds + kFirst; ++round) {
    begin_round(round < kFirst);
    for (std::size_t turn = 0; turn < ways.size(); ++turn) {
      const std::size_t way = round % 2 == 0 ? turn : ways.size() - 1 - turn;
      const double ns = ways[way].move();
      if (round >= kFirst) took[way].push_back(ns);
    }
  }
  const double copy = median(took[0]);
  fmt::print("{} MiB at a time, one thread, medians of {}\n", sizes.mebibytes, sizes.rounds);
  for (std::size_t i = 0; i < ways.size(); ++i) {
    const double ns = median(took[i]);
    fmt::print("{:<36} {:>6.2f} GB/s  {:>5.2f} of memcpy\n", ways[i].name,
               static_cast<double>(sizes.bytes()) / ns, copy / ns);
  }
}

}  // namespace spinwire::bench
