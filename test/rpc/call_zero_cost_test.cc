// Short and long calls of a session in use must not allocate from the heap or call the system.
// Control steps call the system, but do not allocate either.
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>

#include "engine/zero_cost.h"
#include "rpc/long_calls.h"

namespace rpc_zero_cost_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers

constexpr spinwire::Method kBack = 1, kKept = 2, kDeferred = 3, kNested = 4, kRefused = 5,
                           kLong = 6, kEager = 7;
constexpr std::size_t kLongCall = 40000;  // longer than an eager message

/// Two engines on one thread, each with a session to the other, and calls of every kind.
class CallLoad {
 public:
  explicit CallLoad(zero_cost_test::Turns turns)
      : server_(manual_config()), client_(manual_config()), turns_(turns) {
    for (Node* node : {&server_, &client_}) {
      node->listen();
      serve(*node);
    }
    session_ = open(client_, server_);
    inner_ = open(server_, client_);
    EXPECT_TRUE(until({&server_, &client_}, [&] { return session_.ready() && inner_.ready(); }));
    full_ = client_.buffer(session_.max_inline_call());
    full_answer_ = server_.buffer(session_.max_inline_call());
    windows_ = client_.engine.device().memory_windows;  // else a long call is registered
    long_ = client_.buffer(kLongCall);
    long_reply_ = client_.buffer(kLongCall);
    long_answer_ = server_.buffer(kLongCall);
    call_long(0);  // which connects
    EXPECT_TRUE(until({&server_, &client_}, [&] { return long_under_way_ == 0; }));
  }
  /// Polls both `polls` times, with calls of all kinds in flight.
  void run(std::uint32_t polls) {
    for (std::uint32_t i = 0; i < polls; ++i) {
      const std::span<const std::byte> few(bytes_.data(), i % (kSlotPayloadBytes + 1));
      const spinwire::Method method = i % 7 == 0 ? kDeferred : i % 7 == 3 ? kNested : kBack;
      call(method, few, i % 3 == 0 ? Post::defer : Post::automatic);
      if (i % 5 == 0) call(kRefused, few, Post::automatic);
      if (i % 4 == 0) call_full(i);
      if (i % 16 == 1) call_long(i);
      if (i % 11 == 0 && session_.cancel(session_.last_call()) == Status::ok) ++cancelled_;
      zero_cost_test::turn(turns_, client_.engine, server_.engine);
      answer_deferred();
    }
  }
  [[nodiscard]] bool worked() const {
    const auto s = client_.engine.rpc_stats();
    const auto many = [](std::uint64_t count, std::uint32_t least) {
      return count > amount(least);
    };
    EXPECT_TRUE(many(ended_, 10000)) << ended_;
    EXPECT_TRUE(many(refused_, 1000)) << refused_;
    EXPECT_TRUE(many(full_ended_, 1000)) << full_ended_;
    EXPECT_TRUE(many(completed_, 300)) << completed_;
    EXPECT_TRUE(many(long_ended_, 1000)) << long_ended_;
    EXPECT_TRUE(many(deferred_, 1000)) << deferred_;
    EXPECT_TRUE(many(nested_, 1000)) << nested_;
    EXPECT_TRUE(many(cancelled_, 100)) << cancelled_;
    EXPECT_TRUE(many(waited_, 100)) << waited_;
    EXPECT_LT(accepted_ - ended_, 32u);
    EXPECT_EQ(s.retransmitted_requests, 0u);
    EXPECT_EQ(s.bad_datagrams, 0u);
    return !testing::Test::HasFailure();
  }

