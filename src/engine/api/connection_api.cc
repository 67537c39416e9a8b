// Public API of a connection. Operations are hot.
#include <array>
#include <new>
#include <string>
#include <utility>

#include "agent/gathered.h"
#include "agent/submit.h"
#include "base/error.h"
#include "base/internals.h"
#include "engine/api/operate.h"
#include "engine/engine_core.h"
#include "spinwire/connection.h"

namespace spinwire {

Result<agent::Agent*> detail::locate(const EngineSlot* slot, std::uint32_t index,
                                     std::uint32_t generation, const char* asked) {
  if (const Status why = engine::diagnose(slot); why != Status::not_connected)
    return engine::misused(why, asked);
  agent::Agent* const a = engine::locate(slot, index, generation).agent;
  if (a != nullptr && !agent::is_ending(*a)) return a;
  return base::fail(Status::not_connected, asked, "the connection has ended", "make another one");
}

using agent::Agent;
using agent::OperationKind;
using detail::EngineCore;
using engine::diagnose;
using engine::locate;
using engine::set_up_agent;
using engine::with_agent;
using engine::with_operation;

std::string_view to_string(ConnectionState state) noexcept {
  constexpr std::array<std::string_view, 5> kNames = {"resolving", "exchanging", "ready",
                                                      "draining", "closed"};
  return engine::name_of(kNames, state);
}

std::string_view to_string(QueuePairState state) noexcept {
  constexpr std::array<std::string_view, 8> kNames = {"reset", "init", "rtr", "rts",
                                                      "sqd",   "sqe",  "err", "unknown"};
  return engine::name_of(kNames, state);
}

std::string_view to_string(Blocker blocker) noexcept {
  constexpr std::array<std::string_view, 6> kNames = {"nothing",    "not_ready", "send_queue",
                                                      "operations", "credit",    "windows"};
  return engine::name_of(kNames, blocker);
}

void Connection::prefetch() const noexcept {
  if (const EngineCore* const core = engine::checked_core_of(slot_); core != nullptr)
    agent::prefetch(core->context, index_);
}

Status Connection::submit_send(const BufferSlice& data, const CompletionCallback& done, Post post,
                               bool tracked) {
  return with_operation(
      slot_, index_, generation_, post, [&](EngineCore& core, Agent& a, bool defer) {
        return agent::submit_message<false>(core.context, a, detail::block_of(data), data.data(),
                                            data.size(), done, tracked, defer);
      });
}

Status Connection::submit_send(const Buffer& data, const CompletionCallback& done, Post post,
                               bool tracked) {
  return with_operation(
      slot_, index_, generation_, post, [&](EngineCore& core, Agent& a, bool defer) {
        return agent::submit_message<true>(core.context, a, detail::block_of(data), data.data(),
                                           data.size(), done, tracked, defer);
      });
}

Status Connection::submit_send_with_imm(const BufferSlice& data, std::uint32_t immediate,
                                        const CompletionCallback& done, Post post) {
  return with_operation(
      slot_, index_, generation_, post, [&](EngineCore& core, Agent& a, bool defer) {
        return agent::submit_any<OperationKind::send_imm>(
            core.context, a,
            {detail::block_of(data), data.data(), data.size(), nullptr, immediate, done, defer});
      });
}

Status Connection::submit_send_copy(std::span<const std::byte> bytes,
                                    const CompletionCallback& done, Post post, bool tracked) {
  return with_operation(slot_, index_, generation_, post,
                        [&](EngineCore& core, Agent& a, bool defer) {
                          return agent::submit_copy(core.context, a, bytes, done, tracked, defer);
                        });
}

Status Connection::submit_write(const BufferSlice& local, const RemoteRegion& remote,
                                const CompletionCallback& done, Post post) {
  return with_operation(
      slot_, index_, generation_, post, [&](EngineCore& core, Agent& a, bool defer) {
        return agent::submit_any<OperationKind::write>(
            core.context, a,
            {detail::block_of(local), local.data(), local.size(), &remote, 0, done, defer});
      });
}

Status Connection::submit_send(std::span<const BufferSlice> parts, const CompletionCallback& done,
                               Post post, bool tracked) {
  return with_operation(
      slot_, index_, generation_, post, [&](EngineCore& core, Agent& a, bool defer) {
        return agent::send_gathered(core.context, a, {parts, done, defer}, tracked);
      });
}

Status Connection::submit_write(std::span<const BufferSlice> parts, const RemoteRegion& remote,
                                const CompletionCallback& done, Post post) {
  return with_operation(
      slot_, index_, generation_, post, [&](EngineCore& core, Agent& a, bool defer) {
        return agent::write_gathered(core.context, a, {parts, done, defer}, remote);
      });
}

Status Connection::submit_write_and_send(std::span<const BufferSlice> parts,
                                         const RemoteRegion& remote,
                                         std::span<const std::byte> notice,
                                         const CompletionCallback& done, Post post) {
  return with_operation(
      slot_, index_, generation_, post, [&](EngineCore& core, Agent& a, bool defer) {
        return agent::write_and_send(core.context, a, {parts, done, defer}, remote, notice);
      });
}

Status Connection::submit_write_with_imm(const BufferSlice& local, const RemoteRegion& remote,
                                         std::uint32_t immediate, const CompletionCallback& done,
                                         Post post) {
  return with_operation(
      slot_, index_, generation_, post, [&](EngineCore& core, Agent& a, bool defer) {
        return agent::submit_any<OperationKind::write_imm>(
            core.context, a,
            {detail::block_of(local), local.data(), local.size(), &remote, immediate, done, defer});
      });
}

Status Connection::submit_read(const BufferSlice& local, const RemoteRegion& remote,
                               const CompletionCallback& done, Post post) {
  return with_operation(
      slot_, index_, generation_, post, [&](EngineCore& core, Agent& a, bool defer) {
        return agent::submit_any<OperationKind::read>(
            core.context, a,
            {detail::block_of(local), local.data(), local.size(), &remote, 0, done, defer});
      });
}

Status Connection::submit_compare_swap(const RemoteRegion& remote, std::uint64_t expected,
                                       std::uint64_t desired, const CompletionCallback& done,
                                       Post post) {
  return with_operation(slot_, index_, generation_, post,
                        [&](EngineCore& core, Agent& a, bool defer) {
                          return agent::submit_atomic<OperationKind::compare_swap>(
                              core.context, a, {remote, expected, desired, done, defer});
                        });
}

Status Connection::submit_fetch_add(const RemoteRegion& remote, std::uint64_t add,
                                    const CompletionCallback& done, Post post) {
  return with_operation(slot_, index_, generation_, post,
                        [&](EngineCore& core, Agent& a, bool defer) {
                          return agent::submit_atomic<OperationKind::fetch_add>(
                              core.context, a, {remote, 0, add, done, defer});
                        });
}

Status Connection::flush() {
  return with_agent(slot_, index_, generation_, [&](EngineCore& core, Agent& a) {
    return agent::flush_application(core.context, a);
  });
}

OperationId Connection::last_operation() const noexcept {
  const auto [core, a] = locate(slot_, index_, generation_);
  return a != nullptr ? agent::last_operation(core->context, *a) : OperationId{};
}

Status Connection::cancel(OperationId operation) {
  return with_agent(slot_, index_, generation_, [&](EngineCore& core, Agent& a) {
    return agent::cancel(core.context, a, operation.value, Status::cancelled)
               ? Status::ok
               : Status::invalid_argument;
  });
}

Status Connection::set_timeout(OperationId operation, Nanoseconds timeout) noexcept {
  return with_agent(slot_, index_, generation_, [&](EngineCore& core, Agent& a) {
    if (timeout.count() < 0) return Status::invalid_argument;
    const Clock& clock = core.context.clock;
    const std::uint64_t now = clock.now();
    try {
      return agent::set_deadline(core.context, a, operation.value,
                                 now + std::min(clock.ticks(timeout), ~now))
                 ? Status::ok
                 : Status::invalid_argument;
    } catch (const std::bad_alloc&) {
      return Status::no_memory;
    }
  });
}

Status Connection::close() {
  return with_agent(slot_, index_, generation_, [&](EngineCore& core, Agent& a) {
    if (agent::is_ending(a)) {
      agent::stop_reconnecting(a);
      return Status::not_connected;
    }
    agent::close(core.context, a);
    return Status::ok;
  });
}

Status Connection::close(const Goodbye& goodbye) {
  return with_agent(slot_, index_, generation_, [&](EngineCore& core, Agent& a) {
    if (!engine::is_valid(goodbye)) return Status::invalid_argument;
    if (agent::is_ending(a)) return Status::not_connected;
    agent::close(core.context, a, goodbye);
    return Status::ok;
  });
}

Status Connection::set_handlers(const ConnectionHandlers& handlers) {
  return with_agent(slot_, index_, generation_, [&](EngineCore& core, Agent& a) {
    agent::set_handlers(a, handlers, core.guard.polling());
    return Status::ok;
  });
}

Result<void> Connection::join(const Endpoint& peer) {
  return set_up_agent(slot_, index_, generation_, "join a peer's endpoint",
                      [&](EngineCore& core, Agent& a) { return core.join(a, peer); });
}

Result<void> Connection::configure(const ConnectionSettings& settings) {
  return set_up_agent(
      slot_, index_, generation_, "configure a connection",
      [&](EngineCore& core, Agent& a) { return agent::configure(core.context, a, settings); });
}

Result<RemoteRegion> Connection::expose(const BufferSlice& slice, Access access,
                                        MemoryFlags flags) {
  return set_up_agent(slot_, index_, generation_, "expose memory to a peer",
                      [&](EngineCore& core, Agent& a) {
                        return agent::expose(core.context, a, slice, access, flags);
                      });
}

Result<RemoteRegion> Connection::expose(const BufferSlice& slice, Access access, KeyScope scope) {
  if (scope == KeyScope::domain) return expose(slice, access);
  return set_up_agent(slot_, index_, generation_, "expose memory to one peer",
                      [&](EngineCore& core, Agent& a) {
                        return agent::expose_to_peer(core.context, a, slice, access);
                      });
}

Result<MemoryRegion> Connection::register_memory(std::span<std::byte> bytes, Access access,
                                                 MemoryFlags flags) {
  return set_up_agent(slot_, index_, generation_, "register memory for a connection",
                      [&](EngineCore& core, Agent& a) {
                        return agent::register_memory(core.context, a, bytes, access, flags);
                      })
      .map([](memory::RegisteredMemory registered) {
        return detail::make<MemoryRegion>(std::move(registered.whole), registered.remote);
      });
}

Result<Endpoint> Connection::endpoint() const {
  return set_up_agent(
      slot_, index_, generation_, "get a connection's endpoint",
      [](EngineCore& core, Agent& a) { return agent::own_endpoint(core.context, a); });
}

ConnectionState Connection::state() const noexcept {
  const Agent* const a = locate(slot_, index_, generation_).agent;
  return a != nullptr ? agent::state_of(*a) : ConnectionState::closed;
}

Result<QueuePairState> Connection::query_state() const {
  constexpr const char* kAsked = "query a connection's queue pair";
  const auto [core, a] = locate(slot_, index_, generation_);
  if (a == nullptr || !agent::has_queue_pair(*a)) {
    const Status why = a == nullptr ? diagnose(slot_) : Status::not_connected;
    return base::fail(why, kAsked,
                      std::string("the connection has no queue pair: ") += to_string(why),
                      "call while the connection is open, in the engine's thread");
  }
  return base::no_throw(kAsked,
                        [&, core = core, a = a] { return agent::query_state(core->context, *a); });
}

std::size_t Connection::max_message() const noexcept {
  const Agent* const a = locate(slot_, index_, generation_).agent;
  return a != nullptr ? agent::max_message_now(*a) : 0;
}

std::size_t Connection::max_send_sge() const noexcept {
  const Agent* const a = locate(slot_, index_, generation_).agent;
  return a != nullptr && agent::is_ready(*a) ? agent::max_parts(*a) : 0;
}

ConnectionStats Connection::stats() const noexcept {
  const Agent* const a = locate(slot_, index_, generation_).agent;
  return a != nullptr ? agent::stats(*a) : ConnectionStats{};
}

ConnectionSnapshot Connection::snapshot() const noexcept {
  const auto [core, a] = locate(slot_, index_, generation_);
  return a != nullptr ? agent::snapshot(core->context, *a) : ConnectionSnapshot{};
}

PeerIdentity Connection::peer_identity() const noexcept {
  const Agent* const a = locate(slot_, index_, generation_).agent;
  return a != nullptr ? agent::peer_identity_of(*a) : PeerIdentity{};
}

std::string Connection::peer() const noexcept try {
  const Agent* const a = locate(slot_, index_, generation_).agent;
  return a != nullptr ? std::string(agent::peer_name(*a)) : std::string();
} catch (const std::bad_alloc&) {
  return {};
}

LocalPath Connection::local_path() const noexcept {
  const Agent* const a = locate(slot_, index_, generation_).agent;
  return a != nullptr ? agent::local_path_of(*a) : LocalPath{};
}

}  // namespace spinwire
