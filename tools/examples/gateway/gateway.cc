// A trading gateway with a hot standby.
//
//   gateway demo                          all of the following; the first gateway dies half-way
//   gateway exchange ADDRESS              fills orders
//   gateway serve ADDRESS EXCHANGE        checks orders, and passes them on to the exchange
//   gateway trade GATEWAY GATEWAY         places orders
//
//             inside: this host           outside: another network, with a key
//   trader  ── order: a call ──►  gateway  ── order: a call ──►  exchange
//                                 both     ◄── positions: messages ──
//
// A gateway has two engines, which one loop drives: inside for traders, and outside for the
// exchange. Each gateway knows the positions of all accounts, whichever gateway an order took, so
// the second one can stand in for the first at any time. A trader whose gateway is lost goes on to
// the other one. Whether the order under way was filled is not known then; the trader repeats it
// under its number, and the exchange fills a number once. An order that a gateway refused because
// it ends was not passed on; the library places it at the next gateway.
//
// A gateway checks order n of an account against the position after order n - 1, and refuses it
// while it does not know that one. It passes on a repetition unchecked: that has counted already.
//
// A gateway that cannot take an order now refuses it with kElsewhere and closes the trader's
// session, which goes on to the other gateway, or comes back after the time that the goodbye names.
// Any other refusal ends the trader. A gateway that the exchange refuses for good ends, too.
//
// Note what is not here: a loop that connects again (Reconnect), a queue of orders or positions
// that wait for room (on_writable) or for a gateway (WhenNotReady), a sleep (Idler, timers).
//
// CMake builds it, and so does this command. A copy of this folder of a clone needs `cp -rL`.
//
//   g++ -std=c++20 -O2 *.cc -o gateway $(pkg-config --cflags --libs spinwire fmt CLI11)
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "program.h"

namespace {

using namespace spinwire;  // NOLINT: a program of one file
using namespace std::chrono_literals;
using program::bytes_of;
using program::decode;
using program::fail;
using program::Failure;
using program::must;

struct Options {
  std::vector<std::string> addresses;  // ours, then the peer's; of a trader, the gateways'
  std::string key_file;
  IdleStrategy idle = IdleStrategy::wait;
  std::int64_t limit = 1'000'000;  // of a position
  std::uint64_t count = 2000;      // orders
};

constexpr Method kOrder = 1;
struct Order {
  std::uint64_t account;
  std::uint64_t number;  // 1, 2, 3, … of the account
  std::int64_t quantity;
};
struct Fill {
  std::uint64_t number;
  std::int64_t quantity;  // 0: the gateway's limit forbids the order
  std::int64_t position;  // of the account, with this order
};
/// A gateway gets the positions of all accounts when it connects, and one after each fill.
struct Position {
  std::uint64_t account;
  std::uint64_t number;  // of its last order
  std::int64_t quantity;
};

/// Codes of a gateway's refusals.
enum Refusal : std::uint32_t { kNoOrder, kElsewhere };

bool decode_order(std::span<const std::byte> bytes, Order& order) {
  return decode(bytes, order) && order.number != 0 && order.quantity != 0;
}

Engine open_engine(const std::string& key_file = {}) {
  Config config = must(Config::load());
  config.engine.control = ControlMode::automatic;
  // A peer that is silent for half a second is lost.
  config.connections.keepalive_interval = 100ms;
  config.connections.peer_timeout = 500ms;
  if (!key_file.empty()) config.security.key_file = key_file;
  return must(Engine::open(config));
}

constexpr Reconnect kForEver{.attempts = ~0u, .first_delay = 5ms, .max_delay = 100ms};

// ---- the exchange -----------------------------------------------------------------------------

class Exchange {
 public:
  explicit Exchange(const Options& o) : engine_(open_engine(o.key_file)) {
    must(engine_.serve(kOrder, [this](Request& r) { on_order(r); }));
    ListenOptions listen;
    listen.handlers.on_ready = [this](Connection gateway) {
      Feed& feed = feeds_.emplace_back(Feed{gateway, {}});
      for (const auto& [account, fill] : fills_) feed.due.insert(account);
      publish(feed);
    };
    listen.handlers.on_closed = [this](Connection c, const Error&) {
      std::erase_if(feeds_, [&](const Feed& feed) { return feed.gateway == c; });
    };
    listen.handlers.on_writable = [this](Connection c) {
      for (Feed& feed : feeds_) {
        if (feed.gateway == c) publish(feed);
      }
    };
    listener_ = must(engine_.listen(o.addresses.at(0), listen));
  }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;
  ~Exchange() { engine_ = Engine(); }  // runs callbacks, so it happens while all members exist

