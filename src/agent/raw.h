// Raw connections: what the application posts is what the device gets. Each has a receive queue of
// its own, whose receives are kept here from their acceptance to their callback; the paths of other
// connections know nothing of it. See spinwire/raw.h.
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
#include "config/connection_settings.h"
#include "spinwire/buffer.h"
#include "spinwire/connection.h"
#include "spinwire/raw.h"
#include "verbs/opened_device.h"

namespace spinwire::agent {

struct Agent;
struct Request;
struct EngineContext;

inline constexpr std::uint32_t kMaxRawBytes = 1u << 30;  ///< bytes of a message, or for one

/// What all raw connections of an engine share.
struct RawShared {
  QpnMap by_qpn;
  std::uint32_t reserved = 0;  ///< entries of the completion queue that are theirs
  Agent* listed = nullptr;     ///< first of those with receives to post, or to tell of
};

/// An accepted receive.
struct RawSlot {
  ibv_recv_wr wr;
  RawReceiveCallback on_received;
  RawPostedCallback on_posted;
};

/// A raw connection's receives, and the lists of elements of its operations. Receives complete as
/// they were posted, so that counts tell all; the slots, a power of two and more than there can be
/// receives, are used in turn, so that one stays as it is while its callback starts others.
class RawQueue {
 public:
  /// May throw std::bad_alloc. `all` outlives it.
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
  /// The receive of a work request that was not taken, of those from `posted` on.
  [[nodiscard]] std::uint32_t receive_of(const ibv_recv_wr* wr) const noexcept;

  // Elements of operations that have more than their record has room for.
  struct List {
    ibv_sge* sges;
    detail::Block** blocks;
  };
  [[nodiscard]] std::uint32_t take_list(std::size_t size) noexcept;  ///< kNone: none is left
  void free_list(std::uint32_t index) noexcept;
  [[nodiscard]] List list(std::uint32_t index) noexcept {
    const std::size_t at = std::size_t{index} * send_elements;
    return {&list_sges_[at], &list_blocks_[at]};
  }
  [[nodiscard]] std::uint32_t index_of(const ibv_sge* sges) const noexcept {
    return static_cast<std::uint32_t>(static_cast<std::size_t>(sges - list_sges_.get()) /
                                      send_elements);
  }
  [[nodiscard]] std::uint32_t lists() const noexcept { return lists_; }
  [[nodiscard]] std::uint32_t first_free_list() const noexcept { return free_; }
  /// Elements of a list; of a free one, the next that is free.
  [[nodiscard]] std::uint32_t size_of_list(std::uint32_t index) const noexcept {
    return sizes_[index];
  }

  const std::uint32_t depth;
  const std::uint32_t receive_elements;
  const std::uint32_t send_elements;
  // Receives, counted modulo 2^32: completed <= told <= posted <= accepted <= completed + depth.
  std::uint32_t accepted;
  std::uint32_t posted;
  std::uint32_t told;  ///< their callbacks `on_posted` have run
  std::uint32_t completed;
  std::uint32_t to_tell = 0;     ///< callbacks `on_posted` of those not told
  std::uint32_t send_limit = 0;  ///< what SendQueue::limit is for others
  bool failed = false;           ///< nothing is posted any more
  bool listed = false;           ///< in RawShared::listed
  Agent* next_listed = nullptr;

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

/// The queues for a connection of these attributes, none if it is not raw; `instead_of` is what it
/// has so far. Errors: limit, no_memory.
Result<std::unique_ptr<RawQueue>> make_raw(EngineContext& ctx,
                                           const config::ConnectionAttributes& attributes,
                                           const RawQueue* instead_of = nullptr);
/// Gives them to an agent, which is raw by them; in return, receives that others share go back. The
/// reverse may fail, with nothing changed: false.
bool use_raw(EngineContext& ctx, Agent& a, std::unique_ptr<RawQueue> queue) noexcept;
/// Whether both ends of the connection are raw, or neither. Errors: unsupported.
Result<void> agree_on_raw(const Agent& a, bool peers);
/// What was accepted is posted to the agent's queue pair, which is at INIT. 0 or an errno value.
int post_raw_receives(EngineContext& ctx, Agent& a) noexcept;
/// How many of the agent's receives the device has.
std::uint32_t raw_receives_posted(const Agent& a) noexcept;
/// Ends every receive, as flushed; the device has forgotten them.
void flush_raw_receives(EngineContext& ctx, Agent& a) noexcept;
/// Nobody looks after the agent's receives any more.
void leave_raw_queue(EngineContext& ctx, Agent& a) noexcept;
/// As new, for another queue pair.
void reset_raw(RawQueue& queue) noexcept;
/// What is wrong with the agent's books; empty if nothing is.
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
/// A message or a WRITE with immediate of the ordinary kind, of which a raw connection has the
/// latter only.
Status submit_on_raw(EngineContext& ctx, Agent& a, const Request& r, OperationKind kind) noexcept;
/// Posts the agent's receives that were deferred.
void flush_raw(EngineContext& ctx, Agent& a) noexcept;
/// Posts those of all agents.
void post_queued_raw_receives(EngineContext& ctx) noexcept;
/// Runs the callbacks of those that were posted, and posts what they have deferred.
void run_posted_callbacks(EngineContext& ctx) noexcept;
/// Completions of one raw queue pair's receives in a row, or one of a queue pair that is no more;
/// answers the first that is not of them.
const ibv_wc* process_raw_receives(EngineContext& ctx, const ibv_wc* wc,
                                   const ibv_wc* end) noexcept;

/// The elements that an operation had beside its record, which may be used again; kNone: none.
/// Their memory is held until release_elements().
std::uint32_t detach_elements(Agent& a, Operation& op) noexcept;
void release_elements(Agent& a, std::uint32_t list) noexcept;

/// Receives of raw connections have names of their own: nothing in the low half but the bit of all
/// receives, where others have their slot.
constexpr std::uint64_t raw_receive_id(std::uint32_t receive) noexcept {
  return std::uint64_t{1} << 63 | std::uint64_t{receive & 0x3fff'ffff} << 33 | 1;
}
constexpr bool is_raw_receive(std::uint64_t wr_id) noexcept { return (wr_id >> 63) != 0; }

}  // namespace spinwire::agent
