// Which connections, or sessions, have rows in a table of the engine's file, if there are more of
// them than rows. Those in trouble come first, then those that were in trouble last. Cold.
#pragma once

#include <cstdint>
#include <vector>

#include "base/intrusive_list.h"

namespace spinwire::engine {

class SubjectRows {
 public:
  static constexpr std::uint32_t kNone = ~0u;
  /// The subject of a row.
  struct Subject {
    std::uint32_t index = kNone;
    std::uint32_t generation = 0;
    std::uint64_t seen_at = 0;     ///< tick
    std::uint64_t blocked_at = 0;  ///< tick when `blocker` was first seen
    std::uint8_t blocker = 0;      ///< 0: nothing
    bool is_block_recorded = false;
    bool is_in_trouble = false;

   private:
    friend class SubjectRows;
    base::IntrusiveLinks<Subject> links;  ///< of free rows, or of those that others may get
  };

  /// For subjects with an index below `capacity`. Call it once. May throw std::bad_alloc. Set-up.
  void open(std::uint32_t rows, std::uint32_t capacity);
  /// The row of a subject, which it keeps until it is released, or until one in trouble gets it.
  /// Null: there is none for it. Constant time.
  Subject* claim(std::uint32_t index, std::uint32_t generation, std::uint64_t now,
                 bool is_in_trouble) noexcept;
  /// A subject is gone. Returns its row, which becomes free; kNone: it had none.
  std::uint32_t release(std::uint32_t index) noexcept;
  [[nodiscard]] std::uint32_t row_of(const Subject& subject) const noexcept {
    return static_cast<std::uint32_t>(&subject - rows_.data());
  }

 private:
  using List = base::IntrusiveList<&Subject::links>;

  /// A row for a subject that has none; null: there is none.
  Subject* take_row(bool is_in_trouble) noexcept;

  std::vector<Subject> rows_;
  std::vector<std::uint32_t> row_of_index_;
  List free_;
  /// Rows of subjects without trouble, in the order in which others get them: before all, those
  /// that had none yet.
  List calm_;
};

}  // namespace spinwire::engine
