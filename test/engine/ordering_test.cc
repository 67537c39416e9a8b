// Everything that is ordered on a connection (messages, rendezvous messages, immediates, writes
// with immediate) arrives in the order of posting, mixed at random in both directions. Each
// operation follows from seed, direction and number, so the receiver can predict it.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/internals.h"
#include "base/random.h"
#include "engine/engine_core.h"
#include "engine/harness.h"
#include "softverbs/faults/fault_plan.h"

namespace ordering_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using spinwire::Offer;
using spinwire::base::Random;
using spinwire::detail::EngineCore;
using spinwire::memory::PoolId;
using spinwire::softverbs::FaultPlan;

constexpr std::uint32_t kLongest = 200u << 10;
constexpr std::uint32_t kSlotBytes = 4096;
constexpr std::uint32_t kSlots = 16;
constexpr std::size_t kPlaces = 4;  // where rendezvous messages may be placed
constexpr std::size_t kMostKept = 48;
constexpr std::uint32_t kWindows = 16;

Config ordering_config(std::uint32_t windows) {
  Config c = small_config();
  c.memory.send_bytes = 24u << 20;
  c.memory.rendezvous_bytes = 4u << 20;  // fewer chunks than sizes: pulls wait for one another
  c.memory.windows = windows;
  c.connections.max_message_bytes = kLongest;
  c.connections.rendezvous_timeout = std::chrono::hours(1);
  c.queue_pair.min_rnr_timer = 1;  // 10 us
  return c;
}

/// One operation of a direction.
struct Step {
  enum class Kind : std::uint8_t { message, long_message, write };
  Kind kind = Kind::message;
  std::uint32_t size = 0;
  bool has_immediate = false;
  std::uint32_t immediate = 0;
  std::uint32_t offset = 0;  ///< of the payload in the sender's buffer, and at its destination
  Post post = Post::automatic;
  bool copied = false;   ///< by send_copy()
  bool kept = false;     ///< by the receiver
  bool placed = false;   ///< the receiver names a destination if one is free
  bool refused = false;  ///< by the receiver
};

/// Each power of two is equally likely.
std::uint32_t draw_size(Random& random, std::uint32_t most) {
  const std::uint64_t bits = random.below(14);
  return static_cast<std::uint32_t>(
      std::min<std::uint64_t>(random.below((std::uint64_t{1} << bits) + 1), most));
}

Step step_of(std::uint64_t seed, std::uint64_t number, std::uint32_t eager) {
  Random random(Random::mix(seed ^ Random::mix(number)));
  Step s;
  const std::uint64_t what = random.below(64);
  s.kind = what < 4    ? Step::Kind::long_message
           : what < 20 ? Step::Kind::write
                       : Step::Kind::message;
  s.has_immediate = s.kind == Step::Kind::write || random.below(3) == 0;
  const auto immediate = static_cast<std::uint32_t>(random.next());
  s.immediate = s.has_immediate ? immediate : 0;
  if (s.kind == Step::Kind::long_message) {
    const std::uint64_t more = random.below(32) == 0 ? kLongest - eager : 6000;
    s.size = static_cast<std::uint32_t>(eager + 1 + random.below(more));
    s.refused = random.below(32) == 0;
    s.placed = random.below(2) == 0;
  } else {
    s.size = draw_size(random, s.kind == Step::Kind::write ? kSlotBytes : eager);
  }
  s.offset = random.below(4) == 0 ? static_cast<std::uint32_t>(random.below(64)) : 0;
  s.copied = s.kind != Step::Kind::write && !s.has_immediate && random.below(8) == 0;
  s.post = static_cast<Post>(random.below(3));
  s.kept = s.kind != Step::Kind::write && random.below(16) == 0;
  return s;
}

/// The content of an operation: its number, then bytes of a table from an offset that follows from
/// the number.
class Content {
 public:
  Content() : table_(kLongest * 2) {
    Random random(99);
    for (std::size_t i = 0; i + 8 <= table_.size(); i += 8) {
      const std::uint64_t word = random.next();
      std::memcpy(&table_[i], &word, 8);
    }
  }
  void fill(std::span<std::byte> to, std::uint64_t key) const {
    std::memcpy(to.data(), at(key), to.size());
    std::memcpy(to.data(), &key, std::min(to.size(), sizeof key));
  }
  [[nodiscard]] bool is_in(std::span<const std::byte> bytes, std::uint64_t key) const {
    const std::size_t head = std::min(bytes.size(), sizeof key);
    return std::memcmp(bytes.data(), &key, head) == 0 &&
           std::memcmp(bytes.data() + head, at(key) + head, bytes.size() - head) == 0;
  }

