// Ten thousand sessions between two engines: their memory, and that each works.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstring>
#include <random>
#include <vector>

#include "engine/zero_cost.h"
#include "rpc/rpc_ends.h"

namespace rpc_many_sessions_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using zero_cost_test::armed;
using zero_cost_test::heap_bytes;

/// Limits descriptors to fewer than sessions, during its lifetime.
class FewDescriptors {
 public:
  explicit FewDescriptors(rlim_t more) {
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &before_), 0);
    const rlimit few{std::min<rlim_t>(open_descriptors() + more, before_.rlim_cur),
                     before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  }
  FewDescriptors(const FewDescriptors&) = delete;
  FewDescriptors& operator=(const FewDescriptors&) = delete;
  ~FewDescriptors() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

class ManySessions {
 public:
  explicit ManySessions(std::uint32_t count) : server_(config(count)), client_(config(count)) {
    heap_bytes = 0;
    armed = SPINWIRE_TEST_COUNTS_HEAP != 0;
    server_.listen();
    EXPECT_TRUE(server_.engine.serve(kEcho, [](Request& r) { (void)r.reply(r.bytes()); }));
    sessions_.reserve(count);
    descriptors_ = open_descriptors();
    const FewDescriptors few(64);
    while (sessions_.size() < count && open_one()) {
    }
    EXPECT_TRUE(until({&client_, &server_}, [&] { return ready_ == count; }));
    armed = false;
  }
  /// Calls on random sessions, several at once, and checks each reply.
  void call(std::uint32_t times) {
    std::uint32_t under_way = 0;
    for (std::uint32_t i = 0; i < times; ++i) {
      ASSERT_TRUE(until({&client_, &server_}, [&] { return under_way < 32; }));
      const std::uint64_t number = random_();
      Session& s = sessions_[i < sessions_.size() ? i : number % sessions_.size()];
      ++under_way;
      ASSERT_EQ(s.call(kEcho, std::as_bytes(std::span(&number, 1)),
                       [this, &under_way, number](Reply& r) {
                         --under_way;
                         std::uint64_t answer = 0;
                         if (r.bytes().size() == sizeof answer)
                           std::memcpy(&answer, r.bytes().data(), sizeof answer);
                         right_ += answer == number ? 1 : 0;
                       }),
                Status::ok);
    }
    ASSERT_TRUE(until({&client_, &server_}, [&] { return under_way == 0; }));
    EXPECT_EQ(right_, times);
  }
  void close() {
    for (Session& s : sessions_) EXPECT_EQ(s.close(), Status::ok);
    EXPECT_TRUE(until(
        {&client_, &server_},
        [&] {
          return client_.engine.rpc_stats().sessions == 0 &&
                 server_.engine.rpc_stats().served_sessions == 0;
        },
        600s));
    client_.expect_clean();
    server_.expect_clean();
  }
  void expect_frugal() {
    EXPECT_EQ(server_.engine.rpc_stats().served_sessions, sessions_.size());
    // The last exchanges end when their clients have confirmed.
    EXPECT_TRUE(until({&client_, &server_}, [&] { return open_descriptors() <= descriptors_ + 2; }))
        << open_descriptors() << " descriptors, " << descriptors_ << " before";
#if SPINWIRE_TEST_COUNTS_HEAP
    const auto each = heap_bytes / static_cast<std::int64_t>(sessions_.size());
    testing::Test::RecordProperty("bytes_of_a_session", static_cast<int>(each));
    EXPECT_LE(each, 4096) << "bytes of a session, both ends together";
    EXPECT_GT(each, 256) << "the counter does not count";
#endif
  }

 private:
  static Config config(std::uint32_t count) {
    Config c = rpc_config();
    c.rpc.sessions = count;
    return c;
  }
  bool open_one() {
    SessionOptions options;
    options.on_ready = [this](Session) { ++ready_; };
    options.on_closed = [](Session, const Error& e) {
      EXPECT_EQ(e.status, Status::ok) << e.message();
    };
    auto made = client_.engine.open_session(server_.listener.address(), options);
    EXPECT_TRUE(made) << made.error().message();
    if (!made) return false;
    sessions_.push_back(*made);
    const bool came = until({&client_, &server_}, [&] { return sessions_.size() - ready_ < 8; });
    EXPECT_TRUE(came);
    return came;
  }

  std::vector<Session> sessions_;
  std::uint32_t ready_ = 0;
  std::uint32_t right_ = 0;
  std::size_t descriptors_ = 0;
  std::mt19937_64 random_{7};
  Node server_;
  Node client_;
};

TEST(SlowRpcSessions, TenThousandAreFrugalAndAllGoOn) {
  ManySessions many(amount(10000));
  many.expect_frugal();
  many.call(amount(50000));
  many.close();
}

}  // namespace
}  // namespace rpc_many_sessions_test
