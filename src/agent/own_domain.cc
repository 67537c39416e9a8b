#include "agent/own_domain.h"

#include <errno.h>

#include <memory>
#include <new>
#include <utility>

#include "agent/agent.h"
#include "base/error.h"
#include "base/units.h"

namespace spinwire::agent {
namespace {

constexpr const char* kAsked = "give a connection a protection domain of its own (own_domain)";

bool failed(EngineContext& ctx, Agent& a, const Error& error) noexcept {
  fail(ctx, a, error);
  return true;
}

Error too_many(const EngineContext& ctx) {
  return {Status::limit, kAsked,
          base::format("{} connections have one, connections.own_domains = {}", ctx.own_domains,
                       ctx.config.connections.own_domains),
          "raise connections.own_domains to the number of connections that have one at a time"};
}

/// Moves the agent's reserved receives from the shared queue to its own.
bool use_own_queue(EngineContext& ctx, Agent& a) noexcept {
  if (ctx.device->srq() == nullptr || a.raw != nullptr) return true;
  if (!acquire_own_queue(ctx, a)) return false;
  ctx.reserved_receives -= a.credit.reserved;
  a.source->receives -= a.credit.reserved;
  ctx.own_queues->reserved_receives += a.credit.reserved;
  return true;
}

}  // namespace

bool step_domain(EngineContext& ctx, Agent& a) noexcept {
  set_stage(a, Stage::slab);
  const auto made = base::no_throw(kAsked, [&]() -> Result<void> {
    if (ctx.own_domains >= ctx.config.connections.own_domains) return tl::unexpected(too_many(ctx));
    if (!use_own_queue(ctx, a)) {
      return base::fail(Status::limit, kAsked, "kept messages hold the memory of its receives",
                        "drop some of them, or raise memory.receive_bytes");
    }
    auto own = std::make_unique<OwnDomain>();
    if (auto done = ctx.device->make_domain(own->domain); !done) return done;
    own->registrations.pd = own->domain.pd;
    a.domain = std::move(own);
    ++ctx.own_domains;
    return {};
  });
  return made ? true : failed(ctx, a, made.error());
}

bool step_slab(EngineContext& ctx, Agent& a) noexcept {
  const std::span<std::byte> slab = ctx.arena->slab();
  errno = 0;
  const ibv_mr* mr = ctx.device->register_slab(a.domain->domain, slab);
  if (mr == nullptr) {
    const int error = errno;
    const auto why = base::no_throw(kAsked, [&]() -> Result<void> {
      return tl::unexpected(memory::registration_error(
          base::format("register the pools, {} in all, in a connection's own domain (own_domain)",
                       base::bytes_text(slab.size())),
          slab.size(), error));
    });
    return failed(ctx, a, why.error());
  }
  a.domain->lkey = mr->lkey;
  if (a.own_queue != kNone) aim_own_receives(ctx, a, mr->lkey);
  set_stage(a, Stage::create);
  return true;
}

bool step_end_domain(EngineContext& ctx, Agent& a) noexcept {
  OwnDomain& own = *a.domain;
  if (ctx.registrations->end_next(own.registrations)) return true;
  const bool more = ctx.device->end_domain(own.domain);
  if (more && own.domain.pd != nullptr) return true;
  if (!more) ctx.device->retire_domain(own.domain);
  a.domain.reset();
  --ctx.own_domains;
  set_stage(a, Stage::over);
  return true;
}

bool reaches(const EngineContext& ctx, const OwnDomain& own, const Block& block) noexcept {
  return block.lkey == ctx.staging_block->lkey ||
         ctx.registrations->group_of(block) == &own.registrations;
}

void use_own_key(const EngineContext& ctx, const OwnDomain& own, Operation& op) noexcept {
  for (int i = 0; i < op.wr.num_sge; ++i) {
    ibv_sge& sge = op.wr.sg_list[i];
    if (sge.lkey == ctx.staging_block->lkey) sge.lkey = own.lkey;
  }
}

}  // namespace spinwire::agent
