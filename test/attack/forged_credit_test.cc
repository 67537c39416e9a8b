// A client has found the credit cell of another client's connection, and writes words of its own
// there. The other connection must neither end, nor overrun, nor stand still. On softverbs the
// device refuses, and the attacker's own connection ends; then it connects again. On an adapter the
// words arrive.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "base/internals.h"
#include "engine/engine_core.h"
#include "engine/harness.h"
#include "wire/credit_word.h"

namespace attack_test::forged_credit {
namespace {

using namespace engine_test;  // NOLINT: a test's helpers
namespace wire = spinwire::wire;

class AttackOnCredit : public testing::Test {
 protected:
  AttackOnCredit() {
    victim_.listen();
    honest_ = connect(honest_node_, victim_);
    const auto& context = spinwire::detail::core_of(victim_.engine)->context;
    const auto& cell = context.agents.at(0).own_cell.region;
    cell_ = {cell.address, sizeof(std::uint64_t), cell.rkey, Access::remote_write};
    victim_.on_message = [](Connection from, Message& m) { (void)from.send(m.take()); };
    attacker_ = connect(attacker_node_, victim_);
  }
  template <typename Done>
  [[nodiscard]] bool until(Done&& done) {
    return engine_test::until({&victim_, &honest_node_, &attacker_node_}, done);
  }
  /// Sends a message to the victim, which sends it back.
  void talk() {
    const std::uint64_t before = honest_node_.messages;
    const Buffer b = honest_node_.filled(100, 1);
    ASSERT_TRUE(until([&] { return honest_.client.send(b) == Status::ok; }));
    ASSERT_TRUE(until([&] { return honest_node_.messages == before + 1; }));
  }
  /// Overwrites bytes of the cell. False: the device has refused, and the attacker has connected
  /// again.
  [[nodiscard]] bool forge(std::uint64_t word, std::size_t offset, std::size_t bytes) {
    const Buffer b = attacker_node_.buffer(bytes);
    std::memcpy(b.data(), &word, bytes);
    Status ended = Status::system;
    bool over = false;
    const auto done = [&](const Completion& c) {
      ended = c.status;
      over = true;
    };
    EXPECT_EQ(attacker_.client.write(b.slice(), cell_.slice(offset, bytes), done), Status::ok);
    EXPECT_TRUE(until([&] { return over; }));
    if (ended == Status::ok) return true;
    EXPECT_TRUE(until([&] { return attacker_.client.state() == ConnectionState::closed; }));
    attacker_ = connect(attacker_node_, victim_);
    return false;
  }

  Node victim_{small_config()};
  Node honest_node_{small_config()};
  Node attacker_node_{small_config()};
  Ends honest_;
  Ends attacker_;
  RemoteRegion cell_;
};

TEST_F(AttackOnCredit, ForgedWordsHarmNoOther) {
  talk();
  std::vector<std::uint64_t> words{0, ~std::uint64_t{0}};
  for (std::uint32_t token = 1; token <= 32; ++token)
    words.push_back(wire::encode({100'000 * token, static_cast<std::uint8_t>(token)}, token));
  std::uint32_t tried = 0, written = 0;
  for (const std::uint64_t word : words) {
    for (const auto& [offset, bytes] :
         {std::pair<std::size_t, std::size_t>{0, 8}, {0, 3}, {4, 4}}) {
      if (forge(word, offset, bytes)) ++written;
      ++tried;
      ASSERT_NO_FATAL_FAILURE(talk());
    }
  }
  EXPECT_EQ(tried, 3 * words.size());
  EXPECT_EQ(written, on_softverbs() ? 0 : tried) << "0: no attack, or the device has refused";
  EXPECT_TRUE(honest_.client.ready() && honest_.server.ready());
  // More messages than the credit of the beginning: what is granted still arrives.
  for (int i = 0; i < 300; ++i) ASSERT_NO_FATAL_FAILURE(talk());
  const auto audit = victim_.engine.audit();
  EXPECT_TRUE(audit) << audit.error().message();
}

}  // namespace
}  // namespace attack_test::forged_credit
