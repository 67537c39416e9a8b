// Compares remote calls with long requests, or replies, with memcpy of as many bytes: both engines
// live on one thread, and the ways take turns, so that each meets the same machine.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <array>
#include <cstring>
#include <vector>

#include "common/setup.h"
#include "peers/placement.h"
#include "peers/report.h"

namespace spinwire::bench {
namespace {

struct Options {
  std::size_t mebibytes = 8;
  std::size_t rounds = 30;
  std::size_t calls = 16;  ///< that a way is timed over
};

enum Methods : Method { kTake = 1, kGive = 2 };

Config config_for(std::size_t bytes) {
  Config c;
  const std::size_t room = bytes + (4u << 20);  // whole chunks, with the block's own words
  c.memory.send_bytes = 2 * room;
  c.memory.lease_bytes = room;
  c.memory.large_bytes = 4 * room;
  c.connections.message_bytes = static_cast<std::uint32_t>(bytes);
  c.connections.maximum = 16;
  return c;
}

/// A client and a server, which looks at both ends of what it gets, and gives what it has.
class Ends {
 public:
  explicit Ends(std::size_t bytes)
      : bytes_(bytes),
        client_(must(Engine::open(config_for(bytes)))),
        server_(must(Engine::open(config_for(bytes)))),
        from_(client_.allocate(bytes)),
        to_(client_.allocate(bytes, Pool::lease)),
        has_(server_.allocate(bytes)) {
    if (!from_ || !to_ || !has_) give_up("the pools have no room");
    std::memset(from_.data(), 1, bytes);
    std::memset(to_.data(), 2, bytes);
    std::memset(has_.data(), 3, bytes);
    must_serve(kTake, [this](Request& r) {
      arrived_ += r.bytes().size() == bytes_ && r.bytes().front() == std::byte{1} ? 1 : 0;
      (void)r.reply(std::span<const std::byte>());
    });
    must_serve(kGive, [this](Request& r) { (void)r.reply(has_.slice()); });
    listener_ = must(server_.listen("127.0.0.1:0", {}));
    session_ = must(client_.open_session(listener_.address(), {}));
    run_until(
        "the session is being opened", [this] { poll(); }, [this] { return session_.ready(); });
  }

  /// Nanoseconds for so many calls, `window` of them at a time.
  double call(Method method, std::size_t calls, std::size_t window) {
    const std::size_t end = ended_ + calls;
    std::size_t begun = ended_;
    arrived_ = 0;
    const double start = nanoseconds_now();
    while (ended_ != end) {
      for (; begun != end && begun - ended_ < window; ++begun) start_one(method);
      poll();
    }
    const double took = nanoseconds_now() - start;
    if (method == kTake && arrived_ != calls) give_up("a request is not what was sent");
    if (method == kGive && to_.data()[bytes_ - 1] != std::byte{3}) give_up("a reply is not there");
    return took / static_cast<double>(calls);
  }
  double copy(std::size_t times) {
    const double start = nanoseconds_now();
    for (std::size_t i = 0; i < times; ++i) {
      std::memcpy(to_.data(), from_.data(), bytes_);
      asm volatile("" ::: "memory");
    }
    return (nanoseconds_now() - start) / static_cast<double>(times);
  }

 private:
  void must_serve(Method method, const MethodHandler& handler) {
    if (auto served = server_.serve(method, handler); !served) give_up(served.error().message());
  }
  void start_one(Method method) {
    CallOptions options;
    if (method == kGive) options.reply_into = to_.slice();
    const ReplyCallback done = [this](Reply& r) {
      if (r.status() != Status::ok) give_up(to_string(r.status()));
      ++ended_;
    };
    const Status status = method == kGive
                              ? session_.call(method, std::span<const std::byte>(), done, options)
                              : session_.call(method, from_.slice(), done, options);
    if (status != Status::ok) give_up(to_string(status));
  }
  void poll() {
    (void)client_.poll();
    (void)server_.poll();
  }

  std::size_t bytes_;
  std::size_t ended_ = 0;
  std::size_t arrived_ = 0;
  Engine client_;
  Engine server_;
  Buffer from_;
  Buffer to_;
  Buffer has_;
  Listener listener_;
  Session session_;
};

struct Way {
  const char* name;
  Method method;
  std::size_t window;
};

int compare(const Options& o) {
  const std::size_t bytes = o.mebibytes << 20;
  constexpr std::array<Way, 4> kWays{{{"long requests, one at a time", kTake, 1},
                                      {"long requests, four at a time", kTake, 4},
                                      {"long replies, one at a time", kGive, 1},
                                      {"long replies, four at a time", kGive, 4}}};
  Ends ends(bytes);
  std::array<std::vector<double>, kWays.size()> took;
  std::vector<double> copies;
  for (std::size_t round = 0; round < o.rounds + 2; ++round) {
    // The first ones touch memory that the others find mapped.
    const bool first = round < 2;
    const double copy = ends.copy(o.calls);
    if (!first) copies.push_back(copy);
    for (std::size_t i = 0; i < kWays.size(); ++i) {
      const double ns = ends.call(kWays[i].method, o.calls, kWays[i].window);
      if (!first) took[i].push_back(ns);
    }
  }
  const double copy = median(copies);
  fmt::print("{} MiB at a time, one thread, medians of {}\n", o.mebibytes, o.rounds);
  fmt::print("{:<36} {:>6.2f} GB/s\n", "memcpy", static_cast<double>(bytes) / copy);
  for (std::size_t i = 0; i < kWays.size(); ++i) {
    const double ns = median(took[i]);
    fmt::print("{:<36} {:>6.2f} GB/s  {:>5.2f} of memcpy\n", kWays[i].name,
               static_cast<double>(bytes) / ns, copy / ns);
  }
  return 0;
}

}  // namespace
}  // namespace spinwire::bench

int main(int argc, char** argv) {
  spinwire::bench::Options options;
  CLI::App app("Remote calls with long requests and replies beside memcpy");
  app.add_option("--size", options.mebibytes, "of a request or reply, MiB")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  app.add_option("--calls", options.calls, "to be timed at once")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  app.add_option("--rounds", options.rounds, "to take the median of")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return spinwire::bench::compare(options);
}
