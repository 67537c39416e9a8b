#include "agent/unheard_peers.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "agent/agent.h"
#include "agent/recording.h"
#include "base/error.h"
#include "base/ticks.h"
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

/// The word in the credit cell; without one, what was there at first.
std::uint64_t word_of(const Agent& a) noexcept {
  return a.credit.cell != nullptr ? a.credit.cell->load(std::memory_order_relaxed)
                                  : a.liveness.cell_word;
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
  return base::ticks_since(a.activity.last_heard, now) >=
         std::min(ctx.clock.ticks(ctx.config.connections.handshake_timeout / 8), grace);
}

/// Finds the oldest of a list. Removes those before it, which were heard: only so many at once,
/// because thousands may have come since the last search.
template <typename List>
UnheardPeers find_oldest(EngineContext& ctx, List& list, std::uint64_t grace) noexcept {
  constexpr int kMostPerSearch = 32;
  for (int i = 0; i < kMostPerSearch && !list.empty(); ++i) {
    Agent& a = *list.front();
    const std::uint64_t word = word_of(a);
    const bool is_new = word != a.liveness.cell_word;
    if (is_new && !wire::is_genuine(word, a.credit.token)) {
      distrust_cell(ctx, a);  // it goes to the end of the list
    } else if (is_new || was_heard(a)) {
      stop_awaiting_peer(ctx, a);
    } else {
      return {true, has_had(ctx, a, grace) ? &a : nullptr};
    }
  }
  return {!list.empty(), nullptr};
}

UnheardPeers find_unheard_of(EngineContext& ctx, const control::Address& source) noexcept {
  const auto found = ctx.sources.hosts.find(source.source());
  if (source.is_loopback() || found == ctx.sources.hosts.end()) return {};
  SourceAccount& s = *found->second;
  const UnheardPeers oldest = find_oldest(ctx, s.unheard, ctx.clock.ticks(Grace::kShortest));
  return {oldest.any || s.giving_way != 0, oldest.due};
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

bool was_peer_heard(const Agent& a) noexcept {
  if (was_heard(a)) return true;
  const std::uint64_t word = word_of(a);
  return word != a.liveness.cell_word && wire::is_genuine(word, a.credit.token);
}

std::uint32_t unheard_count(const EngineContext& ctx) noexcept { return ctx.sources.unheard_count; }
void await_peer_anew(EngineContext& ctx, Agent& a) noexcept {
  if (!a.setup.is_unheard) return;
  stop_awaiting_peer(ctx, a);
  a.activity.last_heard = ctx.clock.now();
  await_peer(ctx, a);
}

UnheardPeers find_unheard(EngineContext& ctx, const control::Address* source) noexcept {
  if (source != nullptr) return find_unheard_of(ctx, *source);
  // While a source has so many, only its peers give way.
  if (SourceAccount* const s = heaviest(ctx)) {
    const std::uint32_t before = s->unheard_count;
    const UnheardPeers oldest = find_oldest(ctx, s->unheard, ctx.clock.ticks(Grace::kShortest));
    if (s->unheard_count == before) return oldest;
    return {ctx.sources.unheard_count != 0, nullptr};  // the next search chooses again
  }
  return find_oldest(ctx, ctx.sources.unheard, ctx.sources.grace.at(ctx.clock.now()));
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
  (void)send_goodbye(ctx, a);
  flush(ctx, a);
  close(ctx, a);
  a.setup.deadline = ctx.clock.now() + ctx.clock.ticks(kTimeForGoodbye);
  ctx.timers.reschedule(a.setup.timer, a.setup.deadline);
}

}  // namespace spinwire::agent
