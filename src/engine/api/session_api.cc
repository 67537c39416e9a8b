// The public face of remote calls: methods, sessions, and calls that are answered later.
#include <algorithm>

#include "base/error.h"
#include "base/internals.h"
#include "engine/api/operate.h"
#include "engine/engine_core.h"
#include "rpc/backlog.h"
#include "rpc/call_cancel.h"
#include "rpc/client_session.h"
#include "rpc/reply_buffer.h"
#include "rpc/server_call.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire {

using detail::EngineCore;

Result<void> Engine::serve(Method method, const MethodHandler& handler) {
  return engine::set_up(*slot_, "serve a method", [&] { return core_->serve(method, handler); });
}

Result<Session> Engine::open_session(std::string_view address, const SessionOptions& options) {
  return engine::set_up(*slot_, "open a session",
                        [&] { return core_->open_session(address, options); });
}

RpcStats Engine::rpc_stats() const noexcept {
  return core_ != nullptr && core_->calls != nullptr ? rpc::stats(*core_->calls) : RpcStats{};
}

namespace {

[[gnu::always_inline]] inline rpc::ClientSession* locate(EngineCore& core,
                                                         std::uint64_t id) noexcept {
  if (core.calls == nullptr) [[unlikely]]
    return nullptr;
  const auto name = static_cast<std::uint32_t>(id);
  rpc::ClientSession* const c = core.calls->clients.find(wire::RpcName::index(name));
  return c != nullptr && rpc::id_of(*c) == id ? c : nullptr;
}
rpc::ClientSession* locate(const detail::EngineSlot* slot, std::uint64_t id) noexcept {
  EngineCore* const core = engine::core_of(slot);
  return core != nullptr ? locate(*core, id) : nullptr;
}

Status diagnose(const detail::EngineSlot* slot, Status missing) noexcept {
  const Status found = engine::diagnose(slot);
  return found == Status::not_connected && engine::core_of(slot) != nullptr ? missing : found;
}

/// Posts what a call has sent: at once, or with the end of the poll.
[[gnu::always_inline]] inline void post(EngineCore& core, Post when, bool polling) noexcept {
  if (polling && when != Post::now) [[likely]]
    return;  // posted at the end of the poll
  when == Post::defer ? core.wake_soon() : core.calls->port->flush();
}
/// Posts what a call outside of the hot path has sent, by either transport.
void post(EngineCore& core, Post when) noexcept {
  if (core.calls->port != nullptr) post(core, when, core.guard.polling());
}

/// Begins a call over the session's connection. `options` may be null, for the defaults.
[[gnu::cold, gnu::noinline]] Status begin_long_call(EngineCore& core, rpc::ClientSession& c,
                                                    rpc::CallRequest asked,
                                                    const CallOptions* options,
                                                    const ReplyCallback& done) noexcept {
  const bool names_memory = options != nullptr && options->reply_into;
  const Post when = options != nullptr ? options->post : Post::automatic;
  const Status status = rpc::call_over_connection(*core.calls, c, asked,
                                                  names_memory ? &options->reply_into : nullptr,
                                                  done, !engine::deferred(core, when));
  if (status != Status::ok) return status;
  if (!core.calls->connection_queue.empty()) core.wake_soon();
  return status;
}

/// Begins a call that cannot go out at once as a datagram: over the session's connection if that is
/// its transport; otherwise it waits for the window or the engine.
[[gnu::always_inline]] inline Status begin_blocked_call(EngineCore& core, rpc::ClientSession& c,
                                                        const rpc::CallRequest& call,
                                                        const CallOptions* options,
                                                        const ReplyCallback& done,
                                                        bool polling) noexcept {
  if (c.transport == rpc::Transport::connection) [[unlikely]]
    return begin_long_call(core, c, call, options, done);
  const Status status = rpc::enqueue_call(*core.calls, c, call, done);
  if (status == Status::ok)
    post(core, options != nullptr ? options->post : Post::automatic, polling);
  return status;
}

/// Begins a call. `options` may be null, for the defaults.
[[gnu::always_inline]] inline Status begin_call(const detail::EngineSlot* slot, std::uint64_t id,
                                                Method method, const std::byte* data,
                                                std::size_t size, detail::Block* block,
                                                const ReplyCallback& done,
                                                const CallOptions* options) noexcept {
  if (slot == nullptr) [[unlikely]]
    return Status::not_connected;
  const std::uintptr_t standing = base::OwnerGuard::standing(*slot);
  if (standing > base::OwnerGuard::kPolling) [[unlikely]]
    return base::OwnerGuard::diagnose(*slot);
  EngineCore* const core = slot->core;
  const bool polling = standing == base::OwnerGuard::kPolling;
  rpc::ClientSession* const c = locate(*core, id);
  if (c == nullptr) [[unlikely]]
    return Status::not_connected;
  if (!done || (options != nullptr && options->timeout.count() < 0)) [[unlikely]]
    return Status::invalid_argument;
  agent::EngineContext& ctx = core->context;
  if (block != nullptr && !ctx.owns(*block)) [[unlikely]]
    return Status::invalid_argument;
  rpc::Rpc& r = *core->calls;
  const std::uint64_t now = polling ? ctx.now : ctx.clock.now();
  const bool has_timeout = options != nullptr && options->timeout.count() != 0;
  // The longest time-outs must not wrap round with the tick of now.
  constexpr std::uint64_t kMost = ~std::uint64_t{0} / 2;
  const std::uint64_t timeout =
      has_timeout ? std::min(ctx.clock.ticks(options->timeout), kMost) : r.call_timeout;
  const rpc::CallRequest asked{method, data, size, block, now, now + timeout};
  if (rpc::exceeds_datagram(*c, asked) || (options != nullptr && options->reply_into)) [[unlikely]]
    return begin_long_call(*core, *c, asked, options, done);
  if (c->backlog_count != 0 || !rpc::can_send(r, *c)) [[unlikely]]
    return begin_blocked_call(*core, *c, asked, options, done, polling);
  const Status status = rpc::send_call(r, *c, asked, done);
  if (status == Status::ok) [[likely]]
    post(*core, options != nullptr ? options->post : Post::automatic, polling);
  return status;
}

}  // namespace

