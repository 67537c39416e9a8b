#include "engine/subject_rows.h"

#include <utility>

namespace spinwire::engine {

void SubjectRows::open(std::uint32_t rows, std::uint32_t capacity) {
  rows_.resize(rows);
  row_of_index_.assign(rows != 0 ? capacity : 0, kNone);
  for (Subject& row : rows_) free_.push_back(row);
}

SubjectRows::Subject* SubjectRows::take_row(bool is_in_trouble) noexcept {
  if (!free_.empty()) return &free_.pop_front();
  if (!is_in_trouble || calm_.empty()) return nullptr;
  Subject& row = calm_.pop_front();
  row_of_index_[row.index] = kNone;
  return &row;
}

SubjectRows::Subject* SubjectRows::claim(std::uint32_t index, std::uint32_t generation,
                                         std::uint64_t now, bool is_in_trouble) noexcept {
  if (index >= row_of_index_.size()) return nullptr;
  std::uint32_t& place = row_of_index_[index];
  const bool is_new = place == kNone || rows_[place].generation != generation;
  if (is_new) {
    (void)release(index);
    Subject* const row = take_row(is_in_trouble);
    if (row == nullptr) return nullptr;
    place = row_of(*row);
    *row = {};
    row->index = index;
    row->generation = generation;
    row->seen_at = row->blocked_at = now;
  }
  Subject& subject = rows_[place];
  const bool was_in_trouble = std::exchange(subject.is_in_trouble, is_in_trouble);
  if (is_in_trouble && !was_in_trouble && !is_new) calm_.erase(subject);
  if (!is_in_trouble && was_in_trouble) calm_.push_back(subject);
  if (!is_in_trouble && is_new) calm_.push_front(subject);
  return &subject;
}

std::uint32_t SubjectRows::release(std::uint32_t index) noexcept {
  if (index >= row_of_index_.size() || row_of_index_[index] == kNone) return kNone;
  const std::uint32_t row = std::exchange(row_of_index_[index], kNone);
  Subject& subject = rows_[row];
  if (!subject.is_in_trouble) calm_.erase(subject);
  free_.push_front(subject);
  return row;
}

}  // namespace spinwire::engine
