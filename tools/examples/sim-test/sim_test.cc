// How to test your own protocol in a simulation. The protocol is a small store that keeps numbers
// on two nodes; the test checks its promises while the network and the nodes fail.
//
//   sim-test             runs a hundred seeds
//   sim-test SEED        runs one of them again: the same run, event by event
//
// The store: a client sends `add` with an amount and a name of the request to the first node. That
// node passes it on to the second and replies once the second has it. A client without a reply asks
// again under the same name, so an amount may arrive twice but must count once. A confirmed amount
// must be on the second node when the first dies. Note that the protocol is ordinary code with
// callbacks and sessions; the test has only the simulation's step() in place of a loop of polls.
//
// CMake builds it, and so does this command:
//
//   g++ -std=c++20 -O2 *.cc -o sim-test $(pkg-config --cflags --libs spinwire-sim fmt)
#include <fmt/core.h>

#include <array>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "spinwire/spinwire.h"

namespace {

using namespace spinwire;              // NOLINT: a program of one file
using namespace std::chrono_literals;  // NOLINT

// ---- the protocol -----------------------------------------------------------------------------

constexpr Method kAdd = 1;
constexpr NodeId kFirst = 0, kSecond = 1, kClient = 2;

struct Add {
  std::uint64_t name;  // of the request; a repeated request has the same name
  std::uint64_t amount;
};

/// The state of a node of the store.
struct Store {
  std::uint64_t sum = 0;
  std::set<std::uint64_t> names;  // of the requests in the sum

  void take(const Add& add) {
    if (names.insert(add.name).second) sum += add.amount;
  }
};

std::span<const std::byte> bytes_of(const Add& add) { return std::as_bytes(std::span(&add, 1)); }

Add read(const Request& request) {
  Add add{};
  if (request.bytes().size() == sizeof add) std::memcpy(&add, request.bytes().data(), sizeof add);
  return add;
}

// ---- the test ---------------------------------------------------------------------------------

/// One run. It owns the nodes' state, such as Store, because the test decides what a killed process
/// loses.
class Run {
 public:
  explicit Run(std::uint64_t seed) : sim_(Simulation::create(seed).value()) {}

  /// Returns the first fault; empty if there is none.
  std::string run() {
    for (NodeId node : {kFirst, kSecond, kClient}) {
      Config config = Simulation::config();
      config.connections.keepalive_interval = 10ms;
      config.connections.peer_timeout = 50ms;
      if (auto added = sim_.add(config); !added) return added.error().message();
      if (node != kClient) start(node);
    }
    if (std::string wrong = set_trouble(); !wrong.empty()) return wrong;
    ask();
    const bool ended = sim_.run_until([this] { return confirmed_ == kRequests; }, 60s);
    if (!ended) return fmt::format("only {} of {} requests are confirmed", confirmed_, kRequests);
    if (stores_[kSecond].sum != asked_)
      return fmt::format("the requests add up to {}, the second node has {}", asked_,
                         stores_[kSecond].sum);
    const auto clean = sim_.audit();  // checks that engines hold nothing they should have freed
    return clean ? std::string() : clean.error().message();
  }
  [[nodiscard]] std::uint64_t trace() const { return sim_.trace_hash(); }

 private:
  static constexpr std::uint64_t kRequests = 30;

  /// A faulty network, and two deaths of the first node at random times.
  std::string set_trouble() {
    NetworkFaults faults;
    faults.drop = 0.1;
    faults.duplicate = 0.1;
    faults.reorder = 0.2;
    faults.datagram_delay_max = 200us;
    faults.control_delay_max = 1ms;
    if (auto set = sim_.set_faults(faults); !set) return set.error().message();
    for (int i = 0; i < 2; ++i) {
      sim_.at(Nanoseconds(sim_.random(30'000'000)), [this] {
        if (!sim_.kill(kFirst)) return;  // it is dead already
        stores_[kFirst] = {};
        sim_.at(sim_.now() + 5ms, [this] {
          if (sim_.restart(kFirst)) start(kFirst);
        });
      });
    }
    return {};
  }

  /// The start of a store process.
  void start(NodeId node) {
    Engine& engine = sim_.engine(node);
    const auto served = engine.serve(kAdd, [this, node](Request& r) {
      if (node == kSecond) {
        stores_[kSecond].take(read(r));
        // If reply() fails, the library refuses the call and the client asks again.
        (void)r.reply(std::span<const std::byte>());
      } else {
        pass_on(r);
      }
    });
    if (!served) throw std::runtime_error(served.error().message());
    listeners_[node] = engine.listen(Simulation::address(node), {}).value();
    if (node == kFirst) to_second_ = engine.open_session(Simulation::address(kSecond), {}).value();
  }

  /// The first node confirms when the second has the amount.
  void pass_on(Request& request) {
    const Add add = read(request);
    const PendingCall client = request.defer();
    // The client may have given up the call. Then reply() returns not_connected and nothing is left
    // to do.
    const ReplyCallback done = [client](Reply& r) {
      if (r.status() == Status::ok) {
        (void)client.reply(std::span<const std::byte>());
      } else {
        (void)client.refuse(to_string(r.status()));
      }
    };
    stores_[kFirst].take(add);
    if (to_second_.call(kAdd, bytes_of(add), done, {.timeout = 20ms}) != Status::ok)
      (void)client.refuse("the second node cannot be reached");
  }

  /// The client sends one request after another, and repeats each until it is confirmed.
  void ask() {
    if (confirmed_ == kRequests) return;
    if (!to_first_ || to_first_->state() == SessionState::closed)
      to_first_ = sim_.engine(kClient).open_session(Simulation::address(kFirst), {}).value();
    if (!next_) {
      next_ = Add{confirmed_ + 1, 1 + sim_.random(100)};
      asked_ += next_->amount;
    }
    const ReplyCallback done = [this](Reply& r) {
      if (r.status() == Status::ok) {
        ++confirmed_;
        next_.reset();
      }
      soon();
    };
    if (to_first_->call(kAdd, bytes_of(*next_), done, {.timeout = 30ms}) != Status::ok) soon();
  }
  void soon() {
    sim_.at(sim_.now() + 1ms, [this] { ask(); });
  }

  std::array<Store, 2> stores_;
  std::array<Listener, 2> listeners_;
  std::uint64_t asked_ = 0;
  std::uint64_t confirmed_ = 0;
  std::optional<Add> next_;
  Session to_second_;
  std::optional<Session> to_first_;
  Simulation sim_;
};

bool read_seed(std::string_view text, std::uint64_t& seed) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
  return error == std::errc() && end == text.data() + text.size();
}

}  // namespace

int main(int argc, char** argv) {
  std::uint64_t first = 1;
  if (argc > 2 || (argc == 2 && !read_seed(argv[1], first))) {
    fmt::print(stderr, "sim-test [SEED]: SEED is a number from 0 to {}\n", ~std::uint64_t{0});
    return 2;
  }
  const int runs = argc == 2 ? 1 : 100;
  for (int i = 0; i < runs; ++i) {
    const std::uint64_t seed = first + static_cast<std::uint64_t>(i);
    Run run(seed);
    if (const std::string wrong = run.run(); !wrong.empty()) {
      fmt::print(stderr, "seed {}: {}\nagain: sim-test {}\n", seed, wrong, seed);
      return 1;
    }
    if (runs == 1) fmt::print("seed {}: trace {:016x}\n", seed, run.trace());
  }
  fmt::print("{} run{}, and nothing wrong\n", runs, runs == 1 ? "" : "s");
  return 0;
}
