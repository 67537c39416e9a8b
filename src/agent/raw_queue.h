// Raw connections: the device gets exactly the application's posts, without headers or credit. Each
// connection has its own receive queue. The paths of other connections have no branch for raw ones;
// see spinwire/raw.h.
//
// Receives complete in the order of posting, so a ring of slots and four counts describe them. They
// are accepted as soon as there is a handle, and posted at INIT. Their work-request ids have the
// top bit set and no slot. Deferred receives are posted before deferred operations, so that the
// peer's answers find them. `on_posted` runs at the end of the poll, or right before the receive's
// completion if that comes first. The handshake carries a `raw` bit; accept_endpoint() and
// agree_on_raw() refuse a mismatch.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "agent/operation_pool.h"
#include "agent/qpn_map.h"
#include "base/intrusive_list.h"
#include "config/connection_attributes.h"
#include "spinwire/buffer.h"
#include "spinwire/connection.h"
#include "spinwire/raw.h"
#include "verbs/opened_device.h"

namespace spinwire::agent {

struct Agent;
struct Request;
struct EngineContext;

Agent*& next_in_raw_queue(Agent& a) noexcept;

/// State that all raw connections of an engine share.
struct RawShared {
  std::uint32_t reserved = 0;  ///< entries of the completion queue for raw receives
  /// Agents with receives to post, or callbacks `on_posted` to run.
  base::IntrusiveQueue<next_in_raw_queue> queue;
};

/// An accepted receive.
struct RawSlot {
  ibv_recv_wr wr;
  RawReceiveCallback on_received;
  RawPostedCallback on_posted;
};

/// A raw connection's receives, and the lists of elements of its operations. Receives complete in
/// the order of posting, so four counts describe the ring of slots. The ring has more slots than
/// there can be receives: a slot stays unchanged while its callback posts others.
class RawQueue {
 public:
  /// May throw std::bad_alloc. `all` must outlive the queue.
  RawQueue(RawShared& all, const verbs::QueuePairOptions& sizes);
  RawQueue(const RawQueue&) = delete;
  RawQueue& operator=(const RawQueue&) = delete;
  ~RawQueue();

  [[nodiscard]] RawSlot& slot(std::uint32_t receive) noexcept { return slots_[receive & mask_]; }
  [[nodiscard]] ibv_sge* elements_of(std::uint32_t receive) noexcept {
    return &sges_[std::size_t{receive & mask_} * receive_elements];
  }
  [[nodiscard]] detail::Block** blocks_of(std::uint32_t receive) noexcept {
    return &blocks_[std::size_t{receive & mask_} * receive_elements];
  }
  /// The receive of a work request that the device refused, at or after `posted`.
  [[nodiscard]] std::uint32_t receive_at(const ibv_recv_wr* wr) const noexcept;

  // Element lists of operations with more than one element.
  struct List {
    ibv_sge* sges;
    detail::Block** blocks;
  };
  [[nodiscard]] std::uint32_t acquire_elements(
      std::size_t size) noexcept;  ///< kNone: all lists are in use
  void free_elements(std::uint32_t index) noexcept;
  [[nodiscard]] List list(std::uint32_t index) noexcept {
    const std::size_t at = std::size_t{index} * send_elements;
    return {&list_sges_[at], &list_blocks_[at]};
  }
  [[nodiscard]] std::uint32_t index_of(const ibv_sge* sges) const noexcept {
    return static_cast<std::uint32_t>(static_cast<std::size_t>(sges - list_sges_.get()) /
                                      send_elements);
  }
  [[nodiscard]] std::uint32_t lists() const noexcept { return lists_; }
  [[nodiscard]] std::uint32_t first_free_elements() const noexcept { return free_; }
  /// Elements of a list; for a free list, the next free one.
  [[nodiscard]] std::uint32_t element_count(std::uint32_t index) const noexcept {
    return sizes_[index];
  }

  const std::uint32_t depth;
  const std::uint32_t receive_elements;
  const std::uint32_t send_elements;
  // Receives, counted modulo 2^32: completed <= notified <= posted <= accepted <= completed +
  // depth.
  std::uint32_t accepted;
  std::uint32_t posted;
  std::uint32_t notified;  ///< callbacks `on_posted` have run
  std::uint32_t completed;
  std::uint32_t callbacks_due = 0;  ///< callbacks `on_posted` that have not run
  std::uint32_t send_limit = 0;     ///< replaces SendQueue::limit
  bool failed = false;              ///< nothing is posted any more
  bool in_queue = false;            ///< in RawShared::queue
  Agent* next_in_queue = nullptr;

