// A hostile server that names another server's queue pair, session or incarnation. Its client's
// sessions with the other server are not affected.
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "base/internals.h"
#include "control/exchange.h"
#include "control/socket.h"
#include "rpc/bare_engine.h"
#include "rpc/client_session.h"
#include "rpc/server_session.h"

namespace rpc_hostile_server_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers
using spinwire::WhenNotReady;
using spinwire::control::Address;
using spinwire::control::Exchange;
using spinwire::control::ListenSocket;
using spinwire::control::Progress;
using spinwire::wire::FrameKind;
namespace rpc = spinwire::rpc;
namespace wire = spinwire::wire;

constexpr std::uint64_t kMillisecond = 1'000'000;

/// Answers each request for a session as the test says, and each probe as another engine would.
class HostileListener {
 public:
  using Answer = std::function<wire::SessionEnd(const wire::SessionEnd& asked)>;

  [[nodiscard]] std::string address() const { return socket_.local().str(); }
  void poll() {
    auto guest = socket_.accept();
    if (guest && *guest) {
      guests_.emplace_back();
      guests_.back().adopt(std::move((*guest)->fd), (*guest)->peer,
                           wire::kinds(FrameKind::open_session, FrameKind::ready));
    }
    for (Exchange& each : guests_) {
      if (each.state() == Exchange::State::closed || each.state() == Exchange::State::failed)
        continue;
      if (each.advance() == Progress::frame) on_frame(each);
    }
  }

  Answer answer;
  int probes = 0;

 private:
  void on_frame(Exchange& guest) {
    const auto* const asked = std::get_if<wire::OpenSession>(&guest.received().body);
    if (asked == nullptr) {
      ++probes;
      (void)guest.refuse({spinwire::Status::peer_lost});
      return;
    }
    guest.expect(wire::kinds(FrameKind::ready, FrameKind::refuse));
    EXPECT_EQ(guest.send(wire::encode(wire::SessionOpened{answer(asked->end)})), Status::ok);
  }

  ListenSocket socket_ = *ListenSocket::open(*Address::parse("127.0.0.1:0"), 16);
  std::deque<Exchange> guests_;
};

/// A client with a session with an honest server, and one that it opens with a hostile server.
class RpcHostileServer : public testing::Test {
 protected:
  void SetUp() override {
    if (device_name() != "softverbs" || over_connections())
      GTEST_SKIP() << kSoftverbsOnly << "a clock of its own, and datagrams";
    for (auto* each : {&server_, &client_}) *each = std::make_unique<Bare>(rpc_config(), &now_);
    listener_ = server_->core->listen("127.0.0.1:0", {}).value();
    EXPECT_TRUE(server_->core->serve(kEcho, [this](Request& r) {
      ++runs_;
      EXPECT_EQ(r.reply(r.bytes()), Status::ok);
    }));
    honest_ = open(listener_.address());
    ASSERT_TRUE(until([&] { return honest_.ready(); }));
    call_honest();
  }
  Session open(std::string_view address, WhenNotReady when = WhenNotReady::wait) {
    SessionOptions options;
    options.timeout = 200ms;
    options.when_not_ready = when;
    options.on_closed = [this](Session, const Error& e) { closed_.push_back(e); };
    return client_->core->open_session(address, options).value();
  }
  template <typename Done>
  bool until(Done&& done, std::uint64_t step = 10'000) {
    return engine_test::until({}, [&] {
      now_ += step;
      hostile_.poll();
      for (const auto* each : {&helper_, &server_, &client_})
        if (*each != nullptr) (void)(*each)->core->poll();
      return done();
    });
  }
  void rest(std::chrono::milliseconds time) {
    const std::uint64_t end = now_ + static_cast<std::uint64_t>(time.count()) * kMillisecond;
    ASSERT_TRUE(until([&] { return now_ >= end; }, kMillisecond));
  }
  /// Begins as many calls as the window has.
  void begin(Session& session, std::vector<Status>& ended) {
    for (std::uint32_t i = 0; i < rpc_config().rpc.window; ++i)
      ASSERT_EQ(session.call(kEcho, std::span<const std::byte>(),
                             [&ended](Reply& r) { ended.push_back(r.status()); }),
                Status::ok);
  }
  /// Calls of the session with the honest server are answered.
  void call_honest() {
    const std::size_t before = answered_.size();
    const std::uint32_t calls = rpc_config().rpc.window;
    begin(honest_, answered_);
    ASSERT_TRUE(until([&] { return answered_.size() == before + calls; }));
    EXPECT_EQ(answered_, std::vector<Status>(answered_.size(), Status::ok));
    EXPECT_EQ(static_cast<std::size_t>(runs_), answered_.size());
  }
  [[nodiscard]] rpc::ClientSession& record_of(const Session& session) const {
    return *rpc::find_client(*client_->core->calls, spinwire::detail::Internals::name(session));
  }
  [[nodiscard]] std::uint32_t served() const {
    return rpc::stats(*server_->core->calls).served_sessions;
  }
  void drop_all(const Bare& from, bool drops) const {
    spinwire::softverbs::FaultPlan plan;
    if (drops) plan.drop = 1;
    from.set(plan);
  }
  void expect_clean() const {
    for (const auto* each : {&client_, &server_, &helper_})
      if (*each != nullptr) (*each)->expect_clean();
  }

