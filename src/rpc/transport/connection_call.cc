// A client's long call, from its header to done(). done() runs when the outcome is known, the
// request is no longer pulled, the key of the reply's memory is closed, and no reply is on its way
// there. If the call was cancelled meanwhile, the server must also have confirmed the cancel.
#include "rpc/transport/connection_call.h"

#include <algorithm>
#include <utility>

#include "agent/lease_table.h"
#include "agent/submit.h"
#include "base/internals.h"
#include "rpc/backlog.h"
#include "rpc/client_session.h"
#include "rpc/refused_calls.h"

namespace spinwire::rpc {

namespace {

using wire::RpcMessageHeader;
using wire::RpcMessageKind;
using Sent = ConnectionClientSlot::Sent;
using Cancel = ConnectionClientSlot::Cancel;

/// Opens a key to the memory of the reply.
Status open_reply_key(Rpc& r, agent::Agent& a, ConnectionClientSlot& k) noexcept {
  const auto region = agent::open_key(r.context, a, k.call.reply, Access::remote_write);
  if (!region) return region.error().status;
  k.key_open = true;
  k.rkey = region->rkey;
  k.lease = agent::newest_lease_granted(a);
  return Status::ok;
}

/// A request of up to this many bytes is copied behind its header, which is cheaper than a second
/// message.
constexpr std::uint32_t kCopied = 1024;

/// Whether a reply of any length that fits into the call's memory can come as a message, which
/// costs less than to open the memory where both ends have direct messages.
bool can_place_reply(const Rpc& r, const agent::Agent& a, const ConnectionClientSlot& k) noexcept {
  const Config::Connections& c = r.context.config.connections;
  return agent::offers_locally(r.context, a) && c.max_message_bytes > c.eager_bytes &&
         (is_eager(a, k.call.reply.size()) || (agent::max_message(a) > agent::max_eager(a) &&
                                               k.call.reply.size() <= agent::max_message(a)));
}

Status send_header(Rpc& r, agent::Agent& a, ConnectionClientSlot& k) noexcept {
  k.places_reply = k.call.reply && !k.key_open && can_place_reply(r, a, k);
  if (k.call.reply && !k.key_open && !k.places_reply) {
    if (const Status status = open_reply_key(r, a, k); status != Status::ok) return status;
  }
  RpcMessageHeader header{k.number, k.call.method, RpcMessageKind::call, 0, k.call.size, 0, 0, 0};
  if (k.call.reply) header.reply_capacity = static_cast<std::uint32_t>(k.call.reply.size());
  if (k.key_open) {
    header.address = reinterpret_cast<std::uint64_t>(k.call.reply.data());
    header.rkey = k.rkey;
  }
  const Payload& payload = k.call.payload;
  const bool within = k.call.size <= kCopied && is_eager(a, k.call.size);
  const std::byte* const data = payload.block == nullptr ? payload.text : payload.in.data;
  Status status = send_message(r, a, header, {data, within ? std::size_t{k.call.size} : 0});
  if (status == Status::ok) k.sent = within || k.call.size == 0 ? Sent::all : Sent::header;
  if (status == Status::no_buffer && within && payload.block != nullptr) {
    status = send_message(r, a, header, {});
    if (status == Status::ok) k.sent = Sent::header;
  }
  return status;
}

/// The request's message has completed, or the connection ends.
void on_request_sent(Rpc& r, std::uint32_t session, std::uint32_t number, Status status) noexcept {
  ConnectionClient* const b = connection_of(r, session);
  ConnectionClientSlot* const k = b != nullptr ? find_call(*b, number) : nullptr;
  if (k == nullptr) return;
  k->request_in_flight = false;
  // After a refused pull, the reply is on its way: the server no longer needs the request.
  if (!k->call.outcome && status == Status::no_buffer) k->call.outcome = status;
  try_finish(r, *b, *k);
  advance_if_ready(r, session);
}

/// Sends the request as a message of its own.
Status send_request_body(Rpc& r, const ConnectionClient& b, agent::Agent& a,
                         ConnectionClientSlot& k) noexcept {
  Payload& payload = k.call.payload;
  if (payload.block == nullptr) {
    Block* const copy = block_to_send(r, k.call.size);
    if (copy == nullptr) return Status::no_buffer;
    std::memcpy(copy->payload, payload.text, k.call.size);
    payload.block = copy;
    payload.in.data = copy->payload;
    payload.in.is_copy = 1;
  }
  Rpc* const self = &r;
  const std::uint32_t session = b.session;
  const std::uint32_t number = k.number;
  const CompletionCallback done = [self, session, number](const Completion& c) {
    on_request_sent(*self, session, number, c.status);
  };
  const Status status = agent::submit_any<agent::OperationKind::send_imm>(
      r.context, a,
      {payload.block, const_cast<std::byte*>(payload.in.data), k.call.size, nullptr, number, done,
       true, true});
  if (status == Status::ok) {
    k.sent = Sent::all;
    k.request_in_flight = true;
  }
  return status;
}

struct Advanced {
  Step step = Step::done;      ///< the last one that was taken; `failed` ends the call
  Status status = Status::ok;  ///< the call's status if the step failed
  bool has_sent = false;
};
/// Takes the next steps of a call while there is room.
Advanced advance_call(Rpc& r, const ConnectionClient& b, agent::Agent& a,
                      ConnectionClientSlot& k) noexcept {
  Status sent = Status::ok;
  const auto before = std::pair(k.sent, k.cancel);
  if (k.cancel == Cancel::due) {
    sent = send_message(r, a, {k.number, 0, RpcMessageKind::cancel}, {});
    if (sent == Status::ok) k.cancel = Cancel::sent;
  } else if (!k.call.outcome) {
    if (k.sent == Sent::nothing) sent = send_header(r, a, k);
    if (k.sent == Sent::header && sent == Status::ok) sent = send_request_body(r, b, a, k);
  }
  return {step_of(sent), sent, std::pair(k.sent, k.cancel) != before};
}

/// Moves the longest waiting call into a slot. Null if no call waits, or there is no room.
ConnectionClientSlot* start_backlogged(Rpc& r, ConnectionClient& b) noexcept {
  const std::uint32_t slot = free_slot(b);
  std::uint32_t i = 0;
  while (i < b.backlog_count && backlog_at(b, i).outcome) ++i;
  if (i == b.backlog_count || slot >= b.window) return nullptr;
  return &occupy_slot(r, b, slot, remove_from_backlog(b, i));
}

/// Advances all calls while there is room. Asks on_failed(call, agent, status) whether to go on
/// after a call that failed.
template <typename OnFailed>
void advance_calls(Rpc& r, ConnectionClient& b, OnFailed&& on_failed) noexcept {
  agent::Agent* const a = agent_of(r, b);
  if (a == nullptr || !agent::is_ready(*a)) return;
  bool has_sent_any = false;
  const auto push = [&](ConnectionClientSlot& k) {
    const auto [step, status, has_sent] = advance_call(r, b, *a, k);
    has_sent_any = has_sent_any || has_sent;
    if (step == Step::waiting) wait_for_turn(r, b, has_sent_any);
    return step == Step::done || (step == Step::failed && on_failed(k, *a, status));
  };
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    if (is_active(b, slot) && !push(b.slots[slot])) return;
  }
  const ClientSession* const c = find_client(r, b.session);
  if (c == nullptr || takes_no_calls(*c)) return;
  // Callbacks of calls that fail at once may start further calls, so bound the loop.
  for (std::uint32_t most = b.backlog_count; most != 0; --most) {
    ConnectionClientSlot* const k = start_backlogged(r, b);
    if (k == nullptr || !push(*k)) return;
  }
  if (b.backlog_count != 0 && free_slot(b) < b.window) queue_connection(r, b);
}

}  // namespace

