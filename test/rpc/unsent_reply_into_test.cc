// Long calls that name memory for their reply, and are never sent: how they end, and that the
// memory is the application's again, as it was.
#include <algorithm>

#include "rpc/leaving_server.h"

namespace rpc_session_reconnect_test {
namespace {

/// Where a call waits: for the session, for its connection, or behind other long calls.
enum class Place : std::uint8_t { opening, connecting, backlog };
enum class Kind : std::uint8_t { ends, reconnects, reconnects_and_waits };

struct Case {
  Place place;
  Kind kind;
  RpcTransport transport;
};

constexpr std::byte kUntouched{0x5a};
constexpr std::size_t kLong = 60'000;

class RpcUnsentReplyInto : public RpcSessionReconnect, public testing::WithParamInterface<Case> {
 protected:
  void SetUp() override {
    RpcSessionReconnect::SetUp();
    if (IsSkipped()) return;
    ASSERT_NO_FATAL_FAILURE(begin_call());
  }
  void begin_session() {
    start("127.0.0.1:0", over(GetParam().transport, reconnect_config()));
    const bool again = GetParam().kind != Kind::ends;
    SessionOptions how = options(again ? Reconnect{2, 10ms, 20ms} : Reconnect{});
    how.when_not_ready =
        GetParam().kind == Kind::reconnects_and_waits ? WhenNotReady::wait : WhenNotReady::fail;
    how.window = 2;
    how.timeout = 1s;
    if (GetParam().place != Place::opening) return open(how);
    hung_ = std::move(server_);
    session_ = client_->core->open_session(address_, how).value();
  }
  /// Begins a call that is not sent: its server polls no more.
  void begin_call() {
    ASSERT_NO_FATAL_FAILURE(begin_session());
    if (GetParam().place == Place::backlog) {
      ASSERT_EQ(begin(kCount, filled(kLong, 0)), Status::ok);
      ASSERT_TRUE(until([&] { return all_ended(); }));  // there is a connection
      runs_.clear();
    }
    if (server_ != nullptr) hung_ = std::move(server_);
    if (GetParam().place == Place::backlog) {
      for (std::uint32_t i = 1; record().connection->backlog_count == 0; ++i)
        ASSERT_EQ(begin(kCount, filled(kLong, i)), Status::ok);
    }
    spinwire::detail::Block* const block =
        client_->core->context.arena->allocate(spinwire::memory::PoolId::send, kLong);
    memory_ = spinwire::detail::make<Buffer>(block, kLong);
    std::fill_n(memory_.data(), kLong, kUntouched);
    CallOptions into;
    into.timeout = 5s;
    into.reply_into = memory_.slice();
    if (GetParam().place == Place::opening) into.when_not_ready = WhenNotReady::wait;
    const auto done = [this](Reply& r) {
      ++call_.times;
      call_.status = r.status();
      call_.bytes = bytes_of(r.bytes());
    };
    ASSERT_EQ(session_.call(kCount, std::span<const std::byte>(request_), done, into, &id_),
              Status::ok);
    into = {};
    EXPECT_FALSE(memory_.unique()) << "the library holds it";
  }
  bool until_call_ends() {
    return until([&] { return call_.times != 0; }, kMillisecond / 10);
  }
  /// The call has ended so, without a word from a server, and the memory was not touched.
  void expect_end(Status status) {
    ASSERT_TRUE(until_call_ends());
    EXPECT_EQ(to_string(call_.status), to_string(status));
    EXPECT_TRUE(call_.bytes.empty());
    expect_release();
    const auto* const data = memory_.data();
    EXPECT_TRUE(std::all_of(data, data + kLong, [](std::byte b) { return b == kUntouched; }));
    EXPECT_EQ(runs_.count(request_), 0u);
  }
  /// The library lets go of the memory in the poll() that runs the callback, and runs it once.
  void expect_release() {
    EXPECT_TRUE(memory_.unique());
    for (int i = 0; i < 100; ++i) turn(kMillisecond / 10);
    EXPECT_EQ(call_.times, 1);
    client_->expect_clean();
  }
  /// The server dies, or the session cannot be opened.
  void drop_server() {
    if (GetParam().place == Place::opening) return hung_.reset();
    server_ = std::move(hung_);
    kill();
  }
  /// After a loss, another server has run the call.
  void expect_reply() {
    ASSERT_TRUE(until([&] { return !interrupted_.empty(); }, kMillisecond));
    EXPECT_EQ(call_.times, 0);
    EXPECT_FALSE(memory_.unique());
    start(address_, over(GetParam().transport, reconnect_config()));
    ASSERT_TRUE(until_call_ends());
    EXPECT_EQ(to_string(call_.status), to_string(Status::ok));
    EXPECT_EQ(call_.bytes, request_);
    EXPECT_TRUE(std::equal(request_.begin(), request_.end(), memory_.data()));
    expect_release();
    EXPECT_EQ(runs_.count(request_), 1u);
  }
  [[nodiscard]] bool waits_for_next() const {
    return GetParam().place != Place::opening && GetParam().kind == Kind::reconnects_and_waits;
  }

