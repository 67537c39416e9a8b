// One handshake over one TCP socket: a pipe of whole, checked frames that never blocks. It knows
// the framing and which kinds of frame may come next; what to say and when to give up is up to its
// owner. Buffers are part of the object, so that exchanges can be pooled; only an error's text
// takes heap.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/unique_fd.h"
#include "control/address.h"
#include "control/epoll_set.h"
#include "control/socket.h"
#include "spinwire/status.h"
#include "wire/handshake.h"

namespace spinwire::control {

enum class Progress : std::uint8_t {
  waiting,  ///< nothing to tell; call again when the socket is ready
  frame,    ///< received() holds a frame; say with expect() what may follow, then call again
  closed,   ///< the peer closed the connection between two frames, or our refusal is delivered
  failed,   ///< error() tells why; refuse() or reset() is left
};

/// Belongs to the engine's thread. Deadlines are the owner's: a peer that says nothing, or stops in
/// the midst of a frame, leaves it `waiting`.
class Exchange {
 public:
  enum class State : std::uint8_t {
    idle,        ///< no socket; leaves by connect() or adopt()
    connecting,  ///< TCP connection being made; leaves when it is, or by its failure
    open,        ///< frames go both ways; leaves by the stream's end, an error or refuse()
    refusing,  ///< the refusal goes out, then the peer's end is awaited; leaves when both are done
    closed,    ///< leaves by reset()
    failed,    ///< leaves by refuse() or reset()
  };

  Exchange() noexcept = default;
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  /// Begins to connect, after a reset() of whatever was. What the network answers comes from
  /// advance(). Errors of this host: invalid_argument, limit, no_memory, system.
  /// On a simulated network if one is given.
  Result<void> connect(const Address& remote, wire::KindSet expected,
                       Network* network = nullptr) noexcept;
  /// Takes over a connected stream socket, after a reset() of whatever was.
  void adopt(base::UniqueFd fd, const Address& peer, wire::KindSet expected) noexcept;

  /// The kinds that the next frame may have. Taking a frame empties the set; while it is empty any
  /// byte that arrives is an error.
  void expect(wire::KindSet expected) noexcept { expected_ = expected; }

  /// Queues a frame for the next advance(); room is for two of the longest, fewer bytes pending
  /// permitting more. Errors: would_block, not_connected.
  Status send(const wire::Frame& frame) noexcept;

  /// Pushes bytes out and takes bytes in, with at most seven system calls on the step that
  /// completes a connect and three on any other. Bytes of a following frame stay in the socket,
  /// which therefore stays readable.
  Progress advance() noexcept;

  /// Says no: drops nothing already queued, sends a refusal, ends our direction, and waits in
  /// advance() until the peer has ended its own, because closing earlier could destroy the refusal
  /// on its way. Sends nothing to a peer that is no Spinwire or cannot be reached. Answers as
  /// advance(); call reset() at `closed`, or when the time-out has passed.
  Progress refuse(const wire::Refuse& refusal) noexcept;

  /// Closes the socket and forgets everything: as new.
  void reset() noexcept;

  [[nodiscard]] State state() const noexcept { return state_; }
  /// Stays open, and the same, until reset(); -1 in `idle`.
  [[nodiscard]] int fd() const noexcept { return socket_.fd.get(); }
  /// What to watch the socket for, given the state and what is queued.
  [[nodiscard]] Interest interest() const noexcept;
  /// Nothing queued is left to be sent.
  [[nodiscard]] bool all_sent() const noexcept { return out_begin_ == out_end_; }
  /// The frame last announced; valid until the next advance().
  [[nodiscard]] const wire::Received& received() const noexcept { return received_; }
  /// Why advance() answered `failed`: protocol or unsupported (the peer's bytes), peer_lost,
  /// refused, timed_out, limit, no_memory or system (the connection).
  [[nodiscard]] const Error& error() const noexcept { return error_; }
  [[nodiscard]] const Address& peer() const noexcept { return remote_; }
  /// "address:port" of the other end.
  [[nodiscard]] std::string_view peer_address() const noexcept { return peer_text_.view(); }
  /// This end's address, for choosing the device's address that matches. Errors: system.
  [[nodiscard]] Result<Address> local() const { return local_address(fd()); }

 private:
  static constexpr std::size_t kFrameRoom = sizeof(wire::Frame::storage);
  static constexpr std::size_t kQueueRoom = 2 * kFrameRoom;

  Progress step();
  Progress finish_connecting();
  Progress pump();
  Progress read_frame();
  Progress take_header();
  Progress take_body();
  Progress read_surplus();
  Progress end_of_stream();
  Progress linger() noexcept;
  [[nodiscard]] int write_out() noexcept;
  void queue(const wire::Frame& frame) noexcept;
  void begin(const Address& peer, wire::KindSet expected) noexcept;
  void enter(State state) noexcept { state_ = state; }
  /// `answerable`: the peer speaks our protocol and can be told.
  Progress fail(Error error, bool answerable) noexcept;
  [[nodiscard]] Error read_error(int error) const;

  State state_ = State::idle;
  bool answerable_ = false;
  bool shut_ = false;  ///< our direction has ended
  wire::KindSet expected_;
  Connecting socket_;
  std::size_t have_ = 0;  ///< bytes of the current frame in in_
  std::size_t out_begin_ = 0;
  std::size_t out_end_ = 0;
  std::size_t discarded_ = 0;
  wire::FrameHeader header_;  ///< of the current frame, once have_ covers it
  wire::Received received_;
  Address remote_;
  AddressText peer_text_;
  Error error_;
  std::array<std::byte, wire::kFrameBytesMax> in_;
  std::array<std::byte, kQueueRoom + kFrameRoom> out_;  ///< the last room is the refusal's
};

}  // namespace spinwire::control
