// Control messages of an agent's own: they cost credit like the application's messages, and go
// before those while they wait for it.
#include <string>

#include "agent/agent.h"
#include "agent/submit.h"
#include "agent/transfers.h"

namespace spinwire::agent {
namespace {

bool may_post(const Agent& a) noexcept {
  return a.stage == Stage::up &&
         (a.state == ConnectionState::ready || a.state == ConnectionState::draining);
}

/// The application's operations wait while notes lack credit.
void hold_back(Agent& a, bool wait) noexcept {
  if (a.state == ConnectionState::ready) room_in_force(a) = wait ? 0 : room_of(a);
}

void build_note(EngineContext& ctx, Agent& a, Operation& op, const Note& note,
                bool wants_credit) noexcept {
  op.block = nullptr;
  op.length = 0;
  op.beside = false;
  op.calls_back = false;
  if (note.unbind != nullptr) {
    op.kind = OperationKind::unbind;
    op.length = note.unbind->id;
    op.wr.opcode = IBV_WR_LOCAL_INV;
    op.wr.num_sge = 0;
    op.wr.send_flags = 0;
    op.wr.invalidate_rkey = note.unbind->rkey;
    return;
  }
  op.kind = OperationKind::note;
  const bool invalidates = note.invalidate != 0 && ctx.clock.now() < note.invalidate_until;
  op.wr.opcode = invalidates ? IBV_WR_SEND_WITH_INV : IBV_WR_SEND;
  op.wr.num_sge = 1;
  if (invalidates) op.wr.invalidate_rkey = note.invalidate;
  a.credit.advertised = a.credit.granted;
  build_control(ctx, a, op,
                {note.kind, wants_credit ? wire::message_flag::kWantCredit : std::uint8_t{0},
                 static_cast<std::uint16_t>(a.credit.granted), note.size},
                {note.body.data(), note.size});
  if (note.fence) op.wr.send_flags |= IBV_SEND_FENCE;
}

/// False: it lacks credit or a record.
bool post_note(EngineContext& ctx, Agent& a, const Note& note) noexcept {
  const bool message = note.unbind == nullptr;
  if (message && a.credit.sent == a.credit.send_limit && !find_credit(ctx, a)) return false;
  Operation* const op = ctx.operations.acquire_for_agent();
  if (op == nullptr) return false;
  bool wants_credit = false;
  if (message) {
    if (++a.credit.sent == a.credit.send_limit) wants_credit = !learn_credit(a);
    a.liveness.last_sent = ctx.now;
  }
  build_note(ctx, a, *op, note, wants_credit);
  count_begin(a, op->kind);
  append(a, *op);
  defer(ctx, a);
  ++a.rendezvous.notes_out;
  return true;
}

}  // namespace

void tell(EngineContext& ctx, Agent& a, const Note& what) noexcept {
  // A peer that goes on to offer without letting us answer is none of ours.
  const std::uint32_t most = kNotesOfItsOwn + 4 * ctx.config.connections.credits +
                             a.rendezvous.offers + 2 * (a.leases.lent + a.leases.held);
  const std::uint32_t index =
      a.rendezvous.notes_waiting < most ? ctx.transfers->notes.acquire() : kNone;
  if (index == kNone) {
    return fail_bad(ctx, a,
                    {Status::protocol, "answer the peer",
                     std::to_string(a.rendezvous.notes_waiting) + " answers wait for its credit",
                     "the peer takes no answers: it is broken or hostile"});
  }
  ++a.rendezvous.notes_waiting;
  Note& note = ctx.transfers->notes.at(index);
  note = what;
  note.index = index;
  a.rendezvous.notes.push(note);
  list_grant(ctx, a);
}

bool post_notes(EngineContext& ctx, Agent& a) noexcept {
  Line<Note>& notes = a.rendezvous.notes;
  while (!notes.empty() && may_post(a)) {
    if (a.rendezvous.notes_out >= kNotesAtOnce) return true;  // goes on when one of them has ended
    if (!post_note(ctx, a, *notes.first)) {
      hold_back(a, true);
      return false;
    }
    ctx.transfers->notes.release(notes.pop().index);
    --a.rendezvous.notes_waiting;
  }
  hold_back(a, false);
  return true;
}

void flush_notes(EngineContext& ctx, Agent& a) noexcept {
  (void)post_notes(ctx, a);
  (void)flush(ctx, a);
}

void on_note_done(EngineContext& ctx, Agent& a) noexcept {
  --a.rendezvous.notes_out;
  if (!a.rendezvous.notes.empty()) list_grant(ctx, a);
}

}  // namespace spinwire::agent
