// A trading loop: an exchange publishes ticks, a strategy responds with orders.
//
//   market-feed                        runs both in two processes
//   market-feed exchange [ADDRESS]     publishes to one strategy, then ends
//   market-feed strategy [ADDRESS]     trades at an exchange
//
//   exchange                                  strategy
//                                          ←  connects, opens a session, calls kSubscribe
//   tick: a message of 40 bytes            →  examines it inside poll()
//                                          ←  kOrder: a remote call from the same callback
//   fill: the call's reply                 →
//
// Two figures are measured. Tick to order: from handing a tick to the library until the exchange
// has the order. Both times come from the exchange's clock, so the figure also holds between hosts;
// the fill carries it. Order round trip: from the call until the fill, by the strategy's clock.
//
// Note that neither loop sleeps, allocates, or calls the system. Each end runs on its own processor
// (--cpu). Ticks come at fixed times (--interval), whether or not the strategy has responded to the
// last.
//
// CMake builds it, and so does this command. A copy of this folder of a clone needs `cp -rL`.
//
//   g++ -std=c++20 -O2 *.cc -o market-feed $(pkg-config --cflags --libs spinwire fmt CLI11)
#include <fmt/core.h>
#include <sched.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "histogram.h"
#include "program.h"

namespace {

using namespace spinwire;  // NOLINT: a program of one file
using program::bytes_of;
using program::decode;
using program::fail;
using program::Failure;
using program::must;
using namespace std::chrono_literals;

constexpr int kMostCpu = CPU_SETSIZE - 1;

struct Options {
  std::string address = program::kDefaultAddress;
  std::uint64_t count = 200'000;  // ticks
  std::uint64_t interval = 5000;  // ns between two ticks
  std::uint32_t every = 1;        // the strategy places an order every so many ticks
  std::vector<int> cpus;          // exchange and strategy, or the one that runs; empty: any
};

// ---- what goes over the wire ------------------------------------------------------------------

struct Tick {
  std::uint64_t number;
  std::uint64_t published;  // ticks of the exchange's clock; the order carries it back
  std::uint32_t instrument;
  std::uint32_t bid;  // cents
  std::uint32_t ask;
  std::uint32_t unused;
  std::uint64_t volume;
};
static_assert(sizeof(Tick) == 40);

constexpr Method kSubscribe = 1;
constexpr Method kOrder = 2;

struct Subscription {
  std::uint64_t count;
  std::uint64_t interval;  // ns
};
struct Order {
  std::uint64_t number;  // of the tick
  std::uint64_t published;
  std::uint32_t instrument;
  std::uint32_t price;
  std::uint32_t quantity;
  std::uint32_t unused;
};
struct Fill {
  std::uint64_t number;
  std::uint64_t tick_to_order;  // ns
  std::uint32_t price;
  std::uint32_t quantity;
};
static_assert(sizeof(Order) <= kSlotPayloadBytes &&
              sizeof(Fill) <= kSlotPayloadBytes);  // one cacheline each

/// Keeps the calling thread on one processor.
void pin_to_cpu(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<unsigned>(cpu), &set);
  if (::sched_setaffinity(0, sizeof set, &set) != 0)
    throw Failure(fmt::format("cannot run on CPU {}: give one that `taskset -cp $$` lists", cpu));
}

/// The processors that this process may run on.
std::vector<int> allowed_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  ::sched_getaffinity(0, sizeof set, &set);
  std::vector<int> cpus;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(static_cast<unsigned>(i), &set)) cpus.push_back(i);
  }
  return cpus;
}

/// Acts only after thousands of turns without an event, when nothing but a peer's absence is
/// measured. Then it yields the processor, which the peer may need. An Idler would cost too much
/// here. Hot.
class IdleCare {
 public:
  void turn(int events) noexcept {
    if (events != 0) {
      idle_ = 0;
    } else if ((++idle_ & 0xfff) == 0) [[unlikely]] {
      std::this_thread::yield();
    }
  }

 private:
  std::uint32_t idle_ = 0;
};

Engine open_engine(const Options& o, std::size_t end) {
  // A single end has one CPU in the list.
  if (!o.cpus.empty()) pin_to_cpu(o.cpus[std::min(end, o.cpus.size() - 1)]);
  Config config = must(Config::load());
  config.engine.control = ControlMode::automatic;
  return must(Engine::open(config));
}

