// The embedded device: no NIC, no kernel module, no root; peers are threads and processes of the
// same host and user. The calls mirror libibverbs; see verbs/provider.h for their conventions.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

#include "spinwire/clock.h"
#include "spinwire/status.h"

namespace spinwire::softverbs {

struct Context;
enum class Driving : std::uint8_t;
struct FaultPlan;

inline constexpr const char* kDeviceName = "softverbs";
/// Whether contexts rely on the pages of peers in other processes. Such a peer can supply pages of
/// its private memory as late as it likes, and can take hugepages away: a context that touches them
/// waits for ever, or ends its process by SIGBUS.
///   "0"     operations on private memory are refused, the kernel copies to and from hugepages, and
///           atomics on them are refused
///   "1"     all pages are trusted; the default with Driving::by_poll
///   others  the default with Driving::by_user: operations on private memory are refused; unless
///           the context shares hugepages itself, the kernel copies to and from those of peers
inline constexpr const char* kTrustPagesVariable = "SOFTVERBS_TRUST_PAGES";
/// Limits of a queue and of a work request.
inline constexpr int kMaxWr = 32768;
inline constexpr int kMaxSge = 16;
/// Longest message, READ or WRITE, bytes: the specification's limit.
inline constexpr std::uint32_t kMaxMessage = 1u << 31;

/// Opens a context, with a fault plan (softverbs/faults/fault_plan.h) if one is given.
Result<ibv_context*> open_device(const Clock& clock, Driving driving,
                                 const FaultPlan* faults = nullptr);
/// EBUSY while objects of the context exist.
int close_device(ibv_context* context) noexcept;
/// Promises that this thread drives all peers of the context, as in simulations. Revocation then
/// needs no barrier in other threads.
void keep_to_thread(ibv_context* context) noexcept;
void control_device(ibv_context* context) noexcept;

// Sleeping: device_sleep.cc.
/// A descriptor that becomes readable when a sleeping context is woken. The first call makes it: -1
/// and errno if the system refuses.
int wake_descriptor(ibv_context* context) noexcept;
/// Whether a context may sleep.
enum class SleepAnswer : std::uint8_t {
  work,   ///< a poll, or control_device(), finds something
  brief,  ///< yes; but something is awaited that wakes nobody, such as an acknowledgement
  yes,
};
/// Prepares to sleep after a poll of the completion queue that found nothing: from now on peers
/// make wake_descriptor() readable when they send. Call wake_descriptor() before.
SleepAnswer arm_device(ibv_cq* cq) noexcept;
/// The context is awake: peers need not wake it.
void disarm_device(ibv_context* context) noexcept;

/// A context that an engine drives has two ports, which lead to the same peers, and each its GID.
/// The second carries no datagrams. Another context has one.
std::uint8_t ports_of(const Context& context) noexcept;
int query_device(ibv_context* context, ibv_device_attr* attr) noexcept;
int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* attr) noexcept;
int query_gid(ibv_context* context, std::uint8_t port, int index, ibv_gid* gid) noexcept;
int get_async_event(ibv_context* context, ibv_async_event* event) noexcept;

ibv_pd* alloc_pd(ibv_context* context) noexcept;
/// Makes another handle with the rights of `pd`, which must outlive it.
ibv_pd* alloc_parent_domain(ibv_pd* pd) noexcept;
int dealloc_pd(ibv_pd* pd) noexcept;
ibv_cq* create_cq(ibv_context* context, int entries) noexcept;
/// Makes room for at least `entries` completions; never shrinks the queue. EINVAL if more
/// completions wait in it.
int resize_cq(ibv_cq* cq, int entries) noexcept;
int destroy_cq(ibv_cq* cq) noexcept;
ibv_srq* create_srq(ibv_pd* pd, ibv_srq_init_attr* attr) noexcept;
/// IBV_SRQ_LIMIT only: the depth is fixed.
int modify_srq(ibv_srq* srq, ibv_srq_attr* attr, int mask) noexcept;
int query_srq(ibv_srq* srq, ibv_srq_attr* attr) noexcept;
int destroy_srq(ibv_srq* srq) noexcept;

/// Makes an address handle and attaches the context with its GID, if necessary. Null and errno if
/// the context cannot be reached. Set-up.
ibv_ah* create_ah(ibv_pd* pd, ibv_ah_attr* attr) noexcept;
int destroy_ah(ibv_ah* ah) noexcept;
/// Whether control() has found that the handle's process has ended or closed its context.
bool peer_has_ended(const ibv_ah* ah) noexcept;

ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* attr) noexcept;
/// After a change to ERR or RESET, peers no longer access memory through the queue pair; after a
/// loss of rights, not with those rights. EBUSY while an access is in progress: no new access
/// begins; call again. Until then a queue pair on its way to RESET is in ERR, and one that loses
/// rights keeps its state without them. RESET with bound windows: EBUSY and no change.
int modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask) noexcept;
int query_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask, ibv_qp_init_attr* init) noexcept;
/// EBUSY: as modify_qp() to RESET.
int destroy_qp(ibv_qp* qp) noexcept;

}  // namespace spinwire::softverbs
