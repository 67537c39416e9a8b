// The record of one connection, and the state that all agents of an engine share.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "agent/cm_link.h"
#include "agent/control_messages.h"
#include "agent/element_lists.h"
#include "agent/goodbye.h"
#include "agent/in_place.h"
#include "agent/lease_table.h"
#include "agent/operation_pool.h"
#include "agent/operation_samples.h"
#include "agent/operation_timers.h"
#include "agent/own_domain.h"
#include "agent/own_receives.h"
#include "agent/qpn_map.h"
#include "agent/raw_queue.h"
#include "agent/reconnect.h"
#include "agent/rendezvous.h"
#include "agent/source_ledger.h"
#include "base/index_pool.h"
#include "base/intrusive_list.h"
#include "base/timer_wheel.h"
#include "config/connection_attributes.h"
#include "config/queue_sizing.h"
#include "control/endpoint_proof.h"
#include "control/owners.h"
#include "memory/arena.h"
#include "memory/registration_table.h"
#include "memory/remote_key.h"
#include "observe/hot_path.h"
#include "observe/recorder.h"
#include "spinwire/config.h"
#include "spinwire/connection.h"
#include "spinwire/engine.h"
#include "verbs/opened_device.h"
#include "verbs/work_requests.h"
#include "wire/message_header.h"

namespace spinwire::agent {

using detail::Block;

inline constexpr std::uint32_t kNone = ~0u;

/// Names an agent for good: a later agent in the same place has another generation.
struct AgentId {
  std::uint32_t index = kNone;
  std::uint32_t generation = 0;
  explicit operator bool() const noexcept { return index != kNone; }
};

/// Where a connection stands between its first set-up step and its end. set_stage() is the only
/// writer. Agent::state holds the public state; enter() is its only writer:
///   resolving   idle while a reconnect waits; then domain … wait
///   exchanging  domain … up; inbound and out-of-band connections begin here
///   ready       up
///   draining    up until the outstanding operations have ended; then error … over
///   closed      over
enum class Stage : std::uint8_t {
  idle,
  domain,         ///< make its own protection domain, if it has one
  slab,           ///< register the pools in that domain
  create,         ///< make the queue pair
  register_cell,  ///< register the credit cell, for the queue pair alone where the device can do
                  ///< that
  resolve,        ///< through rdma_cm: wait for the route to the peer
  init,           ///< to INIT; then the handshake continues
  wait,           ///< wait for the peer's endpoint
  rtr,
  rts,
  up,
  error,        ///< move the queue pair to ERR
  await_flush,  ///< wait for flushed completions
  destroy,
  deregister_cell,  ///< deregister the credit cell
  end_domain,       ///< end its own domain, with its registrations
  over,
};

/// Where the peer writes its wire::CreditWord. Lies in exposed memory.
using CreditCell = std::atomic<std::uint64_t>;

/// Counts of operations of one kind. Outstanding: begun - done - failed.
struct Tally {
  std::uint64_t begun = 0;
  std::uint64_t done = 0;
  std::uint64_t failed = 0;
  std::uint64_t bytes = 0;  ///< moved by the operations that are done
};

/// Bits of Agent::slow_path: why messages cannot go straight to the handler.
/// `next_handlers` take effect before the next callback.
inline constexpr std::uint8_t kHandlersReplaced = 1;
/// An earlier rendezvous message is being fetched.
inline constexpr std::uint8_t kRendezvousAhead = 2;
inline constexpr std::uint8_t kNotReady = 4;    ///< the state is not `ready`
inline constexpr std::uint8_t kNeedsBlock = 8;  ///< the handler needs messages in a block

/// Credit that was found in our cell since a poll: see kMostFromCell.
struct TakenFromCell {
  std::uint16_t poll = 0;  ///< low bits of EngineStats::polls
  std::uint16_t grants = 0;
};

/// Operations in order: the posted ones, then the deferred ones. The link of the last deferred
/// operation is not set. `posted_last` and `deferred_last` are valid only while the list is not
/// empty.
struct SendQueue {
  Operation* posted = nullptr;
  Operation* posted_last = nullptr;
  Operation* deferred_last = nullptr;
  std::uint32_t max_eager = 0;  ///< longest message sent as one SEND, bytes
  // From here on also for messages without a work request.
  Operation* deferred = nullptr;
  std::uint32_t used = 0;          ///< work requests accepted, not completed
  std::uint32_t limit = 0;         ///< of `used`, for the application; 0 unless the connection
                                   ///< is ready and has neither a `domain` nor a `raw` queue
  std::uint16_t inline_bytes = 0;  ///< sent inline up to this many, header included
  /// Shorter messages go without a work request; 0 unless the connection is ready and has neither.
  std::uint16_t direct_limit = 0;
  TakenFromCell from_cell;
};

/// Credit by messages in place of words in a credit cell. If another peer overwrites the credit
/// cell, its owner stops reading it and requests credit by messages, one at a time. Each request
/// allows one answer, so neither end has more than one of them to receive, and they need no credit.
/// Both bits of an end stay set until the connection ends.
struct CreditByMessages {
  // Our cell is overwritten.
  bool asks : 1 = false;
  bool ask_due : 1 = false;          ///< to be sent at the end of the poll
  bool ask_outstanding : 1 = false;  ///< with the device
  bool awaits_message : 1 = false;   ///< the peer may send one
  // The peer's is.
  bool answers : 1 = false;
  bool may_send : 1 = false;  ///< the peer has asked since our last message

