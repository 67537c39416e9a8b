// Access to the bytes of memory that operations may be using: shared, to read them, or exclusive,
// to change them. Operations need no such access; it finds mistakes of a program.
//
// What counts as use: operations of the engine's connections that have not ended, deferred ones
// included. A read(), a receive of a raw connection and a rendezvous message that arrives change
// their memory, all others read it. Of a rendezvous message, the whole buffer or region is in use.
//
// A call that has not ended reads its request, also while it waits in the backlog, and changes its
// CallOptions::reply_into. A server reads the memory of a reply until the client certainly has it,
// which the server often learns only with the next call in its place; a reply's callback tells
// when. Requests and replies that the library copied do not count, and of one that the device sends
// as a datagram, the whole buffer is in use until the device reports it sent.
//
// What peers do with exposed or leased memory is not looked at.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "spinwire/buffer.h"
#include "spinwire/export.h"

/// Whether accesses are checked where the caller does not say: in builds without NDEBUG, like
/// assert(). Without the check, an access costs nothing. Define it alike in all files of a program.
#ifndef SPINWIRE_CHECK_ACCESS
#ifdef NDEBUG
#define SPINWIRE_CHECK_ACCESS false
#else
#define SPINWIRE_CHECK_ACCESS true
#endif
#endif

namespace spinwire {

class Engine;

namespace detail {

struct EngineSlot;

/// What both kinds of access have in common.
class SPINWIRE_API MemoryAccess {
 public:
  MemoryAccess(const MemoryAccess&) = delete;
  MemoryAccess& operator=(const MemoryAccess&) = delete;
  explicit operator bool() const noexcept { return static_cast<bool>(memory_); }

 protected:
  MemoryAccess() noexcept = default;
  MemoryAccess(MemoryAccess&& other) noexcept
      : memory_(std::move(other.memory_)),
        slot_(std::exchange(other.slot_, nullptr)),
        id_(other.id_),
        checked_(other.checked_) {}
  MemoryAccess& operator=(MemoryAccess&& other) noexcept {
    if (this != &other) {
      end();
      memory_ = std::move(other.memory_);
      slot_ = std::exchange(other.slot_, nullptr);
      id_ = other.id_;
      checked_ = other.checked_;
    }
    return *this;
  }
  ~MemoryAccess() { end(); }
  void begin(const BufferSlice& memory) noexcept { memory_ = memory; }
  /// `must`: ends the program instead of giving no access.
  void begin_checked(const Engine& engine, const BufferSlice& memory, bool exclusive, bool must,
                     bool checked) noexcept;
  void end() noexcept {
    if (slot_ != nullptr) end_checked();
    memory_ = {};
  }

  BufferSlice memory_;

 private:
  void end_checked() noexcept;

  EngineSlot* slot_ = nullptr;  ///< null: not recorded
  std::uint64_t id_ = 0;
  bool checked_ = false;
};

}  // namespace detail

/// Reads memory that no operation changes and nobody else has exclusively. Holds a reference to the
/// memory. Move-only; drop it on the engine's thread. Set-up when checked, and hot otherwise.
class SPINWIRE_API SharedAccess : public detail::MemoryAccess {
 public:
  SharedAccess() noexcept = default;
  /// Empty if an operation is changing the bytes, an ExclusiveAccess has some of them, the slice or
  /// the engine is empty, the engine is another thread's, or memory has run out. Takes time in
  /// proportion to the operations under way. `checked`: see open().
  [[nodiscard]] static SharedAccess try_open(const Engine& engine, const BufferSlice& memory,
                                             bool checked = SPINWIRE_CHECK_ACCESS) noexcept {
    SharedAccess access;
    access.begin_checked(engine, memory, false, false, checked);
    return access;
  }
  /// If `checked`, ends the program, with a message in the log and on stderr, where try_open()
  /// gives no access; and likewise at the end of the access, if an operation has begun to change
  /// the bytes meanwhile and has not ended.
  [[nodiscard]] static SharedAccess open(const Engine& engine, const BufferSlice& memory,
                                         bool checked = SPINWIRE_CHECK_ACCESS) noexcept {
    SharedAccess access;
    if (checked) {
      access.begin_checked(engine, memory, false, true, true);
    } else {
      access.begin(memory);
    }
    return access;
  }
  /// The bytes; none if empty.
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return memory_.bytes(); }
};

/// Changes memory that no operation uses and nobody else has access to. As SharedAccess, otherwise.
class SPINWIRE_API ExclusiveAccess : public detail::MemoryAccess {
 public:
  ExclusiveAccess() noexcept = default;
  /// Empty if an operation uses the bytes or another access has some of them, and for the other
  /// reasons of SharedAccess::try_open().
  [[nodiscard]] static ExclusiveAccess try_open(const Engine& engine, const BufferSlice& memory,
                                                bool checked = SPINWIRE_CHECK_ACCESS) noexcept {
    ExclusiveAccess access;
    access.begin_checked(engine, memory, true, false, checked);
    return access;
  }
  /// See SharedAccess::open(); any operation on the bytes counts.
  [[nodiscard]] static ExclusiveAccess open(const Engine& engine, const BufferSlice& memory,
                                            bool checked = SPINWIRE_CHECK_ACCESS) noexcept {
    ExclusiveAccess access;
    if (checked) {
      access.begin_checked(engine, memory, true, true, true);
    } else {
      access.begin(memory);
    }
    return access;
  }
  /// The bytes; none if empty.
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return memory_.bytes(); }
};

}  // namespace spinwire
