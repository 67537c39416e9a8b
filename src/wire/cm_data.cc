#include "wire/cm_data.h"

#include <algorithm>

#include "base/error.h"
#include "wire/codec.h"

namespace spinwire::wire {

static_assert(kCmDataBytes <= kCmRequestMax);

std::array<std::byte, kCmDataBytes> encode_cm(const Endpoint& e, const Speaker& speaker) noexcept {
  std::array<std::byte, kCmDataBytes> data{};
  Writer w(data);
  w.copy(cm_at::magic, kMagic);
  w.put<std::uint16_t>(cm_at::version_min, speaker.versions.min);
  w.put<std::uint16_t>(cm_at::version_max, speaker.versions.max);
  w.put<std::uint32_t>(cm_at::features, speaker.features | (e.raw ? feature::raw : 0));
  w.put<std::uint32_t>(cm_at::max_message, e.max_message);
  w.put<std::uint32_t>(cm_at::eager_bytes, e.eager_bytes);
  w.put<std::uint32_t>(cm_at::credits, e.credits);
  w.put<std::uint64_t>(cm_at::incarnation, e.incarnation);
  w.put<std::uint64_t>(cm_at::control_address, e.control_address);
  w.put<std::uint32_t>(cm_at::control_rkey, e.control_rkey);
  w.put<std::uint32_t>(cm_at::control_token, e.control_token);
  w.put<std::uint32_t>(cm_at::peer_timeout_ms, e.peer_timeout_ms);
  w.put<std::uint16_t>(cm_at::mtu, e.mtu);
  w.put<std::uint8_t>(cm_at::max_rd_atomic, e.max_rd_atomic);
  return data;
}

Result<void> decode_cm(std::span<const std::byte> data, Endpoint& e, VersionRange ours) {
  if (auto magic = check_magic(data); !magic) return magic;
  Reader r(data);
  const VersionRange theirs{r.get<std::uint16_t>(cm_at::version_min),
                            r.get<std::uint16_t>(cm_at::version_max)};
  e.raw = (r.get<std::uint32_t>(cm_at::features) & feature::raw) != 0;
  e.max_message = r.get<std::uint32_t>(cm_at::max_message);
  e.eager_bytes = r.get<std::uint32_t>(cm_at::eager_bytes);
  e.credits = r.get<std::uint32_t>(cm_at::credits);
  e.incarnation = r.get<std::uint64_t>(cm_at::incarnation);
  e.control_address = r.get<std::uint64_t>(cm_at::control_address);
  e.control_rkey = r.get<std::uint32_t>(cm_at::control_rkey);
  e.control_token = r.get<std::uint32_t>(cm_at::control_token);
  e.peer_timeout_ms = r.get<std::uint32_t>(cm_at::peer_timeout_ms);
  e.mtu = r.get<std::uint16_t>(cm_at::mtu);
  e.max_rd_atomic = r.get<std::uint8_t>(cm_at::max_rd_atomic);
  if (!r.ok()) {
    return base::fail(Status::protocol, "decode the peer's rdma_cm private data",
                      base::format("it has {} bytes, {} are needed", data.size(), kCmDataBytes),
                      "check that a compatible release of Spinwire listens at that address");
  }
  if (auto agreed = agree(theirs, ours); !agreed) return tl::unexpected(agreed.error());
  return check(e);
}

Frame encode_cm_refusal(const Refuse& refuse) noexcept {
  constexpr auto kTextMax =
      static_cast<std::uint8_t>(kCmRejectMax - kHeaderBytes - refuse_at::text);
  Refuse cut = refuse;
  cut.length = std::min(cut.length, kTextMax);
  return encode(cut);
}

Refuse decode_cm_refusal(std::span<const std::byte> data) noexcept {
  try {
    auto header = decode_header(data);
    if (header && header->kind == FrameKind::refuse &&
        data.size() >= kHeaderBytes + header->body_length) {
      if (auto refuse = decode_refuse(data.subspan(kHeaderBytes, header->body_length),
                                      header->versions.max > kVersions.max))
        return *refuse;
    }
  } catch (...) {  // memory for an error's text that nobody would see
  }
  return make_refuse(Status::refused, "");
}

}  // namespace spinwire::wire
