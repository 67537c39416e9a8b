// The surroundings of the agent's fuzzer: an engine with an honest connection that stays, and a raw
// peer that connects again for each input. The fuzzer moves the time.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "agent/raw_peer.h"
#include "fuzz/fuzz.h"
#include "spinwire/spinwire.h"

namespace fuzz {

using namespace spinwire;
using namespace std::chrono_literals;

inline Config world_config() {
  Config c;
  c.memory.hugepages = HugepagePolicy::off;
  c.memory.send_bytes = 8u << 20;
  c.memory.receive_bytes = 2u << 20;
  c.memory.lease_bytes = 4u << 20;
  c.memory.rendezvous_bytes = 2u << 20;
  c.memory.windows = 8;
  c.queues.send_depth = 32;
  c.queues.receive_depth = 64;
  c.queues.receive_postlist = 4;
  c.queues.operations = 64;
  c.queues.completion_depth = 2048;
  c.connections.maximum = 4;
  c.connections.handshakes = 2;
  c.connections.eager_bytes = 1024;
  c.connections.max_message_bytes = 1u << 20;
  c.connections.credits = 16;
  c.connections.rendezvous_timeout = 5ms;
  c.connections.close_timeout = 20ms;
  c.connections.keepalive_interval = 40ms;
  c.connections.peer_timeout = 100ms;
  c.connections.credit_idle_timeout = 30ms;
  c.leases.maximum = 16;
  c.leases.count = 8;
  c.leases.max_bytes = 64u << 10;
  c.leases.total_bytes = 256u << 10;
  c.leases.max_duration = 100ms;
  c.queue_pair.ack_timeout = 8;
  c.observability.directory.clear();  // a file for each input takes longer than the input
  return c;
}

/// Returns the value, or ends the run.
template <typename T>
T must(Result<T> result) {
  if (!result) expect(false, result.error().message());
  return std::move(*result);
}

/// What the engine holds, which must be the same before and after each input.
struct Resources {
  std::uint64_t send, lease, rendezvous;
  std::uint32_t registrations, windows, operations, connections;
  friend bool operator==(const Resources&, const Resources&) = default;
};

class World {
 public:
  World() {
    ConnectionHandlers echo;
    echo.on_message = [this](Connection c, Message& m) {
      expect(c.send(m.take()) == Status::ok, "the honest connection sends");
      ++echoed_;
    };
    echo.on_closed = [this](Connection, const Error& e) { expect(ending_, e.message()); };
    ConnectionHandlers count;
    count.on_message = [this](Connection, Message& m) {
      const auto sent = static_cast<std::byte>(answered_);
      expect(m.size() == 1 + answered_ % 700 && m.bytes()[m.size() - 1] == sent,
             "the honest peer's own bytes come back");
      ++answered_;
    };
    count.on_closed = [this](Connection, const Error& e) { expect(ending_, e.message()); };
    served_ = prepare(engine, echo);
    honest_ = prepare(other_, count);
    const Endpoint mine = endpoint_of(served_), its = endpoint_of(honest_);
    must(served_.join(its).map([] { return 0; }));
    must(honest_.join(mine).map([] { return 0; }));
    expect(until([this] { return served_.ready() && honest_.ready(); }), "the honest ones connect");
    for (int i = 0; i < 40; ++i) talk();
    (void)until([this] { return resources().operations == 0; });
    at_rest_ = resources();
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;
  ~World() { ending_ = true; }

  static Connection prepare(Engine& at, const ConnectionHandlers& handlers) {
    PrepareOptions options;
    options.handlers = handlers;
    return must(at.prepare(options));
  }
  Endpoint endpoint_of(Connection c) {
    expect(until([&] { return c.endpoint().has_value(); }), "a connection has an endpoint");
    return *c.endpoint();
  }

  void poll() {
    expect(engine.poll() >= 0 && engine.poll_control() >= 0, "the engine polls");
    (void)other_.poll();
    (void)other_.poll_control();
    peer.poll();
    peer.control();
  }
  void pass(std::chrono::nanoseconds time) { now_ += static_cast<std::uint64_t>(time.count()); }
  /// Polls and moves the time until `done()`. Returns false after a second.
  template <typename Done>
  bool until(Done&& done) {
    for (int i = 0; i < 10000; ++i) {
      if (done()) return true;
      poll();
      pass(i < 400 ? 2us : 100us);
    }
    return done();
  }

  /// The honest peer sends a message and receives it back.
  void talk() {
    const std::uint64_t before = answered_;
    Buffer b = other_.allocate(1 + answered_ % 700);
    expect(static_cast<bool>(b), "the honest peer has memory");
    std::memset(b.data(), static_cast<int>(answered_ & 0xff), b.size());
    expect(until([&] { return honest_.send(b) == Status::ok; }), "the honest peer has credit");
    b.reset();
    expect(until([&] { return answered_ > before; }), "the honest peer is answered");
  }

  [[nodiscard]] Resources resources() const {
    const EngineStats s = engine.stats();
    return {engine.memory_stats(Pool::send).blocks_used,
            engine.memory_stats(Pool::lease).blocks_used,
            engine.memory_stats(Pool::rendezvous).blocks_used,
            s.registrations,
            s.windows_free,
            s.operations,
            s.connections};
  }
  /// Checks that nothing is left of the raw connection and that the honest one is unharmed.
  void expect_at_rest() {
    talk();
    if (!until([this] { return resources() == at_rest_; })) {
      const Resources h = resources();
      std::fprintf(
          stderr, "send %lu lease %lu rendezvous %lu keys %u windows %u operations %u of %u\n",
          h.send, h.lease, h.rendezvous, h.registrations, h.windows, h.operations, h.connections);
      expect(false, "everything is given back");
    }
    const EngineStats s = engine.stats();
    expect(s.receives + 4 >= world_config().queues.receive_depth, "receives are posted again");
    expect(s.reserved_receives <= world_config().connections.credits, "credit is given back");
    const auto books = engine.audit();
    if (!books) expect(false, books.error().message());
  }

 private:
  bool ending_ = false;
  std::uint64_t now_ = 1'000'000'000;
  std::uint64_t answered_ = 0;
  std::uint64_t echoed_ = 0;
  Resources at_rest_{};
  Connection served_;
  Connection honest_;
  Engine other_ = must(Engine::open(world_config(), Clock::manual(&now_)));

 public:
  Engine engine = must(Engine::open(world_config(), Clock::manual(&now_)));
  raw_peer::Peer peer{Clock::manual(&now_)};
};

/// The application at the engine's end of the raw connection.
class Application {
 public:
  /// Its behaviour.
  struct Manners {
    std::uint8_t bits;
    [[nodiscard]] bool echoes() const { return (bits & 1) != 0; }
    [[nodiscard]] bool keeps() const { return (bits & 2) != 0; }
    [[nodiscard]] bool refuses_offers() const { return (bits & 12) == 4; }
    [[nodiscard]] bool places_offers() const { return (bits & 12) == 8; }
    [[nodiscard]] bool closes_on_offers() const { return (bits & 12) == 12; }
    [[nodiscard]] bool takes_leases() const { return (bits & 16) != 0; }
    [[nodiscard]] bool deaf() const { return (bits & 32) != 0; }
    [[nodiscard]] bool closes_on_messages() const { return (bits & 0xc0) == 0xc0; }
  };

