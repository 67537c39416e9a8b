// How a dead peer is noticed: silence of a client or of a server, and what follows from it.
#include "rpc/session_liveness.h"

#include <algorithm>
#include <new>
#include <utility>

#include "rpc/client_call.h"
#include "rpc/client_session.h"
#include "rpc/receive_reservation.h"
#include "rpc/server_session.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire::rpc {

using control::ProbeOutcome;
using wire::RpcHeader;
using wire::RpcKind;

namespace {

/// Whether the server was silent for too long while an answer was due. Time in which this process
/// did not check does not count.
bool has_timed_out(const Rpc& r, ClientSession& c, std::uint64_t now) noexcept {
  const std::uint64_t most = 2 * r.keepalive_interval;
  if (last_heard_from(c) >= c.last_liveness_check) {
    c.silent_ticks = 0;
  } else {
    c.silent_ticks += std::min(now - c.last_liveness_check, most);
  }
  c.last_liveness_check = now;
  return c.silent_ticks > r.peer_timeout;
}

/// Probes a silent server through the control port: another engine, or its next incarnation, may be
/// at its address. One probe serves all sessions with it.
void probe_if_silent(Rpc& r, const ClientSession& c, std::uint64_t now) noexcept {
  if (c.silent_ticks < 2 * r.keepalive_interval || now < c.peer_address->next_probe_at) return;
  const bool begun = r.dialogues.probe(c);
  c.peer_address->next_probe_at = begun ? kProbeUnderWay : now + r.keepalive_interval;
}

/// What is known of a server that sends no datagrams any more.
const char* why_silent(ProbeOutcome probe) noexcept {
  switch (probe) {
    case ProbeOutcome::alive:
      return "no datagram comes from it, but its control port answers: datagrams are lost on the "
             "way";
    case ProbeOutcome::restarted:
      return "another engine, or the next incarnation of this one, is at its address";
    case ProbeOutcome::silent:
      return "no datagram comes from it, and its control port takes connections and says nothing: "
             "its process hangs or was stopped";
    case ProbeOutcome::no_listener:
      return "no datagram comes from it, and nobody listens at its address: its process is gone";
    case ProbeOutcome::unreachable:
      return "no datagram comes from it, and its host does not answer: the host or the network is "
             "down";
    case ProbeOutcome::none:
      break;
  }
  return "no datagram came from it any more";
}

/// All calls with lower numbers are over. A session without calls in flight aligns its slots first,
/// so that one number divides all former calls from all later ones whenever it arrives. Slots whose
/// numbers are too far apart to be ordered get kNoCallsOver.
std::uint32_t first_open_call(ClientSession& c) noexcept {
  constexpr std::int32_t kFar = 1 << 30;
  const std::uint32_t uses = ~(c.window - 1u);
  const std::uint32_t base = c.slots[0].number & uses;
  if (c.in_flight == 0 && c.last_call_id == c.aligned_at_call) return base;
  std::int32_t least = 0;
  std::int32_t most = 0;
  for (std::uint32_t slot = 1; slot < c.window; ++slot) {
    const auto ahead = static_cast<std::int32_t>((c.slots[slot].number & uses) - base);
    least = std::min(least, ahead);
    most = std::max(most, ahead);
  }
  if (least <= -kFar || most >= kFar) return base | wire::kNoCallsOver;
  const std::uint32_t last = base + static_cast<std::uint32_t>(most);
  if (c.in_flight != 0) return base + static_cast<std::uint32_t>(least);
  for (std::uint32_t slot = 0; slot < c.window; ++slot) c.slots[slot].number = last + slot;
  if (c.backlog_count == 0) c.aligned_at_call = c.last_call_id;
  return last;
}

ForgottenSession& forgotten_slot(ForgottenSessions& ones, std::uint32_t name) noexcept {
  return ones[(name ^ name >> wire::RpcName::kIndexBits) % ones.size()];
}

}  // namespace