  [[nodiscard]] bool any() const noexcept { return asks || answers; }
};

/// Credit in both directions. All counts run from the start, modulo 2^32.
struct Credit {
  // Our credit: granted_to_us - returned_by_us - sent.
  std::uint32_t sent = 0;
  std::uint32_t send_limit = 0;      ///< granted_to_us - returned_by_us, as of the last count
  std::uint16_t header_granted = 0;  ///< low bits of the total in the last message's header
  bool in_end_of_poll_list = false;  ///< in EngineContext::end_of_poll_list
  bool peer_needs_credit = false;    ///< the peer asked for credit
  bool write_pending = false;        ///< a credit write is outstanding
  bool write_again = false;          ///< the message that advertised the latest grant was cancelled
  bool waits_for_receives = false;   ///< in EngineContext::receive_waiters
  CreditByMessages by_messages;
  std::uint32_t granted_to_us = 0;
  std::uint32_t returned_by_us = 0;
  // The peer's credit: granted - returned - received.
  std::uint32_t received = 0;
  std::uint32_t granted = 0;
  std::uint32_t returned = 0;
  std::uint32_t advertised = 0;  ///< the part of `granted` that the peer knows
  std::uint32_t reserved = 0;    ///< receives reserved for the peer
  std::uint32_t token = 0;       ///< that a word in the cell proves to know, if the peer wrote it
  CreditCell* cell = nullptr;    ///< where the peer writes its grants; null once it is overwritten
};

/// What each message changes besides credit.
struct Activity {
  std::uint64_t last_sent = 0;        ///< tick of the last use of credit
  std::uint64_t direct_messages = 0;  ///< sent without a work request, and so not in `tallies`
  std::uint64_t direct_bytes = 0;
  /// Tick when the peer's process was heard: its polls, not its device.
  std::uint64_t last_heard = 0;
  std::uint64_t messages_received = 0;
  std::uint64_t bytes_received = 0;
};

/// Something that only the peer can bring about, and for how long it has not. The time counts from
/// the first check that finds no progress to the last.
struct Stall {
  std::uint64_t ticks = 0;  ///< 1 + the time without progress; 0: at the last check nothing
                            ///< was outstanding, or there was progress

