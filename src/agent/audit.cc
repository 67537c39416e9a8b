// Checks that the agents' counts agree with their lists and records. Cold.
#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <vector>

#include "agent/agent.h"
#include "agent/gathered.h"
#include "base/auditor.h"

namespace spinwire::agent {
namespace {

using KindCounts = std::array<std::uint64_t, kOperationKinds>;

/// Checks everything and stops at the first fault.
class AgentAuditor : public base::Auditor {
 public:
  explicit AgentAuditor(EngineContext& ctx)
      : ctx_(ctx), records_(ctx.operations.capacity(), false), slots_(ctx.receives.size(), false) {}

  std::string run() {
    for (const Agent& a : ctx_.agents) {
      if (ok()) check_agent(a);
    }
    if (ok()) check_cancelled_sends();
    if (ok()) check_windows();
    if (ok()) check_leases();
    if (ok()) check_records();
    if (ok()) check_lists();
    if (ok()) check_slots();
    if (ok()) check_receives();
    if (ok()) check_credit();
    if (ok()) check_sources();
    return take_fault();
  }

 private:
  void check_agent(const Agent& a) {
    set_place(base::format("connection {}: ", a.index));
    expect(a.generation == ctx_.agents.generation(a.index), "its handle names another");
    expect(a.qp == nullptr || find_by_qpn(ctx_, a.qp->qp_num) == &a,
           "its queue pair is not its own");
    expect(a.own_cell.block == nullptr || a.own_cell.block->refs != 0,
           "its credit cell is free memory");
    check_sends(a);
    check_operations(a);
    check_credits_of(a);
    check_held(a);
    check_leases_of(a);
    if (a.raw != nullptr) {
      const std::string raw = audit_raw(ctx_, a);
      expect(raw.empty(), "{}", raw);
    }
    set_place({});
  }

  /// Rendezvous messages that have not ended.
  void check_sends(const Agent& a) {
    std::uint32_t count = 0;
    const base::IndexPool<RendezvousSend>& all = ctx_.rendezvous->sends;
    for (const RendezvousSend& each : a.rendezvous.sends) {
      const RendezvousSend* const t = &each;
      if (!ok()) return;
      if (!expect(
              count++ < a.rendezvous.send_count && all.in_use(t->index) && &all.at(t->index) == t,
              "the list of rendezvous messages is broken") ||
          !expect(t->agent == &a, "rendezvous message {} is another connection's", t->index)) {
        return;
      }
      expect(t->block != nullptr && t->block->refs != 0,
             "rendezvous message {} uses memory that is free", t->index);
      expect(t->cancelled || !(t->due || t->never_posted), "a callback is due for nothing");
      expect(!t->due || a.credit.in_end_of_poll_list,
             "no poll will run the callback of what was cancelled");
      windows_ += t->key.is_window() ? 1 : 0;
      cancelled_sends_ += t->due ? 1 : 0;
      ++sends_;
    }
    expect(count == a.rendezvous.send_count, "{} rendezvous messages are outstanding, {} counted",
           count, a.rendezvous.send_count);
  }

  void check_cancelled_sends() {
    expect(sends_ == ctx_.rendezvous->sends.size(),
           "{} rendezvous messages are outstanding, {} recorded", sends_,
           ctx_.rendezvous->sends.size());
    std::uint32_t count = 0;
    ctx_.cancellations.for_each([&](const Cancellation& each) {
      return expect(!each.of_send || (count++ < cancelled_sends_ && each.due),
                    "the list of cancelled messages is broken");
    });
    expect(count == cancelled_sends_, "{} callbacks of cancelled messages are due, {} listed",
           cancelled_sends_, count);
  }

  /// Each window is free, in use, or being replaced.
  void check_windows() {
    const memory::WindowPool& all = ctx_.windows;
    expect(all.free() + windows_ + all.replacing() == all.size(),
           "of {} windows {} are free, {} in use and {} being replaced", all.size(), all.free(),
           windows_, all.replacing());
  }

