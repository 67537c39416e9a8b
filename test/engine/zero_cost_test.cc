// The hot path must not allocate from the heap or call the system. Control steps call the system,
// but do not allocate either.
#include "engine/zero_cost.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>

#include "engine/harness.h"

namespace zero_cost_test {
namespace {

using namespace engine_test;  // the names of a test namespace

/// Two engines and everything on the hot path, with handlers that do not allocate.
class Load {
 public:
  explicit Load(Turns turns) : server_(manual_config()), client_(manual_config()), turns_(turns) {
    ListenOptions options;
    options.handlers.on_message = [this](Connection c, Message& m) {
      ++received_;
      if (m.is_write()) return;
      long_received_ += m.size() == kLong ? 1 : 0;
      if (m.size() % 3 == 0) {
        const Buffer b = m.take();
        (void)c.send(b);
      } else {
        const Buffer b = server_.engine.allocate(m.size() + 1);
        if (b) (void)c.send_with_imm(b.slice(0, m.size()), 7);
      }
    };
    options.handlers.on_returned = [this](Connection, const spinwire::Returned& r) {
      returned_ += r.how == spinwire::ReturnedBy::give_back ? 1 : 0;
    };
    server_.listener = std::move(*server_.engine.listen("127.0.0.1:0", options));
    ConnectOptions connecting;
    connecting.handlers.on_message = [this](Connection, Message&) { ++answered_; };
    for (Connection& c : connections_)
      c = *client_.engine.connect(server_.listener.address(), connecting);
    EXPECT_TRUE(until({&server_, &client_}, [&] {
      return connections_[0].ready() && connections_[1].ready() &&
             server_.engine.stats().accepted == 2;
    }));
    memory_ = server_.buffer(8192, Pool::lease);
    region_ = *server_.engine.expose(memory_.slice(), Access::remote_read_write);
    atomics_ = client_.engine.device().atomics;
    words_ = server_.buffer(64, Pool::lease);
    if (atomics_)
      word_ = server_.engine.expose(words_.slice(0, 8), Access::remote_all)->slice(0, 8);
    into_ = client_.buffer(4096);
    listen_raw();
    windows_ = client_.engine.device().memory_windows;  // else a rendezvous message is registered
    long_ = client_.buffer(kLong);
  }
  /// Polls both `polls` times, with all kinds of work in flight.
  void run(int polls) {
    for (int i = 0; i < polls; ++i) {
      Connection& c = connections_[static_cast<std::size_t>(i) % 2];
      const auto size = static_cast<std::size_t>(i) * 37 % 1400;
      const auto done = [this](const Completion&) { ++completed_; };
      const auto added = [this](const Completion& e) {
        ++completed_;
        added_ += e.status == Status::ok ? 1 : 0;
      };
      const Buffer b = client_.engine.allocate(size + 1);
      if (b && c.send(b.slice(0, size), done) == Status::ok) ++accepted_;
      if (c.write(into_.slice(0, size), region_, done, Post::defer) == Status::ok) ++accepted_;
      if (c.read(into_.slice(0, size), region_, done, Post::defer) == Status::ok) ++accepted_;
      if (i % 4 == 0 && c.write_with_imm(into_.slice(0, size), region_, 5, done) == Status::ok) {
        ++accepted_;
      }
      if (atomics_) {
        if (c.fetch_add(word_, 1, added, Post::defer) == Status::ok) ++accepted_;
        if (c.compare_swap(word_, 0, 1, done, Post::defer) == Status::ok) ++accepted_;
      }
      run_gathered(c, i);
      if (windows_ && i % 64 == 0 && c.send(long_, done) == Status::ok) ++accepted_;
      if (windows_ && i % 64 == 32) use_lease(c, done);
      run_raw(i);
      const Buffer free = server_.engine.allocate(100, i % 2 == 0 ? Pool::send : Pool::lease);
      turn(turns_, client_.engine, server_.engine);
    }
  }
  /// Operations of several parts: short, of an eager message and above, and with a notice.
  void run_gathered(Connection& c, int i) {
    if (i % 4 != 1) return;
    const auto size = static_cast<std::size_t>(i) * 37 % 1300;
    const std::array<BufferSlice, 3> parts = {into_.slice(0, 8), into_.slice(64, 1 + size),
                                              into_.slice(2000, 2000)};
    const auto done = [this](const Completion& e) {
      ++completed_;
      gathered_ += e.status == Status::ok ? 1 : 0;
    };
    const std::span<const BufferSlice> few(parts.data(), i % 8 == 1 ? 2 : 3);
    const std::span<const std::byte> notice = into_.bytes().first(size % 100);
    if (c.send(few, done, i % 16 < 8 ? Post::defer : Post::now) == Status::ok) ++accepted_;
    if (c.write(parts, region_, done) == Status::ok) ++accepted_;
    if (c.write_and_send(few, region_, notice, done) == Status::ok) ++accepted_;
    const std::array<BufferSlice, 2> large = {long_.slice(0, 9000), long_.slice(9000, 9000)};
    if (windows_ && i % 128 == 1 && c.send(large, done) == Status::ok) ++accepted_;
  }
  /// Requests memory or, with the next call, writes to it, renews the lease and gives it back.
  template <typename Done>
  void use_lease(Connection& c, const Done& done) {
    if (leased_ && leased_.connection() == c) {
      if (c.write(into_.slice(0, 64), leased_.region(), done) == Status::ok) ++accepted_;
      if (!renewed_) {
        renewed_ = leased_.renew(std::chrono::seconds(60)) == Status::ok;
      } else if (leased_.give_back() == Status::ok) {
        renewed_ = false;
      }
    } else if (!leased_) {
      (void)c.request_memory(64, {}, [this](spinwire::LeaseReply& r) {
        if (!leased_) leased_ = std::move(r.memory);
      });
    }
  }
  [[nodiscard]] bool worked() const {
    return completed_ > 1000 && received_ > 1000 && answered_ > 1000 && accepted_ >= completed_ &&
           (!atomics_ || added_ > 1000) && gathered_ > 1000 &&
           (!windows_ || (long_received_ > 50 && returned_ > 50)) && raw_received_ > 1000 &&
           raw_told_ >= raw_received_;
  }

