// Compares long messages with memcpy between the same two buffers.
#include <cstring>

#include "common/setup.h"
#include "peers/beside_memcpy.h"
#include "peers/harness/placement.h"

namespace spinwire::bench {
namespace {

/// A sender, and a receiver that names a buffer of its own or lets the engine place messages.
class Ends {
 public:
  explicit Ends(std::size_t bytes)
      : bytes_(bytes),
        sender_(must(Engine::open(config_for(bytes, 1, 1)))),
        receiver_(must(Engine::open(config_for(bytes, 1, 1)))),
        from_(sender_.allocate(bytes)),
        to_(receiver_.allocate(bytes, Pool::lease)) {
    if (!from_ || !to_) give_up("the pools are too small");
    for (std::size_t i = 0; i < bytes; ++i) from_.data()[i] = std::byte(i * 7 + (i >> 12));
    std::memset(to_.data(), 2, bytes);
    ListenOptions listening;
    listening.handlers.on_offer = [this](Connection, Offer& o) {
      if (named_ && o.place(to_) != Status::ok) give_up("the message cannot be placed");
    };
    listening.handlers.on_message = [this](Connection, Message& m) {
      arrived_ = m.size() == bytes_ && m.data()[0] == mark() && m.data()[bytes_ - 1] == mark();
      whole_ = !looks_ || std::memcmp(m.data(), from_.data(), bytes_) == 0;
    };
    listener_ = must(receiver_.listen("127.0.0.1:0", listening));
    ConnectOptions options;
    options.handlers.on_closed = [](Connection, const Error& why) {
      if (why.status != Status::ok) give_up(why.message());
    };
    connection_ = must(sender_.connect(listener_.address(), options));
    run_until(
        "the connection is being made", [this] { poll(); },
        [this] { return connection_.ready() && receiver_.stats().accepted == 1; });
  }

  /// Nanoseconds from send() until both callbacks have run.
  double send(bool named) {
    named_ = named;
    arrived_ = sent_ = false;
    mark_next();
    const double begun = nanoseconds_now();
    const Status status =
        connection_.send(from_, [this](const Completion& c) { sent_ = c.status == Status::ok; });
    if (status != Status::ok) give_up(to_string(status));
    run_until(
        "a message is on the way", [this] { poll(); }, [this] { return arrived_ && sent_; });
    const double took = nanoseconds_now() - begun;
    if (!whole_) give_up("a message differs from what was sent");
    return took;
  }
  /// Whether the receiver compares every byte.
  void look(bool closely) { looks_ = closely; }
  double copy() {
    mark_next();
    const double begun = nanoseconds_now();
    std::memcpy(to_.data(), from_.data(), bytes_);
    const double took = nanoseconds_now() - begun;
    if (to_.data()[bytes_ - 1] != mark()) give_up("memcpy did not copy");
    return took;
  }

 private:
  void poll() {
    (void)sender_.poll();
    (void)receiver_.poll();
  }
  void mark_next() { from_.data()[0] = from_.data()[bytes_ - 1] = std::byte(++turn_); }
  [[nodiscard]] std::byte mark() const { return std::byte(turn_); }

  std::size_t bytes_;
  Engine sender_;
  Engine receiver_;
  Buffer from_;
  Buffer to_;
  Listener listener_;
  Connection connection_;
  std::uint8_t turn_ = 0;
  bool named_ = false;
  bool arrived_ = false;
  bool sent_ = false;
  bool looks_ = false;
  bool whole_ = false;
};

int compare(const Sizes& sizes) {
  Ends ends(sizes.bytes());
  const std::vector<Way> ways{
      {"memcpy", [&] { return ends.copy(); }},
      {"message into a named destination", [&] { return ends.send(true); }},
      {"message into a block of the pool", [&] { return ends.send(false); }}};
  compare_with_memcpy(sizes, ways, [&](bool first) { ends.look(first); });
  return 0;
}

}  // namespace
}  // namespace spinwire::bench

int main(int argc, char** argv) {
  spinwire::bench::Sizes sizes{64};
  CLI::App app("Compares long messages with memcpy");
  add_sizes(app, sizes, "a message", 512);
  CLI11_PARSE(app, argc, argv);
  return spinwire::bench::compare(sizes);
}