  void on_progress() noexcept { ticks = 0; }
  /// A check, `elapsed` after the last one. `waits`: something is outstanding.
  void check(bool waits, std::uint64_t elapsed) noexcept {
    if (!waits) return on_progress();
    ticks = ticks != 0 ? ticks + elapsed : 1;
  }
};

/// What a peer that polls may still hold up. Each has a limit of time: see liveness.cc.
struct Stalls {
  Stall answers;     ///< control messages that lack credit
  Stall replies;     ///< replies to calls that lack credit
  Stall offers;      ///< rendezvous messages that wait for the peer's answer
  Stall operations;  ///< operations with the device
};

/// How long the peer has been silent. Ticks.
struct Liveness {
  std::uint64_t last_completion = 0;     ///< when its device answered
  std::uint64_t keepalive_interval = 0;  ///< longest time between two writes to the peer's cell
  std::uint64_t last_check = 0;
  std::uint64_t silent_ticks = 0;
  std::uint64_t cell_word = 0;  ///< the credit cell at the last check
  std::uint32_t sent = 0;       ///< Credit::sent at the last check
  bool owes_replies = false;    ///< replies to calls wait for credit, or for room
  bool serves_calls = false;    ///< what it sends are replies to calls
  Stalls stalls;
  base::Timer timer;  ///< of the next check
};

/// Asking why a peer was lost: see engine/loss_probes.h.
enum class LossProbe : std::uint8_t { none, under_way, over };

Agent*& next_credit_waiter(Agent& a) noexcept;
Agent*& next_room_waiter(Agent& a) noexcept;
Agent*& next_that_ran(Agent& a) noexcept;

/// An agent in EngineContext::ran_agents.
struct RanLink {
  Agent* next = nullptr;
  bool is_listed = false;
};

enum class Room : std::uint8_t;
/// Waiting for room; see room_waiters.h.
struct RoomWait {
  Agent* next = nullptr;        ///< in EngineContext::room_waiters
  std::size_t block_bytes = 0;  ///< of the send pool; 0: none is needed
  Room needed{};                ///< the most of what was refused
  bool is_waiting = false;
};

/// How the application exchanges the endpoints of a connection. Cold.
struct EndpointExchange {
  Callback<void(Connection, const Endpoint&)> on_endpoint;
  bool peer_joins_first = false;
  bool peer_has_no_key = false;
  control::EndpointNonce nonce{};  ///< of our endpoint, if there is a key
  control::EndpointCode peer{};    ///< of the peer's endpoint, once it has been joined
  Endpoint proved{};               ///< our endpoint, as it was proved last
};

/// Bringing a connection up and taking it down. Cold.
struct Setup {
  std::uint64_t deadline = 0;
  base::Timer timer;
  Nanoseconds timeout{0};          ///< from the first attempt to `ready`
  control::HandshakeId handshake;  ///< at the control port; may be over
  Agent* next = nullptr;           ///< in SourceAccount::setup
  std::uint32_t psn = 0;
  bool in_queue : 1 = false;  ///< waits for a control verb
  bool outbound : 1 = false;
  bool was_ready : 1 = false;
  bool out_of_band : 1 = false;         ///< the application exchanges the endpoints
  bool endpoint_delivered : 1 = false;  ///< out-of-band: on_endpoint has run
  bool address_pending : 1 = false;     ///< the peer's address is being resolved
  bool is_unheard : 1 = false;          ///< in SourceAccount::unheard
  bool gives_way : 1 = false;           ///< to a new peer
  bool in_accept : 1 = false;           ///< its on_accept runs
  LossProbe probe = LossProbe::none;
  std::unique_ptr<EndpointExchange> endpoints;  ///< out-of-band: not null
  std::unique_ptr<CmLink> cm;                   ///< if through rdma_cm
  base::IntrusiveLinks<Agent> unheard, unheard_of_source;
};

/// The peer, as the handshake described it.
struct Peer {
  verbs::RemoteQueuePair queue_pair;
  std::uint64_t incarnation = 0;
  bool is_raw = false;
  bool application_fields = false;  ///< it takes them: see Endpoint
  bool takes_goodbye_reasons = false;
  std::array<char, 72> name{};
  control::KeyName key;                       ///< that it has proved
  std::unique_ptr<PrivateData> private_data;  ///< null: it gave none
};

/// Memory in which the peer grants credit to us: the queue pair's word where the device has one
/// (verbs/direct_messages.h), else a block.
struct OwnCell {
  Block* block = nullptr;
  struct {
    std::uint64_t address = 0;
    std::uint32_t rkey = 0;  ///< 0: not exposed
  } region;                  ///< the cell, as the peer addresses it
};

/// Memory in which we grant credit to the peer.
struct PeerCell {
  std::uint64_t address = 0;
  std::uint32_t key = 0;
  std::uint32_t token = 0;
  std::uint8_t sequence = 0;     ///< of the last word written
  std::uint64_t last_write = 0;  ///< tick
};

/// Where an agent's receives are posted. Chosen when its queue pair is made.
enum class ReceiveSource : std::uint8_t {
  shared,  ///< the shared receive queue
  own,     ///< a receive queue of its own, filled from the pools: Agent::own_queue
  raw,     ///< the application posts them: Agent::raw
};

/// One connection. A message that is sent directly touches two cache lines, from
/// SendQueue::deferred on, and one that arrives, with the credit that is granted for it, the two
/// behind them as well: a connection among many costs that many misses. Processors fetch lines in
/// pairs.
struct alignas(128) Agent {
  std::array<Tally, kOperationKinds> tallies{};  ///< of operations with a work request
  SendQueue send_queue;
  ibv_qp* qp = nullptr;
  ConnectionState state = ConnectionState::closed;
  Stage stage = Stage::idle;
  bool in_flush_queue = false;  ///< in EngineContext::flush_queue
  bool goodbye_sent = false;
  bool goodbye_received = false;
  bool closing = false;                ///< either application closes: errors are no fault any more
  std::uint8_t slow_path = kNotReady;  ///< 0: messages go straight to the handler
  ReceiveSource receives = ReceiveSource::shared;
  std::uint32_t index = 0;
  std::uint32_t generation = 0;  ///< 0: a free record
  Credit credit;
  Activity activity;
  // For granting credit.
  std::uint32_t own_queue = kNone;  ///< index of its own receive queue; kNone: it shares one
  std::uint32_t max_message = 0;    ///< longest message that the peer takes, bytes
  PeerCell peer_cell;
  SourceAccount* source = nullptr;                              ///< what it holds is counted there
  base::IntrusiveQueue<&ControlMessage::next> control_to_send;  ///< in the order they go out
  Callback<void(Connection, Message&)> on_message;              ///< of `handlers`
  // Cold.
  ConnectionHandlers handlers;
  Liveness liveness;
  Rendezvous rendezvous;
  ControlCounts control_counts;
  LeaseTable leases;
  RoomWait room;
  RanLink ran;
  Setup setup;
  Peer peer;
  OwnCell own_cell;
  config::ConnectionAttributes attributes;
  ConnectionHandlers next_handlers;
  Goodbyes goodbyes;
  Error cause;                                ///< why it ends; ok for a regular close
  std::unique_ptr<PrivateData> private_data;  ///< ours, for the peer; null: none
  std::unique_ptr<ReconnectState> reconnect;  ///< if it reconnects
  std::unique_ptr<OwnDomain> domain;          ///< if it has its own protection domain
  std::unique_ptr<RawQueue> raw;              ///< if it is raw
};
/// The part that messages without work requests touch.
inline constexpr std::size_t kHotAt = offsetof(Agent, send_queue) + offsetof(SendQueue, deferred);
inline constexpr std::size_t kHotLines = verbs::kRecordLines;
static_assert(kHotAt % 128 == 0 && kHotLines == 4 &&
                  offsetof(Agent, activity) + offsetof(Activity, last_heard) == kHotAt + 128 &&
                  offsetof(Agent, source) == kHotAt + 192 &&
                  offsetof(Agent, handlers) == kHotAt + kHotLines * 64,
              "the hot fields fill two pairs of cache lines");
static_assert(sizeof(Agent) / 128 % 2 == 1, "the hot parts of many agents use all cache sets");
inline std::byte* hot_part(Agent& a) noexcept { return reinterpret_cast<std::byte*>(&a) + kHotAt; }
inline Agent& agent_of_hot_part(void* hot) noexcept {
  return *reinterpret_cast<Agent*>(static_cast<std::byte*>(hot) - kHotAt);
}

/// A list of agents with work at the end of the poll; each is in it at most once.
class AgentList {
 public:
  /// `count` lies outside, where its reader needs it. May throw std::bad_alloc.
  AgentList(std::uint32_t capacity, std::uint32_t& count)
      : agents_(std::make_unique<Agent*[]>(capacity)), count_(count) {}
  void add(Agent& agent) noexcept { agents_[count_++] = &agent; }
  [[nodiscard]] std::uint32_t count() const noexcept { return count_; }
  [[nodiscard]] Agent& operator[](std::uint32_t i) noexcept { return *agents_[i]; }
  void keep(std::uint32_t i, Agent& agent) noexcept { agents_[i] = &agent; }
  void cut(std::uint32_t count) noexcept { count_ = count; }
  void remove(const Agent& agent) noexcept {
    for (std::uint32_t i = 0; i < count_; ++i) {
      if (agents_[i] == &agent) agents_[i] = agents_[--count_];
    }
  }

