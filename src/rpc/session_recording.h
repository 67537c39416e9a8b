// What sessions tell the flight recorder. Cold.
#pragma once

#include <initializer_list>
#include <string_view>

#include "observe/recorder.h"
#include "rpc/rpc_state.h"
#include "rpc/session.h"

namespace spinwire::rpc {

inline observe::EventOrigin event_origin_of(const ClientSession& c) noexcept {
  return {c.event_source, observe::EventRing::all};
}
/// Records an event of a client's session.
inline void record(const Rpc& r, const ClientSession& c, observe::EventKind kind,
                   std::initializer_list<std::string_view> text) noexcept {
  r.context.recorder.record(kind, observe::EventSubject::session, c.timer.index, c.generation, text,
                            event_origin_of(c));
}
/// Records the session's state, which has just been set.
inline void record_state(const Rpc& r, const ClientSession& c) noexcept {
  record(r, c, observe::EventKind::state, {to_string(c.state), ", server ", c.address});
}
/// Records why a session ends or is interrupted.
inline void record(const Rpc& r, const ClientSession& c, const Error& why) noexcept {
  record(r, c, observe::EventKind::error, {to_string(why.status), ": ", why.found});
}
/// The ring of a served session's events, besides its own. A client is a stranger until a call or
/// ping has come from it, unless it has proved a key. Joining a session by a connection proves less
/// than a datagram: the frames of a handshake need no device.
inline observe::EventRing event_ring_of(const ServerSession& s) noexcept {
  const bool is_used =
      s.transport == Transport::datagram ? !s.in_never_used_list : s.last_heard != s.opened_at;
  return is_used || !identity_of(s.peer).key.empty() ? observe::EventRing::all
                                                     : observe::EventRing::strangers;
}
inline observe::EventOrigin event_origin_of(const ServerSession& s) noexcept {
  return {s.source->event_source, event_ring_of(s)};
}
/// Records an event of a server's session.
inline void record(const Rpc& r, const ServerSession& s, observe::EventKind kind,
                   std::initializer_list<std::string_view> text) noexcept {
  r.context.recorder.record(kind, observe::EventSubject::served_session, s.timer.index,
                            r.servers.generation(s.timer.index), text, event_origin_of(s));
}

}  // namespace spinwire::rpc