  [[nodiscard]] std::string address() const { return listener_.address(); }
  void run() {
    Idler idler;
    while (!program::stop_requested()) must(idler.idle(engine_, engine_.poll()));
    // Gateways come back to the next exchange at this address.
    must(engine_.drain(1s, {.retry_after = 50ms}));
    while (!engine_.drained()) must(idler.idle(engine_, engine_.poll()));
  }

 private:
  struct Feed {
    Connection gateway;
    std::set<std::uint64_t> due;  // accounts whose position is to be sent
  };

  void on_order(Request& request) {
    Order order{};
    if (!decode_order(request.bytes(), order)) return (void)request.refuse("this is no order");
    const auto known = fills_.find(order.account);
    Fill last = known != fills_.end() ? known->second : Fill{};
    if (order.number == last.number + 1) {
      last.number = order.number;
      last.quantity = order.quantity;
      if (__builtin_add_overflow(last.position, order.quantity, &last.position))
        return (void)request.refuse("no position is so large");
      fills_[order.account] = last;
      for (Feed& feed : feeds_) {
        feed.due.insert(order.account);
        publish(feed);
      }
    } else if (order.number != last.number) {
      return (void)request.refuse("the number is out of order");
    }
    (void)request.reply(bytes_of(last));
  }

  /// Sends what is due. They are positions, not changes: without room now, on_writable sends the
  /// positions of that time.
  void publish(Feed& feed) {
    while (!feed.due.empty()) {
      const std::uint64_t account = *feed.due.begin();
      const Fill& last = fills_[account];
      const Position position{account, last.number, last.position};
      if (feed.gateway.send_copy(bytes_of(position)) != Status::ok) return;
      feed.due.erase(account);
    }
  }

  std::map<std::uint64_t, Fill> fills_;  // the last of each account
  std::vector<Feed> feeds_;
  Engine engine_;
  Listener listener_;
};

// ---- a gateway --------------------------------------------------------------------------------

class Gateway {
 public:
  explicit Gateway(const Options& o)
      : options_(o), outside_(open_engine(o.key_file)), inside_(open_engine()) {
    ConnectOptions connect;
    connect.reconnect = kForEver;
    connect.handlers.on_message = [this](Connection, Message& m) {
      Position position{};
      if (decode(m.bytes(), position)) set_position(position);
    };
    // Another exchange may follow.
    connect.handlers.on_interrupted = [this](Connection, const Error&) { positions_.clear(); };
    connect.handlers.on_closed = [this](Connection, const Error& e) { on_refused(e); };
    (void)must(outside_.connect(o.addresses.at(1), connect));
    SessionOptions session;
    session.reconnect = kForEver;
    // For an exchange that is away, an order waits no longer than its time: its price would be old.
    session.when_not_ready = WhenNotReady::wait;
    session.on_closed = [this](Session, const Error& e) { on_refused(e); };
    exchange_ = must(outside_.open_session(o.addresses.at(1), session));

    must(inside_.serve(kOrder, [this](Request& r) { on_order(r); }));
    listener_ = must(inside_.listen(o.addresses.at(0), {}));
    must(inside_.every(100ms, [this] { orders_left_ = kMostOrders; }));
  }
  Gateway(const Gateway&) = delete;
  Gateway& operator=(const Gateway&) = delete;
  ~Gateway() {
    inside_ = Engine();
    outside_ = Engine();
  }

  [[nodiscard]] std::string address() const { return listener_.address(); }
  void run() {
    Engine* const engines[] = {&inside_, &outside_};
    Idler idler(options_.idle);
    while (fault_.empty() && !program::stop_requested()) must(idler.turn(engines));
    // Orders under way are answered. Traders go on to the other gateway.
    must(inside_.drain(1s));
    while (!inside_.drained()) must(idler.turn(engines));
    if (!fault_.empty()) throw Failure(fault_);
  }

 private:
  static constexpr std::uint32_t kMostOrders = 10'000;  // in 100 ms

  /// What reconnects has ended for a reason that does not pass.
  void on_refused(const Error& why) {
    fault_ = fmt::format("no way to the exchange: {}", why.message());
  }

  /// The trader's session goes on to the other gateway.
  static void send_elsewhere(const PendingCall& trader, std::string_view why) {
    (void)trader.session().close({GoodbyeReason::overloaded, 20ms});
    (void)trader.refuse(kElsewhere, why);
  }