  void check_operations(const Agent& a) {
    KindCounts kinds{};
    const std::uint32_t posted = walk(a, a.send_queue.posted, nullptr, "posted", kinds);
    const std::uint32_t deferred =
        a.send_queue.deferred == nullptr
            ? 0
            : walk(a, a.send_queue.deferred, a.send_queue.deferred_last, "deferred", kinds);
    const std::uint32_t cancelled = walk_cancelled(a, kinds);
    expect(a.send_queue.used == posted + deferred + cancelled,
           "{} operations are outstanding: {} posted, {} deferred and {} given up",
           a.send_queue.used, posted, deferred, cancelled);
    const std::uint32_t depth = a.attributes.queue_pair.send_depth;
    expect(a.state != ConnectionState::ready || a.send_queue.used <= depth,
           "{} operations are in a send queue for {}", a.send_queue.used, depth);
    kinds[static_cast<std::size_t>(OperationKind::send)] += a.rendezvous.send_count;
    expect(a.send_queue.deferred == nullptr || a.stage != Stage::up || a.in_flush_queue,
           "operations are deferred and nobody will post them");
    for (std::size_t i = 0; i < kOperationKinds; ++i) {
      const Tally& t = a.tallies[i];
      expect(t.begun == t.done + t.failed + kinds[i],
             "of kind {}, {} operations were accepted, {} are done, {} failed, "
             "{} outstanding",
             i, t.begun, t.done, t.failed, kinds[i]);
    }
  }

  /// Walks one of the agent's lists, up to `last` or, if that is null, to its end.
  std::uint32_t walk(const Agent& a, const Operation* first, const Operation* last,
                     const char* what, KindCounts& kinds) {
    std::uint32_t count = 0;
    const Operation* at = nullptr;
    for (const Operation* op = first; op != nullptr; op = op == last ? nullptr : op->next()) {
      if (!count_record(a, op, what, kinds)) return count;
      expect(op->kind != OperationKind::cancelled || op->with_device,
             "a cancelled operation is {} that the device will not have", what);
      at = op;
      ++count;
    }
    const Operation* const end = last != nullptr ? last : a.send_queue.posted_last;
    expect(count == 0 || at == end, "the list of {} operations ends before its last", what);
    return count;
  }

  /// Cancelled operations that were never posted and wait for their callback.
  std::uint32_t walk_cancelled(const Agent& a, KindCounts& kinds) {
    std::uint32_t count = 0;
    std::uint32_t left = ctx_.operations.capacity();
    ctx_.cancellations.for_each([&](const Cancellation& each) {
      if (each.of_send) return true;
      const Operation* const op = &Operation::of(each);
      if (!ok() ||
          !expect(ctx_.operations.owns(op) && left-- != 0, "the list of cancelled ones is broken"))
        return false;
      expect(each.due && op->kind == OperationKind::cancelled, "a callback is due for nothing");
      if (op->agent != &a) return true;
      expect(a.credit.in_end_of_poll_list, "no poll will run the callback of what was cancelled");
      if (op->with_device) return true;
      if (!count_record(a, op, "cancelled", kinds)) return false;
      ++count;
      return true;
    });
    return count;
  }

  /// Counts a record, which must be in use and in no other list.
  bool count_record(const Agent& a, const Operation* op, const char* what, KindCounts& kinds) {
    if (!expect(ctx_.operations.owns(op), "the list of {} operations leads out of the records",
                what))
      return false;
    const std::uint32_t index = ctx_.operations.index_of(*op);
    if (!expect(index < records_.size() && ctx_.operations.find(op->wr.wr_id) == op,
                "a record has lost its name") ||
        !expect(!records_[index], "record {} is in two places", index)) {
      return false;
    }
    records_[index] = true;
    const OperationKind kind = op->kind == OperationKind::cancelled ? op->was : op->kind;
    const auto counted = static_cast<std::size_t>(tally_kind(kind));
    if (!expect(kind <= OperationKind::noticed_write && counted < kOperationKinds,
                "record {} is of no kind", index))
      return false;
    ++kinds[counted];
    expect(!has_parts(kind, *op) || are_parts_held(ctx_, *op),
           "a part of the operation of record {} is free", index);
    expect(op->agent == &a, "record {} is another connection's", index);
    expect(op->block == nullptr || op->block->refs != 0,
           "the operation of record {} uses memory that is free", index);
    expect(!op->header_in_headroom || op->block->header_in_use == 1,
           "the header of the operation of record {} may be overwritten", index);
    return ok();
  }

  void check_credits_of(const Agent& a) {
    expect(static_cast<std::int32_t>(a.credit.send_limit - a.credit.sent) >= 0,
           "{} messages were sent with credit for {}", a.credit.sent, a.credit.send_limit);
    expect(static_cast<std::int32_t>(a.credit.granted - a.credit.advertised) >= 0,
           "the peer was told of {} credits, {} are granted", a.credit.advertised,
           a.credit.granted);
    expect(!a.credit.by_messages.ask_due || a.credit.in_end_of_poll_list || a.stage != Stage::up ||
               a.goodbye_sent || a.credit.by_messages.ask_outstanding ||
               a.control_counts.waits_for_credit,
           "no poll will ask the peer for credit");
    expect(a.control_to_send.empty() || a.stage != Stage::up || a.credit.in_end_of_poll_list ||
               a.control_counts.waits_for_credit || a.control_counts.outstanding != 0,
           "no poll will post its control messages");
    expect(peer_credits(a) <= a.credit.reserved,
           "the peer has {} credits, {} receives are kept for it", peer_credits(a),
           a.credit.reserved);
  }