 private:
  RawShared& all_;
  std::uint32_t mask_;
  std::uint32_t lists_;
  std::uint32_t free_;
  std::unique_ptr<RawSlot[]> slots_;
  std::unique_ptr<ibv_sge[]> sges_;
  std::unique_ptr<detail::Block*[]> blocks_;
  std::unique_ptr<ibv_sge[]> list_sges_;
  std::unique_ptr<detail::Block*[]> list_blocks_;
  std::unique_ptr<std::uint32_t[]> sizes_;
};

// Set-up.

/// Makes the queues of a connection with these attributes; null if the connection is not raw. They
/// will replace `instead_of`. Errors: limit, no_memory.
Result<std::unique_ptr<RawQueue>> make_raw(EngineContext& ctx,
                                           const config::ConnectionAttributes& attributes,
                                           const RawQueue* instead_of = nullptr);
/// Makes an agent raw by giving it queues, and returns the receives reserved for it. Null makes the
/// agent an ordinary one. Returns false, and changes nothing, if no receive is left.
bool use_raw(EngineContext& ctx, Agent& a, std::unique_ptr<RawQueue> queue) noexcept;
/// Whether both ends of the connection are raw, or neither. Errors: unsupported.
Result<void> agree_on_raw(const Agent& a, bool peers);
/// Posts the accepted receives. The agent's queue pair is at INIT. Returns 0 or an errno value.
int post_raw_receives(EngineContext& ctx, Agent& a) noexcept;
/// Whether the agent's queue pair takes receives: from INIT until it ends.
bool takes_raw_receives(const Agent& a) noexcept;
/// Receives of the agent that the device has.
std::uint32_t raw_receives_posted(const Agent& a) noexcept;
/// Ends every receive as flushed. The queue pair must be gone.
void flush_raw_receives(EngineContext& ctx, Agent& a) noexcept;
/// Removes the agent from RawShared::queue.
void remove_from_raw_queue(EngineContext& ctx, Agent& a) noexcept;
/// Prepares the queues for another queue pair.
void reset_raw(RawQueue& queue) noexcept;
/// Names the count or list of the agent that is wrong; empty if none is.
std::string audit_raw(EngineContext& ctx, const Agent& a);

// Hot.

struct RawPost {
  std::span<const BufferSlice> into;
  const RawReceiveCallback& on_received;
  const RawPostedCallback& on_posted;
  bool defer;
};
Status post_receive(EngineContext& ctx, Agent& a, const RawPost& r) noexcept;
struct RawSend {
  std::span<const BufferSlice> data;
  std::optional<std::uint32_t> immediate;
  const CompletionCallback& done;
  bool defer;
};
Status send_raw(EngineContext& ctx, Agent& a, const RawSend& r) noexcept;
/// Accepts a WRITE with immediate on a raw connection. Other operations that use a receive at the
/// peer are unsupported.
Status submit_on_raw(EngineContext& ctx, Agent& a, const Request& r, OperationKind kind) noexcept;
/// Posts the agent's receives that were deferred.
void post_raw_receives_now(EngineContext& ctx, Agent& a) noexcept;
/// Posts the deferred receives of all agents.
void post_queued_raw_receives(EngineContext& ctx) noexcept;
/// Runs the callbacks `on_posted`, and posts the receives that they have deferred.
void run_posted_callbacks(EngineContext& ctx) noexcept;
/// Handles consecutive completions of a raw agent's receives. Returns the first completion after
/// them.
const ibv_wc* process_raw_receives(EngineContext& ctx, Agent& a, const ibv_wc* wc,
                                   const ibv_wc* end) noexcept;

/// Detaches an operation's element list from its record, which may then be reused; kNone: there is
/// none. The list's memory is held until release_elements().
std::uint32_t detach_elements(Agent& a, Operation& op) noexcept;
void release_elements(Agent& a, std::uint32_t list) noexcept;

/// The work-request id of a raw receive: the top bit is set, and the low half has no slot.
constexpr std::uint64_t raw_receive_id(std::uint32_t receive) noexcept {
  return std::uint64_t{1} << 63 | std::uint64_t{receive & 0x3fff'ffff} << 33 | 1;
}
constexpr bool is_raw_receive(std::uint64_t wr_id) noexcept { return (wr_id >> 63) != 0; }

}  // namespace spinwire::agent