SessionState Session::state() const noexcept {
  const rpc::ClientSession* const c = locate(slot_, id_);
  return c != nullptr ? c->state : SessionState::closed;
}

std::size_t Session::max_inline_call() const noexcept {
  const rpc::ClientSession* const c = locate(slot_, id_);
  return c != nullptr && c->state == SessionState::ready ? c->max_inline_call : 0;
}

std::size_t Session::max_call() const noexcept {
  const rpc::ClientSession* const c = locate(slot_, id_);
  return c != nullptr && c->state == SessionState::ready ? rpc::max_call(*slot_->core->calls, *c)
                                                         : 0;
}

Status Session::call(Method method, const BufferSlice& request,
                     const ReplyCallback& done) noexcept {
  return begin_call(slot_, id_, method, request.data(), request.size(), detail::block_of(request),
                    done, nullptr);
}

Status Session::submit_call(Method method, const BufferSlice& request, const ReplyCallback& done,
                            const CallOptions& options) noexcept {
  return begin_call(slot_, id_, method, request.data(), request.size(), detail::block_of(request),
                    done, &options);
}

Status Session::call(Method method, std::span<const std::byte> request,
                     const ReplyCallback& done) noexcept {
  if (request.size() > kShortCall) [[unlikely]]
    return Status::message_too_long;
  return begin_call(slot_, id_, method, request.data(), request.size(), nullptr, done, nullptr);
}

Status Session::submit_call(Method method, std::span<const std::byte> request,
                            const ReplyCallback& done, const CallOptions& options) noexcept {
  if (request.size() > kShortCall) [[unlikely]]
    return Status::message_too_long;
  return begin_call(slot_, id_, method, request.data(), request.size(), nullptr, done, &options);
}

