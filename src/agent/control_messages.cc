#include "agent/control_messages.h"

#include <string>
#include <utility>

#include "agent/agent.h"
#include "agent/submit.h"
#include "base/error.h"
#include "memory/window_requests.h"

namespace spinwire::agent {
namespace {

bool can_post(const Agent& a) noexcept {
  return a.stage == Stage::up &&
         (a.state == ConnectionState::ready || a.state == ConnectionState::draining);
}

/// The application's operations wait while control messages lack credit.
void block_application(const EngineContext& ctx, Agent& a, bool blocked) noexcept {
  if (a.state != ConnectionState::ready) return;
  send_limit_of(a) = blocked ? 0 : max_send_limit(a);
  a.send_queue.direct_limit = blocked ? std::uint16_t{0} : max_direct_limit(ctx, a);
}

/// Fills in an operation. False: it is not needed, the message has been sent without one.
bool build_message(EngineContext& ctx, Agent& a, Operation& op, const ControlMessage& message,
                   bool wants_credit) noexcept {
  if (message.unbind != nullptr) {
    begin_internal(a, op, OperationKind::rendezvous_unbind, message.unbind->id);
    memory::unbind_window(message.unbind->key, op.wr);
    return true;
  }
  const bool invalidates = message.invalidate != 0 && ctx.clock.now() < message.invalidate_until;
  a.credit.advertised = a.credit.granted;
  const wire::MessageHeader header{message.kind,
                                   wants_credit ? wire::message_flag::kWantCredit : std::uint8_t{0},
                                   static_cast<std::uint16_t>(a.credit.granted), message.size};
  const std::span<const std::byte> body{message.body.data(), message.size};
  if (!invalidates && !message.fence && send_control_direct(ctx, a, header, body)) return false;
  begin_internal(a, op, OperationKind::control_message);
  op.wr.opcode = invalidates ? IBV_WR_SEND_WITH_INV : IBV_WR_SEND;
  if (invalidates) op.wr.invalidate_rkey = message.invalidate;
  build_control(ctx, a, op, header, body);
  if (message.fence) op.wr.send_flags |= IBV_SEND_FENCE;
  return true;
}

enum class Posted : std::uint8_t { yes, directly, no };

/// Posts a message; an unbinding costs no credit. no: credit or a record is missing.
Posted post_message(EngineContext& ctx, Agent& a, const ControlMessage& message) noexcept {
  const bool costs_credit = message.unbind == nullptr;
  if (costs_credit && a.credit.sent == a.credit.send_limit && !count_grants(ctx, a))
    return Posted::no;
  Operation* const op = ctx.operations.acquire_for_agent();
  if (op == nullptr) return Posted::no;
  op->kind = OperationKind::control_message;  // to which list it goes back
  bool wants_credit = false;
  if (costs_credit) {
    if (++a.credit.sent == a.credit.send_limit) wants_credit = !count_header_grants(a);
    a.activity.last_sent = ctx.now;
  }
  if (!build_message(ctx, a, *op, message, wants_credit)) {
    ctx.operations.release(*op);
    queue_flush(ctx, a);  // publishes the message
    return Posted::directly;
  }
  append(a, *op);
  queue_flush(ctx, a);
  ++a.control_counts.outstanding;
  return Posted::yes;
}

/// The connection with the most waiting messages, of the source with the most.
Agent& find_longest_queue(EngineContext& ctx, Agent& first) noexcept {
  const auto key = [](const Agent& a) {
    return std::pair(a.source->answers, a.control_counts.waiting);
  };
  Agent* found = &first;
  for (Agent& a : ctx.agents) {
    if (key(a) > key(*found)) found = &a;
  }
  return *found;
}

/// Ends the connection whose peer does not let its messages go.
void fail_stuck(EngineContext& ctx, Agent& a) noexcept {
  fail_protocol(ctx, a,
                {Status::protocol, "answer the peer",
                 base::format("{} answers wait for credit, and the peer grants none",
                              a.control_counts.waiting),
                 base::kProtocolRemedy});
}

/// A record for the agent's message. If all are in use, a connection ends: find_longest_queue().
/// kNone: that is the agent's.
std::uint32_t acquire_record(EngineContext& ctx, Agent& a) noexcept {
  const std::uint32_t index = ctx.control_messages.acquire();
  if (index != kNone) return index;
  Agent& longest = find_longest_queue(ctx, a);
  if (&longest == &a) return kNone;
  fail_stuck(ctx, longest);
  drop_control_messages(ctx, longest);
  return ctx.control_messages.acquire();
}

}  // namespace

bool can_queue_control(const Agent& a) noexcept {
  return a.control_counts.waiting < kControlMessagesPerAgent / 2;
}

void queue_control_message(EngineContext& ctx, Agent& a, const ControlMessage& what) noexcept {
  // A correct peer has no more requests outstanding than it left us credit to answer.
  ControlCounts& queue = a.control_counts;
  const std::uint32_t limit = kControlMessagesPerAgent + 4 * a.attributes.credits +
                              a.rendezvous.send_count +
                              2 * (a.leases.granted_count + a.leases.held_count);
  const std::uint32_t index = queue.waiting < limit ? acquire_record(ctx, a) : kNone;
  if (index == kNone) return fail_stuck(ctx, a);
  ++queue.waiting;
  ++a.source->answers;
  ControlMessage& message = ctx.control_messages.at(index);
  message = what;
  message.index = index;
  a.control_to_send.push_back(message);
  visit_at_end_of_poll(ctx, a);
}

bool post_control_messages(EngineContext& ctx, Agent& a) noexcept {
  ControlCounts& queue = a.control_counts;
  std::uint32_t direct = 0;
  while (!a.control_to_send.empty() && can_post(a)) {
    // The completion of an outstanding message posts further ones; after direct ones, which have
    // none, the next poll does. What credit is left meanwhile is the application's: a peer that
    // keeps answers waiting must not hold it up.
    if (queue.outstanding + direct >= kControlMessagesAtOnce) {
      if (queue.outstanding == 0) wait_for_credit(ctx, a);
      break;
    }
    const Posted posted = post_message(ctx, a, *a.control_to_send.front());
    if (posted == Posted::no) {
      block_application(ctx, a, true);
      return false;
    }
    direct += posted == Posted::directly ? 1 : 0;
    ctx.control_messages.release(a.control_to_send.pop_front().index);
    --queue.waiting;
    --a.source->answers;
    a.liveness.stalls.answers.on_progress();
  }
  block_application(ctx, a, false);
  return true;
}

void flush_control_messages(EngineContext& ctx, Agent& a) noexcept {
  (void)post_control_messages(ctx, a);
  flush(ctx, a);
}

void on_control_message_done(EngineContext& ctx, Agent& a) noexcept {
  --a.control_counts.outstanding;
  if (!a.control_to_send.empty()) visit_at_end_of_poll(ctx, a);
}

void drop_control_messages(EngineContext& ctx, Agent& a) noexcept {
  ControlCounts& queue = a.control_counts;
  while (!a.control_to_send.empty())
    ctx.control_messages.release(a.control_to_send.pop_front().index);
  a.source->answers -= std::exchange(queue.waiting, 0u);
}

}  // namespace spinwire::agent
