// Opening and closing an engine. Cold.
#include "spinwire/engine.h"

#include <errno.h>
#include <net/if.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "base/error.h"
#include "base/internals.h"
#include "base/log_message.h"
#include "base/units.h"
#include "control/cm_resolver.h"
#include "engine/devices.h"
#include "engine/engine_core.h"
#include "engine/pool_sizes.h"
#include "rpc/client_session.h"
#include "rpc/reply_completion.h"

namespace spinwire {

tl::unexpected<Error> engine::misused(Status status, const char* asked) {
  switch (status) {
    case Status::forked_child:
      return base::fail(status, asked, "this process is a fork of the engine's owner",
                        "open an engine of its own in the child");
    case Status::not_connected:
      return base::fail(status, asked,
                        "the handle has no engine: it was moved from, or never opened",
                        "use the engine that Engine::open() returned");
    default:
      return base::fail(status, asked, "the calling thread did not open this engine",
                        "give each thread an engine of its own");
  }
}

namespace detail {

using agent::Agent;

EngineCore::EngineCore(const Config& config, const Clock& clock, base::OwnerGuard owner)
    : guard(std::move(owner)),
      context(config, clock),
      control({config.connections.handshakes, config::half_open_connections(config.connections),
               config.connections.handshake_timeout, context.incarnation, config.security.open,
               &context.recorder},
              context.clock, context.timers),
      device_watch(context, *this, calls),
      connector(context, control, device_watch, *this, schedule),
      loss_probes(context, control),
      application_timers(context.timers),
      names(control),
      drain(context, connector, calls, schedule),
      sums(config.connections.maximum) {
  guard.slot().target = this;
  context.slot = &guard.slot();
  schedule.control_interval = clock.ticks(config.engine.control_interval);
  if (config.engine.control == ControlMode::manual)
    schedule.next_control = engine::PollSchedule::kNever;
}

Result<void> EngineCore::open(const OpenOptions& options) {
  const Config& c = context.config;
  if (!c.security.key_file.empty()) {
    auto keys = control::KeyRing::load(c.security.key_file);
    if (!keys) return tl::unexpected(keys.error());
    control.set_keys(std::move(*keys));
    context.endpoint_keys = control.endpoint_keys();
  }
  auto device = verbs::Device::open(engine::device_options(c, context.clock), options.providers);
  if (!device) return tl::unexpected(device.error());
  context.device = std::move(*device);
  context.config.queues.inline_bytes = context.device->info().inline_bytes;
  context.max_transfer = context.device->info().max_operation_bytes;
  context.config.queues.max_send_sge = context.device->send_elements() - 1;
  context.attributes = config::default_attributes(c, *context.device);
  cq = context.device->cq();
  poll_batch = static_cast<int>(c.queues.poll_batch);
  if (auto memory = open_memory(options); !memory) return memory;
  if (auto opened = control.open(options.network); !opened) return opened;
  log_half_open_limit();
  resolve_addresses();
  if (auto watched = device_watch.open(control); !watched) return watched;
  if (auto posted = agent::post_first_receives(context); !posted) return posted;
  agent::open_in_place(context);
  // A simulation moves its clock in steps.
  if (options.network == nullptr) {
    publisher.open(*this);
    stalls.open(*this);
  }
  return {};
}

Result<void> EngineCore::reload_keys() {
  const std::string& file = context.config.security.key_file;
  if (file.empty()) {
    return base::fail(Status::bad_config, "read the keys again",
                      "this engine was opened without security.key_file",
                      "set security.key_file, and open another engine with it");
  }
  return control::KeyRing::load(file).map([&](control::KeyRing&& keys) {
    const std::string loaded = keys.names();
    control.set_keys(std::move(keys));
    context.recorder.record(observe::EventKind::keys, {loaded});
  });
}

void EngineCore::log_half_open_limit() const {
  const auto& c = context.config.connections;
  const std::uint32_t half_open = config::half_open_connections(c);
  if (c.handshakes <= half_open) return;
  base::log(LogLevel::info,
            "connections.handshakes = {}: only {} of connections.maximum = {} may be half-open, so "
            "peers beyond them wait; lower handshakes to {} or raise maximum to {}",
            c.handshakes, half_open, c.maximum, half_open, 4 * c.handshakes);
}

/// On RoCE a verb that names a peer waits for ARP, so the control port resolves first. It limits
/// what strangers can have sent to addresses of others.
void EngineCore::resolve_addresses() {
  const verbs::Place& place = context.device->place();
  std::array<std::uint8_t, 16> gid{};
  std::copy_n(place.gid.raw, gid.size(), gid.begin());
  control.set_reach(context.device->provider().reaches_other_hosts, gid);
  if (place.gid_type != GidType::roce_v1 && place.gid_type != GidType::roce_v2) return;
  const auto wait = [device = context.device.get()](const verbs::Place& from,
                                                    const control::Gid& peer) {
    return device->wait_for_neighbour(from, std::bit_cast<ibv_gid>(peer));
  };
  control.set_resolver(std::make_unique<control::CmResolver>(
      control, place, ::if_nametoindex(context.device->info().netdev.c_str()), wait));
}

Result<void> EngineCore::open_memory(const OpenOptions& options) {
  const Config& c = context.config;
  memory::ArenaOptions arena;
  arena.pool_bytes = engine::pool_bytes(c);
  arena.hugepages = c.memory.hugepages;
  arena.lock = c.memory.lock;
  arena.populate = !options.sparse;
  auto slab = memory::Arena::make(arena);
  if (!slab) return tl::unexpected(slab.error());
  context.arena = std::move(*slab);
  const std::span<std::byte> bytes = context.arena->slab();
  errno = 0;
  const ibv_mr* mr = context.device->register_slab(bytes);
  if (mr == nullptr) {
    const int error = errno;
    return tl::unexpected(memory::registration_error(
        base::format("register the pools, {} in all", base::bytes_text(bytes.size())), bytes.size(),
        error));
  }
  context.arena->set_lkey(mr->lkey);
  if (!agent::open_staging(context)) return tl::unexpected(base::out_of_memory());
  agent::open_element_lists(context);

  if (context.device->info().memory_windows) {
    auto windows = memory::WindowPool::make(context.device->provider(), context.device->pd(),
                                            c.memory.windows);
    if (!windows) return tl::unexpected(windows.error());
    context.windows = std::move(*windows);
  }
  // Keys of the application, and a credit cell per connection.
  const std::uint32_t most = options.registrations + c.connections.maximum;
  context.registrations = std::make_unique<memory::RegistrationTable>(context.device->provider(),
                                                                      context.device->pd(), most);
  return {};
}

void EngineCore::end_connections() noexcept {
  for (Agent& a : context.agents) {
    control.drop(agent::handshake_of(a));
    agent::begin_end(context, a, drain.goodbye());
  }
  constexpr int kMostRounds = 100000;
  for (int i = 0; i < kMostRounds && poll_completions() != 0; ++i) {
  }
  for (Agent& a : context.agents) {
    agent::complete_end(context, a);
    finish(a);
  }
}

void EngineCore::finish(Agent& a) noexcept {
  const agent::AgentId id = agent::id_of(a);
  connector.on_finish(a);
  sums.forget(a);
  agent::finish(context, a);
  // A connection that is made again keeps its counts.
  if (const Agent* const again = agent::find(context, id); again != nullptr)
    sums.update(*again, agent::snapshot(context, *again));
}

void EngineCore::end() noexcept {
  if (std::exchange(ending, true)) return;
  if (context.device == nullptr || context.arena == nullptr) return;
  (void)guard.enter();  // callbacks find the engine polling
  publisher.close(*this);
  drain.abort();
  if (calls != nullptr) rpc::end(*calls, drain.goodbye());
  if (context.registrations != nullptr) end_connections();
  if (calls != nullptr) rpc::run_reply_completions(*calls);
}

void EngineCore::end_with_poll() noexcept {
  destroyed = true;
  drain.abort();
  names.abort();
  // A poll looks for this only where it does more than handle completions.
  schedule.next_control = 0;
  if (calls != nullptr) rpc::keep_awake(*calls);
}

Result<void> EngineCore::audit() {
  if (guard.polling()) {
    return base::fail(Status::reentrant, "audit the engine", "called from inside a callback",
                      "call when poll() has returned");
  }
  return agent::audit(context)
      .and_then([&] { return context.registrations->audit(); })
      .and_then([&] { return calls != nullptr ? rpc::audit(*calls) : Result<void>(); })
      .and_then([&] { return context.arena->audit(); })
      .and_then([&] { return control.audit(); });
}

Result<void> EngineCore::check_access(Access asked) const {
  return config::check_access(context.config.queue_pair.access, asked, context.device->info(),
                              "the engine");
}

void EngineCore::abort() noexcept {
  application_timers.cancel_all();
  drain.abort();
  names.abort();
  device_watch.handler = nullptr;
  connector.abort();
  agent::abort(context);
  if (calls != nullptr) rpc::abort(*calls);
}

EngineCore::~EngineCore() {
  end();
  guard.end();
  if (context.device == nullptr || context.arena == nullptr) return;
  control.close();
  const bool unused = context.device->wait_for_local_accesses();
  if (context.registrations != nullptr) context.registrations->close();
  context.windows.close();
  agent::release_blocks(context);
  device_watch.close(control);
  calls.reset();
  context.device.reset();
  if (!unused) {
    base::log(LogLevel::error,
              "another thread still copies from or to this engine's memory, which therefore stays");
    (void)context.arena.release();
  }
  context.arena.reset();  // survives while the application holds buffers
}

Result<void> EngineCore::check_open(const char* asked) const {
  if (!ending && !drain.has_begun()) return {};
  return base::fail(Status::not_connected, asked,
                    ending ? "the engine is being destroyed" : "the engine drains",
                    "open another engine");
}

Result<Listener> EngineCore::listen(std::string_view address, const ListenOptions& options) {
  return check_open("listen").and_then([&] { return connector.listen(address, options, calls); });
}

Result<Listener> EngineCore::adopt_listener(int fd, const ListenOptions& options) {
  return check_open("adopt a listener").and_then([&] {
    return connector.adopt_listener(fd, options, calls);
  });
}

Result<Connection> EngineCore::connect(std::string_view address, const ConnectOptions& options) {
  return check_open("connect").and_then([&] { return connector.connect(address, options); });
}

Result<Connection> EngineCore::prepare(const PrepareOptions& options) {
  return check_open("prepare a connection").and_then([&] { return connector.prepare(options); });
}

Result<void> EngineCore::resolve(std::string_view name, const ResolveCallback& done) {
  if (!done) {
    return base::fail(Status::invalid_argument, "resolve a name", "an empty callback",
                      "give a callback");
  }
  return check_open("resolve a name").and_then([&] { return names.begin(name, done); });
}

Result<void> EngineCore::open_calls() {
  if (auto open = check_open("make remote calls possible"); !open || calls != nullptr) return open;
  return rpc::open(context, control, connector, *this).map([&](std::unique_ptr<rpc::Rpc> opened) {
    calls = std::move(opened);
    rpc::set_reply_writable_handler(*calls, reply_writable);
    rpc_qp_num = rpc::datagram_qp_num(*calls);
  });
}

Result<void> EngineCore::serve(Method method, const MethodHandler& handler) {
  if (guard.polling()) {
    return base::fail(Status::reentrant, "serve a method", "called from inside a callback",
                      "give the methods before polling, or between polls");
  }
  return open_calls().map([&] { rpc::serve(*calls, method, handler); });
}

Result<Session> EngineCore::open_session(std::string_view address, const SessionOptions& options) {
  return open_calls().and_then([&] { return rpc::open_session(*calls, address, options); });
}

}  // namespace detail

}  // namespace spinwire
