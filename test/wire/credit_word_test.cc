#include "wire/credit_word.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "base/random.h"

namespace credit_word_test {
namespace {

using spinwire::wire::CreditWord;
using spinwire::wire::decode_credit_word;
using spinwire::wire::encode;
using spinwire::wire::is_genuine;

TEST(CreditWords, SayWhatWasWritten) {
  for (const std::uint32_t granted : {0u, 1u, 0x1234u, 0xffffffu}) {
    for (const std::uint8_t sequence : {std::uint8_t{0}, std::uint8_t{7}, std::uint8_t{255}}) {
      const std::uint64_t word = encode(CreditWord{granted, sequence}, 0x51de);
      EXPECT_TRUE(is_genuine(word, 0x51de));
      EXPECT_EQ(decode_credit_word(word).granted, granted);
      EXPECT_EQ(decode_credit_word(word).sequence, sequence);
    }
  }
  EXPECT_EQ(decode_credit_word(encode(CreditWord{0x2000001, 0}, 1)).granted, 1u);
}

TEST(CreditWords, OfOthersAreNotGenuine) {
  spinwire::base::Random random(1);
  for (int i = 0; i < 100'000; ++i) {
    const auto token = static_cast<std::uint32_t>(random.next()) | 1;
    const auto granted = static_cast<std::uint32_t>(random.next());
    const std::uint64_t word = encode(CreditWord{granted, static_cast<std::uint8_t>(i)}, token);
    ASSERT_FALSE(is_genuine(0, token));
    ASSERT_FALSE(is_genuine(~std::uint64_t{0}, token));
    ASSERT_FALSE(is_genuine(random.next(), token));
    ASSERT_FALSE(is_genuine(word, token ^ 2));
    // Part of it written by somebody else: the first or the last bytes, or some between.
    const unsigned from = static_cast<unsigned>(random.below(8)) * 8;
    const unsigned bits = (1 + static_cast<unsigned>(random.below(8 - from / 8))) * 8;
    const std::uint64_t mask = (bits == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << bits) - 1)
                               << from;
    const std::uint64_t forged = (word & ~mask) | (random.next() & mask);
    ASSERT_EQ(is_genuine(forged, token), forged == word);
  }
}

}  // namespace
}  // namespace credit_word_test
