// Valid values for the seeds.
#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "spinwire/endpoint.h"
#include "wire/handshake.h"

namespace fuzz {

inline spinwire::Endpoint sample_endpoint() {
  spinwire::Endpoint e;
  e.gid = {0x20, 0x01, 0x0d, 0xb8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  e.gid_type = spinwire::GidType::roce_v2;
  e.lid = 0x1234;
  e.qp_num = 0xabcd;
  e.psn = 0x123456;
  e.mtu = 4096;
  e.max_message = 1u << 20;
  e.eager_bytes = 4096;
  e.credits = 64;
  e.incarnation = 0x1122334455667788;
  e.credit_cell_address = 0x7fff00001008;
  e.credit_cell_rkey = 0xcafe;
  e.credit_cell_token = 0x51de;
  e.peer_timeout_ms = 10000;
  e.max_rd_atomic = 16;
  return e;
}

/// Private data of so many bytes.
inline spinwire::PrivateData sample_private_data(std::size_t size) {
  std::array<std::byte, spinwire::kPrivateDataMax> bytes{};
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i + 1);
  spinwire::PrivateData data;
  (void)data.assign(std::span(bytes).first(size));
  return data;
}

inline spinwire::wire::SessionEnd sample_session() {
  spinwire::wire::SessionEnd e;
  e.gid = sample_endpoint().gid;
  e.gid_type = spinwire::GidType::roce_v2;
  e.lid = 0x1234;
  e.qp_num = 0xabcd;
  e.qkey = 0x12345678;
  e.name = 0x100007;
  e.window = 8;
  e.mtu = 4048;
  e.incarnation = sample_endpoint().incarnation;
  e.first = 0x40;
  e.token = 0x746f6b656e;
  return e;
}

}  // namespace fuzz
