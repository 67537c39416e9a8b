// The kinds of handshake frames: the fields of each body in order, and its sizes. Encoders and
// decoders share them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "wire/codec.h"
#include "wire/handshake.h"

namespace spinwire::wire {

using VersionLayout = Layout<&VersionRange::min, &VersionRange::max>;
using HeaderLayout = Layout<constant<kMagic>, part<&FrameHeader::versions, VersionLayout>,
                            &FrameHeader::kind, &FrameHeader::body_length, &FrameHeader::features>;
using EndpointLayout =
    Layout<&Endpoint::gid, &Endpoint::qp_num, &Endpoint::psn, &Endpoint::max_message,
           &Endpoint::credits, &Endpoint::incarnation, &Endpoint::credit_cell_address,
           &Endpoint::credit_cell_rkey, &Endpoint::lid, &Endpoint::mtu, &Endpoint::gid_type,
           &Endpoint::max_rd_atomic, &Endpoint::eager_bytes, &Endpoint::credit_cell_token,
           &Endpoint::peer_timeout_ms>;
using ReadyLayout = Layout<&Ready::incarnation>;
using PathResponseLayout = Layout<&PathResponse::token>;
using AuthenticateLayout = Layout<&Authenticate::key, &Authenticate::message>;
using AuthenticatedLayout = Layout<&Authenticated::message>;
using SessionLayout =
    Layout<&SessionEnd::gid, &SessionEnd::qp_num, &SessionEnd::qkey, &SessionEnd::name,
           &SessionEnd::window, &SessionEnd::mtu, &SessionEnd::lid, &SessionEnd::gid_type, zeros<1>,
           &SessionEnd::incarnation, &SessionEnd::first, &SessionEnd::token>;
using JoinLayout = Layout<part<&JoinSession::endpoint, EndpointLayout>, &JoinSession::session,
                          &JoinSession::token>;
static_assert(HeaderLayout::kBytes == kHeaderBytes && EndpointLayout::kBytes == kEndpointBytes &&
              ReadyLayout::kBytes == kReadyBytes && SessionLayout::kBytes == kSessionBytes &&
              PathResponseLayout::kBytes == kPathResponseBytes &&
              JoinLayout::kBytes == kJoinBytes &&
              AuthenticateLayout::kBytes == kAuthenticateBytes &&
              AuthenticatedLayout::kBytes == kAuthenticatedBytes);

/// The size of a refusal's body without its text: the status.
inline constexpr std::size_t kRefuseBytes = 1;

struct KindInfo {
  std::string_view name;
  std::size_t min;  ///< of the body, bytes
  std::size_t max;
  bool has_private_data = false;  ///< behind the body, if the header says so
};
/// In the order of FrameKind.
inline constexpr std::array kKinds{
    KindInfo{"hello", kEndpointBytes, kEndpointBytes, true},
    KindInfo{"accept", kEndpointBytes, kEndpointBytes, true},
    KindInfo{"refuse", kRefuseBytes, kRefuseBytes + kRefuseTextMax},
    KindInfo{"ready", kReadyBytes, kReadyBytes},
    KindInfo{"open session", kSessionBytes, kSessionBytes, true},
    KindInfo{"session opened", kSessionBytes, kSessionBytes, true},
    KindInfo{"join session", kJoinBytes, kJoinBytes},
    KindInfo{"path response", kPathResponseBytes, kPathResponseBytes},
    KindInfo{"authenticate", kAuthenticateBytes, kAuthenticateBytes},
    KindInfo{"authenticated", kAuthenticatedBytes, kAuthenticatedBytes},
    KindInfo{"sealed", kSealedBytesMin, kSealedBytesMax},
};
static_assert(kKinds.size() == static_cast<std::size_t>(kLastFrameKind));
static_assert(sizeof(Frame::storage) <= kFrameBytesMax &&
              kHeaderBytes + kRefuseBytes + kRefuseCodeBytes + kRefuseTextMax <=
                  sizeof(Frame::storage));

/// A kind that does not exist has no name and no sizes.
constexpr KindInfo info_of(FrameKind kind) noexcept {
  const auto at = static_cast<std::size_t>(kind) - 1;
  return at < kKinds.size() ? kKinds[at] : KindInfo{"unknown", 0, 0};
}

constexpr bool has(std::uint32_t features, std::uint32_t feature) noexcept {
  return (features & feature) != 0;
}

/// The sizes of a body with these features.
constexpr KindInfo info_of(FrameKind kind, std::uint32_t features) noexcept {
  KindInfo info = info_of(kind);
  if (info.has_private_data && has(features, feature::private_data)) {
    info.min += kPrivateDataBytesMin;
    info.max += kPrivateDataBytesMax;
  }
  if (kind == FrameKind::refuse && has(features, feature::refusal_code)) {
    info.min += kRefuseCodeBytes;
    info.max += kRefuseCodeBytes;
  }
  if (kind == FrameKind::refuse && has(features, feature::goodbye)) {
    info.min += kGoodbyeBytes;
    info.max += kGoodbyeBytes;
  }
  return info;
}

}  // namespace spinwire::wire
