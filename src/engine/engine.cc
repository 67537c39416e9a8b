// Opening and closing an engine. Cold.
#include "spinwire/engine.h"

#include <errno.h>
#include <fmt/format.h>

#include <utility>

#include "base/error.h"
#include "base/units.h"
#include "control/local_network.h"
#include "engine/devices.h"
#include "engine/engine_core.h"

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
      handshakes(2 * config.connections.handshakes) {
  context.core = this;
  guard.slot().core = this;
  context.slot = &guard.slot();
  control_interval = clock.ticks(config.engine.control_interval);
  next_control = config.engine.control == ControlMode::manual ? ~std::uint64_t{0} : 0;
}

Result<void> EngineCore::open(std::span<const verbs::Provider* const> from) {
  const Config& c = context.config;
  auto device = verbs::Device::open(engine::device_options(c, context.clock), from);
  if (!device) return tl::unexpected(device.error());
  context.device = std::move(*device);
  context.config.queues.inline_bytes = context.device->info().inline_bytes;
  context.attributes = config::default_attributes(c, *context.device);
  cq = context.device->cq();
  poll_batch = static_cast<int>(c.queues.poll_batch);

  // Control pool: a credit cell per connection, the staging room of each operation, and of each
  // datagram of remote calls; some more for messages about long calls when the send pool is dry.
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
        fmt::format("register the pools, {} in all", base::bytes_text(bytes.size())), bytes.size(),
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
  auto set = control::EpollSet::open();
  if (!set) return tl::unexpected(set.error());
  epoll = std::move(*set);
  if (host != nullptr) epoll.follow(host->stirred());
  if (auto watched = watch_device(); !watched) return watched;
  return agent::post_first_receives(context);
}

void EngineCore::end_connection(Agent& a) noexcept {
  // A peer that was stopped in the midst of an access must not stop us.
  constexpr std::uint32_t kMostSteps = 64;
  a.stage = a.qp != nullptr ? agent::Stage::destroy : agent::Stage::conceal;
  const std::uint32_t steps = kMostSteps + context.registrations->size() + a.rendezvous.send_count;
  for (std::uint32_t i = 0; i < steps && a.stage != agent::Stage::over; ++i)
    (void)agent::advance(context, a);
  agent::finish(context, a);
}

void EngineCore::end_connections() noexcept {
  for (std::uint32_t i = 0; i < context.agents.capacity(); ++i) {
    if (!context.agents.in_use(i)) continue;
    Agent& a = context.agents.at(i);
    if (a.setup.exchange != agent::kNone) drop(handshakes.at(a.setup.exchange));
    const bool speaks = a.state == ConnectionState::ready || (a.closing && !a.goodbye_sent);
    if (speaks && a.stage == agent::Stage::up && a.raw == nullptr) {
      // The peer shall not have to find out by itself.
      a.goodbye_sent = agent::submit_control(context, a, agent::OperationKind::goodbye);
      (void)agent::flush(context, a);
    }
    agent::close(context, a);
    if (a.qp != nullptr) (void)context.device->to_error(a.qp);
  }
  constexpr int kMostRounds = 100000;
  for (int i = 0; i < kMostRounds && drain_completions() != 0; ++i) {
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

void EngineCore::fall_silent() noexcept {
  on_device_event = nullptr;
  for (auto& listening : listeners) {
    if (listening == nullptr) continue;
    listening->options.on_accept = nullptr;
    listening->options.handlers = {};
  }
  agent::fall_silent(context);
  if (calls != nullptr) rpc::abort(*calls);
}

EngineCore::~EngineCore() {
  end();
  guard.end();
  if (context.device == nullptr || context.arena == nullptr) return;
  for (std::uint32_t i = 0; i < handshakes.capacity(); ++i) {
    if (handshakes.in_use(i)) drop(handshakes.at(i));
  }
  for (auto& listening : listeners) {
    if (listening != nullptr && !listening->cm) epoll.remove(listening->socket.fd());
  }
  if (context.registrations != nullptr) context.registrations->close();
  context.windows.close();
  for (std::uint32_t i = 0; i < context.receives.size(); ++i) {
    if (detail::Block* block = context.receives.memory(i); block != nullptr) detail::release(block);
  }
  if (context.staging_block != nullptr) detail::release(context.staging_block);
  if (device_watched) epoll.remove(context.device->context()->async_fd);
  calls.reset();
  context.device.reset();
  context.arena.reset();  // lives on while the application holds buffers
}

}  // namespace detail

}  // namespace spinwire
