// How an engine listens for connections, makes them, and prepares them out-of-band.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "spinwire/callback.h"
#include "spinwire/clock.h"
#include "spinwire/connection.h"
#include "spinwire/connection_handlers.h"
#include "spinwire/connection_settings.h"
#include "spinwire/endpoint.h"
#include "spinwire/identity.h"
#include "spinwire/reconnect.h"

namespace spinwire {

/// How a connection is established.
enum class Via : std::uint8_t {
  tcp,      ///< the engine's own handshake over TCP; any device
  rdma_cm,  ///< librdmacm, at both ends; not on softverbs
};

/// How a listener treats peers that ask for connections and sessions.
struct ListenOptions {
  /// A connection is being made for a peer that asks for one. May call set_handlers() and
  /// configure(), or close() to refuse, with the code 0 (PeerRequest::refuse()).
  Callback<void(Connection)> on_accept;
  ConnectionHandlers handlers;    ///< of all accepted connections
  Via via = Via::tcp;             ///< how connections are established
  ConnectionSettings settings{};  ///< of all accepted connections; see Connection::configure()
  /// A peer asks for a connection, and nothing has been made for it. Accept or refuse it there;
  /// on_accept follows if it is accepted. Empty: every peer is accepted. It may drop the listener.
  Callback<void(PeerRequest&)> on_connect_request;
  /// A peer asks for a session, which it does over TCP: never with Via::rdma_cm. Works like
  /// on_connect_request. The address to which replies would go is the peer's own claim as yet.
  Callback<void(PeerRequest&)> on_session_request;
  /// Given to every peer that is accepted, for a connection or a session; up to kPrivateDataMax
  /// bytes, which listen() copies.
  std::span<const std::byte> private_data{};
};

/// How Engine::connect() makes a connection.
struct ConnectOptions {
  ConnectionHandlers handlers;    ///< the callbacks
  Reconnect reconnect{};          ///< whether it is made again after a loss
  Via via = Via::tcp;             ///< how the connection is established
  ConnectionSettings settings{};  ///< instead of the engine's
  /// For each attempt, until ready; up to 1 h. 0: connections.connect_timeout.
  Nanoseconds timeout{0};
  /// Further addresses of the peer, or of peers that can stand in for it, in the order in which
  /// they are tried; see Reconnect. Connection::peer() is the address of the present attempt, and
  /// the one that is connected when the connection is ready.
  std::vector<std::string> alternatives{};
  /// Given to the peer with each attempt; up to kPrivateDataMax bytes, which connect() copies.
  /// Through rdma_cm a peer of an older release takes none: the attempt fails as `unsupported`.
  std::span<const std::byte> private_data{};
  /// Ports and GIDs of this engine's device, in the order in which they are tried; see Reconnect
  /// and Connection::local_path(). The ports must exist and have the partition key `pkey_index`,
  /// but their links may be down. Empty: the place that `settings` name, or the engine's. Not with
  /// Via::rdma_cm, and not beside a port or GID index in `settings`. All local paths are of one
  /// device, because memory is registered with one: to fail over between devices, use an engine for
  /// each.
  std::vector<LocalPath> local_paths{};
};

/// How Engine::prepare() makes a connection.
struct PrepareOptions {
  ConnectionHandlers handlers;  ///< the callbacks
  /// Our endpoint is ready: bring it to the peer. May call join() and close().
  Callback<void(Connection, const Endpoint&)> on_endpoint;
  /// Until ready; up to 1 h. 0: connections.connect_timeout.
  Nanoseconds timeout{0};
  ConnectionSettings settings{};  ///< instead of the engine's
  /// Given to the peer in our endpoint; up to kPrivateDataMax bytes, which prepare() copies.
  std::span<const std::byte> private_data{};
  /// With a key: protects against an endpoint that was recorded earlier. The peer calls join() with
  /// our endpoint first, and then Connection::endpoint(), whose proof answers ours. Our join()
  /// refuses any other endpoint. Set it at one of the two ends only.
  bool peer_joins_first = false;
  /// With a key: join() also takes an endpoint without a proof, of a peer that is no engine or has
  /// no key.
  bool peer_has_no_key = false;
};

}  // namespace spinwire