  Application(World& world, Manners manners) : world_(world), manners_(manners) {
    ConnectionHandlers h;
    if (!manners_.deaf()) {
      h.on_message = [this](Connection, Message& m) { on_message(m); };
      h.on_offer = [this](Connection, Offer& o) { on_offer(o); };
      h.on_lease = [this](Connection, RemoteMemory& m) { take(m); };
      h.on_returned = [](Connection, const Returned& r) {
        expect(r.how <= ReturnedBy::end, "memory comes back in a known way");
      };
    }
    h.on_closed = [this](Connection, const Error& e) {
      expect(!closed_, "a connection closes once");
      expect(e.status == Status::ok || !e.found.empty(), "why a connection closes");
      closed_ = true;
    };
    connection_ = World::prepare(world.engine, h);
  }
  Application(const Application&) = delete;
  Application& operator=(const Application&) = delete;

  [[nodiscard]] Connection connection() const { return connection_; }
  [[nodiscard]] bool closed() const { return closed_; }
  [[nodiscard]] bool settled() const { return accepted_ == completed_; }

  void send(std::size_t size, bool with_immediate) {
    const Buffer b = world_.engine.allocate(std::max<std::size_t>(size, 1));
    if (!b) return;
    note(with_immediate ? connection_.send_with_imm(b.slice(), 7, done())
                        : connection_.send(b, done()));
  }
  /// Larger leases have a tag.
  static std::uint64_t tag_of(std::size_t bytes) { return bytes > 128 * 64 ? bytes : 0; }
  void request(std::size_t bytes, Nanoseconds time) {
    LeaseOptions options;
    options.duration = time;
    options.tag = tag_of(bytes);
    note(connection_.request_memory(bytes, options, told()));
  }
  void lease(std::size_t bytes, Nanoseconds time) {
    const Buffer b = world_.engine.allocate(std::max<std::size_t>(bytes, 1), Pool::lease);
    LeaseOptions options;
    options.duration = time;
    options.tag = tag_of(bytes);
    if (b) note(connection_.lease(b.slice(), options, told()));
  }
  /// Uses the memory leased by the peer.
  void use_memory(std::uint8_t how) {
    if (memory_.empty()) return;
    RemoteMemory& m = memory_[how / 8 % memory_.size()];
    const std::size_t bytes = std::min<std::uint64_t>(m.size(), 512);
    switch (how % 8) {
      case 0:
        return note(m.renew(20ms, told()));
      case 1:
        return note(m.give_back(told()));
      case 2:
        return m.release();
      case 3:
        return (void)m.detach();
      case 4:
        if (const Buffer b = world_.engine.allocate(512); b && bytes != 0)
          note(connection_.read(b.slice(0, bytes), m.slice(0, bytes), done()));
        return;
      default:
        if (const Buffer b = world_.engine.allocate(512); b && bytes != 0)
          note(connection_.write(b.slice(0, bytes), m.slice(0, bytes), done()));
    }
  }
  void recall() {
    if (leased_) (void)connection_.recall(leased_);
  }
  void forget() {
    kept_.clear();
    memory_.clear();
  }

