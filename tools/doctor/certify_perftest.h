// The comparison of spinwire-perf with perftest: the same measurements by either program.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "doctor/certify.h"

namespace spinwire::doctor {

/// What is measured, from 0; all programs and their arguments are fixed.
inline constexpr std::uint32_t kMeasurements = 11;
/// Operations of a run, at most.
inline constexpr std::uint32_t kMostOperations = 40000;
enum class PerfProgram : std::uint8_t { perftest, spinwire };
[[nodiscard]] std::string_view to_string(PerfProgram program) noexcept;

/// Runs the server of one measurement at a time.
class PerfServer {
 public:
  struct Started {
    std::string host;  ///< numeric; empty: this one
    std::uint32_t port = 0;
    std::uint32_t operations = 0;  ///< that it expects of a client
  };

  PerfServer() = default;
  PerfServer(const PerfServer&) = delete;
  PerfServer& operator=(const PerfServer&) = delete;
  virtual ~PerfServer() = default;
  /// Ends the server that runs, and starts one that listens when this returns. Errors: those of
  /// RunningProgram; unsupported (a program is missing).
  virtual Result<Started> start(std::uint32_t measurement, PerfProgram program,
                                SteadyTime deadline) = 0;
  /// Waits until the server has ended, and kills it if it is late.
  virtual void stop(SteadyTime deadline) = 0;
};

/// Runs the servers on this host.
class LocalServer : public PerfServer {
 public:
  /// Serves at `address`, in brackets if it is one of IPv6; empty: at loopback, without a key.
  LocalServer(const Certification& what, const Programs& programs, std::string address)
      : what_(what), programs_(programs), address_(std::move(address)) {}
  Result<Started> start(std::uint32_t measurement, PerfProgram program,
                        SteadyTime deadline) override;
  void stop(SteadyTime deadline) override;

 private:
  Result<Command> command(std::uint32_t measurement, PerfProgram program, int port,
                          std::uint32_t operations) const;

  const Certification& what_;
  const Programs& programs_;
  std::string address_;
  std::optional<RunningProgram> running_;
};

/// Takes all measurements by both programs, and adds what came of them. Each has a share of the
/// time, in which its runs are repeated.
void compare_with_perftest(const Certification& what, const Programs& programs, PerfServer& server,
                           SteadyTime deadline, Findings& findings);

}  // namespace spinwire::doctor
