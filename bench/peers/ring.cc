// The ruler for small requests: two rings of cache lines in shared memory and nothing else. A line
// carries up to 48 bytes and the flag that publishes them. Longer payloads lie contiguous in a data
// ring beside the lines; they are read in place, and replies are built in place. No library with
// the same guarantees can be faster.
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <vector>

#include "peers/harness/measure.h"
#include "peers/harness/window.h"

namespace spinwire::bench {
namespace {

constexpr std::uint64_t kLines = 256;
constexpr std::uint64_t kLinesPerAck = 64;
constexpr std::size_t kShort = 48;
static_assert(kLines - kLinesPerAck > 2 * kWidestWindow);

enum class Kind : std::uint32_t { request, reply };

struct alignas(64) Line {
  std::atomic<std::uint32_t> turn;  ///< position + 1 of the packet that lies here
  std::uint32_t length;
  std::uint32_t offset;  ///< in the data ring, if longer than kShort
  Kind kind;
  std::array<std::byte, kShort> bytes;
};
static_assert(sizeof(Line) == 64);

/// Copies what a line has room for, word by word: a wider load of a head that was just written
/// would wait for the store buffer.
inline void copy_words(std::byte* to, const std::byte* from) noexcept {
#pragma GCC unroll 6
  for (std::size_t at = 0; at != kShort; at += 8) {
    std::uint64_t word;
    std::memcpy(&word, from + at, sizeof word);
    std::memcpy(to + at, &word, sizeof word);
  }
}

/// One direction: one producer, one consumer. The data ring follows.
struct Direction {
  alignas(256) std::atomic<std::uint64_t> consumed;  ///< lines, as the consumer tells now and then
  alignas(4096) std::array<Line, kLines> lines;
  [[nodiscard]] std::byte* data() noexcept { return reinterpret_cast<std::byte*>(this + 1); }
};

struct Wires {
  std::byte* memory = nullptr;
  std::size_t data_bytes = 0;  ///< of a data ring; a power of two
  [[nodiscard]] Direction& direction(int side) const {
    const std::size_t stride = sizeof(Direction) + data_bytes;
    return *reinterpret_cast<Direction*>(memory + static_cast<std::size_t>(side) * stride);
  }
};
Wires wires;

class RingWriter {
 public:
  explicit RingWriter(Direction& direction)
      : ring_(direction), data_(direction.data()), data_mask_(wires.data_bytes - 1) {}

  /// A place for a packet, or null if the ring is full. Publish it with commit().
  std::byte* reserve(std::size_t size) noexcept {
    place_ = written_;
    if (size <= kShort) return has_room(0) ? line().bytes.data() : nullptr;
    const std::uint64_t at = written_ & data_mask_;
    if (at + size > data_mask_ + 1) place_ += data_mask_ + 1 - at;  // a packet does not wrap
    return has_room(place_ + size - written_) ? data_ + (place_ & data_mask_) : nullptr;
  }
  void commit(std::size_t size, Kind kind) noexcept {
    Line& line = this->line();
    line.length = static_cast<std::uint32_t>(size);
    line.kind = kind;
    if (size > kShort) {
      line.offset = static_cast<std::uint32_t>(place_ & data_mask_);
      written_ = place_ + stride_of(size);
    }
    ends_[at_ % kLines] = written_;
    line.turn.store(static_cast<std::uint32_t>(++at_), std::memory_order_release);
  }
  /// Copies a packet into the ring; false if that is full.
  bool put(const std::byte* bytes, std::size_t size, Kind kind) noexcept {
    std::byte* const place = reserve(size);
    if (place == nullptr) return false;
    if (size <= kShort) {
      copy_words(place, bytes);
    } else {
      std::memcpy(place, bytes, size);
    }
    commit(size, kind);
    return true;
  }

 private:
  [[nodiscard]] Line& line() noexcept { return ring_.lines[at_ % kLines]; }
  [[nodiscard]] bool has_room(std::uint64_t bytes) noexcept {
    const auto fits = [&] {
      return at_ - consumed_ < kLines && written_ + bytes - freed_ <= data_mask_ + 1;
    };
    if (fits()) [[likely]]
      return true;
    const std::uint64_t consumed = ring_.consumed.load(std::memory_order_acquire);
    if (consumed == consumed_) return false;
    consumed_ = consumed;
    freed_ = ends_[(consumed - 1) % kLines];
    return fits();
  }