 private:
  [[nodiscard]] const std::byte* at(std::uint64_t key) const {
    return &table_[Random::mix(key) % kLongest];
  }
  std::vector<std::byte> table_;
};

/// One engine: the sender of one direction and the receiver of the other.
class Side {
 public:
  Side(std::uint64_t seed, std::uint64_t peers_seed, std::uint64_t count, const Content& content)
      : seed_(seed), peers_seed_(peers_seed), count_(count), content_(content), ended_(count, 0) {}
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  void open(const Clock& clock, std::uint32_t windows) {
    const Config config = ordering_config(windows);
    eager_ = config.connections.eager_bytes;
    core = std::make_unique<EngineCore>(config, clock,
                                        std::move(*spinwire::base::OwnerGuard::create()));
    const auto opened = core->open();
    ASSERT_TRUE(opened) << opened.error().message();
    ring_ = take(kSlots * kSlotBytes, PoolId::lease);
    for (Buffer& place : places_) free_.push_back(&(place = take(kLongest + 64, PoolId::lease)));
  }
  [[nodiscard]] spinwire::ConnectionHandlers handlers() {
    spinwire::ConnectionHandlers h;
    h.on_ready = [this](Connection c) { connection = c; };
    h.on_message = [this](Connection, Message& m) { take(m); };
    h.on_offer = [this](Connection, Offer& o) { take(o); };
    h.on_closed = [this](Connection, const Error& e) {
      closed = true;
      if (!ending) fault("the connection is lost: " + e.message());
    };
    return h;
  }
  void expose_ring() {
    ring_region = connection.expose(ring_.slice(), Access::remote_write).value();
  }
  void drop_memory() {
    EXPECT_TRUE(core->context.registrations->revoke(ring_region.rkey) == Status::ok);
    ring_.reset();
    kept_.clear();
    for (Buffer& place : places_) place.reset();
  }

  /// Begins operations, as many as chance and the connection allow.
  void send(Side& peer) {
    peer_ = &peer;
    for (std::uint64_t burst = chance_.below(12); burst != 0 && begin_next(); --burst) {
    }
    if (chance_.below(2) == 0) (void)connection.flush();
    if (!kept_.empty() && chance_.below(4) == 0) drop_kept();
  }
  [[nodiscard]] bool done() const {
    return sent == count_ && completed == count_ && received == count_ && kept_.empty();
  }

  std::unique_ptr<EngineCore> core;
  Connection connection;
  RemoteRegion ring_region;
  std::uint64_t sent = 0, completed = 0, received = 0;
  std::atomic<std::uint64_t> checked_writes{0};  // read by the peer, which may be another thread
  std::uint64_t placed = 0, kept = 0, refused = 0, longs = 0;  // counts of received ones
  std::string first_fault;
  bool ending = false, closed = false;

 private:
  struct Kept {
    std::uint64_t number;
    Buffer buffer;
  };

  void fault(std::string what) {
    if (first_fault.empty()) first_fault = std::move(what);
  }
  template <typename Number>
  void fault_at(Number number, const char* what) {
    fault("operation " + std::to_string(number) + ": " + what);
  }
  [[nodiscard]] Buffer take(std::size_t size, PoolId pool) {
    spinwire::detail::Block* block = core->context.arena->allocate(pool, size);
    return block != nullptr ? spinwire::detail::make<Buffer>(block, size) : Buffer();
  }
  [[nodiscard]] Step peers_step(std::uint64_t number) const {
    return step_of(peers_seed_, number, eager_);
  }
  [[nodiscard]] static std::uint64_t key_of(std::uint64_t seed, std::uint64_t number) {
    return Random::mix(seed) + number;
  }

  // Sending.