  /// Checks the count of receives that an agent's held messages have.
  void check_held(const Agent& a) {
    const std::uint32_t held = held_back(a);
    expect(a.rendezvous.credited == held, "{} receives are held back, {} counted",
           a.rendezvous.credited, held);
    expect(a.credit.reserved + held <= std::max(a.attributes.credits, 1u),
           "{} receives are kept for the peer, and {} held back, of {}", a.credit.reserved, held,
           a.attributes.credits);
  }

  /// Checks the agent's counts of leases.
  void check_leases_of(const Agent& a) {
    const LeaseTable& leases = a.leases;
    std::uint64_t granted_count = 0, granted_bytes = 0, requested = 0, held_count = 0,
                  held_bytes = 0;
    for (const LeaseGranted& each : leases.granted) {
      if (!ok()) return;
      const LeaseGranted* const l = &each;
      expect(granted_count++ < ctx_.leases->granted.size() &&
                 ctx_.leases->granted.in_use(l->index) && l->agent == &a,
             "the list of what was leased to the peer is broken");
      expect(l->target.block->refs != 0, "the peer may use memory that is free");
      granted_bytes += l->target.bytes;
      requested += l->origin == LeaseGranted::Origin::requested ? l->target.bytes : 0;
      windows_ += l->key.is_window() ? 1 : 0;
    }
    for (const LeaseHeld& each : leases.held) {
      if (!ok()) return;
      const LeaseHeld* const h = &each;
      expect(held_count++ < ctx_.leases->held.size() && ctx_.leases->held.in_use(h->index) &&
                 h->agent == &a,
             "the list of what the peer has leased to us is broken");
      held_bytes += h->region.length;
    }
    expect(granted_count == leases.granted_count && granted_bytes == leases.granted_bytes &&
               requested == leases.requested_bytes,
           "{} leases of {} bytes, {} of them requested, are the peer's; {}, {} and {} are counted",
           granted_count, granted_bytes, requested, leases.granted_count, leases.granted_bytes,
           leases.requested_bytes);
    expect(held_count == leases.held_count && held_bytes == leases.held_bytes,
           "{} leases of {} bytes are ours, {} and {} are counted", held_count, held_bytes,
           leases.held_count, leases.held_bytes);
    expect(leases.bindings_outstanding == outstanding(tally(a, OperationKind::lease_bind)) +
                                              outstanding(tally(a, OperationKind::lease_unbind)),
           "{} requests for windows are counted, others are outstanding",
           leases.bindings_outstanding);
    std::uint32_t blocked = 0;
    for (const LeaseGranted& each : ctx_.leases->bindings[a.index].waiters) {
      if (!expect(blocked++ < granted_count && is_unfinished(each) && each.agent == &a,
                  "the list of leases that wait for a request for a window is broken"))
        return;
    }
    expect(blocked == 0 || a.stage != Stage::up || leases.bindings_outstanding == kLeaseRequests,
           "{} leases wait for a request for a window, and {} are outstanding", blocked,
           leases.bindings_outstanding);
    leases_granted_ += granted_count;
    leases_held_ += held_count;
  }
  static bool is_unfinished(const LeaseGranted& lease) {
    return lease.state == LeaseGranted::State::waiting ||
           lease.state == LeaseGranted::State::closing;
  }

  /// Each lease record belongs to a connection.
  void check_leases() {
    expect(
        leases_granted_ == ctx_.leases->granted.size() && leases_held_ == ctx_.leases->held.size(),
        "{} leases to peers and {} of theirs are connections', {} and {} records are in use",
        leases_granted_, leases_held_, ctx_.leases->granted.size(), ctx_.leases->held.size());
    std::uint64_t listed = 0;
    for (const SourceAccount& s : ctx_.sources.lease_turns) {
      if (!expect(!s.lease_work.empty(), "a source has a turn, and no lease to advance")) return;
      for (const LeaseGranted& each : s.lease_work) {
        if (!expect(listed++ < leases_granted_ && is_unfinished(each) && each.agent->source == &s,
                    "the list of leases to zero, open or close is broken"))
          return;
      }
    }
  }

