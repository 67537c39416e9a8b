// What the two ends of a session tell each other on its reliable connection: a header of 32 bytes,
// little-endian at the offsets written below, as a message of its own; the payload of a reply, and
// of a short request, lies behind it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "spinwire/status.h"
#include "wire/codec.h"

namespace spinwire::wire {

enum class RpcMessageKind : std::uint8_t {
  call = 1,       ///< of the client; the request is behind it, or a message with the call's number
  cancel = 2,     ///< of the client: no answer is wanted any more
  reply = 3,      ///< of the server: how the call ended, unless it was by a WRITE with its number
  cancelled = 4,  ///< of the server: nothing about that call follows
};

struct RpcMessageHeader {
  std::uint32_t number = 0;  ///< of the call; its low bits are its slot
  std::uint16_t method = 0;  ///< of a call
  RpcMessageKind kind = RpcMessageKind::call;
  std::uint8_t status = 0;  ///< of a reply: a Status
  std::uint32_t size = 0;   ///< of a call's request, or a reply's payload, bytes
  // Of a call: where its reply is to be written; all 0: it comes as a message.
  std::uint32_t reply_capacity = 0;  ///< bytes
  std::uint64_t address = 0;
  std::uint32_t rkey = 0;
};
inline constexpr std::size_t kRpcMessageHeaderBytes = 32;

namespace rpc_message_at {
inline constexpr std::size_t number = 0, method = 4, kind = 6, status = 7, size = 8,
                             reply_capacity = 12, address = 16, rkey = 24, reserved = 28;
}
static_assert(rpc_message_at::reserved + 4 == kRpcMessageHeaderBytes);

constexpr std::array<std::byte, kRpcMessageHeaderBytes> encode(
    const RpcMessageHeader& header) noexcept {
  std::array<std::byte, kRpcMessageHeaderBytes> bytes{};
  Writer w(bytes);
  w.put<std::uint32_t>(rpc_message_at::number, header.number);
  w.put<std::uint16_t>(rpc_message_at::method, header.method);
  w.put<std::uint8_t>(rpc_message_at::kind, static_cast<std::uint8_t>(header.kind));
  w.put<std::uint8_t>(rpc_message_at::status, header.status);
  w.put<std::uint32_t>(rpc_message_at::size, header.size);
  w.put<std::uint32_t>(rpc_message_at::reply_capacity, header.reply_capacity);
  w.put<std::uint64_t>(rpc_message_at::address, header.address);
  w.put<std::uint32_t>(rpc_message_at::rkey, header.rkey);
  return bytes;
}

/// Whether there is room for a reply, none at all, or nonsense.
constexpr bool is_valid_reply_region(const RpcMessageHeader& header) noexcept {
  if (header.reply_capacity == 0) return header.address == 0 && header.rkey == 0;
  return header.rkey != 0 && header.address + header.reply_capacity > header.address;
}

/// Checks a whole message; false if it is malformed. What the number means is for the receiver to
/// check. `payload` is what lies behind the header: that of a reply; of a call all of it, or
/// nothing.
constexpr bool decode(std::span<const std::byte> bytes, RpcMessageHeader& header,
                      std::span<const std::byte>& payload) noexcept {
  Reader r(bytes);
  header.number = r.get<std::uint32_t>(rpc_message_at::number);
  header.method = r.get<std::uint16_t>(rpc_message_at::method);
  header.kind = static_cast<RpcMessageKind>(r.get<std::uint8_t>(rpc_message_at::kind));
  header.status = r.get<std::uint8_t>(rpc_message_at::status);
  header.size = r.get<std::uint32_t>(rpc_message_at::size);
  header.reply_capacity = r.get<std::uint32_t>(rpc_message_at::reply_capacity);
  header.address = r.get<std::uint64_t>(rpc_message_at::address);
  header.rkey = r.get<std::uint32_t>(rpc_message_at::rkey);
  if (r.get<std::uint32_t>(rpc_message_at::reserved) != 0 || !r.ok()) return false;
  payload = bytes.subspan(kRpcMessageHeaderBytes);
  if (header.kind == RpcMessageKind::call) {
    return header.status == 0 && is_valid_reply_region(header) &&
           (payload.empty() || payload.size() == header.size);
  }
  if (header.method != 0 || header.reply_capacity != 0 || !is_valid_reply_region(header))
    return false;
  if (header.kind == RpcMessageKind::reply)
    return header.status < kStatusCount && payload.size() == header.size;
  const bool known =
      header.kind == RpcMessageKind::cancel || header.kind == RpcMessageKind::cancelled;
  return known && header.status == 0 && header.size == 0 && payload.empty();
}

}  // namespace spinwire::wire
