// Shared by the survivor and its victims: a page with each victim's orders and progress, and the
// bytes that both sides can predict.
#pragma once

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/random.h"
#include "spinwire/spinwire.h"

namespace kill_test {

/// The phase in which a victim dies. An `echo` process does not die: it echoes messages and exposes
/// memory.
enum class Phase : std::uint32_t {
  handshake,
  idle,
  sending,    ///< the survivor sends a stream, with a window outstanding
  receiving,  ///< the survivor receives a stream
  one_sided,  ///< both read and write each other's memory
  closing,
  echo,
};
inline constexpr std::size_t kPhases = 6;  // phases in which victims die
inline constexpr std::array<const char*, kPhases + 1> kPhaseNames = {
    "handshake", "idle", "sending", "receiving", "one-sided", "closing", "echo"};

enum class Role : std::uint32_t { connects, listens };  // the victim's

/// Who kills the victim once the phase is under way.
enum class Strike : std::uint32_t {
  at_step,      ///< the victim itself, between two polls
  by_timer,     ///< the kernel, at any instruction of the victim
  by_survivor,  ///< the survivor, between two of its polls
  never,
};

/// A victim's progress. Values are compared by order.
enum class Stage : std::uint32_t { starting, handshake, warm, in_phase, closed };

inline constexpr std::uint64_t kAreaBytes = 1u << 20;
inline constexpr std::size_t kGuardBytes = 4096;
inline constexpr std::uint32_t kLongestMessage = 4096;

/// One victim's part of the shared page.
struct alignas(4096) Slot {
  // The survivor's orders, written before the victim starts.
  Phase phase;
  Role role;
  Strike strike;
  std::uint32_t threshold;  ///< progress in the phase before the strike
  std::uint32_t steps;      ///< at_step: polls until the strike
  std::uint32_t delay_ns;   ///< by_timer: delay of the strike
  bool private_memory;      ///< one-sided work on memory that cannot be mapped
  bool survivor_closes;     ///< closing: the survivor begins
  std::uint64_t seed;
  std::uint32_t survivor_port;
  spinwire::RemoteRegion survivor_into;  ///< to be written by the victim
  spinwire::RemoteRegion survivor_from;  ///< to be read by the victim
  // The victim's progress.
  std::atomic<Stage> stage;
  std::atomic<std::uint64_t> counter;    ///< progress in the phase
  std::atomic<std::uint64_t> struck_at;  ///< ns of CLOCK_MONOTONIC; set by the survivor, too
  std::atomic<std::uint32_t> step;       ///< control verbs of the handshake so far
  std::atomic<std::uint32_t> port;       ///< on which it listens
  std::atomic<std::uint32_t> armed;      ///< by_survivor: the phase is under way
  std::atomic<std::uint32_t> lent;       ///< its regions below are valid
  std::atomic<std::uint32_t> faults;
  spinwire::RemoteRegion into;
  spinwire::RemoteRegion from;
  char fault[256];
  // The survivor's progress.
  std::atomic<std::uint32_t> connecting;  ///< it has begun to connect
  std::atomic<std::uint32_t> closing;
};
static_assert(std::is_trivially_destructible_v<Slot>);

inline constexpr std::uint32_t kSlots = 32;
inline constexpr std::uint32_t kEchoSlot = kSlots - 1;
inline constexpr const char* kVictimVariable = "SPINWIRE_KILL_TEST_VICTIM";  // "descriptor:slot"

inline std::uint64_t now_ns() noexcept {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(t.tv_nsec);
}

/// A pseudo-random number, the same in every process.
inline std::uint64_t mixed(std::uint64_t x) noexcept { return spinwire::base::Random(x).next(); }

// The bytes of messages follow from a key, so lost, doubled, torn or swapped messages are detected.

inline void fill_bytes(std::span<std::byte> bytes, std::uint64_t key) noexcept {
  for (std::size_t at = 0; at < bytes.size(); at += 8) {
    const std::uint64_t word = key + at * 0x0101010101010101;
    std::memcpy(bytes.data() + at, &word, std::min<std::size_t>(8, bytes.size() - at));
  }
}

inline bool same_bytes(std::span<const std::byte> bytes, std::uint64_t key) noexcept {
  for (std::size_t at = 0; at < bytes.size(); at += 8) {
    const std::uint64_t word = key + at * 0x0101010101010101;
    if (std::memcmp(bytes.data() + at, &word, std::min<std::size_t>(8, bytes.size() - at)) != 0)
      return false;
  }
  return true;
}

inline std::uint64_t message_key(std::uint64_t seed, std::uint64_t number) noexcept {
  return mixed(seed ^ mixed(number));
}

/// Mostly one line of a lane or a few, sometimes so long that the receiver pulls the message.
inline std::size_t message_size(std::uint64_t key) noexcept {
  const std::uint64_t shape = key >> 32;
  return shape % 8 == 0 ? (shape >> 3) % (kLongestMessage + 1) : (shape >> 3) % 200;
}

// The bytes of exposed memory follow from their offset, so any part can be checked.

inline const std::vector<std::byte>& area_pattern() {
  static const std::vector<std::byte> pattern = [] {
    std::vector<std::byte> bytes(kAreaBytes);
    fill_bytes(bytes, mixed(0x61726561));
    for (std::byte& b : bytes) b |= std::byte{1};  // never kUntouched
    return bytes;
  }();
  return pattern;
}
inline constexpr std::byte kUntouched{0x5a};
inline constexpr std::byte kGuard{0xc4};

/// A range of memory exposed to a peer, between two guards that are not exposed.
struct Area {
  Area() = default;
  Area(const Area&) = delete;
  Area& operator=(const Area&) = delete;
  ~Area() { close(); }

