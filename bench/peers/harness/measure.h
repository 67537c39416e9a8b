// Measures one peer: two ends on one thread or in two pinned processes, a window of requests, and
// slices of time with a probe of the processors' placement between them.
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#include "common/setup.h"
#include "peers/harness/options.h"
#include "peers/harness/placement.h"
#include "peers/harness/processes.h"
#include "peers/harness/slices.h"

namespace spinwire::bench {

/// What an end is in a measurement.
struct Role {
  bool is_client;
  bool is_server;
  int side;  ///< 0 or 1
};

/// One end of a peer. It is made from Options and a Role, after prepare() has run once before any
/// process was forked.
template <typename T>
concept PeerNode = std::constructible_from<T, const Options&, Role> &&
    requires(T node, const Options& options, const std::string& theirs) {
  T::prepare(options);
  { node.address() } -> std::convertible_to<std::string>;
  node.connect(theirs);
  node.step();   // progress: requests that the window allows, replies, answers
  node.close();  // the last thing that happens; may count what is bad
  { node.done() } -> std::convertible_to<std::uint64_t>;
  { node.bad() } -> std::convertible_to<std::uint64_t>;
};

/// The parts of a PeerNode that most peers have no need for.
struct PeerNodeBase {
  static void prepare(const Options&) {}
  void close() {}
};

/// Has the turns taken for `seconds`, and until an operation has ended; gives up after ten seconds.
template <typename Turn, typename Done>
void warm_up(double seconds, Turn&& turn, Done&& done) {
  constexpr double kLongest = 10e9;
  const double begin = nanoseconds_now();
  for (;;) {
    for (int i = 0; i < 64; ++i) turn();
    const double passed = nanoseconds_now() - begin;
    if (passed > seconds * 1e9 && done() != 0) return;
    if (passed > kLongest) give_up("no operation has ended within ten seconds");
  }
}

struct SliceResult {
  double ns;  ///< per operation; 0 if none has ended
  double took_ns;
};

/// Takes turns for one slice. A slice of slow operations lasts longer, until enough of them have
/// ended, and ends with the end of one.
template <typename Turn, typename Done>
SliceResult run_slice(const Options& options, Turn&& turn, Done&& done) {
  constexpr int kTurnsPerLook = 16;
  constexpr std::uint64_t kEnough = 16;
  constexpr double kLongest = 1e9;
  const std::uint64_t before = done();
  const double begin = nanoseconds_now();
  const double wanted = options.slice_ms * 1e6;
  double took = 0;
  do {
    for (int i = 0; i < kTurnsPerLook; ++i) turn();
    took = nanoseconds_now() - begin;
  } while (took < wanted);
  for (std::uint64_t ended = done(); done() - before < kEnough && took < kLongest;) {
    while (done() == ended && took < kLongest) {
      turn();
      took = nanoseconds_now() - begin;
    }
    ended = done();
  }
  const std::uint64_t count = done() - before;
  return {count == 0 ? 0 : took / static_cast<double>(count), took};
}

inline void print_result(const std::string& line) {
  fmt::print("{}\n", line);
  std::fflush(stdout);
}

template <PeerNode Node>
int measure_one_thread(std::string_view peer, const Options& options) {
  pin_to_cpu(options.client_cpu);
  Node client(options, {.is_client = true, .is_server = false, .side = 0});
  Node server(options, {.is_client = false, .is_server = true, .side = 1});
  const std::string client_address = client.address();
  client.connect(server.address());
  server.connect(client_address);
  const auto turn = [&] {
    client.step();
    server.step();
  };
  const auto done = [&] { return client.done(); };
  warm_up(options.warm_up_seconds, turn, done);

  Slices slices;
  const std::uint64_t before = client.done();
  const double begin = nanoseconds_now();
  const double end = begin + options.seconds * 1e9;
  std::uint64_t preempted = times_preempted();
  while (nanoseconds_now() < end) {
    const SliceResult slice = run_slice(options, turn, done);
    const std::uint64_t preempted_now = times_preempted();
    if (options.verbose) fmt::print(stderr, "{:.1f} ns\n", slice.ns);
    if (slice.ns != 0) {
      slices.add(slice.ns, Placement::one_thread, Placement::one_thread,
                 preempted_now != preempted);
    }
    preempted = preempted_now;
  }
  const double seconds = (nanoseconds_now() - begin) / 1e9;
  const std::uint64_t operations = client.done() - before;
  client.close();
  server.close();
  const std::uint64_t bad = client.bad() + server.bad();
  print_result(slices.to_json(peer, options, seconds, operations, bad));
  return bad == 0 ? 0 : 1;
}

/// The second process: takes turns and answers probes until it is told to stop.
template <PeerNode Node>
int run_second_process(const Options& options, Board& board, int socket) {
  pin_to_cpu(options.server_cpu);
  const bool is_client = options.mode == Mode::symmetric;
  Node node(options, {.is_client = is_client, .is_server = true, .side = 1});
  node.connect(exchange_addresses(socket, node.address()));
  board.ready.value.store(1, std::memory_order_release);
  while (board.stop.value.load(std::memory_order_relaxed) == 0) {
    node.step();
    if (is_client) board.done.value.store(node.done(), std::memory_order_relaxed);
    if (is_probe_asked(board.ping, board.pong)) {
      board.preempted.value.store(times_preempted(), std::memory_order_relaxed);
      answer_probe(board.ping, board.pong);
    }
  }
  // The other end may still wait for replies.
  constexpr double kLastTurns = 50e6;
  for (const double end = nanoseconds_now() + kLastTurns; nanoseconds_now() < end;) node.step();
  node.close();
  return node.bad() == 0 ? 0 : 1;
}

template <PeerNode Node>
int measure_two_processes(std::string_view peer, const Options& options) {
  Board& board = map_shared<Board>();
  SecondProcess second(
      [&](int socket) { return run_second_process<Node>(options, board, socket); });
  pin_to_cpu(options.client_cpu);
  const bool is_server = options.mode == Mode::symmetric;
  Node node(options, {.is_client = true, .is_server = is_server, .side = 0});
  node.connect(exchange_addresses(second.socket(), node.address()));
  const auto turn = [&] { node.step(); };
  const auto done = [&] {
    return node.done() + (is_server ? board.done.value.load(std::memory_order_relaxed) : 0);
  };
  run_until(
      "the second process sets up",
      [&] {
        second.check_alive();
        node.step();
      },
      [&] { return board.ready.value.load(std::memory_order_acquire) != 0; });
  warm_up(options.warm_up_seconds, turn, done);

  Slices slices;
  const std::uint64_t before = done();
  const double begin = nanoseconds_now();
  const double end = begin + options.seconds * 1e9;
  Placement placement = placement_of(measure_probe(board.ping, board.pong));
  const auto count_preempted = [&] {
    return times_preempted() + board.preempted.value.load(std::memory_order_relaxed);
  };
  std::uint64_t preempted = count_preempted();
  while (nanoseconds_now() < end) {
    const SliceResult slice = run_slice(options, turn, done);
    const double probe_ns = measure_probe(board.ping, board.pong);
    const Placement placement_now = placement_of(probe_ns);
    const std::uint64_t preempted_now = count_preempted();
    if (options.verbose) fmt::print(stderr, "{:.1f} ns, probe {:.0f} ns\n", slice.ns, probe_ns);
    if (slice.ns != 0) slices.add(slice.ns, placement, placement_now, preempted_now != preempted);
    placement = placement_now;
    preempted = preempted_now;
  }
  const double seconds = (nanoseconds_now() - begin) / 1e9;
  const std::uint64_t operations = done() - before;
  board.stop.value.store(1, std::memory_order_release);
  constexpr double kLastTurns = 20e6;
  for (const double last = nanoseconds_now() + kLastTurns; nanoseconds_now() < last;) turn();
  const bool second_good = second.wait();
  node.close();
  const std::uint64_t bad = node.bad() + (second_good ? 0 : 1);
  print_result(slices.to_json(peer, options, seconds, operations, bad));
  return bad == 0 ? 0 : 1;
}

/// Measures a peer as the options say and prints its line. Returns the exit code: 1 if a reply or a
/// byte was not as it should be.
template <PeerNode Node>
int measure_peer(std::string_view peer, const Options& options) {
  Node::prepare(options);
  return options.mode == Mode::one_thread ? measure_one_thread<Node>(peer, options)
                                          : measure_two_processes<Node>(peer, options);
}

}  // namespace spinwire::bench
