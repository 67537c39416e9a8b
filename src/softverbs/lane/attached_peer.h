// Attaches and releases the segments of other contexts. Cold.
#pragma once

#include <infiniband/verbs.h>

#include <string>

#include "softverbs/objects.h"

namespace spinwire::softverbs {

/// Returns the peer with this GID. Attaches it if necessary: maps its segment and claims a lane to
/// it. Returns null and sets errno and `why` if the peer cannot be reached. May allocate.
Peer* attach_peer(Context& c, const ibv_gid& gid, std::string& why) noexcept;

/// Handles the death or closing of a peer: completes the work that it acknowledged, and fails every
/// queue pair with more outstanding.
void handle_peer_gone(Peer& peer) noexcept;

/// Ends the connections of a peer whose access to our memory does not end, though its process
/// lives. It keeps its lane, where it may still write, until the process has ended. Called by
/// control() only, since it completes work of any queue pair.
void give_up_peer(Peer& peer) noexcept;
/// A peer that was given up can be detached like others: its process has ended, or it has closed.
void end_given_up(Peer& peer) noexcept;

/// Whether a process has ended, reaped or not. Makes one or two system calls.
bool process_ended(std::uint32_t pid) noexcept;

/// Whether the process of a pidfd has ended.
bool has_ended(const base::UniqueFd& pidfd) noexcept;

/// Whether a process has released its memory: it was just killed, or is a zombie. The kernel then
/// shows its files as another user's to all but root.
bool is_ending(std::uint32_t pid);

/// Takes the process out of the epoll set.
void unwatch_process(Context& c, PeerProcess& process) noexcept;

/// Directory entries from this index on were never claimed, as far as is known: the count that
/// peers write, but never less than it was.
std::uint32_t lanes_in_use(Context& c) noexcept;

/// Unmaps and removes a peer without users.
void detach_peer(Context& c, Peer& peer) noexcept;

/// Opens a lane of this context for polls, and links it to its peer if the peer is attached. Null
/// without memory.
InLane* open_lane(Context& c, std::uint32_t index) noexcept;

/// Opens and links the lane from an attached peer, if the peer has claimed one.
void open_in_lane(Context& c, const Peer& peer) noexcept;

void sleep_lane(Context& c, InLane& lane) noexcept;
void wake_lane(Context& c, InLane& lane) noexcept;

}  // namespace spinwire::softverbs
