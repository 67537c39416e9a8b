// Messages that are held behind one that cannot be read yet, and ask for credit.
#include <string>
#include <vector>

#include "agent/besieged.h"
#include "agent/credit.h"

namespace held_messages_test {
namespace {

using namespace hostile_peer;  // NOLINT: a test's helpers

/// An engine with no memory for long messages, except for those of its honest peer.
struct Withholding : Besieged {
  explicit Withholding(const Config& c) : Besieged(c) {
    while (Buffer each = node.engine.allocate(kLongest, Pool::rendezvous))
      taken.push_back(std::move(each));
    for (int i = 0; i < 2; ++i) places.push_back(node.buffer(200'000));
    node.on_offer = [this](Connection from, Offer& offer) {
      if (from != honest.server) return;
      EXPECT_EQ(offer.place(places.at(placed++).slice()), Status::ok);
    };
    node.on_message = [this](Connection from, Message&) {
      ++(from == honest.server ? honest_ones : hostile_ones);
    };
  }
  void expect_sound() {
    const auto audit = node.engine.audit();
    ASSERT_TRUE(audit) << audit.error().message();
  }
  /// Sends a message that asks for credit, if the peer has some: an offer, or a short one.
  static bool ask(Stranger& s, std::uint32_t& sent, bool offers) {
    if (s.peer.granted() <= sent) return false;
    const auto offer = wire::encode(s.peer.local_offer(20'000, sent));
    const auto body = std::span<const std::byte>(offer);
    if (!s.peer.send(message(offers ? MessageKind::local_offer : MessageKind::data, body,
                             wire::message_flag::kWantCredit)))
      return false;
    ++sent;
    return true;
  }
  /// Asks until nothing has come of it for a while.
  void ask_all(Stranger& s, std::uint32_t& sent) {
    int vain = 0;
    ASSERT_TRUE(until([&] {
      vain = ask(s, sent, sent % 2 == 0) ? 0 : vain + 1;
      EXPECT_NO_FATAL_FAILURE(expect_sound());
      return vain == 300 || testing::Test::HasFailure();
    }));
  }
  void finish() {
    taken.clear();
    places.clear();
    leave();
  }

  std::vector<Buffer> taken, places;
  std::size_t placed = 0;
  std::uint32_t honest_ones = 0, hostile_ones = 0;
};

class HostileHeldMessages : public BesiegedEngine, public testing::WithParamInterface<bool> {
 protected:
  static Config config() {
    Config c = hostile_config();
    if (!GetParam()) return c;
    c.queues.shared_receive_queue = SharedReceiveQueue::off;
    c.queues.receive_depth = 1024;
    c.memory.receive_bytes = 8u << 20;
    c.connections.maximum = 16;
    return c;
  }
};
INSTANTIATE_TEST_SUITE_P(Of, HostileHeldMessages, testing::Bool(),
                         [](const auto& of) { return of.param ? "OwnQueues" : "ASharedQueue"; });

TEST_P(HostileHeldMessages, AFloodOfThemGetsNoMoreThanItsCredits) {
  Withholding t(config());
  Stranger& s = t.add();
  std::uint32_t sent = 0;
  ASSERT_NO_FATAL_FAILURE(t.ask_all(s, sent));
  EXPECT_GT(sent, 8u);
  EXPECT_LE(s.peer.granted(), t.agent_of(s).attributes.credits);
  EXPECT_EQ(t.hostile_ones, 0u);
  EXPECT_TRUE(s.victim.ready());
  // Long messages of another connection, and one behind them.
  Buffer message = t.friendly.filled(150'000, 1);
  for (const std::size_t size : {std::size_t{150'000}, std::size_t{150'000}, std::size_t{9}}) {
    ASSERT_TRUE(
        t.until([&] { return t.honest.client.send(message.slice(0, size)) == Status::ok; }));
  }
  ASSERT_TRUE(t.until([&] { return t.honest_ones == 3; }));
  EXPECT_EQ(t.placed, 2u);
  EXPECT_TRUE(s.victim.ready());
  ASSERT_NO_FATAL_FAILURE(t.expect_sound());
  message.reset();
  t.finish();
}

class HostileShortReceives : public BesiegedEngine {};

TEST_F(HostileShortReceives, AreNotTakenFromMessagesThatAreHeld) {
  Config c = hostile_config();
  c.queues.receive_depth = 128;
  Withholding t(c);
  std::vector<std::uint32_t> sent(4);
  for (std::size_t i = 0; i < sent.size(); ++i) (void)t.add();
  ASSERT_TRUE(t.until([&] {
    for (std::size_t i = 0; i < sent.size(); ++i)
      (void)Withholding::ask(*t.strangers[i], sent[i], false);
    return t.context().reservations_refused;
  }));
  t.settle();
  Stranger& s = *t.strangers[0];
  const auto& a = t.agent_of(s);
  // With each connection a fair share is less.
  while (a.credit.reserved <= t.context().yield_above && t.strangers.size() < 40) (void)t.add();
  ASSERT_GT(a.credit.reserved, t.context().yield_above);
  const std::uint32_t kept = a.credit.reserved;
  for (std::uint32_t held = 1; held <= 6; ++held) {
    ASSERT_TRUE(Withholding::ask(s, sent[0], held == 1));
    ASSERT_TRUE(t.until([&] { return a.rendezvous.credited == held; }));
    EXPECT_EQ(a.credit.reserved + held, kept);
    ASSERT_NO_FATAL_FAILURE(t.expect_sound());
  }
  t.finish();
}

}  // namespace
}  // namespace held_messages_test
