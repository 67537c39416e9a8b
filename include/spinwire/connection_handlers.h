// The callbacks of a connection.
#pragma once

#include "spinwire/callback.h"
#include "spinwire/message.h"
#include "spinwire/status.h"

namespace spinwire {

class Connection;
class MemoryRequest;
class RemoteMemory;
struct LeaseReply;
struct Returned;

/// Reports how a request about a lease ended; see lease.h. Runs like a CompletionCallback.
using LeaseCallback = Callback<void(LeaseReply&)>;

/// Callbacks of a connection. Any may be empty. See spinwire.h for what callbacks may do.
struct ConnectionHandlers {
  /// The connection became ready.
  Callback<void(Connection)> on_ready;
  /// A message or a write with immediate arrived. Runs in the order in which the peer sent them.
  Callback<void(Connection, Message&)> on_message;
  /// The peer offers a message longer than connections.eager_bytes, possibly before earlier
  /// messages have arrived. on_message runs when the message has arrived, in order.
  Callback<void(Connection, Offer&)> on_offer;
  /// The peer leases memory to us. Move the argument out to keep the lease; otherwise the lease is
  /// refused. May overtake rendezvous messages.
  Callback<void(Connection, RemoteMemory&)> on_lease;
  /// The peer asks for memory, within our limits: accept or refuse the request. Empty: every such
  /// request is accepted.
  Callback<void(Connection, MemoryRequest&)> on_memory_request{};
  /// Memory leased to the peer has come back, and no peer can reach the memory any more. If the
  /// connection has ended, an access of the peer may still be under way; Returned::memory is then
  /// empty.
  Callback<void(Connection, const Returned&)> on_returned;
  /// The connection is `closed`. Runs once, after the last completion. The error's status is `ok`
  /// after close() on either side; Error::goodbye is what the peer said. Otherwise the error is the
  /// first thing that went wrong, or, of a connection that reconnects, the error that is final (see
  /// Reconnect). A peer that refuses the connection for a time says so in Error::goodbye, too. Some
  /// adapters cannot tell why the peer is silent. The connecting end then asks at the peer's
  /// address before on_closed, for at most an eighth of connections.peer_timeout. Completions do
  /// not wait for that.
  Callback<void(Connection, const Error&)> on_closed;
  /// The connection was lost, or closed by a peer that invites us back, and reconnects (see
  /// Reconnect). The state is `resolving`, and all outstanding operations have ended. After a
  /// goodbye, the error's status is `ok`. on_ready or on_closed runs next.
  Callback<void(Connection, const Error&)> on_interrupted;
  /// An operation (send() to fetch_add(), send_raw()) answered would_block, or one that copies
  /// (send_copy(), send() of several parts, write_and_send()) no_buffer, and may succeed now. Also
  /// after a call about a lease (request_memory(), lease(), RemoteMemory::renew(), give_back())
  /// that found too many control messages; but not after one that leases.maximum or a renewal
  /// under way refused. Runs once, in a poll(), for all such answers since the last time; send
  /// until would_block comes again. Not if the connection has ended, or was interrupted, since.
  /// While an engine waits for this, its sleeps are brief.
  Callback<void(Connection)> on_writable{};
};

}  // namespace spinwire
