// The headers of long calls.
#include "fuzz/fuzz.h"
#include "wire/rpc_bulk.h"

namespace fuzz {

using namespace spinwire::wire;

void run(std::span<const std::byte> data) {
  const Bytes message = alone(data);
  BulkHeader header;
  std::span<const std::byte> payload;
  if (!decode(message, header, payload)) return;
  expect(header.kind >= BulkKind::call && header.kind <= BulkKind::cancelled, "a kind is known");
  expect(payload.size() == message.size() - kBulkHeaderBytes, "a payload is all that is behind");
  expect(payload.empty() || payload.size() == header.size, "and as long as told");
  expect(header.kind == BulkKind::call || header.room == 0, "only calls have room");
  expect(header.room == 0 || header.address <= ~std::uint64_t{0} - header.room,
         "room lies within memory");
  expect(header.kind == BulkKind::reply || header.status == 0, "only replies have a status");
  expect(same(encode(header), std::span(message).first(kBulkHeaderBytes)), "its bytes");
}

void sow(Seeds& seeds) {
  const Bytes payload(21);
  seeds.add({encode(BulkHeader{9, 3, BulkKind::call, 0, 21, 0, 0, 0}), payload});
  seeds.add(encode(BulkHeader{9, 3, BulkKind::call, 0, 1u << 20, 4096, 0x7fff00001000, 0xabcd}));
  seeds.add(encode(BulkHeader{9, 3, BulkKind::call, 0, 0, 9, ~std::uint64_t{0} - 9, 1}));
  seeds.add({encode(BulkHeader{9, 0, BulkKind::reply, 17, 21, 0, 0, 0}), payload});
  for (std::uint8_t kind = 0; kind < 6; ++kind)
    seeds.add(encode(BulkHeader{9, 0, static_cast<BulkKind>(kind), 0, 0, 0, 0, 0}));
}

}  // namespace fuzz
