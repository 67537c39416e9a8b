// The server's end of a handshake through rdma_cm, and what both ends share.
#include "control/cm_authentication.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "control/cm_sealing.h"

namespace spinwire::control {
namespace {

using Bytes = std::span<const std::byte>;

CmData data_of(Bytes bytes) noexcept {
  CmData data{};
  std::copy_n(bytes.begin(), data.size(), data.begin());
  return data;
}

/// Without a key: it has the number of a first part, and an endpoint begins in it. A request for
/// more of ours, whose number may be the same, is zeroes.
bool is_first_clear(const wire::CmPart& part) {
  std::array<std::byte, wire::kCmPartBytes> text;
  return CmCipher(false).decrypt({}, sealed_of(part), text.data()) &&
         wire::check_magic(text).has_value();
}

/// What an answer holds that has the last piece of private data.
std::array<std::byte, wire::kCmLongAnswerBytes> long_answer(const CmData& endpoint,
                                                            const PrivateData& ours,
                                                            std::size_t from) noexcept {
  std::array<std::byte, wire::kCmLongAnswerBytes> text;
  const auto end = std::copy(endpoint.begin(), endpoint.end(), text.begin());
  (void)wire::encode_cm_piece(ours, from, std::span(end, text.end()));
  return text;
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

std::array<std::uint8_t, 4> clear_handshake_of(const CmData& endpoint) noexcept {
  std::array<std::uint8_t, 4> name{};
  const auto from = std::span(endpoint).subspan(wire::kCmIncarnationAt, name.size());
  std::transform(from.begin(), from.end(), name.begin(),
                 [](std::byte b) { return std::to_integer<std::uint8_t>(b); });
  return name;
}

// ---- CmCipher ----

bool CmCipher::encrypt(Bytes associated, Bytes text, std::byte* to) noexcept {
  if (has_key_) return noise_.encrypt(associated, text, to);
  std::byte* const end = std::copy(text.begin(), text.end(), to);
  std::fill_n(end, wire::kSealTagBytes, std::byte{0});
  wire::put_number(end, count_++);
  return true;
}

bool CmCipher::decrypt(Bytes associated, Bytes sealed, std::byte* to) noexcept {
  if (has_key_) return noise_.decrypt(associated, sealed, to);
  const Bytes text = sealed.first(sealed.size() - wire::kSealTagBytes);
  std::array<std::byte, wire::kSealTagBytes> due{};
  wire::put_number(due.data(), count_);
  const Bytes number = sealed.subspan(text.size());
  if (!std::equal(number.begin(), number.end(), due.begin())) return false;
  ++count_;
  std::copy(text.begin(), text.end(), to);
  return true;
}

// ---- CmServer ----

CmServer::CmServer(const CmData& request, const Source& source, const CmEnds& ends,
                   std::uint64_t number) noexcept
    : CmServer(KeyName(), source) {
  number_ = number;
  std::copy(request.begin(), request.end(), said_.begin());
  request_ = request;
  handshake_ = clear_handshake_of(request);
  ends_ = ends;
}

CmData CmServer::endpoint() const noexcept { return data_of(said_); }

void CmServer::decide(const PrivateData& ours, ListenerId listener) noexcept {
  ours_ = ours;
  listener_ = listener;
}

bool CmServer::is_of(const Source& source, const CmEnds& ends) const noexcept {
  return !key_.empty() ||
         (source_ == source && ends_.client_qp == ends.client_qp &&
          ends_.client_gid == ends.client_gid && ends_.server_gid == ends.server_gid);
}

bool CmServer::open(Bytes clear, const wire::CmPart& part, const CmEnds& ends,
                    std::span<std::byte, wire::kCmPartBytes> to) noexcept {
  const bool is_first = parts_ == 0 && !ours_;
  const CmAssociated with = is_first ? CmAssociated(clear) : CmAssociated(clear, ends);
  return receiving_.decrypt(with.bytes(), sealed_of(part), to.data());
}

bool CmServer::has_more() const noexcept {
  return ours_->bytes().size() - told_ > wire::kCmAnswerData;
}

CmMessage CmServer::more() noexcept {
  std::array<std::byte, wire::kCmMoreBytes> piece;
  told_ += wire::encode_cm_piece(*ours_, told_, piece);
  wire::CmMore more;
  (void)sending_.encrypt(clear_bytes_of<wire::kCmMagicBytes>(more), piece, room_in(more.sealed));
  answer_ = CmMessage(wire::encode(more));
  return answer_;
}

CmMessage CmServer::answer(const CmData& endpoint, const PrivateData& ours,
                           std::uint32_t server_qp) noexcept {
  if (key_.empty()) return clear_answer(endpoint, ours, told_);
  const auto seal = [&](auto answer, Bytes text) {
    CmAssociated with(clear_bytes_of<wire::kCmMagicBytes>(answer), ends_);
    with.put(server_qp);
    (void)sending_.encrypt(with.bytes(), text, room_in(answer.sealed));
    return CmMessage(wire::encode(answer));
  };
  if (ours.empty()) return seal(wire::CmAnswer(), endpoint);
  return seal(wire::CmLongAnswer(), long_answer(endpoint, ours, told_));
}

CmMessage CmServer::refuse(const wire::Refuse& refusal) noexcept {
  if (key_.empty()) return CmMessage(wire::encode_cm_refusal(refusal).bytes());
  wire::CmRefusal sealed;
  std::array<std::byte, wire::kCmRefusalBytes> text{};
  const wire::Frame frame = wire::encode_cm_refusal(refusal, text.size());
  std::copy_n(frame.bytes().begin(), frame.size, text.begin());
  (void)sending_.encrypt(clear_bytes_of<wire::kCmMagicBytes>(sealed), text, room_in(sealed.sealed));
  return CmMessage(wire::encode(sealed));
}

CmMessage clear_answer(const CmData& endpoint, const PrivateData& ours, std::size_t told) noexcept {
  if (ours.empty()) return CmMessage(endpoint);
  auto text = long_answer(endpoint, ours, told);
  wire::announce_private_data(std::span(text).first<wire::kCmDataBytes>());
  return CmMessage(text);
}

void reject(CmId& id, CmServer* server, const wire::Refuse& refusal) noexcept {
  if (!id) return;
  if (server != nullptr) return id.reject(server->refuse(refusal).bytes());
  id.reject(wire::encode_cm_refusal(refusal).bytes());
}

// ---- CmProofs ----

CmProofs::Outcome CmProofs::refuse(AuthenticationFailure why, std::string found) {
  if (!keys_.empty()) counts_.count(why);
  Outcome outcome;
  outcome.refused = std::move(found);
  return outcome;
}

Result<CmProofs::Outcome> CmProofs::on_request(Bytes data, const Source& source,
                                               const CmEnds& ends) {
  expire();
  const auto proof = wire::decode_cm_proof(data);
  const auto part = wire::decode_cm_part(data);
  if (!keys_.empty() && !proof && !part) {
    return refuse(AuthenticationFailure::no_proof,
                  "its request through rdma_cm offers no proof of a key");
  }
  CmData request{};
  std::copy_n(data.begin(), std::min(data.size(), request.size()), request.begin());
  for (const auto& record : records_) {
    if (record->request_ == request && record->is_of(source, ends))
      return Outcome{.answer = record->answer_};
  }
  if (keys_.empty() && part) return on_clear_part(*part, request, source, ends);
  if (keys_.empty()) {
    give_up(clear_handshake_of(request), source, ends);
    return Outcome{.is_plain = true, .number = ++begun_};
  }
  if (proof) return on_proof(*proof, request, source);
  return on_part(*part, request, ends);
}

Result<CmProofs::Outcome> CmProofs::on_proof(const wire::CmProof& proof, const CmData& data,
                                             const Source& source) {
  const auto clear = Bytes(data).first(wire::kCmHeaderBytes);
  const auto message = std::as_bytes(std::span(proof.message));
  const Key* proved = nullptr;
  NoiseHandshake noise;
  bool is_known = false;
  for (const Key& key : keys_.all()) {
    if (!std::equal(proof.key.begin(), proof.key.end(), key.id.begin())) continue;
    is_known = true;
    begin_noise(noise, key, kCmContext, clear);
    if (noise.read_first(message, &no_payload)) proved = &key;
    if (proved != nullptr) break;
  }
  const auto wrong = [&] {
    noise.clear();
    return refuse(AuthenticationFailure::wrong_proof,
                  "its proof is wrong: the key has another name there, or the request was altered "
                  "or forged");
  };
  if (!is_known)
    return refuse(AuthenticationFailure::unknown_key, "it has a key that is not in our key file");
  if (proved == nullptr) return wrong();
  const auto ephemeral = make_ephemeral();
  if (!ephemeral) return tl::unexpected(ephemeral.error());
  wire::Authenticated ours;
  const wire::Capabilities capabilities{.features = wire::feature::cm_private_data};
  const wire::Frame headed = wire::encode(ours, capabilities);
  if (!noise.write_second(*ephemeral, headed.bytes().first(wire::kHeaderBytes),
                          room_in(ours.message)))
    return wrong();
  auto record = std::unique_ptr<CmServer>(new CmServer(proved->name, source));
  noise.split(record->receiving_.keyed(), record->sending_.keyed());
  noise.clear();
  record->request_ = data;
  record->answer_ = CmMessage(wire::encode(ours, capabilities).bytes());
  std::copy_n(ours.message.begin(), record->handshake_.size(), record->handshake_.begin());
  const CmMessage answer = record->answer_;
  add(std::move(record));
  return Outcome{.answer = answer};
}

CmProofs::Outcome CmProofs::on_part(const wire::CmPart& part, const CmData& data,
                                    const CmEnds& ends) {
  const auto clear = Bytes(data).first(wire::kCmHeaderBytes);
  CmServer* failed = nullptr;
  for (std::size_t i = 0; i < records_.size(); ++i) {
    CmServer& record = *records_[i];
    if (record.handshake_ != part.handshake) continue;
    std::array<std::byte, wire::kCmPartBytes> opened;
    if (record.open(clear, part, ends, opened)) return on_opened(i, opened, data, ends);
    failed = &record;
  }
  if (failed == nullptr) {
    return refuse(AuthenticationFailure::no_proof,
                  "its request through rdma_cm belongs to no handshake");
  }
  failed->is_failure_counted_ = true;
  return refuse(failed->has_proved() ? AuthenticationFailure::altered_frame
                                     : AuthenticationFailure::unconfirmed_proof,
                "its request is altered, replayed or out of order, names another end than rdma_cm "
                "does, or somebody else sent it");
}

/// Without a key. A client has one record at most; number of records: none.
std::size_t CmProofs::find_clear(const Handshake& handshake, const Source& source,
                                 const CmEnds& ends) const noexcept {
  const auto is_its = [&](const auto& record) {
    return record->handshake_ == handshake && record->is_of(source, ends);
  };
  const auto found = std::find_if(records_.begin(), records_.end(), is_its);
  return static_cast<std::size_t>(found - records_.begin());
}

void CmProofs::give_up(const Handshake& handshake, const Source& source,
                       const CmEnds& ends) noexcept {
  if (const std::size_t known = find_clear(handshake, source, ends); known < records_.size())
    (void)remove(known);
}

CmProofs::Outcome CmProofs::on_clear_part(const wire::CmPart& part, const CmData& data,
                                          const Source& source, const CmEnds& ends) {
  const auto clear = Bytes(data).first(wire::kCmHeaderBytes);
  std::array<std::byte, wire::kCmPartBytes> opened;
  // A first part begins a handshake, also where a record waits for a message of this number: then
  // the client has given that handshake up.
  if (is_first_clear(part)) {
    give_up(part.handshake, source, ends);
    auto record = std::unique_ptr<CmServer>(new CmServer(KeyName(), source));
    record->number_ = ++begun_;
    record->handshake_ = part.handshake;
    (void)record->open(clear, part, ends, opened);
    add(std::move(record));
    return on_opened(records_.size() - 1, opened, data, ends);
  }
  const std::size_t known = find_clear(part.handshake, source, ends);
  if (known < records_.size() && records_[known]->open(clear, part, ends, opened))
    return on_opened(known, opened, data, ends);
  return refuse(AuthenticationFailure::none,
                "its request through rdma_cm belongs to no handshake, or is out of order");
}

/// The next part of what a client says, or its request for more of what we say.
CmProofs::Outcome CmProofs::on_opened(std::size_t index, Part part, const CmData& data,
                                      const CmEnds& ends) {
  index = renew(index);
  CmServer& record = *records_[index];
  record.request_ = data;
  record.ends_ = ends;
  if (record.ours_) return on_request_for_more(index, part);
  if (record.parts_ == 0 && !record.key_.empty()) ++counts_.authenticated;
  const auto at = static_cast<std::ptrdiff_t>(record.parts_ * wire::kCmPartBytes);
  std::copy(part.begin(), part.end(), record.said_.begin() + at);
  ++record.parts_;
  if (record.parts_ < wire::cm_parts(0)) return go_on(record);
  const auto length = wire::get_number<std::uint16_t>(record.said_.data() + wire::kCmDataBytes);
  if (length > kPrivateDataMax) return find_malformed(index, "their length exceeds the limit");
  if (record.parts_ < wire::cm_parts(length)) return go_on(record);
  wire::CmPieces theirs;
  const auto said = Bytes(record.said_).first(record.parts_ * wire::kCmPartBytes);
  if (!theirs.add(said.subspan(wire::kCmDataBytes), true))
    return find_malformed(index, "there are bytes behind them");
  record.theirs_ = theirs.data();
  return finish(index);
}

/// The client goes on, and has the whole time-out for its next request: a program that polls seldom
/// takes a while for each. How often that can be has a limit: the parts, and the requests for more.
std::size_t CmProofs::renew(std::size_t index) noexcept {
  records_[index]->since_ = clock_.now();
  const auto at = records_.begin() + static_cast<std::ptrdiff_t>(index);
  std::rotate(at, at + 1, records_.end());
  return records_.size() - 1;
}

CmProofs::Outcome CmProofs::on_request_for_more(std::size_t index, Part part) {
  CmServer& record = *records_[index];
  if (std::any_of(part.begin(), part.end(), [](std::byte b) { return b != std::byte{0}; }))
    return find_malformed(index, "a request for more of ours has bytes that are not zero");
  if (record.has_more()) return {.answer = record.more()};
  return finish(index);
}

CmProofs::Outcome CmProofs::go_on(CmServer& record) noexcept {
  wire::CmContinue next;
  (void)record.sending_.encrypt(clear_bytes_of<wire::kCmMagicBytes>(next), {},
                                room_in(next.sealed));
  record.answer_ = CmMessage(wire::encode(next));
  return Outcome{.answer = record.answer_};
}

CmProofs::Outcome CmProofs::finish(std::size_t index) {
  Outcome outcome;
  outcome.client = remove(index);
  return outcome;
}

CmProofs::Outcome CmProofs::find_malformed(std::size_t index, const char* what) {
  Outcome outcome = finish(index);
  outcome.malformed =
      Error{Status::protocol, "take private data through rdma_cm", what, base::kProtocolRemedy};
  return outcome;
}

std::optional<CmMessage> CmProofs::send_more(std::unique_ptr<CmServer> client) {
  CmServer& record = *client;
  if (record.key_.empty()) {
    // A request may have waited for room while its client began again.
    const std::size_t known = find_clear(record.handshake_, record.source_, record.ends_);
    if (known < records_.size() && records_[known]->number_ > record.number_) return std::nullopt;
    give_up(record.handshake_, record.source_, record.ends_);
  }
  add(std::move(client));
  return record.more();
}

void CmProofs::add(std::unique_ptr<CmServer> record) {
  record->since_ = clock_.now();
  if (records_.size() >= most_) make_room();
  records_.reserve(records_.size() + 1);
  ++counts_of_[record->source_];
  records_.push_back(std::move(record));
}

std::unique_ptr<CmServer> CmProofs::remove(std::size_t index) noexcept {
  std::unique_ptr<CmServer> removed = std::move(records_[index]);
  const auto count = counts_of_.find(removed->source_);
  if (--count->second == 0) counts_of_.erase(count);
  records_.erase(records_.begin() + static_cast<std::ptrdiff_t>(index));
  return removed;
}

void CmProofs::drop(std::size_t index) noexcept {
  const std::unique_ptr<CmServer> record = remove(index);
  if (!record->key_.empty() && !record->has_proved() && !record->is_failure_counted_)
    counts_.count(AuthenticationFailure::unconfirmed_proof);
}

void CmProofs::make_room() noexcept {
  const auto rank = [this](const CmServer& record) {
    return std::pair(counts_of_.find(record.source_)->second, !record.has_proved());
  };
  std::size_t victim = 0;
  for (std::size_t i = 1; i < records_.size(); ++i) {
    if (rank(*records_[i]) > rank(*records_[victim])) victim = i;
  }
  drop(victim);
}

void CmProofs::expire() noexcept {
  const std::uint64_t timeout = clock_.ticks(timeout_);
  while (!records_.empty() && clock_.now() - records_.front()->since_ >= timeout) drop(0);
}

}  // namespace spinwire::control