 private:
  void listen_raw() {
    ListenOptions listen;
    listen.settings.raw.emplace();
    listen.handlers.on_ready = [this](Connection c) { raw_server_ = c; };
    raw_listener_ = std::move(*server_.engine.listen("127.0.0.1:0", listen));
    ConnectOptions options;
    options.settings = listen.settings;
    raw_client_ = *client_.engine.connect(raw_listener_.address(), options);
    EXPECT_TRUE(
        until({&server_, &client_}, [&] { return raw_client_.ready() && raw_server_.ready(); }));
    raw_into_ = server_.buffer(4096);
    receive();
    receive();
  }
  void receive() {
    const std::array<BufferSlice, 3> parts = {raw_into_.slice(0, 8), raw_into_.slice(100, 1000),
                                              raw_into_.slice(2000, 1000)};
    (void)raw_server_.post_receive(
        parts,
        [this](const spinwire::RawReceive& r) {
          raw_received_ += r.status == Status::ok ? 1 : 0;
          if (r.status == Status::ok) receive();
        },
        [this] { ++raw_told_; });
  }
  void run_raw(int i) {
    if (raw_sent_ != raw_received_) return;  // without a receive it would be retransmitted for long
    const std::size_t size = 1 + static_cast<std::size_t>(i) * 37 % 1400;
    const std::array<BufferSlice, 2> parts = {into_.slice(0, size), into_.slice(2000, 16)};
    const auto done = [this](const Completion&) { ++completed_; };
    const Post post = i % 2 == 0 ? Post::now : Post::defer;
    const Status status = i % 3 == 0 ? raw_client_.send_raw(parts, done, post)
                                     : raw_client_.send_raw_with_imm(parts[0], 3, done, post);
    if (status != Status::ok) return;
    ++accepted_;
    ++raw_sent_;
  }
  static constexpr std::size_t kLong = 20000;
  static Config manual_config() {
    Config c = small_config();
    c.engine.control = ControlMode::manual;
    c.connections.max_message_bytes = kLong;
    c.memory.rendezvous_bytes = 4u << 20;
    c.memory.windows = 16;
    return c;
  }
  Node server_;
  Node client_;
  Turns turns_;
  std::array<Connection, 2> connections_;
  Buffer memory_;
  Buffer into_;
  RemoteRegion region_;
  bool atomics_ = false;
  Buffer words_;
  RemoteRegion word_;
  std::uint64_t added_ = 0;
  bool windows_ = false;
  Buffer long_;
  std::uint64_t long_received_ = 0;
  spinwire::RemoteMemory leased_;
  bool renewed_ = false;
  std::uint64_t returned_ = 0;
  Listener raw_listener_;
  Connection raw_server_;
  Connection raw_client_;
  Buffer raw_into_;
  std::uint64_t gathered_ = 0;
  std::uint64_t raw_sent_ = 0;
  std::uint64_t raw_received_ = 0;
  std::uint64_t raw_told_ = 0;
  std::uint64_t received_ = 0;
  std::uint64_t answered_ = 0;
  std::uint64_t accepted_ = 0;
  std::uint64_t completed_ = 0;
};

#if SPINWIRE_TEST_COUNTS_HEAP
TEST(EngineZeroCost, NoHeap) { expect_no_heap<Load>(); }

TEST(EngineZeroCost, NoHeapInControlSteps) { expect_no_heap<Load>(Turns::polls_and_control_steps); }
#endif

TEST(EngineZeroCost, NoSystemCalls) { expect_no_system_calls<Load>(); }

TEST(EngineZeroCost, TheTrapForSystemCallsFires) {
  Child child([](int, int) {
    if (!forbid_system_calls()) return 77;
    (void)syscall(SYS_getppid);
    return 0;
  });
  const int code = child.wait();
  if (code == 77) GTEST_SKIP() << "no system-call filter may be set here";
  EXPECT_EQ(code, -SIGSYS);
}

}  // namespace
}  // namespace zero_cost_test