  Direction& ring_;
  std::byte* data_;
  std::uint64_t data_mask_;
  std::uint64_t at_ = 0;        ///< lines written
  std::uint64_t consumed_ = 0;  ///< as last read
  std::uint64_t written_ = 0;   ///< bytes of the data ring
  std::uint64_t freed_ = 0;
  std::uint64_t place_ = 0;
  std::array<std::uint64_t, kLines> ends_{};  ///< `written_` behind each line's packet
};

class RingReader {
 public:
  explicit RingReader(Direction& direction) : ring_(direction), data_(direction.data()) {}

  /// The next packet, or null.
  [[nodiscard]] const Line* peek() const noexcept {
    const Line& line = ring_.lines[at_ % kLines];
    return line.turn.load(std::memory_order_acquire) == static_cast<std::uint32_t>(at_ + 1)
               ? &line
               : nullptr;
  }
  [[nodiscard]] const std::byte* payload(const Line& line) const noexcept {
    return line.length <= kShort ? line.bytes.data() : data_ + line.offset;
  }
  void pop(const Line& line) noexcept {
    unfreed_bytes_ += line.length > kShort ? line.length : 0;
    if (++at_ - acked_ >= kLinesPerAck || unfreed_bytes_ > wires.data_bytes / 8) ack();
  }
  /// Nothing is left to read: the writer may wait for the bytes.
  void ack_if_idle() noexcept {
    if (unfreed_bytes_ != 0) ack();
  }

 private:
  void ack() noexcept {
    ring_.consumed.store(acked_ = at_, std::memory_order_release);
    unfreed_bytes_ = 0;
  }

  Direction& ring_;
  const std::byte* data_;
  std::uint64_t at_ = 0;
  std::uint64_t acked_ = 0;
  std::size_t unfreed_bytes_ = 0;
};

class RingNode : public PeerNodeBase {
 public:
  static void prepare(const Options& options) {
    // At least four packets, so that one always fits behind or before the unread ones.
    const std::size_t longest = stride_of(std::max(options.size, options.reply_size));
    wires.data_bytes = std::max<std::size_t>(std::size_t{64} << 10, std::bit_ceil(4 * longest));
    wires.memory = static_cast<std::byte*>(map_shared(2 * (sizeof(Direction) + wires.data_bytes)));
  }

  RingNode(const Options& options, Role role)
      : options_(options),
        role_(role),
        window_(options),
        out_(wires.direction(role.side)),
        in_(wires.direction(1 - role.side)),
        requests_(options.window * stride_of(options.size), std::byte{3}) {}

  [[nodiscard]] std::string address() const { return {}; }
  void connect(const std::string&) {}

  void step() {
    const Line* line = nullptr;
    for (std::uint32_t n = 0; n < options_.window; ++n) {
      line = in_.peek();
      if (line == nullptr) {
        in_.ack_if_idle();
        break;
      }
      if (line->kind == Kind::reply) {
        window_.on_reply(in_.payload(*line), line->length);
      } else if (!answer(*line)) {
        break;
      }
      in_.pop(*line);
    }
    if (role_.is_client) send_requests();
  }

  [[nodiscard]] std::uint64_t done() const { return window_.done(); }
  [[nodiscard]] std::uint64_t bad() const { return window_.bad(); }

 private:
  /// False if there is no room for the reply; the request stays.
  bool answer(const Line& request) {
    std::byte* const reply = out_.reserve(options_.reply_size);
    if (reply == nullptr) return false;
    const std::byte* bytes = in_.payload(request);
    if (request.length <= kShort && options_.reply_size <= kShort) {
      copy_words(reply, bytes);
      bytes = reply;
    }
    if (!build_reply(options_, bytes, request.length, reply)) window_.count_bad();
    out_.commit(options_.reply_size, Kind::reply);
    return true;
  }
  void send_requests() {
    for (; window_.has_unsent(); window_.pop()) {
      const std::uint32_t slot = window_.next();
      std::byte* const request = requests_.data() + slot * stride_of(options_.size);
      window_.stamp(slot, request);
      if (!out_.put(request, options_.size, Kind::request)) return;
    }
  }

  Options options_;
  Role role_;
  Window window_;
  RingWriter out_;
  RingReader in_;
  std::vector<std::byte> requests_;
};

}  // namespace
}  // namespace spinwire::bench

int main(int argc, char** argv) {
  using namespace spinwire::bench;
  return measure_peer<RingNode>(
      "ring", parse_options(argc, argv, "Requests and replies over a bare ring in shared memory",
                            {What::messages, What::calls}));
}
