// Public API of remote calls: methods, sessions, and calls that are answered later.
#include <algorithm>
#include <array>
#include <new>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/internals.h"
#include "engine/api/operate.h"
#include "engine/engine_core.h"
#include "rpc/backlog.h"
#include "rpc/call_cancel.h"
#include "rpc/call_samples.h"
#include "rpc/client_session.h"
#include "rpc/reply_buffer.h"
#include "rpc/reply_completion.h"
#include "rpc/room_for_calls.h"
#include "rpc/server_call.h"
#include "rpc/server_session.h"
#include "rpc/session_failover.h"
#include "rpc/session_snapshot.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire {

using detail::EngineCore;

std::string_view to_string(SessionState state) noexcept {
  constexpr std::array<std::string_view, 4> kNames = {"opening", "ready", "closing", "closed"};
  return engine::name_of(kNames, state);
}

std::string_view to_string(SessionBlocker blocker) noexcept {
  constexpr std::array<std::string_view, 8> kNames = {"nothing",       "not_ready",  "window",
                                                      "server_window", "congestion", "receives",
                                                      "send_queue",    "connection"};
  return engine::name_of(kNames, blocker);
}

Result<void> Engine::serve(Method method, const MethodHandler& handler) {
  return engine::set_up(*slot_, "serve a method", [&] { return core_->serve(method, handler); });
}

Result<Session> Engine::open_session(std::string_view address, const SessionOptions& options) {
  return engine::set_up(*slot_, "open a session",
                        [&] { return core_->open_session(address, options); });
}

RpcStats Engine::rpc_stats() const noexcept {
  const EngineCore* const core = engine::checked_core_of(slot_);
  return core != nullptr && core->calls != nullptr ? rpc::stats(*core->calls) : RpcStats{};
}

namespace {

/// An engine that has given out a session has remote calls until it is gone.
[[gnu::always_inline]] inline rpc::ClientSession* locate(EngineCore& core,
                                                         std::uint64_t id) noexcept {
  return rpc::find_session(*core.calls, id);
}
rpc::ClientSession* locate(const detail::EngineSlot* slot, std::uint64_t id) noexcept {
  EngineCore* const core = engine::checked_core_of(slot);
  return core != nullptr ? locate(*core, id) : nullptr;
}

/// Posts the datagrams of a call, at once or at the end of the poll at the latest.
[[gnu::always_inline]] inline void post(EngineCore& core, Post when, bool polling) noexcept {
  if (polling && when != Post::now) [[likely]]
    return;  // posted at the end of the poll at the latest
  if (when == Post::defer) return core.wake_soon();
  rpc::post_datagrams(*core.calls);
  if (rpc::has_unsent(*core.calls)) [[unlikely]]
    core.wake_soon();
}

std::optional<WhenNotReady> when_not_ready(const CallOptions* options) noexcept {
  return options != nullptr ? options->when_not_ready : std::nullopt;
}

/// Starts a call over the session's connection. `options` null: defaults.
[[gnu::cold, gnu::noinline]] Status begin_long_call(EngineCore& core, rpc::ClientSession& c,
                                                    rpc::CallRequest asked,
                                                    const CallOptions* options,
                                                    const ReplyCallback& done) noexcept {
  const bool names_memory = options != nullptr && options->reply_into;
  const Post when = options != nullptr ? options->post : Post::automatic;
  if (!rpc::may_wait(c, when_not_ready(options))) return Status::not_connected;
  const Status status = rpc::call_over_connection(
      *core.calls, c, asked, names_memory ? &*options->reply_into : nullptr, done,
      !engine::deferred(core, when), rpc::waits_until_ready(c, when_not_ready(options)));
  if (status != Status::ok) return status;
  if (rpc::has_deferred_work(*core.calls)) core.wake_soon();
  return status;
}

/// Starts a call that cannot go out at once as a datagram. The call uses the session's connection
/// if that is its transport. Otherwise it waits for the window or the engine.
[[gnu::always_inline]] inline Status begin_blocked_call(EngineCore& core, rpc::ClientSession& c,
                                                        const rpc::CallRequest& call,
                                                        const CallOptions* options,
                                                        const ReplyCallback& done,
                                                        bool polling) noexcept {
  if (rpc::uses_connection(c)) [[unlikely]]
    return begin_long_call(core, c, call, options, done);
  if (!rpc::may_wait(c, when_not_ready(options))) return Status::not_connected;
  const Status status = rpc::enqueue_call(*core.calls, c, call, done,
                                          rpc::waits_until_ready(c, when_not_ready(options)));
  if (status == Status::ok && rpc::state_of(c) == SessionState::ready)
    post(core, options != nullptr ? options->post : Post::automatic, polling);
  return status;
}

[[gnu::cold, gnu::noinline]] Status begin_sampled_call(const detail::EngineSlot* slot,
                                                       std::uint64_t id, Method method,
                                                       const std::byte* data, std::size_t size,
                                                       detail::Block* block,
                                                       const ReplyCallback& done,
                                                       const CallOptions* options) noexcept;

/// Starts a call. `options` null: defaults.
template <bool may_sample>
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
  EngineCore* const core = detail::core_at(slot);
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
  if (may_sample && rpc::is_sample_due(r)) [[unlikely]]
    return begin_sampled_call(slot, id, method, data, size, block, done, options);
  const std::uint64_t now = polling ? ctx.now : ctx.clock.now();
  const bool has_timeout = options != nullptr && options->timeout.count() != 0;
  // The longest time-outs must not overflow when added to the current tick.
  constexpr std::uint64_t kMost = ~std::uint64_t{0} / 2;
  const std::uint64_t timeout =
      has_timeout ? std::min(ctx.clock.ticks(options->timeout), kMost) : rpc::call_timeout(r);
  const rpc::CallRequest asked{method, data, size, block, now, now + timeout};
  if (rpc::exceeds_datagram(*c, asked) || (options != nullptr && options->reply_into)) [[unlikely]]
    return begin_long_call(*core, *c, asked, options, done);
  if (rpc::has_backlog(*c) || !rpc::can_send(r, *c)) [[unlikely]]
    return begin_blocked_call(*core, *c, asked, options, done, polling);
  const Status status =
      rpc::send_call(r, *c, asked, done, rpc::overrides_session(*c, when_not_ready(options)));
  if (status == Status::ok) [[likely]]
    post(*core, options != nullptr ? options->post : Post::automatic, polling);
  return status;
}

