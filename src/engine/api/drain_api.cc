// Public API for restarts: draining, served sessions, listeners that are handed over. Cold.
#include <algorithm>

#include "base/error.h"
#include "base/internals.h"
#include "engine/api/operate.h"
#include "engine/engine_core.h"
#include "rpc/server_session.h"
#include "rpc/session_goodbye.h"
#include "spinwire/drain.h"

namespace spinwire {

using detail::EngineCore;

namespace {

constexpr Nanoseconds kLongestDrain = std::chrono::hours(24);

Result<void> check(Nanoseconds timeout, const DrainOptions& options) {
  const bool is_valid = timeout.count() >= 0 && timeout <= kLongestDrain &&
                        options.retry_after.count() >= 0 && options.retry_after <= kMaxRetryAfter;
  if (is_valid) return {};
  return base::fail(Status::invalid_argument, "drain the engine",
                    base::format("a time-out of {} ns, retry_after of {} ns", timeout.count(),
                                 options.retry_after.count()),
                    "give a time-out of 0 to 24 h, and a retry_after of 0 to 1 h");
}

}  // namespace

Result<void> Engine::drain(Nanoseconds timeout, const DrainOptions& options) {
  return engine::set_up(*slot_, "drain the engine", [&] {
    return check(timeout, options).map([&] { core_->drain.begin(timeout, options); });
  });
}

bool Engine::draining() const noexcept {
  const EngineCore* const core = engine::checked_core_of(slot_);
  return core != nullptr && core->drain.is_under_way();
}

bool Engine::drained() const noexcept {
  const EngineCore* const core = engine::checked_core_of(slot_);
  return core != nullptr && core->drain.is_over();
}

std::uint32_t Engine::visit_served_sessions(std::uint32_t from, std::uint32_t most,
                                            const ServedSessionVisitor& visitor) const {
  EngineCore* const core = engine::checked_core_of(slot_);
  if (core == nullptr || core->calls == nullptr || !visitor || most == 0) return 0;
  const rpc::Rpc& r = *core->calls;
  const std::uint32_t capacity = r.servers.capacity();
  const std::uint32_t end = from + std::min(most, capacity - std::min(from, capacity));
  const std::uint64_t now = core->context.clock.now();
  // A visitor may destroy the engine: then the core ends with run_callbacks().
  core->run_callbacks([&] {
    for (std::uint32_t i = from; i < end; ++i) {
      if (!r.servers.in_use(i)) continue;
      const rpc::ServerSession& s = r.servers.at(i);
      const std::uint64_t heard = std::min(rpc::last_heard_from(s), now);
      visitor({detail::make<ServedSession>(core->context.slot, s.name, r.servers.generation(i)),
               rpc::identity_of(s.peer), rpc::calls_in_progress(s), s.window,
               core->context.clock.duration(now - heard), rpc::is_leaving(s)});
    }
  });
  return end < capacity ? end : 0;
}

Status ServedSession::close(const Goodbye& goodbye, Nanoseconds timeout) const noexcept {
  EngineCore* const core = engine::checked_core_of(slot_);
  if (core == nullptr) return engine::diagnose(slot_);
  rpc::Rpc& r = *core->calls;
  rpc::ServerSession* const s = rpc::find_served(r, name_, generation_);
  if (s == nullptr || rpc::is_leaving(*s)) return Status::not_connected;
  if (!engine::is_valid(goodbye) || timeout.count() < 0 || timeout > kLongestDrain)
    return Status::invalid_argument;
  const std::uint64_t ticks =
      timeout.count() != 0 ? core->context.clock.ticks(timeout) : r.timeouts.close;
  rpc::begin_leaving(r, *s, goodbye, core->context.clock.now() + ticks);
  core->step_soon();
  return Status::ok;
}

Result<Listener> Engine::adopt_listener(int fd, const ListenOptions& options) {
  return engine::set_up(*slot_, "adopt a listener",
                        [&] { return core_->adopt_listener(fd, options); });
}

namespace {

/// Answers `run(control port, id)` for a listener that listens.
template <typename Run>
Result<int> with_listener(const detail::EngineSlot* slot, control::ListenerId id, const char* asked,
                          Run&& run) {
  if (const Status why = engine::diagnose(slot); why != Status::not_connected)
    return engine::misused(why, asked);
  EngineCore* const core = engine::checked_core_of(slot);
  if (core == nullptr || !core->control.listens(id)) {
    return base::fail(Status::not_connected, asked, "it does not listen",
                      "use a listener that Engine::listen() has given");
  }
  return base::no_throw(asked, [&] { return run(core->control); });
}

}  // namespace

Result<int> Listener::fd() const {
  const control::ListenerId id{index_, generation_};
  return with_listener(slot_, id, "get a listener's descriptor",
                       [&](control::ControlPort& port) { return port.descriptor_of(id); });
}

Result<int> Listener::release() {
  const control::ListenerId id{index_, generation_};
  return with_listener(slot_, id, "release a listener",
                       [&](control::ControlPort& port) { return port.release_listener(id); })
      .map([this](int fd) {
        slot_ = nullptr;
        return fd;
      });
}

}  // namespace spinwire
