// Offers of rendezvous messages and their answers.
#include "fuzz/exact.h"
#include "fuzz/fuzz.h"
#include "wire/rendezvous_messages.h"

namespace fuzz {

using namespace spinwire::wire;

void run(std::span<const std::byte> data) {
  const Bytes body = alone(data);
  run_exact<RendezvousOffer>(body);
  run_exact<LocalOffer>(body);
  run_exact<RendezvousAnswer>(body);
  RendezvousOffer offer;
  if (decode(body, offer)) {
    expect(offer.length != 0 && offer.address <= ~std::uint64_t{0} - offer.length,
           "an offer lies within memory");
  }
  LocalOffer local;
  if (decode(body, local)) {
    expect(local.length != 0 && local.address <= ~std::uint64_t{0} - local.length,
           "a local offer lies within memory");
  }
}

void sow(Seeds& seeds) {
  seeds.add(encode(RendezvousOffer{0x7fff00001000, 1u << 20, 0xabcd, 65536, true}));
  seeds.add(encode(RendezvousOffer{~std::uint64_t{0} - 9, 9, 1, 0, false}));
  seeds.add(encode(LocalOffer{0x7fff00001000, 1u << 20, 0xabcd, 65536, 9, true}));
  seeds.add(encode(LocalOffer{~std::uint64_t{0} - 9, 9, 1, 0, 0, false}));
  for (std::uint8_t verdict = 0; verdict < 5; ++verdict)
    seeds.add(encode(RendezvousAnswer{65536, static_cast<RendezvousVerdict>(verdict)}));
}

}  // namespace fuzz
