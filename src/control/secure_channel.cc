#include "control/secure_channel.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/random.h"

namespace spinwire::control {
namespace {

using Bytes = std::span<const std::byte>;

constexpr std::string_view kContext = "spinwire control port";

static_assert(sizeof(wire::Authenticate::message) == kNoiseMessageBytes &&
              wire::kAuthenticatedBytes == kNoiseMessageBytes + wire::kHeaderBytes &&
              wire::kSealTagBytes == kNoiseTagBytes);

/// The header of a frame whose fields are known.
Bytes header_of(const wire::Frame& frame) noexcept {
  return frame.bytes().first(wire::kHeaderBytes);
}

}  // namespace

Result<NoiseSecret> make_ephemeral() {
  NoiseSecret secret;
  if (auto made = base::random_bytes(std::as_writable_bytes(std::span(secret.bytes))); !made)
    return tl::unexpected(made.error());
  return secret;
}

void begin_noise(NoiseHandshake& noise, const Key& key, std::string_view context,
                 Bytes header) noexcept {
  std::array<std::byte, 128> prologue;
  std::size_t size = 0;
  const auto put = [&](Bytes bytes) {
    std::memcpy(prologue.data() + size, bytes.data(), bytes.size());
    size += bytes.size();
  };
  const std::string_view name = key.name.view();
  const auto length = static_cast<std::byte>(name.size());
  put(std::as_bytes(std::span(context)));
  put(header);
  put(std::as_bytes(std::span(key.id)));
  put(std::span(&length, 1));
  put(std::as_bytes(std::span(name)));
  noise.begin(key.psk, std::span(prologue).first(size));
}

void OwnRequests::remove(const PublicKey& ephemeral) noexcept {
  std::erase_if(entries_, [&](const Entry& entry) { return entry.ephemeral == ephemeral; });
}

int OwnRequests::find(Bytes message) const noexcept {
  const auto at = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    return std::equal(entry.ephemeral.begin(), entry.ephemeral.end(), message.begin());
  });
  return at != entries_.end() ? at->fd : -1;
}

void SecureChannel::begin(const KeyRing* keys, bool is_client, OwnRequests* own) noexcept {
  reset();
  if (keys == nullptr) return;
  keys_ = keys;
  own_ = own;
  is_client_ = is_client;
  state_ = is_client ? State::before_request : State::awaits_request;
}

void SecureChannel::reset() noexcept {
  if (state_ == State::off) return;
  forget_request();
  state_ = State::off;
  keys_ = nullptr;
  own_ = nullptr;
  key_ = {};
  noise_.clear();
  sending_.clear();
  receiving_.clear();
}

void SecureChannel::forget_request() noexcept {
  if (std::exchange(is_listed_, false)) own_->remove(ephemeral_);
}

wire::KindSet SecureChannel::expected() const noexcept {
  using wire::FrameKind;
  switch (state_) {
    case State::awaits_request:
      return wire::kinds(FrameKind::authenticate);
    case State::before_request:
    case State::awaits_answer:
      return wire::kinds(FrameKind::authenticated, FrameKind::refuse);
    case State::answered:
    case State::authenticated:
      return wire::kinds(FrameKind::sealed);
    case State::off:
      break;
  }
  return {};
}

Result<wire::Frame> SecureChannel::make_request(int fd) {
  const auto ephemeral = make_ephemeral();
  if (!ephemeral) return tl::unexpected(ephemeral.error());
  const Key& key = keys_->first();
  wire::Authenticate request{key.id, {}};
  key_ = key.name;
  begin_noise(noise_, key, kContext, header_of(wire::encode(request)));
  if (!noise_.write_first(*ephemeral, {}, room_in(request.message)))
    return tl::unexpected(Error{Status::system, "authenticate", "the handshake cannot begin", ""});
  if (own_ != nullptr) {
    std::memcpy(ephemeral_.data(), request.message.data(), ephemeral_.size());
    own_->add(ephemeral_, fd);
    is_listed_ = true;
  }
  state_ = State::awaits_answer;
  return wire::encode(request);
}

Result<AuthenticationFailure> SecureChannel::read_request(const Header& header,
                                                          const wire::Authenticate& request,
                                                          wire::Frame& answer) {
  const Key* const key = keys_->find(request.key);
  if (key == nullptr) return AuthenticationFailure::unknown_key;
  key_ = key->name;
  begin_noise(noise_, *key, kContext, header.bytes);
  if (!noise_.read_first(std::as_bytes(std::span(request.message)), &no_payload)) {
    noise_.clear();
    return AuthenticationFailure::wrong_proof;
  }
  const auto ephemeral = make_ephemeral();
  if (!ephemeral) return tl::unexpected(ephemeral.error());
  wire::Authenticated ours;
  const wire::Frame headed = wire::encode(ours);
  if (!noise_.write_second(*ephemeral, header_of(headed), room_in(ours.message))) {
    noise_.clear();
    return AuthenticationFailure::wrong_proof;
  }
  answer = wire::encode(ours);
  finish(header.fields, State::answered);
  return AuthenticationFailure::none;
}

bool SecureChannel::read_answer(const Header& header, const wire::Authenticated& answer) noexcept {
  std::array<std::byte, wire::kHeaderBytes> said{};
  forget_request();
  if (!noise_.read_second(std::as_bytes(std::span(answer.message)), said.data()) ||
      !std::equal(said.begin(), said.end(), header.bytes.begin(), header.bytes.end())) {
    noise_.clear();
    return false;
  }
  finish(header.fields, State::authenticated);
  return true;
}

void SecureChannel::finish(const wire::FrameHeader& theirs, State next) noexcept {
  noise_.split(is_client_ ? sending_ : receiving_, is_client_ ? receiving_ : sending_);
  noise_.clear();
  their_versions_ = theirs.versions;
  state_ = next;
}

wire::SealedFrame SecureChannel::seal(const wire::Frame& frame) noexcept {
  wire::SealedFrame sealed = wire::begin_sealed(frame.size);
  (void)sending_.encrypt({}, frame.bytes(), sealed.body());  // a handshake has few frames
  return sealed;
}

bool SecureChannel::open(const wire::FrameHeader& header, Bytes sealed, std::byte* to) noexcept {
  // The header is not encrypted: each of its fields is known, or is the length of what is.
  if (header.versions != their_versions_ || header.features != 0) return false;
  if (!receiving_.decrypt({}, sealed, to)) return false;
  state_ = State::authenticated;
  return true;
}

}  // namespace spinwire::control
