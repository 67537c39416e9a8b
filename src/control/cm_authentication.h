// The two ends of a connection through rdma_cm, from the client's first request to the server's
// answer. Cold.
//
// With a key they prove to each other that they have the same one: Noise_NNpsk0 (noise.h) in the
// private data of requests and rejections.
//
//   client                                              server
//   a request:  proof                       -->         looks the key up, checks the proof: no DH
//               <-- rejection: authenticated            e, ee: the answer proves the same key
//   a request:  a part of what it says      -->         it opens: the client has the key now
//               <-- rejection: continue
//   ...
//   a request:  the last part               -->         only now there is a request for a
//               <-- answer: endpoint                    connection
//   confirms
//
// A client says its endpoint and the private data of its application: two parts for up to six
// bytes of these, and one more for each 32. An answer has room for 118 bytes of the server's. For
// more, the server asks its application, answers by up to two rejections with the first bytes, and
// takes the request for a connection when the client asks once more:
//
//   a request:  the last part               -->         asks the application
//               <-- rejection: more
//   a request:  zeroes                      -->         the request for a connection
//               <-- answer: endpoint, the rest
//
// Why so many requests: one holds 56 bytes of private data, of which the first Noise message takes
// 48 (a public key and a tag). The endpoint takes 52, and a tag 16. The answer to a rejected
// request is a new request, since an identifier of rdma_cm asks once. Nothing is made for a client
// before its last request; until then a server keeps a record of at most `handshakes`.
//
// Without a key, a request has the endpoint alone, and its answer the server's, with up to 118
// bytes of private data. A client that gives private data sends parts, too. They are in the clear,
// and the number of the message is where the tag would be.
//
// Bound by the prologue: the protocol, the identity and name of the key. By the payload of
// `authenticated`: the server's versions and features, one of which says that it takes private
// data. By the tags of all parts but the first, and of the answer: the GIDs of both ends and their
// queue pairs, as rdma_cm tells them. By the order of the messages: each direction has its own key
// and count. The client's versions and features are in its endpoint. Not bound is what only this
// attempt depends on: PSNs, retries, the path.
//
// A request whose answer is lost arrives again, so a server repeats its answer to equal bytes.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "control/address.h"
#include "control/key_ring.h"
#include "control/noise.h"
#include "control/owners.h"
#include "control/rdma_cm.h"
#include "control/secure_channel.h"
#include "spinwire/clock.h"
#include "spinwire/status.h"
#include "wire/cm_proof.h"

namespace spinwire::control {

/// The data of a request.
using CmData = std::array<std::byte, wire::kCmRequestMax>;
static_assert(wire::kCmRequestMax == wire::kCmDataBytes);

/// The ends of a connection, as rdma_cm tells them to both.
struct CmEnds {
  std::array<std::uint8_t, 16> client_gid{};
  std::array<std::uint8_t, 16> server_gid{};
  std::uint32_t client_qp = 0;
};
/// The ends that an identifier names. `is_client`: it is the client's.
CmEnds ends_of(const CmId& id, std::uint32_t client_qp, bool is_client) noexcept;

/// The data of a rejection or an answer.
struct CmMessage {
  std::array<std::byte, wire::kCmAcceptMax> storage{};
  std::size_t size = 0;

  CmMessage() noexcept = default;
  explicit CmMessage(std::span<const std::byte> bytes) noexcept : size(bytes.size()) {
    std::copy(bytes.begin(), bytes.end(), storage.begin());
  }
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return {storage.data(), size}; }
};

/// Seals what one end says, or opens it: by a key, or without one by the number of the message
/// alone, in place of the tag.
class CmCipher {
 public:
  explicit CmCipher(bool has_key = true) noexcept : has_key_(has_key) {}
  /// Where to put the key.
  [[nodiscard]] NoiseCipher& keyed() noexcept { return noise_; }

  /// As those of NoiseCipher.
  bool encrypt(std::span<const std::byte> associated, std::span<const std::byte> text,
               std::byte* to) noexcept;
  bool decrypt(std::span<const std::byte> associated, std::span<const std::byte> sealed,
               std::byte* to) noexcept;

 private:
  bool has_key_;
  std::uint64_t count_ = 0;  ///< without a key
  NoiseCipher noise_;
};

/// The client's end, from its first request until the server's answer.
class CmClient {
 public:
  /// Both must outlive it. `keys` empty: without a key. They may be given other keys: those count
  /// until the first request.
  CmClient(const KeyRing& keys, AuthenticationCounts& counts) noexcept
      : keys_(keys),
        has_key_(!keys.empty()),
        counts_(counts),
        step_(has_key_ ? Step::proof : Step::plain),
        sending_(has_key_),
        receiving_(has_key_) {}

  /// The data of the next request. `endpoint`: what a request has without a key; `ours`: of the
  /// application. Both equal in each call. Errors: system.
  Result<CmData> next_request(const CmData& endpoint, const PrivateData& ours, const CmEnds& ends);

