// The part of an exchange that authenticates the peer and opens its frames. Cold.
#include <array>
#include <string>
#include <utility>

#include "base/error.h"
#include "control/exchange.h"

namespace spinwire::control {

SecureChannel::Header Exchange::raw_header() const noexcept {
  return {header_, std::span<const std::byte>(in_).first(wire::kHeaderBytes)};
}

Progress Exchange::fail_authentication(AuthenticationFailure why, std::string found) {
  failure_ = why;
  return fail(
      base::make_error(Status::unauthenticated, base::format("authenticate {}", peer_address()),
                       std::move(found), kSameKeyRemedy),
      true);
}

/// False: the exchange has failed.
bool Exchange::request_authentication() {
  auto request = channel_.make_request(fd());
  if (!request) return fail(std::move(request.error()), false), false;
  queue(request->bytes());
  return true;
}

/// Whether a host on the way has led our own client to our listener. A client of our own that
/// connects directly comes from the address that its socket has.
bool Exchange::is_led_back(const wire::Authenticate& request) const {
  const int client = own_ != nullptr ? own_->find(std::as_bytes(std::span(request.message))) : -1;
  if (client < 0) return false;
  const auto from = local_address(client);
  return !from || *from != remote_;
}

Progress Exchange::on_request(const wire::Authenticate& request) {
  if (is_led_back(request)) {
    return fail_authentication(
        AuthenticationFailure::wrong_proof,
        "its proof is one of our own, which a host on the way has sent back");
  }
  wire::Frame answer;
  auto checked = channel_.read_request(raw_header(), request, answer);
  if (!checked) return fail(std::move(checked.error()), false);
  switch (*checked) {
    case AuthenticationFailure::none:
      break;
    case AuthenticationFailure::unknown_key:
      return fail_authentication(*checked, "it has a key that is not in our key file");
    default:
      return fail_authentication(
          *checked, base::format("its proof of the key '{}' is wrong: the key has another name "
                                 "there, or the frame was altered or forged",
                                 channel_.key().view()));
  }
  queue(answer.bytes());
  return send_waiting();
}

/// Sends what waited for the proof. The next step reports an error.
Progress Exchange::send_waiting() noexcept {
  for (std::size_t i = 0; i < waiting_; ++i) queue(held_[i]);
  waiting_ = 0;
  (void)write_out();
  return Progress::waiting;
}

Progress Exchange::on_answer(const wire::Authenticated& answer) {
  if (!channel_.read_answer(raw_header(), answer)) {
    return fail_authentication(
        AuthenticationFailure::unproven_server,
        base::format("its answer does not prove the key '{}'", channel_.key().view()));
  }
  return send_waiting();
}

/// Anybody between the ends can send such a refusal, so only its text counts, for people.
Progress Exchange::on_early_refusal(const wire::Refuse& refusal) {
  return fail_authentication(AuthenticationFailure::unproven_server,
                             base::format("it does not prove the key '{}', and says '{}'",
                                          channel_.key().view(), refusal.message()));
}

Progress Exchange::open_sealed() {
  const auto sealed =
      std::span<const std::byte>(in_).subspan(wire::kHeaderBytes, header_.body_length);
  std::array<std::byte, wire::kFrameBytesMax> opened;
  if (!channel_.open(header_, sealed, opened.data())) {
    return fail_authentication(
        channel_.is_authenticated() ? AuthenticationFailure::altered_frame
                                    : AuthenticationFailure::unconfirmed_proof,
        "it sent a frame that is altered, replayed or out of order, or somebody else sent it");
  }
  const auto frame = std::span<const std::byte>(opened).first(sealed.size() - wire::kSealTagBytes);
  auto header = wire::decode_header(frame);
  if (!header) return fail(std::move(header.error()), true);
  if (!expected_.has(header->kind)) return unexpected(*header, expected_);
  return on_frame(*header, frame.subspan(wire::kHeaderBytes));
}

}  // namespace spinwire::control
