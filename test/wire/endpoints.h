// Shared by the tests of what ends tell each other: valid ends of a connection and of a session,
// and the places of fields in a frame's header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "spinwire/endpoint.h"
#include "wire/handshake.h"

namespace wire_test {

/// Places of fields in the header of a frame.
namespace header_at {
inline constexpr std::size_t kind = 8, body_length = 10, features = 12;
}

/// An end of a connection. Every field has a value of its own.
inline spinwire::Endpoint valid_endpoint() {
  spinwire::Endpoint e;
  for (std::size_t i = 0; i < e.gid.size(); ++i) e.gid[i] = static_cast<std::uint8_t>(0xa0 + i);
  e.gid_type = spinwire::GidType::roce_v2;
  e.lid = 0x1234;
  e.qp_num = 0xabcdef;
  e.psn = 0x123456;
  e.mtu = 1024;
  e.max_message = 8192;
  e.eager_bytes = 4096;
  e.credits = 64;
  e.incarnation = 0x1122334455667788u;
  e.credit_cell_address = 0x7fff00001008u;
  e.credit_cell_rkey = 0xcafebabe;
  e.credit_cell_token = 0x51de;
  e.peer_timeout_ms = 10000;
  e.max_rd_atomic = 16;
  return e;
}

/// A client's end of a session. Every field has a value.
inline spinwire::wire::SessionEnd valid_session_end() {
  spinwire::wire::SessionEnd e;
  e.gid = valid_endpoint().gid;
  e.gid_type = spinwire::GidType::roce_v2;
  e.lid = 0x1234;
  e.qp_num = 77;
  e.qkey = 0x7fffffff;
  e.name = 5;
  e.window = 64;
  e.mtu = 4048;
  e.incarnation = 0x1122334455667788u;
  e.first = 0xffffffc0;
  e.token = 0x99aabbccddeeff01u;
  return e;
}

/// The header and body of a whole frame.
inline spinwire::Result<spinwire::wire::Received> decode_frame(
    std::span<const std::byte> frame,
    spinwire::wire::VersionRange ours = spinwire::wire::kVersions) {
  auto header = spinwire::wire::decode_header(frame, ours);
  if (!header) return tl::make_unexpected(header.error());
  return spinwire::wire::decode_body(*header, frame.subspan(spinwire::wire::kHeaderBytes), ours);
}

}  // namespace wire_test