// ---- the exchange -----------------------------------------------------------------------------

class Exchange {
 public:
  explicit Exchange(const Options& o) : engine_(open_engine(o, 0)), clock_(engine_.clock()) {
    must(engine_.serve(kSubscribe, [this](Request& r) { on_subscribe(r); }));
    must(engine_.serve(kOrder, [this](Request& r) { on_order(r); }));
    ListenOptions options;
    options.on_accept = [this](Connection c) {
      if (accepted_) return static_cast<void>(c.close());  // one strategy
      accepted_ = true;
      strategy_ = c;
    };
    options.handlers.on_closed = [this](Connection c, const Error& e) {
      if (c != strategy_) return;
      gone_ = true;
      if (e.status != Status::ok) why_ = e.message();
    };
    listener_ = must(engine_.listen(o.address, options));
  }
  ~Exchange() { engine_ = Engine(); }  // runs callbacks, so it happens while all members exist
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  [[nodiscard]] std::string address() const { return listener_.address(); }

  /// Runs until the strategy has gone.
  int run() {
    IdleCare idle;
    while (!gone_) {
      const int events = engine_.poll();
      if (published_ != feed_.count) publish();
      idle.turn(events);
      if (program::stop_requested()) return fail("interrupted");
    }
    if (!why_.empty()) return fail(why_);
    if (published_ == feed_.count && wrong_ == 0) return program::kDone;
    return fail(
        fmt::format("the strategy left after {} of {} ticks; {} of its {} orders were invalid",
                    published_, feed_.count, wrong_, orders_));
  }

 private:
  /// Publishes a tick that is due. Hot.
  void publish() {
    const std::uint64_t now = clock_.now();
    if (now < due_) return;
    const auto cents = static_cast<std::uint32_t>(10'000 + published_ % 97);
    const Tick tick{published_, now, static_cast<std::uint32_t>(published_ % 16), cents, cents + 1,
                    0,          100};
    // Copies into registered memory and sends at once. A slow strategy runs out of credit: then the
    // tick comes late rather than never.
    if (strategy_.send_copy(bytes_of(tick), {}, Post::now) != Status::ok) return;
    ++published_;
    due_ += step_;
  }

  void on_subscribe(Request& request) {
    Subscription wanted{};
    if (!decode(request.bytes(), wanted) || wanted.count == 0 || feed_.count != 0 || !accepted_)
      return static_cast<void>(request.refuse("that is not a subscription"));
    feed_ = wanted;
    step_ = clock_.ticks(Nanoseconds(wanted.interval));
    due_ = clock_.now() + step_;
    // If reply() fails, the library refuses the call and the strategy gives up.
    (void)request.reply(std::span<const std::byte>());
  }

  /// Fills every order at once; this example has no order book. Hot.
  void on_order(Request& request) {
    const std::uint64_t now = clock_.now();
    Order order{};
    if (!decode(request.bytes(), order) || order.number >= published_ || order.published > now) {
      ++wrong_;
      return static_cast<void>(request.refuse("that is not an order"));
    }
    ++orders_;
    const auto took = static_cast<std::uint64_t>(clock_.duration(now - order.published).count());
    (void)request.reply(bytes_of(Fill{order.number, took, order.price, order.quantity}));
  }

  // Declared before the engine, whose destructor still runs callbacks.
  bool accepted_ = false;
  bool gone_ = false;
  std::string why_;
  Subscription feed_{};
  std::uint64_t step_ = 0;  // ticks of the clock
  std::uint64_t due_ = 0;
  std::uint64_t published_ = 0;
  std::uint64_t orders_ = 0;
  std::uint64_t wrong_ = 0;
  Engine engine_;
  Clock clock_;
  Connection strategy_;
  Listener listener_;
};

int exchange(const Options& o, int announce) {
  const auto end = std::make_unique<Exchange>(o);
  program::announce_address(announce, end->address());
  return end->run();
}

// ---- the strategy -----------------------------------------------------------------------------

class Strategy {
 public:
  explicit Strategy(const Options& o) : options_(o), engine_(open_engine(o, 1)) {
    clock_ = engine_.clock();
    ConnectOptions connect;
    connect.handlers.on_message = [this](Connection, Message& m) { on_tick(m); };
    connect.handlers.on_closed = [this](Connection, const Error& e) { on_closed(e); };
    feed_ = must(engine_.connect(o.address, connect));
    SessionOptions open;
    open.window = 64;
    open.on_closed = [this](Session, const Error& e) { on_closed(e); };
    session_ = must(engine_.open_session(o.address, open));
  }
  ~Strategy() { engine_ = Engine(); }  // runs callbacks, so it happens while all members exist
  Strategy(const Strategy&) = delete;
  Strategy& operator=(const Strategy&) = delete;

