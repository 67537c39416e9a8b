#include "softverbs/memory/mapped_share.h"

#include <mutex>

#include "base/process_wide.h"

namespace spinwire::softverbs {
namespace {

struct AllMapped : base::ProcessWide {
  Mapped all;
};

/// Whether `own` and `more` are within a quarter of what others leave of `most`.
constexpr bool has_share(std::uint64_t most, std::uint64_t all, std::uint64_t own,
                         std::uint64_t more) noexcept {
  const std::uint64_t share = (most - (all - own)) / 4;
  return more <= share && own <= share - more;
}

}  // namespace

bool take_mapping(Mapped& own, std::uint64_t bytes) noexcept {
  AllMapped& process = base::process_wide<AllMapped>();
  const std::lock_guard<std::mutex> lock(process.mutex);
  Mapped& all = process.all;
  if (!has_share(kMostMapped.objects, all.objects, own.objects, 1) ||
      !has_share(kMostMapped.bytes, all.bytes, own.bytes, bytes))
    return false;
  ++own.objects;
  ++all.objects;
  own.bytes += bytes;
  all.bytes += bytes;
  return true;
}

void return_mapping(Mapped& own, std::uint64_t bytes) noexcept {
  AllMapped& process = base::process_wide<AllMapped>();
  const std::lock_guard<std::mutex> lock(process.mutex);
  --own.objects;
  --process.all.objects;
  own.bytes -= bytes;
  process.all.bytes -= bytes;
}

}  // namespace spinwire::softverbs