 private:
  std::unique_ptr<Agent*[]> agents_;
  std::uint32_t& count_;
};

/// Numbers of agents listed for the end of the poll: one word, so that one compare finds none.
struct alignas(8) Work {
  std::uint32_t flush = 0;
  std::uint32_t end_of_poll = 0;
};

using config::kControlRequests;
using config::kRendezvousRecords;
using config::kUnreservedReceives;
/// Work requests for rendezvous messages that an agent may have posted.
inline constexpr std::uint32_t kRendezvousRequests =
    kRendezvousReadsPerAgent + kControlMessagesAtOnce;

/// Staging room of each operation: for a header outside the headroom with a short payload, a
/// control message, or the result of an atomic.
inline constexpr std::size_t kStagingBytes = 64;

/// Parts of an engine that agents, remote calls and the engine itself use.
struct EngineParts {
  EngineParts(const Config& settings, const Clock& time);

  Config config;
  Clock clock;
  detail::EngineSlot* slot = nullptr;  ///< the target of handles
  std::uint64_t now = 0;               ///< tick of the current or the last poll
  std::unique_ptr<verbs::Device> device;
  memory::ArenaPtr arena;
  std::unique_ptr<memory::RegistrationTable> registrations;
  EngineStats stats;
  std::uint32_t until_sample = ~0u;  ///< operations and calls until one is sampled
  // Cold.
  memory::WindowPool windows;
  base::TimerWheel timers;
  config::ConnectionAttributes attributes;  ///< default of connections
  std::uint64_t incarnation;
  std::uint32_t max_transfer = 0;  ///< bytes of one work request that the device takes
  control::EndpointKeys* endpoint_keys = nullptr;  ///< null: no key
  observe::Recorder recorder{clock};
  observe::Latencies latencies;