  int run() {
    until([this] { return feed_.ready() && session_.ready(); });
    const Subscription wanted{options_.count, options_.interval};
    const auto done = [this](Reply& r) {
      if (r.status() != Status::ok) give_up(fmt::format("no feed: {}", r.text()));
    };
    const Status status = session_.call(kSubscribe, bytes_of(wanted), done);
    if (status != Status::ok) throw Failure(fmt::format("subscribe: {}", to_string(status)));
    const std::uint64_t begin = clock_.now();
    until([this] { return ticks_ == options_.count && fills_ == orders_; });
    report(std::chrono::duration<double>(clock_.duration(clock_.now() - begin)).count());
    closing_ = true;
    // Either may be closed already; then there is nothing to do.
    (void)session_.close();
    until([this] { return engine_.rpc_stats().sessions == 0; });
    (void)feed_.close();
    until([this] { return engine_.stats().connections == 0; });
    return program::kDone;
  }

 private:
  /// The whole trading system: a tick arrives, an order leaves from inside the callback. Post::now
  /// sends it at once rather than at the end of the poll. Hot.
  void on_tick(const Message& message) {
    Tick tick{};
    if (!decode(message.bytes(), tick) || tick.number != ticks_) [[unlikely]]
      return give_up(fmt::format("a tick is missing or invalid after number {}", ticks_));
    ++ticks_;
    if (tick.number % options_.every != 0) return;
    const Order order{tick.number, tick.published, tick.instrument, tick.ask, 1, 0};
    const auto done = [this, number = tick.number, price = tick.ask, at = clock_.now()](Reply& r) {
      on_fill(r, number, price, at);
    };
    CallOptions options;
    options.post = Post::now;
    const Status status = session_.call(kOrder, bytes_of(order), done, options);
    if (status == Status::would_block) [[unlikely]] {
      ++missed_;  // too many orders in flight: this chance is lost
    } else if (status != Status::ok) [[unlikely]] {
      give_up(fmt::format("order {}: {}", tick.number, to_string(status)));
    } else {
      ++orders_;
    }
  }

  void on_fill(const Reply& reply, std::uint64_t number, std::uint32_t price, std::uint64_t at) {
    const std::uint64_t now = clock_.now();
    Fill fill{};
    if (reply.status() != Status::ok || !decode(reply.bytes(), fill) || fill.number != number ||
        fill.price != price) [[unlikely]] {
      return give_up(fmt::format("order {} was not filled: {}", number, to_string(reply.status())));
    }
    ++fills_;
    tick_to_order_.record(fill.tick_to_order);
    round_trip_.record(static_cast<std::uint64_t>(clock_.duration(now - at).count()));
  }

  void report(double seconds) const {
    fmt::print("{} ticks in {:.3f} s, {} orders, all filled{}\n", ticks_, seconds, orders_,
               missed_ == 0 ? "" : fmt::format("; {} more could not be placed", missed_));
    fmt::print("  {:<18} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}\n", "ns", "min", "p50", "p90", "p99",
               "p99.9", "max");
    for (const auto& [what, h] : {std::pair{"tick to order", &tick_to_order_},
                                  std::pair{"order round trip", &round_trip_}}) {
      fmt::print("  {:<18} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}\n", what, h->min(),
                 h->percentile(50), h->percentile(90), h->percentile(99), h->percentile(99.9),
                 h->max());
    }
  }

