// What each source holds of what all connections of an engine share: receives, rendezvous offers,
// leases, READs. A source is what control/peer_source.h says of a peer that has connected to a
// listener: a host of the network, or a process of this host. A connection of our own process, or
// to a peer that the application chose, is a source of its own.
//
// The rule is that of control/source_share.h: one source alone gets three quarters of a pool, n
// sources a part of 3 / (3 n + 1) each, and some is left for the next; of three things or fewer one
// source may have all. Nothing is set aside, and nobody has to know how many sources there will be.
//
// Sources also take turns: at set-up steps, so that a host with many half-open connections does not
// delay others, at READs of rendezvous messages, and at steps of leases.
#pragma once

#include <cstdint>
#include <map>

#include "base/index_pool.h"
#include "base/intrusive_list.h"
#include "control/address.h"
#include "control/grace.h"
#include "control/source_share.h"
#include "memory/arena.h"

namespace spinwire::agent {

struct Agent;
struct EngineContext;
struct LeaseGranted;

/// Whether a source that holds `held` may take `more`, with `free` left for all.
constexpr bool has_share(std::uint64_t held, std::uint64_t free, std::uint64_t more = 1) noexcept {
  return control::room_of_source(held, free) >= more;
}
/// Whether hosts share receives. They do not if the user lets one host have all connections.
[[nodiscard]] bool shares_receives(const EngineContext& ctx) noexcept;

Agent*& next_in_setup_queue(Agent& a) noexcept;
Agent*& next_in_rendezvous(Agent& a) noexcept;
LeaseGranted*& next_in_lease_work(LeaseGranted& lease) noexcept;
base::IntrusiveLinks<Agent>& unheard_links(Agent& a) noexcept;
base::IntrusiveLinks<Agent>& unheard_of_source_links(Agent& a) noexcept;

struct SourceAccount;

/// A source's agents that wait for the same thing, and its place among the sources that take turns.
template <auto agent_link>
struct Waiting {
  base::IntrusiveQueue<agent_link> agents;
  SourceAccount* next = nullptr;
  bool is_listed = false;  ///< among the sources that take turns
};

struct SourceAccount {
  std::uint32_t connections = 0;
  std::uint32_t receives = 0;     ///< reserved, of the shared queue
  std::uint32_t own_queues = 0;   ///< receive queues of single connections
  std::uint32_t offers = 0;       ///< rendezvous messages that its peers have not answered
  std::uint32_t leases = 0;       ///< requested by its peers
  std::uint64_t lease_bytes = 0;  ///< lease_charge() of each
  std::uint32_t reads = 0;        ///< outstanding, of its rendezvous messages
  std::uint32_t answers = 0;      ///< control messages that wait
  bool is_host = false;           ///< in SourceLedger::hosts
  control::Source address{};      ///< of the host; else what the connection's events count for
  Waiting<next_in_setup_queue> setup;
  Waiting<next_in_rendezvous> readers;
  base::IntrusiveQueue<next_in_lease_work> lease_work;  ///< to be zeroed, opened or closed
  SourceAccount* next_for_leases = nullptr;  ///< in lease_turns, while it has such leases
  base::IntrusiveList<unheard_of_source_links> unheard;  ///< see unheard_peers.h; oldest first
  std::uint32_t unheard_count = 0;
  std::uint32_t giving_way = 0;  ///< connections that end because their peers were never heard
  base::IntrusiveLinks<SourceAccount> heavy;
};

SourceAccount*& next_for_setup(SourceAccount& s) noexcept;
SourceAccount*& next_reader(SourceAccount& s) noexcept;

struct SourceLedger {
  /// May throw std::bad_alloc.
  SourceLedger(std::uint32_t connections, const Clock& clock)
      : accounts(connections + 1),  // one more while an agent moves
        heavy_above(connections / 4),
        grace(clock) {}
  base::IndexPool<SourceAccount> accounts;
  std::map<control::Source, SourceAccount*> hosts;
  std::uint64_t lease_bytes = 0;                     ///< lease_charge() of all
  base::IntrusiveQueue<next_for_setup> setup_turns;  ///< sources with agents that have a step to do
  base::IntrusiveQueue<&SourceAccount::next_for_leases> lease_turns;  ///< those with lease_work
  base::IntrusiveList<unheard_links> unheard;  ///< see unheard_peers.h; oldest first
  std::uint32_t unheard_count = 0;
  /// Sources with more peers than this that were never heard.
  base::IntrusiveList<&SourceAccount::heavy> heavy;
  std::uint32_t heavy_above;
  control::Grace grace;  ///< of peers that were never heard
};

/// The part of a chunk that the block of a lease takes, bytes.
inline std::uint64_t lease_charge(const detail::Block& block) noexcept {
  const std::uint64_t whole = block.capacity + sizeof(detail::Block);
  const std::uint64_t in_chunk = memory::kChunkBytes / whole;
  return in_chunk != 0 ? memory::kChunkBytes / in_chunk : whole;
}

/// Gives a new agent an account of its own. Each agent can have one.
void open_account(EngineContext& ctx, Agent& a) noexcept;
/// The agent's peer is of that source: moves what the agent holds to the source's account. Moves
/// nothing for a loopback address, or without memory, but events count for the source.
void use_account_of(EngineContext& ctx, Agent& a, const control::Address& source) noexcept;
/// Counts the events of a connection with an account of its own for that source, which is one of
/// control::event_source(); see observe/event_places.h.
void set_event_source(Agent& a, const control::Source& source) noexcept;
/// The agent ends, and holds nothing.
void close_account(EngineContext& ctx, Agent& a) noexcept;
/// Names the source of the agent's peer among those that there are now. 0: the peer is of our own
/// process, or the application chose it.
std::uintptr_t source_key(const Agent& a) noexcept;
/// Whether one more connection of that source may have receives. Errors: limit.
Result<void> check_receives_of(const EngineContext& ctx, const control::Address& source);

}  // namespace spinwire::agent