  /// Each operation record is in use or free.
  void check_records() {
    for (const bool users : {true, false}) {
      for (const Operation* op = ctx_.operations.first_free(users); op != nullptr;
           op = op->next()) {
        if (!expect(ctx_.operations.owns(op), "the list of free records is broken")) return;
        const std::uint32_t index = ctx_.operations.index_of(*op);
        if (!expect(index < records_.size() && !records_[index],
                    "record {} is free and in use, or free twice", index)) {
          return;
        }
        expect((index < ctx_.operations.users()) == users, "record {} is in the wrong list", index);
        records_[index] = true;
      }
    }
    const auto lost = std::find(records_.begin(), records_.end(), false);
    expect(lost == records_.end(), "record {} is lost", lost - records_.begin());
  }

  void check_lists() {
    check_list(
        ctx_.flush_queue, [](const Agent& a) { return a.in_flush_queue; }, "deferred operations");
    check_list(
        ctx_.end_of_poll_list, [](const Agent& a) { return a.credit.in_end_of_poll_list; },
        "credit to advertise");
    check_list(
        ctx_.receive_waiters, [](const Agent& a) { return a.credit.waits_for_receives; },
        "credit that waits for receives");
  }

  /// Checks that every agent whose flag is set is in the list, once.
  template <typename Flag>
  void check_list(AgentList& list, Flag is_flagged, const char* what) {
    std::uint32_t flagged = 0;
    for (const Agent& a : ctx_.agents) flagged += is_flagged(a) ? 1 : 0;
    expect(flagged == list.count(), "{} connections have {}, {} are listed", flagged, what,
           list.count());
    for (std::uint32_t i = 0; i < list.count() && ok(); ++i) {
      expect(ctx_.agents.in_use(list[i].index) && is_flagged(list[i]),
             "connection {} is listed for {}", list[i].index, what);
    }
  }

  /// Each slot has its own block or is listed as empty.
  void check_slots() {
    std::vector<const Block*> blocks;
    for (std::uint32_t i = 0; i < ctx_.receive_shortage; ++i) {
      const std::uint32_t slot = ctx_.empty_slots[i];
      if (!expect(slot < slots_.size() && !slots_[slot] && ctx_.receives.memory(slot) == nullptr,
                  "receive {} counts as missing", slot)) {
        return;
      }
      slots_[slot] = true;
    }
    for (std::uint32_t slot = 0; slot < ctx_.receives.size(); ++slot) {
      const Block* block = ctx_.receives.memory(slot);
      expect((block == nullptr) == slots_[slot], "receive {} has no block, and is not missing",
             slot);
      if (block == nullptr) continue;
      const std::uint64_t at = ctx_.receives.request(slot).sg_list->addr;
      const auto payload = reinterpret_cast<std::uint64_t>(block->payload);
      expect(block->refs != 0, "receive {} goes into a free block", slot);
      expect(at == payload - wire::kMessageHeaderBytes, "receive {} goes elsewhere", slot);
      blocks.push_back(block);
    }
    std::sort(blocks.begin(), blocks.end());
    expect(std::adjacent_find(blocks.begin(), blocks.end()) == blocks.end(),
           "two receives go into one block");
  }

  /// Checks the slots of a chain of receives to post.
  void check_chain(const verbs::ReceiveChain& chain, std::uint32_t from, std::uint32_t to) {
    const ibv_recv_wr* wr = chain.first();
    for (std::uint32_t i = 0; i < chain.count(); ++i, wr = wr->next) {
      const std::uint32_t slot = wr != nullptr ? slot_of(wr->wr_id) : to;
      if (!expect(slot >= from && slot < to && !slots_[slot], "receive {} waits twice, or wrongly",
                  slot)) {
        return;
      }
      slots_[slot] = true;
    }
  }

  /// Shared receives come first, then the receives of each connection with its own queue.
  void check_receives() {
    const std::uint32_t shared =
        ctx_.own_queues == nullptr ? ctx_.receives.size() : ctx_.own_queues->first;
    check_chain(ctx_.receives.chain(), 0, shared);
    std::uint32_t posted = unmarked(0, shared);
    for (const Agent& a : ctx_.agents) {
      if (a.raw != nullptr) posted += raw_receives_posted(a);
      if (a.own_queue == kNone) continue;
      OwnQueue& queue = ctx_.own_queues->queues.at(a.own_queue);
      expect(queue.agent == &a, "connection {} has the receives of another", a.index);
      const std::uint32_t from =
          ctx_.own_queues->first + a.own_queue * ctx_.own_queues->share.slots;
      const std::uint32_t to = from + ctx_.own_queues->share.slots;
      check_chain(queue.back, from, to);
      posted += unmarked(from, to);
    }
    expect(posted == ctx_.posted_receives, "{} receives are posted, {} counted", posted,
           ctx_.posted_receives);
  }
  /// Slots that are with the device: neither empty nor in a chain.
  [[nodiscard]] std::uint32_t unmarked(std::uint32_t from, std::uint32_t to) const {
    return static_cast<std::uint32_t>(
        std::count(slots_.begin() + from, slots_.begin() + to, false));
  }

