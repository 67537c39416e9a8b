#include "rpc/reply_completion.h"

#include <cstddef>
#include <new>
#include <type_traits>
#include <utility>

namespace spinwire::rpc {
namespace {

static_assert(std::is_standard_layout_v<ReplyCompletion> && offsetof(ReplyCompletion, view) == 0,
              "the view's address is the record's");
static_assert(sizeof(ReplyCompletion) <= memory::kSmallestBlock);

void remove_from_session(ReplyCompletion& c) noexcept {
  if (ServerSession* const s = std::exchange(c.session, nullptr); s != nullptr)
    s->completions.erase(c);
}

/// Block::recycle of a view.
void on_last_reference(Block* view) noexcept {
  auto& c = *reinterpret_cast<ReplyCompletion*>(view);
  remove_from_session(c);
  if (c.memory != nullptr) detail::release(std::exchange(c.memory, nullptr));
  Rpc& r = *c.rpc;
  r.due_completions.push_back(c);
  r.may_have_deferred_work = true;
  r.dialogues.wake_soon();
}

}  // namespace

base::IntrusiveLinks<ReplyCompletion>& links_in_session(ReplyCompletion& completion) noexcept {
  return completion.links;
}
ReplyCompletion*& next_due(ReplyCompletion& completion) noexcept { return completion.next_due; }

ReplyCompletion* make_reply_completion(Rpc& r, ServerSession& s, Block* memory,
                                       const ReplyCompletionCallback& done) noexcept {
  Block* const record = allocate_to_send(r, sizeof(ReplyCompletion));
  if (record == nullptr) return nullptr;
  auto& c = *::new (record->payload) ReplyCompletion();
  if (memory != nullptr) {
    c.view = *memory;
    detail::retain(memory);
  }
  c.view.refs = 1;
  c.view.recycle = &on_last_reference;
  c.view.owner = r.context.arena.get();  // so that operations take it for memory of this engine
  c.view.header_in_use = 0;
  c.memory = memory;
  c.record = record;
  c.rpc = &r;
  c.session = &s;
  c.done = done;
  s.completions.push_back(c);
  return &c;
}

void drop_reply_completion(ReplyCompletion& c) noexcept {
  remove_from_session(c);
  if (c.memory != nullptr) detail::release(c.memory);
  detail::release(c.record);
}

void run_reply_completions(Rpc& r) noexcept {
  r.due_completions.run_round([&r](ReplyCompletion& c) {
    const ReplyCompletionCallback done = c.done;
    const Status status = c.status;
    detail::release(c.record);  // the callback may need the block
    if (!r.has_aborted) done(status);
  });
}

void end_reply_completions(ServerSession& s, Status why) noexcept {
  for (ReplyCompletion* c = s.completions.front(); c != nullptr; c = s.completions.front()) {
    c->status = why;
    remove_from_session(*c);
  }
}

}  // namespace spinwire::rpc
