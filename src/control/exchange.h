// One handshake over one TCP socket: a pipe of whole, checked frames that never blocks. The
// exchange knows the framing and the expected kinds of frame; its owner decides what to send and
// when to give up. Buffers are members, so that exchanges can be pooled. Only an error's text takes
// heap. With a key, the exchange authenticates the peer first, and encrypts all frames: its owner
// sees no frame of a peer that has not proved the key, and a peer without it gets no frame but a
// refusal that says the same to all.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/unique_fd.h"
#include "control/address.h"
#include "control/epoll_set.h"
#include "control/secure_channel.h"
#include "control/socket.h"
#include "spinwire/status.h"
#include "wire/handshake.h"

namespace spinwire::control {

enum class Progress : std::uint8_t {
  waiting,  ///< nothing to report; call again when the socket is ready
  frame,    ///< received() holds a frame; call expect() for the next one, then call again
  closed,   ///< the peer closed the connection between two frames, or our refusal is delivered
  failed,   ///< error() has the reason; only refuse() or reset() may follow
};

/// Belongs to the engine's thread. The owner keeps the deadlines: a peer that sends nothing, or
/// stops inside a frame, leaves the exchange `waiting`.
class Exchange {
 public:
  enum class State : std::uint8_t {
    idle,        ///< no socket; left by connect() or adopt()
    connecting,  ///< TCP connection being made; left by its success or failure
    open,        ///< frames go both ways; left by the stream's end, an error or refuse()
    refusing,    ///< sends the refusal, then waits for the peer's end; left after both
    closed,      ///< left by reset()
    failed,      ///< left by refuse() or reset()
  };

  Exchange() noexcept = default;
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  /// Resets the exchange and begins to connect, on a simulated network if one is given. advance()
  /// reports the network's answer. `keys`: the peer must prove the first of them; they must outlive
  /// the exchange, but may be given other keys (see SecureChannel::begin()); null: no key. Errors
  /// of this host: invalid_argument, limit, no_memory, system.
  Result<void> connect(const Address& remote, wire::KindSet expected, Network* network = nullptr,
                       const KeyRing* keys = nullptr, OwnRequests* own = nullptr) noexcept;
  /// Resets the exchange and takes over a connected stream socket. `keys`: the peer must prove one
  /// of them. `own`: the requests of this engine, none of which may come back through another host.
  void adopt(base::UniqueFd fd, const Address& peer, wire::KindSet expected,
             const KeyRing* keys = nullptr, OwnRequests* own = nullptr) noexcept;

  /// Sets the kinds that the next frame may have. A received frame empties the set. While the set
  /// is empty, any byte that arrives is an error.
  void expect(wire::KindSet expected) noexcept { expected_ = expected; }

  /// Queues a frame for the next advance(), or until the peer has proved the key. There is room for
  /// two of the longest frames. Errors: would_block, not_connected.
  Status send(const wire::Frame& frame) noexcept;

  /// Sends queued bytes and receives bytes. Makes at most seven system calls in the step that
  /// completes a connect, five in the step that authenticates the peer, and three in other steps.
  /// Bytes of a following frame stay in the socket, which therefore stays readable.
  Progress advance() noexcept;

  /// Sends what a connected exchange has queued, as far as the socket takes it. Errors come from
  /// the next advance().
  void flush() noexcept {
    if (state_ == State::open) (void)write_out();
  }

  /// Refuses the peer: sends all queued frames and a refusal, ends our direction, and waits in
  /// advance() until the peer has ended its own direction. Closing earlier could destroy the
  /// refusal in flight. Sends nothing to a peer that is not Spinwire or cannot be reached, nor to a
  /// server that has not proved the key. A client that has not proved it is told only that it must.
  /// Answers like advance(). Call reset() at `closed`, or when the time-out has passed.
  Progress refuse(const wire::Refuse& refusal) noexcept;

  /// Closes the socket and returns to the initial state.
  void reset() noexcept;

