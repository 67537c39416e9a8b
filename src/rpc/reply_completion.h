// Completions of replies: when the library no longer uses the memory of a reply. Cold: only a reply
// with a callback comes here.
#pragma once

#include "rpc/rpc_state.h"

namespace spinwire::rpc {

/// A reply with a callback. `view` stands for the application's block wherever the reply is: in its
/// slot, in a send queue, in an operation. So its references are those of this reply alone, and the
/// last one that is dropped completes the reply.
struct ReplyCompletion {
  Block view;               ///< the first member; its `recycle` is on_last_reference()
  Block* memory = nullptr;  ///< the application's; null: dropped, or the reply has none
  Block* record = nullptr;  ///< the block that holds this record
  Rpc* rpc = nullptr;
  ServerSession* session = nullptr;             ///< null: it has ended, or the reply is complete
  base::IntrusiveLinks<ReplyCompletion> links;  ///< in ServerSession::completions
  ReplyCompletion* next_due = nullptr;          ///< in Rpc::due_completions
  ReplyCompletionCallback done;
  Status status = Status::ok;
};

/// Makes the record for a reply from this block; null if the send pool is empty. Holds a reference
/// to the block, and the first one to the view.
ReplyCompletion* make_reply_completion(Rpc& r, ServerSession& s, Block* memory,
                                       const ReplyCompletionCallback& done) noexcept;
/// Drops the record of a reply that was not accepted, without a callback.
void drop_reply_completion(ReplyCompletion& c) noexcept;
/// Drops the first reference to the view: the reply was accepted.
inline void release_reply_completion(ReplyCompletion& c) noexcept { detail::release(&c.view); }
/// Runs the callbacks of the replies that are complete, in that order.
void run_reply_completions(Rpc& r) noexcept;
/// The session ends: replies that are not complete end with this status. Their callbacks still wait
/// until the memory is no longer used.
void end_reply_completions(ServerSession& s, Status why) noexcept;

}  // namespace spinwire::rpc
