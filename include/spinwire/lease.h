// Leases: a peer's memory that we may use for a limited time, and our memory that a peer may use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "spinwire/buffer.h"
#include "spinwire/callback.h"
#include "spinwire/clock.h"
#include "spinwire/connection.h"
#include "spinwire/export.h"
#include "spinwire/status.h"

namespace spinwire {

/// Why the owner refused a lease. The Status in brackets accompanies the reason.
enum class LeaseRefusal : std::uint8_t {
  none = 0,      ///< granted
  too_long,      ///< longer than the owner's leases.max_bytes (limit)
  misaligned,    ///< no power of two, or above the owner's leases.max_alignment (limit)
  too_many,      ///< the owner's leases.count is reached (limit)
  too_much,      ///< the owner's leases.total_bytes is reached (limit)
  no_room,       ///< the owner's pool memory.lease_bytes, keys or records are used up (no_buffer)
  no_right,      ///< the owner gives none of the rights (remote_access)
  bad_duration,  ///< 0, or longer than the owner's leases.max_duration (limit)
  over,          ///< the lease has ended (lease_expired)
  unwanted,      ///< the peer's application did not take the memory, or give it (refused)
  closing,       ///< the connection is closing (flushed)
};
/// The name, as written in the header. Any thread; never allocates.
SPINWIRE_API std::string_view to_string(LeaseRefusal refusal) noexcept;

/// Terms of a lease. The holder starts no operation after `duration` less leases.guard. The owner's
/// device enforces the end, and on_returned runs, later: after `duration` and the longest time for
/// which a device repeats an operation, 4 * 4.096 us * 2^ack_timeout * (retry_count + 1), at most
/// 1 h. With the default settings these are 2.1 s more.
struct LeaseOptions {
  Access access = Access::remote_read_write;        ///< rights of the holder
  Nanoseconds duration = std::chrono::seconds(60);  ///< more than leases.guard, up to 1 h
  std::uint32_t alignment = 8;  ///< of requested memory, in bytes; a power of two
  /// The application's own, for the peer: RemoteMemory::tag() of leased memory,
  /// MemoryRequest::tag() of a request. 0: none.
  std::uint64_t tag = 0;
};

/// Most bytes of the text of a refused request for memory.
inline constexpr std::size_t kMemoryRefusalTextMax = 40;

/// The peer asks for memory by Connection::request_memory(), within our limits; nothing has been
/// taken for it yet. Valid during on_memory_request, which accepts or refuses it; the last call
/// counts. A request that is neither accepted nor refused is refused with the code 0. Hot.
class MemoryRequest {
 public:
  MemoryRequest(const MemoryRequest&) = delete;
  MemoryRequest& operator=(const MemoryRequest&) = delete;

  /// Bytes that the peer asks for.
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  /// What the peer asks for. At least one of the rights is allowed; those that are not are left
  /// out.
  [[nodiscard]] const LeaseOptions& options() const noexcept { return options_; }
  /// The tag that the peer gave.
  [[nodiscard]] std::uint64_t tag() const noexcept { return options_.tag; }
  /// Gives the memory. The lease has the request's tag. The pool may still have no block.
  void accept() noexcept { accept(options_.tag); }
  /// Gives the memory, as a lease with this tag.
  void accept(std::uint64_t tag) noexcept {
    accepted_ = true;
    lease_tag_ = tag;
  }
  /// Refuses. The peer's callback gets `refused`, this code, and up to kMemoryRefusalTextMax bytes
  /// of the text; '?' replaces bytes that are not printable ASCII. The text is copied.
  void refuse(std::uint32_t code, std::string_view text) noexcept {
    accepted_ = false;
    code_ = code;
    length_ = text.copy(text_, sizeof text_);
  }

 private:
  friend struct detail::Internals;

  MemoryRequest(std::uint64_t bytes, const LeaseOptions& options) noexcept
      : bytes_(bytes), options_(options) {}

  std::uint64_t bytes_;
  LeaseOptions options_;
  bool accepted_ = false;
  std::uint64_t lease_tag_ = 0;
  std::uint32_t code_ = 0;
  std::size_t length_ = 0;
  char text_[kMemoryRefusalTextMax] = {};
};

/// Names memory that we have leased to a peer, until that memory has come back.
struct LeaseId {
  std::uint32_t value = ~std::uint32_t{0};  ///< all bits are set: empty
  explicit operator bool() const noexcept { return value != ~std::uint32_t{0}; }
  friend bool operator==(const LeaseId&, const LeaseId&) noexcept = default;
};

/// Memory of a peer that is leased to us. Owns the lease: dropping the handle releases the memory,
/// after all operations that were started on it. Drop it on the engine's thread: dropped elsewhere,
/// the lease lasts until its time is over or the connection ends. Empty once the lease was returned
/// or the connection has ended. Move-only. All functions may be called from callbacks. Hot.
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

  /// True while there is a lease, even if its time is over.
  explicit operator bool() const noexcept { return static_cast<bool>(region()); }
  /// The memory, or a part of it, for operations on the lease's connection. Empty if there is no
  /// lease, or if the part is out of bounds. The region names the lease instead of a key; detach()
  /// answers a region to pass on.
  [[nodiscard]] RemoteRegion region() const noexcept;
  /// Bytes [offset, offset + size) of the memory; empty (false) if out of bounds.
  [[nodiscard]] RemoteRegion slice(std::uint64_t offset, std::uint64_t size) const noexcept {
    return region().slice(offset, size);
  }
  /// Length of the memory, in bytes.
  [[nodiscard]] std::uint64_t size() const noexcept { return region().length; }
  /// The rights that the owner gave: at most the requested ones.
  [[nodiscard]] Access access() const noexcept { return region().access; }
  /// How long operations may still be started; 0 if no longer. This is the rest of the lease,
  /// counted from the request or the arrival, minus leases.guard.
  [[nodiscard]] Nanoseconds time_left() const noexcept;
  /// The connection to the owner of the memory.
  [[nodiscard]] Connection connection() const noexcept;
  /// The tag that the owner gave to the lease; 0: none, or no lease.
  [[nodiscard]] std::uint64_t tag() const noexcept;

