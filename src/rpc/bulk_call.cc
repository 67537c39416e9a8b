// A long call of the client's, from its header to done(). It ends, with its memory its own again,
// when it is settled how, its request is not pulled from any more, the key to its reply's memory is
// dead and, if it was cancelled while the server might have used any of that, the server has
// confirmed that.
#include "rpc/bulk_call.h"

#include <algorithm>

#include "agent/leases.h"
#include "agent/submit.h"

namespace spinwire::rpc {

namespace {

using wire::BulkHeader;
using wire::BulkKind;
using Told = BulkCall::Told;
using Cancel = BulkCall::Cancel;

/// Tells the application how it ended.
void finish_call(Rpc& r, BulkClient& b, BulkCall& k) noexcept {
  const bool answered =
      k.status == Status::ok || k.status == Status::refused || k.status == Status::unsupported;
  r.stats.replies += answered ? 1 : 0;
  const Status status = k.status;
  const std::uint32_t size = k.size;
  const Buffer message = std::move(k.message);
  const BulkAsked asked = vacate_slot(b, k);
  Block* block = nullptr;
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
  if (message) {
    block = message.block();
    data = message.data() + wire::kBulkHeaderBytes;
    bytes = message.size() - wire::kBulkHeaderBytes;
  } else if (status == Status::ok && asked.reply) {
    block = asked.reply.block();
    data = asked.reply.data();
    bytes = size;
  }
  Reply reply(status, block, data, bytes);
  asked.done(reply);
}

/// A key to the memory of the reply.
Status expose_reply(Rpc& r, agent::Agent& a, BulkCall& k) noexcept {
  RemoteRegion region;
  const Status status =
      agent::open_by_hand(r.context, a, k.asked.reply, Access::remote_write, region);
  if (status != Status::ok) return status;
  k.exposed = true;
  k.rkey = region.rkey;
  k.loan = a.leases.loans->id;  // the newest
  return status;
}

/// So many bytes of a request are copied behind its header, which costs less than a message more.
constexpr std::uint32_t kCopied = 1024;

Status send_head(Rpc& r, agent::Agent& a, BulkCall& k) noexcept {
  if (k.asked.reply && !k.exposed) {
    if (const Status status = expose_reply(r, a, k); status != Status::ok) return status;
  }
  BulkHeader header{k.number, k.asked.method, BulkKind::call, 0, k.asked.size, 0, 0, 0};
  if (k.exposed) {
    header.room = static_cast<std::uint32_t>(k.asked.reply.size());
    header.address = reinterpret_cast<std::uint64_t>(k.asked.reply.data());
    header.rkey = k.rkey;
  }
  const Payload& payload = k.asked.payload;
  const bool within = k.asked.size <= kCopied && is_eager(a, k.asked.size);
  const std::byte* const data = payload.block == nullptr ? payload.text : payload.data;
  Status status = send_bulk(r, a, header, {data, within ? std::size_t{k.asked.size} : 0});
  if (status == Status::ok) k.told = within || k.asked.size == 0 ? Told::all : Told::header;
  if (status == Status::no_buffer && within && payload.block != nullptr) {
    status = send_bulk(r, a, header, {});
    if (status == Status::ok) k.told = Told::header;
  }
  return status;
}

/// Its completion; also when the connection ends, and then what becomes of the call is seen there.
void on_request_sent(Rpc& r, std::uint32_t session, std::uint32_t number, Status status) noexcept {
  BulkClient* const b = bulk_of(r, session);
  BulkCall* const k = b != nullptr ? find_call(*b, number) : nullptr;
  if (k == nullptr) return;
  k->pulled_from = false;
  // One that was refused has its answer on the way: the server does not want what it needs no more.
  if (!k->over && status == Status::no_buffer) settle(*k, status);
  try_end(r, *b, *k);
  pump_again(r, b, session);
}

/// The request as a message of its own.
Status send_body(Rpc& r, const BulkClient& b, agent::Agent& a, BulkCall& k) noexcept {
  Payload& payload = k.asked.payload;
  if (payload.block == nullptr) {
    Block* const copy = block_to_send(r, k.asked.size);
    if (copy == nullptr) return Status::no_buffer;
    std::memcpy(copy->payload, payload.text, k.asked.size);
    payload.block = copy;
    payload.data = copy->payload;
  }
  Rpc* const self = &r;
  const std::uint32_t session = b.session;
  const std::uint32_t number = k.number;
  const CompletionCallback done = [self, session, number](const Completion& c) {
    on_request_sent(*self, session, number, c.status);
  };
  const Status status = agent::submit_any<agent::OperationKind::send_imm>(
      r.context, a,
      {payload.block, const_cast<std::byte*>(payload.data), k.asked.size, nullptr, number, done,
       true});
  if (status == Status::ok) {
    k.told = Told::all;
    k.pulled_from = true;
  }
  return status;
}

/// Takes the next steps of a call, as far as there is room for them. Any status but ok and those
/// that pass ends it.
Status push_call(Rpc& r, const BulkClient& b, agent::Agent& a, BulkCall& k) noexcept {
  if (k.cancel == Cancel::due) {
    const Status status = send_bulk(r, a, {k.number, 0, BulkKind::cancel}, {});
    if (status == Status::ok) k.cancel = Cancel::told;
    return status;
  }
  if (k.over) return Status::ok;
  if (k.told == Told::nothing) {
    if (const Status status = send_head(r, a, k); status != Status::ok) return status;
  }
  return k.told == Told::header ? send_body(r, b, a, k) : Status::ok;
}

/// Moves the call that has waited longest into a slot; null if there is none, or no room.
BulkCall* begin_waiting(const Rpc& r, BulkClient& b) noexcept {
  const std::uint32_t slot = free_slot(b);
  if (b.waiting_count == 0 || slot >= b.window) return nullptr;
  return &occupy(b, slot, take_waiting(r, b, 0));
}

}  // namespace

BulkAsked vacate_slot(BulkClient& b, BulkCall& k) noexcept {
  BulkAsked asked = std::move(k.asked);
  k.asked = {};
  const std::uint32_t slot = k.number & (b.window - 1);
  b.active &= ~bit(slot);
  k.number += b.window;
  clear(asked.payload);
  return asked;
}

void try_end(Rpc& r, BulkClient& b, BulkCall& k) noexcept {
  if (!k.over || k.cancel != Cancel::no) return;
  agent::Agent* const a = agent_of(r, b);
  if (k.exposed) {
    if (std::exchange(k.closing, true)) return;
    // on_returned() follows, maybe at once; if the connection goes first, then by that.
    if (a != nullptr) (void)agent::close_by_hand(r.context, *a, k.rkey);
    return;
  }
  if (!k.pulled_from) finish_call(r, b, k);
}

void give_up_call(Rpc& r, ClientSession& c, BulkCall& k, Status status) noexcept {
  BulkClient& b = *c.bulk;
  settle(k, status);
  k.size = 0;
  k.message = {};
  const bool may_be_used = k.pulled_from || (k.exposed && k.told != Told::nothing);
  if (may_be_used && k.cancel == Cancel::no && !k.closing) {
    k.cancel = Cancel::due;
    make_due(r, b);
  }
  k.asked.deadline = r.context.clock.now() + r.close_timeout;
  look_by(r, c, k.asked.deadline);
  try_end(r, b, k);
}

bool pump_bulk(Rpc& r, BulkClient& b) noexcept {
  const std::uint32_t session = b.session;
  agent::Agent* const a = agent_of(r, b);
  if (a == nullptr || a->state != ConnectionState::ready) return true;
  const auto push = [&](BulkCall& k) {
    const Status status = push_call(r, b, *a, k);
    if (is_passing(status)) {
      make_due(r, b);
      return false;
    }
    if (status == Status::ok) return true;
    if (k.over || a->state != ConnectionState::ready) return false;  // the connection ends
    settle(k, status);
    try_end(r, b, k);
    return goes_on(r, &b, session);
  };
  for (std::uint32_t slot = 0; slot < b.window; ++slot) {
    if (is_active(b, slot) && !push(b.calls[slot])) return false;
  }
  // Those that fail at once may be begun again by their callbacks.
  for (std::uint32_t most = b.waiting_count; most != 0; --most) {
    BulkCall* const k = begin_waiting(r, b);
    if (k == nullptr) return true;
    if (!push(*k)) return false;
  }
  if (b.waiting_count != 0 && free_slot(b) < b.window) make_due(r, b);
  return true;
}

void post_call(Rpc& r, BulkClient& b, agent::Agent& a, BulkCall& k) noexcept {
  if (push_call(r, b, a, k) != Status::ok) make_due(r, b);
  (void)agent::flush(r.context, a);
}

void post_bulk(Rpc& r, BulkClient& b) noexcept {
  agent::Agent* const a = agent_of(r, b);
  if (a == nullptr || a->state != ConnectionState::ready) return;
  Status status = Status::ok;
  for (std::uint32_t slot = 0; slot < b.window && status == Status::ok; ++slot) {
    if (is_active(b, slot)) status = push_call(r, b, *a, b.calls[slot]);
  }
  while (status == Status::ok) {
    BulkCall* const k = begin_waiting(r, b);
    if (k == nullptr) break;
    status = push_call(r, b, *a, *k);
  }
  if (status != Status::ok) make_due(r, b);
  (void)agent::flush(r.context, *a);
}

}  // namespace spinwire::rpc