  void on_order(Request& request) {
    Order order{};
    if (!decode_order(request.bytes(), order))
      return (void)request.refuse(kNoOrder, "this is no order");
    if (orders_left_ == 0) return send_elsewhere(request.defer(), "too many orders");
    --orders_left_;
    const auto known = positions_.find(order.account);
    const Position last = known != positions_.end() ? known->second : Position{};
    if (order.number > last.number + 1)
      return send_elsewhere(request.defer(), "the position is not known");
    if (order.number > last.number && !is_allowed(last.quantity, order.quantity))
      return (void)request.reply(bytes_of(Fill{order.number, 0, last.quantity}));
    const PendingCall trader = request.defer();
    // The trader may have given up; then reply() and refuse() do nothing.
    const auto done = [this, trader, account = order.account](Reply& reply) {
      if (reply.status() == Status::refused) return (void)trader.refuse(kNoOrder, reply.text());
      if (reply.status() != Status::ok) return send_elsewhere(trader, to_string(reply.status()));
      Fill fill{};
      // The fill may come before its position.
      if (decode(reply.bytes(), fill)) set_position({account, fill.number, fill.position});
      (void)trader.reply(reply.bytes());
    };
    const Status status = exchange_.call(kOrder, bytes_of(order), done, {.timeout = 100ms});
    if (status != Status::ok) send_elsewhere(trader, to_string(status));
  }

  [[nodiscard]] bool is_allowed(std::int64_t position, std::int64_t quantity) const {
    std::int64_t sum = 0;
    return !__builtin_add_overflow(position, quantity, &sum) && sum <= options_.limit &&
           sum >= -options_.limit;
  }

  void set_position(const Position& position) {
    Position& last = positions_[position.account];
    if (position.number > last.number) last = position;
  }

  Options options_;
  std::string fault_;
  std::uint32_t orders_left_ = kMostOrders;
  std::map<std::uint64_t, Position> positions_;
  Engine outside_;
  Session exchange_;
  Engine inside_;
  Listener listener_;
};

// ---- a trader ---------------------------------------------------------------------------------

class Trader {
 public:
  explicit Trader(const Options& o) : options_(o), engine_(open_engine()) {
    SessionOptions session;
    session.alternatives = {o.addresses.begin() + 1, o.addresses.end()};
    session.reconnect = kForEver;
    session.timeout = 500ms;
    session.when_not_ready = WhenNotReady::wait;
    session.on_ready = [](Session s) {
      fmt::print("trading through {}\n", s.peer());
      std::fflush(stdout);
    };
    session.on_interrupted = [this](Session, const Error& why) {
      losses_ += why.goodbye.reason == GoodbyeReason::none ? 1 : 0;
    };
    session.on_closed = [this](Session, const Error& why) {
      fault_ = fmt::format("no way to a gateway: {}", why.message());
    };
    gateway_ = must(engine_.open_session(o.addresses.at(0), session));
    must(engine_.every(500us, [this] { on_tick(); }));
    last_fill_ = engine_.clock().now();
  }
  Trader(const Trader&) = delete;
  Trader& operator=(const Trader&) = delete;
  ~Trader() { engine_ = Engine(); }

  /// Runs until so many orders are filled.
  void run(std::uint64_t count) {
    Idler idler;
    while (filled_ < count && fault_.empty() && !program::stop_requested())
      must(idler.idle(engine_, engine_.poll()));
    if (!fault_.empty()) throw Failure(fault_);
    if (filled_ < count) throw Failure("interrupted");
  }
  [[nodiscard]] std::string gateway() const { return gateway_.peer(); }
  void report() const {
    fmt::print("{} orders in {} calls, each filled once; {} gateways lost, longest gap {} ms\n",
               filled_, calls_, losses_, longest_gap_ / 1ms);
  }

 private:
  /// Begins the next order once the last one is filled.
  void on_tick() {
    if (placed_ != filled_ || filled_ == options_.count) return;
    ++placed_;
    place();
  }

  /// Places the order, also again if it may not have been filled. The call waits for a gateway. It
  /// is the only one, so there is room for it.
  void place() {
    const Order order{kAccount, placed_, 1};
    const auto done = [this](Reply& reply) { on_fill(reply); };
    const Status status = gateway_.call(kOrder, bytes_of(order), done, {.timeout = 300ms});
    if (status != Status::ok) fault_ = fmt::format("order {}: {}", placed_, to_string(status));
    ++calls_;
  }

