// What a context knows of another one, of this process or another.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/intrusive_list.h"
#include "base/shared_memory.h"
#include "base/unique_fd.h"
#include "softverbs/lane/lanes.h"
#include "softverbs/lane/segment.h"
#include "softverbs/lane/wake_pipe.h"
#include "softverbs/memory/mapped_share.h"

namespace spinwire::softverbs {

struct Context;
struct OwnRegion;
struct Peer;
struct Qp;

// The links of the lists below.
Qp*& next_of_peer(Qp& qp) noexcept;
Qp*& next_stalled(Qp& qp) noexcept;

/// Marks the accesses of one context of this process to the memory of another, in private memory:
/// what other processes write does not hide a thread that is in the midst of a copy.
struct alignas(64) LocalAccess {
  ibv_gid from{};                        ///< the accessing context
  std::atomic<std::uint64_t> serial{0};  ///< odd while an access is in progress
};
/// The accesses of this process's contexts to the memory of one context. Any thread.
struct LocalAccesses {
  std::mutex mutex;
  std::vector<std::shared_ptr<LocalAccess>> all;
};

struct MappedObject {
  std::byte* base = nullptr;
  std::uint64_t size = 0;
  std::uint32_t generation = 0;
  bool guarded = false;  ///< the peer may take pages away, so the processor must not touch them
};

/// Shares a lane among the queue pairs whose datagrams wait for room: see ud_send_queue.cc.
struct DatagramTurns {
  const Qp* current = nullptr;     ///< the queue pair whose datagram is sent next
  const Qp* next = nullptr;        ///< the queue pair with the turn after that
  std::uint64_t began = 0;         ///< the current turn, ticks
  std::uint64_t budget = 0;        ///< ticks that datagrams may still wait
  std::uint64_t budget_head = 0;   ///< `out.head` when the budget was last restored
  std::uint64_t full_in_pass = 0;  ///< Context::datagram_pass that found no room
};

/// The part of a context that the other contexts of its process use.
struct LocalSegment {
  std::shared_ptr<base::SharedMemory> segment;           ///< keeps the mapping
  std::shared_ptr<const OwnRegion[]> regions;            ///< what the context's keys open
  std::shared_ptr<const QueuePairRights[]> queue_pairs;  ///< what its queue pairs allow
  std::shared_ptr<LocalAccesses> accesses;               ///< to the context's memory
  std::shared_ptr<WakePipe> wake_pipe;                   ///< wakes the context
};

/// Another process, which all its contexts share.
struct PeerProcess {
  std::uint32_t pid = 0;
  std::uint32_t users = 0;  ///< peers
  bool watched = false;     ///< in the epoll set
  base::UniqueFd pidfd;     ///< empty if the kernel gave none: control() then checks the process
  base::UniqueFd memory;    ///< its address space, once it was needed
  Mapped mapped;            ///< objects of its contexts, as this context has mapped them
};

/// Another context, of this process or another, identified by its GID.
struct Peer {
  Context* context = nullptr;
  Segment* segment = nullptr;  ///< mapped; null once detached
  OutLane out;
  InLane* in = nullptr;
  bool same_process = false;
  bool gone = false;     ///< died, closed, or given up
  bool overdue = false;  ///< an access of its takes longer than kLongestAccess
  /// Given up while its process lives, which may still write to its lane: see give_up_peer().
  bool given_up = false;
  bool unacked = false;         ///< listed in Context::unacked
  bool ack_due = false;         ///< listed in Context::acks_due
  bool waits_for_acks = false;  ///< a work request runs when earlier ones are acknowledged
  bool has_held_line = false;   ///< listed in Context::held: a line may be held
  bool wake_due = false;        ///< it sleeps, and could not be woken: control() tries again
  std::uint32_t users = 0;
  base::IntrusiveStack<next_of_peer> queue_pairs;  ///< connected to this peer
  /// Queue pairs that wait for room in `out`, in order of arrival.
  base::IntrusiveQueue<next_stalled> stalled;
  const Qp* in_flight_owner =
      nullptr;  ///< the queue pair that the last in-flight record is open for
  Peer* next_held = nullptr;
  std::uint32_t datagrams_waiting = 0;  ///< for room in `out`
  DatagramTurns turns;
  std::vector<MappedObject> objects;
  ibv_gid gid{};
  std::uint32_t pid = 0;
  PeerWake wake;                              ///< unless `same_process`
  PeerProcess* process = nullptr;             ///< null if `same_process`
  LocalSegment local;                         ///< empty unless `same_process`
  std::shared_ptr<LocalAccess> local_access;  ///< null unless `same_process`
};

}  // namespace spinwire::softverbs
