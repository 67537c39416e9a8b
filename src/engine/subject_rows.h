// Which connections or sessions have rows in a table of the engine's file, when there are more of
// them than rows. The first three quarters of the rows go to the subjects that come first, and stay
// until these leave. The last quarter is only for subjects in trouble that found none of the other
// rows free. A row of it also stays when its subject is well again, so rows do not flap. When the
// subject has been well for long, the row is passed on if another subject in trouble needs one.
// Cold: constant time, and no allocation after open().
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "base/intrusive_list.h"

namespace spinwire::engine {

class SubjectRows {
 public:
  static constexpr std::uint32_t kNone = ~0u;
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};
  /// How many subjects are blocked by what; place 0 is for those that nothing blocks.
  using ByBlocker = std::array<std::uint32_t, 8>;

  /// What a visit of a subject has found.
  struct Visit {
    std::uint32_t index = 0;
    std::uint32_t generation = 0;
    std::uint64_t now = 0;     ///< tick
    std::uint8_t blocker = 0;  ///< a place of ByBlocker
    /// Ticks for which the same blocker makes no trouble; kNever: it is not the subject's own.
    std::uint64_t harmless_for = kNever;
    bool is_silent = false;  ///< its peer has missed signs of life
    /// The peer has only shaken hands: its trouble gets no row of the last quarter.
    bool is_stranger = false;
    /// Names the source of the peer; a source has a share of the last quarter. 0: it has no share.
    std::uintptr_t source = 0;
  };
  struct Subject {
    std::uint64_t seen_at = 0;     ///< tick
    std::uint64_t blocked_at = 0;  ///< tick when `blocker` was first seen
    std::uint32_t generation = 0;
    std::uint32_t row = kNone;
    std::uint8_t blocker = 0;
    std::uint8_t recorded_blocker = 0;  ///< what the last `blocked` event named; 0: it is over
    bool is_silent = false;
    bool is_known = false;  ///< false: nobody has this index
  };
  static_assert(sizeof(Subject) == 32, "there is one for each possible connection and session");

  /// For subjects with an index below `capacity`. A row of the last quarter may be passed on when
  /// its subject has been well for `well_for` ticks. May throw std::bad_alloc. Set-up.
  void open(std::uint32_t rows, std::uint32_t capacity, std::uint64_t well_for);
  /// Whether the index belonged to another subject before, which must be released first.
  [[nodiscard]] bool has_former(std::uint32_t index, std::uint32_t generation) const noexcept;
  /// Notes what the visit has found, and gives the subject a row if there is one for it. The caller
  /// writes the row at once, because another subject may have had it. Null: there is no room for
  /// an index so high.
  Subject* claim(const Visit& visit) noexcept;
  /// The subject is gone. Returns its row, which becomes free; kNone: it had none.
  std::uint32_t release(std::uint32_t index) noexcept;

  /// All subjects, as their last visits found them.
  [[nodiscard]] const ByBlocker& by_blocker() const noexcept { return by_blocker_; }
  /// Subjects without a row.
  [[nodiscard]] const ByBlocker& without_row() const noexcept { return without_row_; }
  [[nodiscard]] std::uint32_t silent_without_row() const noexcept { return silent_without_row_; }

 private:
  /// A row of the last quarter.
  struct Reserved {
    base::IntrusiveLinks<Reserved> link;  ///< in available_
    std::uint64_t troubled_at = 0;  ///< tick of the last visit that did not find the subject well
    std::uint32_t subject = kNone;  ///< its index; kNone: the row is free
    std::uint32_t share = kNone;    ///< in held_, while the row counts there
    bool is_available = true;       ///< it is free, or its subject has been well for long
  };

  void count(const Subject& subject, std::uint32_t by) noexcept;
  /// A row for the subject; kNone: there is none for it.
  std::uint32_t take_row(const Subject& subject, const Visit& visit) noexcept;
  /// Decides, for a subject with a row of the last quarter, whether the row may be passed on.
  void review_row(const Subject& subject, const Visit& visit) noexcept;
  /// Whether the source may hold one more row of the last quarter.
  [[nodiscard]] bool has_room(std::uintptr_t source) const noexcept;
  void hold(Reserved& row, const Visit& visit) noexcept;
  /// The row may go to another subject. The caller puts it into available_.
  void let_go(Reserved& row) noexcept;
  [[nodiscard]] std::uint32_t share_of(std::uintptr_t source) const noexcept;

  std::vector<Subject> subjects_;    ///< by index
  std::vector<std::uint32_t> free_;  ///< of the first three quarters, the next one last
  std::uint32_t first_of_last_quarter_ = 0;
  std::uint64_t well_for_ = 0;  ///< ticks
  std::vector<Reserved> last_quarter_;
  /// Free rows, then those whose subjects have been well for long, the longest first.
  base::IntrusiveList<&Reserved::link> available_;
  std::uint32_t available_count_ = 0;
  /// Rows of the last quarter that are not available, by source. Sources that fall on one place
  /// share it.
  std::vector<std::uint32_t> held_;
  ByBlocker by_blocker_{};
  ByBlocker without_row_{};
  std::uint32_t silent_without_row_ = 0;
};

}  // namespace spinwire::engine
