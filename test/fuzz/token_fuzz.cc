// A region as bytes that applications pass on.
#include <xxhash.h>

#include "fuzz/exact.h"
#include "fuzz/fuzz.h"
#include "wire/codec.h"
#include "wire/region_token.h"

namespace fuzz {

using namespace spinwire::wire;

void run(std::span<const std::byte> data) {
  Bytes bytes = alone(data);
  run_exact<Token>(bytes);
  if (bytes.size() != kTokenBytes) return;
  // The checksum in the last eight bytes detects damage, not malice. With a deadline it has four.
  if (std::to_integer<int>(bytes[4]) == 2) {
    constexpr std::size_t kSummed = kTokenBytes - sizeof(std::uint32_t);
    put_number(bytes.data() + kSummed,
               static_cast<std::uint32_t>(XXH3_64bits(bytes.data(), kSummed)));
  } else {
    constexpr std::size_t kSummed = kTokenBytes - sizeof(std::uint64_t);
    put_number<std::uint64_t>(bytes.data() + kSummed, XXH3_64bits(bytes.data(), kSummed));
  }
  run_exact<Token>(bytes);
  Token token;
  if (decode(bytes, token)) {
    expect(token.length != 0 && token.address <= ~std::uint64_t{0} - token.length,
           "a region lies within memory");
    expect(token.rkey != 0, "a region has a key");
    expect(token.deadline <= kLatestTokenDeadline, "a deadline has 48 bits");
  }
}

void sow(Seeds& seeds) {
  seeds.add(encode(Token{0x7fff00001000, 4096, 77, 0xabcd, 0, 3}));
  seeds.add(encode(Token{~std::uint64_t{0} - 9, 9, 1, 2, 3, 1}));
  seeds.add(encode(Token{1, 0, 1, 2, 3, 1}));
  seeds.add(encode(Token{0x7fff00001000, 4096, 77, 0xabcd, 0, 3, 1'900'000'000'000}));
}

}  // namespace fuzz
