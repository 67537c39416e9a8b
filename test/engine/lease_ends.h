// Two engines, one of which uses memory of the other, and a record of both ends' callbacks.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/harness.h"

namespace leases {

using namespace engine_test;  // the names of a test namespace
using spinwire::LeaseCallback;
using spinwire::LeaseId;
using spinwire::LeaseLimits;
using spinwire::LeaseOptions;
using spinwire::LeaseRefusal;
using spinwire::LeaseReply;
using spinwire::Nanoseconds;
using spinwire::RemoteMemory;
using spinwire::Returned;
using spinwire::ReturnedBy;

/// How memory is opened to the peer.
enum class By { window, registration, own_domain };

inline Config lease_config(By by = By::window) {
  Config c = small_config();
  c.memory.windows = by == By::window ? 64 : 0;
  c.leases.maximum = 128;
  c.queues.completion_depth = 8192;
  if (by == By::own_domain) {
    c.connections.own_domains = 2;
    c.memory.receive_bytes = 4u << 20;
  }
  return c;
}

struct Came {
  LeaseId lease;
  ReturnedBy how;
  bool requested;
  std::vector<std::byte> bytes;
  BufferSlice memory;
};

inline std::vector<std::byte> bytes_of(const BufferSlice& slice) {
  return {slice.data(), slice.data() + slice.size()};
}

/// A client that uses the memory of a server, and a record of both ends' callbacks.
struct Leases : Pair {
  explicit Leases(const Config& c = lease_config(), const std::uint64_t* ticks = nullptr)
      : Pair(c, ticks) {
    watch();
  }
  explicit Leases(By by, const std::uint64_t* ticks = nullptr) : Leases(lease_config(by), ticks) {
    if (by == By::own_domain) use_own_domains(*this);
  }
  /// The engines are destroyed later, and their callbacks use the record.
  ~Leases() {
    server.on_returned = nullptr;
    client.on_lease = nullptr;
  }
  void watch() {
    server.on_returned = [this](Connection, const Returned& r) {
      returned.push_back({r.lease, r.how, r.requested,
                          r.memory ? bytes_of(r.memory) : std::vector<std::byte>(),
                          keep ? r.memory : BufferSlice()});
    };
    client.on_lease = [this](Connection, RemoteMemory& memory) {
      if (take) leased.push_back(std::move(memory));
    };
  }
  /// Requests memory and waits for the answer.
  RemoteMemory request(std::size_t bytes, const LeaseOptions& options = {}) {
    RemoteMemory memory;
    reply.reset();
    const Status status = ends.client.request_memory(bytes, options, [&](LeaseReply& r) {
      EXPECT_FALSE(reply.has_value()) << "told twice";
      reply = {r.status, r.refusal, r.duration};
      memory = std::move(r.memory);
    });
    EXPECT_EQ(status, Status::ok) << to_string(status);
    if (status == Status::ok) {
      EXPECT_TRUE(until([&] { return reply.has_value(); }));
    }
    return memory;
  }
  Status write(const RemoteRegion& to, std::uint32_t seed, Status expected = Status::ok) {
    const Buffer b = client.filled(to.length, seed);
    std::optional<Status> ended;
    const Status status =
        ends.client.write(b.slice(), to, [&](const Completion& c) { ended = c.status; });
    if (status == Status::ok) {
      EXPECT_TRUE(until([&] { return ended.has_value(); }));
      EXPECT_EQ(*ended, expected) << to_string(*ended);
    }
    return status;
  }
  std::vector<std::byte> read(const RemoteRegion& from) {
    Buffer b = client.buffer(from.length);
    std::optional<Status> ended;
    EXPECT_EQ(ends.client.read(b.slice(0, from.length), from,
                               [&](const Completion& c) { ended = c.status; }),
              Status::ok);
    EXPECT_TRUE(until([&] { return ended.has_value(); }));
    EXPECT_EQ(ended.value_or(Status::system), Status::ok);
    return {b.data(), b.data() + from.length};
  }
  template <typename... Buffers>
  void finish(Buffers&... left) {
    (left.reset(), ...);
    leased.clear();
    returned.clear();
    Pair::finish();
    // Windows of ended connections are allocated again.
    const auto windows = [](const Node& node) {
      return !on_softverbs() ||
             node.engine.stats().windows_free == node.engine.config().memory.windows;
    };
    EXPECT_TRUE(until([&] { return windows(client) && windows(server); }));
    for (const Node* node : {&client, &server}) {
      for (const Error& e : node->closed) EXPECT_EQ(e.status, Status::ok) << e.message();
    }
  }

  struct Told {
    Status status;
    LeaseRefusal refusal;
    Nanoseconds time;
  };
  std::optional<Told> reply;
  std::vector<Came> returned;
  std::vector<RemoteMemory> leased;
  bool take = true, keep = false;
};

inline std::vector<std::byte> zeroes(std::size_t size) { return std::vector<std::byte>(size); }
inline std::vector<std::byte> filled(std::size_t size, std::uint32_t seed) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = Node::pattern(seed, i);
  return bytes;
}

/// Time that the test moves.
struct Timed : Leases {
  explicit Timed(By by) : Leases(by, &now) {}
  explicit Timed(const Config& c) : Leases(c, &now) {}
  void pass(Nanoseconds time) {
    now += static_cast<std::uint64_t>(time.count());
    settle(20);
  }
  static inline std::uint64_t now = 1'000'000'000;
};

/// The device may repeat an operation within this time after its end.
inline Nanoseconds max_retry_ticks(const Config& c) {
  return Nanoseconds(4 * (std::int64_t{4096} << c.queue_pair.ack_timeout) *
                     (c.queue_pair.retry_count + 1));
}

}  // namespace leases
