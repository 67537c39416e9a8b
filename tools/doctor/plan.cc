#include "doctor/plan.h"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <sstream>

#include "common/json.h"
#include "doctor/host.h"

namespace spinwire::doctor {
namespace {

constexpr std::uint64_t kPageBytes = std::uint64_t{2} << 20;
constexpr std::uint64_t kQueueEntryBytes = 64;
/// A datagram's block: 4 KiB and its control words.
constexpr std::uint64_t kDatagramBytes = 4096 + 64;
/// Entries of a send queue that the library keeps for itself, and some spare.
constexpr std::uint32_t kSpareSends = 32;
constexpr std::uint32_t kMostEntries = 32768;
/// Most that a datagram needs besides the call's own bytes.
constexpr std::uint32_t kCallHeaderBytes = 64;

/// Values beyond the type stay beyond the range, which Config::check() then names.
std::uint32_t narrow(std::uint64_t value) noexcept {
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(value, ~std::uint32_t{0}));
}

std::uint64_t whole_pages(std::uint64_t bytes) noexcept {
  return std::max((bytes + kPageBytes - 1) / kPageBytes, std::uint64_t{1}) * kPageBytes;
}

void plan_connections(const Demand& demand, Config& c) {
  // A session makes a connection when it has calls that no datagram holds.
  const bool long_calls = demand.message_bytes > c.connections.mtu - kCallHeaderBytes;
  c.connections.maximum = narrow(std::max<std::uint64_t>(
      std::uint64_t{demand.connections} + (long_calls ? demand.sessions : 0), 1));
  c.connections.credits = std::max(demand.outstanding, 1u);
  c.connections.eager_bytes =
      std::bit_ceil(narrow(std::clamp<std::uint64_t>(demand.message_bytes, 256, 4096)));
  c.connections.max_message_bytes =
      std::max(narrow(demand.message_bytes), c.connections.eager_bytes);
  // Receives that wait to be posted, and those that are kept for goodbyes, serve no peer.
  const std::uint64_t receives =
      std::uint64_t{c.connections.maximum} * c.connections.credits + c.queues.receive_postlist + 8;
  c.queues.receive_depth = narrow(std::clamp<std::uint64_t>(receives, 64, kMostEntries));
  c.queues.send_depth = std::max(std::bit_ceil(c.connections.credits + kSpareSends), 64u);
  c.queues.operations = narrow(std::clamp<std::uint64_t>(
      std::uint64_t{c.connections.maximum} * c.connections.credits, 1024, 1u << 20));
}

void plan_calls(const Demand& demand, Config& c) {
  c.rpc.sessions = std::max(demand.sessions, 1u);
  c.rpc.window = std::bit_ceil(std::max(demand.window, 1u));
  const std::uint64_t calls = std::uint64_t{demand.sessions} * c.rpc.window;
  // Nine sixteenths of the receives are for whole windows of served sessions.
  c.rpc.receive_depth = narrow(std::clamp<std::uint64_t>(calls * 16 / 9 + 16, 64, kMostEntries));
  c.rpc.send_depth = std::bit_ceil(narrow(std::clamp<std::uint64_t>(calls, 64, kMostEntries)));
}

void plan_leases(const Demand& demand, Config& c) {
  c.leases.maximum = demand.leases;
  c.memory.lease_bytes = whole_pages(demand.lease_bytes);
}

void plan_pools(const Demand& demand, Config& c) {
  const Footprint sizes = footprint(c);
  const std::uint64_t longest = sizes.longest_message_bytes * std::max(demand.long_messages, 1u);
  c.memory.rendezvous_bytes = longest;
  c.memory.windows = longest != 0 || demand.leases != 0 ? c.memory.windows : 0;
  const std::uint64_t messages = sizes.connection_bytes * c.connections.maximum;
  const std::uint64_t calls = kDatagramBytes * demand.sessions * c.rpc.window;
  c.memory.send_bytes = whole_pages((messages + calls) / 4 * 5) + longest;
  // Receives for datagrams take at least a page, so that remote calls stay possible.
  c.memory.receive_bytes = whole_pages(sizes.receive_bytes_needed_with_calls);
  c.queues.completion_depth = narrow(sizes.completion_entries_with_calls);
}

struct Amount {
  const char* name;
  std::uint64_t value;
};

std::vector<Amount> amounts(const Config& config) {
  const Footprint f = footprint(config);
  return {{"pool_bytes", f.pool_bytes},
          {"send_bytes", f.send_bytes},
          {"receive_bytes", f.receive_bytes},
          {"lease_bytes", f.lease_bytes},
          {"rendezvous_bytes", f.rendezvous_bytes},
          {"control_bytes", f.control_bytes},
          {"hugepages_2m", f.pool_bytes / kPageBytes},
          {"memlock_bytes", pinned_bytes(config, f)},
          {"completion_entries", config.queues.completion_depth},
          {"completion_entries_needed", f.completion_entries_with_calls},
          {"send_entries_per_connection", f.send_entries},
          {"receive_entries", f.receive_entries},
          {"datagram_receive_entries", config.rpc.receive_depth},
          {"bytes_per_connection", f.connection_bytes},
          {"connections", f.connections},
          {"connections_with_all_credits", f.connections_with_all_credits},
          {"sessions", config.rpc.sessions},
          {"sessions_with_whole_window", f.sessions_with_whole_window},
          {"longest_message", config.connections.max_message_bytes},
          {"longest_messages", f.longest_messages}};
}

}  // namespace

