// Cold.
#include "agent/source_ledger.h"

#include <algorithm>
#include <new>
#include <utility>

#include "agent/agent.h"
#include "base/error.h"
#include "control/peer_source.h"

namespace spinwire::agent {

SourceAccount*& next_for_setup(SourceAccount& s) noexcept { return s.setup.next; }
SourceAccount*& next_reader(SourceAccount& s) noexcept { return s.readers.next; }

namespace {

SourceAccount* acquire(SourceLedger& all) noexcept {
  const std::uint32_t index = all.accounts.acquire();
  SourceAccount& s = all.accounts.at(index);
  s.~SourceAccount();
  new (&s) SourceAccount();
  return &s;
}

/// Ends an account that no connection uses. It holds nothing then.
void release_unused(EngineContext& ctx, SourceAccount& s) noexcept {
  if (s.connections != 0) return;
  SourceLedger& all = ctx.sources;
  if (s.setup.is_listed) all.setup_turns.erase(s);
  if (s.readers.is_listed) ctx.rendezvous->reader_turns.erase(s);
  if (s.is_host) all.hosts.erase(s.address);
  all.accounts.release(all.accounts.index_of(s));
}

/// The account of a host; null without memory.
SourceAccount* account_of(SourceLedger& all, const control::Source& host) noexcept {
  SourceAccount* found = nullptr;
  (void)base::no_throw("count what a host holds", [&]() -> Result<void> {
    SourceAccount*& place = all.hosts.try_emplace(host, nullptr).first->second;
    if (place == nullptr) place = acquire(all);
    found = place;
    return {};
  });
  if (found != nullptr && !std::exchange(found->is_host, true)) found->address = host;
  return found;
}

}  // namespace

void set_event_source(Agent& a, const control::Source& source) noexcept {
  if (!a.source->is_host) a.source->address = source;
}

void open_account(EngineContext& ctx, Agent& a) noexcept {
  a.source = acquire(ctx.sources);
  a.source->connections = 1;
}

void use_account_of(EngineContext& ctx, Agent& a, const control::Address& source) noexcept {
  set_event_source(a, control::event_source(source));
  if (source.is_loopback()) return;
  SourceAccount& before = *a.source;
  // While the agent moves, both accounts exist: the ledger has one more than there are agents.
  SourceAccount* const host = account_of(ctx.sources, source.source());
  if (host == nullptr || host == &before) return;
  const bool was_queued = a.setup.in_queue;
  if (was_queued) {
    before.setup.agents.erase(a);
    a.setup.in_queue = false;
  }
  host->receives += std::exchange(before.receives, 0u);
  host->own_queues += std::exchange(before.own_queues, 0u);
  --before.connections;
  ++host->connections;
  a.source = host;
  release_unused(ctx, before);
  if (was_queued) queue_setup(ctx, a);
}

void close_account(EngineContext& ctx, Agent& a) noexcept {
  SourceAccount& s = *std::exchange(a.source, nullptr);
  if (a.setup.gives_way) --s.giving_way;
  --s.connections;
  release_unused(ctx, s);
}

std::uintptr_t source_key(const Agent& a) noexcept {
  return a.source->is_host ? reinterpret_cast<std::uintptr_t>(a.source) : 0;
}

bool shares_receives(const EngineContext& ctx) noexcept {
  const Config::Connections& c = ctx.config.connections;
  return control::leaves_room(c.maximum, c.maximum_per_source);
}

/// Of the receives, this part is not for a host with more than its share.
constexpr std::uint32_t kPartForOthers = 16;

Result<void> check_receives_of(const EngineContext& ctx, const control::Address& source) {
  const auto found = ctx.sources.hosts.find(source.source());
  if (source.is_loopback() || found == ctx.sources.hosts.end() || !shares_receives(ctx)) return {};
  const SourceAccount& s = *found->second;
  const bool shares = ctx.device->srq() != nullptr;
  const std::uint32_t all = shares ? ctx.reservable_receives : ctx.own_queues->queues.capacity();
  const std::uint32_t used = shares ? ctx.reserved_receives : ctx.own_queues->queues.size();
  const std::uint32_t held = shares ? s.receives : s.own_queues;
  if (used >= all || has_share(held, all - used)) return {};
  // What the host's connections hold beyond one each, they yield as they send. So it may have more
  // connections meanwhile, but the last receives are for others.
  const bool has_last = all - used <= all / kPartForOthers;
  const std::uint32_t used_least = std::min(ctx.agents.size(), all);
  if (shares && !has_last && has_share(s.connections, all - used_least)) return {};
  return base::fail(
      Status::limit, "accept one more connection",
      base::format("{} of {} {} are of {}, which is its share", held, all,
                   shares ? "reserved receives" : "receive queues", control::source_text(source)),
      "close some, or raise queues.receive_depth or connections.maximum_per_source of "
      "the server");
}

}  // namespace spinwire::agent
