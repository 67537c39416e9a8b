// What an engine has counted, and the state of its pools.
#pragma once

#include <array>
#include <cstdint>

#include "spinwire/session_state.h"

namespace spinwire {

/// A pool of an engine's memory.
enum class Pool : std::uint8_t {
  send,        ///< what the application sends, and replies
  lease,       ///< memory that is exposed or leased to peers
  rendezvous,  ///< receives messages above connections.eager_bytes
  receive,     ///< receives all other messages; only for memory_stats()
};

/// Handshakes of an engine with a key; see Config::Security. An endpoint of join() counts as an
/// inbound one.
struct AuthenticationStats {
  /// Their peers have proved a key; inbound and outbound. A client has done so with the first frame
  /// behind its proof, so the counts of two ends may differ.
  std::uint64_t authenticated = 0;
  std::uint64_t no_proof = 0;     ///< inbound: the peer offered no proof before it ended
  std::uint64_t unknown_key = 0;  ///< inbound: a proof of a key that is not in our file
  std::uint64_t wrong_proof = 0;  ///< inbound: a forged proof, or one of a key with another name
  /// Inbound: nothing that only a holder of the key can send came behind the proof, so it may have
  /// been recorded, and sent again. Or an endpoint does not answer ours.
  std::uint64_t unconfirmed_proof = 0;
  std::uint64_t unproven_servers = 0;  ///< outbound: the server did not prove our key
  std::uint64_t altered_frames = 0;    ///< altered, replayed or reordered after the proof
};

/// Counts of an engine since it was opened, and its present levels.
struct EngineStats {
  std::uint64_t polls = 0;              ///< by poll(), arm() and wait()
  std::uint64_t control_steps = 0;      ///< taken by poll() or poll_control()
  std::uint64_t sleeps = 0;             ///< times that wait() slept
  std::uint64_t completions = 0;        ///< drained ones; one may stand for many direct datagrams
  std::uint64_t stale_completions = 0;  ///< completions of operations that had ended
  std::uint64_t messages_sent = 0;  ///< ended as `ok`; direct ones without a callback count at once
  std::uint64_t messages_received = 0;  ///< includes writes with immediate
  /// Calls of Message::take() that answered an empty buffer because the pool
  /// memory.rendezvous_bytes was exhausted.
  std::uint64_t unkept_messages = 0;
  /// Violations of the protocol by peers. Each ended its connection.
  std::uint64_t bad_messages = 0;
  /// Posts of send work requests; direct messages between two flushes count as one.
  std::uint64_t doorbells = 0;
  std::uint64_t receives_posted = 0;     ///< receives given to the device
  std::uint64_t accepted = 0;            ///< inbound connections that became ready
  std::uint64_t connected = 0;           ///< outbound connections that became ready
  std::uint64_t handshakes_refused = 0;  ///< inbound handshakes that failed
  AuthenticationStats authentication;    ///< outcomes of handshakes with a key
  std::uint64_t peers_lost = 0;          ///< connections that ended as peer_lost
  std::uint64_t closed = 0;              ///< connections that ended, for any reason
  std::uint32_t connections = 0;         ///< in any state, including those of sessions
  std::uint32_t operations = 0;          ///< in flight, including offered rendezvous messages
  std::uint32_t receives = 0;            ///< posted now
  std::uint32_t reserved_receives = 0;   ///< receives reserved for peers now
  std::uint32_t windows_free = 0;        ///< unused memory windows
  std::uint32_t own_domains = 0;  ///< connections' own protection domains, including closing ones
  /// Remote keys of the application and one for each connection, including those being revoked.
  /// Excludes the pools' keys.
  std::uint32_t registrations = 0;
};

/// State of a pool.
struct MemoryStats {
  std::uint64_t pool_bytes = 0;   ///< size of the pool
  std::uint64_t free_bytes = 0;   ///< in chunks without a size class
  std::uint64_t blocks_used = 0;  ///< blocks that somebody holds
  std::uint64_t allocations = 0;  ///< that succeeded
  std::uint64_t refusals = 0;     ///< allocations that answered no_buffer
};

/// An engine at a glance.
struct EngineSnapshot {
  /// As Engine::stats() answers, but operations, messages_sent and messages_received count each
  /// connection as of the control step that looked at it last. One step looks at a few.
  EngineStats stats;
  RpcStats calls;                      ///< of the engine's sessions, opened and served
  std::array<MemoryStats, 4> pools{};  ///< by Pool
  /// Connections by Blocker, as of the control step that looked at each last.
  std::array<std::uint32_t, 6> connections_by_blocker{};
  bool draining = false;  ///< whether Engine::drain() is under way
};

}  // namespace spinwire