  /// Asks for `duration` from now on. `done` reports whether the owner granted it; if not, the
  /// lease ends as before. If the lease is released or recalled first, `done` runs with cancelled
  /// or lease_expired. Errors:
  ///   invalid_argument  a duration not above leases.guard, or above 1 h
  ///   lease_expired     time_left() is 0
  ///   would_block       another renewal is under way, or too many control messages wait (see
  ///                     ConnectionHandlers::on_writable)
  ///   not_connected     no lease, or the connection is not ready
  Status renew(Nanoseconds duration, const LeaseCallback& done = {});
  /// Renews the lease from now on: whenever half of time_left() is over, the engine asks for
  /// `duration`, until the lease is released, given back or detached, or stop_auto_renew() is
  /// called. Each request takes a credit. A request that finds none, or finds renew() under way, is
  /// made later. `on_end` runs once if the renewal ends otherwise, and the lease then ends in its
  /// time. LeaseReply::status is one of:
  ///   limit          the owner refused: `duration` exceeds its leases.max_duration
  ///   lease_expired  the owner recalled the lease, which has been released; or it has ended there,
  ///                  or before a request could be made
  ///   flushed        the connection ended
  /// A second call replaces the first. Errors:
  ///   invalid_argument  a duration not above leases.guard, or above 1 h
  ///   lease_expired     time_left() is 0
  ///   not_connected     no lease, or the connection is not ready
  Status auto_renew(Nanoseconds duration, const LeaseCallback& on_end = {});
  /// Makes no further requests, and drops auto_renew()'s callback. Does nothing without either.
  void stop_auto_renew() noexcept;
  /// Gives the memory back to the owner's application, whose on_returned runs after all our writes
  /// have arrived. Empties the handle if it answers ok. Errors:
  ///   lease_expired  time_left() is 0
  ///   would_block    a renewal is under way, or too many control messages wait (see
  ///                  ConnectionHandlers::on_writable)
  ///   not_connected  no lease, or the connection is not ready
  Status give_back(const LeaseCallback& done = {});
  /// Releases the memory, as dropping the handle does. Does nothing if empty. Runs no callback.
  void release() noexcept;
  /// Forgets the lease without returning it, and answers the region with its key, which can be
  /// passed on as bytes. The lease still ends in time; using the key later ends the connection.
  /// Empties the handle. Answers an empty region if there is no lease, or a renewal is under way.
  [[nodiscard]] RemoteRegion detach() noexcept;

 private:
  friend struct detail::Internals;

  RemoteMemory(detail::EngineSlot* slot, std::uint32_t lease) noexcept
      : slot_(slot), lease_(lease) {}

  detail::EngineSlot* slot_ = nullptr;
  std::uint32_t lease_ = 0;  ///< 0: none
};

/// How a request about a lease ended.
struct LeaseReply {
  /// One of:
  ///   ok             granted, taken or given back
  ///   limit          a limit of the owner; see `refusal`
  ///   no_buffer      the owner has no memory, keys or records for it
  ///   remote_access  the owner gives none of the rights
  ///   refused        the peer's application did not take the memory, or give it
  ///   lease_expired  the lease was over, or was recalled first
  ///   cancelled      the lease was released first
  ///   flushed        the connection ended first
  Status status = Status::ok;
  LeaseRefusal refusal = LeaseRefusal::none;  ///< why, if the owner did not grant it
  LeaseId lease;                              ///< the new lease, if Connection::lease() succeeded
  Nanoseconds duration{0};                    ///< granted
  RemoteMemory memory;  ///< from Connection::request_memory(): move it out, else it is released
  std::optional<std::uint32_t> code;  ///< the owner's application refused the request, with this
  std::string_view text;              ///< of that refusal; valid during the callback
};

/// Why leased memory came back.
enum class ReturnedBy : std::uint8_t {
  give_back,  ///< RemoteMemory::give_back()
  release,    ///< RemoteMemory::release()
  expiry,     ///< its time was over; see LeaseOptions
  recall,     ///< Connection::recall(), or Connection::revoke()
  refusal,    ///< the peer did not take the memory
  end,        ///< the connection has ended
};
/// The name, as written in the header. Any thread; never allocates.
SPINWIRE_API std::string_view to_string(ReturnedBy how) noexcept;

/// Our memory that has come back. Valid during its callback.
struct Returned {
  LeaseId lease;                         ///< which lease
  ReturnedBy how = ReturnedBy::release;  ///< why it has ended
  bool requested = false;  ///< from our pool, at the peer's request; else given to lease()
  /// No peer can reach it any more; copy the slice to keep the memory. Empty if the connection has
  /// ended while an access of the peer may be under way, for example of a process that is stopped:
  /// the bytes may be read or change until the access has ended, and the engine holds the memory
  /// until then. No callback reports that; the access ends at the latest with our process.
  BufferSlice memory;
  std::uint64_t tag = 0;  ///< of the lease
};

}  // namespace spinwire