  [[nodiscard]] State state() const noexcept { return state_; }
  /// The descriptor, which stays open and unchanged until reset(); -1 in `idle`.
  [[nodiscard]] int fd() const noexcept { return socket_.fd.get(); }
  /// The events to watch the socket for, by the state and the queue.
  [[nodiscard]] Interest interest() const noexcept;
  /// Whether all queued bytes are sent.
  [[nodiscard]] bool all_sent() const noexcept { return queue_is_empty() && waiting_ == 0; }
  /// The last reported frame; valid until the next advance().
  [[nodiscard]] const wire::Received& received() const noexcept { return received_; }
  /// Why advance() answered `failed`. For the peer's bytes: protocol or unsupported. For the
  /// connection: peer_lost, refused, timed_out, limit, no_memory or system. For a peer that has not
  /// proved the key: unauthenticated.
  [[nodiscard]] const Error& error() const noexcept { return error_; }
  /// Why the peer has not proved a key, if it sends no more: `none` if it has, or need not.
  [[nodiscard]] AuthenticationFailure failure_so_far() const noexcept {
    return failure_ != AuthenticationFailure::none ? failure_ : unproved(false);
  }
  /// The key that the peer has proved. Empty: none.
  [[nodiscard]] KeyName proved_key() const noexcept {
    return channel_.is_authenticated() ? channel_.key() : KeyName();
  }
  [[nodiscard]] const Address& peer() const noexcept { return remote_; }
  /// "address:port" of the other end.
  [[nodiscard]] std::string_view peer_address() const noexcept { return peer_text_.view(); }

 private:
  static constexpr std::size_t kFrameRoom = sizeof(wire::SealedFrame::storage);
  static constexpr std::size_t kQueueRoom = 2 * kFrameRoom;
  static constexpr std::size_t kReadRoom = wire::kHeaderBytes + wire::kSealedBytesMax;

  Progress step();
  Progress finish_connecting();
  Progress pump();
  Progress read_frame();
  Progress decode_header();
  Progress decode_body();
  Progress on_frame(const wire::FrameHeader& header, std::span<const std::byte> body);
  // exchange_authentication.cc
  bool request_authentication();
  [[nodiscard]] bool is_led_back(const wire::Authenticate& request) const;
  Progress on_request(const wire::Authenticate& request);
  Progress on_answer(const wire::Authenticated& answer);
  Progress on_early_refusal(const wire::Refuse& refusal);
  Progress send_waiting() noexcept;
  Progress open_sealed();
  Progress fail_authentication(AuthenticationFailure why, std::string found);
  [[nodiscard]] SecureChannel::Header raw_header() const noexcept;
  Progress unexpected(const wire::FrameHeader& header, wire::KindSet expected);
  /// The kinds of the next frame on the stream.
  [[nodiscard]] wire::KindSet next_kinds() const noexcept {
    return channel_.state() == SecureChannel::State::off ? expected_ : channel_.expected();
  }
  [[nodiscard]] bool queue_is_empty() const noexcept { return out_begin_ == out_end_; }
  Progress read_surplus();
  Progress end_of_stream();
  Progress linger() noexcept;
  [[nodiscard]] int write_out() noexcept;
  void queue(std::span<const std::byte> bytes) noexcept;
  /// Queues a frame, sealed if the peer has proved the key.
  void queue(const wire::Frame& frame) noexcept;
  void begin(const Address& peer, wire::KindSet expected) noexcept;
  void enter(State state) noexcept { state_ = state; }
  /// `answerable`: the peer speaks our protocol, so it can get a refusal.
  Progress fail(Error error, bool answerable) noexcept;
  [[nodiscard]] AuthenticationFailure unproved(bool answerable) const noexcept;
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
  wire::FrameHeader header_;  ///< header of the current frame, once have_ covers it
  wire::Received received_;
  Address remote_;
  AddressText peer_text_;
  Error error_;
  AuthenticationFailure failure_ = AuthenticationFailure::none;
  SecureChannel channel_;
  const OwnRequests* own_ = nullptr;
  std::size_t waiting_ = 0;          ///< frames in held_
  std::array<wire::Frame, 2> held_;  ///< until the peer has proved the key
  std::array<std::byte, kReadRoom> in_;
  /// The last two rooms are for our proof and for the refusal.
  std::array<std::byte, kQueueRoom + 2 * kFrameRoom> out_;
};

}  // namespace spinwire::control
