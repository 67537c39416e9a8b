// Bounds how many addresses strangers make this host resolve. Each address that nobody answers for
// leaves an entry in the kernel's neighbour table, which has room for 1,024 by default, and is
// shared by all processes. Cold.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "control/address.h"
#include "spinwire/clock.h"

namespace spinwire::control {

/// An RDMA address.
using Gid = std::array<std::uint8_t, 16>;

/// Addresses that have answered, so that resolving one again leaves no unanswered entry behind. The
/// oldest gives way: of the source that named it, or of all.
class AnsweredAddresses {
 public:
  static constexpr std::size_t kOfSource = 8;
  static constexpr std::size_t kOfAll = 256;

  [[nodiscard]] bool contains(const Gid& address) const noexcept;
  /// Whether this source has named it.
  [[nodiscard]] bool contains(const Source& source, const Gid& address) const noexcept;
  /// May throw std::bad_alloc.
  void add(const Source& source, const Gid& address);
  void remove(const Gid& address) noexcept;
  void remove(const Source& source, const Gid& address) noexcept;

 private:
  struct Entry {
    Source source;
    Gid address;
  };
  std::vector<Entry> entries_;  ///< the oldest first
};

/// Resolutions of each source and of all together: at once, and unanswered ones per time. Answered
/// ones cost nothing, so that the rate does not limit honest peers. A quarter of what all may do is
/// for sources without unanswered ones.
class ResolutionLimits {
 public:
  struct Limit {
    std::uint32_t at_once;
    std::uint32_t burst;   ///< unanswered ones that may come at once
    Nanoseconds interval;  ///< between further ones
  };
  /// Path validations are limited in the same way: a challenge goes to any address that a client
  /// names. Unanswered ones are repeated some ten times.
  static constexpr Limit kChallengesOfSource{64, 64, std::chrono::milliseconds(50)};
  static constexpr Limit kChallengesOfAll{4096, 512, std::chrono::milliseconds(2)};
  static constexpr Limit kOfSource{8, 16, std::chrono::milliseconds(500)};
  static constexpr Limit kOfAll{64, 64, std::chrono::milliseconds(125)};

  explicit ResolutionLimits(const Clock& clock, const Limit& of_source = kOfSource,
                            const Limit& of_all = kOfAll) noexcept
      : clock_(clock), of_source_(of_source), of_all_(of_all) {}

  /// Whether a resolution may begin now.
  [[nodiscard]] bool may_begin(const Source& source) const noexcept;
  /// Counts a resolution, if it may begin. May throw std::bad_alloc.
  [[nodiscard]] bool try_begin(const Source& source);
  /// The resolution is over. `answered`: it has left no unanswered entry in the kernel.
  void end(const Source& source, bool answered) noexcept;

 private:
  /// `spent_until`: the tick at which all unanswered resolutions are forgiven.
  struct Account {
    std::uint32_t pending = 0;
    std::uint64_t spent_until = 0;
  };

  [[nodiscard]] bool is_settled(const Account& account) const noexcept;
  [[nodiscard]] bool has_room(const Account& account, const Limit& limit) const noexcept;
  void charge(Account& account, const Limit& limit) noexcept;
  void settle(Account& account, const Limit& limit, bool answered) noexcept;
  void forget_settled() noexcept;

  const Clock& clock_;
  Limit of_source_;
  Limit of_all_;
  Account all_;
  std::map<Source, Account> sources_;  ///< those with something pending or spent
};

}  // namespace spinwire::control
