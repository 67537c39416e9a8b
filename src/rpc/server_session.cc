// A server's session: creation, release, and the client's pings and closes. A reply is kept until
// the slot's next request, or until an idle client's ping confirms it.
#include "rpc/server_session.h"

#include <algorithm>
#include <new>
#include <string_view>

#include "base/secret_word.h"
#include "control/peer_source.h"
#include "rpc/at_most_once.h"
#include "rpc/receive_reservation.h"
#include "rpc/reply_completion.h"
#include "rpc/session_liveness.h"
#include "rpc/session_recording.h"
#include "rpc/transport/connection_transport.h"
#include "rpc/unsent.h"

namespace spinwire::rpc {

using wire::RpcHeader;
using wire::RpcKind;

namespace {

/// A session of this host ends.
void release_source(Rpc& r, SessionSource& source) noexcept {
  if (--source.sessions == 0) r.sources.erase(source.address);
}

/// What a session is counted for.
struct Counted {
  SessionSource* source;
  control::SourceShare::Place share;
};
/// May throw std::bad_alloc.
Counted count_for(Rpc& r, const control::Address& from) {
  control::SourceShare::Place share = r.share.add(from);
  try {
    SessionSource& source = r.sources.try_emplace(from.source()).first->second;
    source.address = from.source();
    const Config::Rpc& limits = r.context.config.rpc;
    source.has_share =
        !from.is_loopback() && control::leaves_room(limits.sessions, limits.sessions_per_source);
    source.event_source = control::event_source(from);
    ++source.sessions;
    return {&source, share};
  } catch (...) {
    r.share.remove(share);
    throw;
  }
}

void enlist_as_unused(Rpc& r, ServerSession& s) noexcept {
  s.in_never_used_list = true;
  s.source->never_used.push_back(s);
  ++s.source->unused;
  ++r.never_used;
}

/// The source's oldest session that was never used. Removes those before it whose connection has
/// heard the client since the last timer of the session: only so many in one search.
ServerSession* find_oldest_unused(Rpc& r, SessionSource& source) noexcept {
  constexpr int kMostPerSearch = 32;
  for (int i = 0; i < kMostPerSearch && !source.never_used.empty(); ++i) {
    ServerSession& oldest = *source.never_used.front();
    if (!was_heard_by_connection(r, oldest)) return &oldest;
    mark_used(r, oldest);
  }
  return nullptr;
}

/// Finds the oldest session that was never used, at the source that has the most of them; null if
/// there is none. So a host that opens many sessions evicts its own.
ServerSession* find_victim(Rpc& r) noexcept {
  ServerSession* victim = nullptr;
  for (auto& [address, source] : r.sources) {
    const std::uint32_t most = victim != nullptr ? victim->source->unused : 0;
    ServerSession* const oldest = find_oldest_unused(r, source);
    if (oldest == nullptr || source.unused < most) continue;
    if (source.unused > most || oldest->opened_at < victim->opened_at) victim = oldest;
  }
  return victim;
}

bool evict_never_used_session(Rpc& r) noexcept {
  ServerSession* const victim = find_victim(r);
  if (victim == nullptr) return false;
  release_with_tombstone(r, *victim, Status::limit);
  return true;
}

/// A source at its share gives up a session of its own. False: it has used all.
bool replace_own_unused_session(Rpc& r, const control::Address& of) noexcept {
  const auto found = r.sources.find(of.source());
  if (found == r.sources.end()) return false;
  ServerSession* const unused = find_oldest_unused(r, found->second);
  if (unused != nullptr) release_with_tombstone(r, *unused, Status::limit);
  return unused != nullptr;
}

}  // namespace

void mark_used(Rpc& r, ServerSession& s) noexcept {
  if (!std::exchange(s.in_never_used_list, false)) return;
  s.source->never_used.erase(s);
  --s.source->unused;
  --r.never_used;
}

bool admit_source(Rpc& r, const control::Address& source) noexcept {
  // Sessions that were never used give way to others. They end before the new one begins, so that
  // their clients cannot use what others count on as free.
  const auto free = [&r] { return r.servers.capacity() - r.servers.size(); };
  if (free() + r.never_used == 0) return true;
  while (r.share.admits(source, free() + r.never_used)) {
    if (r.share.admits(source, free())) return true;
    if (!evict_never_used_session(r)) return false;
  }
  return replace_own_unused_session(r, source);
}

ServerSession* accept_session(Rpc& r, const wire::SessionEnd& peer, PeerAddress* peer_address,
                              const control::Address& from) {
  std::uint32_t index = r.servers.acquire(peer.window);
  if (index == kNone && evict_never_used_session(r)) index = r.servers.acquire(peer.window);
  if (index == kNone) return nullptr;
  Counted counted{};
  try {
    counted = count_for(r, from);
  } catch (...) {
    r.servers.release(index);
    throw;
  }
  ServerSession& s = r.servers.at(index);
  s.slots = r.servers.places(s);
  for (std::uint32_t i = 0; i < peer.window; ++i) s.slots[i].number = peer.first + i;
  // The name comes again after 2,047 uses of this record, since more bits would cost instructions
  // for each datagram. A datagram of an earlier session of that name counts only if it is from this
  // peer. The first number of calls is random, so an old reply or PendingCall fits no call.
  s.name = make_name(index, r.servers.generation(index), kServerGenerations);
  s.peer_session = peer.name;
  s.window = peer.window;
  s.advertised_window = 0;
  s.longest_datagram = longest_datagram(r, peer, *peer_address);
  s.peer_address = peer_address;
  s.transport = peer_address->transport;
  s.opened_at = s.last_heard = s.liveness.last_ping_or_close = s.liveness.last_check =
      r.context.clock.now();
  s.token = 0;  // SessionDialogues::accept() sets it
  s.client_proof = wire::session_proof(peer.token);
  s.source = counted.source;
  s.share = counted.share;
  s.is_path_validated = false;
  s.takes_goodbyes = peer.goodbyes;
  s.takes_refusal_codes = peer.refusal_codes;
  enlist_as_unused(r, s);
  s.liveness.silent_ticks = 0;
  s.calls_over_below = 0;
  s.timer.index = index;
  s.timer.kind = kServerTimer;
  r.context.timers.schedule(s.timer, next_keepalive(r, s.last_heard));
  post_reserved_receives(r);
  return &s;
}

bool count_for_source(Rpc& r, ServerSession& s, const control::Address& to) {
  // One that is used is counted for a source that it has shown to be there.
  if (!s.in_never_used_list || s.source->address == to.source()) return true;
  // Its own record is among those that may become free.
  const std::uint32_t free = r.servers.capacity() - r.servers.size() + r.never_used;
  if (!r.share.admits(to, free) && !replace_own_unused_session(r, to)) return false;
  const Counted counted = count_for(r, to);
  mark_used(r, s);
  r.share.remove(s.share);
  release_source(r, *s.source);
  s.source = counted.source;
  s.share = counted.share;
  enlist_as_unused(r, s);
  return true;
}

void release_server_session(Rpc& r, ServerSession& s, Status why) noexcept {
  record(r, s, observe::EventKind::state,
         {"closed, client ", s.peer != nullptr ? s.peer->address.view() : std::string_view()});
  if (r.current_call.session == &s) r.current_call = {};
  mark_used(r, s);
  end_reply_completions(s, why);
  forget_unsent(r, s);
  release_server_connection(r, s);
  return_receives(r, s);
  r.context.timers.cancel(s.timer);
  for (std::uint32_t i = 0; i < s.window; ++i) {
    release_payload(s.slots[i].payload);
    if (s.reply_buffers != nullptr) release_reply_buffer(s.reply_buffers[i]);
  }
  s.reply_buffers.reset();
  s.peer.reset();
  s.name = 0;
  r.share.remove(s.share);
  release_source(r, *std::exchange(s.source, nullptr));
  release_peer_address(r, std::exchange(s.peer_address, nullptr));
  r.servers.release(s.timer.index);
  release_spares_without_sessions(r);
}

void on_ping_or_close(Rpc& r, const RpcHeader& header, const ibv_wc& wc,
                      const std::byte* grh) noexcept {
  ServerSession* const s = find_server(r, header.session);
  if (s == nullptr || !s->peer_address->source_filter.matches(wc, grh))
    return on_unknown_session(r, header, wc, grh);
  if (!base::is_same_secret(wire::proof_of(header), wire::session_proof(s->token))) {
    ++r.stats.bad_datagrams;
    return;
  }
  s->liveness.last_ping_or_close = r.context.now;
  mark_used(r, *s);
  const bool over = header.kind == RpcKind::close;
  send_session_datagram(r, *s, over ? RpcKind::closed : RpcKind::pong);
  if (!over) return drop_replies_below(*s, header.number);
  release_with_tombstone(r, *s, Status::ok);  // a repeated close then gets an answer
}

}  // namespace spinwire::rpc
