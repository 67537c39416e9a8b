#include "engine/subject_rows.h"

#include <bit>
#include <utility>

#include "control/source_share.h"

namespace spinwire::engine {
namespace {

/// Places for sources, for each row of the last quarter: with so many, few sources share a place.
constexpr std::uint32_t kSharesPerRow = 8;

void fill_backwards(std::vector<std::uint32_t>& rows, std::uint32_t begin, std::uint32_t end) {
  rows.reserve(end - begin);
  while (end != begin) rows.push_back(--end);
}

bool is_in_trouble(const SubjectRows::Subject& subject, const SubjectRows::Visit& visit) noexcept {
  if (visit.is_stranger) return false;
  const bool is_held_up =
      subject.blocker != 0 && visit.now - subject.blocked_at >= visit.harmless_for;
  return is_held_up || visit.is_silent;
}

}  // namespace

void SubjectRows::open(std::uint32_t rows, std::uint32_t capacity) {
  subjects_.resize(capacity);
  // When each subject can have a row, none waits for the last quarter.
  const std::uint32_t last_quarter = capacity > rows ? rows / 4 : 0;
  first_of_last_quarter_ = rows - last_quarter;
  fill_backwards(free_, 0, first_of_last_quarter_);
  fill_backwards(free_in_last_quarter_, first_of_last_quarter_, rows);
  held_.resize(last_quarter != 0 ? std::bit_ceil(kSharesPerRow * last_quarter) : 0);
}

bool SubjectRows::has_former(std::uint32_t index, std::uint32_t generation) const noexcept {
  return index < subjects_.size() && subjects_[index].is_known &&
         subjects_[index].generation != generation;
}

SubjectRows::Subject* SubjectRows::claim(const Visit& visit) noexcept {
  if (visit.index >= subjects_.size()) return nullptr;
  Subject& subject = subjects_[visit.index];
  if (subject.is_known) {
    count(subject, ~0u);
  } else {
    subject = {visit.now, visit.now, visit.generation};
    subject.is_known = true;
  }
  if (std::exchange(subject.blocker, visit.blocker) != visit.blocker)
    subject.blocked_at = visit.now;
  subject.is_silent = visit.is_silent;
  if (subject.row == kNone) subject.row = take_row(subject, visit);
  count(subject, 1);
  return subject.row != kNone ? &subject : nullptr;
}

std::uint32_t SubjectRows::release(std::uint32_t index) noexcept {
  if (index >= subjects_.size() || !subjects_[index].is_known) return kNone;
  const Subject subject = std::exchange(subjects_[index], {});
  count(subject, ~0u);
  if (subject.share != kNone) --held_[subject.share];
  // The vectors have had this row before, so they do not grow.
  if (subject.row != kNone)
    (subject.row < first_of_last_quarter_ ? free_ : free_in_last_quarter_).push_back(subject.row);
  return subject.row;
}

void SubjectRows::count(const Subject& subject, std::uint32_t by) noexcept {
  by_blocker_[subject.blocker] += by;
  if (subject.row != kNone) return;
  without_row_[subject.blocker] += by;
  if (subject.is_silent) silent_without_row_ += by;
}

std::uint32_t SubjectRows::take_row(Subject& subject, const Visit& visit) noexcept {
  const auto take = [](std::vector<std::uint32_t>& rows) {
    const std::uint32_t row = rows.back();
    rows.pop_back();
    return row;
  };
  if (!free_.empty()) return take(free_);
  if (free_in_last_quarter_.empty() || !is_in_trouble(subject, visit)) return kNone;
  if (visit.source != 0) {
    const std::uint32_t share = share_of(visit.source);
    if (control::room_of_source(held_[share], free_in_last_quarter_.size()) == 0) return kNone;
    ++held_[share];
    subject.share = share;
  }
  return take(free_in_last_quarter_);
}

std::uint32_t SubjectRows::share_of(std::uintptr_t source) const noexcept {
  // The upper half of the product depends on all bits of the source.
  constexpr std::uint64_t kGoldenRatio = 0x9e3779b97f4a7c15;
  const std::uint64_t spread = (source * kGoldenRatio) >> 32;
  return static_cast<std::uint32_t>(spread & (held_.size() - 1));
}

}  // namespace spinwire::engine
