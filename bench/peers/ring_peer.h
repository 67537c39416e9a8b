// The least that can be: two rings of 64-byte slots in shared memory, the flag in the line of the
// payload. No library can be faster, so it is what others are measured against.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "common/echo_pair.h"

namespace spinwire::bench {

inline constexpr std::uint64_t kRingSlots = 256;

/// One direction: one producer, one consumer.
struct Ring {
  struct alignas(64) Slot {
    std::atomic<std::uint64_t> turn;  ///< position + 1 of what lies here
    EchoBody body;
  };
  static_assert(sizeof(Slot) == 64);
  alignas(256) std::atomic<std::uint64_t> taken;  ///< told by the consumer now and then
  alignas(4096) std::array<Slot, kRingSlots> slots;
};

class RingWriter {
 public:
  explicit RingWriter(Ring& ring) noexcept : ring_(ring) {}
  /// Spins while the ring is full, which no window used here makes happen.
  void put(const EchoBody& body) noexcept {
    while (at_ - taken_ == kRingSlots)
      [[unlikely]] taken_ = ring_.taken.load(std::memory_order_acquire);
    Ring::Slot& slot = ring_.slots[at_ % kRingSlots];
    slot.body = body;
    slot.turn.store(++at_, std::memory_order_release);
  }

 private:
  Ring& ring_;
  std::uint64_t at_ = 0;
  std::uint64_t taken_ = 0;
};

class RingReader {
 public:
  explicit RingReader(Ring& ring) noexcept : ring_(ring) {}
  [[nodiscard]] const EchoBody* peek() const noexcept {
    const Ring::Slot& slot = ring_.slots[at_ % kRingSlots];
    return slot.turn.load(std::memory_order_acquire) == at_ + 1 ? &slot.body : nullptr;
  }
  void pop() noexcept {
    if (++at_ % (kRingSlots / 4) == 0) ring_.taken.store(at_, std::memory_order_release);
  }

 private:
  Ring& ring_;
  std::uint64_t at_ = 0;
};

struct RingWires {
  Ring requests;
  Ring replies;
};

class RingServer {
 public:
  explicit RingServer(RingWires& wires) noexcept : in_(wires.requests), out_(wires.replies) {}
  void poll() noexcept {
    for (std::uint32_t left = kMostWindow; left != 0; --left) {
      const EchoBody* request = in_.peek();
      if (request == nullptr) return;
      EchoBody reply = *request;
      ++reply.number;
      in_.pop();
      out_.put(reply);
    }
  }

 private:
  RingReader in_;
  RingWriter out_;
};

class RingClient {
 public:
  explicit RingClient(RingWires& wires) noexcept : in_(wires.replies), out_(wires.requests) {}
  void start(std::uint32_t window) noexcept {
    running_ = true;
    for (; window != 0; --window) send_next();
  }
  void stop() noexcept { running_ = false; }
  [[nodiscard]] std::uint64_t done() const noexcept { return done_; }
  [[nodiscard]] std::uint64_t outstanding() const noexcept { return sent_ - done_; }
  void poll() noexcept {
    for (std::uint32_t left = kMostWindow; left != 0; --left) {
      const EchoBody* reply = in_.peek();
      if (reply == nullptr) return;
      if (reply->number != done_ + 1) [[unlikely]]
        give_up("ring: a reply is not the one to be expected");
      ++done_;
      in_.pop();
      if (running_) send_next();
    }
  }

 private:
  void send_next() noexcept { out_.put({sent_++, {1, 2, 3}}); }

  RingReader in_;
  RingWriter out_;
  std::uint64_t sent_ = 0;
  std::uint64_t done_ = 0;
  bool running_ = false;
};

}  // namespace spinwire::bench