 private:
  /// Without control steps nothing is retransmitted, so all calls must fit into the lanes.
  static Config manual_config() {
    Config c = long_call_config();
    c.engine.control = ControlMode::manual;
    return c;
  }
  static Session open(Node& from, Node& to) {
    auto made = from.engine.open_session(to.listener.address(), {});
    EXPECT_TRUE(made) << made.error().message();
    return made ? *made : Session();
  }
  void serve(Node& node) {
    Engine& e = node.engine;
    EXPECT_TRUE(e.serve(kBack, [](Request& r) { (void)r.reply(r.bytes()); }));
    EXPECT_TRUE(e.serve(kKept, [this](Request& r) {
      ++kept_turn_;
      if (kept_turn_ % 3 == 0) return static_cast<void>(r.reply(r.keep()));   // the received buffer
      if (kept_turn_ % 3 == 1) return static_cast<void>(r.reply(r.bytes()));  // copied to a block
      (void)r.reply(full_answer_.slice(), [this](Status) { ++completed_; });
    }));
    EXPECT_TRUE(e.serve(kLong, [this](Request& r) {
      ++long_turn_;
      (void)r.reply(long_turn_ % 2 == 0 ? r.keep() : long_answer_.slice());
    }));
    // On some devices, so long a reply would have to be written into the caller's memory.
    EXPECT_TRUE(e.serve(
        kEager, [](Request& r) { (void)r.reply(r.keep().slice(0, r.bytes().size() - 100)); }));
    EXPECT_TRUE(e.serve(kRefused, [this](Request& r) {
      ++refused_turn_;
      (void)(refused_turn_ % 2 == 0 ? r.refuse("not on a Sunday") : r.refuse(7, "nor on a Monday"));
    }));
    EXPECT_TRUE(e.serve(kDeferred,
                        [this](Request& r) { later_[later_end_++ % later_.size()] = r.defer(); }));
    EXPECT_TRUE(e.serve(kNested, [this](Request& r) {
      const PendingCall outer = r.defer();
      const auto pass_on = [this, outer](Reply& reply) {
        nested_ += outer.reply(reply.bytes()) == Status::ok ? 1 : 0;
      };
      if (inner_.call(kBack, r.bytes(), pass_on) != Status::ok) (void)outer.refuse("full");
    }));
  }
  void answer_deferred() {
    for (; later_begin_ != later_end_; ++later_begin_) {
      const PendingCall& call = later_[later_begin_ % later_.size()];
      deferred_ += call.reply(std::span(bytes_.data(), 20)) == Status::ok ? 1 : 0;
    }
  }
  void call(spinwire::Method method, std::span<const std::byte> bytes, Post post) {
    CallOptions options;
    options.post = post;
    const auto done = [this](Reply& r) {
      ++ended_;
      refused_ += r.status() == Status::refused ? 1 : 0;
    };
    const Status status = session_.call(method, bytes, done, options);
    accepted_ += status == Status::ok ? 1 : 0;
    waited_ += client_.engine.rpc_stats().calls - client_.engine.rpc_stats().replies > 8 ? 1 : 0;
  }
  /// A call that just fits into a datagram.
  void call_full(std::uint32_t i) {
    if (full_under_way_ == 2) return;
    const auto done = [this](Reply& r) {
      const BufferSlice kept = r.keep();
      --full_under_way_;
      ++ended_;
      full_ended_ += kept.size() > kSlotPayloadBytes ? 1 : 0;
    };
    if (session_.call(kKept, full_.slice(0, 100 + i * 97 % (full_.size() - 100)), done) !=
        Status::ok) {
      return;
    }
    ++accepted_;
    ++full_under_way_;
  }
  /// A call longer than a datagram: alternately an eager message, and a rendezvous message whose
  /// reply is written into the caller's memory.
  void call_long(std::uint32_t i) {
    if (long_under_way_ == 2) return;
    CallOptions options;
    const bool rendezvous = windows_ && i % 32 == 1 && long_under_way_ == 0;
    if (rendezvous) options.reply_into = long_reply_.slice();
    const auto done = [this](Reply& r) {
      --long_under_way_;
      ++ended_;
      long_ended_ += r.status() == Status::ok ? 1 : 0;
    };
    const std::size_t size = rendezvous ? kLongCall : session_.max_inline_call() + 1;
    if (session_.call(rendezvous ? kLong : kEager, long_.slice(0, size), done, options) !=
        Status::ok) {
      return;
    }
    ++accepted_;
    ++long_under_way_;
  }

  Node server_;
  Node client_;
  zero_cost_test::Turns turns_;
  Session session_;
  Session inner_;  ///< the server's, with the client's engine
  std::array<std::byte, kSlotPayloadBytes> bytes_{};
  Buffer full_;
  Buffer full_answer_;
  bool windows_ = false;
  Buffer long_;
  Buffer long_reply_;
  Buffer long_answer_;
  std::array<PendingCall, 64> later_;
  std::size_t later_begin_ = 0;
  std::size_t later_end_ = 0;
  std::uint32_t kept_turn_ = 0;
  std::uint32_t full_under_way_ = 0;
  std::uint32_t refused_turn_ = 0;
  std::uint32_t long_turn_ = 0;
  std::uint32_t long_under_way_ = 0;
  std::uint64_t accepted_ = 0;
  std::uint64_t ended_ = 0;
  std::uint64_t refused_ = 0;
  std::uint64_t full_ended_ = 0;
  std::uint64_t completed_ = 0;  ///< replies with a callback
  std::uint64_t long_ended_ = 0;
  std::uint64_t deferred_ = 0;
  std::uint64_t nested_ = 0;
  std::uint64_t cancelled_ = 0;
  std::uint64_t waited_ = 0;
};

#if SPINWIRE_TEST_COUNTS_HEAP
TEST(RpcZeroCost, NoHeap) { zero_cost_test::expect_no_heap<CallLoad>(); }

TEST(RpcZeroCost, NoHeapInControlSteps) {
  zero_cost_test::expect_no_heap<CallLoad>(zero_cost_test::Turns::polls_and_control_steps);
}
#endif

TEST(RpcZeroCost, NoSystemCalls) { zero_cost_test::expect_no_system_calls<CallLoad>(); }

}  // namespace
}  // namespace rpc_zero_cost_test
