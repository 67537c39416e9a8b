// READ, WRITE and atomics: the initiator's thread runs them on the peer's memory.
#include <errno.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "softverbs/lane/lane_data.h"
#include "softverbs/memory/atomic_lock.h"
#include "softverbs/memory/memory_region.h"
#include "softverbs/memory/remote_access.h"
#include "softverbs/objects.h"
#include "softverbs/queues.h"

namespace spinwire::softverbs {
namespace {

constexpr std::uint32_t kAtomicBytes = 8;
/// Delay until the next try for a held lock; long compared with the time that a holder needs.
constexpr Nanoseconds kLockRetryDelay = std::chrono::microseconds(50);
/// A lock that is held for longer ends the connection: its holder is stopped, or a peer has forged
/// the holder. Taking the lock away could make two atomics of one word overlap.
constexpr Nanoseconds kLongestLock = std::chrono::seconds(10);

constexpr bool is_atomic(std::uint8_t opcode) noexcept {
  return opcode == IBV_WR_ATOMIC_CMP_AND_SWP || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
}

enum class Reached : std::uint8_t { done, not_ready, contended, refused, failed };

/// The result of a failed copy: a dead process counts as a peer that does not respond.
Reached copy_failure() noexcept { return errno == ESRCH ? Reached::not_ready : Reached::failed; }

std::uint64_t changed(const SendWr& wr, std::uint64_t old) noexcept {
  if (wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) return old + wr.compare_add;
  return old == wr.compare_add ? wr.swap : old;
}

/// Changes the word with the processor's atomics, on pages that all contexts map.
std::uint64_t change_mapped(const SendWr& wr, std::byte* data) noexcept {
  std::atomic_ref<std::uint64_t> word(*reinterpret_cast<std::uint64_t*>(data));
  if (wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) return word.fetch_add(wr.compare_add);
  std::uint64_t old = wr.compare_add;
  word.compare_exchange_strong(old, wr.swap);
  return old;
}

/// Changes the word under a lock of the owner's process, on memory that peers cannot map. A holder
/// that dies has written all 8 bytes or none. The lock may be mapped anew here, so the bytes of
/// another process are not `direct`.
Reached change_locked(Peer& peer, const SendWr& wr, const RemoteBytes& bytes,
                      std::uint64_t& old) noexcept {
  std::atomic<std::uint64_t>* const lock = lock_of(peer, wr.remote_address);
  if (lock == nullptr) return Reached::failed;
  if (!acquire_lock(*lock, peer.context->process)) return Reached::contended;
  std::uint64_t fresh = 0;
  const ibv_sge to{reinterpret_cast<std::uint64_t>(&old), kAtomicBytes, 0};
  const ibv_sge from{reinterpret_cast<std::uint64_t>(&fresh), kAtomicBytes, 0};
  bool ok = true;
  if (bytes.kind == RemoteBytes::Kind::direct) {
    std::atomic_ref<std::uint64_t> word(*reinterpret_cast<std::uint64_t*>(bytes.data));
    old = word.load(std::memory_order_relaxed);
    word.store(changed(wr, old), std::memory_order_relaxed);
  } else {
    ok = copy_remote(peer, bytes, &to, 1, kAtomicBytes, Copy::from_peer);
    fresh = changed(wr, old);
    ok = ok && copy_remote(peer, bytes, &from, 1, kAtomicBytes, Copy::to_peer);
  }
  release_lock(*lock);
  return ok ? Reached::done : copy_failure();
}

/// Executes an atomic on the resolved bytes and writes the old value to the local elements.
Reached change(Peer& peer, const SendWr& wr, const ibv_sge* sges,
               const RemoteBytes& bytes) noexcept {
  std::uint64_t old = 0;
  const bool mappable = peer.same_process
                            ? (peer.local.regions[region_index(wr.rkey)].access & kMapped) != 0
                            : bytes.mappable;
  if (!mappable) {
    const Reached reached = change_locked(peer, wr, bytes, old);
    if (reached != Reached::done) return reached;
  } else {
    // Other contexts use the processor's atomics on this memory, so a lock would not be atomic with
    // them.
    const bool reachable =
        bytes.kind == RemoteBytes::Kind::direct ||
        (bytes.kind == RemoteBytes::Kind::guarded && peer.context->page_trust != PageTrust::none);
    if (!reachable || reinterpret_cast<std::uintptr_t>(bytes.data) % kAtomicBytes != 0)
      return Reached::failed;
    old = change_mapped(wr, bytes.data);
  }
  ScatterCursor to(sges, wr.sge_count);
  scatter_bytes(to, reinterpret_cast<const std::byte*>(&old), kAtomicBytes);
  return Reached::done;
}

/// Bytes of the peer, as a work request names them.
struct Target {
  std::uint64_t address;
  std::uint32_t length;
  std::uint32_t key;
};
Target target_of(const SendWr& wr) noexcept { return {wr.remote_address, wr.length, wr.rkey}; }

/// What a READ of bytes that the peer has named needs instead of a right of peers. A peer of our
/// process can be led to its private memory by what others write to its lanes, so there the memory
/// has to be shared.
constexpr std::uint32_t kNamedRight = IBV_ACCESS_LOCAL_WRITE;
constexpr std::uint32_t kNamedRightHere = kNamedRight | kMapped;

/// The right that a READ or WRITE needs.
inline std::uint32_t right_for(const Qp& qp, bool read, unsigned flags) noexcept {
  if (!read) return IBV_ACCESS_REMOTE_WRITE;
  // Programs know no such flag.
  const bool named =
      (flags & kNamedByPeer) != 0 && context_of(qp.context).driving == Driving::by_user;
  if (!named) return IBV_ACCESS_REMOTE_READ;
  return qp.peer->same_process ? kNamedRightHere : kNamedRight;
}

/// Resolves the bytes that a work request names, if the remote queue pair grants the rights. Call
/// it between begin_access() and end_access().
[[gnu::always_inline]] inline Reached find(const Qp& qp, const QueuePairRights& remote,
                                           const Target& target, std::uint32_t access,
                                           RemoteBytes& bytes) noexcept {
  const std::uint32_t asked = access & ~kNamedRightHere;
  if ((remote.access.load(std::memory_order_relaxed) & asked) != asked) return Reached::refused;
  if (target.length == 0) return Reached::done;
  bytes = resolve(*qp.peer, remote.pd.load(std::memory_order_relaxed), target.address,
                  target.length, target.key, access, qp.dest_qpn);
  return bytes.kind == RemoteBytes::Kind::refused ? Reached::refused : Reached::done;
}

/// The same, if the remote queue pair responds.
[[gnu::always_inline]] inline Reached find_served(const Qp& qp, const Target& target,
                                                  std::uint32_t access,
                                                  RemoteBytes& bytes) noexcept {
  const QueuePairRights& remote = *qp.remote_rights;
  return is_served(qp, remote) ? find(qp, remote, target, access, bytes) : Reached::not_ready;
}

/// Whether what a READ has copied is what the peer has named. If the peer's queue pair has failed
/// meanwhile, its user may have used the memory again, which no key of a window protects.
[[gnu::always_inline]] inline bool is_whole(const Qp& qp, std::uint32_t right) noexcept {
  if ((right & kNamedRight) == 0) return true;
  std::atomic_thread_fence(std::memory_order_acquire);  // the copy is older than the look
  return is_served(qp, *qp.remote_rights);
}

/// Reports a refused request to the responder, whose queue pair fails at its next poll.
void report_refusal(const Qp& qp, Nak reason) noexcept {
  Segment& there = *qp.peer->segment;
  remote_entry(qp).violation.store(violation_word(qp.dest_qpn, qp.qp_num, reason),
                                   std::memory_order_release);
  there.violated.store(1);
  there.doorbell.store(1);
  wake_sleeper(*qp.peer);
}

/// Tries the atomic again later, within a limit.
void wait_for_lock(Qp& qp) noexcept {
  Context& c = context_of(qp.context);
  const std::uint64_t now = read_clock(c);
  if (qp.contended_since == 0) qp.contended_since = std::max<std::uint64_t>(now, 1);
  if (now - qp.contended_since > c.clock.ticks(kLongestLock))
    return fail_oldest(qp, IBV_WC_REM_OP_ERR);
  wait_until(qp, kLockRetryDelay);
}

/// Fails or delays a work request that did not succeed.
[[gnu::noinline]] void handle_failure(Qp& qp, Reached reached) noexcept {
  switch (reached) {
    case Reached::not_ready:
      return retry(qp, Nak::not_ready, 0);
    case Reached::contended:
      return wait_for_lock(qp);
    case Reached::refused:
      report_refusal(qp, Nak::access);
      return fail_oldest(qp, IBV_WC_REM_ACCESS_ERR);
    default:
      return fail_oldest(qp, IBV_WC_REM_OP_ERR);
  }
}

/// Checks an atomic as far as possible without the peer.
ibv_wc_status check(const Qp& qp, const SendWr& wr, const ibv_sge* sges) noexcept {
  if (wr.length != kAtomicBytes) return IBV_WC_LOC_LEN_ERR;
  if (!elements_allowed(qp, wr, sges, IBV_ACCESS_LOCAL_WRITE)) return IBV_WC_LOC_PROT_ERR;
  return wr.remote_address % kAtomicBytes != 0 ? IBV_WC_REM_INV_REQ_ERR : IBV_WC_SUCCESS;
}

[[gnu::noinline]] bool run_atomic(Qp& qp, const SendWr& wr, const ibv_sge* sges) noexcept {
  if (const ibv_wc_status status = check(qp, wr, sges); status != IBV_WC_SUCCESS) {
    if (status == IBV_WC_REM_INV_REQ_ERR) report_refusal(qp, Nak::invalid_request);
    return fail_oldest(qp, status), false;
  }
  Peer& peer = *qp.peer;
  begin_access(peer);
  RemoteBytes bytes;
  Reached reached = find_served(qp, target_of(wr), IBV_ACCESS_REMOTE_ATOMIC, bytes);
  if (reached == Reached::done) reached = change(peer, wr, sges, bytes);
  end_access(peer);
  if (reached != Reached::contended) qp.contended_since = 0;
  if (reached != Reached::done) handle_failure(qp, reached);
  return reached == Reached::done;
}

}  // namespace

bool read_ahead(Qp& qp, const SendWr& wr, const ibv_sge* sges) noexcept {
  if (!elements_allowed(qp, wr, sges, IBV_ACCESS_LOCAL_WRITE)) return false;
  Peer& peer = *qp.peer;
  begin_access(peer);
  RemoteBytes bytes;
  const std::uint32_t right = right_for(qp, true, wr.flags);
  const bool done =
      find_served(qp, target_of(wr), right, bytes) == Reached::done &&
      (wr.length == 0 || copy_remote(peer, bytes, sges, wr.sge_count, wr.length, Copy::from_peer));
  end_access(peer);
  return done && is_whole(qp, right);
}

bool run_one_sided(Qp& qp, const SendWr& wr, const ibv_sge* sges) noexcept {
  if (is_atomic(wr.opcode)) [[unlikely]]
    return run_atomic(qp, wr, sges);
  const bool read = wr.opcode == IBV_WR_RDMA_READ;
  if (!elements_allowed(qp, wr, sges, read ? IBV_ACCESS_LOCAL_WRITE : 0)) [[unlikely]]
    return fail_oldest(qp, IBV_WC_LOC_PROT_ERR), false;
  Peer& peer = *qp.peer;
  begin_access(peer);
  RemoteBytes bytes;
  const std::uint32_t right = right_for(qp, read, wr.flags);
  Reached reached = find_served(qp, target_of(wr), right, bytes);
  if (reached == Reached::done && wr.length != 0 &&
      !copy_remote(peer, bytes, sges, wr.sge_count, wr.length,
                   read ? Copy::from_peer : Copy::to_peer)) [[unlikely]] {
    reached = copy_failure();
  }
  end_access(peer);
  if (!is_whole(qp, right)) [[unlikely]]
    reached = Reached::not_ready;
  if (reached != Reached::done) [[unlikely]]
    handle_failure(qp, reached);
  return reached == Reached::done;
}

namespace {

/// Runs a READ or WRITE of one element, which needs the right. False, and nothing ended: the queue
/// has to run it, and to report why it fails.
template <bool read>
[[gnu::always_inline]] inline bool run_now(Qp& qp, const ibv_send_wr& request,
                                           std::uint32_t right) noexcept {
  const ibv_sge& sge = *request.sg_list;
  const Context& c = context_of(qp.context);
  const Pd& pd = *static_cast<Pd*>(qp.pd);
  if (read) {
    if (!local_allows(c, pd.id, sge, IBV_ACCESS_LOCAL_WRITE)) return false;
  } else if ((request.send_flags & IBV_SEND_INLINE) != 0) {
    if (sge.length > qp.max_inline) return false;
  } else if (!allows_again(c, pd, qp.readable, sge, 0)) {
    return false;
  }
  const Target target{request.wr.rdma.remote_addr, sge.length, request.wr.rdma.rkey};
  Peer& peer = *qp.peer;
  begin_access(peer);
  RemoteBytes bytes;
  bool done = find_served(qp, target, right, bytes) == Reached::done;
  if (done && bytes.kind == RemoteBytes::Kind::direct) [[likely]] {
    std::byte* const here = pointer(sge.addr);
    // The ranges may overlap if a context is connected to itself.
    peer.context->large_copies.copy(read ? here : bytes.data, read ? bytes.data : here, sge.length);
  } else if (done) {
    done = copy_remote(peer, bytes, &sge, 1, sge.length, read ? Copy::from_peer : Copy::to_peer);
  }
  end_access(peer);
  return done;
}

/// A READ of what the peer has named. Apart, so that other requests do not pay for it.
[[gnu::noinline]] bool run_named_now(Qp& qp, const ibv_send_wr& request) noexcept {
  const std::uint32_t right = right_for(qp, true, request.send_flags);
  return run_now<true>(qp, request, right) && is_whole(qp, right);
}

bool run_now(Qp& qp, const ibv_send_wr& request) noexcept {
  if (request.opcode == IBV_WR_RDMA_WRITE)
    return run_now<false>(qp, request, IBV_ACCESS_REMOTE_WRITE);
  if ((request.send_flags & kNamedByPeer) != 0) [[unlikely]]
    return run_named_now(qp, request);
  return run_now<true>(qp, request, IBV_ACCESS_REMOTE_READ);
}

}  // namespace

// With what it calls in one function, a request takes fewer instructions.
[[gnu::flatten]] ibv_send_wr* run_at_once(Qp& qp, ibv_send_wr* wr) noexcept {
  // Work requests complete in order.
  if (!qp.open || qp.sq_tail != qp.sq_head || qp.has_faults || qp.direct_lost || qp.peer->gone)
      [[unlikely]]
    return wr;
  for (; wr != nullptr; wr = wr->next) {
    const bool runs = (wr->opcode == IBV_WR_RDMA_WRITE || wr->opcode == IBV_WR_RDMA_READ) &&
                      wr->num_sge == 1 && wr->sg_list->length != 0;
    if (!runs || !run_now(qp, *wr)) break;
  }
  return wr;
}

namespace {

/// Stores the peer's own word (DirectMessages::word). Nothing but the segment can be changed, which
/// is no memory of the application, so what the segment says is enough, also for a peer of this
/// process.
bool write_own_word(const Qp& qp, QueuePairEntry& remote, std::uint32_t rkey,
                    std::uint64_t word) noexcept {
  Peer& peer = *qp.peer;
  begin_access(peer);
  const bool stored =
      is_served(qp, remote.rights, word_qpn(qp.expected)) &&
      remote.word_key.load(std::memory_order_relaxed) == rkey &&
      (remote.rights.access.load(std::memory_order_relaxed) & IBV_ACCESS_REMOTE_WRITE) != 0;
  if (stored) remote.word.store(word, std::memory_order_release);
  end_access(peer);
  return stored;
}

}  // namespace

bool write_word(Qp& qp, std::uint64_t address, std::uint32_t rkey, std::uint64_t word) noexcept {
  // A plan of faults must be able to delay the word, or to lose it.
  if (!qp.open || qp.sq_next != qp.sq_head || qp.has_faults) [[unlikely]]
    return false;
  if (QueuePairEntry& remote = remote_entry(qp);
      remote.word_key.load(std::memory_order_relaxed) == rkey && rkey != 0) [[likely]]
    return write_own_word(qp, remote, rkey, word);
  const Target target{address, sizeof word, rkey};
  Peer& peer = *qp.peer;
  // Of the queue pair only MessageState is read, which is one cache line. Its own number is part of
  // what it expects.
  const QueuePairRights& remote = rights_of_remote(qp);
  begin_access(peer);
  RemoteBytes bytes;
  const bool stored = is_served(qp, remote, word_qpn(qp.expected)) &&
                      find(qp, remote, target, IBV_ACCESS_REMOTE_WRITE, bytes) == Reached::done &&
                      bytes.kind == RemoteBytes::Kind::direct &&
                      reinterpret_cast<std::uintptr_t>(bytes.data) % sizeof word == 0;
  if (stored) {
    std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(bytes.data))
        .store(word, std::memory_order_release);
  }
  end_access(peer);
  return stored;
}

}  // namespace spinwire::softverbs
