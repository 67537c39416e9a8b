// The network of the control port's fuzzer: an in-memory control::Network in one thread. The port
// holds one end of a pair of local sockets, and the fuzzer's peer the other end.
#pragma once

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "control/secure_channel.h"
#include "control/socket.h"
#include "fuzz/fuzz.h"
#include "wire/handshake.h"

namespace fuzz {

using namespace spinwire;
using base::UniqueFd;
using control::Address;

/// A peer of the port: a stranger that has connected, or the server of an outbound handshake.
class Peer {
 public:
  /// `has_keys`: the port has keys, so it must say nothing else to a peer without one.
  Peer(UniqueFd fd, bool is_inbound, const Address& address, std::uint64_t& changes, bool has_keys)
      : is_inbound_(is_inbound),
        has_keys_(has_keys),
        address_(address),
        fd_(std::move(fd)),
        changes_(changes) {}

  [[nodiscard]] bool is_inbound() const { return is_inbound_; }
  [[nodiscard]] const Address& address() const { return address_; }
  [[nodiscard]] bool is_open() const { return static_cast<bool>(fd_); }

  /// Begins to prove a key of this ring: a client with its first one at once, a server with the one
  /// that is asked for. `keys` must outlive the peer.
  void prove(const control::KeyRing& keys) {
    if (channel_.state() != State::off) return;
    channel_.begin(&keys, is_inbound_);
    if (!is_inbound_) return hear_request();
    const auto request = channel_.make_request(-1);
    expect(request.has_value(), "a proof can be made");
    say(request->bytes());
  }
  /// Whether this peer has a key of the port's, and knows that the port has it, too.
  [[nodiscard]] bool has_proved() const { return channel_.seals(); }
  /// The name of that key. Empty: none.
  [[nodiscard]] std::string_view proved_key() const {
    return has_proved() ? channel_.key().view() : std::string_view();
  }
  /// A frame as it travels: sealed, if the peer has proved a key. So it must be sent next.
  Bytes dress(const wire::Frame& frame) {
    if (!has_proved()) return alone(frame.bytes());
    said_.insert(said_.end(), frame.bytes().begin(), frame.bytes().end());
    return alone(channel_.seal(frame).bytes());
  }