bool check_server_liveness(Rpc& r, ClientSession& c, std::uint64_t now) noexcept {
  if (c.transport == Transport::connection) return true;  // the connection notices by itself
  if (has_timed_out(r, c, now)) {
    fail_session(r, c, Status::peer_lost, why_silent(c.peer_address->last_probe));
    return false;
  }
  probe_if_silent(r, c, now);
  if (now - std::min(last_heard_from(c), now) >= r.keepalive_interval)
    send_control(r, c, RpcKind::ping, first_open_call(c));
  return true;
}

void on_server_probed(Rpc& r, std::uint64_t incarnation, ProbeOutcome outcome) noexcept {
  for (std::uint32_t i = 0; i < r.clients.capacity(); ++i) {
    if (!r.clients.in_use(i)) continue;
    ClientSession& c = r.clients.at(i);
    if (c.peer_address == nullptr || c.peer_address->incarnation != incarnation) continue;
    if (c.transport != Transport::datagram) continue;
    c.peer_address->last_probe = outcome;
    c.peer_address->next_probe_at = r.context.clock.now() + r.keepalive_interval;
    if (outcome == ProbeOutcome::restarted && c.silent_ticks != 0)
      fail_session(r, c, Status::peer_lost, why_silent(outcome));
  }
}

void forget_session(Rpc& r, ServerSession& s) noexcept {
  if (r.forgotten == nullptr) r.forgotten.reset(new (std::nothrow) ForgottenSessions);
  if (r.forgotten != nullptr && s.transport == Transport::datagram) {
    ForgottenSession& f = forgotten_slot(*r.forgotten, s.name);
    PeerAddress* const before = f.peer_address;
    f = {s.name, s.peer_session, s.peer_address, r.context.clock.now(), 0};
    ++s.peer_address->references;
    if (before != nullptr) release_peer_address(r, before);
  }
  release_server_session(r, s);
}

void review_forgotten_session(Rpc& r) noexcept {
  ForgottenSession& f = (*r.forgotten)[r.next_forgotten++ % r.forgotten->size()];
  if (f.name == 0) return;
  const bool over = r.context.clock.now() - f.forgotten_at > r.context.clock.ticks(kRememberedFor);
  if (!over && !r.context.device->peer_has_ended(f.peer_address->destination.ah)) return;
  release_peer_address(r, std::exchange(f, {}).peer_address);
}

void on_unknown_session(Rpc& r, const RpcHeader& header, const ibv_wc& wc,
                        const std::byte* grh) noexcept {
  // A client repeats its close when the answer is late.
  const bool repeated = header.kind == RpcKind::close && find_server(r, header.session) == nullptr;
  ++(repeated ? r.stats.late : r.stats.bad_datagrams);
  if (r.forgotten == nullptr || header.session == 0) return;
  ForgottenSession& f = forgotten_slot(*r.forgotten, header.session);
  if (f.name != header.session || !f.peer_address->source_filter.matches(wc, grh)) return;
  if (f.notified_at != 0 && r.context.now - f.notified_at < r.min_rto) return;
  f.notified_at = r.context.now;
  (void)send(r, f.peer_address->destination, {f.peer_session, f.name, 0, RpcKind::unknown, 0, 0, 0},
             {});
}

void on_server_timer(Rpc& r, ServerSession& s) noexcept {
  const std::uint64_t now = r.context.clock.now();
  if (s.transport == Transport::connection && is_connected(r, s))
    s.last_control = now;  // the connection is alive
  // Time in which this process did not check does not count.
  s.silent_ticks =
      last_heard_from(s) >= s.last_liveness_check
          ? 0
          : s.silent_ticks + std::min(now - s.last_liveness_check, 2 * r.keepalive_interval);
  s.last_liveness_check = now;
  if (s.silent_ticks > r.peer_timeout) return forget_session(r, s);
  if (now - std::min(s.last_heard, now) > r.idle_timeout) {
    return_receives(r, s);
    if (s.connection != nullptr) release_reply_buffers(*s.connection);
  }
  r.context.timers.schedule(s.timer, now + r.keepalive_interval);
}

}  // namespace spinwire::rpc
