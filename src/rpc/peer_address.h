// The address of a peer engine, and the filter that recognises its datagrams.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <unordered_map>

#include "base/intrusive_list.h"
#include "base/random.h"
#include "spinwire/rpc.h"
#include "verbs/direct_datagrams.h"
#include "wire/handshake.h"

namespace spinwire::rpc {

struct Rpc;

using detail::Transport;

/// Recognises the datagrams of a peer. Queue pair numbers are each device's own, so the filter also
/// compares the GRH's source address: two words of it, under masks. An empty filter matches no
/// datagram, because 0 is the number of a management queue pair.
struct SourceFilter {
  std::uint32_t qp_num = 0;
  std::uint16_t lid = 0;  ///< the peer's LID, for datagrams without a GRH
  std::uint8_t second_at = 0;
  std::array<std::uint64_t, 2> masks{};
  std::array<std::uint64_t, 2> words{};

  [[nodiscard]] bool matches(const ibv_wc& wc, const std::byte* grh) const noexcept {
    std::uint64_t first = 0, second = 0;
    std::memcpy(&first, grh + kFirstAt, sizeof first);
    std::memcpy(&second, grh + second_at, sizeof second);
    const bool same = ((first & masks[0]) ^ words[0]) == 0 && ((second & masks[1]) ^ words[1]) == 0;
    const bool there = (wc.wc_flags & IBV_WC_GRH) != 0 ? same : wc.slid == lid;
    return wc.src_qp == qp_num && there;
  }
  static constexpr std::size_t kFirstAt = 8;  ///< the source GID (InfiniBand specification, 8.3)
};
SourceFilter make_source_filter(const wire::SessionEnd& peer) noexcept;

struct ClientSession;
struct ServerSession;
base::IntrusiveLinks<ClientSession>& unsent_request_links(ClientSession& c) noexcept;
base::IntrusiveLinks<ServerSession>& unsent_reply_links(ServerSession& s) noexcept;

/// A peer engine, shared by all sessions with it. With Transport::datagram it has an address handle
/// and a source filter. With Transport::connection, the numbers only identify the peer.
struct PeerAddress {
  Transport transport = Transport::connection;
  verbs::DatagramAddress destination;
  SourceFilter source_filter;
  std::uint64_t direct_source = 0;  ///< verbs::DirectBatch::source of the peer; 0: not seen yet
  ibv_gid gid{};
  std::uint16_t lid = 0;
  std::uint32_t references = 0;
  std::uint64_t incarnation = 0;
  // Sessions with datagrams that found no room, in turn; see unsent.h.
  base::IntrusiveList<unsent_request_links> unsent_requests;
  base::IntrusiveList<unsent_reply_links> unsent_replies;
  PeerAddress* next_waiting = nullptr;
};

/// What distinguishes peers.
struct PeerKey {
  std::array<std::uint8_t, 16> gid{};
  std::uint16_t lid = 0;
  std::uint32_t qp_num = 0;
  std::uint32_t qkey = 0;
  std::uint64_t incarnation = 0;
  friend bool operator==(const PeerKey&, const PeerKey&) noexcept = default;
};
/// A hash of a number that peers do not know, since they choose all fields of their keys.
struct PeerKeyHash {
  std::uint64_t secret = base::random_seed();
  std::size_t operator()(const PeerKey& key) const noexcept;
};
using PeerAddresses = std::unordered_map<PeerKey, std::unique_ptr<PeerAddress>, PeerKeyHash>;

/// The address of a peer that its sessions share; each session takes a reference. Errors: those of
/// Device::create_ah(). May throw std::bad_alloc. Set-up.
Result<PeerAddress*> acquire_peer_address(Rpc& r, const wire::SessionEnd& peer);
/// Returns a reference. The address handle is destroyed with the last one.
void release_peer_address(Rpc& r, PeerAddress* address) noexcept;

}  // namespace spinwire::rpc