/// Starts a call whose latency is measured.
Status begin_sampled_call(const detail::EngineSlot* slot, std::uint64_t id, Method method,
                          const std::byte* data, std::size_t size, detail::Block* block,
                          const ReplyCallback& done, const CallOptions* options) noexcept {
  rpc::Rpc& r = *detail::core_at(slot)->calls;
  ReplyCallback measuring;
  rpc::CallSample* const sample = rpc::begin_sample(r, method, done, measuring);
  const Status status = begin_call<false>(slot, id, method, data, size, block,
                                          sample != nullptr ? measuring : done, options);
  if (status != Status::ok && sample != nullptr) rpc::drop_sample(*sample);
  return status;
}

}  // namespace

SessionState Session::state() const noexcept {
  const rpc::ClientSession* const c = locate(slot_, id_);
  return c != nullptr ? rpc::state_of(*c) : SessionState::closed;
}

std::size_t Session::max_inline_call() const noexcept {
  const rpc::ClientSession* const c = locate(slot_, id_);
  return c != nullptr ? rpc::max_inline_call(*c) : 0;
}

std::size_t Session::max_call() const noexcept {
  const rpc::ClientSession* const c = locate(slot_, id_);
  return c != nullptr && rpc::state_of(*c) == SessionState::ready
             ? rpc::max_call(*detail::core_at(slot_)->calls, *c)
             : 0;
}

std::string Session::peer() const noexcept try {
  const rpc::ClientSession* const c = locate(slot_, id_);
  return c != nullptr ? c->address : std::string();
} catch (const std::bad_alloc&) {
  return {};
}

LocalPath Session::local_path() const noexcept {
  const rpc::ClientSession* const c = locate(slot_, id_);
  return c != nullptr ? rpc::local_path_of(*detail::core_at(slot_)->calls, *c) : LocalPath{};
}

SessionSnapshot Session::snapshot() const noexcept {
  const rpc::ClientSession* const c = locate(slot_, id_);
  return c != nullptr ? rpc::snapshot(*detail::core_at(slot_)->calls, *c) : SessionSnapshot{};
}

