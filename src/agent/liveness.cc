// Detects the death of a peer. A connection ends with Status::peer_lost when
//
//   the device          fails an operation after its last retry, or the peer's device refuses our
//                       word in the peer's credit cell: completion_errors.cc. Or it reports the
//                       peer's end before a direct message was taken: end_lost_connections()
//   the liveness timer  has not heard the peer's process for connections.peer_timeout, or finds
//                       that the peer holds up what others share: count_stalls()
//   a lease             has no answer from the peer in time: lease_expiry.cc
//   rdma_cm             says that the peer disconnected: on_cm_disconnected()
//
// A device answers for a process that hangs. What counts as heard is therefore what the peer's
// polls bring about: messages, and words in our credit cell (wire/credit_word.h). Each end writes
// such a word, or sends a message in its place (credit_by_messages.cc), at least four times within
// the silence that the other accepts. A raw connection has no cell: there the device's answers to
// outstanding operations count.
//
// Cold.

#include <algorithm>
#include <utility>

#include "agent/agent.h"
#include "agent/peer_silence.h"
#include "agent/recording.h"
#include "agent/unheard_peers.h"
#include "base/error.h"
#include "base/ticks.h"
#include "wire/credit_word.h"

namespace spinwire::agent {
namespace {

Nanoseconds check_interval(const EngineContext& ctx, const Agent& a) noexcept {
  const Config::Connections& c = ctx.config.connections;
  const Nanoseconds least = std::min({c.keepalive_interval, c.peer_timeout, c.credit_idle_timeout});
  const Nanoseconds keepalive = ctx.clock.duration(a.liveness.keepalive_interval);
  return a.raw != nullptr ? least / 2 : std::min(least / 2, std::max(keepalive, Nanoseconds(1)));
}

/// Notes a new word in our credit cell. Returns whether the peer's process was heard since the last
/// check.
bool note_if_heard(EngineContext& ctx, Agent& a, std::uint64_t now) noexcept {
  const std::uint64_t check = a.liveness.last_check;
  if (a.raw != nullptr)
    return idle(a) || std::max(a.activity.last_heard, a.liveness.last_completion) >= check;
  if (a.credit.cell != nullptr) {
    const std::uint64_t word = a.credit.cell->load(std::memory_order_relaxed);
    if (!wire::is_genuine(word, a.credit.token)) {
      distrust_cell(ctx, a);
    } else if (std::exchange(a.liveness.cell_word, word) != word) {
      a.activity.last_heard = now;
    }
  }
  return a.activity.last_heard >= check;
}

/// The time since the last check. Time in which this engine did not poll does not count, so one
/// check adds at most two intervals.
std::uint64_t elapsed_since_check(const EngineContext& ctx, const Agent& a,
                                  std::uint64_t now) noexcept {
  return std::min(base::ticks_since(a.liveness.last_check, now),
                  2 * ctx.clock.ticks(check_interval(ctx, a)));
}

/// Counts the time without a sign of the peer. Returns whether it has reached peer_timeout.
bool count_silence(EngineContext& ctx, Agent& a, std::uint64_t now,
                   std::uint64_t elapsed) noexcept {
  a.liveness.silent_ticks = note_if_heard(ctx, a, now) ? 0 : a.liveness.silent_ticks + elapsed;
  return a.liveness.silent_ticks > ctx.clock.ticks(ctx.config.connections.peer_timeout);
}

/// The time that a peer has for `bytes`, besides connections.peer_timeout: 1 MB a second.
std::uint64_t transfer_ticks(const EngineContext& ctx, std::uint64_t bytes) noexcept {
  return ctx.clock.ticks(std::chrono::microseconds(bytes));
}

/// Bytes of the operations that the next completion may cover.
std::uint64_t bytes_with_device(const Agent& a) noexcept {
  std::uint64_t bytes = 0;
  for (const Operation* op = a.send_queue.posted; op != nullptr; op = op->next()) {
    bytes += op->length;
    if ((op->wr.send_flags & IBV_SEND_SIGNALED) != 0) break;
  }
  return bytes;
}

/// Whether half of the records of offers, or of the windows, are in use: others may soon lack some.
bool are_offers_short(const EngineContext& ctx, const Agent& a) noexcept {
  const auto& sends = ctx.rendezvous->sends;
  return 2 * sends.size() >= sends.capacity() ||
         (!offers_locally(ctx, a) && 2 * ctx.windows.free() < ctx.windows.size());
}

/// Bytes of the long messages that the peer has not fetched yet.
std::uint64_t bytes_offered(const Agent& a) noexcept {
  std::uint64_t bytes = 0;
  for (const RendezvousSend& each : a.rendezvous.sends) bytes += each.length;
  return bytes;
}

/// Counts the time in which the peer grants no credit for replies to its calls. Returns whether it
/// is too long. A client cannot give credit back before it has the whole of a long reply: a WRITE
/// is limited as an operation, and a long message has time to be fetched.
bool count_stall_for_replies(EngineContext& ctx, Agent& a, std::uint64_t elapsed) noexcept {
  Stall& s = a.liveness.stalls.replies;
  // Not the time of the last message: that is when its poll began, which may be before the check.
  if (std::exchange(a.liveness.sent, a.credit.sent) != a.credit.sent) s.on_progress();
  s.check(
      a.liveness.owes_replies && visible_credits(a) == 0 && bytes_with_device(a) <= max_eager(a),
      elapsed);
  const std::uint64_t timeout = ctx.clock.ticks(ctx.config.connections.peer_timeout);
  if (s.ticks <= timeout || a.rendezvous.sends.empty()) return s.ticks > timeout;
  return s.ticks > timeout + ctx.clock.ticks(ctx.config.connections.rendezvous_timeout) +
                       transfer_ticks(ctx, bytes_offered(a));
}

/// Counts the time in which a peer that polls holds something up. Returns what it holds up for too
/// long; null: nothing. It may be slow: what neither others
/// nor handlers of calls need may take as long as it likes. While it fetches a long message, it
/// grants no credit.
const char* count_stalls(EngineContext& ctx, Agent& a, std::uint64_t elapsed) noexcept {
  Stalls& s = a.liveness.stalls;
  const std::uint64_t timeout = ctx.clock.ticks(ctx.config.connections.peer_timeout);
  s.answers.check(!a.control_to_send.empty() && a.rendezvous.sends.empty(), elapsed);
  if (s.answers.ticks > timeout) return "has granted no credit for the answers that it waits for";
  if (count_stall_for_replies(ctx, a, elapsed))
    return "has granted no credit for the replies to its calls";
  // A client fetches replies by its polls alone, and those that wait hold the handlers' memory. Its
  // answers need credit, which we may lack the receives for.
  const bool owes = a.liveness.serves_calls && !a.credit.waits_for_receives;
  const bool is_due = owes || are_offers_short(ctx, a);
  s.offers.check(!a.rendezvous.sends.empty() && is_due, elapsed);
  const std::uint64_t for_block = ctx.clock.ticks(ctx.config.connections.rendezvous_timeout);
  if (s.offers.ticks > timeout + for_block &&
      s.offers.ticks > timeout + for_block + transfer_ticks(ctx, a.rendezvous.sends.back()->length))
    return "has answered no offer of a rendezvous message";
  if (a.liveness.last_completion >= a.liveness.last_check) s.operations.on_progress();
  s.operations.check(a.send_queue.posted != nullptr, elapsed);
  if (s.operations.ticks > timeout &&
      s.operations.ticks > timeout + transfer_ticks(ctx, bytes_with_device(a)))
    return "lets no operation complete";
  return nullptr;
}

/// Ends the connection if its peer polls, but holds up what it shares with others. Returns whether
/// it has ended.
bool end_if_stalled(EngineContext& ctx, Agent& a, std::uint64_t elapsed) noexcept {
  const char* const stall = count_stalls(ctx, a, elapsed);
  if (stall == nullptr) return false;
  const auto ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(ctx.config.connections.peer_timeout);
  peer_lost(ctx, a, base::format("stay connected to {}", a.peer.name.data()),
            base::format("the peer polls, but {}, for more than {} ms", stall, ms.count()),
            "the peer's application keeps all its messages, its connections.rendezvous_timeout is "
            "longer than here, or the peer is hostile");
  return true;
}

void report_silent_peer(EngineContext& ctx, Agent& a) noexcept {
  const auto ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(ctx.config.connections.peer_timeout);
  // The device of a hanging peer answers. The embedded device reports a dead process by itself.
  const bool hangs = ctx.device->place().gid_type == GidType::embedded ||
                     (a.raw == nullptr && !a.credit.write_pending);
  if (hangs) a.setup.probe = LossProbe::over;  // the peer's control port has no further information
  const char* const found = hangs ? "its device answers, but its process has not polled"
                                  : "neither its process nor its device has answered";
  peer_lost(ctx, a, base::format("stay connected to {}", a.peer.name.data()),
            base::format("{} for {} ms", found, ms.count()),
            hangs ? "the peer's process hangs, was stopped, or polls too rarely"
                  : "the peer's host or the network between is down");
}

/// Returns credit that has been unused for long.
void return_unused_credit(EngineContext& ctx, Agent& a) noexcept {
  const std::uint64_t now = ctx.clock.now();
  const std::uint64_t timeout = ctx.clock.ticks(ctx.config.connections.credit_idle_timeout);
  if (base::ticks_since(a.activity.last_sent, now) <= timeout) return;
  (void)count_header_grants(a);
  if (!read_credit_cell(ctx, a) || send_credits(a) < 2) return;
  // The return uses one credit, and one is left.
  (void)submit_internal(ctx, a, OperationKind::credit_return,
                        static_cast<std::uint16_t>(send_credits(a) - 2));
}

}  // namespace

Nanoseconds silent_for(const EngineContext& ctx, const Agent& a) noexcept {
  return ctx.clock.duration(a.liveness.silent_ticks);
}

std::uint32_t peer_timeout_ms(const EngineContext& ctx) noexcept {
  const auto ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(ctx.config.connections.peer_timeout);
  return static_cast<std::uint32_t>(ms.count());
}

void set_keepalive_interval(const EngineContext& ctx, Agent& a,
                            std::uint32_t peer_timeout) noexcept {
  const Nanoseconds quarter = std::chrono::milliseconds(peer_timeout) / 4;
  a.liveness.keepalive_interval =
      ctx.clock.ticks(std::min(ctx.config.connections.keepalive_interval, quarter));
}

void start_liveness_checks(EngineContext& ctx, Agent& a) noexcept {
  const std::uint64_t interval = ctx.clock.ticks(check_interval(ctx, a));
  ctx.timers.reschedule(a.liveness.timer,
                        base::align_down(ctx.clock.now() + interval, interval / 2));
}

void check_liveness(EngineContext& ctx, Agent& a) noexcept {
  if (a.state != ConnectionState::ready) return;
  start_liveness_checks(ctx, a);
  const std::uint64_t now = ctx.clock.now();
  const std::uint64_t elapsed = elapsed_since_check(ctx, a, now);
  const bool is_silent = count_silence(ctx, a, now, elapsed);
  const bool ended = !is_silent && a.raw == nullptr && end_if_stalled(ctx, a, elapsed);
  a.liveness.last_check = now;
  if (is_silent) return report_silent_peer(ctx, a);
  if (was_heard(a)) stop_awaiting_peer(ctx, a);
  if (a.raw != nullptr || ended) return;
  // The next check would be too late. Checks lie on a grid, so two of them are apart by a little
  // less than their interval about as often as by a little more.
  if (a.liveness.timer.deadline - std::min(a.peer_cell.last_write, a.liveness.timer.deadline) >
      a.liveness.keepalive_interval)
    (void)write_credit(ctx, a);
  if (idle(a)) return_unused_credit(ctx, a);
}

void end_lost_connections(EngineContext& ctx) noexcept {
  if (ctx.direct == nullptr) return;
  while (const std::uint32_t qp_num = ctx.direct->take_lost(ctx.device->context())) {
    Agent* const a = find_by_qpn(ctx, qp_num);
    if (a == nullptr) continue;
    peer_lost(ctx, *a, base::format("send a message to {}", a->peer.name.data()),
              base::format("its end of the connection ended before it took the message"),
              "the peer's process is gone, has closed its device, or its queue pair has failed");
  }
}

void peer_lost(EngineContext& ctx, Agent& a, std::string asked, std::string found,
               const char* remedy) noexcept {
  fail(ctx, a, {Status::peer_lost, std::move(asked), std::move(found), remedy});
}

}  // namespace spinwire::agent
