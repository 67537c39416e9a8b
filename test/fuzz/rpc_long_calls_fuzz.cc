// The headers of long calls.
#include "fuzz/fuzz.h"
#include "wire/rpc_connection.h"

namespace fuzz {

using namespace spinwire::wire;

void run(std::span<const std::byte> data) {
  const Bytes message = alone(data);
  RpcMessageHeader header;
  std::span<const std::byte> payload;
  if (!decode(message, header, payload)) return;
  expect(header.kind >= RpcMessageKind::call && header.kind <= RpcMessageKind::goodbye,
         "a kind is known");
  expect(payload.size() == message.size() - kRpcMessageHeaderBytes,
         "a payload is all that is behind");
  expect(payload.empty() || payload.size() == header.size, "and as long as told");
  expect(header.kind == RpcMessageKind::call || header.reply_capacity == 0, "only calls have room");
  expect(header.reply_capacity == 0 || header.address <= ~std::uint64_t{0} - header.reply_capacity,
         "room lies within memory");
  expect(header.kind == RpcMessageKind::reply || header.status == 0, "only replies have a status");
  expect(header.code == 0 || has_code(header.status), "only refusals with a code have one");
  expect(!has_code(header.status) || status_in(header.status) == spinwire::Status::refused,
         "only refusals have a code");
  expect(same(encode(header), std::span(message).first(kRpcMessageHeaderBytes)), "its bytes");
}

void sow(Seeds& seeds) {
  const Bytes payload(21);
  seeds.add({encode(RpcMessageHeader{9, 3, RpcMessageKind::call, 0, 21, 0, 0, 0}), payload});
  seeds.add(encode(
      RpcMessageHeader{9, 3, RpcMessageKind::call, 0, 1u << 20, 4096, 0x7fff00001000, 0xabcd}));
  seeds.add(
      encode(RpcMessageHeader{9, 3, RpcMessageKind::call, 0, 0, 9, ~std::uint64_t{0} - 9, 1}));
  seeds.add({encode(RpcMessageHeader{9, 0, RpcMessageKind::reply, 17, 21, 0, 0, 0}), payload});
  RpcMessageHeader refusal{9, 0, RpcMessageKind::reply, 0, 21, 0, 0, 0};
  refusal.status = static_cast<std::uint8_t>(spinwire::Status::refused) | kHasCode;
  refusal.code = 7;
  seeds.add({encode(refusal), payload});
  seeds.add(encode(RpcMessageHeader{0x302, 0, RpcMessageKind::goodbye, 0, 0, 0, 0, 0}));
  for (std::uint8_t kind = 0; kind < 7; ++kind)
    seeds.add(encode(RpcMessageHeader{9, 0, static_cast<RpcMessageKind>(kind), 0, 0, 0, 0, 0}));
}

}  // namespace fuzz
