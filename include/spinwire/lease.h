// Leases: memory of a peer that is ours to use for a time, and memory of ours that a peer uses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

#include "spinwire/buffer.h"
#include "spinwire/callback.h"
#include "spinwire/clock.h"
#include "spinwire/connection.h"
#include "spinwire/export.h"
#include "spinwire/status.h"

namespace spinwire {

/// What of a lease an owner has refused; the Status beside it says what kind of error that is.
enum class LeaseRefusal : std::uint8_t {
  none = 0,
  too_long,    ///< more bytes than leases.max_bytes there (Status::limit)
  misaligned,  ///< no power of two, or above leases.max_alignment there (limit)
  too_many,    ///< leases.count there is reached (limit)
  too_much,    ///< leases.total_bytes there is reached (limit)
  no_room,     ///< its pool memory.lease_bytes, its keys or its records are used up (no_buffer)
  no_right,    ///< none of the rights asked for may be given (remote_access)
  bad_time,    ///< longer than leases.max_duration there, or nothing (limit)
  over,        ///< the lease has ended (lease_expired)
  unwanted,    ///< its application did not take what was leased to it (refused)
  closing,     ///< it closes the connection (flushed)
};
SPINWIRE_API std::string_view to_string(LeaseRefusal refusal) noexcept;

/// What is asked for with a lease.
struct LeaseOptions {
  Access access = Access::remote_read_write;
  Nanoseconds time = std::chrono::seconds(60);  ///< more than the guard interval, up to 1 h
  std::uint32_t alignment = 8;                  ///< of requested memory; bytes, a power of two
};

/// Names memory that we have leased to a peer, until it is back.
struct LeaseId {
  std::uint32_t value = ~std::uint32_t{0};
  explicit operator bool() const noexcept { return value != ~std::uint32_t{0}; }
  friend bool operator==(const LeaseId&, const LeaseId&) noexcept = default;
};

/// Memory of a peer that is leased to us. Owns the lease: dropping it releases the memory, behind
/// all operations that were started on it. Empty once the lease was given up, the connection has
/// ended or the engine is gone. To be used and dropped on the engine's thread, in callbacks too;
/// may outlive its engine. Movable. Hot.
class SPINWIRE_API RemoteMemory {
 public:
  RemoteMemory() noexcept = default;
  RemoteMemory(RemoteMemory&& other) noexcept
      : slot_(std::exchange(other.slot_, nullptr)), lease_(std::exchange(other.lease_, 0)) {}
  RemoteMemory& operator=(RemoteMemory&& other) noexcept {
    if (this != &other) {
      release();
      slot_ = std::exchange(other.slot_, nullptr);
      lease_ = std::exchange(other.lease_, 0);
    }
    return *this;
  }
  RemoteMemory(const RemoteMemory&) = delete;
  RemoteMemory& operator=(const RemoteMemory&) = delete;
  ~RemoteMemory() { release(); }

  /// Whether there is a lease, over or not.
  explicit operator bool() const noexcept { return static_cast<bool>(region()); }
  /// All of the memory, or a part of it, for the operations of the lease's connection; empty if
  /// there is no lease, or for a part that does not lie within it. The region names the lease, not
  /// a key: an operation with it answers lease_expired once operations may not be started any more,
  /// invalid_argument on another connection. To pass it on, see detach().
  [[nodiscard]] RemoteRegion region() const noexcept;
  [[nodiscard]] RemoteRegion slice(std::uint64_t offset, std::uint64_t size) const noexcept {
    return region().slice(offset, size);
  }
  /// Bytes.
  [[nodiscard]] std::uint64_t size() const noexcept { return region().length; }
  /// The rights that the owner gave: those asked for as far as it gives them to this connection.
  [[nodiscard]] Access access() const noexcept { return region().access; }
  /// How long operations may be started for still, 0: no more. It is leases.guard less than the
  /// lease has been counted from when we asked for it, or from when it came.
  [[nodiscard]] Nanoseconds time_left() const noexcept;
  [[nodiscard]] Connection connection() const noexcept;

  /// Asks for `time` from now on; done() tells whether it was granted, else the lease ends as
  /// before. One call at a time is under way for a lease. Errors: invalid_argument (a time that is
  /// none), lease_expired (too late), would_block (a call is under way, or too much waits to be
  /// told to the peer), not_connected, wrong_thread, forked_child.
  Status renew(Nanoseconds time, const LeaseCallback& done = {});
  /// Gives the memory back for the owner's application to see: its on_returned tells of it, behind
  /// all that was written. Empties the handle if accepted. Errors: as renew().
  Status give_back(const LeaseCallback& done = {});
  /// Gives the memory up, as dropping the handle does. A no-op when empty.
  void release() noexcept;
  /// Lets go of the lease without ending it: the region with its key, which nothing here looks
  /// after. It can be passed on as bytes. The lease ends when its time is over, and with it what is
  /// done through the key, which then costs the connection. Empty if there is none.
  [[nodiscard]] RemoteRegion detach() noexcept;

 private:
  friend struct detail::Internals;

  RemoteMemory(detail::EngineSlot* slot, std::uint32_t lease) noexcept
      : slot_(slot), lease_(lease) {}

  detail::EngineSlot* slot_ = nullptr;
  std::uint32_t lease_ = 0;  ///< 0: none
};

/// How a call about a lease ended.
struct LeaseReply {
  Status status = Status::ok;
  LeaseRefusal refusal = LeaseRefusal::none;
  LeaseId lease;        ///< of Connection::lease(): what was leased, if ok
  Nanoseconds time{0};  ///< granted
  RemoteMemory memory;  ///< of Connection::request_memory(): to be moved away; else it is released
};

/// Why memory of ours came back.
enum class ReturnedBy : std::uint8_t {
  give_back,  ///< the peer gave it back for us to see
  release,    ///< the peer has no more use for it
  expiry,     ///< its time was over
  recall,     ///< Connection::recall(), or Connection::revoke()
  refusal,    ///< the peer did not take what was leased to it
  end,        ///< the connection has ended
};
SPINWIRE_API std::string_view to_string(ReturnedBy how) noexcept;

/// Memory of ours that no peer can reach any more.
struct Returned {
  LeaseId lease;
  ReturnedBy how = ReturnedBy::release;
  bool requested = false;  ///< a block of our pool that the peer asked for; else ours, leased to it
  BufferSlice memory;      ///< copy it to keep the memory
};

}  // namespace spinwire
