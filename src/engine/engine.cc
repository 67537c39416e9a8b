// Opening and closing an engine. Cold.
#include "spinwire/engine.h"

#include <errno.h>
#include <net/if.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/internals.h"
#include "base/log.h"
#include "base/units.h"
#include "engine/devices.h"
#include "engine/engine_core.h"
#include "rpc/client_session.h"

namespace spinwire {

tl::unexpected<Error> engine::misused(Status status, const char* asked) {
  switch (status) {
    case Status::forked_child:
      return base::fail(status, asked, "this process is a fork of the engine's owner",
                        "open an engine of its own in the child");
    case Status::not_connected:
      return base::fail(status, asked, "there is no engine: it was moved away, or never opened",
                        "call the one that Engine::open() answered");
    default:
      return base::fail(status, asked, "another thread than the one that opened the engine calls",
                        "give each thread an engine of its own");
  }
}

namespace detail {

using agent::Agent;

EngineCore::EngineCore(const Config& config, const Clock& clock, base::OwnerGuard owner)
    : guard(std::move(owner)),
      context(config, clock),
      control({config.connections.handshakes, config.connections.handshake_timeout,
               context.incarnation},
              context.clock, context.timers),
      device_watch(context, *this),
      connector(context, control, device_watch, *this, schedule) {
  guard.slot().core = this;
  context.slot = &guard.slot();
  schedule.control_interval = clock.ticks(config.engine.control_interval);
  if (config.engine.control == ControlMode::manual)
    schedule.next_control = engine::PollSchedule::kNever;
}

Result<void> EngineCore::open(const OpenOptions& options) {
  const Config& c = context.config;
  auto device = verbs::Device::open(engine::device_options(c, context.clock), options.providers);
  if (!device) return tl::unexpected(device.error());
  context.device = std::move(*device);
  context.config.queues.inline_bytes = context.device->info().inline_bytes;
  context.attributes = config::default_attributes(c, *context.device);
  cq = context.device->cq();
  poll_batch = static_cast<int>(c.queues.poll_batch);
  if (auto memory = open_memory(options.sparse); !memory) return memory;
  if (auto opened = control.open(options.network); !opened) return opened;
  resolve_addresses();
  if (auto watched = device_watch.open(control); !watched) return watched;
  return agent::post_first_receives(context);
}

/// On RoCE a verb that names a peer waits for ARP, so the control port resolves first.
void EngineCore::resolve_addresses() {
  const verbs::Place& place = context.device->place();
  if (place.gid_type != GidType::roce_v1 && place.gid_type != GidType::roce_v2) return;
  std::array<std::uint8_t, 16> gid{};
  std::copy_n(place.gid.raw, gid.size(), gid.begin());
  control.set_resolver(std::make_unique<control::CmAddressResolver>(
      control, gid, place.gid_type, ::if_nametoindex(context.device->info().netdev.c_str())));
}

Result<void> EngineCore::open_memory(bool sparse) {
  const Config& c = context.config;
  // The control pool: a credit cell per connection, the staging room of each operation and of each
  // datagram of remote calls; some more for messages about long calls when the send pool is empty.
  constexpr std::uint64_t kCellBlock = 256 + 64;
  const std::uint64_t staging = std::uint64_t{context.operations.capacity()} * agent::kStagingBytes;
  memory::ArenaOptions arena;
  arena.pool_bytes = {c.memory.send_bytes, c.memory.receive_bytes, c.memory.lease_bytes,
                      c.memory.rendezvous_bytes,
                      kCellBlock * c.connections.maximum + 2 * staging +
                          2 * c.rpc.send_depth * rpc::kLineBytes + 3 * memory::kChunkBytes};
  arena.hugepages = c.memory.hugepages;
  arena.lock = c.memory.lock;
  arena.populate = !sparse;
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
  context.staging_block = context.arena->allocate(memory::PoolId::control, staging);
  if (context.staging_block == nullptr) return tl::unexpected(base::out_of_memory());
  context.staging = context.staging_block->payload;

  if (context.device->info().memory_windows) {
    auto windows = memory::WindowPool::make(context.device->provider(), context.device->pd(),
                                            c.memory.windows);
    if (!windows) return tl::unexpected(windows.error());
    context.windows = std::move(*windows);
  }
  // The application's, and a credit cell per connection.
  const std::uint32_t most = (sparse ? 1024 : 65536) + c.connections.maximum;
  context.registrations = std::make_unique<memory::RegistrationTable>(context.device->provider(),
                                                                      context.device->pd(), most);
  return {};
}

void EngineCore::end_connection(Agent& a) noexcept {
  // A peer that was stopped during an access must not stop this engine.
  constexpr std::uint32_t kMostSteps = 64;
  agent::advance(context, a, agent::Event::aborted);
  const std::uint32_t steps = kMostSteps + context.registrations->size() + a.rendezvous.send_count;
  for (std::uint32_t i = 0; i < steps && a.stage != agent::Stage::over; ++i)
    (void)agent::run_setup_step(context, a);
  agent::finish(context, a);
}

void EngineCore::end_connections() noexcept {
  for (std::uint32_t i = 0; i < context.agents.capacity(); ++i) {
    if (!context.agents.in_use(i)) continue;
    Agent& a = context.agents.at(i);
    control.drop(a.setup.handshake);
    const bool speaks = a.state == ConnectionState::ready || (a.closing && !a.goodbye_sent);
    if (speaks && a.stage == agent::Stage::up && a.raw == nullptr) {
      // So that the peer need not wait for its time-out.
      a.goodbye_sent = agent::submit_control(context, a, agent::OperationKind::goodbye);
      (void)agent::flush(context, a);
    }
    agent::close(context, a);
    if (a.qp != nullptr) (void)context.device->to_error(a.qp);
  }
  constexpr int kMostRounds = 100000;
  for (int i = 0; i < kMostRounds && poll_completions() != 0; ++i) {
  }
  for (std::uint32_t i = 0; i < context.agents.capacity(); ++i) {
    if (context.agents.in_use(i)) end_connection(context.agents.at(i));
  }
}

void EngineCore::end() noexcept {
  if (std::exchange(ending, true)) return;
  if (context.device == nullptr || context.arena == nullptr) return;
  (void)guard.enter();  // callbacks find the engine polling
  if (calls != nullptr) rpc::end(*calls);
  if (context.registrations != nullptr) end_connections();
}

Result<void> EngineCore::audit() {
  if (guard.polling()) {
    return base::fail(Status::reentrant, "audit the engine",
                      "a callback asks, in the midst of a poll", "ask when poll() has returned");
  }
  if (auto good = agent::audit(context); !good) return good;
  if (auto good = context.registrations->audit(); !good) return good;
  if (calls != nullptr) {
    if (auto good = rpc::audit(*calls); !good) return good;
  }
  return context.arena->audit();
}

void EngineCore::abort() noexcept {
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
  for (std::uint32_t i = 0; i < context.receives.size(); ++i) {
    if (detail::Block* block = context.receives.memory(i); block != nullptr) detail::release(block);
  }
  if (context.staging_block != nullptr) detail::release(context.staging_block);
  device_watch.close(control);
  calls.reset();
  context.device.reset();
  if (!unused) {
    base::log(LogLevel::error,
              "another thread still copies from or to this engine's memory, which therefore stays");
    (void)context.arena.release();
  }
  context.arena.reset();  // lives on while the application holds buffers
}

Result<void> EngineCore::check_open(const char* asked) const {
  if (!ending) return {};
  return base::fail(Status::not_connected, asked, "the engine is being destroyed",
                    "open another engine");
}

Result<Listener> EngineCore::listen(std::string_view address, const ListenOptions& options) {
  if (auto open = check_open("listen"); !open) return tl::unexpected(open.error());
  return connector.listen(address, options, calls);
}

Result<Connection> EngineCore::connect(std::string_view address, const ConnectOptions& options) {
  if (auto open = check_open("connect"); !open) return tl::unexpected(open.error());
  return connector.connect(address, options);
}

Result<Connection> EngineCore::prepare(const PrepareOptions& options) {
  if (auto open = check_open("prepare a connection"); !open) return tl::unexpected(open.error());
  return connector.prepare(options);
}

Result<void> EngineCore::open_calls() {
  if (calls != nullptr) return {};
  auto opened = rpc::open(context, control, connector, *this);
  if (!opened) return tl::unexpected(opened.error());
  calls = std::move(*opened);
  rpc_qp_num = calls->local.qp_num;
  return {};
}

Result<void> EngineCore::serve(Method method, const MethodHandler& handler) {
  if (guard.polling()) {
    return base::fail(Status::reentrant, "serve a method", "a callback asks",
                      "give the methods before polling, or between polls");
  }
  if (auto open = check_open("make remote calls possible"); !open) return open;
  if (auto opened = open_calls(); !opened) return opened;
  rpc::serve(*calls, method, handler);
  return {};
}

Result<Session> EngineCore::open_session(std::string_view address, const SessionOptions& options) {
  if (auto open = check_open("make remote calls possible"); !open)
    return tl::unexpected(open.error());
  if (auto opened = open_calls(); !opened) return tl::unexpected(opened.error());
  return calls->dialogues.open(address, options).map([this](const rpc::ClientSession* c) {
    return detail::make<Session>(&guard.slot(), rpc::id_of(*c));
  });
}

}  // namespace detail

}  // namespace spinwire
