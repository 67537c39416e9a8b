// Registered memory: buffers from the engine's pools, and slices of them. Reference counts are not
// atomic: use and drop buffers on the engine's thread, and not in a forked child. Buffers may
// outlive their engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "spinwire/export.h"

namespace spinwire {

class Buffer;
class BufferSlice;

namespace detail {

/// Control words of a block of registered memory. In a pool, the block lies in the 64 bytes of
/// headroom before the payload. `header` is last, so that header and payload are adjacent.
struct alignas(64) Block {
  std::uint32_t refs;           ///< handles and operations in flight
  std::uint32_t lkey;           ///< local key of the payload's registration
  std::uint64_t capacity;       ///< payload bytes
  std::byte* payload;           ///< first payload byte
  void (*recycle)(Block*);      ///< called when the last reference is dropped
  void* owner;                  ///< arena or registration, for `recycle`
  std::uint32_t link;           ///< free-list link while in the pool
  std::uint16_t header_in_use;  ///< 1 while an operation in flight uses `header`
  std::uint16_t chunk;          ///< chunk of the arena
  std::byte header[16];         ///< protocol header, adjacent to a payload in a pool
};
static_assert(sizeof(Block) == 64);

inline void retain(Block* block) noexcept { ++block->refs; }
inline void release(Block* block) noexcept {
  if (--block->refs == 0) block->recycle(block);
}

}  // namespace detail

/// Part of a buffer or of registered memory. Holds a reference: the memory stays valid while a
/// slice of it exists or an operation on it is in flight. Copyable. Hot.
///
/// A Buffer converts to a slice of its bytes, so each function that takes a slice takes a buffer.
class BufferSlice {
 public:
  BufferSlice() noexcept = default;
  /// The whole buffer.
  BufferSlice(const Buffer& buffer) noexcept;
  BufferSlice(const BufferSlice& other) noexcept
      : block_(other.block_), data_(other.data_), size_(other.size_) {
    if (block_ != nullptr) detail::retain(block_);
  }
  BufferSlice(BufferSlice&& other) noexcept
      : block_(std::exchange(other.block_, nullptr)),
        data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)) {}
  BufferSlice& operator=(BufferSlice other) noexcept {
    std::swap(block_, other.block_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~BufferSlice() {
    if (block_ != nullptr) detail::release(block_);
  }

  /// The first byte; null if empty.
  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  /// Length in bytes.
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  /// The bytes; none if empty.
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return {data_, size_}; }
  /// False for a default-constructed slice and for one that was out of bounds.
  explicit operator bool() const noexcept { return block_ != nullptr; }

  /// Bytes [offset, offset + length) of this slice; empty (false) if out of bounds.
  [[nodiscard]] BufferSlice slice(std::size_t offset, std::size_t length) const noexcept {
    if (block_ == nullptr || offset > size_ || length > size_ - offset) return {};
    return BufferSlice(block_, data_ + offset, length);
  }

 private:
  friend struct detail::Internals;
  friend class Buffer;
  friend class Reply;
  friend class Request;

  /// Adds a reference to `block`.
  BufferSlice(detail::Block* block, std::byte* data, std::size_t size) noexcept
      : block_(block), data_(data), size_(size) {
    detail::retain(block_);
  }

  detail::Block* block_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Owns one block of a pool. May be dropped while operations on it are in flight: the block returns
/// to its pool at the last completion. The payload is aligned to a cacheline. Move-only. Hot.
class Buffer {
 public:
  Buffer() noexcept = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&& other) noexcept
      : block_(std::exchange(other.block_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    if (this != &other) {
      reset();
      block_ = std::exchange(other.block_, nullptr);
      size_ = std::exchange(other.size_, 0);
    }
    return *this;
  }
  ~Buffer() { reset(); }

  /// The first byte; null if empty.
  [[nodiscard]] std::byte* data() const noexcept {
    return block_ != nullptr ? block_->payload : nullptr;
  }
  /// Bytes in use: as allocated or resized, or the length of the received message.
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  /// Bytes that the block has room for, at least size().
  [[nodiscard]] std::size_t capacity() const noexcept {
    return block_ != nullptr ? block_->capacity : 0;
  }
  /// Changes size(). Returns false, and changes nothing, above capacity().
  [[nodiscard]] bool resize(std::size_t size) noexcept {
    if (size > capacity()) return false;
    size_ = size;
    return true;
  }
  /// The bytes; none if empty.
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return {data(), size_}; }
  explicit operator bool() const noexcept { return block_ != nullptr; }

  /// The whole buffer, or a part of it; empty (false) if out of bounds.
  [[nodiscard]] BufferSlice slice() const noexcept {
    return block_ != nullptr ? BufferSlice(block_, block_->payload, size_) : BufferSlice();
  }
  /// Bytes [offset, offset + length); empty (false) if out of bounds.
  [[nodiscard]] BufferSlice slice(std::size_t offset, std::size_t length) const noexcept {
    return slice().slice(offset, length);
  }

  /// True if nothing else holds the memory: no other slice, no operation in flight, and no reply
  /// that may be sent again. The buffer of a message, a call or a reply may then be written again.
  [[nodiscard]] bool unique() const noexcept { return block_ != nullptr && block_->refs == 1; }

  /// Releases the block. Does nothing when empty.
  void reset() noexcept {
    if (block_ != nullptr) detail::release(std::exchange(block_, nullptr));
    size_ = 0;
  }

 private:
  friend struct detail::Internals;
  friend class Message;

  /// Takes over one reference.
  Buffer(detail::Block* block, std::size_t size) noexcept : block_(block), size_(size) {}

  detail::Block* block_ = nullptr;
  std::size_t size_ = 0;
};

