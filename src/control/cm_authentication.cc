#include "control/cm_authentication.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "wire/codec.h"

namespace spinwire::control {
namespace {

using Bytes = std::span<const std::byte>;
using CmHalfBytes = std::array<std::byte, wire::kCmHalfBytes>;

constexpr std::string_view kCmContext = "spinwire rdma_cm";
constexpr const char* kCmRemedy =
    "give both ends the same key with the same name in security.key_file, and restart the end "
    "whose file has changed";

static_assert(sizeof(wire::CmProof::message) == kNoiseMessageBytes &&
              wire::kSealTagBytes == kNoiseTagBytes);

/// Room for the payload of an empty message.
std::byte no_payload{};

/// What a tag covers beside its text: the bytes of the struct that are in the clear, and the ends
/// where they are known.
struct CmAssociated {
  std::array<std::byte, 48> storage{};
  std::size_t size = 0;

  explicit CmAssociated(Bytes clear) noexcept { put(clear); }
  CmAssociated(Bytes clear, const CmEnds& ends) noexcept : CmAssociated(clear) {
    put(std::as_bytes(std::span(ends.client_gid)));
    put(std::as_bytes(std::span(ends.server_gid)));
    put(ends.client_qp);
  }
  void put(Bytes bytes) noexcept {
    std::memcpy(storage.data() + size, bytes.data(), bytes.size());
    size += bytes.size();
  }
  void put(std::uint32_t number) noexcept {
    wire::put_number(storage.data() + size, number);
    size += sizeof number;
  }
  [[nodiscard]] Bytes bytes() const noexcept { return {storage.data(), size}; }
};

/// The bytes in the clear of a struct whose sealed ones are still to be filled in.
template <std::size_t size, typename Struct>
std::array<std::byte, size> clear_bytes_of(const Struct& s) noexcept {
  std::array<std::byte, size> clear;
  std::copy_n(wire::encode(s).begin(), size, clear.begin());
  return clear;
}

std::byte* room_in(auto& sealed) noexcept {
  return std::as_writable_bytes(std::span(sealed)).data();
}

/// One half of the endpoint's data.
CmHalfBytes half_of(const CmData& endpoint, bool is_first) noexcept {
  CmHalfBytes half{};
  const auto all = std::span(endpoint);
  const auto part = is_first ? all.first(wire::kCmHalfBytes) : all.subspan(wire::kCmHalfBytes);
  std::copy(part.begin(), part.end(), half.begin());
  return half;
}

std::optional<std::string> text_of_refusal(Bytes data) {
  const wire::Refuse refusal = wire::decode_cm_refusal(data);
  if (refusal.length == 0) return std::nullopt;
  return std::string(refusal.message());
}

}  // namespace

CmEnds ends_of(const CmId& id, std::uint32_t client_qp, bool is_client) noexcept {
  CmEnds ends;
  ends.client_qp = client_qp;
  if (!id) return ends;
  const ibv_gid &ours = id.own_gid(), &theirs = id.peer_gid();
  std::copy_n((is_client ? ours : theirs).raw, ends.client_gid.size(), ends.client_gid.begin());
  std::copy_n((is_client ? theirs : ours).raw, ends.server_gid.size(), ends.server_gid.begin());
  return ends;
}

// ---- client ----

Result<CmData> CmClientProof::next_request(const CmData& endpoint, const CmEnds& ends) {
  is_sent_ = true;
  ends_ = ends;
  if (step_ == Step::proof) {
    const auto ephemeral = make_ephemeral();
    if (!ephemeral) return tl::unexpected(ephemeral.error());
    wire::CmProof proof;
    std::copy_n(key_.id.begin(), proof.key.size(), proof.key.begin());
    begin_noise(noise_, key_, kCmContext, clear_bytes_of<wire::kCmHeaderBytes>(proof));
    if (!noise_.write_first(*ephemeral, {}, room_in(proof.message)))
      return tl::unexpected(
          Error{Status::system, "authenticate", "the handshake cannot begin", ""});
    return wire::encode(proof);
  }
  const bool is_first = step_ == Step::first_half;
  wire::CmHalf half{handshake_, {}};
  const auto clear = clear_bytes_of<wire::kCmHeaderBytes>(half);
  const CmAssociated with = is_first ? CmAssociated(clear) : CmAssociated(clear, ends);
  (void)sending_.encrypt(with.bytes(), half_of(endpoint, is_first), room_in(half.sealed));
  return wire::encode(half);
}

bool CmClientProof::open_authenticated(Bytes data) noexcept {
  const auto got = wire::decode_cm_authenticated(data);
  if (!got) return false;
  std::array<std::byte, wire::kHeaderBytes> said{};
  const bool proves =
      noise_.read_second(std::as_bytes(std::span(got->frame.message)), said.data()) &&
      said == got->header;
  if (proves) noise_.split(sending_, receiving_);
  noise_.clear();
  std::copy_n(got->frame.message.begin(), handshake_.size(), handshake_.begin());
  return proves;
}

bool CmClientProof::open_continue(Bytes data) noexcept {
  const auto got = wire::decode_cm_continue(data);
  return got && receiving_.decrypt(clear_bytes_of<wire::kCmMagicBytes>(*got),
                                   std::as_bytes(std::span(got->sealed)), &no_payload);
}

Error CmClientProof::fail(AuthenticationFailure why, std::string found) {
  counts_.count(why);
  is_sent_ = false;
  return base::make_error(Status::unauthenticated, "authenticate a server through rdma_cm",
                          std::move(found), kCmRemedy);
}

CmClientProof::Rejection CmClientProof::read_rejection(Bytes data) {
  const bool is_due = std::exchange(is_sent_, false);
  if (step_ == Step::proof) {
    if (is_due && open_authenticated(data)) {
      ++counts_.authenticated;
      step_ = Step::first_half;
      return {.goes_on = true};
    }
    const auto text = text_of_refusal(data);
    return {.failure =
                fail(AuthenticationFailure::unproven_server,
                     base::format("it does not prove the key '{}'{}", key_.name,
                                  text ? base::format(", and says '{}'", *text) : std::string()))};
  }
  if (is_due && step_ == Step::first_half && open_continue(data)) {
    step_ = Step::second_half;
    return {.goes_on = true};
  }
  const auto sealed = wire::decode_cm_sealed_refusal(data);
  std::array<std::byte, wire::kCmRefusalBytes> opened;
  if (is_due && sealed &&
      receiving_.decrypt(clear_bytes_of<wire::kCmMagicBytes>(*sealed),
                         std::as_bytes(std::span(sealed->sealed)), opened.data()))
    return {.refusal = wire::decode_cm_refusal(opened)};
  return {.failure = fail(AuthenticationFailure::altered_frame,
                          "its rejection is altered, replayed or out of order, or somebody else "
                          "sent it")};
}

Result<CmData> CmClientProof::open_answer(Bytes data, std::uint32_t server_qp) {
  const bool is_due = std::exchange(is_sent_, false);
  if (!is_due || step_ != Step::second_half) {
    return tl::unexpected(
        fail(AuthenticationFailure::unproven_server,
             base::format("it accepts a request without having proved the key '{}'", key_.name)));
  }
  CmData endpoint;
  if (const auto answer = wire::decode_cm_answer(data); answer) {
    CmAssociated with(clear_bytes_of<wire::kCmMagicBytes>(*answer), ends_);
    with.put(server_qp);
    if (receiving_.decrypt(with.bytes(), std::as_bytes(std::span(answer->sealed)), endpoint.data()))
      return endpoint;
  }
  return tl::unexpected(fail(AuthenticationFailure::altered_frame,
                             "its answer is altered or replayed, or names another end than "
                             "rdma_cm does"));
}

// ---- server ----

wire::CmAnswer CmServerProof::seal(const CmData& endpoint, std::uint32_t server_qp) noexcept {
  wire::CmAnswer answer;
  CmAssociated with(clear_bytes_of<wire::kCmMagicBytes>(answer), ends_);
  with.put(server_qp);
  (void)sending_.encrypt(with.bytes(), endpoint, room_in(answer.sealed));
  return answer;
}

wire::CmRefusal CmServerProof::seal(const wire::Refuse& refusal) noexcept {
  wire::CmRefusal sealed;
  std::array<std::byte, wire::kCmRefusalBytes> text{};
  const wire::Frame frame = wire::encode_cm_refusal(refusal, text.size());
  std::copy_n(frame.bytes().begin(), frame.size, text.begin());
  (void)sending_.encrypt(clear_bytes_of<wire::kCmMagicBytes>(sealed), text, room_in(sealed.sealed));
  return sealed;
}

void reject(CmId& id, CmServerProof* proof, const wire::Refuse& refusal) noexcept {
  if (!id) return;
  if (proof != nullptr) return id.reject(wire::encode(proof->seal(refusal)));
  id.reject(wire::encode_cm_refusal(refusal).bytes());
}

namespace {

/// The answer with the bytes of a struct.
CmProofs::Answer answer_of(Bytes bytes) noexcept {
  CmProofs::Answer answer;
  std::copy(bytes.begin(), bytes.end(), answer.storage.begin());
  answer.size = bytes.size();
  return answer;
}

}  // namespace

CmProofs::Outcome CmProofs::refuse(AuthenticationFailure why, std::string found) {
  counts_.count(why);
  Outcome outcome;
  outcome.refused = std::move(found);
  return outcome;
}

Result<CmProofs::Outcome> CmProofs::on_request(Bytes data, const Source& source,
                                               const CmEnds& ends) {
  expire();
  const auto proof = wire::decode_cm_proof(data);
  const auto half = wire::decode_cm_half(data);
  if (!proof && !half) {
    return refuse(AuthenticationFailure::no_proof,
                  "its request through rdma_cm offers no proof of a key");
  }
  CmData request;
  std::copy_n(data.begin(), request.size(), request.begin());
  for (const auto& record : records_) {
    if (record->request == request) return Outcome{.answer = record->answer};
  }
  if (proof) return on_proof(*proof, request, source);
  return on_half(*half, request, ends);
}

Result<CmProofs::Outcome> CmProofs::on_proof(const wire::CmProof& proof, const CmData& data,
                                             const Source& source) {
  const auto clear = Bytes(data).first(wire::kCmHeaderBytes);
  const auto message = std::as_bytes(std::span(proof.message));
  auto record = std::make_unique<Record>();
  NoiseHandshake noise;
  bool is_known = false;
  for (const Key& key : keys_.all()) {
    if (!std::equal(proof.key.begin(), proof.key.end(), key.id.begin())) continue;
    is_known = true;
    begin_noise(noise, key, kCmContext, clear);
    if (noise.read_first(message, &no_payload)) record->key = &key;
    if (record->key != nullptr) break;
  }
  const auto wrong = [&] {
    noise.clear();
    return refuse(AuthenticationFailure::wrong_proof,
                  "its proof is wrong: the key has another name there, or the request was altered "
                  "or forged");
  };
  if (!is_known)
    return refuse(AuthenticationFailure::unknown_key, "it has a key that is not in our key file");
  if (record->key == nullptr) return wrong();
  const auto ephemeral = make_ephemeral();
  if (!ephemeral) return tl::unexpected(ephemeral.error());
  wire::Authenticated ours;
  const wire::Frame headed = wire::encode(ours);
  if (!noise.write_second(*ephemeral, headed.bytes().first(wire::kHeaderBytes),
                          room_in(ours.message)))
    return wrong();
  noise.split(record->receiving, record->sending);
  noise.clear();
  record->source = source;
  record->since = clock_.now();
  record->request = data;
  record->answer = answer_of(wire::encode(ours).bytes());
  std::copy_n(ours.message.begin(), record->handshake.size(), record->handshake.begin());
  if (records_.size() >= most_) make_room();
  records_.reserve(records_.size() + 1);
  ++counts_of_[source];
  records_.push_back(std::move(record));
  return Outcome{.answer = records_.back()->answer};
}

CmProofs::Outcome CmProofs::on_half(const wire::CmHalf& half, const CmData& data,
                                    const CmEnds& ends) {
  const auto clear = Bytes(data).first(wire::kCmHeaderBytes);
  const auto sealed = std::as_bytes(std::span(half.sealed));
  Record* failed = nullptr;
  for (std::size_t i = 0; i < records_.size(); ++i) {
    Record& record = *records_[i];
    if (record.handshake != half.handshake) continue;
    const CmAssociated with = record.has_half ? CmAssociated(clear, ends) : CmAssociated(clear);
    CmHalfBytes opened;
    if (!record.receiving.decrypt(with.bytes(), sealed, opened.data())) {
      failed = &record;
      continue;
    }
    if (record.has_half) return on_second_half(i, opened, ends);
    record.half = opened;
    on_first_half(record, data);
    return Outcome{.answer = record.answer};
  }
  if (failed == nullptr) {
    return refuse(AuthenticationFailure::no_proof,
                  "its request through rdma_cm belongs to no handshake");
  }
  failed->is_failure_counted = true;
  return refuse(failed->has_half ? AuthenticationFailure::altered_frame
                                 : AuthenticationFailure::unconfirmed_proof,
                "its request is altered, replayed or out of order, names another end than rdma_cm "
                "does, or somebody else sent it");
}

void CmProofs::on_first_half(Record& record, const CmData& data) noexcept {
  ++counts_.authenticated;
  wire::CmContinue next;
  (void)record.sending.encrypt(clear_bytes_of<wire::kCmMagicBytes>(next), {}, room_in(next.sealed));
  record.has_half = true;
  record.request = data;
  record.answer = answer_of(wire::encode(next));
}

CmProofs::Outcome CmProofs::on_second_half(std::size_t index, const CmHalfBytes& half,
                                           const CmEnds& ends) {
  const Record& record = *records_[index];
  Outcome outcome;
  std::copy(record.half.begin(), record.half.end(), outcome.endpoint.begin());
  std::copy_n(half.begin(), outcome.endpoint.size() - record.half.size(),
              outcome.endpoint.begin() + record.half.size());
  outcome.proof = std::make_unique<CmServerProof>(*record.key, ends, record.sending);
  erase(index);
  return outcome;
}

void CmProofs::erase(std::size_t index) noexcept {
  const auto count = counts_of_.find(records_[index]->source);
  if (--count->second == 0) counts_of_.erase(count);
  records_.erase(records_.begin() + static_cast<std::ptrdiff_t>(index));
}

void CmProofs::drop(std::size_t index) noexcept {
  const Record& record = *records_[index];
  if (!record.has_half && !record.is_failure_counted)
    counts_.count(AuthenticationFailure::unconfirmed_proof);
  erase(index);
}

void CmProofs::make_room() noexcept {
  const auto rank = [this](const Record& record) {
    return std::pair(counts_of_.find(record.source)->second, !record.has_half);
  };
  std::size_t victim = 0;
  for (std::size_t i = 1; i < records_.size(); ++i) {
    if (rank(*records_[i]) > rank(*records_[victim])) victim = i;
  }
  drop(victim);
}

void CmProofs::expire() noexcept {
  const std::uint64_t timeout = clock_.ticks(timeout_);
  while (!records_.empty() && clock_.now() - records_.front()->since >= timeout) drop(0);
}

}  // namespace spinwire::control
