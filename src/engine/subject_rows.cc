#include "engine/subject_rows.h"

#include <bit>
#include <utility>

#include "control/source_share.h"

namespace spinwire::engine {
namespace {

/// Places for sources, for each row of the last quarter: with so many, few sources share a place.
constexpr std::uint32_t kSharesPerRow = 8;

bool is_in_trouble(const SubjectRows::Subject& subject, const SubjectRows::Visit& visit) noexcept {
  if (visit.is_stranger) return false;
  const bool is_held_up =
      subject.blocker != 0 && visit.now - subject.blocked_at >= visit.harmless_for;
  return is_held_up || visit.is_silent;
}

}  // namespace

void SubjectRows::open(std::uint32_t rows, std::uint32_t capacity, std::uint64_t well_for) {
  subjects_.resize(capacity);
  // When each subject can have a row, none waits for the last quarter.
  const std::uint32_t last_quarter = capacity > rows ? rows / 4 : 0;
  first_of_last_quarter_ = rows - last_quarter;
  free_.reserve(first_of_last_quarter_);
  for (std::uint32_t row = first_of_last_quarter_; row != 0;) free_.push_back(--row);
  well_for_ = well_for;
  last_quarter_.resize(last_quarter);
  for (Reserved& row : last_quarter_) available_.push_back(row);
  available_count_ = last_quarter;
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
  if (subject.row == kNone) {
    subject.row = take_row(subject, visit);
  } else if (subject.row >= first_of_last_quarter_) {
    review_row(subject, visit);
  }
  count(subject, 1);
  return &subject;
}

std::uint32_t SubjectRows::release(std::uint32_t index) noexcept {
  if (index >= subjects_.size() || !subjects_[index].is_known) return kNone;
  const Subject subject = std::exchange(subjects_[index], {});
  count(subject, ~0u);
  if (subject.row == kNone) return kNone;
  if (subject.row < first_of_last_quarter_) {
    free_.push_back(subject.row);  // it has had this row before, so it does not grow
  } else {
    Reserved& row = last_quarter_[subject.row - first_of_last_quarter_];
    if (row.is_available) {
      available_.erase(row);
    } else {
      let_go(row);
    }
    row.subject = kNone;
    available_.push_front(row);
  }
  return subject.row;
}

void SubjectRows::count(const Subject& subject, std::uint32_t by) noexcept {
  by_blocker_[subject.blocker] += by;
  if (subject.row != kNone) return;
  without_row_[subject.blocker] += by;
  if (subject.is_silent) silent_without_row_ += by;
}

std::uint32_t SubjectRows::take_row(const Subject& subject, const Visit& visit) noexcept {
  if (!free_.empty()) {
    const std::uint32_t row = free_.back();
    free_.pop_back();
    return row;
  }
  if (available_.empty() || !is_in_trouble(subject, visit) || !has_room(visit.source)) return kNone;
  Reserved& row = *available_.front();
  if (row.subject != kNone) {
    Subject& former = subjects_[row.subject];
    count(former, ~0u);
    former.row = kNone;
    count(former, 1);
  }
  row.subject = visit.index;
  hold(row, visit);
  return first_of_last_quarter_ + static_cast<std::uint32_t>(&row - last_quarter_.data());
}

void SubjectRows::review_row(const Subject& subject, const Visit& visit) noexcept {
  Reserved& row = last_quarter_[subject.row - first_of_last_quarter_];
  if (is_in_trouble(subject, visit)) {
    row.troubled_at = visit.now;
    // Without room, a source could fall in trouble again with rows that it had let go, and have
    // all.
    if (row.is_available && has_room(visit.source)) hold(row, visit);
  } else if (!row.is_available && visit.now - row.troubled_at >= well_for_) {
    let_go(row);
    available_.push_back(row);
  }
}

bool SubjectRows::has_room(std::uintptr_t source) const noexcept {
  return source == 0 || control::room_of_source(held_[share_of(source)], available_count_) != 0;
}

void SubjectRows::hold(Reserved& row, const Visit& visit) noexcept {
  available_.erase(row);
  --available_count_;
  row.is_available = false;
  row.troubled_at = visit.now;
  if (visit.source == 0) return;
  row.share = share_of(visit.source);
  ++held_[row.share];
}

void SubjectRows::let_go(Reserved& row) noexcept {
  ++available_count_;
  row.is_available = true;
  if (row.share != kNone) --held_[std::exchange(row.share, kNone)];
}

std::uint32_t SubjectRows::share_of(std::uintptr_t source) const noexcept {
  // The upper half of the product depends on all bits of the source.
  constexpr std::uint64_t kGoldenRatio = 0x9e3779b97f4a7c15;
  const std::uint64_t spread = (source * kGoldenRatio) >> 32;
  return static_cast<std::uint32_t>(spread & (held_.size() - 1));
}

}  // namespace spinwire::engine