CallId Session::last_call() const noexcept {
  const rpc::ClientSession* const c = locate(slot_, id_);
  return {c != nullptr ? c->last_call_id : 0};
}

void Session::prefetch() const noexcept {
  const EngineCore* const core = engine::core_of(slot_);
  if (core == nullptr || core->calls == nullptr) return;
  core->calls->clients.prefetch(wire::RpcName::index(static_cast<std::uint32_t>(id_)),
                                0);  // most have none under way
}

Status Session::cancel(CallId id) noexcept {
  rpc::ClientSession* const c = locate(slot_, id_);
  if (c == nullptr) return diagnose(slot_, Status::invalid_argument);
  const Status status = rpc::cancel(*slot_->core->calls, *c, id.number);
  slot_->core->wake_soon();
  return status;
}

Status Session::close() noexcept {
  rpc::ClientSession* const c = locate(slot_, id_);
  if (c == nullptr) return diagnose(slot_, Status::not_connected);
  const Status status = rpc::close(*slot_->core->calls, *c);
  slot_->core->wake_soon();
  post(*slot_->core, Post::automatic);
  return status;
}

namespace {

[[gnu::always_inline]] inline Status answer(const detail::EngineSlot* slot, std::uint32_t session,
                                            std::uint32_t number, Status status,
                                            const std::byte* data, std::size_t size,
                                            detail::Block* block) noexcept {
  if (slot == nullptr) [[unlikely]]
    return Status::not_connected;
  const std::uintptr_t standing = base::OwnerGuard::standing(*slot);
  if (standing > base::OwnerGuard::kPolling) [[unlikely]]
    return base::OwnerGuard::diagnose(*slot);
  EngineCore& core = *slot->core;
  if (block != nullptr && !core.context.owns(*block)) [[unlikely]]
    return Status::invalid_argument;
  const bool polling = standing == base::OwnerGuard::kPolling;
  const Status done = rpc::answer_call(*core.calls, session, number, status, data, size, block);
  if (polling) [[likely]]
    return done;  // posted at the end of the poll
  if ((session & rpc::kConnectionCall) != 0) {
    agent::flush_queued_agents(core.context);
  } else if (done == Status::ok) {
    core.calls->port->flush();
  }
  return done;
}

}  // namespace

Status PendingCall::reply(std::span<const std::byte> bytes) const noexcept {
  return answer(slot_, session_, number_, Status::ok, bytes.data(), bytes.size(), nullptr);
}

Status PendingCall::reply(const BufferSlice& bytes) const noexcept {
  return answer(slot_, session_, number_, Status::ok, bytes.data(), bytes.size(),
                detail::block_of(bytes));
}

std::span<std::byte> PendingCall::reserve_reply(std::size_t size) const noexcept {
  const EngineCore* const core = engine::core_of(slot_);
  if (core == nullptr) return {};
  return rpc::reserve_reply(*core->calls, session_, number_, size);
}

Status PendingCall::commit_reply(std::size_t size) const noexcept {
  rpc::ReservedReply written;
  if (const EngineCore* const core = engine::core_of(slot_); core != nullptr) {
    written = rpc::find_reserved_reply(*core->calls, session_, number_, size);
    if (written.block == nullptr)
      return max_reply() == 0 ? Status::not_connected : Status::invalid_argument;
  }
  return answer(slot_, session_, number_, Status::ok, written.data, size, written.block);
}

std::size_t PendingCall::max_reply() const noexcept {
  const EngineCore* const core = engine::core_of(slot_);
  return core != nullptr ? rpc::max_reply(*core->calls, session_, number_) : 0;
}

Status PendingCall::refuse(std::string_view why) const noexcept {
  const std::size_t size = std::min(why.size(), kShortCall);
  return answer(slot_, session_, number_, Status::refused,
                reinterpret_cast<const std::byte*>(why.data()), size, nullptr);
}

}  // namespace spinwire
