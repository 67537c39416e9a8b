// Compares ways to move many bytes with memcpy between the same buffers. All run on one thread and
// take turns, so that they meet the same load of the machine.
#pragma once

#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "peers/harness/quantile.h"
#include "spinwire/config.h"

namespace spinwire::bench {

struct Sizes {
  std::size_t mebibytes;
  std::size_t rounds = 30;
  [[nodiscard]] std::size_t bytes() const { return mebibytes << 20; }
};

inline void add_sizes(CLI::App& app, Sizes& sizes, const std::string& what, int most) {
  app.add_option("--size", sizes.mebibytes, "size of " + what + " in MiB")
      ->check(CLI::Range(1, most))
      ->capture_default_str();
  app.add_option("--rounds", sizes.rounds, "number of rounds; medians are reported")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
}

/// Settings for messages of `bytes` bytes, with room for so many in the send and rendezvous pools.
inline Config config_for(std::size_t bytes, std::size_t sends, std::size_t arrivals) {
  Config c;
  const std::size_t room = bytes + (4u << 20);  // whole chunks, and the block's header
  c.memory.send_bytes = sends * room;
  c.memory.lease_bytes = room;
  c.memory.rendezvous_bytes = arrivals * room;
  c.connections.max_message_bytes = static_cast<std::uint32_t>(bytes);
  c.connections.maximum = 16;
  return c;
}

struct Way {
  const char* name;
  std::function<double()> move;  ///< returns nanoseconds for sizes.bytes()
};

/// The first way is memcpy. `begin_round` gets true for rounds that are not counted: the first
/// rounds also pay for page faults.
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