  bool begin_next() {
    if (sent == count_ || !first_fault.empty()) return false;
    const std::uint64_t number = sent;
    const Step s = step_of(seed_, number, eager_);
    // A slot of the ring is written again only after its last write was checked.
    if (s.kind == Step::Kind::write && writes_ - peer_->checked_writes == kSlots) return false;
    Buffer block = take(std::max(s.offset + s.size, 1u), PoolId::send);
    if (!block) return false;
    const BufferSlice data = block.slice(s.offset, s.size);
    content_.fill(data.bytes(), key_of(seed_, number));
    const Status status = begin(s, data, [this, number](const Completion& c) { end(number, c); });
    if (status == Status::ok) {
      ++sent;
      writes_ += s.kind == Step::Kind::write ? 1 : 0;
      return true;
    }
    if (status != Status::would_block && status != Status::no_buffer)
      fault_at(number, to_string(status).data());
    return false;
  }
  Status begin(const Step& s, const BufferSlice& data, const CompletionCallback& done) {
    if (s.kind == Step::Kind::write) {
      RemoteRegion slot = peer_->ring_region;
      slot.address += writes_ % kSlots * kSlotBytes;
      slot.length = kSlotBytes;
      return connection.write_with_imm(data, slot, s.immediate, done, s.post);
    }
    if (s.copied) return connection.send_copy(data.bytes(), done, s.post);
    if (s.has_immediate) return connection.send_with_imm(data, s.immediate, done, s.post);
    return connection.send(data, done, s.post);
  }
  void end(std::uint64_t number, const Completion& c) {
    const Step s = step_of(seed_, number, eager_);
    ++completed;
    if (++ended_[number] != 1) fault_at(number, "it has ended twice");
    if (c.status != (s.refused ? Status::refused : Status::ok))
      fault_at(number, to_string(c.status).data());
    if (c.bytes != (s.refused ? 0 : s.size)) fault_at(number, "it moved another number of bytes");
    if (chance_.below(8) == 0) (void)begin_next();
  }

  // Receiving.

  void take(Offer& offer) {
    // Offers arrive in the order of posting, ahead of delivery.
    while (next_offer_ < count_ && peers_step(next_offer_).kind != Step::Kind::long_message)
      ++next_offer_;
    const std::uint64_t number = next_offer_++;
    const Step s = peers_step(number);
    if (offer.size() != s.size) return fault_at(number, "it was offered with another size");
    if (s.refused) return offer.refuse();
    offered_.push_back(nullptr);
    if (!s.placed || free_.empty()) return;
    Buffer& to = *free_.back();
    free_.pop_back();
    offered_.back() = &to;
    ++placed;
    if (offer.place(to.slice(s.offset, s.size)) != Status::ok) fault_at(number, "it has no place");
  }
  void take(Message& m) {
    Step s = peers_step(received);
    for (; s.refused; s = peers_step(++received)) ++refused;
    const std::uint64_t number = received++;
    if (number >= count_) return fault_at(number, "there is no such");
    check(m, s, number);
    // Refused messages behind the last delivered one are not reported.
    while (received < count_ && peers_step(received).refused) ++received, ++refused;
    if (chance_.below(8) == 0 && peer_ != nullptr) (void)begin_next();
  }
  void check(Message& m, const Step& s, std::uint64_t number) {
    const bool write = s.kind == Step::Kind::write;
    if (m.size() != s.size || m.immediate().has_value() != s.has_immediate ||
        m.immediate().value_or(0) != s.immediate || m.is_write() != write)
      return fault_at(number, "another came in its place");
    const std::byte* at = m.data();
    if (write) at = ring_.data() + checked_writes++ % kSlots * kSlotBytes;
    if (s.kind == Step::Kind::long_message) check_place(m, s, number);
    if (!content_.is_in({at, s.size}, key_of(peers_seed_, number)))
      return fault_at(number, "its content is not its own");
    const bool owned = write || (s.kind == Step::Kind::long_message && last_place_ != nullptr);
    if (!s.kept || owned || kept_.size() == kMostKept) return;
    ++kept;
    kept_.push_back({number, m.take()});
  }
  void check_place(const Message& m, const Step& s, std::uint64_t number) {
    ++longs;
    if (offered_.empty()) return fault_at(number, "it was not offered");
    last_place_ = offered_.front();
    offered_.pop_front();
    if (last_place_ == nullptr) return;
    if (m.data() != last_place_->data() + s.offset)
      fault_at(number, "it is not where it was wanted");
    free_.push_back(last_place_);
  }
  /// Checks that the kept buffers are unchanged.
  void drop_kept() {
    const Kept& oldest = kept_.front();
    const Step s = peers_step(oldest.number);
    if (oldest.buffer.size() != s.size ||
        !content_.is_in(oldest.buffer.slice().bytes(), key_of(peers_seed_, oldest.number)))
      fault_at(oldest.number, "it was kept, and has changed");
    kept_.pop_front();
  }