  /// Posted or chained receives must cover the credit of all peers.
  void check_credit() {
    std::uint64_t own = 0;
    std::uint64_t shared = 0;
    std::uint64_t credits = 0;
    for (const Agent& a : ctx_.agents) {
      (a.own_queue != kNone ? own : shared) += a.credit.reserved + held_back(a);
      credits += peer_credits(a);
    }
    expect(shared == ctx_.reserved_receives, "{} receives are reserved for peers, {} counted",
           shared, ctx_.reserved_receives);
    const std::uint64_t counted =
        ctx_.own_queues != nullptr ? ctx_.own_queues->reserved_receives : 0;
    expect(own == counted, "{} receives of their own are reserved for peers, {} counted", own,
           counted);
    expect(shared <= ctx_.reservable_receives, "{} receives are reserved for peers, of {}", shared,
           ctx_.reservable_receives);
    // While the application keeps many messages, credit exceeds the receives.
    const bool plenty =
        ctx_.own_queues == nullptr && ctx_.receive_shortage <= ctx_.shortage_allowed;
    expect(!plenty || credits <= std::uint64_t{ctx_.posted_receives} + ctx_.receives.count(),
           "peers have {} credits, {} receives are posted", credits, ctx_.posted_receives);
  }

  /// What each source holds is what its connections hold.
  void check_sources() {
    std::map<const SourceAccount*, SourceAccount> found;
    for (const Agent& a : ctx_.agents) {
      SourceAccount& s = found[a.source];
      ++s.connections;
      if (a.own_queue == kNone) s.receives += a.credit.reserved + held_back(a);
      s.own_queues += a.own_queue != kNone ? 1 : 0;
      s.offers += a.rendezvous.send_count;
      s.reads += a.rendezvous.reads_outstanding;
      s.answers += a.control_counts.waiting;
      s.unheard_count += a.setup.is_unheard ? 1 : 0;
      s.giving_way += a.setup.gives_way ? 1 : 0;
      for (const LeaseGranted& each : a.leases.granted) {
        if (each.origin != LeaseGranted::Origin::requested) continue;
        ++s.leases;
        s.lease_bytes += lease_charge(*each.target.block);
      }
    }
    expect(found.size() == ctx_.sources.accounts.size(), "{} sources have connections, {} accounts",
           found.size(), ctx_.sources.accounts.size());
    std::uint32_t unheard = 0;
    for (const auto& [account, s] : found) {
      unheard += s.unheard_count;
      expect(account->connections == s.connections && account->receives == s.receives &&
                 account->own_queues == s.own_queues && account->offers == s.offers &&
                 account->reads == s.reads && account->answers == s.answers &&
                 account->leases == s.leases && account->lease_bytes == s.lease_bytes &&
                 account->unheard_count == s.unheard_count && account->giving_way == s.giving_way,
             "the account of a source with {} connections is wrong", s.connections);
    }
    expect(unheard == ctx_.sources.unheard_count, "{} peers were never heard, {} counted", unheard,
           ctx_.sources.unheard_count);
  }

  /// Reserved receives of an agent that its held messages use.
  static std::uint32_t held_back(const Agent& a) {
    std::uint32_t count = 0;
    for (const RendezvousReceive& r : a.rendezvous.receives) count += r.credited ? 1 : 0;
    return count;
  }

  EngineContext& ctx_;
  std::vector<bool> records_;          ///< found in some list
  std::vector<bool> slots_;            ///< missing, or waiting to be posted
  std::uint32_t sends_ = 0;            ///< rendezvous messages found
  std::uint32_t cancelled_sends_ = 0;  ///< found, with a callback that is due
  std::uint64_t windows_ = 0;          ///< in use
  std::uint64_t leases_granted_ = 0;   ///< found
  std::uint64_t leases_held_ = 0;      ///< found
};

}  // namespace

Result<void> audit(EngineContext& ctx) {
  return base::run_audit("audit of the engine", [&] { return AgentAuditor(ctx).run(); });
}

}  // namespace spinwire::agent