  /// Where keys to the engine's memory come from.
  [[nodiscard]] memory::KeySource keys() noexcept {
    return {windows, *registrations, device->slab()};
  }
  /// Whether the block is of the engine's pools or registrations.
  [[nodiscard]] bool owns(const detail::Block& block) const noexcept {
    return block.owner == arena.get() || registrations->owns(&block);
  }
};

/// Receives of the shared queue, and the slots of all receives.
struct ReceiveState {
  verbs::ReceiveSlots<Block> receives;  ///< by the slot that a receive's wr_id names
  std::uint32_t posted_receives = 0;
  std::uint32_t list_length = 0;                 ///< receives that are posted together
  std::uint32_t shortage_allowed = 0;            ///< receive_shortage from which grants wait
  std::unique_ptr<std::uint32_t[]> empty_slots;  ///< slots without a block; `receive_shortage` many
  std::uint32_t receive_shortage = 0;
  std::uint32_t reserved_receives = 0;     ///< of the shared queue, for all peers
  bool reservations_refused = false;       ///< peers with more than their share yield receives
  std::uint32_t yield_above = UINT32_MAX;  ///< reserved receives of a peer that is to yield some
  std::uint32_t reservable_receives = 0;   ///< receives that credit may be granted for
};

/// Messages that the device carries without work requests.
struct DirectState {
  const verbs::DirectMessages* direct = nullptr;  ///< null: messages go by work requests
  verbs::DirectReads* direct_reads = nullptr;     ///< of `direct`
  verbs::DirectRound* direct_round = nullptr;     ///< of `direct`
  bool direct_unpublished = false;  ///< a message was sent directly since publish_direct()
  bool in_place_seen = false;       ///< the batch has messages that are read in place
  SpareBlocks spare_blocks;
};

struct EngineContext : EngineParts, ReceiveState, DirectState {
  EngineContext(const Config& settings, const Clock& time);