PeerIdentity Session::peer_identity() const noexcept {
  const rpc::ClientSession* const c = locate(slot_, id_);
  return c != nullptr ? rpc::identity_of(c->peer) : PeerIdentity{};
}

ServedSession PendingCall::session() const noexcept {
  const EngineCore* const core = engine::checked_core_of(slot_);
  return core != nullptr ? rpc::served_session(*core->calls, call_) : ServedSession{};
}

namespace {

const rpc::ServerSession* locate_served(const detail::EngineSlot* slot, std::uint32_t name,
                                        std::uint32_t generation) noexcept {
  const EngineCore* const core = engine::checked_core_of(slot);
  return core != nullptr ? rpc::find_served(*core->calls, name, generation) : nullptr;
}

}  // namespace

ServedSession::operator bool() const noexcept {
  return locate_served(slot_, name_, generation_) != nullptr;
}

PeerIdentity ServedSession::peer_identity() const noexcept {
  const rpc::ServerSession* const s = locate_served(slot_, name_, generation_);
  return s != nullptr ? rpc::identity_of(s->peer) : PeerIdentity{};
}

Status Session::submit_call(Method method, const BufferSlice& request,
                            const ReplyCallback& done) noexcept {
  return begin_call<true>(slot_, id_, method, request.data(), request.size(),
                          detail::block_of(request), done, nullptr);
}

Status Session::submit_call(Method method, const BufferSlice& request, const ReplyCallback& done,
                            const CallOptions& options) noexcept {
  return begin_call<true>(slot_, id_, method, request.data(), request.size(),
                          detail::block_of(request), done, &options);
}

Status Session::submit_call(Method method, std::span<const std::byte> request,
                            const ReplyCallback& done) noexcept {
  return begin_call<true>(slot_, id_, method, request.data(), request.size(), nullptr, done,
                          nullptr);
}

Status Session::submit_call(Method method, std::span<const std::byte> request,
                            const ReplyCallback& done, const CallOptions& options) noexcept {
  return begin_call<true>(slot_, id_, method, request.data(), request.size(), nullptr, done,
                          &options);
}

CallId Session::last_call() const noexcept {
  const rpc::ClientSession* const c = locate(slot_, id_);
  return c != nullptr ? rpc::last_call(*c) : CallId{};
}

CallId Session::accepted_call() const noexcept {
  const rpc::ClientSession* const c = locate(slot_, id_);
  return c != nullptr ? rpc::accepted_call(*c) : CallId{};
}

void Session::prefetch() const noexcept {
  const EngineCore* const core = engine::checked_core_of(slot_);
  if (core == nullptr || core->calls == nullptr) return;
  rpc::prefetch_session(*core->calls, id_);
}

Status Session::cancel(CallId id) noexcept {
  rpc::ClientSession* const c = locate(slot_, id_);
  if (c == nullptr) return engine::diagnose(slot_);
  if (id.value >> 32 != 0) return Status::invalid_argument;
  const Status status =
      rpc::cancel(*detail::core_at(slot_)->calls, *c, static_cast<std::uint32_t>(id.value));
  detail::core_at(slot_)->wake_soon();
  return status;
}

Status Session::close() noexcept {
  rpc::ClientSession* const c = locate(slot_, id_);
  if (c == nullptr) return engine::diagnose(slot_);
  const Status status = rpc::begin_close(*detail::core_at(slot_)->calls, *c);
  detail::core_at(slot_)->wake_soon();
  if (!detail::core_at(slot_)->guard.polling()) rpc::flush(*detail::core_at(slot_)->calls);
  return status;
}

