#include "observe/latency_reader.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "observe/latency.h"

namespace spinwire {
namespace observe {
namespace {

/// The least time of a bucket, in ns.
std::uint64_t least_of(std::size_t bucket) noexcept {
  if (bucket < 32) return bucket;
  const std::size_t shift = bucket / 16 - 1;
  return std::uint64_t{16 + bucket % 16} << shift;
}

/// The name of a number of type Named, or one made of `kind` and the number, which a later release
/// may have given a name.
template <typename Named>
std::string name_of_number(std::uint32_t number, std::size_t known, std::string_view kind) {
  if (number < known) return std::string(name_of(static_cast<Named>(number)));
  return fmt::format("{}-{}", kind, number);
}

LatencyHistogram decode_latency(const LatencyRecord& record) {
  LatencyHistogram latency;
  latency.work = name_of_number<TimedWork>(record.work, kTimedWorks, "work");
  latency.stage = name_of_number<TimedStage>(record.stage, kStages, "stage");
  if (record.method != kNoMethod) latency.method = static_cast<Method>(record.method);
  latency.sum_seconds = static_cast<double>(record.sum_ns) * 1e-9;
  latency.longest = Nanoseconds(static_cast<std::int64_t>(record.max_ns & ~std::uint64_t{0} >> 1));
  latency.buckets.assign(record.buckets.begin(), record.buckets.end());
  // Counted anew, so that percentiles agree with the buckets whatever the file says.
  for (std::uint64_t& count : latency.buckets) {
    count = std::min(count, std::uint64_t{1} << 48);
    latency.samples += count;
  }
  return latency;
}

}  // namespace

void decode_latencies(std::span<const std::byte> file, std::span<const std::byte> later,
                      const TableDescriptor& table, std::vector<LatencyHistogram>& latencies) {
  LatencyRecord record;
  for (std::uint32_t i = 0; i < table.row_count; ++i) {
    const std::uint64_t at = table.rows_offset + std::uint64_t{i} * table.row_bytes;
    std::memcpy(&record, file.data() + at, sizeof record);
    if (record.samples == 0) continue;
    std::uint64_t sequence = record.sequence;
    if (!later.empty()) std::memcpy(&sequence, later.data() + at, sizeof sequence);
    latencies.push_back(decode_latency(record));
    latencies.back().is_consistent = record.sequence % 2 == 0 && sequence == record.sequence;
  }
}

}  // namespace observe

Nanoseconds LatencyHistogram::quantile(double share) const noexcept {
  const double wanted = std::clamp(share, 0.0, 1.0) * static_cast<double>(samples);
  double below = 0;
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    below += static_cast<double>(buckets[i]);
    if (buckets[i] == 0 || below < wanted) continue;
    const auto end = static_cast<std::int64_t>(observe::least_of(i + 1)) - 1;
    return std::min(Nanoseconds(end), std::max(longest, Nanoseconds(0)));
  }
  return longest;
}

}  // namespace spinwire