  std::uint64_t now_ = 1'000'000'000;
  // Used by the engines' destructors, too.
  std::vector<Status> answered_, ended_;
  std::vector<Error> closed_;
  int runs_ = 0;
  HostileListener hostile_;
  std::unique_ptr<Bare> server_, client_, helper_;
  Listener listener_;
  Session honest_;
};

// The first call number is random, and a request runs a handler only if it is ahead of its slot. So
// the attack is made more than once.
TEST_F(RpcHostileServer, ThatNamesASessionOfAnotherServerGetsNoCallRunThere) {
  constexpr std::size_t kAttacks = 16;
  hostile_.answer = [&](const wire::SessionEnd& asked) {
    wire::SessionEnd end = rpc::local_session_end(
        *server_->core->calls, record_of(honest_).peer_session, asked.window, asked.first);
    end.token = 5;  // the other server's is unknown
    return end;
  };
  for (std::size_t i = 0; i < kAttacks; ++i) {
    Session misled = open(hostile_.address());
    begin(misled, ended_);
    EXPECT_TRUE(until(
        [&] {
          EXPECT_FALSE(misled.ready());
          return closed_.size() == i + 1;
        },
        kMillisecond / 10));
    ASSERT_EQ(closed_.size(), i + 1);
    EXPECT_EQ(closed_[i].status, Status::timed_out);
    EXPECT_NE(closed_[i].found.find("no datagram"), std::string::npos) << closed_[i].message();
    ASSERT_NO_FATAL_FAILURE(call_honest()) << i;
  }
  EXPECT_EQ(ended_, std::vector<Status>(ended_.size(), Status::not_connected));
  EXPECT_EQ(ended_.size(), kAttacks * rpc_config().rpc.window);
  EXPECT_GE(rpc::stats(*server_->core->calls).bad_datagrams, kAttacks) << "it was never asked";
  expect_clean();
}

// What is asked there comes at a queue pair that has not agreed to it.
TEST_F(RpcHostileServer, HasItsClientAskFewTimesHoweverManyCallsEndMeanwhile) {
  hostile_.answer = [&](const wire::SessionEnd& asked) {
    wire::SessionEnd end = rpc::local_session_end(
        *server_->core->calls, record_of(honest_).peer_session, asked.window, asked.first);
    end.token = 5;
    return end;
  };
  Session misled = open(hostile_.address());
  const std::uint64_t before = rpc::stats(*server_->core->calls).bad_datagrams;
  std::uint64_t next_call = 0;
  EXPECT_TRUE(until(
      [&] {
        if (now_ < next_call) return !closed_.empty();
        next_call = now_ + kMillisecond;
        spinwire::CallOptions options;
        options.timeout = 1ms;
        const Status status = misled.call(
            kEcho, std::span<const std::byte>(), [this](Reply& r) { ended_.push_back(r.status()); },
            options);
        EXPECT_TRUE(status == Status::ok || !closed_.empty());
        return !closed_.empty();
      },
      kMillisecond / 10));
  EXPECT_GT(ended_.size(), 100u);
  const std::uint64_t asked = rpc::stats(*server_->core->calls).bad_datagrams - before;
  EXPECT_GE(asked, 3u);
  EXPECT_LE(asked, 20u);
  expect_clean();
}

