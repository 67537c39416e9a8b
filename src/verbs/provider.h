// The control verbs of a device, named as libibverbs names them. Cold. The hot calls (post_send,
// post_recv, post_srq_recv, poll_cq) go through the objects' own ibv_context::ops.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <string>
#include <vector>

#include "spinwire/buffer.h"
#include "spinwire/clock.h"
#include "spinwire/status.h"
#include "verbs/direct_datagrams.h"
#include "verbs/direct_messages.h"
#include "verbs/gid.h"

namespace spinwire::verbs {

struct CompletionQueueOptions {
  int entries = 0;
  /// One thread at a time uses the queue and all objects that complete there, so the device may
  /// omit locks. Devices without this option ignore it.
  bool single_threaded = false;
  ibv_pd* parent_domain = nullptr;  ///< null: none
};

/// Whether the user of a completion queue may sleep.
enum class Armed : std::uint8_t {
  yes,
  brief,       ///< yes; but something is awaited that wakes nobody: look again soon
  poll_again,  ///< completions may have come before the queue was armed: poll, and arm again
  work,        ///< a poll or `control` finds something
};

/// Functions that return int return 0 or an errno value. On failure, functions that return a
/// pointer return null and set errno, as libibverbs does.
struct Provider {
  const char* name;
  bool reaches_other_hosts;  ///< false: its devices are chosen only by name
  std::vector<std::string> (*device_names)();
  Result<ibv_context*> (*open_device)(const std::string& name, const Clock& clock);
  int (*close_device)(ibv_context* context);

  int (*query_device)(ibv_context* context, ibv_device_attr* attr);
  int (*query_port)(ibv_context* context, std::uint8_t port, ibv_port_attr* attr);
  int (*query_gid)(ibv_context* context, std::uint8_t port, int index, ibv_gid* gid);
  /// The readable entries among the first `slots` of the port's table.
  std::vector<GidEntry> (*gid_table)(ibv_context* context, std::uint8_t port, int slots);
  /// Reads the next async event; EAGAIN if there is none. Never blocks.
  int (*get_async_event)(ibv_context* context, ibv_async_event* event);
  /// Whether the system has removed the device, which not every driver reports by an event; null if
  /// that cannot happen. Makes a system call: use it rarely.
  bool (*is_gone)(ibv_context* context);

  ibv_pd* (*alloc_pd)(ibv_context* context);
  int (*dealloc_pd)(ibv_pd* pd);
  /// Thread domains; null where the provider has none. EOPNOTSUPP where the device has none.
  ibv_td* (*alloc_td)(ibv_context* context);
  int (*dealloc_td)(ibv_td* td);
  ibv_pd* (*alloc_parent_domain)(ibv_context* context, ibv_pd* pd, ibv_td* td);

  /// What `access` of reg_mr may have beyond the rights; null: nothing.
  MemoryFlags (*memory_flags)(ibv_context* context);
  /// With IBV_ACCESS_ZERO_BASED, the memory begins at a page.
  ibv_mr* (*reg_mr)(ibv_pd* pd, void* address, std::size_t length, int access);
  /// Registers memory for the peer of one queue pair alone, which may be in any state. Null where
  /// the device opens a registration to its whole domain.
  ibv_mr* (*reg_mr_for_qp)(ibv_qp* qp, void* address, std::size_t length, int access);
  /// EBUSY: the keys are invalid, but a peer's access is in progress; call again.
  int (*dereg_mr)(ibv_mr* mr);
  ibv_mw* (*alloc_mw)(ibv_pd* pd, ibv_mw_type type);
  /// EBUSY: see dereg_mr.
  int (*dealloc_mw)(ibv_mw* mw);

  ibv_cq* (*create_cq)(ibv_context* context, const CompletionQueueOptions& options);
  int (*destroy_cq)(ibv_cq* cq);
  ibv_srq* (*create_srq)(ibv_pd* pd, ibv_srq_init_attr* attr);
  int (*destroy_srq)(ibv_srq* srq);
  ibv_ah* (*create_ah)(ibv_pd* pd, ibv_ah_attr* attr);
  int (*destroy_ah)(ibv_ah* ah);
  ibv_qp* (*create_qp)(ibv_pd* pd, ibv_qp_init_attr* attr);
  /// EBUSY: the queue pair is in ERR, but a peer's access through it is in progress; call again.
  int (*modify_qp)(ibv_qp* qp, ibv_qp_attr* attr, int mask);
  int (*query_qp)(ibv_qp* qp, ibv_qp_attr* attr, int mask, ibv_qp_init_attr* init);
  /// EBUSY: see modify_qp.
  int (*destroy_qp)(ibv_qp* qp);

  /// Does the device's periodic work (liveness, sleeping lanes) in the user's control step; null if
  /// it has none. May make system calls, never blocks.
  void (*control)(ibv_context* context);
  // Sleeping. Null where the device never wakes: its user looks again soon.
  /// A descriptor that becomes readable when an armed queue's user is woken. The first call may
  /// make it: -1 and errno if the system refuses.
  int (*wake_descriptor)(ibv_cq* cq);
  /// Prepares to sleep, after a poll that found nothing. Makes system calls, never blocks.
  Armed (*arm)(ibv_cq* cq);
  /// The user is awake again; null if that does not matter.
  void (*disarm)(ibv_cq* cq);
  /// Waits until no thread of this process accesses the device's memory; false after `timeout`. No
  /// queue pair may respond any more. Null where only the device accesses memory.
  bool (*wait_for_local_accesses)(ibv_context* context, Nanoseconds timeout);
  /// Whether the process behind an address handle has ended. Null where the device cannot know.
  bool (*peer_has_ended)(const ibv_ah* ah);
  /// Direct datagrams; null if the device has none.
  const verbs::DirectDatagrams* direct;
  /// Direct messages; null if the device has none.
  const verbs::DirectMessages* direct_messages;
};

}  // namespace spinwire::verbs