  /// Counts an operation, and returns whether it is to be sampled. Hot.
  [[nodiscard]] bool is_sample_due() noexcept {
    return observe::kObservesHotPath && --until_sample == 0;
  }
  /// Whether an operation is sampled and not posted yet. Hot.
  [[nodiscard]] bool has_unposted_sample() const noexcept {
    return observe::kObservesHotPath && unposted_sample != nullptr;
  }

  // Hot.
  base::IndexPool<Agent> agents;
  OperationPool operations;
  QpnMap by_qpn;  ///< agents with a queue pair
  std::unique_ptr<ibv_qp*[]>
      queue_pairs;  ///< by agent, for prefetch(): dense, so that it is cached
  Work work;
  OperationSample* unposted_sample = nullptr;  ///< the last one that began, until it is posted
  std::uint32_t queued_agents = 0;             ///< with rendezvous READs, or raw receives, to post
  AgentList flush_queue;                       ///< with deferred operations
  AgentList end_of_poll_list;  ///< with credit, control messages, receives or callbacks due
  /// Agents with operations that have run without a completion, and end in this poll or the next.
  base::RoundQueue<next_that_ran> ran_agents;
  std::byte* staging = nullptr;  ///< kStagingBytes for each operation
  Block* staging_block = nullptr;
  // Cold.
  std::unique_ptr<OperationSamples> operation_samples;  ///< null: none are sampled
  SourceLedger sources;
  std::unique_ptr<RendezvousPool> rendezvous;
  std::unique_ptr<OperationTimers> operation_timers;  ///< from the first time-out on
  ControlMessagePool control_messages;
  /// Agents that lack credit for a control message, or a record for an operation of their own. A
  /// poll looks at a few.
  base::IntrusiveQueue<next_credit_waiter> credit_waiters;
  /// Agents whose on_writable is due once they have room.
  base::IntrusiveQueue<next_room_waiter> room_waiters;
  std::unique_ptr<LeasePool> leases;
  std::uint64_t zeroing_step = 0;  ///< the control step since which `zeroed_bytes` counts
  std::uint64_t zeroed_bytes = 0;  ///< of leases
  std::unique_ptr<OwnQueues>
      own_queues;                  ///< of connections with own receives; null if there are none
  std::uint32_t own_domains = 0;   ///< connections that have one
  std::unique_ptr<RawShared> raw;  ///< from the first raw connection on
  /// Cancelled operations and rendezvous messages whose callback is due, the oldest first. Their
  /// agents are in `end_of_poll_list`.
  base::RoundQueue<&Cancellation::next> cancellations;
  /// Sleeps of the engine that stay short because a message lacked credit.
  std::uint8_t sleeps_for_credit = 0;
  std::uint32_t receive_waiter_count = 0;
  AgentList receive_waiters;  ///< with credit to grant once receives are posted again
  std::unique_ptr<ElementLists> element_lists;  ///< from open_element_lists() on
  bool parts_refused = false;  ///< an operation had too many parts, and the log says so

  [[nodiscard]] Agent* find(std::uint32_t index, std::uint32_t generation) noexcept {
    if (index >= agents.capacity()) [[unlikely]]
      return nullptr;
    Agent& a = agents.at(index);
    return a.generation == generation ? &a : nullptr;
  }
};

/// Kinds of an agent's timers; see Timer::kind.
enum TimerKind : std::uint16_t { kDeadlineTimer = 1, kLivenessTimer = 2 };

constexpr std::uint64_t receive_id(std::uint32_t slot) noexcept {
  return std::uint64_t{slot} << 1 | 1;
}
constexpr std::uint32_t slot_of(std::uint64_t wr_id) noexcept {
  return static_cast<std::uint32_t>(wr_id >> 1);
}
constexpr bool is_receive(std::uint64_t wr_id) noexcept { return (wr_id & 1) != 0; }

}  // namespace spinwire::agent