  spinwire::Buffer block;
  std::vector<std::byte> own;
  spinwire::MemoryRegion region;
  std::byte* base = nullptr;
  spinwire::RemoteRegion remote;

  [[nodiscard]] std::span<std::byte> bytes() const { return {base + kGuardBytes, kAreaBytes}; }

  /// Returns false and sets `why` after a failure.
  bool open(spinwire::Engine& engine, bool as_private, spinwire::Access access, std::string& why) {
    constexpr std::size_t kWhole = kAreaBytes + 2 * kGuardBytes;
    if (as_private) {
      own.resize(kWhole);
      base = own.data();
    } else {
      block = engine.allocate(kWhole, spinwire::Pool::lease);
      if (!block) {
        why = "the lease pool is dry";
        return false;
      }
      base = block.data();
    }
    std::memset(base, static_cast<int>(kGuard), kWhole);
    if (access == spinwire::Access::remote_write) {
      std::memset(bytes().data(), static_cast<int>(kUntouched), kAreaBytes);
    } else {
      std::memcpy(bytes().data(), area_pattern().data(), kAreaBytes);
    }
    return expose(engine, as_private, access, why);
  }

  /// Drops the memory after its registration. Revoke an exposure first.
  void close() {
    region = {};
    block.reset();
    own = {};
    base = nullptr;
    remote = {};
  }

  /// Whether every byte is unchanged or, with `written`, one of those that peers write.
  [[nodiscard]] bool intact(bool written) const {
    for (std::size_t i = 0; i < kGuardBytes; ++i) {
      if (base[i] != kGuard || base[kGuardBytes + kAreaBytes + i] != kGuard) return false;
    }
    const std::byte* pattern = area_pattern().data();
    if (!written) return std::memcmp(bytes().data(), pattern, kAreaBytes) == 0;
    for (std::size_t i = 0; i < kAreaBytes; ++i) {
      if (bytes()[i] != kUntouched && bytes()[i] != pattern[i]) return false;
    }
    return true;
  }

 private:
  bool expose(spinwire::Engine& engine, bool as_private, spinwire::Access access,
              std::string& why) {
    if (as_private) {
      auto registered = engine.register_memory(bytes(), access);
      if (!registered) {
        why = registered.error().message();
        return false;
      }
      region = std::move(*registered);
      remote = region.remote();
      return true;
    }
    auto exposed = engine.expose(block.slice(kGuardBytes, kAreaBytes), access);
    if (!exposed) {
      why = exposed.error().message();
      return false;
    }
    remote = *exposed;
    return true;
  }
};

/// The device that the survivor and its victims use: SPINWIRE_TEST_DEVICE or, by default, our own.
inline std::string device_name() {
  const char* name = std::getenv("SPINWIRE_TEST_DEVICE");
  return name != nullptr ? name : "softverbs";
}

/// The engine settings of everybody in these tests. The device notices a dead peer: the time-outs
/// are longer than the tests wait, and than a busy machine keeps a living one from its processor.
inline spinwire::Config settings() {
  using std::chrono::milliseconds;
  spinwire::Config config;
  config.device.name = device_name();
  config.memory.hugepages = spinwire::HugepagePolicy::prefer;
  config.memory.send_bytes = 8u << 20;
  config.memory.receive_bytes = 4u << 20;
  config.memory.lease_bytes = 4u << 20;
  config.memory.rendezvous_bytes = 0;
  config.memory.windows = 0;
  config.queues.receive_depth = 512;
  config.connections.maximum = 64;
  config.connections.eager_bytes = config.connections.max_message_bytes = kLongestMessage;
  config.connections.keepalive_interval = milliseconds(100);
  config.connections.peer_timeout = milliseconds(3'600'000);
  config.connections.credit_idle_timeout = milliseconds(100);
  config.connections.connect_timeout = milliseconds(600'000);
  config.connections.handshake_timeout = milliseconds(600'000);
  config.connections.close_timeout = milliseconds(600'000);
  return config;
}

}  // namespace kill_test
