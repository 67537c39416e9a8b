// Messages of a session on its reliable connection: a header of 32 bytes, in the layout
// below. The payload of a reply, and of a short request, follows the header.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "spinwire/status.h"
#include "wire/codec.h"
#include "wire/goodbye.h"
#include "wire/rpc_datagram.h"

namespace spinwire::wire {

enum class RpcMessageKind : std::uint8_t {
  call = 1,       ///< from the client; the request follows, here or in a message with the number
  cancel = 2,     ///< from the client: needs no reply any more
  reply = 3,      ///< from the server: the result, unless a WRITE with the number reports it
  cancelled = 4,  ///< from the server: no more messages about that call
  /// From the server: it takes no new calls, for the reason in the number; see wire/goodbye.h. The
  /// client closes the session when its calls are over.
  goodbye = 5,
};

struct RpcMessageHeader {
  std::uint32_t number = 0;  ///< the call's number; its low bits are its slot; see goodbye
  std::uint16_t method = 0;  ///< for a call
  RpcMessageKind kind = RpcMessageKind::call;
  std::uint8_t status = 0;  ///< for a reply: a Status, and kHasCode
  std::uint32_t size = 0;   ///< bytes of a call's request or a reply's payload
  // For a call: the memory for its reply. All 0: the reply is a message. Without a key, the client
  // places a reply there itself, which comes as a message: of the number and the bytes if it is
  // longer than the eager limit allows with a header, else of a header and the bytes.
  std::uint32_t reply_capacity = 0;  ///< bytes
  std::uint64_t address = 0;
  std::uint32_t rkey = 0;
  std::uint32_t code = 0;  ///< for a reply with kHasCode: the handler's
};
inline constexpr std::size_t kRpcMessageHeaderBytes = 32;

using RpcMessageLayout =
    Layout<&RpcMessageHeader::number, &RpcMessageHeader::method, &RpcMessageHeader::kind,
           &RpcMessageHeader::status, &RpcMessageHeader::size, &RpcMessageHeader::reply_capacity,
           &RpcMessageHeader::address, &RpcMessageHeader::rkey, &RpcMessageHeader::code>;

constexpr std::array<std::byte, kRpcMessageHeaderBytes> encode(
    const RpcMessageHeader& header) noexcept {
  return RpcMessageLayout::encode(header);
}

/// Whether the region for the reply is valid or absent.
constexpr bool is_valid_reply_region(const RpcMessageHeader& header) noexcept {
  if (header.reply_capacity == 0 || header.rkey == 0)
    return header.address == 0 && header.rkey == 0;
  return header.address + header.reply_capacity > header.address;
}

/// Checks a whole message. Returns false if it is malformed; the receiver checks the number.
/// `payload` is the part after the header: the whole payload of a reply; all of a call's request,
/// or nothing.
constexpr bool decode(std::span<const std::byte> bytes, RpcMessageHeader& header,
                      std::span<const std::byte>& payload) noexcept {
  if (bytes.size() < kRpcMessageHeaderBytes || !RpcMessageLayout::get(bytes.data(), header))
    return false;
  payload = bytes.subspan(kRpcMessageHeaderBytes);
  if (header.code != 0 && !has_code(header.status)) return false;
  if (header.kind == RpcMessageKind::call) {
    return header.status == 0 && is_valid_reply_region(header) &&
           (payload.empty() || payload.size() == header.size);
  }
  if (header.method != 0 || header.reply_capacity != 0 || !is_valid_reply_region(header))
    return false;
  if (header.kind == RpcMessageKind::reply)
    return is_reply_status(header.status) && payload.size() == header.size;
  Goodbye goodbye;
  const bool known = header.kind == RpcMessageKind::cancel ||
                     header.kind == RpcMessageKind::cancelled ||
                     (header.kind == RpcMessageKind::goodbye && decode(header.number, goodbye));
  return known && header.status == 0 && header.size == 0 && payload.empty();
}

}  // namespace spinwire::wire
