// Public API of an engine and its listeners. Cold, except for poll(), flush() and allocate().
#include <algorithm>
#include <bit>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/internals.h"
#include "engine/api/operate.h"
#include "engine/engine_description.h"
#include "engine/engine_snapshot.h"
#include "spinwire/engine.h"

namespace spinwire {

using detail::EngineCore;

namespace {

/// The slot of an Engine without an engine: that of a closed one.
constinit detail::EngineSlot no_engine{base::OwnerGuard::kEnded, nullptr};

/// Destroys an engine. In a forked child, abandons it: the parent still uses the device and the
/// slabs.
void close(std::unique_ptr<EngineCore>& core) noexcept {
  if (core == nullptr) return;
  if (core->guard.diagnose() == Status::forked_child) {
    static EngineCore* kept = nullptr;
    core->kept = std::exchange(kept, core.get());
    (void)core.release();
    return;
  }
  // The callback's poll, or the destruction that runs it, is still using the engine.
  if (core->guard.polling()) return core.release()->end_with_poll();
  EngineCore* const ended = core.get();
  ended->end();
  if (core.get() == ended) return core.reset();
  delete ended;  // a callback has destroyed the engine, too
}

}  // namespace

Engine::Engine() noexcept : slot_(&no_engine) {}
Engine::Engine(Engine&& other) noexcept
    : slot_(std::exchange(other.slot_, &no_engine)), core_(std::move(other.core_)) {}
Engine& Engine::operator=(Engine&& other) noexcept {
  if (this == &other) return *this;
  close(core_);
  slot_ = std::exchange(other.slot_, &no_engine);
  core_ = std::move(other.core_);
  return *this;
}
Engine::~Engine() { close(core_); }
Engine::Engine(std::unique_ptr<EngineCore> core) noexcept
    : slot_(&core->guard.slot()), core_(std::move(core)) {}

Result<Engine> detail::open_engine(const Config& config, const Clock& clock,
                                   const OpenOptions& options) {
  return base::no_throw("open an engine", [&]() -> Result<Engine> {
    if (auto good = config.check(); !good) return tl::unexpected(good.error());
    auto guard = base::OwnerGuard::create();
    if (!guard) return tl::unexpected(guard.error());
    auto core = std::make_unique<EngineCore>(config, clock, std::move(*guard));
    if (auto opened = core->open(options); !opened) return tl::unexpected(opened.error());
    return detail::make<Engine>(std::move(core));
  });
}

Result<Engine> Engine::open(const Config& config, const Clock& clock) {
  return detail::open_engine(config, clock);
}

int Engine::poll() noexcept {
  if (base::OwnerGuard::standing(*slot_) != 0) [[unlikely]]
    return -static_cast<int>(base::OwnerGuard::diagnose(*slot_));
  return core_->poll_owned();
}
int Engine::poll_control() noexcept {
  return core_ != nullptr ? core_->poll_control() : -static_cast<int>(Status::not_connected);
}
Status Engine::flush() noexcept {
  return core_ != nullptr ? core_->flush() : Status::not_connected;
}

Result<Listener> Engine::listen(std::string_view address, const ListenOptions& options) {
  return engine::set_up(*slot_, "listen", [&] { return core_->listen(address, options); });
}

Result<Connection> Engine::connect(std::string_view address, const ConnectOptions& options) {
  return engine::set_up(*slot_, "connect", [&] { return core_->connect(address, options); });
}

Result<Addresses> resolve(std::string_view name) {
  return base::no_throw("resolve a name", [&] { return control::resolve_name(name); });
}

Result<void> Engine::resolve(std::string_view name, const ResolveCallback& done) {
  return engine::set_up(*slot_, "resolve a name", [&] { return core_->resolve(name, done); });
}

Result<void> Engine::reload_keys() {
  return engine::set_up(*slot_, "read the keys again", [&] { return core_->reload_keys(); });
}

Result<Connection> Engine::prepare(const PrepareOptions& options) {
  return engine::set_up(*slot_, "prepare a connection", [&] { return core_->prepare(options); });
}

namespace {

/// Sets why there is no block.
[[gnu::cold, gnu::noinline]] void explain_refusal(EngineCore& core, std::size_t size,
                                                  Pool pool) noexcept {
  const bool fits = pool != Pool::receive && core.context.arena->fits(engine::pool_id(pool), size);
  core.allocate_status = fits ? Status::no_buffer : Status::invalid_argument;
}

/// Null: EngineCore::allocate_status says why. The engine's receives must not lack blocks.
[[gnu::always_inline]] inline detail::Block* allocate_block(EngineCore& core, std::size_t size,
                                                            Pool pool) noexcept {
  memory::Arena& arena = *core.context.arena;
  detail::Block* block = nullptr;
  if (pool == Pool::send) [[likely]] {
    block = arena.allocate(memory::PoolId::send, size);
  } else if (pool != Pool::receive) {
    block = arena.allocate(engine::pool_id(pool), size);
  }
  if (block == nullptr) [[unlikely]]
    explain_refusal(core, size, pool);
  return block;
}

}  // namespace

Buffer Engine::allocate(std::size_t size, Pool pool) noexcept {
  if (!base::OwnerGuard::is_owned(*slot_)) [[unlikely]]
    return {};
  detail::Block* const block = allocate_block(*core_, size, pool);
  if (block == nullptr) [[unlikely]]
    return {};
  return detail::make<Buffer>(block, size);
}

BufferSlice Engine::allocate(std::size_t size, const AllocateOptions& options) noexcept {
  if (!base::OwnerGuard::is_owned(*slot_)) return {};
  constexpr std::size_t kMostAlignment = std::size_t{2} << 20;
  const std::size_t alignment = options.alignment;
  const std::size_t slack = std::max(alignment, alignof(detail::Block)) - alignof(detail::Block);
  if (!std::has_single_bit(alignment) || alignment > kMostAlignment || size == 0 ||
      size > ~std::size_t{0} - slack) {
    core_->allocate_status = Status::invalid_argument;
    return {};
  }
  detail::Block* const block = allocate_block(*core_, size + slack, options.pool);
  if (block == nullptr) return {};
  const auto start = reinterpret_cast<std::uintptr_t>(block->payload);
  const Buffer whole = detail::make<Buffer>(block, size + slack);
  BufferSlice aligned = whole.slice(-start & (alignment - 1), size);
  if (options.zeroed) std::memset(aligned.data(), 0, size);
  return aligned;
}

Status Engine::allocate_status() const noexcept {
  if (!base::OwnerGuard::is_owned(*slot_)) return base::OwnerGuard::diagnose(*slot_);
  return core_->allocate_status;
}

Result<MemoryRegion> Engine::register_memory(std::span<std::byte> bytes, Access access,
                                             MemoryFlags flags) {
  return engine::set_up(*slot_, "register memory", [&]() -> Result<MemoryRegion> {
    if (auto good = core_->check_access(access); !good) return tl::unexpected(good.error());
    const auto usable = memory::check_memory_flags(flags, device(), bytes, false);
    if (!usable) return tl::unexpected(usable.error());
    auto registered =
        core_->context.registrations->register_memory(bytes, access, nullptr, *usable);
    if (!registered) return tl::unexpected(registered.error());
    return detail::make<MemoryRegion>(std::move(registered->whole), registered->remote);
  });
}

Result<RemoteRegion> Engine::expose(const BufferSlice& slice, Access access, MemoryFlags flags) {
  return engine::set_up(*slot_, "expose memory", [&]() -> Result<RemoteRegion> {
    if (auto good = core_->check_access(access); !good) return tl::unexpected(good.error());
    const auto usable = memory::check_memory_flags(flags, device(), slice.bytes(), true);
    if (!usable) return tl::unexpected(usable.error());
    return agent::check_owner(core_->context, slice).and_then([&] {
      return core_->context.registrations->expose(slice, access, nullptr,
                                                  memory::RegistrationTable::kApplication, *usable);
    });
  });
}

Status Engine::revoke(const RemoteRegion& region) {
  if (!base::OwnerGuard::is_owned(*slot_)) return base::OwnerGuard::diagnose(*slot_);
  return core_->context.registrations->revoke(region.rkey);
}

Status Engine::set_device_event_handler(const DeviceEventCallback& handler) noexcept {
  if (!base::OwnerGuard::is_owned(*slot_)) return base::OwnerGuard::diagnose(*slot_);
  core_->device_watch.handler = handler;
  return Status::ok;
}

Status Engine::set_reply_writable_handler(const ReplyWritableCallback& handler) noexcept {
  if (!base::OwnerGuard::is_owned(*slot_)) return base::OwnerGuard::diagnose(*slot_);
  core_->reply_writable = handler;
  if (core_->calls != nullptr) rpc::set_reply_writable_handler(*core_->calls, handler);
  return Status::ok;
}

Result<void> Engine::audit() const {
  return engine::set_up(*slot_, "audit the engine", [&] { return core_->audit(); });
}

const Config& Engine::config() const noexcept {
  static const Config none;
  const EngineCore* const core = engine::checked_core_of(slot_);
  return core != nullptr ? core->context.config : none;
}
const Clock& Engine::clock() const noexcept {
  static const Clock real = Clock::real();
  const EngineCore* const core = engine::checked_core_of(slot_);
  return core != nullptr ? core->context.clock : real;
}
std::string_view Engine::device_name() const noexcept { return device().name; }
const DeviceInfo& Engine::device() const noexcept {
  static const DeviceInfo none;
  const EngineCore* const core = engine::checked_core_of(slot_);
  return core != nullptr ? core->context.device->info() : none;
}

EngineStats Engine::stats() const noexcept {
  const EngineCore* const core = engine::checked_core_of(slot_);
  if (core == nullptr) return {};
  EngineStats stats = agent::stats(core->context);
  engine::add_control_counters(core->control, stats);
  return stats;
}

EngineSnapshot Engine::snapshot() const noexcept {
  const EngineCore* const core = engine::checked_core_of(slot_);
  return core != nullptr ? engine::snapshot(*core) : EngineSnapshot{};
}

std::string Engine::describe() const noexcept try {
  const EngineCore* const core = engine::checked_core_of(slot_);
  return core != nullptr ? engine::describe(*core) : std::string();
} catch (const std::exception&) {
  return {};
}

MemoryStats Engine::memory_stats(Pool pool) const noexcept {
  const EngineCore* const core = engine::checked_core_of(slot_);
  return core != nullptr ? engine::memory_stats(*core, pool) : MemoryStats{};
}

Listener::Listener(Listener&& other) noexcept
    : slot_(std::exchange(other.slot_, nullptr)),
      index_(other.index_),
      generation_(other.generation_) {}
Listener& Listener::operator=(Listener&& other) noexcept {
  Listener taken(std::move(other));
  std::swap(slot_, taken.slot_);
  std::swap(index_, taken.index_);
  std::swap(generation_, taken.generation_);
  return *this;
}
Listener::~Listener() {
  // In a forked child, the socket still belongs to the parent.
  if (EngineCore* const core = engine::checked_core_of(slot_); core != nullptr)
    core->control.stop_listening({index_, generation_});
}
Listener::operator bool() const noexcept {
  const EngineCore* const core = engine::checked_core_of(slot_);
  return core != nullptr && core->control.listens({index_, generation_});
}
std::string Listener::address() const noexcept try {
  const EngineCore* const core = engine::checked_core_of(slot_);
  return core != nullptr ? core->control.address_of({index_, generation_}) : std::string();
} catch (const std::bad_alloc&) {
  return {};
}

}  // namespace spinwire