  void on_fill(const Reply& reply) {
    Fill fill{};
    const bool is_refused = reply.status() == Status::refused && reply.code() != kElsewhere;
    if (is_refused || (reply.status() != Status::ok && !is_retryable(reply.status()))) {
      fault_ = fmt::format("order {}: {}: {}", placed_, to_string(reply.status()), reply.text());
      return;
    }
    if (reply.status() != Status::ok) return place();
    if (!decode(reply.bytes(), fill) || fill.number != filled_ + 1)
      fault_ = "a fill of another order";
    else if (fill.quantity == 0)
      fault_ = fmt::format("order {} exceeds the gateway's limit", fill.number);
    else if (fill.position != static_cast<std::int64_t>(fill.number))
      fault_ = fmt::format("after {} orders, the position is {}", fill.number, fill.position);
    ++filled_;
    const std::uint64_t now = engine_.clock().now();
    longest_gap_ = std::max(longest_gap_, engine_.clock().duration(now - last_fill_));
    last_fill_ = now;
  }

  static constexpr std::uint64_t kAccount = 7;

  Options options_;
  std::string fault_;
  std::uint64_t placed_ = 0;
  std::uint64_t filled_ = 0;
  std::uint64_t calls_ = 0;
  std::uint64_t losses_ = 0;
  std::uint64_t last_fill_ = 0;
  Nanoseconds longest_gap_{0};
  Engine engine_;
  Session gateway_;
};

// ---- the programs -----------------------------------------------------------------------------

/// No exception may leave a child process.
template <typename Work>
int guarded(const Work& work) {
  try {
    work();
    return program::kDone;
  } catch (const Failure& failure) {
    return fail(failure.what());
  }
}

template <typename Server>
int serve(const Options& o, int announce) {
  return guarded([&] {
    const auto server = std::make_unique<Server>(o);
    program::announce_address(announce, server->address());
    server->run();
  });
}

void trade(const Options& o) {
  const auto trader = std::make_unique<Trader>(o);
  trader->run(o.count);
  trader->report();
}

void demo(Options o) {
  o.addresses = {"127.0.0.1:0"};
  // All fork before this process opens an engine.
  const program::ServerChild exchange([&o](int to) { return serve<Exchange>(o, to); });
  o.addresses.push_back(exchange.address());
  const auto gateway = [&o](int to) { return serve<Gateway>(o, to); };
  std::optional<program::ServerChild> gateways[2];
  for (auto& one : gateways) one.emplace(gateway);
  o.addresses = {gateways[0]->address(), gateways[1]->address()};
  const auto trader = std::make_unique<Trader>(o);
  trader->run(o.count / 2);
  gateways[trader->gateway() == o.addresses[0] ? 0 : 1].reset();  // killed
  trader->run(o.count);
  trader->report();
}

}  // namespace

int main(int argc, char** argv) {
  program::name = "gateway";
  program::log_to_stderr(LogLevel::error);
  program::catch_stop_signals();

  CLI::App app("A trading gateway with a hot standby.", "gateway");
  app.require_subcommand(1);
  Options o;
  CLI::App* demo_ = app.add_subcommand("demo", "run an exchange, two gateways and a trader");
  CLI::App* exchange = app.add_subcommand("exchange", "fill orders, until interrupted");
  CLI::App* gateway = app.add_subcommand("serve", "pass orders on, until interrupted");
  CLI::App* trader = app.add_subcommand("trade", "place orders");
  exchange->add_option("address", o.addresses, "a.b.c.d:port")->expected(1)->required();
  gateway->add_option("addresses", o.addresses, "our address and the exchange's")
      ->expected(2)
      ->required();
  trader->add_option("gateways", o.addresses, "addresses of the gateways")
      ->expected(1, 8)
      ->required();
  for (CLI::App* one : {demo_, exchange, gateway})
    one->add_option("--key-file", o.key_file, "keys of the exchange and its gateways");
  for (CLI::App* one : {demo_, gateway}) {
    one->add_option("--limit", o.limit, "of a position")
        ->check(CLI::Range(std::int64_t{0}, std::numeric_limits<std::int64_t>::max()))
        ->capture_default_str();
    one->add_option("--idle", o.idle, "what a gateway does without work: spin, pause, yield, wait")
        ->transform(CLI::CheckedTransformer(
            std::map<std::string, IdleStrategy>{{"spin", IdleStrategy::spin},
                                                {"pause", IdleStrategy::pause},
                                                {"yield", IdleStrategy::yield},
                                                {"wait", IdleStrategy::wait}}));
  }
  for (CLI::App* one : {demo_, trader})
    one->add_option("-n,--count", o.count, "orders")
        ->check(CLI::Range(program::kOne, program::kMostCount))
        ->capture_default_str();
  int code = 0;
  if (!program::parse_arguments(app, argc, argv, code)) return code;
  if (*exchange) return serve<Exchange>(o, -1);
  if (*gateway) return serve<Gateway>(o, -1);
  return guarded([&] { *trader ? trade(o) : demo(o); });
}