  const Bytes request_ = filled(1500, 77);
  Ended call_;
  CallId id_;
  Buffer memory_;
  std::unique_ptr<Server> hung_;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Place place : {Place::opening, Place::connecting, Place::backlog}) {
    for (const Kind kind : {Kind::ends, Kind::reconnects, Kind::reconnects_and_waits}) {
      for (const RpcTransport by : {RpcTransport::automatic, RpcTransport::connection}) {
        // A session over a connection is ready when that is.
        if (place != Place::connecting || by == RpcTransport::automatic)
          all.push_back({place, kind, by});
      }
    }
  }
  return all;
}

std::string name_of(const testing::TestParamInfo<Case>& of) {
  static constexpr const char* kPlaces[] = {"Opening", "Connecting", "Backlog"};
  static constexpr const char* kKinds[] = {"Ends", "Reconnects", "Waits"};
  return std::string(kPlaces[static_cast<int>(of.param.place)]) +
         kKinds[static_cast<int>(of.param.kind)] +
         (of.param.transport == RpcTransport::automatic ? "Automatic" : "Connection");
}

INSTANTIATE_TEST_SUITE_P(Cases, RpcUnsentReplyInto, testing::ValuesIn(cases()), name_of);

TEST_P(RpcUnsentReplyInto, Cancelled) {
  EXPECT_EQ(session_.cancel(id_), Status::ok);
  EXPECT_EQ(call_.times, 0) << "no callback runs inside cancel()";
  expect_end(Status::cancelled);
}

TEST_P(RpcUnsentReplyInto, OutOfTime) {
  if (GetParam().place == Place::opening) GTEST_SKIP() << "the session's time is over before";
  expect_end(Status::timed_out);
}

TEST_P(RpcUnsentReplyInto, OfASessionThatIsClosed) {
  EXPECT_EQ(session_.close(), Status::ok);
  EXPECT_EQ(call_.times, 0) << "no callback runs inside close()";
  expect_end(Status::flushed);
}

TEST_P(RpcUnsentReplyInto, OfASessionThatIsLost) {
  drop_server();
  if (waits_for_next()) return expect_reply();
  // A session that was ready, and is not opened again, ends all of its calls alike.
  const bool ends_ready = GetParam().place != Place::opening && GetParam().kind == Kind::ends;
  expect_end(ends_ready ? Status::peer_lost : Status::not_connected);
}

TEST_P(RpcUnsentReplyInto, OfASessionThatTheServerCloses) {
  if (GetParam().place != Place::connecting) GTEST_SKIP() << "see RpcRefusedCalls";
  server_ = std::move(hung_);
  server_->engine.core->end();
  server_.reset();
  if (waits_for_next()) return expect_reply();
  expect_end(GetParam().kind == Kind::ends ? Status::flushed : Status::not_connected);
}

TEST_P(RpcUnsentReplyInto, OfAnEngineThatIsDestroyed) {
  client_->core->end();
  ASSERT_EQ(call_.times, 1);
  EXPECT_EQ(to_string(call_.status), to_string(Status::flushed));
  EXPECT_TRUE(call_.bytes.empty());
  EXPECT_TRUE(memory_.unique());
  EXPECT_EQ(runs_.count(request_), 0u);
  memory_ = {};
}

}  // namespace
}  // namespace rpc_session_reconnect_test
