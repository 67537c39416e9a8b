#include "agent/unheard_peers.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "agent/agent.h"
#include "agent/recording.h"
#include "base/error.h"
#include "wire/credit_word.h"
#include "wire/goodbye.h"

namespace spinwire::agent {

using control::Grace;

base::IntrusiveLinks<Agent>& unheard_links(Agent& a) noexcept { return a.setup.unheard; }
base::IntrusiveLinks<Agent>& unheard_of_source_links(Agent& a) noexcept {
  return a.setup.unheard_of_source;
}

namespace {

// How long a peer that gives way has to take the goodbye, and when it may come back.
constexpr Nanoseconds kTimeForGoodbye = std::chrono::milliseconds(10);
constexpr Nanoseconds kComeBackAfter = std::chrono::milliseconds(100);

bool is_heard(const Agent& a) noexcept {
  if (was_heard(a)) return true;
  if (a.credit.cell == nullptr) return false;
  const std::uint64_t word = a.credit.cell->load(std::memory_order_relaxed);
  return word != a.liveness.cell_word && wire::is_genuine(word, a.credit.token);
}

/// The oldest of a list; null: there is none. Removes those before it, which were heard.
template <typename List>
Agent* oldest_of(EngineContext& ctx, List& list) noexcept {
  Agent* a = list.front();
  for (; a != nullptr && is_heard(*a); a = list.front()) stop_awaiting_peer(ctx, *a);
  return a;
}

/// Of the sources with more than a quarter of all connections unheard, the one with the most; null:
/// there is none.
SourceAccount* heaviest(EngineContext& ctx) noexcept {
  SourceAccount* found = nullptr;
  for (SourceAccount& s : ctx.sources.heavy) {  // at most three
    if (found == nullptr || s.unheard_count > found->unheard_count) found = &s;
  }
  return found;
}

/// Whether the peer has been silent for so long since it was ready.
bool has_had(const EngineContext& ctx, const Agent& a, std::uint64_t grace) noexcept {
  const std::uint64_t now = ctx.clock.now();
  return now - std::min(a.activity.last_heard, now) >=
         std::min(ctx.clock.ticks(ctx.config.connections.handshake_timeout / 8), grace);
}

UnheardPeers find_unheard_of(EngineContext& ctx, const control::Address& source) noexcept {
  const auto found = ctx.sources.hosts.find(source.source());
  if (source.is_loopback() || found == ctx.sources.hosts.end()) return {};
  SourceAccount& s = *found->second;
  Agent* const oldest = oldest_of(ctx, s.unheard);
  const bool is_due = oldest != nullptr && has_had(ctx, *oldest, ctx.clock.ticks(Grace::kShortest));
  return {oldest != nullptr || s.giving_way != 0, is_due ? oldest : nullptr};
}

}  // namespace

void await_peer(EngineContext& ctx, Agent& a) noexcept {
  if (a.setup.outbound || a.setup.out_of_band || !a.peer.key.empty() || a.raw != nullptr) return;
  SourceLedger& all = ctx.sources;
  a.setup.is_unheard = true;
  all.unheard.push_back(a);
  ++all.unheard_count;
  a.source->unheard.push_back(a);
  if (++a.source->unheard_count == all.heavy_above + 1) all.heavy.push_back(*a.source);
}

void stop_awaiting_peer(EngineContext& ctx, Agent& a) noexcept {
  if (!a.setup.is_unheard) return;
  a.setup.is_unheard = false;
  SourceLedger& all = ctx.sources;
  all.unheard.erase(a);
  --all.unheard_count;
  a.source->unheard.erase(a);
  if (--a.source->unheard_count == all.heavy_above) all.heavy.erase(*a.source);
}

std::uint32_t unheard_count(const EngineContext& ctx) noexcept { return ctx.sources.unheard_count; }

UnheardPeers find_unheard(EngineContext& ctx, const control::Address* source) noexcept {
  if (source != nullptr) return find_unheard_of(ctx, *source);
  // While a source has so many, only its peers give way.
  while (SourceAccount* const s = heaviest(ctx)) {
    const std::uint32_t before = s->unheard_count;
    Agent* const oldest = oldest_of(ctx, s->unheard);
    if (s->unheard_count != before) continue;
    const bool is_due = has_had(ctx, *oldest, ctx.clock.ticks(Grace::kShortest));
    return {true, is_due ? oldest : nullptr};
  }
  Agent* const oldest = oldest_of(ctx, ctx.sources.unheard);
  if (oldest == nullptr) return {};
  const std::uint64_t grace = ctx.sources.grace.at(ctx.clock.now());
  return {true, has_had(ctx, *oldest, grace) ? oldest : nullptr};
}

void give_way(EngineContext& ctx, Agent& a) noexcept {
  if (a.source->unheard_count <= ctx.sources.heavy_above)
    ctx.sources.grace.shorten(ctx.clock.now());
  a.setup.gives_way = true;
  ++a.source->giving_way;
  Error why{Status::limit, base::format("stay connected to {}", a.peer.name.data()),
            "its process was never heard, and a new peer needs the connection",
            "see whether the peer's device works, or raise connections.maximum"};
  record(ctx, a, why);
  a.cause = std::move(why);
  a.goodbyes.ours = wire::encode(Goodbye{GoodbyeReason::overloaded, kComeBackAfter});
  a.goodbye_sent = submit_internal(ctx, a, OperationKind::goodbye);
  (void)flush(ctx, a);
  close(ctx, a);
  a.setup.deadline = ctx.clock.now() + ctx.clock.ticks(kTimeForGoodbye);
  ctx.timers.reschedule(a.setup.timer, a.setup.deadline);
}

}  // namespace spinwire::agent