inline BufferSlice::BufferSlice(const Buffer& buffer) noexcept : BufferSlice(buffer.slice()) {}

/// Remote access rights of exposed or registered memory; combine with |.
enum class Access : std::uint8_t {
  local = 0,              ///< local use only
  remote_read = 1,        ///< peers may read
  remote_write = 2,       ///< peers may write
  remote_read_write = 3,  ///< peers may read and write
  remote_atomic = 4,      ///< peers may use atomics, where the device has them
  remote_all = 7,         ///< peers may do all of these
};
/// The rights of both.
constexpr Access operator|(Access a, Access b) noexcept {
  return static_cast<Access>(static_cast<std::uint8_t>(a) | static_cast<std::uint8_t>(b));
}
/// Whether `have` has all rights of `want`.
constexpr bool allows(Access have, Access want) noexcept {
  return (static_cast<std::uint8_t>(have) & static_cast<std::uint8_t>(want)) ==
         static_cast<std::uint8_t>(want);
}

/// How a device treats memory that is registered or exposed; combine with |.
/// DeviceInfo::memory_flags says which of them a device has.
enum class MemoryFlags : std::uint8_t {
  none = 0,  ///< as usual: the device pins the pages
  /// On-demand paging: the device pins no pages, and follows when their mapping changes.
  on_demand = 1,
  /// A hint: what a peer writes may become visible in any order until a completion reports it. A
  /// device without it keeps the order.
  relaxed_ordering = 2,
  /// Peers address the memory from 0 on: RemoteRegion::address is 0. For expose() only, because our
  /// own operations name memory by its address.
  zero_based = 4,
  huge_pages = 8,  ///< the memory lies in hugepages, and the device may use entries for such
};
/// The flags of both.
constexpr MemoryFlags operator|(MemoryFlags a, MemoryFlags b) noexcept {
  return static_cast<MemoryFlags>(static_cast<std::uint8_t>(a) | static_cast<std::uint8_t>(b));
}
/// The flags that both have.
constexpr MemoryFlags operator&(MemoryFlags a, MemoryFlags b) noexcept {
  return static_cast<MemoryFlags>(static_cast<std::uint8_t>(a) & static_cast<std::uint8_t>(b));
}
/// Whether `all` has every flag of `some`.
constexpr bool contains(MemoryFlags all, MemoryFlags some) noexcept { return (all & some) == some; }

/// Which peers can use a remote key.
enum class KeyScope : std::uint8_t {
  domain,      ///< every peer of the engine; for a connection with its own domain, that peer only
  connection,  ///< the peer of one connection; a device with windows refuses the key to others
};

/// Exposed memory of a peer: its address and the key that opens it. Plain data: the owner sends it
/// to the peer that will use the memory.
struct RemoteRegion {
  /// Of the first byte: in the owner's process, or from 0 on with MemoryFlags::zero_based.
  std::uint64_t address = 0;
  std::uint64_t length = 0;       ///< bytes
  std::uint32_t rkey = 0;         ///< the owner's key; 0: see `lease` and `timed_rkey`
  Access access = Access::local;  ///< what the owner allows
  std::uint32_t lease = 0;  ///< the lease that grants access instead of a key; see RemoteMemory
  /// The key, instead of `rkey`, of a region with a deadline; see Connection::import_token().
  std::uint32_t timed_rkey = 0;
  std::uint64_t deadline = 0;  ///< of that region, in ticks of the importing engine's clock

  /// Bytes [offset, offset + size) of the region; empty (false) if out of bounds.
  [[nodiscard]] RemoteRegion slice(std::uint64_t offset, std::uint64_t size) const noexcept {
    if (offset > length || size > length - offset) return {};
    return {address + offset, size, rkey, access, lease, timed_rkey, deadline};
  }
  explicit operator bool() const noexcept { return (rkey | lease | timed_rkey) != 0; }
};

}  // namespace spinwire
