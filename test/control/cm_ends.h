// The two ends of handshakes through rdma_cm, without rdma_cm.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "control/cm_authentication.h"
#include "control/key_files.h"
#include "wire/cm_data.h"
#include "wire/endpoints.h"

namespace cm_ends {

namespace control = spinwire::control;
namespace wire = spinwire::wire;
using namespace std::chrono_literals;
using control::AuthenticationFailure;
using control::CmClient;
using control::CmData;
using control::CmEnds;
using control::CmProofs;
using control::KeyRing;
using key_files::line;
using spinwire::PrivateData;
using spinwire::Status;
using Bytes = std::vector<std::byte>;

/// Empty: no key.
inline KeyRing ring(const std::string& text) {
  if (text.empty()) return {};
  return std::move(*KeyRing::parse(text, "keys"));
}
inline Bytes copy(std::span<const std::byte> bytes) { return {bytes.begin(), bytes.end()}; }
inline std::uint64_t failures(const control::AuthenticationCounts& counts,
                              AuthenticationFailure why) {
  return counts.failures.at(static_cast<std::size_t>(why));
}
inline std::uint64_t all_failures(const control::AuthenticationCounts& counts) {
  std::uint64_t sum = 0;
  for (const std::uint64_t count : counts.failures) sum += count;
  return sum;
}

inline CmEnds the_ends() {
  CmEnds ends;
  ends.client_gid.fill(0x11);
  ends.server_gid.fill(0x22);
  ends.client_qp = 0x333;
  return ends;
}
inline constexpr std::uint32_t kServerQp = 0x444;

inline control::Source source_of(std::uint8_t host) {
  control::Source source{};
  source[0] = host;
  return source;
}

struct Server {
  explicit Server(const std::string& text, std::uint32_t most = 8)
      : most_(most), keys(ring(text)) {}

  CmProofs::Outcome take(std::span<const std::byte> request, const CmEnds& ends = the_ends(),
                         std::uint8_t host = 1) {
    auto outcome = proofs.on_request(request, source_of(host), ends);
    EXPECT_TRUE(outcome);
    return std::move(*outcome);
  }
  [[nodiscard]] std::uint64_t count(AuthenticationFailure why) const {
    return failures(counts, why);
  }

 private:
  std::uint32_t most_;

 public:
  std::uint64_t now = 1000;
  spinwire::Clock clock = spinwire::Clock::manual(&now);
  KeyRing keys;
  control::AuthenticationCounts counts;
  CmProofs proofs{keys, counts, clock, most_, 500ms};
};

struct Client {
  explicit Client(const std::string& text) : keys(ring(text)) {}

  Bytes request(const CmEnds& ends = the_ends()) {
    const auto made = proof.next_request(endpoint_data(), ours, ends);
    EXPECT_TRUE(made);
    return copy(*made);
  }
  [[nodiscard]] CmData endpoint_data() const { return wire::encode_cm(endpoint, capabilities); }
  [[nodiscard]] std::uint64_t count(AuthenticationFailure why) const {
    return failures(counts, why);
  }

  KeyRing keys;
  control::AuthenticationCounts counts;
  CmClient proof{keys, counts};
  spinwire::Endpoint endpoint = wire_test::valid_endpoint();
  PrivateData ours;                 ///< for the server
  wire::Capabilities capabilities;  ///< in its endpoint
};

inline const std::string kKey = line("2026", 'a');

}  // namespace cm_ends
