// Checks arriving datagrams; gives each to its session, or drops and counts it. Hot.
#include "rpc/transport/datagram_receive.h"

#include "rpc/client_reply.h"
#include "rpc/client_session.h"
#include "rpc/server_call.h"
#include "rpc/server_session.h"
#include "rpc/session_liveness.h"

namespace spinwire::rpc {
namespace {

using wire::RpcHeader;
using wire::RpcKind;

/// The location of a datagram.
struct Arrival {
  Block* block;
  std::byte* grh;  ///< in front of the datagram

  [[nodiscard]] std::byte* datagram() const noexcept { return grh + kGrhBytes; }
  [[nodiscard]] std::byte* payload() const noexcept {
    return grh + kGrhBytes + wire::kRpcHeaderBytes;
  }
};

/// A reply that no call waits for: the call is over, or the datagram is not from the server.
[[gnu::cold, gnu::noinline]] void on_unexpected_reply(Rpc& r, ClientSession& c, const ibv_wc& wc,
                                                      const std::byte* grh) noexcept {
  const bool from_server = c.transport == Transport::datagram && c.peer_address != nullptr &&
                           c.peer_address->source_filter.matches(wc, grh);
  ++(from_server ? r.stats.late_replies : r.stats.bad_datagrams);
  if (from_server) c.last_heard = r.context.now;
}

/// Handles a reply. Returns whether the block was kept.
template <bool is_good = true>
[[gnu::always_inline]] inline bool on_reply(Rpc& r, wire::RpcWords words, const ibv_wc& wc,
                                            const Arrival& at) noexcept {
  ClientSession* const c = find_client(r, static_cast<std::uint32_t>(words.low));
  if (c == nullptr) [[unlikely]]
    return ++r.stats.bad_datagrams, false;
  if (!is_awaited(*c, words)) [[unlikely]]
    return on_unexpected_reply(r, *c, wc, at.grh), false;
  if (!c->peer_address->source_filter.matches(wc, at.grh)) [[unlikely]]
    return ++r.stats.bad_datagrams, false;
  return complete_call<is_good>(r, *c, words, at.block, at.payload(), r.context.now);
}

/// Handles a request. Returns whether the block was kept.
[[gnu::always_inline]] inline bool on_request(Rpc& r, wire::RpcWords words, const ibv_wc& wc,
                                              const Arrival& at) noexcept {
  ServerSession* const s = find_server(r, static_cast<std::uint32_t>(words.low));
  if (s == nullptr || !s->peer_address->source_filter.matches(wc, at.grh)) [[unlikely]]
    return on_unknown_session(r, wire::unpack(words), wc, at.grh), false;
  return run_request(r, *s, words, at.block, at.payload(), r.context.now);
}

/// Handles datagrams other than plain requests and good replies.
[[gnu::cold, gnu::noinline]] bool on_other_datagram(Rpc& r, const ibv_wc& wc,
                                                    const Arrival& at) noexcept {
  RpcHeader header;
  if (wc.status != IBV_WC_SUCCESS || wc.byte_len < kGrhBytes ||
      !wire::decode(at.datagram(), wc.byte_len - kGrhBytes, header)) [[unlikely]] {
    return ++r.stats.bad_datagrams, false;
  }
  switch (header.kind) {
    case RpcKind::request:  // a good request was handled before
      return ++r.stats.bad_datagrams, false;
    case RpcKind::reply:
      return on_reply<false>(r, wire::pack(header), wc, at);
    case RpcKind::ping:
    case RpcKind::close:
      return on_ping_or_close(r, header, wc, at.grh), false;
    case RpcKind::path_challenge:
      return on_path_challenge(r, header, at.payload()), false;
    default:
      return on_session_answer(r, header, wc, at.grh), false;
  }
}

/// Handles a datagram. Returns whether the block was kept.
[[gnu::always_inline]] inline bool on_datagram(Rpc& r, const ibv_wc& wc,
                                               const Arrival& at) noexcept {
  wire::RpcWords words{};
  std::memcpy(&words, at.datagram(), sizeof words);
  const std::uint64_t bytes = std::uint64_t{wc.byte_len} - kGrhBytes - wire::kRpcHeaderBytes;
  if (wc.status == IBV_WC_SUCCESS) [[likely]] {
    if (wire::is_request(words, bytes)) return on_request(r, words, wc, at);
    if (wire::is_good_reply(words, bytes)) return on_reply(r, words, wc, at);
  }
  return on_other_datagram(r, wc, at);
}

/// Handles a direct datagram like one from a receive: it is no plain request or reply, or its queue
/// pair was not heard before.
[[gnu::cold, gnu::noinline]] bool on_indirect_datagram(Rpc& r, const verbs::DirectBatch& batch,
                                                       std::byte* bytes, std::uint32_t length,
                                                       Block* spare) noexcept;

/// A direct datagram. The peer can change both parts at any time.
struct DirectArrival {
  const std::byte* header;
  std::byte* bytes;  ///< all, with the header
  std::uint64_t length;
};

/// Handles a direct datagram. Returns whether the spare block was kept.
[[gnu::always_inline]] inline bool on_direct_datagram(Rpc& r, const verbs::DirectBatch& batch,
                                                      const DirectArrival& at, Block* spare,
                                                      std::uint64_t now) noexcept {
  wire::RpcWords words{};
  std::memcpy(&words.low, at.header, sizeof words.low);
  std::memcpy(&words.high, at.header + sizeof words.low, sizeof words.high);
  std::byte* const payload = at.bytes + wire::kRpcHeaderBytes;
  const std::uint64_t bytes = at.length - wire::kRpcHeaderBytes;
  const auto session = static_cast<std::uint32_t>(words.low);
  if (wire::is_request(words, bytes)) {
    ServerSession* const s = find_server(r, session);
    if (s != nullptr && s->peer_address->direct_source == batch.source) [[likely]]
      return run_request(r, *s, words, spare, payload, now);
  } else if (wire::is_good_reply(words, bytes)) {
    ClientSession* const c = find_client(r, session);
    if (c != nullptr && is_awaited(*c, words) && c->peer_address->direct_source == batch.source)
        [[likely]]
      return complete_call(r, *c, words, spare, payload, now);
  }
  return on_indirect_datagram(r, batch, at.bytes, static_cast<std::uint32_t>(at.length), spare);
}

/// The peer of a datagram's session; null if there is no such session.
PeerAddress* peer_of(Rpc& r, const RpcHeader& header) noexcept {
  const ServerSession* const s = find_server(r, header.session);
  const ClientSession* const c = find_client(r, header.session);
  if (header.kind == RpcKind::request && s != nullptr) return s->peer_address;
  if (header.kind == RpcKind::reply && c != nullptr) return c->peer_address;
  return nullptr;
}

bool on_indirect_datagram(Rpc& r, const verbs::DirectBatch& batch, std::byte* bytes,
                          std::uint32_t length, Block* spare) noexcept {
  ibv_wc wc{};
  wc.status = IBV_WC_SUCCESS;
  wc.byte_len = static_cast<std::uint32_t>(kGrhBytes) + length;
  wc.qp_num = r.port->qp_num();
  wc.src_qp = static_cast<std::uint32_t>(batch.source) & 0xffffff;
  wc.wc_flags = IBV_WC_GRH;
  const Arrival at{spare, r.port->copy_to_spare(*spare, batch, bytes, length)};
  RpcHeader header{};
  PeerAddress* const peer = wire::decode(bytes, length, header) ? peer_of(r, header) : nullptr;
  if (peer != nullptr && peer->direct_source != batch.source &&
      peer->source_filter.matches(wc, at.grh)) {
    peer->direct_source = batch.source;
    return on_direct_datagram(r, batch, {bytes, bytes, length}, spare, r.context.now);
  }
  if (length <= r.port->mtu()) return on_datagram(r, wc, at);
  // Only its head was copied, and no call takes it.
  ClientSession* const c = header.kind == RpcKind::reply ? find_client(r, header.session) : nullptr;
  c != nullptr ? on_unexpected_reply(r, *c, wc, at.grh) : on_unknown_session(r, header, wc, at.grh);
  return false;
}

/// Handles a datagram that is too long for the spare block. It is lost if there is no memory to
/// keep it.
[[gnu::noinline]] void on_long_datagram(Rpc& r, const verbs::DirectBatch& batch,
                                        DirectArrival at) noexcept {
  // Not the port's meanwhile: a callback may empty a pool, which makes the port give up its own.
  Block* const spare = r.port->take_long_spare();
  if (spare == nullptr) return void(++r.stats.unkept_datagrams);
  const bool kept = on_direct_datagram(r, batch, at, spare, r.context.now);
  // The slice that keeps it holds a reference.
  kept ? detail::release(spare) : r.port->give_long_spare(spare);
}

/// Whether a completion is of a receive with a datagram.
inline bool is_datagram(const ibv_wc& wc) noexcept {
  return agent::is_receive(wc.wr_id) && !is_batch_completion(wc.wr_id);
}

/// Prefetches the records of a datagram's session.
inline void prefetch_session(const Rpc& r, const std::byte* at) noexcept {
  wire::RpcWords words{};
  std::memcpy(&words, at, sizeof words);
  const RpcHeader header = wire::unpack(words);
  const std::uint32_t index = wire::RpcName::index(header.session);
  if (header.kind == RpcKind::request) r.servers.prefetch(index, header.number);
  if (header.kind == RpcKind::reply) r.clients.prefetch(index, header.number);
}

[[gnu::noinline]] void prefetch_sessions(const Rpc& r, const ibv_wc* wcs,
                                         const ibv_wc* end) noexcept {
  for (const ibv_wc* wc = wcs; wc != end; ++wc) {
    if (is_datagram(*wc) && wc->status == IBV_WC_SUCCESS)
      prefetch_session(r, r.port->arrival(agent::slot_of(wc->wr_id)) + kGrhBytes);
  }
}

[[gnu::noinline]] void prefetch_sessions(const Rpc& r, const verbs::DirectBatch& batch) noexcept {
  for (verbs::Line* line = batch.first; line != batch.end(); ++line) {
    const std::byte* const header = batch.header(*line);
    if (header == nullptr) return;
    prefetch_session(r, header);
  }
}

/// Handles the direct datagrams of a batch. Returns their number.
[[gnu::noinline]] std::uint32_t process_batch(Rpc& r, const verbs::DirectBatch& batch) noexcept {
  if (r.has_many_sessions) [[unlikely]]
    prefetch_sessions(r, batch);
  const verbs::Line* const end = batch.end();
  const std::uint32_t& longest = r.port->batches().longest;
  const std::uint64_t now = r.context.now;
  verbs::Line* line = batch.first;
  Block* spare = r.port->spare();
  // A batch is never empty, and the line behind the last one of a lane holds no datagram.
  for (std::uint64_t length = 0; spare != nullptr;) {
    std::byte* const bytes = batch.bytes(*line, length, longest);
    if (bytes == nullptr || line == end) break;
    const DirectArrival at{line->payload, bytes, length};
    ++line;
    if (length > wire::kPageDatagramBytes) [[unlikely]] {
      on_long_datagram(r, batch, at);
    } else if (on_direct_datagram(r, batch, at, spare, now)) [[unlikely]] {
      spare = r.port->renew_spare();
    }
  }
  const auto count = static_cast<std::uint32_t>(line - batch.first);
  verbs::release_batch(batch, count);
  return count;
}

[[gnu::noinline]] std::uint32_t process_each(Rpc& r, const verbs::DirectBatches& batches,
                                             std::uint32_t count) noexcept {
  std::uint32_t taken = 0;
  for (std::uint32_t i = 0; i != count; ++i) taken += process_batch(r, *batches.batches[i]);
  return taken;
}

}  // namespace

std::uint32_t process_batches(Rpc& r) noexcept {
  verbs::DirectBatches& batches = r.port->batches();
  const std::uint32_t count = std::exchange(batches.count, 0);
  return count == 1 ? process_batch(r, *batches.batches[0]) : process_each(r, batches, count);
}

const ibv_wc* process_completions(Rpc& r, const ibv_wc* wcs, const ibv_wc* end,
                                  std::uint32_t& events) noexcept {
  DatagramPort& port = *r.port;
  const ibv_wc* ahead = wcs + 1;
  while (ahead != end && ahead->qp_num == wcs->qp_num) ++ahead;
  end = ahead;
  if (end - wcs == 1 && is_batch_completion(wcs->wr_id)) return events += process_batches(r), end;
  for (const ibv_wc* wc = wcs + 1; wc != end; ++wc) {
    if (is_datagram(*wc)) __builtin_prefetch(port.arrival(agent::slot_of(wc->wr_id)) + kGrhBytes);
  }
  if (r.has_many_sessions) [[unlikely]]
    prefetch_sessions(r, wcs, end);
  std::uint32_t taken = 0;
  for (const ibv_wc* wc = wcs; wc != end; ++wc) {
    if (!agent::is_receive(wc->wr_id)) {
      port.on_sent(*wc);
      continue;
    }
    if (is_batch_completion(wc->wr_id)) {
      taken += process_batches(r);
      continue;
    }
    const std::uint32_t slot = agent::slot_of(wc->wr_id);
    port.give_back(slot, on_datagram(r, *wc, {port.block(slot), port.arrival(slot)}));
    ++taken;
  }
  events += taken;
  return end;
}

}  // namespace spinwire::rpc
