// The two ends of a connection through rdma_cm prove to each other that they have the same key:
// Noise_NNpsk0 (noise.h) in the private data of requests and rejections. Cold.
//
//   client                                              server
//   a request:  proof                       -->         looks the key up, checks the proof: no DH
//               <-- rejection: authenticated            e, ee: the answer proves the same key
//   a request:  first half of its endpoint  -->         it opens: the client has the key now
//               <-- rejection: continue
//   a request:  second half                 -->         only now there is a request for a
//   connection
//               <-- answer: endpoint
//   confirms
//
// Why three requests: one holds 56 bytes of private data, of which the first Noise message takes 48
// (a public key and a tag). The endpoint takes 52, and a tag 16. The answer to a rejected request
// is a new request, since an identifier of rdma_cm asks once. Nothing is made for a client before
// its third request; until then a server keeps a record of at most `handshakes`.
//
// Bound by the prologue: the protocol, the identity and name of the key. By the payload of
// `authenticated`: the server's versions and features. By the tags of the second half and of the
// answer: the GIDs of both ends and their queue pairs, as rdma_cm tells them. By the order of the
// messages: each direction has its own key and count. The client's versions and features are in
// its halves. Not bound is what only this attempt depends on: PSNs, retries, the path.
//
// A request whose answer is lost arrives again, so a server repeats its answer to equal bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "control/address.h"
#include "control/key_ring.h"
#include "control/noise.h"
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

/// The client's end, from its first request until the server's answer.
class CmClientProof {
 public:
  /// Both must outlive it. There is a key.
  CmClientProof(const KeyRing& keys, AuthenticationCounts& counts) noexcept
      : key_(keys.first()), counts_(counts) {}

  /// The data of the next request, of three. `endpoint`: what a request has without a key, equal in
  /// each call. Errors: system.
  Result<CmData> next_request(const CmData& endpoint, const CmEnds& ends);

  struct Rejection {
    bool goes_on = false;                   ///< the next request is due
    std::optional<wire::Refuse> refusal{};  ///< else: of a server that has proved the key
    std::optional<Error> failure{};         ///< else: unauthenticated; counted
  };
  /// Reads the data of a rejection. May throw std::bad_alloc.
  Rejection read_rejection(std::span<const std::byte> data);
  /// Opens the data of the server's answer. Errors: unauthenticated.
  Result<CmData> open_answer(std::span<const std::byte> data, std::uint32_t server_qp);

  [[nodiscard]] const Key& key() const noexcept { return key_; }

 private:
  enum class Step : std::uint8_t { proof, first_half, second_half };
  bool open_authenticated(std::span<const std::byte> data) noexcept;
  bool open_continue(std::span<const std::byte> data) noexcept;
  Error fail(AuthenticationFailure why, std::string found);

  const Key& key_;
  AuthenticationCounts& counts_;
  Step step_ = Step::proof;  ///< the request that was sent last, or is due
  bool is_sent_ = false;
  CmEnds ends_;  ///< of the last request
  std::array<std::uint8_t, 4> handshake_{};
  NoiseHandshake noise_;
  NoiseCipher sending_;
  NoiseCipher receiving_;
};

/// The server's end, for a client that has sent all three requests.
class CmServerProof {
 public:
  CmServerProof(const Key& key, const CmEnds& ends, const NoiseCipher& sending) noexcept
      : key_(key), ends_(ends), sending_(sending) {}

  [[nodiscard]] const Key& key() const noexcept { return key_; }
  /// Either is sent once, and nothing after it.
  [[nodiscard]] wire::CmAnswer seal(const CmData& endpoint, std::uint32_t server_qp) noexcept;
  [[nodiscard]] wire::CmRefusal seal(const wire::Refuse& refusal) noexcept;

 private:
  const Key& key_;
  CmEnds ends_;
  NoiseCipher sending_;
};

/// Rejects a request for good: sealed, if there is a proof.
void reject(CmId& id, CmServerProof* proof, const wire::Refuse& refusal) noexcept;

/// A server's records of clients that have not sent their third request. If they are used up, one
/// of the source with the most gives way: first those that may be recorded ones, then the oldest.
class CmProofs {
 public:
  /// `keys`, `counts` and `clock` must outlive it. `most`: records.
  CmProofs(const KeyRing& keys, AuthenticationCounts& counts, const Clock& clock,
           std::uint32_t most, Nanoseconds timeout) noexcept
      : keys_(keys), counts_(counts), clock_(clock), most_(most), timeout_(timeout) {}

  /// The data of a rejection.
  struct Answer {
    std::array<std::byte, wire::kCmRejectMax> storage{};
    std::size_t size = 0;
    [[nodiscard]] std::span<const std::byte> bytes() const noexcept {
      return {storage.data(), size};
    }
  };
  struct Outcome {
    // One of three:
    std::optional<Answer> answer{};          ///< reject with it: the next request follows
    std::unique_ptr<CmServerProof> proof{};  ///< the client is authenticated,
    CmData endpoint{};                       ///< and has sent this
    std::string refused{};                   ///< why it is refused; counted
  };
  /// Takes a request. May throw std::bad_alloc. Errors: system.
  Result<Outcome> on_request(std::span<const std::byte> data, const Source& source,
                             const CmEnds& ends);
  /// Drops the records that have waited for too long.
  void expire() noexcept;
  void clear() noexcept {
    records_.clear();
    counts_of_.clear();
  }
  [[nodiscard]] std::size_t size() const noexcept { return records_.size(); }

 private:
  struct Record {
    const Key* key = nullptr;
    Source source{};
    std::uint64_t since = 0;  ///< tick
    CmData request{};         ///< the last one that was answered, by
    Answer answer;
    std::array<std::uint8_t, 4> handshake{};
    std::array<std::byte, wire::kCmHalfBytes> half{};
    bool has_half = false;  ///< the client has proved the key
    bool is_failure_counted = false;
    NoiseCipher sending;
    NoiseCipher receiving;
  };

  Result<Outcome> on_proof(const wire::CmProof& proof, const CmData& data, const Source& source);
  Outcome on_half(const wire::CmHalf& half, const CmData& data, const CmEnds& ends);
  Outcome refuse(AuthenticationFailure why, std::string found);
  void on_first_half(Record& record, const CmData& data) noexcept;
  Outcome on_second_half(std::size_t index, const std::array<std::byte, wire::kCmHalfBytes>& half,
                         const CmEnds& ends);
  void make_room() noexcept;
  void drop(std::size_t index) noexcept;
  void erase(std::size_t index) noexcept;

  const KeyRing& keys_;
  AuthenticationCounts& counts_;
  const Clock& clock_;
  std::uint32_t most_;
  Nanoseconds timeout_;
  std::vector<std::unique_ptr<Record>> records_;  ///< the oldest first
  SourceCounts counts_of_;                        ///< of the records
};

}  // namespace spinwire::control
