#include "control/exchange.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"

namespace spinwire::control {
namespace {

// Most bytes that we read and discard from a refused peer.
constexpr std::size_t kDiscardMax = 16384;

bool transient(int error) noexcept {
  return error == EAGAIN || error == EWOULDBLOCK || error == EINTR;
}

std::string names(wire::KindSet set) {
  std::string list;
  for (unsigned i = 1; i <= static_cast<unsigned>(wire::kLastFrameKind); ++i) {
    const auto kind = static_cast<wire::FrameKind>(i);
    if (!set.has(kind)) continue;
    if (!list.empty()) list += " or ";
    list += wire::to_string(kind);
  }
  return list;
}

}  // namespace

Result<void> Exchange::connect(const Address& remote, wire::KindSet expected, Network* network,
                               const KeyRing* keys, OwnRequests* own) noexcept {
  return base::no_throw("connect", [&]() -> Result<void> {
    reset();
    auto socket = begin_connect(remote, network);
    if (!socket) return tl::make_unexpected(std::move(socket.error()));
    socket_ = std::move(*socket);
    begin(remote, expected);
    channel_.begin(keys, true, own);
    enter(State::connecting);
    return {};
  });
}

void Exchange::adopt(base::UniqueFd fd, const Address& peer, wire::KindSet expected,
                     const KeyRing* keys, OwnRequests* own) noexcept {
  reset();
  socket_ = {std::move(fd), 0};
  begin(peer, expected);
  channel_.begin(keys, false);
  own_ = own;
  enter(State::open);
}

void Exchange::begin(const Address& peer, wire::KindSet expected) noexcept {
  remote_ = peer;
  peer_text_ = peer.text();
  expected_ = expected;
}

Status Exchange::send(const wire::Frame& frame) noexcept {
  if (state_ != State::connecting && state_ != State::open) return Status::not_connected;
  if (!channel_.is_open()) {
    if (waiting_ == held_.size()) return Status::would_block;
    held_[waiting_++] = frame;
    return Status::ok;
  }
  const std::size_t overhead = channel_.seals() ? wire::kHeaderBytes + wire::kSealTagBytes : 0;
  const std::size_t room = 2 * (sizeof(wire::Frame::storage) + overhead);
  if (out_end_ - out_begin_ + frame.size + overhead > room) return Status::would_block;
  queue(frame);
  return Status::ok;
}

void Exchange::queue(std::span<const std::byte> bytes) noexcept {
  std::memmove(out_.data(), out_.data() + out_begin_, out_end_ - out_begin_);
  out_end_ -= out_begin_;
  out_begin_ = 0;
  std::memcpy(out_.data() + out_end_, bytes.data(), bytes.size());
  out_end_ += bytes.size();
}

void Exchange::queue(const wire::Frame& frame) noexcept {
  channel_.seals() ? queue(channel_.seal(frame).bytes()) : queue(frame.bytes());
}

Progress Exchange::advance() noexcept {
  try {
    return step();
  } catch (...) {  // Only the texts of errors take heap.
    return fail(base::out_of_memory(), false);
  }
}

Progress Exchange::step() {
  switch (state_) {
    case State::idle:
      return Progress::waiting;
    case State::connecting:
      return finish_connecting();
    case State::open:
      return pump();
    case State::refusing:
      return linger();
    case State::closed:
      return Progress::closed;
    case State::failed:
      return Progress::failed;
  }
  return Progress::failed;
}

Progress Exchange::finish_connecting() {
  auto connected = finish_connect(socket_, remote_);
  if (!connected) return fail(std::move(connected.error()), false);
  if (!*connected) return Progress::waiting;
  enter(State::open);
  if (!channel_.is_open() && !request_authentication()) return Progress::failed;
  return pump();
}

Progress Exchange::pump() {
  // If the peer refuses and closes, our write fails while its refusal waits to be read. So read
  // before reporting the write error.
  const int write_error = write_out();
  const bool reads = !expected_.empty() || !channel_.is_open();
  const Progress progress = reads ? read_frame() : read_surplus();
  if (write_error == 0 || progress == Progress::frame || progress == Progress::failed) {
    return progress;
  }
  return fail(system_error(base::format("send a frame to {}", peer_address()), "send", write_error),
              false);
}

int Exchange::write_out() noexcept {
  if (queue_is_empty()) return 0;
  const ssize_t sent =
      ::send(fd(), out_.data() + out_begin_, out_end_ - out_begin_, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) return transient(errno) ? 0 : errno;
  out_begin_ += static_cast<std::size_t>(sent);
  return 0;
}

Progress Exchange::read_frame() {
  // Reads the header, then the body, and no byte beyond it.
  for (int reads = 0; reads < 2; ++reads) {
    const std::size_t end = have_ < wire::kHeaderBytes
                                ? wire::kHeaderBytes
                                : wire::kHeaderBytes + std::size_t{header_.body_length};
    const ssize_t got = ::recv(fd(), in_.data() + have_, end - have_, MSG_DONTWAIT);
    if (got < 0) return transient(errno) ? Progress::waiting : fail(read_error(errno), false);
    if (got == 0) return end_of_stream();
    have_ += static_cast<std::size_t>(got);
    if (end == wire::kHeaderBytes) {
      const Progress progress = decode_header();
      if (progress != Progress::waiting || have_ < end) return progress;
    } else {
      return have_ < end ? Progress::waiting : decode_body();
    }
  }
  return Progress::waiting;
}

Progress Exchange::decode_header() {
  const auto seen = std::span<const std::byte>(in_).first(have_);
  if (auto magic = wire::check_magic(seen); !magic) return fail(std::move(magic.error()), false);
  if (have_ < wire::kHeaderBytes) return Progress::waiting;
  auto header = wire::decode_header(seen);
  if (!header) return fail(std::move(header.error()), true);
  header_ = *header;
  return next_kinds().has(header_.kind) ? Progress::waiting : unexpected(header_, next_kinds());
}

Progress Exchange::unexpected(const wire::FrameHeader& header, wire::KindSet expected) {
  if (channel_.state() == SecureChannel::State::awaits_request) {
    return fail_authentication(
        AuthenticationFailure::no_proof,
        base::format("it begins with a frame of kind {}, and offers no proof of a key",
                     wire::to_string(header.kind)));
  }
  if (header.kind == FrameKind::authenticate && channel_.state() == SecureChannel::State::off) {
    return fail(
        base::make_error(Status::unauthenticated, base::format("authenticate {}", peer_address()),
                         "the peer has a key, and this end has none",
                         "give both ends the same security.key_file, or none"),
        true);
  }
  return fail(
      base::make_error(Status::protocol,
                       base::format("receive {} from {}", names(expected), peer_address()),
                       base::format("a frame of kind {}", wire::to_string(header.kind)),
                       "check that one end connects and the other listens, and that both ends run "
                       "compatible releases of Spinwire"),
      true);
}

Progress Exchange::decode_body() {
  if (header_.kind == FrameKind::sealed) return open_sealed();
  const auto body =
      std::span<const std::byte>(in_).subspan(wire::kHeaderBytes, header_.body_length);
  return on_frame(header_, body);
}

Progress Exchange::on_frame(const wire::FrameHeader& header, std::span<const std::byte> body) {
  auto received = wire::decode_body(header, body);
  if (!received) return fail(std::move(received.error()), true);
  have_ = 0;
  if (!channel_.is_open()) {
    if (const auto* request = std::get_if<wire::Authenticate>(&received->body))
      return on_request(*request);
    if (const auto* answer = std::get_if<wire::Authenticated>(&received->body))
      return on_answer(*answer);
    return on_early_refusal(std::get<wire::Refuse>(received->body));
  }
  received_ = *received;
  expected_ = {};
  return Progress::frame;
}

Progress Exchange::read_surplus() {
  std::array<std::byte, wire::kHeaderBytes> surplus;
  const ssize_t got = ::recv(fd(), surplus.data(), surplus.size(), MSG_DONTWAIT);
  if (got < 0) return transient(errno) ? Progress::waiting : fail(read_error(errno), false);
  if (got == 0) return end_of_stream();
  return fail(
      base::make_error(Status::protocol,
                       base::format("receive no more than the handshake from {}", peer_address()),
                       base::format("{} or more bytes after it, the first of them {:#04x}", got,
                                    std::to_integer<unsigned>(surplus[0])),
                       "check that both ends run compatible releases of Spinwire"),
      true);
}

Progress Exchange::end_of_stream() {
  if (have_ == 0) {
    enter(State::closed);
    return Progress::closed;
  }
  const bool headed = have_ >= wire::kHeaderBytes;
  const std::size_t whole = wire::kHeaderBytes + (headed ? header_.body_length : 0u);
  return fail(
      base::make_error(Status::peer_lost,
                       base::format("receive {} from {}", names(next_kinds()), peer_address()),
                       base::format("the stream ended after {} of {} bytes of a {}", have_, whole,
                                    headed ? wire::to_string(header_.kind) : "header"),
                       "see the peer's own log for why it closed the connection"),
      false);
}

Progress Exchange::refuse(const wire::Refuse& refusal) noexcept {
  switch (state_) {
    case State::open:
      break;
    case State::failed:
      if (answerable_) break;
      [[fallthrough]];
    case State::idle:
    case State::connecting:
    case State::closed:
      enter(State::closed);
      return Progress::closed;
    case State::refusing:
      return linger();
  }
  if (!channel_.is_open() && channel_.is_client()) {
    enter(State::closed);
    return Progress::closed;
  }
  // Equal for every peer and every reason: it says nothing of this end but that it has a key.
  channel_.is_open()
      ? queue(wire::encode(refusal))
      : queue(wire::encode(wire::make_refuse(Status::refused, "authentication required")));
  enter(State::refusing);
  return linger();
}

Progress Exchange::linger() noexcept {
  const bool broken = write_out() != 0;
  if (!broken && !queue_is_empty()) return Progress::waiting;
  if (!broken && !shut_) {
    ::shutdown(fd(), SHUT_WR);
    shut_ = true;
  }
  if (!broken) {
    const ssize_t got = ::recv(fd(), in_.data(), in_.size(), MSG_DONTWAIT);
    if (got < 0 && transient(errno)) return Progress::waiting;
    if (got > 0) {
      discarded_ += static_cast<std::size_t>(got);
      if (discarded_ <= kDiscardMax) return Progress::waiting;
    }
  }
  enter(State::closed);
  return Progress::closed;
}

void Exchange::reset() noexcept {
  received_.header.features = 0;
  socket_.fd.reset();
  socket_.error = 0;
  enter(State::idle);
  answerable_ = false;
  shut_ = false;
  expected_ = {};
  have_ = out_begin_ = out_end_ = discarded_ = waiting_ = 0;
  failure_ = AuthenticationFailure::none;
  channel_.reset();
  own_ = nullptr;
  remote_ = {};
  peer_text_ = {};
  (void)std::exchange(error_, {});  // frees its texts, which an assignment would keep for reuse
}

Interest Exchange::interest() const noexcept {
  switch (state_) {
    case State::connecting:
      return Interest::write;
    case State::open:
    case State::refusing:
      return queue_is_empty() ? Interest::read : Interest::read_write;
    case State::idle:
    case State::closed:
    case State::failed:
      return Interest::none;
  }
  return Interest::none;
}

/// A client that fails in any way has not proved the key; a server must have said something for it.
Progress Exchange::fail(Error error, bool answerable) noexcept {
  if (failure_ == AuthenticationFailure::none) failure_ = unproved(answerable);
  error_ = std::move(error);
  answerable_ = answerable;
  enter(State::failed);
  return Progress::failed;
}

AuthenticationFailure Exchange::unproved(bool answerable) const noexcept {
  switch (channel_.state()) {
    case SecureChannel::State::awaits_request:
      return AuthenticationFailure::no_proof;
    case SecureChannel::State::answered:
      return AuthenticationFailure::unconfirmed_proof;
    case SecureChannel::State::before_request:
    case SecureChannel::State::awaits_answer:
      if (answerable) return AuthenticationFailure::unproven_server;
      break;
    case SecureChannel::State::off:
    case SecureChannel::State::authenticated:
      break;
  }
  return AuthenticationFailure::none;
}

Error Exchange::read_error(int error) const {
  return system_error(base::format("receive from {}", peer_address()), "recv", error);
}

}  // namespace spinwire::control
