#include "agent/own_domain.h"

#include <errno.h>
#include <fmt/format.h>

#include <memory>
#include <new>
#include <utility>

#include "agent/agent.h"
#include "base/error.h"
#include "base/units.h"

namespace spinwire::agent {
namespace {

constexpr const char* kAsked = "give a connection a protection domain of its own (own_domain)";

bool failed(Shared& s, Agent& a, const Error& error) noexcept {
  fail(s, a, error);
  return true;
}

Error too_many(const Shared& s) {
  return {Status::limit, kAsked,
          fmt::format("{} connections have one, connections.own_domains = {}", s.own_domains,
                      s.config.connections.own_domains),
          "raise connections.own_domains to as many as shall have one at a time"};
}

/// In place of what it was promised of the shared queue.
bool take_receives(Shared& s, Agent& a) noexcept {
  if (s.device->srq() == nullptr || a.raw != nullptr) return true;
  const std::uint32_t promised = a.allotment;
  if (!take_own_queue(s, a)) return false;
  s.allotted -= promised;
  s.own->allotted += promised;
  return true;
}

}  // namespace

bool step_domain(Shared& s, Agent& a) noexcept {
  a.stage = Stage::slab;
  const auto made = base::no_throw(kAsked, [&]() -> Result<void> {
    if (s.own_domains >= s.config.connections.own_domains) return tl::unexpected(too_many(s));
    if (!take_receives(s, a)) {
      return base::fail(Status::limit, kAsked, "messages that are kept hold its receives' memory",
                        "drop some of them, or raise memory.receive_bytes");
    }
    auto own = std::make_unique<OwnDomain>();
    if (auto done = s.device->make_domain(own->domain); !done) return done;
    own->registrations.pd = own->domain.pd;
    a.domain = std::move(own);
    ++s.own_domains;
    return {};
  });
  return made ? true : failed(s, a, made.error());
}

bool step_slab(Shared& s, Agent& a) noexcept {
  const std::span<std::byte> slab = s.arena->slab();
  errno = 0;
  const ibv_mr* mr = s.device->register_slab(a.domain->domain, slab);
  if (mr == nullptr) {
    const int error = errno;
    const auto why = base::no_throw(kAsked, [&]() -> Result<void> {
      return tl::unexpected(memory::registration_error(
          fmt::format("register the pools, {} in all, in a connection's own domain (own_domain)",
                      base::bytes_text(slab.size())),
          slab.size(), error));
    });
    return failed(s, a, why.error());
  }
  a.domain->lkey = mr->lkey;
  if (a.own_queue != kNone) aim_own_receives(s, a, mr->lkey);
  a.stage = Stage::expose;
  return true;
}

bool step_leave(Shared& s, Agent& a) noexcept {
  OwnDomain& own = *a.domain;
  if (s.registrations->end_next(own.registrations)) return true;
  const bool more = s.device->end_domain(own.domain);
  if (more && own.domain.pd != nullptr) return true;
  if (!more) s.device->leave_domain(own.domain);
  a.domain.reset();
  --s.own_domains;
  a.stage = Stage::over;
  return true;
}

bool reaches(const Shared& s, const OwnDomain& own, const Block& block) noexcept {
  return block.lkey == s.staging_block->lkey ||
         s.registrations->group_of(block) == &own.registrations;
}

void use_own_key(const Shared& s, const OwnDomain& own, Operation& op) noexcept {
  for (int i = 0; i < op.wr.num_sge; ++i) {
    ibv_sge& sge = op.wr.sg_list[i];
    if (sge.lkey == s.staging_block->lkey) sge.lkey = own.lkey;
  }
}

}  // namespace spinwire::agent
