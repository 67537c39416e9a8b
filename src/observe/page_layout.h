// The file of an engine: a header, descriptors of tables and columns, and the rows. All numbers are
// little-endian. Readers use the sizes and offsets in the file, so that a later release can add
// fields, columns and tables. They skip tables of a kind that they do not know.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace spinwire::observe {

inline constexpr std::uint64_t kMagic = 0x3154415453575053;  // "SPWSTAT1"
inline constexpr std::uint32_t kLayoutVersion = 1;

/// TableDescriptor::kind.
inline constexpr std::uint32_t kRowTable = 1;
inline constexpr std::uint32_t kEventTable = 2;    ///< of EventRecord, without columns
inline constexpr std::uint32_t kLatencyTable = 3;  ///< of LatencyRecord, without columns

struct FileHeader {
  std::uint64_t magic = kMagic;
  std::uint32_t layout_version = kLayoutVersion;
  std::uint32_t header_bytes = sizeof(FileHeader);
  std::uint64_t file_bytes = 0;
  std::uint32_t pid = 0;
  std::uint32_t engine = 0;
  std::uint64_t process_start = 0;  ///< field 22 of /proc/PID/stat; 0: unknown
  std::int64_t opened_ns = 0;       ///< since the Unix epoch
  double ticks_per_ns = 0;          ///< of the engine's clock, which all ticks are of
  std::uint64_t opened_tick = 0;
  std::uint32_t table_count = 0;
  std::uint32_t table_bytes = 0;   ///< of a TableDescriptor
  std::uint32_t column_bytes = 0;  ///< of a ColumnDescriptor
  std::uint32_t tables_offset = 0;
  std::array<char, 32> release{};
  std::array<char, 64> program{};
  std::array<char, 64> device{};
};
static_assert(sizeof(FileHeader) == 240);

struct TableDescriptor {
  std::array<char, 32> name{};
  std::uint32_t kind = kRowTable;
  std::uint32_t column_count = 0;
  std::uint64_t columns_offset = 0;
  std::uint64_t rows_offset = 0;
  std::uint32_t row_bytes = 0;
  std::uint32_t row_count = 0;
};
static_assert(sizeof(TableDescriptor) == 64);

struct ColumnDescriptor {
  std::array<char, 72> name{};
  std::array<char, 16> unit{};
  std::array<char, 160> help{};
  std::uint32_t kind = 0;      ///< MetricKind
  std::uint32_t per_unit = 1;  ///< a stored number of one unit
  std::uint32_t offset = 0;    ///< in the row
  std::uint32_t bytes = 0;     ///< 8, or the length of a text, padded with zeroes
};
static_assert(sizeof(ColumnDescriptor) == 264);

/// The first words of a row; its columns follow.
struct RowHeader {
  std::uint64_t sequence = 0;  ///< odd while the row is being written
  std::uint64_t in_use = 0;    ///< 0: the row has no subject
};
static_assert(sizeof(RowHeader) == 16);

/// An event of the flight recorder. `number` is 0 until there is one.
struct EventRecord {
  std::uint64_t sequence = 0;  ///< odd while the event is being written
  std::uint64_t number = 0;    ///< events of an engine count from 1
  std::int64_t at_ns = 0;      ///< the last time; since the Unix epoch
  std::int64_t first_ns = 0;   ///< the first time
  std::uint32_t count = 0;     ///< how often it came in a row
  std::uint32_t index = 0;     ///< of its connection or session
  std::uint32_t generation = 0;
  std::uint16_t kind = 0;    ///< EventKind
  std::uint8_t subject = 0;  ///< EventSubject
  std::uint8_t reserved = 0;
  std::array<char, 80> text{};  ///< padded with zeroes
};
static_assert(sizeof(EventRecord) == 128);

/// Buckets of a LatencyRecord; see bucket_of().
inline constexpr std::size_t kLatencyBuckets = 528;
inline constexpr std::uint32_t kNoMethod = ~0u;

/// A histogram of times.
struct LatencyRecord {
  std::uint64_t sequence = 0;  ///< odd while the record is being written
  std::uint64_t samples = 0;   ///< 0: none yet
  std::uint64_t sum_ns = 0;
  std::uint64_t max_ns = 0;
  std::uint32_t work = 0;   ///< TimedWork
  std::uint32_t stage = 0;  ///< TimedStage
  std::uint32_t method = kNoMethod;
  std::uint32_t reserved = 0;
  std::array<std::uint64_t, kLatencyBuckets> buckets{};
};
static_assert(sizeof(LatencyRecord) == 48 + kLatencyBuckets * 8);

/// No file is longer.
inline constexpr std::size_t kFileMax = std::size_t{128} << 20;

}  // namespace spinwire::observe