  /// Sends bytes after those that were set aside.
  void say(std::span<const std::byte> bytes) {
    set_aside(bytes);
    flush();
  }
  /// Keeps bytes until the next say() or flush().
  void set_aside(std::span<const std::byte> bytes) {
    aside_.insert(aside_.end(), bytes.begin(), bytes.end());
  }
  void flush() {
    ++changes_;
    if (fd_ && !aside_.empty()) {
      (void)::send(fd_.get(), aside_.data(), aside_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      said_.insert(said_.end(), aside_.begin(), aside_.end());
    }
    aside_.clear();
  }
  /// Whether the peer has sent these bytes in a row.
  [[nodiscard]] bool has_said(std::uint64_t value) const {
    const auto bytes = std::as_bytes(std::span(&value, 1));
    return std::search(said_.begin(), said_.end(), bytes.begin(), bytes.end()) != said_.end();
  }

  /// Ends the peer's direction.
  void shut() {
    ++changes_;
    if (fd_) ::shutdown(fd_.get(), SHUT_WR);
  }
  /// Closes. The port sees a reset if the peer has unread bytes.
  void close() {
    ++changes_;
    fd_.reset();
  }
  /// Fills the socket's queue in the port's direction, so that the port's connect continues until
  /// the peer reads.
  void delay_connect(int ports_end) {
    const int least = 1;
    (void)::setsockopt(ports_end, SOL_SOCKET, SO_SNDBUF, &least, sizeof least);
    const std::array<std::byte, 512> filler{};
    for (ssize_t got = 0; got >= 0;) {
      got = ::send(ports_end, filler.data(), filler.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (got > 0) filler_bytes_ += static_cast<std::size_t>(got);
    }
  }

  /// Reads what the port has sent, and checks each frame.
  void listen() {
    std::array<std::byte, 4096> bytes;
    while (fd_) {
      const ssize_t got = ::recv(fd_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
      if (got <= 0) break;
      ++changes_;
      const auto filler = std::min(static_cast<std::size_t>(got), filler_bytes_);
      filler_bytes_ -= filler;
      heard_.insert(heard_.end(), bytes.begin() + static_cast<std::ptrdiff_t>(filler),
                    bytes.begin() + got);
    }
    while (hear_frame()) {
    }
  }
  [[nodiscard]] bool has_heard(wire::FrameKind kind) const { return kinds_.has(kind); }

  std::uint64_t path_token = 0;  ///< not 0: the port must have it back before the session opens

 private:
  bool hear_frame() {
    const auto seen = std::span(std::as_const(heard_));
    if (seen.size() < wire::kHeaderBytes) return false;
    const auto header = wire::decode_header(seen);
    expect(header.has_value(), "the port sends valid headers");
    const std::size_t size = wire::kHeaderBytes + header->body_length;
    if (seen.size() < size) return false;
    const Bytes bytes = alone(seen.first(size));
    heard_.erase(heard_.begin(), heard_.begin() + static_cast<std::ptrdiff_t>(size));
    if (has_keys_ && hear_proof(*header, bytes)) return true;
    const auto frame = wire::decode_body(*header, std::span(bytes).subspan(wire::kHeaderBytes));
    expect(frame.has_value(), "the port sends valid bodies");
    note(header->kind);
    return true;
  }
  void note(wire::FrameKind kind) {
    check_order(kind);
    kinds_.bits |= wire::kinds(kind).bits;
  }

  /// With keys, all that is not sealed is a proof or the refusal of strangers. False: it is that.
  bool hear_proof(const wire::FrameHeader& header, std::span<const std::byte> bytes) {
    using enum wire::FrameKind;
    const auto body = bytes.subspan(wire::kHeaderBytes);
    switch (header.kind) {
      case sealed:
        hear_sealed(header, body);
        return true;
      case authenticate:
        expect(!is_inbound_, "a client's proof");
        if (channel_.state() == State::awaits_request)
          answer_proof({header, bytes.first(wire::kHeaderBytes)}, body);
        else
          request_.assign(bytes.begin(), bytes.end());
        return true;
      case authenticated: {
        expect(is_inbound_, "a server's proof");
        const auto answer = wire::decode_authenticated(body);
        expect(answer.has_value(), "the port sends valid proofs");
        if (channel_.state() == State::awaits_answer)
          (void)channel_.read_answer({header, bytes.first(wire::kHeaderBytes)}, *answer);
        return true;
      }
      default: {
        const auto refusal =
            wire::encode(wire::make_refuse(Status::refused, "authentication required"));
        expect(is_inbound_ && same(bytes, refusal.bytes()), "strangers learn nothing");
        return false;
      }
    }
  }
  /// The port's proof may have come before the peer took keys.
  void hear_request() {
    if (request_.empty()) return;
    const auto header = wire::decode_header(request_);
    expect(header.has_value(), "the port sends valid headers");
    const auto bytes = std::span<const std::byte>(request_);
    answer_proof({*header, bytes.first(wire::kHeaderBytes)}, bytes.subspan(wire::kHeaderBytes));
  }
  void answer_proof(const control::SecureChannel::Header& header, std::span<const std::byte> body) {
    const auto request = wire::decode_authenticate(body);
    expect(request.has_value(), "the port sends valid proofs");
    wire::Frame answer;
    const auto outcome = channel_.read_request(header, *request, answer);
    if (outcome && *outcome == control::AuthenticationFailure::none) say(answer.bytes());
  }
  void hear_sealed(const wire::FrameHeader& header, std::span<const std::byte> body) {
    if (!channel_.seals()) return;  // the answer to a proof of another peer, which we have repeated
    Bytes opened(body.size() - wire::kSealTagBytes);
    expect(channel_.open(header, body, opened.data()), "the port's frames open in their order");
    const auto inner = wire::decode_header(opened);
    expect(inner.has_value(), "the port sends valid headers");
    expect(wire::decode_body(*inner, std::span(opened).subspan(wire::kHeaderBytes)).has_value(),
           "the port sends valid bodies");
    note(inner->kind);
  }
  void check_order(wire::FrameKind kind) const {
    using enum wire::FrameKind;
    expect(!kinds_.has(refuse), "a refusal is the last frame");
    if (is_inbound_) {
      expect(wire::kinds(accept, refuse, ready, session_opened).has(kind), "a server's frame");
      expect(kind == refuse || kinds_.empty(), "a server answers once");
      if (kind == session_opened)
        expect(path_token == 0 || has_said(path_token), "a session opens after its path's proof");
      return;
    }
    expect(wire::kinds(hello, refuse, ready, open_session, join_session, path_response).has(kind),
           "a client's frame");
    const wire::KindSet first = wire::kinds(hello, open_session, join_session, ready, refuse);
    expect(!kinds_.empty() || first.has(kind), "a client's first frame");
    expect(!wire::kinds(hello, open_session, join_session).has(kind) || kinds_.empty(),
           "a client asks once");
  }

  using State = control::SecureChannel::State;

  bool is_inbound_;
  bool has_keys_;
  control::SecureChannel channel_;
  Bytes request_;  ///< the port's proof, until prove()
  Address address_;
  UniqueFd fd_;
  std::uint64_t& changes_;
  Bytes aside_, said_, heard_;
  std::size_t filler_bytes_ = 0;
  wire::KindSet kinds_;  ///< of the frames heard
};

/// The connections that wait for a listener.
struct WaitingConnections final : control::AcceptQueue {
  std::deque<control::Accepted> waiting;
  std::uint64_t* accepts = nullptr;

  Result<std::optional<control::Accepted>> accept(int fd) override {
    if (waiting.empty()) return std::nullopt;
    ++*accepts;
    std::uint64_t one = 0;
    (void)!::read(fd, &one, sizeof one);
    control::Accepted first = std::move(waiting.front());
    waiting.pop_front();
    return std::optional(std::move(first));
  }
};

/// Where an outbound handshake goes: the port of its address.
enum class Place : std::uint16_t {
  server = 1,   ///< a peer answers, or does not
  far_server,   ///< connecting continues until the peer reads
  refuses,      ///< nobody listens
  unreachable,  ///< a time-out at once
  no_sockets,   ///< this host has none left
  count
};

class MemoryNetwork final : public control::Network {
 public:
  Result<Listening> listen(const Address& address) override {
    Listening made;
    made.fd.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK | EFD_SEMAPHORE));
    expect(static_cast<bool>(made.fd), "an eventfd");
    made.local = address;
    auto queue = std::make_shared<WaitingConnections>();
    queue->accepts = &accepts;
    event_ = made.fd.get();
    listener_ = queue;
    made.queue = std::move(queue);
    return made;
  }

  Result<control::Connecting> connect(const Address& remote) override {
    switch (static_cast<Place>(remote.port())) {
      case Place::no_sockets:
        return tl::unexpected(control::system_error("connect", "socket", EMFILE));
      case Place::refuses:
        return control::Connecting{pair().first, ECONNREFUSED};
      case Place::unreachable:
        return control::Connecting{pair().first, ETIMEDOUT};
      default:
        break;
    }
    auto [near, far] = pair();
    peers.push_back(std::make_unique<Peer>(std::move(far), false, remote, changes_, has_keys));
    if (remote.port() == static_cast<std::uint16_t>(Place::far_server))
      peers.back()->delay_connect(near.get());
    return control::Connecting{std::move(near), 0};
  }
  [[nodiscard]] const std::uint64_t* change_count() const noexcept override { return &changes_; }

  /// Connects a stranger to the listener, from a source and a port of its own. Null: nobody
  /// listens.
  Peer* call(std::uint8_t source) {
    const auto listener = listener_.lock();
    if (listener == nullptr) return nullptr;
    const Address from = address_of(source, next_port_++);
    auto [near, far] = pair();
    peers.push_back(std::make_unique<Peer>(std::move(near), true, from, changes_, has_keys));
    listener->waiting.push_back({std::move(far), from});
    const std::uint64_t one = 1;
    (void)!::write(event_, &one, sizeof one);
    ++changes_;
    return peers.back().get();
  }
  [[nodiscard]] std::size_t waiting() const {
    const auto listener = listener_.lock();
    return listener != nullptr ? listener->waiting.size() : 0;
  }
  [[nodiscard]] Peer* find(const Address& address) const {
    for (const auto& peer : peers) {
      if (peer->is_inbound() && peer->address() == address) return peer.get();
    }
    return nullptr;
  }

  static Address address_of(std::uint8_t source, std::uint16_t port) {
    return *Address::parse("10.0.0." + std::to_string(source) + ":" + std::to_string(port));
  }

  std::vector<std::unique_ptr<Peer>> peers;
  std::uint64_t accepts = 0;
  bool has_keys = false;  ///< the port has

 private:
  static std::pair<UniqueFd, UniqueFd> pair() {
    std::array<int, 2> ends{-1, -1};
    expect(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends.data()) == 0,
           "a pair of sockets");
    return {UniqueFd(ends[0]), UniqueFd(ends[1])};
  }

  std::weak_ptr<WaitingConnections> listener_;
  int event_ = -1;
  std::uint16_t next_port_ = 1000;
  std::uint64_t changes_ = 0;
};

}  // namespace fuzz
