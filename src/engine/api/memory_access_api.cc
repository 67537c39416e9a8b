// Public API of checked accesses to memory.
#include <cstdio>
#include <new>
#include <utility>

#include "agent/memory_use.h"
#include "base/internals.h"
#include "base/log_message.h"
#include "engine/api/operate.h"
#include "rpc/memory_use.h"
#include "spinwire/engine.h"
#include "spinwire/memory_access.h"

namespace spinwire::detail {
namespace {

/// A mistake of the program, which it asked to be told of.
[[noreturn]] void stop(const char* what) noexcept {
  base::log(LogLevel::error, "a checked access to memory: {}", what);
  (void)std::fprintf(stderr, "spinwire: a checked access to memory: %s\n", what);  // as assert()
  __builtin_trap();
}

/// What operations, calls and replies that have not ended do with any of the bytes.
agent::MemoryUse use_of(EngineCore& core, std::span<const std::byte> bytes) noexcept {
  agent::MemorySearch search(bytes);
  agent::see_operations(core.context, search);
  if (core.calls != nullptr) rpc::see_calls(*core.calls, search);
  return search.found();
}

/// Why the access cannot be given; null: it can.
const char* obstacle(EngineCore& core, std::span<const std::byte> bytes, bool exclusive) noexcept {
  if (bytes.empty()) return "there are no bytes";
  if (core.accesses.has_conflict(bytes, exclusive)) return "another access has some of the bytes";
  const agent::MemoryUse use = use_of(core, bytes);
  if (use == agent::MemoryUse::changed) return "an operation is changing the bytes";
  return exclusive && use == agent::MemoryUse::read ? "an operation is reading the bytes" : nullptr;
}

}  // namespace

void MemoryAccess::begin_checked(const Engine& engine, const BufferSlice& memory, bool exclusive,
                                 bool must, bool checked) noexcept {
  EngineCore* const core = core_of(engine);
  const char* why = core == nullptr || !base::OwnerGuard::is_owned(*core->context.slot)
                        ? "the engine is empty, or another thread's"
                        : obstacle(*core, memory.bytes(), exclusive);
  try {
    if (why == nullptr) id_ = core->accesses.add(memory.bytes(), exclusive);
  } catch (const std::bad_alloc&) {
    why = "memory has run out";
  }
  if (why != nullptr && must) stop(why);
  if (why != nullptr) return;
  memory_ = memory;
  slot_ = core->context.slot;
  checked_ = checked;
}

void MemoryAccess::end_checked() noexcept {
  EngineCore* const core = engine::checked_core_of(std::exchange(slot_, nullptr));
  if (core == nullptr) return;
  const bool exclusive = core->accesses.remove(id_);
  if (!checked_) return;
  const agent::MemoryUse use = use_of(*core, memory_.bytes());
  if (use == agent::MemoryUse::changed) stop("an operation began to change the bytes meanwhile");
  if (exclusive && use != agent::MemoryUse::none)
    stop("an operation began to read the bytes meanwhile");
}

}  // namespace spinwire::detail
