// What arrives at the port: requests and replies, as short ways as they can have. Hot.
#include <string_view>

#include "rpc/calling.h"

namespace spinwire::rpc {
namespace {

using wire::RpcHeader;
using wire::RpcKind;

/// Where a datagram lies.
struct Arrival {
  Block* block;
  std::byte* route;  ///< in front of the datagram

  [[nodiscard]] std::byte* datagram() const noexcept { return route + kRouteBytes; }
  [[nodiscard]] std::byte* payload() const noexcept {
    return route + kRouteBytes + wire::kRpcHeaderBytes;
  }
};

/// How often losses double the patience with calls that have not gone out yet. Each call's own
/// backs off from there.
constexpr unsigned kMostLearned = 3;

/// After Jacobson: the mean of round trips, and how far they lie from it.
inline void measure(const Rpc& r, ClientSession& c, std::uint64_t trip) noexcept {
  if (trip < c.shortest) [[unlikely]] {
    if (c.smooth == 0) {
      c.smooth = trip;
      c.variance = trip / 2;
    }
    c.shortest = trip;
  }
  const auto off = static_cast<std::int64_t>(trip - c.smooth);
  c.smooth += static_cast<std::uint64_t>(off >> 3);
  c.variance += static_cast<std::uint64_t>(
      ((off < 0 ? -off : off) - static_cast<std::int64_t>(c.variance)) >> 2);
  c.patience = std::max(c.smooth + 4 * c.variance, r.least_patience);
}

/// A request was sent again for nothing if the server had it by then: that says nothing of the way,
/// and patience with slow handlers would be the undoing of calls that do get lost. Else it, or its
/// reply, got lost or is slow on its way: there is more patience with the next, until one of them
/// tells of a round trip.
[[gnu::cold, gnu::noinline]] void learn_from_repeated(Rpc& r, ClientSession& c, const Call& k,
                                                      std::uint16_t held) noexcept {
  const std::uint64_t since = r.shared.now - std::min(k.sent_at, r.shared.now);
  const std::uint64_t there = ticks_held(r, held);
  if (held != kHeldUnknown && (held == kHeldMost || there >= since)) return;
  const std::uint64_t patience = std::max(c.smooth + 4 * c.variance, r.least_patience);
  c.patience = std::min(2 * c.patience, patience << kMostLearned);
  on_loss(r, c);
}

/// Answers whether the block was kept.
[[gnu::always_inline]] inline bool take_reply(Rpc& r, const RpcHeader& header, const ibv_wc& wc,
                                              const Arrival& at) noexcept {
  ClientSession* const c = find_client(r, header.session);
  if (c == nullptr || !c->route->from.is_of(wc, at.route)) [[unlikely]]
    return ++r.stats.bad_datagrams, false;
  const std::uint64_t now = r.shared.now;
  c->last_heard = now;
  const std::uint32_t slot = header.number & (c->window - 1);
  Call& k = c->calls[slot];
  if (k.number != header.number || (c->active & bit(slot)) == 0) [[unlikely]]
    return ++r.stats.late, false;
  if (header.window != c->granted) [[unlikely]] {
    c->granted = std::min(header.window, c->window);
    allow(*c);
  }
  if (k.tries == 0) [[likely]] {
    const std::uint64_t trip = now - std::min(k.sent_at, now);
    measure(r, *c, trip);
    if (trip > r.target || c->flow.window != c->flow.whole) [[unlikely]]
      adjust(r, *c, trip, header.method);
  } else {
    learn_from_repeated(r, *c, k, header.method);
  }
  const ReplyCallback done = k.done;
  vacate(r, *c, k, slot);
  ++r.stats.replies;
  Reply reply(static_cast<Status>(header.status), at.block, at.payload(), header.length);
  done(reply);
  if (c->waiting_count != 0 && c->name == header.session) [[unlikely]]
    pump(r, *c);
  return reply.kept();
}

/// A request that was here before: the answer went astray, or the handler is still at it.
[[gnu::cold, gnu::noinline]] void take_repeated(Rpc& r, const ServerSession& s, const Service& v,
                                                std::uint32_t number) noexcept {
  if (number != v.number || v.state != ServiceState::answered) {
    ++r.stats.duplicates;
    return;
  }
  ++r.stats.resent;
  send_answer(r, s, v, kHeldUnknown);
}

/// Receives for as many requests as the session may send at once, if there are any left. A quarter
/// is for the engine's own calls: whoever serves may have to call others for that.
[[gnu::cold, gnu::noinline]] void grant(Rpc& r, ServerSession& s) noexcept {
  if (r.promised + s.window > r.budget || r.granted + s.window > r.budget - r.budget / 4) return;
  r.promised += s.window;
  r.granted += s.window;
  s.granted = s.window;
  cover(r);
}

[[gnu::cold, gnu::noinline]] void refuse(Rpc& r, std::uint32_t session, std::uint32_t number,
                                         Status status, std::string_view text) noexcept {
  const std::size_t size = std::min(text.size(), kShortCall);
  (void)answer(r, session, number, status, reinterpret_cast<const std::byte*>(text.data()), size,
               nullptr);
}

/// Answers whether the block was kept.
[[gnu::always_inline]] inline bool take_request(Rpc& r, const RpcHeader& header, const ibv_wc& wc,
                                                const Arrival& at) noexcept {
  ServerSession* const s = find_server(r, header.session);
  if (s == nullptr || !s->route->from.is_of(wc, at.route)) [[unlikely]]
    return take_unknown(r, header, wc, at.route), false;
  s->last_heard = r.shared.now;
  Service& v = s->services[header.number & (s->window - 1)];
  if (static_cast<std::int32_t>(header.number - v.number) <= 0) [[unlikely]]
    return take_repeated(r, *s, v, header.number), false;
  clear(v.payload);
  v.number = header.number;
  v.state = ServiceState::running;
  v.payload.since = r.since;
  if (s->granted != s->window) [[unlikely]]
    grant(r, *s);
  if (header.method >= r.methods || !r.handlers[header.method]) [[unlikely]] {
    refuse(r, header.session, header.number, Status::unsupported, "no such method");
    return false;
  }
  ++r.stats.served;
  Request request({&r, header.session, header.number}, header.method, at.block, at.payload(),
                  header.length);
  r.handlers[header.method](request);
  if (!request.answered()) [[unlikely]]
    refuse(r, header.session, header.number, Status::refused, "the handler has not answered");
  return request.kept();
}

/// Any other, and replies that tell of something.
[[gnu::cold, gnu::noinline]] bool take_other(Rpc& r, const ibv_wc& wc, const Arrival& at) noexcept {
  RpcHeader header;
  if (wc.status != IBV_WC_SUCCESS || wc.byte_len < kRouteBytes ||
      !wire::decode(at.datagram(), wc.byte_len - kRouteBytes, header)) [[unlikely]] {
    return ++r.stats.bad_datagrams, false;
  }
  switch (header.kind) {
    case RpcKind::request:  // a good one was known before
      return ++r.stats.bad_datagrams, false;
    case RpcKind::reply:
      return take_reply(r, header, wc, at);
    case RpcKind::ping:
    case RpcKind::close:
      return take_question(r, header, wc, at.route), false;
    default:
      return take_answer(r, header, wc, at.route), false;
  }
}

/// Answers whether the block was kept.
[[gnu::always_inline]] inline bool take_datagram(Rpc& r, const ibv_wc& wc,
                                                 const Arrival& at) noexcept {
  wire::RpcWords words{};
  std::memcpy(&words, at.datagram(), sizeof words);
  const std::uint64_t bytes = std::uint64_t{wc.byte_len} - kRouteBytes - wire::kRpcHeaderBytes;
  if (wc.status == IBV_WC_SUCCESS) [[likely]] {
    if (wire::is_request(words, bytes)) return take_request(r, wire::unpack(words), wc, at);
    if (wire::is_good_reply(words, bytes)) return take_reply(r, wire::unpack(words), wc, at);
  }
  return take_other(r, wc, at);
}

/// With more than this, sessions are not in the caches.
constexpr std::uint32_t kManySessions = 128;

/// Asks for the records that a batch is for.
[[gnu::noinline]] void fetch_ahead(const Rpc& r, const ibv_wc* wcs, const ibv_wc* end) noexcept {
  for (const ibv_wc* wc = wcs; wc != end; ++wc) {
    if (!agent::is_receive(wc->wr_id) || wc->status != IBV_WC_SUCCESS) continue;
    wire::RpcWords words{};
    std::memcpy(&words, r.port->arrival(agent::slot_of(wc->wr_id)) + kRouteBytes, sizeof words);
    const RpcHeader header = wire::unpack(words);
    const std::uint32_t index = wire::RpcName::index(header.session);
    if (header.kind == RpcKind::request) r.servers.prefetch(index, header.number);
    if (header.kind == RpcKind::reply) r.clients.prefetch(index, header.number);
  }
}

}  // namespace

const ibv_wc* take_completions(Rpc& r, const ibv_wc* wcs, const ibv_wc* end,
                               std::uint32_t& events) noexcept {
  Port& port = *r.port;
  const ibv_wc* ahead = wcs + 1;
  for (const std::uint32_t ours = wcs->qp_num; ahead != end && ahead->qp_num == ours; ++ahead) {
    if (agent::is_receive(ahead->wr_id))
      __builtin_prefetch(port.arrival(agent::slot_of(ahead->wr_id)) + kRouteBytes);
  }
  end = ahead;
  if (r.clients.size() + r.servers.size() > kManySessions) [[unlikely]]
    fetch_ahead(r, wcs, end);
  std::uint32_t taken = 0;
  for (const ibv_wc* wc = wcs; wc != end; ++wc) {
    if (!agent::is_receive(wc->wr_id)) {
      port.on_sent(*wc);
      continue;
    }
    const std::uint32_t slot = agent::slot_of(wc->wr_id);
    port.give_back(slot, take_datagram(r, *wc, {port.block(slot), port.arrival(slot)}));
    ++taken;
  }
  events += taken;
  return end;
}

}  // namespace spinwire::rpc
