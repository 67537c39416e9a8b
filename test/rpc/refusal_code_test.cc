// Handlers that refuse calls with a code of the application's own.
#include "base/internals.h"
#include "engine/engine_core.h"
#include "rpc/long_calls.h"
#include "rpc/rpc_ends.h"

namespace rpc_refusal_code_test {
namespace {

using namespace rpc_test;  // NOLINT: a test's helpers

constexpr spinwire::Method kCoded = 20;
constexpr std::size_t kTextMost = kSlotPayloadBytes - 4;

/// The outcomes of a caller.
struct Seen {
  int times = 0;
  Status status = Status::system;
  std::optional<std::uint32_t> code;
  std::string text;
  std::string kept;
};

struct Refusals : Calls {
  explicit Refusals(const Config& c = long_call_config()) : Calls(c) {
    EXPECT_TRUE(server.engine.serve(kCoded, [this](Request& r) {
      EXPECT_EQ(r.refuse(code, text), Status::ok);
      EXPECT_EQ(r.refuse(code, text), Status::not_connected) << "answered once";
    }));
  }
  Status begin_seen(spinwire::Method method, const Bytes& bytes, const CallOptions& options = {}) {
    return session.call(
        method, std::span<const std::byte>(bytes),
        [this](Reply& r) {
          ++seen.times;
          seen.status = r.status();
          const BufferSlice kept = r.keep();
          seen.kept.assign(reinterpret_cast<const char*>(kept.data()), kept.size());
          seen.code = r.code();
          seen.text = std::string(r.text());
        },
        options);
  }
  Seen see(spinwire::Method method, const Bytes& bytes, const CallOptions& options = {}) {
    seen = {};
    EXPECT_EQ(begin_seen(method, bytes, options), Status::ok);
    EXPECT_TRUE(until([&] { return seen.times != 0; }));
    return seen;
  }

  std::uint32_t code = 0;
  std::string text;
  Seen seen;
};

void expect_refused(const Seen& seen, std::optional<std::uint32_t> code, const std::string& text) {
  EXPECT_EQ(seen.times, 1);
  EXPECT_EQ(seen.status, Status::refused);
  EXPECT_EQ(seen.code, code);
  EXPECT_EQ(seen.text, text);
  EXPECT_EQ(seen.kept, text);
}

TEST(RpcRefusalCode, ComesWithTheText) {
  Refusals t;
  const std::string text = "the order book is closed";
  for (const std::uint32_t code : {0u, 7u, 0x81234567u}) {
    t.code = code;
    t.text = text;
    expect_refused(t.see(kCoded, filled(9, 1)), code, text);
    t.text.clear();
    expect_refused(t.see(kCoded, {}), code, "");
  }
  expect_refused(t.see(kRefuse, {}), {}, "not on a Sunday");
  const Seen echoed = t.see(kEcho, filled(9, 1));
  EXPECT_EQ(echoed.status, Status::ok);
  EXPECT_EQ(echoed.code, std::nullopt);
  EXPECT_EQ(t.see(99, {}).code, std::nullopt) << "the library's own refusal";
  t.finish();
}

TEST(RpcRefusalCode, LeavesRoomForFortyFourBytesOfText) {
  Refusals t;
  t.code = 3;
  t.text = std::string(100, 'x');
  expect_refused(t.see(kCoded, {}), 3, std::string(kTextMost, 'x'));
  t.finish();
}

TEST(RpcRefusalCode, ComesForLongCalls) {
  Refusals t;
  t.code = 12;
  t.text = "no such block";
  const Bytes request = filled(100'000, 1);
  expect_refused(t.see(kCoded, request), 12, t.text);
  Buffer into = t.client.engine.allocate(4096, spinwire::Pool::lease);
  CallOptions options;
  options.reply_into = into.slice();
  expect_refused(t.see(kCoded, filled(9, 1), options), 12, t.text);
  expect_refused(t.see(kRefuse, filled(9, 1), options), {}, "not on a Sunday");
  options = {};
  into.reset();
  t.finish();
}

TEST(RpcRefusalCode, ComesFromACallThatIsAnsweredLater) {
  Refusals t;
  ASSERT_EQ(t.begin_seen(kLater, filled(9, 1)), Status::ok);
  ASSERT_TRUE(t.until([&] { return t.later.size() == 1; }));
  const PendingCall call = t.later[0].call;
  EXPECT_EQ(call.refuse(5, "later"), Status::ok);
  EXPECT_EQ(call.refuse(5, "later"), Status::not_connected);
  EXPECT_EQ(PendingCall().refuse(5, "later"), Status::not_connected);
  ASSERT_TRUE(t.until([&] { return t.seen.times != 0; }));
  expect_refused(t.seen, 5, "later");
  t.finish();
}

TEST(RpcRefusalCode, IsKeptFromAClientOfAnOlderRelease) {
  Refusals t;
  auto& calls = *spinwire::detail::core_of(t.server.engine)->calls;
  calls.servers.for_each([](spinwire::rpc::ServerSession& s) {
    EXPECT_TRUE(s.takes_refusal_codes);
    s.takes_refusal_codes = false;
  });
  t.code = 12;
  t.text = "no such block";
  expect_refused(t.see(kCoded, {}), {}, t.text);
  expect_refused(t.see(kCoded, filled(100'000, 1)), {}, t.text);
  t.finish();
}

TEST(RpcRefusalCode, ComesAgainWithARequestThatComesAgain) {
  if (over_connections()) GTEST_SKIP() << "datagrams";
  std::uint64_t ticks = 1;
  Calls t(rpc_config(), &ticks, 1);
  int runs = 0;
  ASSERT_TRUE(t.server.engine.serve(kCoded, [&runs](Request& r) {
    ++runs;
    EXPECT_EQ(r.refuse(9, "closed"), Status::ok);
  }));
  Seen seen;
  ASSERT_EQ(t.session.call(kCoded, filled(9, 1),
                           [&seen](Reply& r) {
                             ++seen.times;
                             seen.status = r.status();
                             seen.code = r.code();
                             seen.text = seen.kept = std::string(r.text());
                           }),
            Status::ok);
  // The server answers, and the client loses the reply: its slot forgets that it was there.
  ASSERT_TRUE(engine_test::until({&t.server}, [&] { return runs == 1; }));
  auto& client = *spinwire::detail::core_of(t.client.engine)->calls;
  client.clients.for_each([](spinwire::rpc::ClientSession& c) {
    for (std::uint32_t slot = 0; slot < c.window; ++slot) c.slots[slot].number ^= 0x40000000;
  });
  ASSERT_TRUE(t.until([&] { return client.stats.late_replies == 1; }));
  client.clients.for_each([](spinwire::rpc::ClientSession& c) {
    for (std::uint32_t slot = 0; slot < c.window; ++slot) c.slots[slot].number ^= 0x40000000;
  });
  t.each_turn = [&] { ticks += 1'000'000; };
  ASSERT_TRUE(t.until([&] { return seen.times != 0; }));
  expect_refused(seen, 9, "closed");
  EXPECT_EQ(runs, 1);
  EXPECT_GE(t.server.engine.rpc_stats().retransmitted_replies, 1u);
  t.finish();
}

}  // namespace
}  // namespace rpc_refusal_code_test
