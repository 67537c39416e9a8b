// Encoders of the handshake's frames.
#include "wire/handshake.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/printable.h"
#include "wire/frame_kinds.h"
#include "wire/goodbye.h"

namespace spinwire::wire {
namespace {

void put_header(FrameKind kind, std::size_t body_length, const Capabilities& capabilities,
                std::byte* to) noexcept {
  FrameHeader header;
  header.versions = capabilities.versions;
  header.kind = kind;
  header.body_length = static_cast<std::uint16_t>(body_length);
  header.features = capabilities.features;
  HeaderLayout::put(header, to);
}

/// A frame whose body is empty yet.
Frame begin(FrameKind kind, std::size_t body_length, const Capabilities& capabilities) noexcept {
  Frame frame;
  frame.size = kHeaderBytes + body_length;
  put_header(kind, body_length, capabilities, frame.storage.data());
  return frame;
}

template <typename Fields, typename Body>
Frame encode_body(FrameKind kind, const Body& body, const Capabilities& capabilities) noexcept {
  Frame frame = begin(kind, Fields::kBytes, capabilities);
  Fields::put(body, frame.storage.data() + kHeaderBytes);
  return frame;
}

/// An end and its application's fields.
template <typename Fields, typename End>
Frame encode_end(FrameKind kind, const End& end, Capabilities capabilities) noexcept {
  const std::span<const std::byte> data = end.private_data.bytes();
  if (end.application_fields) capabilities.features |= feature::application_fields;
  capabilities.features &= ~feature::private_data;
  if (data.empty()) return encode_body<Fields>(kind, end, capabilities);
  capabilities.features |= feature::private_data;
  Frame frame = begin(kind, Fields::kBytes + sizeof(std::uint16_t) + data.size(), capabilities);
  std::byte* at = frame.storage.data() + kHeaderBytes;
  Fields::put(end, at);
  at += Fields::kBytes;
  put_number(at, static_cast<std::uint16_t>(data.size()));
  std::memcpy(at + sizeof(std::uint16_t), data.data(), data.size());
  return frame;
}

Frame encode_endpoint(FrameKind kind, const Endpoint& e, Capabilities capabilities) noexcept {
  capabilities.features |= features_of(e);
  return encode_end<EndpointLayout>(kind, e, capabilities);
}

Frame encode_session(FrameKind kind, const SessionEnd& e, Capabilities capabilities) noexcept {
  if (e.direct_datagrams >= kPageDatagramBytes) capabilities.features |= feature::page_datagrams;
  if (e.direct_datagrams >= kLongDatagramBytes) capabilities.features |= feature::long_datagrams;
  if (e.direct_datagrams >= kBlockDatagramBytes) capabilities.features |= feature::block_datagrams;
  if (e.goodbyes) capabilities.features |= feature::goodbye;
  if (e.refusal_codes) capabilities.features |= feature::refusal_codes;
  return encode_end<SessionLayout>(kind, e, capabilities);
}

}  // namespace

std::string_view to_string(FrameKind kind) noexcept { return info_of(kind).name; }

std::uint32_t features_of(const Endpoint& e) noexcept {
  return (e.raw ? feature::raw : 0) | (e.goodbye_reasons ? feature::goodbye : 0) |
         (e.application_fields ? feature::application_fields : 0);
}
void set_features(Endpoint& e, std::uint32_t features) noexcept {
  e.raw = (features & feature::raw) != 0;
  e.goodbye_reasons = (features & feature::goodbye) != 0;
  e.application_fields = (features & feature::application_fields) != 0;
}

Frame encode(const Hello& hello, const Capabilities& capabilities) noexcept {
  return encode_endpoint(FrameKind::hello, hello.endpoint, capabilities);
}
Frame encode(const Accept& accept, const Capabilities& capabilities) noexcept {
  return encode_endpoint(FrameKind::accept, accept.endpoint, capabilities);
}
Frame encode(const Ready& ready, const Capabilities& capabilities) noexcept {
  return encode_body<ReadyLayout>(FrameKind::ready, ready, capabilities);
}
Frame encode(const OpenSession& open, const Capabilities& capabilities) noexcept {
  return encode_session(FrameKind::open_session, open.end, capabilities);
}
Frame encode(const SessionOpened& opened, const Capabilities& capabilities) noexcept {
  return encode_session(FrameKind::session_opened, opened.end, capabilities);
}
Frame encode(const JoinSession& join, const Capabilities& capabilities) noexcept {
  // Never raw, whatever the endpoint says.
  const std::uint32_t goodbye = features_of(join.endpoint) & feature::goodbye;
  return encode_body<JoinLayout>(FrameKind::join_session, join,
                                 {capabilities.versions, capabilities.features | goodbye});
}
Frame encode(const PathResponse& response, const Capabilities& capabilities) noexcept {
  return encode_body<PathResponseLayout>(FrameKind::path_response, response, capabilities);
}

Frame encode(const Authenticate& request, const Capabilities& capabilities) noexcept {
  return encode_body<AuthenticateLayout>(FrameKind::authenticate, request, capabilities);
}
Frame encode(const Authenticated& answer, const Capabilities& capabilities) noexcept {
  return encode_body<AuthenticatedLayout>(FrameKind::authenticated, answer, capabilities);
}

SealedFrame begin_sealed(std::size_t frame_bytes, const Capabilities& capabilities) noexcept {
  SealedFrame frame;
  frame.size = kHeaderBytes + frame_bytes + kSealTagBytes;
  put_header(FrameKind::sealed, frame_bytes + kSealTagBytes, capabilities, frame.storage.data());
  return frame;
}

Frame encode(const Refuse& refuse, const Capabilities& capabilities) noexcept {
  const std::size_t length = std::min<std::size_t>(refuse.length, kRefuseTextMax);
  const bool has_goodbye = refuse.goodbye.invites_back();
  Capabilities used = capabilities;
  used.features &= ~(feature::refusal_code | feature::goodbye);  // they are about the body here
  if (refuse.code) used.features |= feature::refusal_code;
  if (has_goodbye) used.features |= feature::goodbye;
  const std::size_t before = info_of(FrameKind::refuse, used.features).min;
  Frame frame = begin(FrameKind::refuse, before + length, used);
  std::byte* const body = frame.storage.data() + kHeaderBytes;
  put_number(body, refuse.status);
  std::byte* at = body + kRefuseBytes;
  if (refuse.code) {
    put_number(at, *refuse.code);
    at += kRefuseCodeBytes;
  }
  if (has_goodbye) put_number(at, encode(refuse.goodbye));
  std::memcpy(body + before, refuse.text.data(), length);
  return frame;
}

Refuse make_refuse(const Error& why, bool takes_code) noexcept {
  if (!why.code) return make_refuse(why.status, why.message());
  return make_refuse(why.status, why.found, takes_code ? why.code : std::nullopt);
}

Refuse make_refuse(Status status, std::string_view text,
                   std::optional<std::uint32_t> code) noexcept {
  Refuse refuse;
  refuse.code = code;
  refuse.status = status == Status::ok ? Status::refused : status;
  refuse.length = static_cast<std::uint8_t>(std::min(text.size(), kRefuseTextMax));
  std::transform(text.begin(), text.begin() + refuse.length, refuse.text.begin(), base::shown);
  return refuse;
}

}  // namespace spinwire::wire