  std::uint64_t seed_, peers_seed_;
  std::uint64_t count_;
  const Content& content_;
  std::vector<std::uint8_t> ended_;
  Random chance_{seed_ + 1};
  Side* peer_ = nullptr;
  std::uint32_t eager_ = 0;
  std::uint64_t writes_ = 0;
  Buffer ring_;
  std::array<Buffer, kPlaces> places_;
  std::vector<Buffer*> free_;
  std::deque<Buffer*> offered_;  ///< offered, not yet arrived: their destination, null for the pool
  Buffer* last_place_ = nullptr;
  std::uint64_t next_offer_ = 0;
  std::deque<Kept> kept_;
};

/// Both engines with a clock that the test moves, so a seed repeats its run. On other devices the
/// clock is real.
class Run {
 public:
  Run(std::uint64_t seed, std::uint64_t operations, std::uint32_t windows)
      : count_(operations / 2),
        a(Random::mix(seed), Random::mix(~seed), count_, content_),
        b(Random::mix(~seed), Random::mix(seed), count_, content_) {
    const Clock clock = on_softverbs() ? Clock::manual(&ticks_) : Clock::real();
    a.open(clock, windows);
    b.open(clock, windows);
    connect();
  }
  void set_faults(const FaultPlan& plan) {
    for (const Side* each : {&a, &b}) {
      ASSERT_TRUE(spinwire::softverbs::set_faults(each->core->context.device->context(), plan));
    }
  }
  /// Returns true when all is done.
  [[nodiscard]] bool go() {
    const auto passed = [this] {
      a.send(b);
      b.send(a);
      return (a.done() && b.done()) || !a.first_fault.empty() || !b.first_fault.empty();
    };
    return until(passed, 600s) && a.first_fault.empty() && b.first_fault.empty();
  }
  void expect_all_came(std::uint64_t seed) {
    const bool done = go();
    EXPECT_TRUE(done) << "seed " << seed << ": sent " << a.sent << " and " << b.sent
                      << ", completed " << a.completed << " and " << b.completed << ", received "
                      << a.received << " and " << b.received << " of " << count_ << " each";
    for (const Side* each : {&a, &b}) {
      EXPECT_EQ(each->first_fault, "") << "seed " << seed;
      if (!done) continue;
      EXPECT_GT(each->placed, count_ / 100);
      EXPECT_GT(each->longs - each->placed, count_ / 100);
      EXPECT_GT(each->kept, count_ / 100);
      EXPECT_GT(each->checked_writes, count_ / 10);
    }
    finish(done);
  }

 private:
  void connect() {
    ListenOptions options;
    options.handlers = b.handlers();
    listener_ = b.core->listen("127.0.0.1:0", options).value();
    (void)a.core->connect(listener_.address(), {a.handlers()}).value();
    ASSERT_TRUE(until([this] { return a.connection.ready() && b.connection.ready(); }, 60s));
    a.expose_ring();
    b.expose_ring();
  }
  void finish(bool done) {
    for (Side* each : {&a, &b}) each->ending = true;
    (void)a.connection.close();
    EXPECT_TRUE(until([this] { return a.closed && b.closed; }, 60s) || !done);
    for (Side* each : {&a, &b}) {
      each->drop_memory();
      const auto audit = each->core->audit();
      EXPECT_TRUE(audit) << audit.error().message();
    }
  }
  template <typename Done>
  bool until(Done&& done, std::chrono::seconds timeout) {
    const auto deadline = std::chrono::steady_clock::now() + timeout * slowness();
    for (unsigned i = 0; !done(); ++i) {
      ticks_ += 1000;
      (void)(a.core->poll() + b.core->poll());
      if (i % 1024 == 0 && std::chrono::steady_clock::now() > deadline) return false;
    }
    return true;
  }

  std::uint64_t ticks_ = 1'000'000'000;
  std::uint64_t count_;
  Content content_;
  Listener listener_;

 public:
  Side a, b;
};

/// Each engine on its own thread, so that polls of both run in parallel.
class RunOnTwoThreads {
 public:
  RunOnTwoThreads(std::uint64_t seed, std::uint64_t operations)
      : count_(operations / 2),
        a_(Random::mix(seed), Random::mix(~seed), count_, content_),
        b_(Random::mix(~seed), Random::mix(seed), count_, content_) {
    std::thread other([&] { run(b_, a_, true); });
    run(a_, b_, false);
    other.join();
    for (const Side* each : {&a_, &b_}) {
      EXPECT_EQ(each->first_fault, "") << "seed " << seed;
      EXPECT_TRUE(each->done()) << "seed " << seed << ": sent " << each->sent << ", completed "
                                << each->completed << ", received " << each->received << " of "
                                << count_;
    }
  }