 private:
  void note(Status status) { accepted_ += status == Status::ok ? 1 : 0; }
  CompletionCallback done() {
    return [this](const Completion& c) {
      expect(static_cast<int>(c.status) < kStatusCount, "a completion has a status");
      expect(++completed_ <= accepted_ + 1, "an operation completes once");
    };
  }
  LeaseCallback told() {
    return [this](LeaseReply& r) {
      expect(++completed_ <= accepted_ + 1, "a call about a lease is answered once");
      if (r.lease) leased_ = r.lease;
      if (r.memory && memory_.size() < 4) memory_.push_back(std::move(r.memory));
    };
  }
  void on_message(Message& m) {
    // Reads every byte, so that a sanitizer checks them all.
    for (const std::byte b : m.bytes()) sum_ += std::to_integer<unsigned>(b);
    if (manners_.closes_on_messages()) (void)connection_.close();
    if (m.is_write() || m.size() == 0) return;
    if (manners_.echoes()) note(connection_.send(m.take(), done()));
    if (manners_.keeps() && kept_.size() < 80) kept_.push_back(m.take());
  }
  void on_offer(Offer& o) {
    if (manners_.closes_on_offers()) (void)connection_.close();
    if (manners_.refuses_offers()) o.refuse();
    if (!manners_.places_offers()) return;
    if (const Buffer b = world_.engine.allocate(o.size()); b) (void)o.place(b.slice());
  }
  void take(RemoteMemory& m) {
    if (manners_.takes_leases() && memory_.size() < 4) memory_.push_back(std::move(m));
  }

  World& world_;
  Manners manners_;
  Connection connection_;
  bool closed_ = false;
  std::uint64_t accepted_ = 0;
  std::uint64_t completed_ = 0;
  unsigned sum_ = 0;
  LeaseId leased_;
  std::vector<Buffer> kept_;
  std::vector<RemoteMemory> memory_;
};

}  // namespace fuzz
