// Shared by the programs that run in machines with Soft-RoCE.
#pragma once

#include <sys/wait.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "spinwire/spinwire.h"

namespace softroce {

using namespace spinwire;  // NOLINT: programs of one file each
using namespace std::chrono_literals;

/// Ends the program unless `good`.
inline void must(bool good, const std::string& what) {
  if (good) return;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
  std::exit(1);
}

template <typename T>
T must(Result<T> made, const char* what) {
  must(made.has_value(), std::string(what) + ": " + (made ? "" : made.error().message()));
  return std::move(*made);
}

inline Config config() {
  Config c = must(Config::load(), "the configuration");
  c.device.name = "rxe0";
  c.security.open = true;  // two machines of ours alone
  c.memory.hugepages = HugepagePolicy::off;
  c.memory.send_bytes = 8u << 20;
  c.memory.receive_bytes = 2u << 20;
  c.memory.lease_bytes = 4u << 20;
  c.memory.rendezvous_bytes = 0;
  c.memory.windows = 0;
  c.connections.max_message_bytes = c.connections.eager_bytes;  // no rendezvous messages
  c.queues.receive_depth = 256;
  c.queues.operations = 1024;
  c.queues.completion_depth = 4096;
  c.connections.maximum = 128;
  c.connections.handshakes = 64;
  c.connections.connect_timeout = 60s;
  c.connections.handshake_timeout = 60s;
  c.queue_pair.ack_timeout = 16;  // 0.27 s: an emulated machine may be late
  return c;
}

/// The same with remote calls.
inline Config calls_config() {
  Config c = config();
  c.memory.receive_bytes = 8u << 20;
  c.queues.completion_depth = 8192;
  c.rpc.sessions = 64;
  c.rpc.window = 8;
  c.rpc.receive_depth = 512;
  c.rpc.min_rto = 20ms;  // the machine is emulated
  return c;
}

/// Polls until `done()`, with a limit that only a defect reaches.
template <typename Poll, typename Done>
bool until(Poll&& poll, Done&& done, std::chrono::seconds timeout = 30s) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  for (unsigned i = 0; !done(); ++i) {
    poll();
    if (i % 64 == 0 && std::chrono::steady_clock::now() > deadline) return done();
  }
  return true;
}

inline std::byte pattern(std::uint32_t seed, std::size_t at) {
  return static_cast<std::byte>(seed * 31 + at * 7 + (at >> 8));
}
inline void fill(std::span<std::byte> bytes, std::uint32_t seed) {
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = pattern(seed, i);
}
inline bool holds(std::span<const std::byte> bytes, std::uint32_t seed) {
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] != pattern(seed, i)) return false;
  }
  return true;
}

/// The output of a shell command.
inline std::string output_of(const std::string& command) {
  std::string text;
  std::FILE* pipe = ::popen(command.c_str(), "r");
  must(pipe != nullptr, command);
  std::array<char, 512> part{};
  while (std::fgets(part.data(), part.size(), pipe) != nullptr) text += part.data();
  must(::pclose(pipe) == 0, command + ": " + text);
  return text;
}

}  // namespace softroce
