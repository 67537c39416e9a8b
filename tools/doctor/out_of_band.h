// A connection whose endpoints the doctors exchange over their link. A firewall that keeps the
// engine's port closed does not hinder it, and it needs no rdma_cm.
//
//   client                            server
//   endpoint (ours)                 →
//                                   ← endpoint (its own, after it has joined ours; or an error)
//   joins, and sends a message        echoes it
//
// The frames hold facts: `endpoint`, as Endpoint::text() writes it, or `error`, a status.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "doctor/findings.h"
#include "doctor/link.h"
#include "spinwire/spinwire.h"

namespace spinwire::doctor {

/// The fact by which a doctor says that it takes a client's endpoint. One that does not say it
/// knows no such frames.
inline constexpr const char* kEndpointFact = "endpoint.exchange";

/// The outcome of a connection by exchanged endpoints.
struct OutOfBandTrial {
  enum class Outcome : std::uint8_t { works, fails, not_tried };
  Outcome outcome = Outcome::not_tried;
  std::string evidence;
};

/// Events of the client's connection.
struct OutOfBandEvents {
  std::string endpoint;  ///< ours; empty until it is ready
  bool is_ready = false;
  bool has_echo = false;
  std::string echo;
  std::optional<Error> error;
};

/// Exchanges endpoints with the other doctor, connects, and waits for an echo. Within 18 s. The
/// engine's callbacks use `events`, which must outlive it.
[[nodiscard]] OutOfBandTrial try_out_of_band(Engine& engine, OutOfBandEvents& events, Link& link,
                                             const Facts& theirs);
/// Adds the outcome. `loss_remedy` is the command for a network that loses packets; null: it
/// loses none.
void judge_out_of_band(const OutOfBandTrial& trial, const char* loss_remedy, Findings& findings);

/// The server's end. It takes one endpoint of its client.
class OutOfBandServer {
 public:
  /// Takes the client's endpoint from the link, and begins to join it. False: the link has failed,
  /// or this is not the first one.
  bool take(Engine& engine, Link& client, Link::Limit limit);
  /// Sends our endpoint, or an error, once it is known. False: the link has failed.
  bool answer(Link& client, Link::Limit limit);
  /// Whether the client's engine has sent a message on the connection.
  [[nodiscard]] bool is_connected() const noexcept { return is_connected_; }

 private:
  void join(Connection connection);
  /// The first one counts.
  void set_answer(const char* name, std::string value) {
    if (!answer_) answer_ = Facts{{name, std::move(value)}};
  }

  bool is_taken_ = false;
  bool is_answered_ = false;
  bool is_connected_ = false;
  Endpoint peer_;
  std::optional<Facts> answer_;
};

}  // namespace spinwire::doctor
