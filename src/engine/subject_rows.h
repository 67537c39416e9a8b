// Which connections or sessions have rows in a table of the engine's file, when there are more of
// them than rows. The first three quarters of the rows go to the subjects that come first. The last
// quarter is only for subjects in trouble that found none of the others free. A subject keeps its
// row until it leaves, so rows do not flap. Cold: constant time, and no allocation after open().
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

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
    std::uint32_t share = kNone;  ///< in held_, while a row of the last quarter counts there
    std::uint8_t blocker = 0;
    std::uint8_t recorded_blocker = 0;  ///< what the last `blocked` event named; 0: it is over
    bool is_silent = false;
    bool is_known = false;  ///< false: nobody has this index
  };
  static_assert(sizeof(Subject) == 32, "there is one for each possible connection and session");

  /// For subjects with an index below `capacity`. May throw std::bad_alloc. Set-up.
  void open(std::uint32_t rows, std::uint32_t capacity);
  /// Whether the index belonged to another subject before, which must be released first.
  [[nodiscard]] bool has_former(std::uint32_t index, std::uint32_t generation) const noexcept;
  /// Notes what the visit has found, and gives the subject a row if there is one for it. Null: the
  /// subject has none.
  Subject* claim(const Visit& visit) noexcept;
  /// The subject is gone. Returns its row, which becomes free; kNone: it had none.
  std::uint32_t release(std::uint32_t index) noexcept;

  /// All subjects, as their last visits found them.
  [[nodiscard]] const ByBlocker& by_blocker() const noexcept { return by_blocker_; }
  /// Those of them that have no row.
  [[nodiscard]] const ByBlocker& without_row() const noexcept { return without_row_; }
  [[nodiscard]] std::uint32_t silent_without_row() const noexcept { return silent_without_row_; }

 private:
  void count(const Subject& subject, std::uint32_t by) noexcept;
  /// A free row for the subject; kNone: there is none for it.
  std::uint32_t take_row(Subject& subject, const Visit& visit) noexcept;
  [[nodiscard]] std::uint32_t share_of(std::uintptr_t source) const noexcept;

  std::vector<Subject> subjects_;  ///< by index
  std::uint32_t first_of_last_quarter_ = 0;
  // Free rows, the next one last.
  std::vector<std::uint32_t> free_;
  std::vector<std::uint32_t> free_in_last_quarter_;
  /// Rows of the last quarter by source. Sources that fall on one place share it.
  std::vector<std::uint32_t> held_;
  ByBlocker by_blocker_{};
  ByBlocker without_row_{};
  std::uint32_t silent_without_row_ = 0;
};

}  // namespace spinwire::engine
