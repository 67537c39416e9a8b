#include "wire/cm_data.h"

#include <algorithm>

#include "base/error.h"
#include "wire/codec.h"

namespace spinwire::wire {

namespace {

struct CmData {
  VersionRange versions;
  std::uint32_t features = 0;
  Endpoint endpoint;
};
using CmEndpointLayout =
    Layout<&Endpoint::max_message, &Endpoint::credits, &Endpoint::incarnation,
           &Endpoint::credit_cell_address, &Endpoint::credit_cell_rkey, &Endpoint::mtu,
           &Endpoint::max_rd_atomic, zeros<1>, &Endpoint::eager_bytes, &Endpoint::credit_cell_token,
           &Endpoint::peer_timeout_ms>;
using CmLayout = Layout<constant<kMagic>,
                        part<&CmData::versions, Layout<&VersionRange::min, &VersionRange::max>>,
                        &CmData::features, part<&CmData::endpoint, CmEndpointLayout>>;
static_assert(kCmIncarnationAt == kMagic.size() + sizeof(VersionRange) + sizeof(std::uint32_t) +
                                      sizeof(Endpoint::max_message) + sizeof(Endpoint::credits));
static_assert(CmLayout::kBytes == kCmDataBytes && kCmDataBytes <= kCmRequestMax);

bool offers(std::span<const std::byte> data, std::uint32_t feature) noexcept {
  CmData got;
  return data.size() >= kCmDataBytes && CmLayout::get(data.data(), got) &&
         (got.features & feature) != 0;
}

}  // namespace

std::array<std::byte, kCmDataBytes> encode_cm(const Endpoint& e,
                                              const Capabilities& capabilities) noexcept {
  return CmLayout::encode(CmData{capabilities.versions, capabilities.features | features_of(e), e});
}

Result<void> decode_cm(std::span<const std::byte> data, Endpoint& e, VersionRange ours) {
  if (auto magic = check_magic(data); !magic) return magic;
  if (data.size() < kCmDataBytes) {
    return base::fail(Status::protocol, "decode the peer's rdma_cm private data",
                      base::format("it has {} bytes, {} are needed", data.size(), kCmDataBytes),
                      "check that a compatible release of Spinwire listens at that address");
  }
  CmData got{{}, 0, e};
  (void)CmLayout::get(data.data(), got);  // the zero byte is padding
  e = got.endpoint;
  set_features(e, got.features);
  if (auto agreed = agree(got.versions, ours); !agreed) return tl::unexpected(agreed.error());
  return check(e);
}

bool takes_application_fields(std::span<const std::byte> data) noexcept {
  return offers(data, feature::application_fields);
}
bool takes_cm_private_data(std::span<const std::byte> data) noexcept {
  return offers(data, feature::cm_private_data);
}
bool announces_private_data(std::span<const std::byte> data) noexcept {
  return offers(data, feature::private_data);
}
void announce_private_data(std::span<std::byte, kCmDataBytes> data) noexcept {
  std::byte* const at = data.data() + kMagic.size() + sizeof(VersionRange);
  put_number(at, get_number<std::uint32_t>(at) | feature::private_data);
}
bool takes_goodbyes(std::span<const std::byte> data) noexcept {
  return offers(data, feature::goodbye);
}

Frame encode_cm_refusal(const Refuse& refuse, std::size_t room) noexcept {
  const std::size_t most = room - kHeaderBytes - 1 -
                           (refuse.code ? kRefuseCodeBytes : std::size_t{0}) -
                           (refuse.goodbye.invites_back() ? kGoodbyeBytes : std::size_t{0});
  Refuse cut = refuse;
  cut.length = static_cast<std::uint8_t>(std::min<std::size_t>(cut.length, most));
  return encode(cut);
}

Refuse decode_cm_refusal(std::span<const std::byte> data) noexcept {
  try {
    auto header = decode_header(data);
    if (header && header->kind == FrameKind::refuse &&
        data.size() >= kHeaderBytes + header->body_length) {
      if (auto refuse = decode_refuse(data.subspan(kHeaderBytes, header->body_length),
                                      header->versions.max > kVersions.max, header->features))
        return *refuse;
    }
  } catch (...) {  // memory for an error's text that nobody would see
  }
  return make_refuse(Status::refused, "");
}

}  // namespace spinwire::wire
