// A test of one's own protocol in a simulation: a little store that keeps numbers on two nodes, and
// what it has to hold to whatever the network and its nodes do.
//
//   sim-test             a hundred seeds
//   sim-test SEED        one of them again: the same run, event by event
//
// The store: clients send `add` with an amount and a name of their own for the request to the first
// node, which passes it on to the second and answers when that has it. A client that hears nothing
// asks again under the same name, so an amount may come twice, but has to count once; and what was
// confirmed has to be on the second node when the first dies. What to look for when reading: the
// protocol is written as always, with callbacks and sessions; the test has only the simulation's
// step() in place of a loop of polls.
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
  std::uint64_t name;  // of the request: the same when it is asked again
  std::uint64_t amount;
};

/// What a node of the store keeps.
struct Store {
  std::uint64_t sum = 0;
  std::set<std::uint64_t> names;  // of what is in the sum

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

/// One run. Nodes' own state, such as Store, is here: it is the test that says what a killed
/// process has lost.
class Run {
 public:
  explicit Run(std::uint64_t seed) : sim_(Simulation::create(seed).value()) {}

  /// What went wrong; empty if nothing did.
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
    if (!ended) return fmt::format("only {} of {} are confirmed", confirmed_, kRequests);
    if (stores_[kSecond].sum != asked_)
      return fmt::format("{} was asked for, the second node has {}", asked_, stores_[kSecond].sum);
    const auto clean = sim_.audit();  // engines hold what they should and nothing else
    return clean ? std::string() : clean.error().message();
  }
  [[nodiscard]] std::uint64_t trace() const { return sim_.trace_hash(); }

 private:
  static constexpr std::uint64_t kRequests = 30;

  /// A bad network, and two deaths of the first node, somewhere.
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

  /// What a process of the store does first.
  void start(NodeId node) {
    Engine& engine = sim_.engine(node);
    const auto served = engine.serve(kAdd, [this, node](Request& r) {
      if (node == kSecond) {
        stores_[kSecond].take(read(r));
        // A reply that is not accepted makes the library refuse the call: the client asks again.
        (void)r.reply(std::span<const std::byte>());
      } else {
        pass_on(r);
      }
    });
    if (!served) throw std::runtime_error(served.error().message());
    listeners_[node] = engine.listen(Simulation::address(node), {}).value();
    if (node == kFirst) to_second_ = engine.open_session(Simulation::address(kSecond), {}).value();
  }

  /// The first node: confirmed when the second has it.
  void pass_on(Request& request) {
    const Add add = read(request);
    const PendingCall client = request.defer();
    // The client may have given the call up by now. Then the answer is refused with not_connected,
    // and there is nothing left to do.
    const ReplyCallback done = [client](Reply& r) {
      if (r.status() == Status::ok) {
        (void)client.reply(std::span<const std::byte>());
      } else {
        (void)client.refuse(to_string(r.status()));
      }
    };
    stores_[kFirst].take(add);
    if (to_second_.call(kAdd, bytes_of(add), done, {.timeout = 20ms}) != Status::ok)
      (void)client.refuse("the second node is not there");
  }

  /// The client: one request after the other, each until it is confirmed.
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
