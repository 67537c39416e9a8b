// The client's window of requests, and the bytes by which requests and replies are checked.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "peers/harness/options.h"

namespace spinwire::bench {

/// First bytes of each request and reply that is long enough.
struct Head {
  std::uint32_t slot;
  std::uint32_t generation;
  std::uint64_t value;
};
static_assert(sizeof(Head) == 16);

/// Set in the value of a request, not in that of a reply.
inline constexpr std::uint64_t kRequestMark = std::uint64_t{1} << 63;

inline Head load_head(const std::byte* at) noexcept {
  Head head;
  std::memcpy(&head, at, sizeof head);
  return head;
}

/// From one place to the next in memory with a place for each slot.
constexpr std::size_t stride_of(std::size_t size) noexcept {
  return std::max<std::size_t>(64, (size + 63) & ~std::size_t{63});
}

/// Counts requests and replies. Slot i belongs to batch i / batch; a batch is sent again when all
/// of its replies are in. Replies shorter than a Head are taken to come in the order of the
/// requests.
class Window {
 public:
  explicit Window(const Options& options)
      : options_(options),
        mask_(std::bit_ceil(options.window) - 1),
        order_(mask_ + 1),
        generations_(options.window),
        left_(options.window / options.batch, options.batch) {
    for (std::uint32_t slot = 0; slot < options.window; ++slot) append(slot);
  }

  /// Whether a request waits to be sent, and the slot of the next one.
  [[nodiscard]] bool has_unsent() const noexcept { return sent_ != appended_; }
  [[nodiscard]] std::uint32_t next() const noexcept { return order_[sent_ & mask_]; }
  /// The next request was sent.
  void pop() noexcept { ++sent_; }

  /// Writes the slot's next head to its request.
  void stamp(std::uint32_t slot, std::byte* request) noexcept {
    const Head head{slot, ++generations_[slot],
                    (std::uint64_t{generations_[slot]} + 7) | kRequestMark};
    if (options_.size >= sizeof head) std::memcpy(request, &head, sizeof head);
  }

  /// Takes a reply and finds its slot.
  void on_reply(const std::byte* reply, std::size_t size) noexcept {
    const bool has_head = options_.size >= sizeof(Head) && options_.reply_size >= sizeof(Head);
    if (size != options_.reply_size) {
      ++bad_;
      return;
    }
    if (!has_head) return end(order_[done_ & mask_]);
    const Head head = load_head(reply);
    if (head.slot >= options_.window || head.generation != generations_[head.slot] ||
        head.value != std::uint64_t{head.generation} + 8) {
      ++bad_;
      return;
    }
    end(head.slot);
  }
  /// The operation of a slot has ended as it should.
  void end(std::uint32_t slot) noexcept {
    ++done_;
    if (options_.batch == 1) return append(slot);
    const std::uint32_t batch = slot / options_.batch;
    if (--left_[batch] != 0) return;
    left_[batch] = options_.batch;
    for (std::uint32_t i = 0; i < options_.batch; ++i) append(batch * options_.batch + i);
  }
  /// The one-sided operation of a slot has ended. A READ has brought its slot's head to `local`.
  void end_one_sided(std::uint32_t slot, const std::byte* local) noexcept {
    if (options_.what == What::read && options_.size >= sizeof(Head)) {
      const Head head = load_head(local + slot * stride_of(options_.size));
      if (head.slot != slot || head.generation != 0) count_bad();
    }
    end(slot);
  }
  void count_bad() noexcept { ++bad_; }

  [[nodiscard]] std::uint64_t done() const noexcept { return done_; }
  [[nodiscard]] std::uint64_t bad() const noexcept { return bad_; }

 private:
  void append(std::uint32_t slot) noexcept { order_[appended_++ & mask_] = slot; }

  Options options_;
  std::uint64_t done_ = 0;
  std::uint64_t bad_ = 0;
  std::uint32_t sent_ = 0;
  std::uint32_t appended_ = 0;
  std::uint32_t mask_;
  std::vector<std::uint32_t> order_;  ///< slots, as they are sent
  std::vector<std::uint32_t> generations_;
  std::vector<std::uint32_t> left_;  ///< replies that a batch waits for
};

/// Writes the heads that READs bring, one to the place of each slot.
inline void write_heads(const Options& options, std::byte* memory) noexcept {
  for (std::uint32_t slot = 0; slot < options.window; ++slot) {
    const Head head{slot, 0, 0};
    if (options.size >= sizeof head)
      std::memcpy(memory + slot * stride_of(options.size), &head, sizeof head);
  }
}

/// Writes the reply to a request: the head with its value raised by one, then as many of the
/// request's bytes as the reply has room for. Returns false if the request is not as it should be.
inline bool build_reply(const Options& options, const std::byte* request, std::size_t size,
                        std::byte* reply) noexcept {
  if (size != options.size) return false;
  const std::size_t copied = std::min(size, options.reply_size);
  if (copied < sizeof(Head)) {
    if (copied != 0) std::memcpy(reply, request, copied);
    return true;
  }
  Head head = load_head(request);
  if (head.slot >= options.window) return false;
  head.value = (head.value & ~kRequestMark) + 1;
  std::memcpy(reply, &head, sizeof head);
  if (reply != request)
    std::memcpy(reply + sizeof head, request + sizeof head, copied - sizeof head);
  return true;
}

}  // namespace spinwire::bench