TEST_F(RpcHostileServer, ALostProofIsAskedForAgain) {
  const std::uint32_t before = served();
  Session late = open(listener_.address(), WhenNotReady::fail);
  ASSERT_TRUE(until([&] { return record_of(late).peer_address != nullptr || late.ready(); }));
  drop_all(*server_, true);
  const std::uint64_t from = now_;
  ASSERT_TRUE(until([&] { return now_ - from > 50 * kMillisecond; }, kMillisecond / 10));
  EXPECT_EQ(late.state(), SessionState::opening);
  EXPECT_EQ(late.call(kEcho, std::span<const std::byte>(), [](Reply&) {}), Status::not_connected);
  drop_all(*server_, false);
  ASSERT_TRUE(until([&] { return late.ready(); }, kMillisecond / 10));
  begin(late, ended_);
  ASSERT_TRUE(until([&] { return ended_.size() == rpc_config().rpc.window; }));
  EXPECT_EQ(ended_, std::vector<Status>(ended_.size(), Status::ok));
  EXPECT_EQ(late.close(), Status::ok);
  ASSERT_TRUE(until([&] { return served() == before; }));
  expect_clean();
}

// A malformed answer sets the tick of its poll's begin, which may be before the first ping. The
// test sets that tick itself.
TEST_F(RpcHostileServer, AnAnswerBeforeTheFirstPingDoesNotDelayTheNext) {
  Session late = open(listener_.address(), WhenNotReady::fail);
  ASSERT_TRUE(until([&] { return record_of(late).peer_address != nullptr || late.ready(); }));
  drop_all(*server_, true);
  rpc::ClientSession& c = record_of(late);
  ASSERT_TRUE(rpc::awaits_proof(c));
  const rpc::ServerSession* const s = rpc::find_server(*server_->core->calls, c.peer_session);
  ASSERT_NE(s, nullptr);
  c.liveness.last_ping_or_close = c.liveness.last_check - 1;
  std::uint64_t heard = s->liveness.last_ping_or_close;
  const auto hears_ping = [&] { return s->liveness.last_ping_or_close > heard; };
  ASSERT_TRUE(until(hears_ping));
  heard = s->liveness.last_ping_or_close;
  ASSERT_TRUE(until(hears_ping));
  EXPECT_LE(s->liveness.last_ping_or_close - heard, 2 * client_->core->calls->min_rto);
  drop_all(*server_, false);
  ASSERT_TRUE(until([&] { return late.ready(); }, kMillisecond / 10));
  expect_clean();
}

TEST_F(RpcHostileServer, AServerWhoseProofIsAwaitedHearsTheClose) {
  const std::uint32_t before = served();
  Session brief = open(listener_.address());
  ASSERT_TRUE(until([&] {
    if (brief.state() != SessionState::opening) return true;
    return record_of(brief).peer_address != nullptr;
  }));
  ASSERT_EQ(brief.state(), SessionState::opening);
  EXPECT_EQ(served(), before + 1);
  EXPECT_EQ(brief.close(), Status::ok);
  ASSERT_TRUE(until([&] { return closed_.size() == 1; }));
  EXPECT_EQ(closed_[0].status, Status::ok) << closed_[0].message();
  EXPECT_EQ(served(), before);
  call_honest();
  expect_clean();
}

TEST_F(RpcHostileServer, ThatClaimsTheIncarnationOfAnotherOneDoesNotSpeakForIt) {
  helper_ = std::make_unique<Bare>(rpc_config(), &now_);  // the hostile server's queue pair
  ASSERT_TRUE(helper_->core->serve(kEcho, [](Request&) {}));
  hostile_.answer = [&](const wire::SessionEnd& asked) {
    rpc::Rpc& calls = *helper_->core->calls;
    rpc::ServerSession* const s =
        rpc::accept_session(calls, asked, rpc::acquire_peer_address(calls, asked).value(),
                            *Address::parse("127.0.0.1:1"));
    wire::SessionEnd end = rpc::local_session_end(calls, s->name, asked.window, asked.first);
    end.token = s->token = 5;
    end.incarnation = server_->core->context.incarnation;
    return end;
  };
  Session misled = open(hostile_.address());
  ASSERT_TRUE(until([&] { return misled.ready(); }));
  call_honest();
  drop_all(*helper_, true);
  drop_all(*server_, true);
  ASSERT_TRUE(until([&] { return hostile_.probes != 0 && !closed_.empty(); }, kMillisecond));
  EXPECT_EQ(misled.state(), SessionState::closed);
  EXPECT_NE(closed_[0].found.find("next incarnation"), std::string::npos) << closed_[0].message();
  rest(1000ms);
  EXPECT_EQ(closed_.size(), 1u);
  EXPECT_TRUE(honest_.ready()) << "its server was asked at another address";
  drop_all(*server_, false);
  call_honest();
  expect_clean();
}

}  // namespace
}  // namespace rpc_hostile_server_test