namespace {

/// Posts an answer that was given between polls.
inline void post_answer(EngineCore& core, detail::CallRef call, Status done) noexcept {
  if (call.transport == detail::Transport::connection) {
    agent::flush_queued_agents(core.context);
  } else if (done == Status::ok) {
    rpc::post_datagrams(*core.calls);
    if (rpc::has_unsent(*core.calls)) [[unlikely]]
      core.wake_soon();
  }
}

[[gnu::always_inline]] inline Status answer(const detail::EngineSlot* slot, detail::CallRef call,
                                            Status status, const std::byte* data, std::size_t size,
                                            detail::Block* block) noexcept {
  if (slot == nullptr) [[unlikely]]
    return Status::not_connected;
  const std::uintptr_t standing = base::OwnerGuard::standing(*slot);
  if (standing > base::OwnerGuard::kPolling) [[unlikely]]
    return base::OwnerGuard::diagnose(*slot);
  EngineCore& core = *detail::core_at(slot);
  if (block != nullptr && !core.context.owns(*block)) [[unlikely]]
    return Status::invalid_argument;
  const bool polling = standing == base::OwnerGuard::kPolling;
  const Status done = rpc::answer_call(*core.calls, call, status, data, size, block);
  if (polling) [[likely]]
    return done;  // posted at the end of the poll at the latest
  post_answer(core, call, done);
  return done;
}

}  // namespace

Status PendingCall::reply(std::span<const std::byte> bytes) const noexcept {
  return answer(slot_, call_, Status::ok, bytes.data(), bytes.size(), nullptr);
}

Status PendingCall::reply(const BufferSlice& bytes) const noexcept {
  return answer(slot_, call_, Status::ok, bytes.data(), bytes.size(), detail::block_of(bytes));
}

Status PendingCall::reply(const BufferSlice& bytes,
                          const ReplyCompletionCallback& done) const noexcept {
  if (slot_ == nullptr) return Status::not_connected;
  if (base::OwnerGuard::standing(*slot_) > base::OwnerGuard::kPolling)
    return base::OwnerGuard::diagnose(*slot_);
  EngineCore& core = *detail::core_at(slot_);
  detail::Block* const block = detail::block_of(bytes);
  if (!done || (block != nullptr && !core.context.owns(*block))) return Status::invalid_argument;
  rpc::ServerSession* const s = rpc::find_server(*core.calls, call_.session);
  if (s == nullptr) return Status::not_connected;
  rpc::ReplyCompletion* const completion = rpc::make_reply_completion(*core.calls, *s, block, done);
  if (completion == nullptr)
    return rpc::refuse_reply_for_block(*core.calls, sizeof(rpc::ReplyCompletion));
  const Status status = answer(slot_, call_, Status::ok, bytes.data(), bytes.size(),
                               block != nullptr ? &completion->view : nullptr);
  status == Status::ok ? rpc::release_reply_completion(*completion)
                       : rpc::drop_reply_completion(*completion);
  return status;
}

std::span<std::byte> PendingCall::reserve_reply(std::size_t size) const noexcept {
  const EngineCore* const core = engine::checked_core_of(slot_);
  if (core == nullptr) return {};
  return rpc::reserve_reply(*core->calls, call_, size);
}

Status PendingCall::commit_reply(std::size_t size) const noexcept {
  rpc::ReservedReply written;
  if (const EngineCore* const core = engine::checked_core_of(slot_); core != nullptr) {
    written = rpc::find_reserved_reply(*core->calls, call_, size);
    if (written.block == nullptr)
      return max_reply() == 0 ? Status::not_connected : Status::invalid_argument;
  }
  return answer(slot_, call_, Status::ok, written.data, size, written.block);
}

std::size_t PendingCall::max_reply() const noexcept {
  const EngineCore* const core = engine::checked_core_of(slot_);
  return core != nullptr ? rpc::max_reply(*core->calls, call_) : 0;
}

Status PendingCall::refuse(std::string_view why) const noexcept {
  const std::size_t size = std::min(why.size(), kSlotPayloadBytes);
  return answer(slot_, call_, Status::refused, reinterpret_cast<const std::byte*>(why.data()), size,
                nullptr);
}

Status PendingCall::refuse(std::uint32_t code, std::string_view why) const noexcept {
  if (slot_ == nullptr) return Status::not_connected;
  const std::uintptr_t standing = base::OwnerGuard::standing(*slot_);
  if (standing > base::OwnerGuard::kPolling) return base::OwnerGuard::diagnose(*slot_);
  EngineCore& core = *detail::core_at(slot_);
  const Status done = rpc::refuse_with_code(*core.calls, call_, code, why);
  if (standing != base::OwnerGuard::kPolling) post_answer(core, call_, done);
  return done;
}

}  // namespace spinwire
