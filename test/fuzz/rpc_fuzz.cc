// The header of the datagrams of remote calls.
#include "fuzz/fuzz.h"
#include "wire/rpc_datagram.h"

namespace fuzz {

using namespace spinwire::wire;

void run(std::span<const std::byte> data) {
  const Bytes datagram = alone(data);
  RpcHeader header{};
  if (!decode(datagram.data(), datagram.size(), header)) return;
  expect(header.length == datagram.size() - kRpcHeaderBytes, "a length is that of what came");
  expect(header.kind >= RpcKind::request && header.kind <= RpcKind::goodbye, "a kind is known");
  expect(header.kind == RpcKind::reply || header.status == 0, "only replies have a status");
  expect(!has_code(header.status) || (status_in(header.status) == spinwire::Status::refused &&
                                      header.length >= kRefusalCodeBytes),
         "a code is of a refusal, and is there");
  expect(header.kind != RpcKind::request || header.window == 0, "requests have no window");
  const std::size_t challenge = header.kind == RpcKind::path_challenge ? kPathTokenBytes : 0;
  expect(header.kind <= RpcKind::reply || header.length == challenge, "a payload has its kind's");
  const auto* bytes = reinterpret_cast<const std::byte*>(&header);
  expect(same({bytes, sizeof header}, std::span(datagram).first(sizeof header)), "its bytes");
}

void sow(Seeds& seeds) {
  for (std::uint8_t kind = 0; kind < 11; ++kind) {
    const auto k = static_cast<RpcKind>(kind);
    const bool call = k == RpcKind::request || k == RpcKind::reply;
    const Bytes payload(call ? 21 : k == RpcKind::path_challenge ? kPathTokenBytes : 0);
    RpcHeader header{0x100007, 9, 0, k, 0, static_cast<std::uint16_t>(payload.size()), 0};
    if (k == RpcKind::request) header.method = 3;
    if (k == RpcKind::reply) header.window = 8;
    seeds.add({std::as_bytes(std::span(&header, 1)), payload});
  }
  RpcHeader refusal{0x100007, 9, 0, RpcKind::reply, 0, 21, 8};
  refusal.status = static_cast<std::uint8_t>(spinwire::Status::refused) | kHasCode;
  seeds.add({std::as_bytes(std::span(&refusal, 1)), Bytes(21)});
}

}  // namespace fuzz