 private:
  /// Polls until `done()`. Returns false after a time limit.
  template <typename Done>
  static bool until(Side& own, Done&& done) {
    const auto deadline = std::chrono::steady_clock::now() + 600s * slowness();
    unsigned idle = 0;
    for (unsigned i = 0; !done(); ++i) {
      idle = own.core->poll() == 0 ? idle + 1 : 0;
      if (idle % 256 == 255) std::this_thread::yield();  // the peer may need the processor
      if (i % 1024 == 0 && std::chrono::steady_clock::now() > deadline) return false;
    }
    return true;
  }
  /// Waits until both have come this far. Returns false for both if either fails.
  bool meet(Side& own, int stage) {
    ++arrived_;
    return until(own, [&] { return failed_ || arrived_ >= 2 * stage; }) && !failed_;
  }
  void run(Side& own, Side& peer, bool listens) {
    own.open(Clock::real(), kWindows);
    Listener listener;
    if (listens) {
      ListenOptions options;
      options.handlers = own.handlers();
      listener = own.core->listen("127.0.0.1:0", options).value();
      address_.set_value(listener.address());
    } else {
      (void)own.core->connect(address_.get_future().get(), {own.handlers()}).value();
    }
    if (!until(own, [&] { return own.connection.ready(); })) failed_ = true;
    if (!failed_) own.expose_ring();
    if (meet(own, 1)) exchange(own, peer);
    own.ending = true;
    if (!listens) (void)own.connection.close();
    EXPECT_TRUE(until(own, [&] { return own.closed; }));
    own.drop_memory();
    const auto audit = own.core->audit();
    EXPECT_TRUE(audit) << audit.error().message();
    listener = Listener();
    own.core.reset();
  }
  void exchange(Side& own, Side& peer) {
    const bool ended = until(own, [&] {
      own.send(peer);
      return own.done() || failed_ || !own.first_fault.empty();
    });
    if (!ended || !own.done()) failed_ = true;
    (void)meet(own, 2);
  }

  std::uint64_t count_;
  Content content_;
  Side a_, b_;
  std::promise<std::string> address_;
  std::atomic<int> arrived_{0};
  std::atomic<bool> failed_{false};
};

FaultPlan faults(std::uint64_t seed) {
  FaultPlan plan;
  plan.seed = seed;
  plan.rnr = 0.02;
  plan.rnr_in_a_row = 2;
  plan.delay_max = std::chrono::microseconds(5);
  return plan;
}

void mix(std::uint64_t seed, std::uint64_t operations, std::uint32_t windows = kWindows) {
  Run run(seed, operations, windows);
  if (!testing::Test::HasFatalFailure()) run.expect_all_came(seed);
}
void mix_with_faults(std::uint64_t seed, std::uint64_t operations) {
  if (!on_softverbs()) GTEST_SKIP() << kSoftverbsOnly << "faults on purpose";
  Run run(seed, operations, kWindows);
  if (testing::Test::HasFatalFailure()) return;
  run.set_faults(faults(seed));
  run.expect_all_came(seed);
  for (const Side* each : {&run.a, &run.b}) {
    const auto told = spinwire::softverbs::fault_statistics(each->core->context.device->context());
    EXPECT_GT(told.rnr, operations / 200);
    EXPECT_GT(told.delayed, operations / 4);
  }
}

TEST(EngineOrdering, OfEverythingAtOnce) { mix(1, amount(20'000)); }
TEST(EngineOrdering, WhereALongMessageIsARegistration) { mix(2, amount(20'000), 0); }
TEST(EngineOrdering, WhateverFindsNoReceiverOrIsLate) { mix_with_faults(3, amount(20'000)); }

TEST(SlowOrdering, OfEverythingAtOnce) { mix(4, 1'000'000); }
TEST(SlowOrdering, WhereALongMessageIsARegistration) { mix(5, 100'000, 0); }
TEST(SlowOrdering, WhateverFindsNoReceiverOrIsLate) { mix_with_faults(6, 1'000'000); }
TEST(SlowOrdering, BetweenTwoThreads) { RunOnTwoThreads(7, 20'000); }

}  // namespace
}  // namespace ordering_test
