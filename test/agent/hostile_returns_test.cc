// A peer that returns credit while the engine lacks receives.
#include <vector>

#include "agent/credit.h"
#include "agent/hostile_peer.h"

namespace hostile_returns_test {
namespace {

using namespace hostile_peer;  // NOLINT: a test's helpers

/// An engine whose application keeps what the peer sends.
struct Hoarding : Attacked {
  Hoarding() {
    node.on_message = [this](Connection from, Message& m) {
      if (from == honest.server) return (void)from.send(m.take());
      ++delivered;
      kept.push_back(m.take());
    };
  }
  [[nodiscard]] bool lacks_receives() {
    auto& context = spinwire::detail::core_of(node.engine)->context;
    const auto* const a = spinwire::agent::find_by_qpn(context, victim.endpoint()->qp_num);
    return a != nullptr && spinwire::agent::has_receive_shortage(context, *a);
  }
  /// The credits that the peer knows of.
  [[nodiscard]] std::uint32_t credits() { return peer.granted() - sent; }
  void say(std::uint8_t flags = 0) {
    EXPECT_TRUE(peer.send(header(1, flags, 4, 4)));
    ++sent;
  }
  /// Messages come until receives are missing. Then the peer still has credits.
  void use_up_receives() {
    begin();
    sent = 0;
    constexpr std::uint32_t kFew = 8;
    while (!lacks_receives()) {
      // Seldom, so that there are grants that the peer does not know of.
      const bool asks = credits() < kFew;
      say(asks ? wire::message_flag::kWantCredit : 0);
      ASSERT_TRUE(until(
          [&] { return delivered == sent && (!asks || lacks_receives() || credits() >= kFew); }));
    }
    settle();
    ASSERT_TRUE(lacks_receives());
    ASSERT_GT(credits(), 1u);
  }
  void expect_sound() {
    const auto audit = node.engine.audit();
    EXPECT_TRUE(audit) << audit.error().message();
  }

  std::vector<Buffer> kept;
  std::uint32_t sent = 0;
};

TEST_F(HostilePeer, CreditIsReturnedWhileReceivesAreMissing) {
  Hoarding t;
  constexpr auto kReturn = static_cast<std::uint8_t>(wire::MessageKind::credit_return);
  enum class Then { has_none, gets_more, returned_too_much };
  for (const Then then : {Then::has_none, Then::gets_more, Then::returned_too_much}) {
    SCOPED_TRACE(static_cast<int>(then));
    t.use_up_receives();
    const std::uint32_t told = t.peer.granted();
    const std::uint32_t all = t.credits() - 1;  // the return uses one
    const bool is_too_much = then == Then::returned_too_much;
    ASSERT_TRUE(t.peer.send(header(kReturn, 0, is_too_much ? all + 1 : all, 0)));
    if (!is_too_much) {
      t.settle();
      EXPECT_TRUE(t.victim.ready());
      t.expect_sound();
      EXPECT_EQ(t.peer.granted(), told) << "there is no receive for it";
    }
    if (then == Then::gets_more) {
      t.kept.clear();
      ASSERT_TRUE(t.until([&] { return t.peer.granted() > told; }));
      t.say();
      ASSERT_TRUE(t.until([&] { return t.delivered == t.sent; }));
      t.kept.clear();
      (void)t.victim.close();
      t.expect_ended(Status::ok, "", 0);
      continue;
    }
    if (then == Then::has_none) t.say();
    ASSERT_TRUE(t.until([&] { return !t.node.closed.empty(); }));
    EXPECT_EQ(t.delivered + (is_too_much ? 0 : 1), t.sent);
    t.expect_sound();
    t.kept.clear();
    t.expect_refused(kNoHeader);
  }
  t.finish();
}

}  // namespace
}  // namespace hostile_returns_test