  /// Polls until `done()`, or until nothing has happened for too long.
  template <typename Done>
  void until(Done&& done) {
    IdleCare idle;
    std::uint64_t seen = 0;
    std::uint32_t turns = 0;
    std::optional<program::Deadline> deadline;
    while (!done()) {
      const int events = engine_.poll();
      if (events < 0) throw Failure("poll() was misused");
      if (!fault_.empty()) throw Failure(fault_);
      idle.turn(events);
      if ((++turns & 0xffff) != 0) continue;
      if (program::stop_requested()) throw Failure("interrupted");
      if (!deadline || seen != ticks_ + fills_) deadline.emplace(clock_, 20s);
      seen = ticks_ + fills_;
      if (deadline->passed()) throw Failure("the exchange makes no progress");
    }
  }
  void on_closed(const Error& e) {
    if (!closing_) give_up(e.status == Status::ok ? "the exchange has closed" : e.message());
  }
  void give_up(std::string why) {
    if (fault_.empty()) fault_ = std::move(why);
  }

  const Options& options_;
  std::string fault_;
  bool closing_ = false;
  std::uint64_t ticks_ = 0;
  std::uint64_t orders_ = 0;
  std::uint64_t fills_ = 0;
  std::uint64_t missed_ = 0;
  tools::Histogram tick_to_order_;
  tools::Histogram round_trip_;
  Clock clock_;
  Engine engine_;
  Connection feed_;
  Session session_;
};

int strategy(const Options& o) {
  const auto end = std::make_unique<Strategy>(o);
  return end->run();
}

/// Runs one end in a child process; no exception may leave it.
template <typename Work>
int guarded(const Work& work) {
  try {
    return work();
  } catch (const Failure& failure) {
    return fail(failure.what());
  }
}

int both(Options o) {
  o.address = "127.0.0.1:0";
  if (const std::vector<int> cpus = allowed_cpus(); o.cpus.empty() && cpus.size() > 1)
    o.cpus = {cpus.front(), cpus.back()};
  // Fork before engines are opened: an engine belongs to the process and thread that opened it.
  program::ServerChild child(
      [&o](int announce) { return guarded([&o, announce] { return exchange(o, announce); }); });
  o.address = child.address();
  const int code = strategy(o);
  if (code != program::kDone) return code;
  return child.wait() == 0 ? program::kDone : fail("the exchange failed");
}

// ---- the command line -------------------------------------------------------------------------

}  // namespace

int main(int argc, char** argv) {
  program::name = "market-feed";
  program::log_to_stderr();
  program::catch_stop_signals();

  CLI::App app("Publishes ticks to a strategy that responds with orders, and measures both.",
               "market-feed");
  app.require_subcommand(0, 1);
  Options o;
  CLI::App* alone = app.add_subcommand("exchange", "publish to the first strategy that connects");
  CLI::App* other = app.add_subcommand("strategy", "trade at an exchange");
  for (CLI::App* one : {alone, other})
    one->add_option("address", o.address, "a.b.c.d:port or [v6]:port")->capture_default_str();
  for (CLI::App* one : {&app, other}) {
    one->add_option("-n,--count", o.count, "ticks")
        ->check(CLI::Range(program::kOne, program::kMostCount))
        ->capture_default_str();
    one->add_option("-i,--interval", o.interval, "time between two ticks, e.g. 500ns, 20us, 1ms")
        ->transform(CLI::AsNumberWithUnit(
            std::map<std::string, std::uint64_t>{{"ns", 1}, {"us", 1000}, {"ms", 1'000'000}}))
        ->check(CLI::Range(std::uint64_t{100}, std::uint64_t{1'000'000'000}))
        ->capture_default_str();
    one->add_option("--every", o.every, "place an order every N ticks")
        ->check(CLI::Range(1u, 1'000'000'000u))
        ->capture_default_str();
  }
  for (CLI::App* one : {alone, other})
    one->add_option("--cpu", o.cpus, "processor to run on (any)")
        ->expected(1)
        ->check(CLI::Range(0, kMostCpu));
  app.add_option("--cpu", o.cpus, "processors of exchange and strategy, e.g. 2,3 (any two)")
      ->delimiter(',')
      ->expected(2)
      ->check(CLI::Range(0, kMostCpu));
  int code = 0;
  if (!program::parse_arguments(app, argc, argv, code)) return code;
  return guarded([&] { return *alone ? exchange(o, -1) : *other ? strategy(o) : both(o); });
}
