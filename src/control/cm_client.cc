// The client's end of a handshake through rdma_cm.
#include <utility>

#include "base/error.h"
#include "control/cm_sealing.h"

namespace spinwire::control {
namespace {

using Bytes = std::span<const std::byte>;

/// One part of what a client says.
std::array<std::byte, wire::kCmPartBytes> part_of(const CmData& endpoint, const PrivateData& ours,
                                                  std::size_t number) noexcept {
  std::array<std::byte, wire::kCmPartsMax * wire::kCmPartBytes> all{};
  const auto end = std::copy(endpoint.begin(), endpoint.end(), all.begin());
  (void)wire::encode_cm_piece(ours, 0, std::span(end, all.end()));
  std::array<std::byte, wire::kCmPartBytes> part;
  const auto from = std::span(all).subspan(number * wire::kCmPartBytes, wire::kCmPartBytes);
  std::copy(from.begin(), from.end(), part.begin());
  return part;
}

std::optional<std::string> text_of_refusal(Bytes data) {
  const wire::Refuse refusal = wire::decode_cm_refusal(data);
  if (refusal.length == 0) return std::nullopt;
  return std::string(refusal.message());
}

}  // namespace

Result<CmData> CmClient::next_request(const CmData& endpoint, const PrivateData& ours,
                                      const CmEnds& ends) {
  is_sent_ = true;
  ends_ = ends;
  length_ = ours.bytes().size();
  if (step_ == Step::proof) return make_proof();
  if (!has_key_) handshake_ = clear_handshake_of(endpoint);
  if (step_ == Step::plain) {
    if (ours.empty()) return endpoint;
    step_ = Step::parts;
  }
  return make_part(endpoint, ours);
}

Result<CmData> CmClient::make_proof() {
  const auto ephemeral = make_ephemeral();
  if (!ephemeral) return tl::unexpected(ephemeral.error());
  wire::CmProof proof;
  const Key& key = keys_.first();
  key_ = key.name;
  std::copy_n(key.id.begin(), proof.key.size(), proof.key.begin());
  begin_noise(noise_, key, kCmContext, clear_bytes_of<wire::kCmHeaderBytes>(proof));
  if (!noise_.write_first(*ephemeral, {}, room_in(proof.message)))
    return tl::unexpected(Error{Status::system, "authenticate", "the handshake cannot begin", ""});
  return wire::encode(proof);
}

CmData CmClient::make_part(const CmData& endpoint, const PrivateData& ours) noexcept {
  wire::CmPart part{handshake_, {}};
  const auto clear = clear_bytes_of<wire::kCmHeaderBytes>(part);
  const bool is_first = step_ == Step::parts && part_ == 0;
  const CmAssociated with = is_first ? CmAssociated(clear) : CmAssociated(clear, ends_);
  std::array<std::byte, wire::kCmPartBytes> text{};
  if (step_ == Step::parts) text = part_of(endpoint, ours, part_);
  (void)sending_.encrypt(with.bytes(), text, room_in(part.sealed));
  return wire::encode(part);
}

bool CmClient::has_said_all() const noexcept {
  return step_ == Step::plain || step_ == Step::more ||
         (step_ == Step::parts && part_ + 1 == wire::cm_parts(length_));
}

bool CmClient::open_authenticated(Bytes data) noexcept {
  const auto got = wire::decode_cm_authenticated(data);
  if (!got) return false;
  std::array<std::byte, wire::kHeaderBytes> said{};
  const bool proves =
      noise_.read_second(std::as_bytes(std::span(got->frame.message)), said.data()) &&
      said == got->header;
  if (proves) noise_.split(sending_.keyed(), receiving_.keyed());
  noise_.clear();
  std::copy_n(got->frame.message.begin(), handshake_.size(), handshake_.begin());
  server_takes_data_ = (got->features & wire::feature::cm_private_data) != 0;
  return proves;
}

bool CmClient::open_continue(Bytes data) noexcept {
  const auto got = wire::decode_cm_continue(data);
  return got && receiving_.decrypt(clear_bytes_of<wire::kCmMagicBytes>(*got), sealed_of(*got),
                                   &no_payload);
}

bool CmClient::open_more(Bytes data) noexcept {
  const auto got = wire::decode_cm_more(data);
  std::array<std::byte, wire::kCmMoreBytes> piece;
  return got &&
         receiving_.decrypt(clear_bytes_of<wire::kCmMagicBytes>(*got), sealed_of(*got),
                            piece.data()) &&
         theirs_.add(piece, false);
}

Error CmClient::fail(AuthenticationFailure why, std::string found) {
  counts_.count(why);
  is_sent_ = false;
  return base::make_error(Status::unauthenticated, "authenticate a server through rdma_cm",
                          std::move(found), kSameKeyRemedy);
}

Error CmClient::takes_no_private_data() const {
  return {Status::unsupported,
          base::format("connect through rdma_cm with {} bytes of private data", length_),
          "the server is of a release that takes none through rdma_cm",
          "update the server, use Via::tcp, or send the bytes as the first message"};
}

CmClient::Rejection CmClient::read_answer_to_proof(Bytes data, bool is_due) {
  if (is_due && open_authenticated(data)) {
    ++counts_.authenticated;
    step_ = Step::parts;
    if (length_ != 0 && !server_takes_data_) return {.failure = takes_no_private_data()};
    return {.goes_on = true};
  }
  const auto text = text_of_refusal(data);
  return {.failure =
              fail(AuthenticationFailure::unproven_server,
                   base::format("it does not prove the key '{}'{}", key_.view(),
                                text ? base::format(", and says '{}'", *text) : std::string()))};
}

/// A server of an older release does not know the first part, and so refuses it as malformed.
CmClient::Rejection CmClient::read_clear_refusal(Bytes data) const {
  const wire::Refuse refusal = wire::decode_cm_refusal(data);
  if (step_ == Step::parts && part_ == 0 && refusal.status == Status::protocol)
    return {.failure = takes_no_private_data()};
  return {.refusal = refusal};
}

CmClient::Rejection CmClient::read_rejection(Bytes data) {
  const bool is_due = std::exchange(is_sent_, false);
  if (step_ == Step::proof) return read_answer_to_proof(data, is_due);
  if (is_due && !has_said_all() && open_continue(data)) {
    ++part_;
    return {.goes_on = true};
  }
  if (is_due && has_said_all() && open_more(data)) {
    step_ = Step::more;
    return {.goes_on = true};
  }
  if (!has_key_) return read_clear_refusal(data);
  const auto sealed = wire::decode_cm_sealed_refusal(data);
  std::array<std::byte, wire::kCmRefusalBytes> opened;
  if (is_due && sealed &&
      receiving_.decrypt(clear_bytes_of<wire::kCmMagicBytes>(*sealed), sealed_of(*sealed),
                         opened.data()))
    return {.refusal = wire::decode_cm_refusal(opened)};
  return {.failure = fail(AuthenticationFailure::altered_frame,
                          "its rejection is altered, replayed or out of order, or somebody else "
                          "sent it")};
}

bool CmClient::open_sealed_answer(Bytes data, std::uint32_t server_qp, Answer& answer) noexcept {
  const auto open = [&](const auto& got, std::byte* to) {
    CmAssociated with(clear_bytes_of<wire::kCmMagicBytes>(got), ends_);
    with.put(server_qp);
    return receiving_.decrypt(with.bytes(), sealed_of(got), to);
  };
  answer.size = answer.endpoint.size();
  if (const auto got = wire::decode_cm_answer(data); got && step_ != Step::more)
    return open(*got, answer.endpoint.data());
  const auto got = wire::decode_cm_long_answer(data);
  std::array<std::byte, wire::kCmLongAnswerBytes> text;
  if (!got || !open(*got, text.data())) return false;
  std::copy_n(text.begin(), answer.size, answer.endpoint.begin());
  if (!theirs_.add(std::span(text).subspan(answer.size), true)) return false;
  answer.private_data = theirs_.data();
  return true;
}

/// What the endpoint lacks is found when it is decoded.
Result<CmClient::Answer> CmClient::read_clear_answer(Bytes data) {
  Answer answer;
  answer.size = std::min(data.size(), answer.endpoint.size());
  std::copy_n(data.begin(), answer.size, answer.endpoint.begin());
  const bool has_data = wire::announces_private_data(data);
  if (!has_data && theirs_.empty()) return answer;
  if (!has_data || data.size() < wire::kCmLongAnswerBytes ||
      !theirs_.add(data.subspan(answer.size, wire::kCmLongAnswerBytes - answer.size), true)) {
    return base::fail(Status::protocol, "read the server's private data through rdma_cm",
                      base::format("its answer of {} bytes has no such data, or other than it "
                                   "announced",
                                   data.size()),
                      base::kProtocolRemedy);
  }
  answer.private_data = theirs_.data();
  return answer;
}

Result<CmClient::Answer> CmClient::open_answer(Bytes data, std::uint32_t server_qp) {
  const bool is_due = std::exchange(is_sent_, false) && has_said_all();
  if (!is_due && has_key_) {
    return tl::unexpected(
        fail(AuthenticationFailure::unproven_server,
             base::format("it accepts a request without having proved the key '{}'", key_.view())));
  }
  if (!is_due) {
    return base::fail(Status::protocol, "connect through rdma_cm",
                      "the server accepts a request before it has all private data",
                      base::kProtocolRemedy);
  }
  if (!has_key_) return read_clear_answer(data);
  Answer answer;
  if (open_sealed_answer(data, server_qp, answer)) return answer;
  return tl::unexpected(fail(AuthenticationFailure::altered_frame,
                             "its answer is altered or replayed, or names another end than "
                             "rdma_cm does"));
}

}  // namespace spinwire::control
