// Detects dead peers: silence of a client or of a server, and the consequences.
#include "rpc/session_liveness.h"

#include <algorithm>
#include <new>
#include <string_view>
#include <utility>

#include "base/ticks.h"
#include "rpc/client_call.h"
#include "rpc/client_session.h"
#include "rpc/kept_replies.h"
#include "rpc/receive_reservation.h"
#include "rpc/server_session.h"
#include "rpc/session_goodbye.h"
#include "rpc/session_recording.h"
#include "rpc/transport/connection_transport.h"
#include "wire/goodbye.h"

namespace spinwire::rpc {

using control::ProbeOutcome;
using wire::RpcHeader;
using wire::RpcKind;

namespace {

/// Notes the silence of a session's peer since the last check. Time in which this process did not
/// check does not count.
template <typename Session>
void note_silence(const Rpc& r, Session& s, std::uint64_t now) noexcept {
  const std::uint64_t elapsed = base::ticks_since(s.liveness.last_check, now);
  s.liveness.silent_ticks =
      last_heard_from(s) >= s.liveness.last_check
          ? 0
          : s.liveness.silent_ticks + std::min(elapsed, 2 * r.timeouts.keepalive);
  s.liveness.last_check = now;
}

/// Whether the server was not heard for a whole keepalive interval, nor since the last check. The
/// engine at its address may have replaced it, or listens there while it lives.
bool is_silent(const Rpc& r, const ClientSession& c, std::uint64_t now) noexcept {
  const std::uint64_t heard = last_heard_from(c);
  return c.liveness.silent_ticks != 0 && heard < c.liveness.last_check &&
         base::ticks_since(heard, now) >= r.timeouts.keepalive;
}

/// Calls `act` for each session that a probe concerns. Another address says nothing: any server may
/// claim the incarnation of this one.
template <typename Act>
void for_each_probed(Rpc& r, std::uint64_t incarnation, std::string_view address,
                     const Act& act) noexcept {
  r.clients.for_each([&](ClientSession& c) {
    const bool is_concerned = c.peer_address != nullptr &&
                              c.peer_address->incarnation == incarnation &&
                              c.transport == Transport::datagram && c.address == address;
    if (is_concerned) act(c);
  });
}

/// Probes a silent server through the control port: another engine, or the server's next
/// incarnation, may be at its address. One probe serves all sessions with the server that were
/// opened at that address. One that cannot begin costs no search, because then others may fail,
/// too.
void probe(Rpc& r, ClientSession& c, std::uint64_t now) noexcept {
  c.probes.next_at = now + r.timeouts.keepalive;
  if (!r.dialogues.probe(c)) return;
  for_each_probed(r, c.peer_address->incarnation, c.address,
                  [](ClientSession& each) { each.probes.next_at = kProbeUnderWay; });
}
void probe_if_silent(Rpc& r, ClientSession& c, std::uint64_t now) noexcept {
  if (c.liveness.silent_ticks >= 2 * r.timeouts.keepalive && now >= c.probes.next_at)
    probe(r, c, now);
}

/// Ends a session whose server sends no datagrams any more.
void end_silent_session(Rpc& r, ClientSession& c) noexcept {
  const ProbeOutcome probe = c.probes.last;
  const control::ProbeFinding why = control::explain(probe);
  const char* const remedy =
      probe == ProbeOutcome::alive ? "datagrams are lost on the way: see the network" : why.remedy;
  ErrorText found("no datagram comes from it any more");
  try {
    if (why.found != nullptr) found.value.append("; ").append(why.found);
  } catch (...) {  // without memory, keep the text so far
  }
  end_session(r, c, Status::peer_lost, std::move(found), remedy);
}

/// Whether the server has said goodbye. A successor may listen at its address while it answers the
/// calls in progress: only its silence then says that it is lost.
bool said_goodbye(const ClientSession& c) noexcept {
  return c.goodbye.reason != GoodbyeReason::none;
}

/// The lowest open call number. A session without calls in flight first aligns its slots, so that
/// one number separates all former calls from all later ones at any time. kNoCallsOver if the
/// numbers of the slots are too far apart to be ordered.
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

/// A doubted server is lost if it answers no ping of a whole keepalive interval, and its address
/// has no listener or another engine's. Returns false if that has ended the session.
bool check_doubt(Rpc& r, ClientSession& c, std::uint64_t now) noexcept {
  const ProbeOutcome found = c.probes.last;
  const bool replaced = found == ProbeOutcome::restarted || found == ProbeOutcome::no_listener;
  const bool heard = !is_doubted(c);
  if (!heard && base::ticks_since(c.doubted_since, now) < r.timeouts.keepalive) {
    send_session_datagram(r, c, RpcKind::ping, first_open_call(c));
    schedule_check(r, c, now + r.timeouts.keepalive / 8);
    return true;
  }
  if (!heard && !said_goodbye(c) && replaced) return end_silent_session(r, c), false;
  c.doubted_since = 0;
  c.connection->is_retried = true;
  connect_backlog(r, c);
  return true;
}

/// The entry of a session's name; null before the first session was forgotten.
SessionTombstone* find_tombstone(const SessionTombstones& all, std::uint32_t name) noexcept {
  if (all.entries == nullptr) return nullptr;
  return &(*all.entries)[(name ^ name >> wire::RpcName::kIndexBits) % all.entries->size()];
}

}  // namespace

bool end_if_server_ended(Rpc& r, ClientSession& c) noexcept {
  // In a simulation the server is on another host, and no datagram is direct.
  const bool has_server = c.state == SessionState::ready || awaits_proof(c);
  const bool ended = has_server && c.transport == Transport::datagram &&
                     DatagramPort::reaches_directly(c.peer_address->destination) &&
                     r.context.device->peer_has_ended(c.peer_address->destination.ah);
  if (ended)
    end_session(r, c, Status::peer_lost, "its process has ended, or closed the device",
                "start the server again");
  return ended;
}

bool doubt_server(Rpc& r, ClientSession& c, const EndReason& why) noexcept {
  ConnectionClient& b = *c.connection;
  const bool suspicious =
      why && (why->status == Status::peer_lost || why->status == Status::refused);
  if (!suspicious || std::exchange(b.is_retried, false) || c.doubted_since != 0) return false;
  const std::uint64_t now = r.context.clock.now();
  c.doubted_since = now;
  c.probes.last = ProbeOutcome::none;
  if (c.probes.next_at != kProbeUnderWay) probe(r, c, now);
  schedule_check(r, c, now);
  return true;
}

bool check_server_liveness(Rpc& r, ClientSession& c, std::uint64_t now) noexcept {
  if (c.transport == Transport::connection) return true;  // the connection checks its peer
  if (end_if_server_ended(r, c)) return false;
  note_silence(r, c, now);
  if (c.doubted_since != 0 && !check_doubt(r, c, now)) return false;
  if (c.liveness.silent_ticks > r.timeouts.peer) return end_silent_session(r, c), false;
  probe_if_silent(r, c, now);
  // Checks may be early: see next_keepalive().
  const std::uint64_t due = r.timeouts.keepalive - r.timeouts.keepalive / 4;
  if (base::ticks_since(last_heard_from(c), now) >= due)
    send_session_datagram(r, c, RpcKind::ping, first_open_call(c));
  return true;
}

void on_server_probed(Rpc& r, const control::ProbedEngine& probed, ProbeOutcome outcome) noexcept {
  const std::uint64_t now = r.context.clock.now();
  const control::AddressText address = probed.address.text();
  for_each_probed(r, probed.incarnation, address.view(), [&](ClientSession& c) {
    c.probes.last = outcome;
    c.probes.next_at = now + r.timeouts.keepalive;
    if (outcome == ProbeOutcome::restarted && is_silent(r, c, now) && !said_goodbye(c))
      end_silent_session(r, c);
  });
}

void release_with_tombstone(Rpc& r, ServerSession& s, Status why) noexcept {
  if (!s.is_path_validated) return release_server_session(r, s, why);
  auto& entries = r.tombstones.entries;
  if (entries == nullptr) entries.reset(new (std::nothrow) std::array<SessionTombstone, 4096>);
  SessionTombstone* const tombstone = find_tombstone(r.tombstones, s.name);
  if (tombstone != nullptr) {
    PeerAddress* const before = tombstone->peer_address;
    *tombstone = {s.name,
                  s.peer_session,
                  wire::session_proof(s.token),
                  s.peer_address,
                  r.context.clock.now(),
                  0,
                  is_leaving(s),
                  wire::encode(s.leaving.goodbye)};
    ++s.peer_address->references;
    if (before != nullptr) release_peer_address(r, before);
  }
  release_server_session(r, s, why);
}

void review_tombstone(Rpc& r) noexcept {
  // The numbers of a counter are, like names, spread over all entries.
  SessionTombstone* const tombstone = find_tombstone(r.tombstones, r.tombstones.next_review++);
  if (tombstone == nullptr || tombstone->name == 0) return;
  const bool over = base::ticks_since(tombstone->released_at, r.context.clock.now()) >
                    r.context.clock.ticks(kRememberedFor);
  if (!over && !r.context.device->peer_has_ended(tombstone->peer_address->destination.ah)) return;
  release_peer_address(r, std::exchange(*tombstone, {}).peer_address);
}

void on_unknown_session(Rpc& r, const RpcHeader& header, const ibv_wc& wc,
                        const std::byte* grh) noexcept {
  // A client repeats its close when the answer is late.
  const bool repeated = header.kind == RpcKind::close && find_server(r, header.session) == nullptr;
  ++(repeated ? r.stats.late_replies : r.stats.bad_datagrams);
  SessionTombstone* const found = find_tombstone(r.tombstones, header.session);
  if (found == nullptr || header.session == 0) return;
  SessionTombstone& tombstone = *found;
  if (tombstone.name != header.session || !tombstone.peer_address->source_filter.matches(wc, grh))
    return;
  if (tombstone.notified_at != 0 && r.context.now - tombstone.notified_at < r.min_rto) return;
  tombstone.notified_at = r.context.now;
  const bool left = tombstone.has_left;
  (void)send(r, tombstone.peer_address->destination,
             wire::session_header(tombstone.peer_session, left ? tombstone.goodbye : tombstone.name,
                                  left ? RpcKind::closed : RpcKind::unknown, tombstone.proof),
             {});
}

void on_server_timer(Rpc& r, ServerSession& s) noexcept {
  const std::uint64_t now = r.context.clock.now();
  if (s.in_never_used_list && was_heard_by_connection(r, s)) mark_used(r, s);
  if (s.transport == Transport::connection && is_connected(r, s))
    s.liveness.last_ping_or_close = now;  // the connection is alive
  note_silence(r, s, now);
  if (s.liveness.silent_ticks > r.timeouts.peer) {
    record(r, s, observe::EventKind::error, {"peer_lost: the client was silent for peer_timeout"});
    return release_with_tombstone(r, s, Status::peer_lost);
  }
  std::uint64_t next = next_keepalive(r, now);
  if (is_leaving(s)) next = continue_leaving(r, s, now);
  if (next == 0) return;
  if (base::ticks_since(s.last_heard, now) > r.timeouts.idle) {
    return_receives(r, s);
    if (s.connection != nullptr) release_reply_buffers(*s.connection);
  }
  // A client that still waits for a reply sends its request again, until its call times out or its
  // silence lasts for the peer time-out.
  if (base::ticks_since(s.last_heard, now) > std::max(r.timeouts.peer, r.timeouts.call))
    drop_kept_inline_replies(r, s);
  r.context.timers.schedule(s.timer, next);
}

}  // namespace spinwire::rpc