Result<Config> plan(const Demand& demand) {
  Config config;
  plan_connections(demand, config);
  plan_calls(demand, config);
  plan_leases(demand, config);
  plan_pools(demand, config);
  if (auto good = config.check(); !good) return tl::unexpected(good.error());
  return config;
}

std::uint64_t pinned_bytes(const Config& config, const Footprint& sizes) noexcept {
  const std::uint64_t entries = std::uint64_t{config.queues.completion_depth} +
                                sizes.receive_entries +
                                std::uint64_t{sizes.send_entries} * sizes.connections +
                                config.rpc.send_depth + config.rpc.receive_depth;
  return sizes.pool_bytes + kQueueEntryBytes * entries;
}

std::string footprint_text(const Config& config, std::string_view prefix) {
  const Footprint f = footprint(config);
  std::string text;
  const auto line = [&](std::string_view name, const std::string& what) {
    text += fmt::format("{}{:18} {}\n", prefix, name, what);
  };
  line("pools", fmt::format("{}: send {}, receive {}, lease {}, rendezvous {}, control {}",
                            size_text(f.pool_bytes), size_text(f.send_bytes),
                            size_text(f.receive_bytes), size_text(f.lease_bytes),
                            size_text(f.rendezvous_bytes), size_text(f.control_bytes)));
  line("hugepages", fmt::format("{} of 2 MiB", f.pool_bytes / kPageBytes));
  line("locked memory",
       fmt::format("about {} KiB on an adapter (ulimit -l): the pools, and queues of about 64 "
                   "bytes an entry",
                   (pinned_bytes(config, f) + 1023) / 1024));
  line("completion queue",
       fmt::format("{} entries; {} can be needed at once", config.queues.completion_depth,
                   f.completion_entries_with_calls));
  line("send queues", fmt::format("{} entries for each connection", f.send_entries));
  line("receives", fmt::format("{} for connections, {} for datagrams", f.receive_entries,
                               config.rpc.receive_depth));
  line("a connection", fmt::format("{} bytes of the pools, with all {} credits", f.connection_bytes,
                                   config.connections.credits));
  line("connections", fmt::format("{}, {} of them with all credits at once", f.connections,
                                  f.connections_with_all_credits));
  line("sessions",
       fmt::format("{}, {} served ones with their whole window of {} at once", config.rpc.sessions,
                   f.sessions_with_whole_window, config.rpc.window));
  line("messages",
       fmt::format("up to {} bytes; {}", config.connections.max_message_bytes,
                   f.longest_message_bytes == 0
                       ? "none is a rendezvous message"
                       : fmt::format("{} of the longest arrive at once", f.longest_messages)));
  return text;
}

std::string footprint_json(const Config& config) {
  tools::Json json;
  for (const Amount& amount : amounts(config)) json[amount.name] = amount.value;
  return tools::json_line(json);
}

std::string changed_settings(const Config& config) {
  std::istringstream ours(config.to_toml());
  std::istringstream defaults(Config{}.to_toml());
  std::string text;
  std::string section;
  std::string line;
  for (std::string usual; std::getline(ours, line) && std::getline(defaults, usual);) {
    if (line.starts_with('[')) section = line;
    if (line == usual) continue;
    if (!section.empty()) text += (text.empty() ? "" : "\n") + section + '\n';
    section.clear();
    text += line + '\n';
  }
  return text;
}

}  // namespace spinwire::doctor