  struct Rejection {
    bool goes_on = false;                   ///< the next request is due
    std::optional<wire::Refuse> refusal{};  ///< else: with a key, of a server that has proved it
    /// Else: unauthenticated, which is counted, or unsupported: a server of an older release takes
    /// no private data.
    std::optional<Error> failure{};
  };
  /// Reads the data of a rejection. May throw std::bad_alloc.
  Rejection read_rejection(std::span<const std::byte> data);

  struct Answer {
    CmData endpoint{};
    std::size_t size = 0;  ///< of these; without a key a server can give fewer
    PrivateData private_data{};
  };
  /// Opens the data of the server's answer. Errors: unauthenticated; protocol (without a key).
  Result<Answer> open_answer(std::span<const std::byte> data, std::uint32_t server_qp);

  /// The key in use. Empty: none yet, or without a key.
  [[nodiscard]] const KeyName& key() const noexcept { return key_; }

 private:
  enum class Step : std::uint8_t { proof, plain, parts, more };
  Result<CmData> make_proof();
  CmData make_part(const CmData& endpoint, const PrivateData& ours) noexcept;
  /// Whether the server has all that we say, and so may answer.
  [[nodiscard]] bool has_said_all() const noexcept;
  bool open_authenticated(std::span<const std::byte> data) noexcept;
  bool open_continue(std::span<const std::byte> data) noexcept;
  bool open_more(std::span<const std::byte> data) noexcept;
  Rejection read_answer_to_proof(std::span<const std::byte> data, bool is_due);
  Rejection read_clear_refusal(std::span<const std::byte> data) const;
  bool open_sealed_answer(std::span<const std::byte> data, std::uint32_t server_qp,
                          Answer& answer) noexcept;
  Result<Answer> read_clear_answer(std::span<const std::byte> data);
  [[nodiscard]] Error takes_no_private_data() const;
  Error fail(AuthenticationFailure why, std::string found);

  const KeyRing& keys_;
  bool has_key_;
  KeyName key_;
  AuthenticationCounts& counts_;
  Step step_;  ///< of the request that was sent last, or is due
  bool is_sent_ = false;
  bool server_takes_data_ = false;  ///< it has offered that, with a key
  std::size_t part_ = 0;            ///< of this request
  std::size_t length_ = 0;          ///< of our private data
  CmEnds ends_;                     ///< of the last request
  std::array<std::uint8_t, 4> handshake_{};
  NoiseHandshake noise_;
  CmCipher sending_;
  CmCipher receiving_;
  wire::CmPieces theirs_;
};

/// The server's end, from a client's first request that is not all until the answer.
class CmServer {
 public:
  /// For a client that has sent its endpoint in one request, without a key. `number`: of its
  /// handshake, see CmProofs::Outcome.
  CmServer(const CmData& request, const Source& source, const CmEnds& ends,
           std::uint64_t number) noexcept;

  /// That the client has proved; empty: without a key.
  [[nodiscard]] const KeyName& key() const noexcept { return key_; }
  /// What the client has said: the endpoint's data, and its private data. Once it has said all.
  [[nodiscard]] CmData endpoint() const noexcept;
  [[nodiscard]] const PrivateData& private_data() const noexcept { return theirs_; }

  /// The application accepts the client and gives it these bytes; `listener` has asked it.
  void decide(const PrivateData& ours, ListenerId listener) noexcept;
  /// What the application has given; null: it was not asked.
  [[nodiscard]] const PrivateData* decision() const noexcept { return ours_ ? &*ours_ : nullptr; }
  [[nodiscard]] ListenerId listener() const noexcept { return listener_; }

  /// Either is sent once, and nothing after it. `ours`: the decision, if there is one.
  [[nodiscard]] CmMessage answer(const CmData& endpoint, const PrivateData& ours,
                                 std::uint32_t server_qp) noexcept;
  [[nodiscard]] CmMessage refuse(const wire::Refuse& refusal) noexcept;

 private:
  friend class CmProofs;
  CmServer(KeyName key, const Source& source) noexcept
      : key_(std::move(key)), source_(source), sending_(!key_.empty()), receiving_(!key_.empty()) {}
  /// Whether the client has the key.
  [[nodiscard]] bool has_proved() const noexcept { return !key_.empty() && parts_ != 0; }
  [[nodiscard]] bool is_of(const Source& source, const CmEnds& ends) const noexcept;
  bool open(std::span<const std::byte> clear, const wire::CmPart& part, const CmEnds& ends,
            std::span<std::byte, wire::kCmPartBytes> to) noexcept;
  /// The rejection with the next bytes, unless the rest fits an answer.
  [[nodiscard]] bool has_more() const noexcept;
  [[nodiscard]] CmMessage more() noexcept;

