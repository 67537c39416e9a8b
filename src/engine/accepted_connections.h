// The connections that peers have asked for, by where they come from (control/peer_source.h): no
// source has more than its share, and half-open ones have a share of all records. Cold.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "control/address.h"
#include "control/owners.h"
#include "control/source_share.h"
#include "spinwire/config.h"

namespace spinwire::engine {

class AcceptedConnections {
 public:
  /// May throw std::bad_alloc.
  explicit AcceptedConnections(const Config::Connections& limits);
  AcceptedConnections(const AcceptedConnections&) = delete;
  AcceptedConnections& operator=(const AcceptedConnections&) = delete;

  /// Whether one more is within the source's share, while `free` records of connections are free.
  /// Errors: limit (connections.maximum_per_source).
  [[nodiscard]] Result<void> check_share(const control::Address& source, std::uint32_t free) const;
  /// How many more records would have to be free for the source to be within its share.
  [[nodiscard]] std::uint32_t records_lacking(const control::Address& source,
                                              std::uint32_t free) const noexcept;
  /// Also checks that there is room for a half-open one.
  /// `is_full`: no record or receive is left. Errors: limit (connections.maximum_per_source).
  [[nodiscard]] Result<control::Admission> admit(const control::Address& source, std::uint32_t free,
                                                 bool is_full) const;
  /// Counts a half-open connection; `subject` names it until remove().
  void add(std::uint64_t subject, const control::Address& source) noexcept;
  // Each does nothing for a record that is not, or no more, half-open.
  void on_ready(std::uint64_t subject) noexcept;
  /// A half-open connection is torn down.
  void on_ending(std::uint64_t subject) noexcept;
  /// One that was ready is torn down for a new peer, which waits for it.
  void on_giving_way(std::uint64_t subject) noexcept;
  /// Its record becomes free. Does nothing for one that was not added.
  void remove(std::uint64_t subject) noexcept;

  struct Unready {
    std::uint32_t half_open = 0;
    std::uint32_t ending = 0;  ///< for a new peer, or before they were ready
  };
  /// The numbers of one source.
  [[nodiscard]] Unready unready_of(const control::Address& source) const noexcept;
  [[nodiscard]] std::uint32_t half_open() const noexcept { return unready_.half_open; }
  [[nodiscard]] std::uint32_t ending() const noexcept { return unready_.ending; }

 private:
  enum class Phase : std::uint8_t { none, half_open, ending, ready };
  struct OfSource {
    Unready unready;
    std::uint32_t connections = 0;
  };
  using Sources = std::map<control::Source, OfSource>;
  struct Record {
    Phase phase = Phase::none;
    control::SourceShare::Place place;
    Sources::iterator source;  ///< the end for a peer on this host
  };
  void enter(Record& record, Phase phase) noexcept;
  static std::uint32_t* count_of(Unready& of, Phase phase) noexcept;
  Record& record_of(std::uint64_t subject) noexcept {
    return records_[static_cast<std::uint32_t>(subject)];
  }

  std::uint32_t maximum_;
  std::uint32_t half_open_share_;
  Unready unready_;
  control::SourceShare share_;
  Sources sources_;
  std::vector<Record> records_;  ///< by the index in the subject
};

}  // namespace spinwire::engine
