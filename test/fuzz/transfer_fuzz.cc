// Offers of long messages, and the answers to them.
#include "fuzz/exact.h"
#include "fuzz/fuzz.h"
#include "wire/rendezvous_messages.h"

namespace fuzz {

using namespace spinwire::wire;

void run(std::span<const std::byte> data) {
  const Bytes body = alone(data);
  run_exact<Offer>(body);
  run_exact<Answer>(body);
  Offer offer;
  if (decode(body, offer)) {
    expect(offer.length != 0 && offer.address <= ~std::uint64_t{0} - offer.length,
           "an offer lies within memory");
  }
}

void sow(Seeds& seeds) {
  seeds.add(encode(Offer{0x7fff00001000, 1u << 20, 0xabcd, 65536, true}));
  seeds.add(encode(Offer{~std::uint64_t{0} - 9, 9, 1, 0, false}));
  for (std::uint8_t verdict = 0; verdict < 5; ++verdict)
    seeds.add(encode(Answer{65536, static_cast<Verdict>(verdict)}));
}

}  // namespace fuzz
