// Measures remote calls with long requests or replies while the network loses packets. Both engines
// run on one thread with one call in flight, and every byte is checked.
#include <fmt/core.h>
#include <xxhash.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "base/internals.h"
#include "common/setup.h"
#include "engine/engine_core.h"
#include "peers/harness/placement.h"
#include "peers/harness/quantile.h"
#include "softverbs/faults/fault_plan.h"

namespace spinwire::bench {
namespace {

struct Options {
  std::size_t mebibytes = 8;
  std::size_t calls = 1000;  ///< of each kind, for each probability
  std::vector<double> drop = {0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3};
  std::uint64_t seed = 1;
  double gbit = 0;  ///< of each end's link; 0: no limit
  std::uint32_t ack_timeout = Config{}.queue_pair.ack_timeout;
};

enum Methods : Method { kTake = 1, kGive = 2 };
using Answer = std::array<std::uint64_t, 4>;  ///< 32 bytes: the number, the length, the sum

Config config_for(const Options& o) {
  Config c;
  const std::size_t bytes = o.mebibytes << 20;
  c.device.name = "softverbs";
  const std::size_t room = bytes + (4u << 20);  // whole chunks, and the block's header
  c.memory.send_bytes = 2 * room;
  c.memory.lease_bytes = room;
  c.memory.rendezvous_bytes = 4 * room;
  c.connections.max_message_bytes = static_cast<std::uint32_t>(bytes);
  c.connections.maximum = 16;
  c.queue_pair.ack_timeout = o.ack_timeout;
  return c;
}

/// Gives each call different bytes: each page begins with the number of its call and its own.
void stamp(std::span<std::byte> bytes, std::uint64_t call) {
  for (std::size_t at = 0; at < bytes.size(); at += 4096) {
    const std::uint64_t word = call << 24 | at >> 12;
    std::memcpy(&bytes[at], &word, sizeof word);
  }
}
std::uint64_t sum_of(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

/// Results of some calls.
struct Tally {
  std::vector<double> took;    ///< nanoseconds of each, without the time to check bytes
  std::vector<double> copies;  ///< of memcpy, every fourth call
  std::uint64_t served = 0;
  std::uint64_t failed = 0;
  std::uint64_t wrong = 0;
  std::uint64_t lost = 0, retransmitted = 0, timeouts = 0;  ///< packets, packets, ACK timeouts

  [[nodiscard]] bool good() const { return failed == 0 && wrong == 0 && served == took.size(); }
  [[nodiscard]] double mean() const {
    double sum = 0;
    for (const double ns : took) sum += ns;
    return sum / static_cast<double>(took.size());
  }
};

class Ends {
 public:
  explicit Ends(const Options& o)
      : options_(o),
        client_(must(Engine::open(config_for(o)))),
        server_(must(Engine::open(config_for(o)))),
        from_(client_.allocate(o.mebibytes << 20)),
        to_(client_.allocate(o.mebibytes << 20, Pool::lease)),
        has_(server_.allocate(o.mebibytes << 20)) {
    if (!from_ || !to_ || !has_) give_up("the pools are too small");
    std::memset(from_.data(), 1, from_.size());
    std::memset(to_.data(), 2, to_.size());
    std::memset(has_.data(), 3, has_.size());
    must_serve(kTake, [this](Request& r) { take(r); });
    must_serve(kGive, [this](Request& r) { give(r); });
    listener_ = must(server_.listen("127.0.0.1:0", {}));
    session_ = must(client_.open_session(listener_.address(), {}));
    run_until(
        "the session is being opened", [this] { poll(); }, [this] { return session_.ready(); });
  }

  Tally call(Method method, std::size_t calls, double drop) {
    const auto before = set_loss(drop);
    Tally tally;
    tally_ = &tally;
    for (std::size_t i = 0; i < calls; ++i) {
      tally.took.push_back(call_once(method));
      if (i % 4 == 0) tally.copies.push_back(copy());  // so that both meet the same load
    }
    for (std::size_t end = 0; end < 2; ++end) {
      const softverbs::FaultStatistics now = softverbs::fault_statistics(device(end));
      tally.lost += now.packets_lost - before[end].packets_lost;
      tally.retransmitted += now.packets_retransmitted - before[end].packets_retransmitted;
      tally.timeouts += now.loss_timeouts - before[end].loss_timeouts;
    }
    return tally;
  }

 private:
  void must_serve(Method method, const MethodHandler& handler) {
    if (auto served = server_.serve(method, handler); !served) give_up(served.error().message());
  }
  [[nodiscard]] ibv_context* device(std::size_t end) const {
    return spinwire::detail::core_of(end == 0 ? client_ : server_)->context.device->context();
  }
  /// Without loss and limit the device has no fault injection.
  std::array<softverbs::FaultStatistics, 2> set_loss(double drop) {
    std::array<softverbs::FaultStatistics, 2> before;
    for (std::size_t end = 0; end < 2; ++end) {
      softverbs::clear_faults(device(end));
      if (drop == 0 && options_.gbit == 0) continue;
      softverbs::FaultPlan plan;
      plan.seed = 2 * options_.seed + end;
      plan.drop = plan.packet_loss = drop;
      plan.bytes_per_second = static_cast<std::uint64_t>(options_.gbit * 1e9 / 8);
      if (auto set = softverbs::set_faults(device(end), plan); !set) give_up(set.error().message());
      before[end] = softverbs::fault_statistics(device(end));
    }
    return before;
  }

  double copy() {
    const double start = nanoseconds_now();
    std::memcpy(to_.data(), from_.data(), from_.size());
    asm volatile("" ::: "memory");
    return nanoseconds_now() - start;
  }
  double call_once(Method method) {
    ++number_;
    if (method == kTake) {
      stamp(from_.bytes(), number_);
      expected_ = sum_of(from_.bytes());
    }
    bool ended = false;
    looked_ = 0;
    CallOptions options;
    if (method == kGive) options.reply_into = to_.slice();
    const ReplyCallback done = [this, &ended, method](Reply& r) {
      ended = true;
      end(method, r);
    };
    const double start = nanoseconds_now();
    const Status status = method == kGive
                              ? session_.call(method, std::span<const std::byte>(), done, options)
                              : session_.call(method, from_.slice(), done, options);
    if (status != Status::ok) give_up(to_string(status));
    while (!ended) poll();
    return nanoseconds_now() - start - looked_;
  }
  void take(Request& r) {
    const double start = nanoseconds_now();
    ++tally_->served;
    const std::uint64_t sum = sum_of(r.bytes());
    tally_->wrong += sum != expected_ ? 1 : 0;
    const Answer answer{number_, r.bytes().size(), sum, 0};
    looked_ += nanoseconds_now() - start;
    (void)r.reply(std::as_bytes(std::span(answer)));
  }
  void give(Request& r) {
    const double start = nanoseconds_now();
    ++tally_->served;
    stamp(has_.bytes(), number_);
    expected_ = sum_of(has_.bytes());
    looked_ += nanoseconds_now() - start;
    (void)r.reply(has_.slice());
  }
  void end(Method method, const Reply& r) {
    const double start = nanoseconds_now();
    if (r.status() != Status::ok) {
      ++tally_->failed;
    } else if (method == kTake) {
      const Answer answer{number_, from_.size(), expected_, 0};
      const bool same = r.bytes().size() == sizeof answer &&
                        std::memcmp(r.bytes().data(), answer.data(), sizeof answer) == 0;
      tally_->wrong += same ? 0 : 1;
    } else {
      const bool same = r.bytes().size() == to_.size() && sum_of(to_.bytes()) == expected_;
      tally_->wrong += same ? 0 : 1;
    }
    looked_ += nanoseconds_now() - start;
  }
  void poll() {
    (void)client_.poll();
    (void)server_.poll();
  }

  const Options& options_;
  std::uint64_t number_ = 0;
  std::uint64_t expected_ = 0;  ///< sum of the bytes in flight
  double looked_ = 0;           ///< nanoseconds spent on checking the current call
  Tally* tally_ = nullptr;
  Engine client_;
  Engine server_;
  Buffer from_;
  Buffer to_;
  Buffer has_;
  Listener listener_;
  Session session_;
};

void print_head(const Options& o) {
  fmt::print("{} MiB per call with replies of 32 bytes or empty requests, one call in flight\n",
             o.mebibytes);
  fmt::print("{:<7} {:<9} {:>6} {:>7} {:>9} {:>9} {:>8} {:>8} {:>7} {:>8} {:>8}\n", "drop", "way",
             "calls", "GB/s", "median", "/memcpy", "p99 ms", "max ms", "lost", "retrans",
             "timeouts");
}

void print(double drop, const char* way, Tally& t, double bytes) {
  std::sort(t.took.begin(), t.took.end());
  const auto at = [&](double part) {
    return t.took[static_cast<std::size_t>(part * static_cast<double>(t.took.size() - 1))];
  };
  fmt::print(
      "{:<7g} {:<9} {:>6} {:>7.2f} {:>9.2f} {:>9.2f} {:>8.3f} {:>8.3f} {:>7} {:>8} {:>8}  {}\n",
      drop, way, t.took.size(), bytes / t.mean(), bytes / at(0.5), median(t.copies) / at(0.5),
      at(0.99) / 1e6, at(1) / 1e6, t.lost, t.retransmitted, t.timeouts,
      t.good() ? "all whole"
               : fmt::format("{} served, {} failed, {} wrong", t.served, t.failed, t.wrong));
  std::fflush(stdout);
}

int measure(const Options& o) {
  const auto bytes = static_cast<double>(o.mebibytes << 20);
  Ends ends(o);
  bool good = true;
  for (int i = 0; i < 4; ++i) (void)(ends.call(kTake, 4, 0), ends.call(kGive, 4, 0));
  print_head(o);
  for (const double drop : o.drop) {
    for (const auto& [method, name] : {std::pair{kTake, "requests"}, std::pair{kGive, "replies"}}) {
      Tally tally = ends.call(method, o.calls, drop);
      print(drop, name, tally, bytes);
      good = good && tally.good();
    }
  }
  return good ? 0 : 1;
}

}  // namespace
}  // namespace spinwire::bench

int main(int argc, char** argv) {
  spinwire::bench::Options options;
  CLI::App app(
      "Measures remote calls with long requests or replies while packets are lost, on softverbs");
  app.footer(
      "GB/s: all calls together. median: the median call, compared with memcpy. Both exclude the\n"
      "time to check the bytes. retrans: retransmitted packets, which are the lost ones and those\n"
      "that followed. timeouts: losses detected only by the ACK timeout. The exit code is 1 if a\n"
      "call was lost or a byte was wrong.");
  app.add_option("--drop", options.drop, "probabilities of losing a packet")
      ->check(CLI::Range(0.0, 1.0))
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--size", options.mebibytes, "size of a request or reply in MiB")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  app.add_option("--calls", options.calls, "calls of each kind, for each probability")
      ->check(CLI::Range(1, 10000000))
      ->capture_default_str();
  app.add_option("--gbit", options.gbit, "speed of each end's link in Gbit/s; 0: no limit")
      ->check(CLI::Range(0.0, 10000.0))
      ->capture_default_str();
  app.add_option("--ack-timeout", options.ack_timeout, "ACK timeout: 4.096 us * 2^N")
      ->check(CLI::Range(1, 31))
      ->capture_default_str();
  app.add_option("--seed", options.seed, "seed that decides which packets are lost")
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return spinwire::bench::measure(options);
}
