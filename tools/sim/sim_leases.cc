// Leases of the simulated workload: clients of connections borrow memory of their servers. A lease
// that is renewed lasts as long as its owner is reachable; any other one ends in its time, and no
// access reaches the memory after that.
#include <algorithm>
#include <utility>

#include "sim/sim_world.h"

namespace spinwire::tools {

namespace {

constexpr Nanoseconds kCalmDuration = 100ms;
constexpr std::string_view kDenial = "not now";

/// How a holder ends its lease, or the renewal.
enum End : std::uint64_t { stop_renewal, give_back, release, detach, ends };

}  // namespace

bool SimWorld::is_link_up(const SimLease& lease) const {
  const SimLink& l = links_[lease.link];
  return l.ready && !l.interrupted && !l.over && l.epoch == lease.epoch &&
         is_incarnation(l.from, l.incarnation);
}

bool SimWorld::may_link_end(const SimLease& lease) const {
  const SimLink& l = links_[lease.link];
  return is_closing_ || l.closing || l.troubled || l.leaving;
}

/// Whether the renewals of a lease may fail: not when all trouble was over.
bool SimWorld::is_excused(const SimLease& lease) const {
  return !lease.is_calm && (links_[lease.link].troubled || worst_loss_ > 0.15);
}

/// For so long a device may repeat an operation; the owner adds this to each lease.
Nanoseconds SimWorld::longest_retry() const {
  const auto& retry = hosts_[0].config.queue_pair;
  return Nanoseconds((std::int64_t{4 * 4096} << retry.ack_timeout) *
                     (std::int64_t{retry.retry_count} + 1));
}

// ---- the holder -------------------------------------------------------------------------------

void SimWorld::act_on_leases(std::uint32_t link) {
  if (sim_.chance(0.4)) (void)request_lease(link, false);
  if (leases_.empty()) return;
  const auto index = static_cast<std::uint32_t>(sim_.random(leases_.size()));
  const SimLease& lease = leases_[index];
  if (lease.link != link || lease.stage != SimLeaseStage::held || !is_link_up(lease)) return;
  if (sim_.chance(0.8)) return use_lease(index);
  end_lease(index, sim_.random(End::ends));
}

bool SimWorld::request_lease(std::uint32_t link, bool is_calm) {
  SimLink& l = links_[link];
  const auto index = static_cast<std::uint32_t>(leases_.size());
  SimLease& lease = leases_.emplace_back();
  lease.link = link;
  lease.epoch = l.epoch;
  lease.is_calm = is_calm;
  lease.begun = sim_.now();
  lease.bytes = static_cast<std::uint32_t>(8 + sim_.random(4000));
  lease.duration = is_calm ? kCalmDuration : 60ms + below(100ms);
  if (!is_calm && sim_.chance(0.1)) lease.denial = static_cast<std::uint32_t>(1 + sim_.random(99));
  LeaseOptions options;
  options.duration = lease.duration;
  options.tag = index + 1;
  const Status status = l.handle.request_memory(
      lease.bytes, options, [this, index](LeaseReply& reply) { on_lease_reply(index, reply); });
  if (status == Status::ok) return true;
  leases_.pop_back();
  if (status != Status::would_block && !(status == Status::not_connected && !l.handle.ready()))
    fail("a lease through connection {} was refused: {}", link, to_string(status));
  return false;
}

void SimWorld::on_lease_reply(std::uint32_t index, LeaseReply& reply) {
  SimLease& lease = leases_[index];
  if (!sim_.alive(links_[lease.link].from)) return;
  sim_.note(std::uint64_t{index} << 8 | static_cast<std::uint64_t>(reply.status));
  if (lease.stage != SimLeaseStage::requested) return fail("lease {} is answered twice", index);
  lease.stage = SimLeaseStage::over;
  const bool is_denied = reply.status == Status::refused;
  if (is_denied != (lease.denial != 0) && reply.status != Status::flushed)
    return fail("lease {} is answered with {}", index, to_string(reply.status));
  if (is_denied && (reply.code != lease.denial || reply.text != kDenial))
    return fail("lease {} is refused with another code or text", index);
  const bool has_no_room = reply.status == Status::limit || reply.status == Status::no_buffer;
  if (is_denied || has_no_room || reply.status == Status::flushed) return;
  if (reply.status != Status::ok || reply.duration != lease.duration ||
      reply.memory.size() != lease.bytes || reply.memory.tag() != index + 1)
    return fail("lease {} is not granted as requested: {}", index, to_string(reply.status));
  lease.stage = SimLeaseStage::held;
  lease.was_held = true;
  lease.memory = std::move(reply.memory);
  lease.ends_by = sim_.now() + lease.duration + longest_retry() + slack_;
  if (lease.is_calm || sim_.chance(0.6)) renew_by_itself(index);
  use_lease(index);
}

void SimWorld::renew_by_itself(std::uint32_t index) {
  SimLease& lease = leases_[index];
  const Status status = lease.memory.auto_renew(
      lease.duration, [this, index](LeaseReply& reply) { on_renewal_end(index, reply.status); });
  const bool is_over = lease.memory.time_left().count() == 0;
  const bool has_ended = status == Status::not_connected && !links_[lease.link].handle.ready();
  if (status != Status::ok && !has_ended && !(status == Status::lease_expired && is_over))
    return fail("lease {} cannot be renewed: {}", index, to_string(status));
  lease.is_renewed = status == Status::ok;
  if (lease.is_renewed) lease.ends_by = kNeverGood;
}

void SimWorld::on_renewal_end(std::uint32_t index, Status status) {
  SimLease& lease = leases_[index];
  if (!sim_.alive(links_[lease.link].from)) return;
  sim_.note(std::uint64_t{index} << 8 | static_cast<std::uint64_t>(status));
  if (!std::exchange(lease.is_renewed, false))
    return fail("lease {} reports the end of a renewal that was over", index);
  const bool is_good =
      status == Status::flushed ? !lease.is_calm || may_link_end(lease) : is_excused(lease);
  if (!is_good || (status != Status::flushed && status != Status::lease_expired))
    fail("the renewal of lease {} ends without a reason: {}", index, to_string(status));
  lease.ends_by = sim_.now() + lease.duration + longest_retry() + slack_;
}

void SimWorld::end_lease(std::uint32_t index, std::uint64_t how) {
  SimLease& lease = leases_[index];
  if (how == End::give_back) {
    const Status status = lease.memory.give_back();
    const bool is_over = status == Status::lease_expired && lease.memory.time_left().count() == 0;
    const bool has_ended = status == Status::not_connected && !links_[lease.link].handle.ready();
    // A renewal is under way, or there is nothing to give back.
    if (status == Status::would_block || is_over || has_ended) return;
    if (status != Status::ok)
      return fail("lease {} cannot be given back: {}", index, to_string(status));
    lease.gives_back = true;
    lease.stage = SimLeaseStage::over;
  } else if (how == End::release) {
    lease.memory.release();
    lease.stage = SimLeaseStage::over;
  } else if (how == End::detach) {
    lease.detached = lease.memory.detach();
    if (lease.memory) return;  // a renewal is under way
    lease.stage = SimLeaseStage::left;
  } else {
    lease.memory.stop_auto_renew();
  }
  lease.is_renewed = false;
  lease.ends_by = std::min(lease.ends_by, sim_.now() + lease.duration + longest_retry() + slack_);
}

void SimWorld::use_lease(std::uint32_t index) {
  SimLease& lease = leases_[index];
  SimLink& l = links_[lease.link];
  Buffer buffer = sim_.engine(l.from).allocate(lease.bytes);
  if (!buffer) return;
  fill(buffer.bytes().first(lease.bytes), index, false);
  const bool is_over = lease.memory.time_left().count() == 0;
  const std::uint64_t access = accesses_.size();
  const Status status =
      l.handle.write(buffer.slice(0, lease.bytes), lease.memory.region(),
                     [this, access](const Completion& c) { on_access_end(access, c.status); });
  if (is_over && status == Status::ok) return fail("lease {} is over, and is used", index);
  if (status == Status::ok) {
    accesses_.push_back({index, false, false});
    ++unsent_;
    return;
  }
  const bool is_usual =
      status == Status::would_block || (is_over && status == Status::lease_expired);
  if (!is_usual && !(status == Status::not_connected && !l.handle.ready()))
    fail("lease {} cannot be used: {}", index, to_string(status));
}

/// Uses the key of a lease that is over, which the device must refuse: the connection ends.
void SimWorld::use_key_late(std::uint32_t index) {
  SimLease& lease = leases_[index];
  SimLink& l = links_[lease.link];
  if (!is_link_up(lease) || l.closing || l.leaving || !has_owner(lease)) return;
  Buffer buffer = sim_.engine(l.from).allocate(lease.bytes);
  if (!buffer) return;
  fill(buffer.bytes().first(lease.bytes), index, false);
  const std::uint64_t access = accesses_.size();
  const Status status =
      l.handle.write(buffer.slice(0, lease.bytes), lease.detached,
                     [this, access](const Completion& c) { on_access_end(access, c.status); });
  if (status != Status::ok) return;
  accesses_.push_back({index, true, false});
  ++unsent_;
  l.troubled = true;
  rouse(l.from);
}

void SimWorld::on_access_end(std::uint64_t number, Status status) {
  SimAccess& access = accesses_[number];
  const SimLease& lease = leases_[access.lease];
  const SimLink& l = links_[lease.link];
  if (!is_incarnation(l.from, l.incarnation)) return;
  sim_.note(number << 8 | static_cast<std::uint64_t>(status));
  if (std::exchange(access.ended, true)) return fail("access {} ends twice", number);
  --unsent_;
  if (access.is_late) {
    if (status == Status::ok)
      return fail("lease {} is over, and its key opens memory", access.lease);
    return count(SimEvent::refused_accesses);
  }
  const bool was_closed = status == Status::flushed && l.closing;
  if (status != Status::ok && !l.troubled && !is_cut_off(l) && !was_closed)
    fail("access {} to lease {} ends with {} without a reason", number, access.lease,
         to_string(status));
}

/// The holder's node has died.
void SimWorld::orphan_leases(NodeId node) {
  for (SimLease& lease : leases_) {
    if (links_[lease.link].from != node) continue;
    lease.stage = SimLeaseStage::over;
    lease.is_renewed = false;
    lease.ends_by = kNeverGood;  // the end of the connection returns it
  }
  for (SimAccess& access : accesses_) {
    if (links_[leases_[access.lease].link].from != node || access.ended) continue;
    access.ended = true;
    --unsent_;
  }
}

// ---- the owner --------------------------------------------------------------------------------

void SimWorld::on_memory_request(NodeId node, MemoryRequest& request) {
  request.accept();
  if (!sim_.alive(node)) return;
  if (request.tag() == 0 || request.tag() > leases_.size())
    return fail("node {} is asked for a lease with the tag {}", node, request.tag());
  SimLease& lease = leases_[request.tag() - 1];
  if (lease.owner_incarnation != 0) return fail("lease {} is requested twice", request.tag() - 1);
  if (request.bytes() != lease.bytes || request.options().duration != lease.duration)
    return fail("lease {} is requested with other terms", request.tag() - 1);
  lease.owner = node;
  lease.owner_incarnation = sim_.incarnation(node);
  if (lease.denial != 0) request.refuse(lease.denial, kDenial);
}

void SimWorld::on_returned(NodeId node, const Returned& returned) {
  if (!sim_.alive(node)) return;
  sim_.note(returned.tag << 8 | static_cast<std::uint64_t>(returned.how));
  if (returned.tag == 0 || returned.tag > leases_.size())
    return fail("node {} gets a lease back with the tag {}", node, returned.tag);
  const auto index = static_cast<std::uint32_t>(returned.tag - 1);
  SimLease& lease = leases_[index];
  if (lease.owner != node || !has_owner(lease) || !returned.requested || lease.denial != 0)
    return fail("lease {} returns to node {}, which has not granted it", index, node);
  if (++lease.returns != 1) return fail("lease {} returns for the {}th time", index, lease.returns);
  judge_return(lease, index, returned.how);
  if (!returned.memory) return;
  if (returned.memory.size() != lease.bytes)
    return fail("{} bytes of lease {} return", returned.memory.size(), index);
  // Nobody may change the memory from now on.
  fill({returned.memory.data(), returned.memory.size()}, index, true);
  keep(node, returned.memory, index, true);
  if (lease.stage == SimLeaseStage::left && returned.how == ReturnedBy::expiry)
    sim_.at(sim_.now() + below(1ms), [this, index] { use_key_late(index); });
}

void SimWorld::judge_return(const SimLease& lease, std::uint32_t index, ReturnedBy how) {
  const auto told = [&](const char* what) {
    fail("lease {} from {} to {} returns by {} {}", index, lease.owner, links_[lease.link].from,
         to_string(how), what);
  };
  switch (how) {
    case ReturnedBy::give_back:
      return lease.gives_back ? void() : told("but was not given back");
    case ReturnedBy::release:
      return lease.stage == SimLeaseStage::over ? void() : told("but was not released");
    case ReturnedBy::expiry:
      if (lease.stage == SimLeaseStage::held && lease.memory.time_left().count() != 0)
        return told("while its holder may use it");
      if (lease.is_renewed && !is_excused(lease)) return told("though it is renewed");
      return count(SimEvent::expiries);
    case ReturnedBy::end:
      if (lease.is_calm && is_link_up(lease) && !may_link_end(lease))
        return told("though its connection goes on");
      return;
    default:
      return told("which its owner never asked for");
  }
}

// ---- what must hold ---------------------------------------------------------------------------

/// A lease that its holder has.
void SimWorld::audit_held(SimLease& lease, std::uint32_t index) {
  const Nanoseconds left = lease.memory.time_left();
  if (!is_link_up(lease)) {
    if (lease.memory) fail("lease {} outlives its connection", index);
    if (lease.is_renewed) fail("lease {} has not reported the end of its renewal", index);
    lease.stage = SimLeaseStage::over;
    return;
  }
  if (left.count() != 0 && sim_.now() > lease.ends_by && !is_excused(lease))
    return fail("lease {} lasts, though its time is over", index);
  if (!lease.is_renewed) return;
  if (left.count() == 0 && !is_excused(lease))
    return fail("lease {} is renewed, and has no time left", index);
  if (left.count() != 0 && sim_.now() > lease.begun + 2 * lease.duration &&
      !std::exchange(lease.is_counted, true))
    count(SimEvent::renewals);
}

void SimWorld::audit_leases() {
  for (std::uint32_t i = 0; i < leases_.size(); ++i) {
    SimLease& lease = leases_[i];
    if (lease.stage == SimLeaseStage::held) audit_held(lease, i);
    const bool is_due = lease.was_held && lease.returns == 0 && sim_.now() > lease.ends_by;
    if (is_due && has_owner(lease) && !is_excused(lease) &&
        hosts_[home(lease.owner)].paused_until + slack_ < sim_.now())
      fail("lease {} has not returned to node {}, {} us after its end", i, lease.owner,
           (sim_.now() - lease.ends_by).count() / 1000);
  }
}

/// All trouble is over: leases last for as long as they are renewed, and end when they are not.
bool SimWorld::prove_leases() {
  const auto first = static_cast<std::uint32_t>(leases_.size());
  for (std::uint32_t i = 0; i < links_.size(); ++i) {
    const SimLink& l = links_[i];
    if (l.ready && !l.interrupted && !l.over && !l.closing && is_incarnation(l.from, l.incarnation))
      (void)request_lease(i, true);
  }
  for (NodeId node = 0; node < sim_.size(); ++node) rouse(node);
  for (int i = 0; i < 7 && !failed(); ++i) {
    sim_.run_for(kCalmDuration / 2);
    audit();
  }
  for (std::uint32_t i = first; i < leases_.size(); ++i) {
    if (leases_[i].stage == SimLeaseStage::held && is_link_up(leases_[i]))
      end_lease(i, i % End::ends);
  }
  for (NodeId node = 0; node < sim_.size(); ++node) rouse(node);
  const auto is_back = [this](const SimLease& lease) {
    return !lease.was_held || lease.returns != 0 || lease.is_renewed || !has_owner(lease);
  };
  const auto all_back = [&] {
    return failed() ||
           (unsent_ == 0 && std::all_of(leases_.begin() + first, leases_.end(), is_back));
  };
  if (!sim_.run_until(all_back, 1s)) fail("leases do not end");
  if (!failed()) audit();
  return !failed();
}

void SimWorld::judge_leases() {
  for (std::size_t i = 0; i < leases_.size(); ++i) {
    const SimLease& lease = leases_[i];
    if (lease.stage == SimLeaseStage::requested) fail("lease {} was never answered", i);
    if (lease.was_held && lease.returns == 0 && has_owner(lease))
      fail("lease {} has never returned to node {}", i, lease.owner);
  }
}

}  // namespace spinwire::tools