bool complete_call(Rpc& r, ConnectionClient& b, ConnectionClientSlot& k, Block* block,
                   std::span<const std::byte> bytes) noexcept {
  if (*k.call.outcome == Status::not_connected && wait_again(r, b, k)) return false;
  ConnectionCall call = std::exchange(k.call, {});
  const std::uint32_t slot = k.number & (b.window - 1);
  b.active &= ~bit(slot);
  k.number += b.window;
  release_payload(call.payload);
  const Status status = *call.outcome;
  const bool answered =
      status == Status::ok || status == Status::refused || status == Status::unsupported;
  r.stats.replies += answered ? 1 : 0;
  Reply reply = detail::make<Reply>(status, block, bytes.data(), bytes.size());
  detail::Internals::set_code(reply, std::exchange(k.code, {}));
  call.done(reply);
  return detail::Internals::is_kept(reply);
}

void try_finish(Rpc& r, ConnectionClient& b, ConnectionClientSlot& k) noexcept {
  if (!k.call.outcome || k.cancel != Cancel::none) return;
  agent::Agent* const a = agent_of(r, b);
  if (k.key_open) {
    if (std::exchange(k.key_closing, true)) return;
    // on_returned() follows, maybe at once; if the connection ends first, its end calls it.
    if (a != nullptr) (void)agent::close_key(r.context, *a, k.rkey);
    return;
  }
  if (k.request_in_flight || k.placing) return;
  if (const Buffer message = std::move(k.reply_message); message) {
    (void)complete_call(r, b, k, detail::block_of(message),
                        message.bytes().subspan(wire::kRpcMessageHeaderBytes));
  } else {
    const BufferSlice memory = *k.call.outcome == Status::ok ? k.call.reply : BufferSlice();
    (void)complete_call(r, b, k, detail::block_of(memory), {memory.data(), memory ? k.size : 0});
  }
}

void abandon_call(Rpc& r, ClientSession& c, ConnectionClientSlot& k, Status status) noexcept {
  ConnectionClient& b = *c.connection;
  k.call.outcome = status;
  k.size = 0;
  k.code = {};
  k.reply_message = {};
  const bool may_be_used =
      k.request_in_flight || k.placing || (k.key_open && k.sent != Sent::nothing);
  if (may_be_used && k.cancel == Cancel::none && !k.key_closing) {
    k.cancel = Cancel::due;
    queue_connection(r, b);
  }
  k.call.deadline = r.context.clock.now() + r.timeouts.close;
  schedule_check(r, c, k.call.deadline);
}

void advance(Rpc& r, ConnectionClient& b) noexcept {
  const std::uint32_t session = b.session;
  advance_calls(r, b, [&r, &b, session](ConnectionClientSlot& k, agent::Agent& a, Status status) {
    if (k.call.outcome || !agent::is_ready(a)) return false;  // the connection ends
    k.call.outcome = status;
    try_finish(r, b, k);
    return is_ready(r, session);
  });
}

void post_call(Rpc& r, ConnectionClient& b, agent::Agent& a, ConnectionClientSlot& k) noexcept {
  const Advanced advanced = advance_call(r, b, a, k);
  if (advanced.step == Step::waiting) wait_for_turn(r, b, advanced.has_sent);
  if (advanced.step == Step::failed) queue_connection(r, b);
  agent::flush(r.context, a);
}

void post_calls(Rpc& r, ConnectionClient& b) noexcept {
  advance_calls(r, b, [&r, &b](ConnectionClientSlot&, const agent::Agent&, Status) {
    queue_connection(r, b);
    return false;
  });
  if (agent::Agent* const a = agent_of(r, b); a != nullptr) agent::flush(r.context, *a);
}

}  // namespace spinwire::rpc
