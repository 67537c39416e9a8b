#include "rpc/peer_address.h"

#include <algorithm>
#include <memory>

#include "rpc/rpc_state.h"

namespace spinwire::rpc {

SourceFilter make_source_filter(const wire::SessionEnd& peer) noexcept {
  constexpr std::array<std::uint8_t, 12> kMapped{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  SourceFilter filter;
  filter.qp_num = peer.qp_num;
  filter.lid = peer.lid;
  const bool ipv4 = peer.gid_type == GidType::roce_v2 &&
                    std::equal(kMapped.begin(), kMapped.end(), peer.gid.begin());
  if (ipv4) {
    // Only the last 20 bytes are valid, the IPv4 header (RoCEv2 annex, A17.4.5.2). Its source is at
    // offset 12, the upper half of the word that begins 4 bytes before.
    filter.second_at = 28;
    filter.masks = {0, ~std::uint64_t{0} << 32};
    std::uint32_t address = 0;
    std::memcpy(&address, peer.gid.data() + 12, sizeof address);
    filter.words = {0, std::uint64_t{address} << 32};
  } else {
    filter.second_at = 16;
    filter.masks = {~std::uint64_t{0}, ~std::uint64_t{0}};
    std::memcpy(filter.words.data(), peer.gid.data(), sizeof filter.words);
  }
  return filter;
}

namespace {

PeerKey key_of(const PeerAddress& address) noexcept {
  PeerKey key{
      {}, address.lid, address.destination.qp_num, address.destination.qkey, address.incarnation};
  std::memcpy(key.gid.data(), &address.gid, sizeof address.gid);
  return key;
}

}  // namespace

std::size_t PeerKeyHash::operator()(const PeerKey& key) const noexcept {
  std::uint64_t hash = secret;
  const auto add = [&hash](std::uint64_t word) { hash = base::Random::mix(hash ^ word); };
  std::array<std::uint64_t, 2> gid{};
  std::memcpy(gid.data(), key.gid.data(), sizeof gid);
  for (const std::uint64_t word : gid) add(word);
  add(key.qp_num | std::uint64_t{key.qkey} << 32);
  add(key.incarnation);
  add(key.lid);
  return hash;
}

Result<PeerAddress*> acquire_peer_address(Rpc& r, const wire::SessionEnd& peer) {
  // A GID of another type was not resolved: the verb would wait for its address.
  const GidType ours = r.context.device->place().gid_type;
  if (peer.qp_num != 0 && peer.gid_type != ours) {
    return base::fail(Status::unsupported,
                      base::format("send datagrams from a GID of type {}", to_string(ours)),
                      base::format("the peer's GID is of type {}", to_string(peer.gid_type)),
                      "open the same kind of device at both ends; on RoCE set device.gid_index or "
                      "device.address, so that both take the same version");
  }
  const PeerKey key{peer.gid, peer.lid, peer.qp_num, peer.qkey, peer.incarnation};
  if (const auto found = r.peer_addresses.find(key); found != r.peer_addresses.end()) {
    ++found->second->references;
    return found->second.get();
  }
  auto peer_address = std::make_unique<PeerAddress>();
  std::memcpy(&peer_address->gid, peer.gid.data(), sizeof peer_address->gid);
  peer_address->lid = peer.lid;
  peer_address->references = 1;
  peer_address->incarnation = peer.incarnation;
  peer_address->destination = {nullptr, peer.qp_num, peer.qkey, nullptr};
  ibv_ah* ah = nullptr;
  if (peer.qp_num != 0 && r.port != nullptr) {
    verbs::RemoteQueuePair remote;
    remote.gid = peer_address->gid;
    remote.lid = peer.lid;
    auto made = r.context.device->create_ah(r.context.attributes.queue_pair, remote);
    if (!made) return tl::unexpected(made.error());
    peer_address->destination.ah = ah = *made;
    peer_address->transport = Transport::datagram;
    r.port->resolve(peer_address->destination);
    peer_address->source_filter = make_source_filter(peer);
  }
  try {
    return r.peer_addresses.try_emplace(key, std::move(peer_address)).first->second.get();
  } catch (...) {
    if (ah != nullptr) r.context.device->destroy_ah(ah);
    throw;
  }
}

void release_peer_address(Rpc& r, PeerAddress* peer_address) noexcept {
  if (--peer_address->references != 0) return;
  flush(r);  // no datagram may refer to the address any more
  if (peer_address->transport == Transport::datagram)
    r.context.device->destroy_ah(peer_address->destination.ah);
  r.peer_addresses.erase(key_of(*peer_address));
}

}  // namespace spinwire::rpc