  KeyName key_;
  Source source_;
  std::uint64_t number_ = 0;  ///< of the handshake, without a key; a newer one has a higher number
  std::uint64_t since_ = 0;   ///< tick of its last new request
  CmData request_{};          ///< the last one that was answered, by
  CmMessage answer_;
  std::array<std::uint8_t, 4> handshake_{};
  CmEnds ends_;  ///< of the last request; with a key, once the client has proved it
  bool is_failure_counted_ = false;
  std::size_t parts_ = 0;  ///< that the client has sent
  std::array<std::byte, wire::kCmPartsMax * wire::kCmPartBytes> said_{};
  PrivateData theirs_;
  std::optional<PrivateData> ours_;
  std::size_t told_ = 0;  ///< bytes of these that the client has
  ListenerId listener_;
  CmCipher sending_;
  CmCipher receiving_;
};

/// An answer without a key. `told`: bytes of `ours` that the client has; at most
/// wire::kCmAnswerData are left.
CmMessage clear_answer(const CmData& endpoint, const PrivateData& ours,
                       std::size_t told = 0) noexcept;
/// Rejects a request for good: sealed, if the client has proved a key.
void reject(CmId& id, CmServer* server, const wire::Refuse& refusal) noexcept;

/// A server's records of clients that have not sent their last request. If they are used up, one
/// of the source with the most gives way: first those that may be recorded ones, then the one that
/// has been silent for longest.
class CmProofs {
 public:
  /// `keys`, `counts` and `clock` must outlive it. `most`: records.
  CmProofs(const KeyRing& keys, AuthenticationCounts& counts, const Clock& clock,
           std::uint32_t most, Nanoseconds timeout) noexcept
      : keys_(keys), counts_(counts), clock_(clock), most_(most), timeout_(timeout) {}

  struct Outcome {
    // One of four:
    std::optional<CmMessage> answer{};   ///< reject with it: the next request follows
    std::unique_ptr<CmServer> client{};  ///< the client has said all, and has the key, if any
    std::string refused{};               ///< why it is refused; with a key, counted
    bool is_plain = false;               ///< without a key: the data is that of an endpoint alone

    std::uint64_t number = 0;          ///< of a plain handshake; a later one has a higher number
    std::optional<Error> malformed{};  ///< refuse `client`
  };
  /// Takes a request. May throw std::bad_alloc. Errors: system.
  Result<Outcome> on_request(std::span<const std::byte> data, const Source& source,
                             const CmEnds& ends);
  /// The application has decided on a client, and the answer has no room for what it gives. Answers
  /// the data to reject the client's request with; none: the client has begun a newer handshake
  /// since, which goes on. May throw std::bad_alloc.
  std::optional<CmMessage> send_more(std::unique_ptr<CmServer> client);
  /// Drops the records that have waited for too long.
  void expire() noexcept;
  void clear() noexcept {
    records_.clear();
    counts_of_.clear();
  }
  [[nodiscard]] std::size_t size() const noexcept { return records_.size(); }

 private:
  Result<Outcome> on_proof(const wire::CmProof& proof, const CmData& data, const Source& source);
  Outcome on_part(const wire::CmPart& part, const CmData& data, const CmEnds& ends);
  Outcome on_clear_part(const wire::CmPart& part, const CmData& data, const Source& source,
                        const CmEnds& ends);
  Outcome refuse(AuthenticationFailure why, std::string found);
  using Part = std::span<const std::byte, wire::kCmPartBytes>;
  Outcome on_opened(std::size_t index, Part part, const CmData& data, const CmEnds& ends);
  Outcome on_request_for_more(std::size_t index, Part part);
  Outcome go_on(CmServer& record) noexcept;
  Outcome finish(std::size_t index);
  Outcome find_malformed(std::size_t index, const char* what);
  using Handshake = std::array<std::uint8_t, 4>;
  [[nodiscard]] std::size_t find_clear(const Handshake& handshake, const Source& source,
                                       const CmEnds& ends) const noexcept;
  /// Without a key: removes the record of a client that has begun again.
  void give_up(const Handshake& handshake, const Source& source, const CmEnds& ends) noexcept;
  void add(std::unique_ptr<CmServer> record);
  /// Answers the record's new place.
  std::size_t renew(std::size_t index) noexcept;
  void make_room() noexcept;
  void drop(std::size_t index) noexcept;
  std::unique_ptr<CmServer> remove(std::size_t index) noexcept;

  const KeyRing& keys_;
  AuthenticationCounts& counts_;
  const Clock& clock_;
  std::uint32_t most_;
  Nanoseconds timeout_;
  std::vector<std::unique_ptr<CmServer>> records_;  ///< by `since_`
  SourceCounts counts_of_;                          ///< of the records
  std::uint64_t begun_ = 0;                         ///< handshakes without a key
};

}  // namespace spinwire::control
