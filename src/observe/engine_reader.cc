// Reading the files of engines. Every number and text in a file is checked before it is used.
#include "observe/engine_reader.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/unique_fd.h"
#include "observe/engine_paths.h"
#include "observe/event_reader.h"
#include "observe/latency_reader.h"
#include "observe/metric_tables.h"
#include "observe/page_layout.h"
#include "observe/printable.h"
#include "spinwire/observe.h"

namespace spinwire {
namespace observe {
namespace {

using Bytes = std::span<const std::byte>;

// A hostile file can claim no more than this; a later release has room.
constexpr std::uint32_t kTablesMax = 64;
constexpr std::uint32_t kColumnsMax = 256;
/// Numbers and texts of all tables.
constexpr std::uint64_t kValuesMax = std::uint64_t{1} << 22;
/// Bytes that a reading copies and decodes once more, because their rows were being written. Tables
/// may overlap and a row may be as long as the file, so the number of rows limits nothing.
constexpr std::uint64_t kReadAgainMax = std::uint64_t{64} << 20;
/// Two system calls take about as long as copying so much.
constexpr std::uint64_t kBytesOfACall = 1024;

constexpr const char* kAsked = "read an engine's file";

tl::unexpected<Error> damaged(const char* found) {
  return base::fail(Status::invalid_argument, kAsked, found, "give a file that an engine made");
}

/// Whether [offset, offset + length) lies in the file.
bool lies_within(Bytes file, std::uint64_t offset, std::uint64_t length) noexcept {
  return offset <= file.size() && length <= file.size() - offset;
}

template <typename T>
T load(Bytes file, std::uint64_t offset) noexcept {
  T value;
  std::memcpy(&value, file.data() + offset, sizeof value);
  return value;
}

template <std::size_t N>
std::string text_of(const std::array<char, N>& text) {
  return printable(text.data(), N);
}

/// A name that exporters can use as it is. Prometheus reserves those that begin with "__".
bool is_name(std::string_view name) noexcept {
  constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyz_";
  constexpr std::string_view kAllowed = "abcdefghijklmnopqrstuvwxyz_0123456789";
  return !name.empty() && !name.starts_with("__") &&
         kLetters.find(name.front()) != std::string_view::npos &&
         name.find_first_not_of(kAllowed) == std::string_view::npos;
}

struct Place {
  std::uint32_t offset;
  std::uint32_t bytes;
};

/// Where the rows of a table are.
struct Rows {
  std::uint32_t row_bytes = 0;
  std::uint64_t bytes_to_read = 0;  ///< of a row: those to copy, and those of its columns
  std::vector<Place> columns;       ///< in a row
  std::vector<std::uint64_t> at;    ///< in the file, by MetricTable::rows
};
/// A reading, and where its rows are, by table.
struct Decoded {
  EngineReading reading;
  std::vector<Rows> rows;
};

/// Whether a row was copied as a whole: `later` is its header when the row had been copied.
bool is_whole(const RowHeader& header, const RowHeader& later) noexcept {
  return header.sequence % 2 == 0 && later.sequence == header.sequence;
}

Result<MetricColumn> decode_column(const ColumnDescriptor& d, std::uint32_t row_bytes) {
  MetricColumn column;
  column.name = text_of(d.name);
  column.unit = text_of(d.unit);
  column.help = text_of(d.help);
  column.kind = static_cast<MetricKind>(d.kind);
  column.per_unit = d.per_unit;
  if (!is_name(column.name)) return damaged("a column has no name");
  if (d.kind > static_cast<std::uint32_t>(MetricKind::state) || d.per_unit == 0)
    return damaged("a column's kind or scale is unknown");
  const bool is_text = column.kind == MetricKind::label || column.kind == MetricKind::state;
  if (d.bytes == 0 || d.bytes > kTextMax || (!is_text && d.bytes != kNumberBytes))
    return damaged("a column's length is wrong");
  if (d.offset < sizeof(RowHeader) || d.offset > row_bytes || d.bytes > row_bytes - d.offset)
    return damaged("a column lies outside of its row");
  return column;
}

MetricRow decode_row(Bytes row, const MetricTable& table, const std::vector<Place>& places) {
  MetricRow decoded;
  decoded.values.resize(places.size());
  for (std::size_t i = 0; i < places.size(); ++i) {
    const MetricKind kind = table.columns[i].kind;
    if (kind == MetricKind::counter || kind == MetricKind::gauge) {
      decoded.values[i].number = load<std::uint64_t>(row, places[i].offset);
    } else {
      decoded.values[i].text =
          printable(reinterpret_cast<const char*>(row.data() + places[i].offset), places[i].bytes);
    }
  }
  return decoded;
}

/// Decodes a table and where its rows are. `values` are left for this and further tables.
Result<MetricTable> decode_table(Bytes file, Bytes later, const FileHeader& header,
                                 const TableDescriptor& d, std::uint64_t& values, Rows& rows) {
  MetricTable table;
  table.name = text_of(d.name);
  if (!is_name(table.name)) return damaged("a table has no name");
  if (d.column_count == 0 || d.column_count > kColumnsMax)
    return damaged("a table's columns are too many or none");
  if (!lies_within(file, d.columns_offset, std::uint64_t{d.column_count} * header.column_bytes))
    return damaged("a table's columns lie outside of the file");
  if (d.row_bytes < sizeof(RowHeader) || d.row_bytes % kNumberBytes != 0 ||
      !lies_within(file, d.rows_offset, std::uint64_t{d.row_bytes} * d.row_count))
    return damaged("a table's rows lie outside of the file");
  const std::uint64_t count = std::uint64_t{d.column_count} * d.row_count;
  if (count > values) return damaged("the tables have too many values");
  values -= count;
  rows.row_bytes = d.row_bytes;
  rows.bytes_to_read = kBytesOfACall + d.row_bytes;
  std::uint64_t column_bytes = 0;
  for (std::uint32_t i = 0; i < d.column_count; ++i) {
    const auto column =
        load<ColumnDescriptor>(file, d.columns_offset + std::uint64_t{i} * header.column_bytes);
    auto decoded = decode_column(column, d.row_bytes);
    if (!decoded) return tl::unexpected(decoded.error());
    table.columns.push_back(std::move(*decoded));
    rows.columns.push_back({column.offset, column.bytes});
    column_bytes += column.bytes;
  }
  rows.bytes_to_read += column_bytes;
  // Columns that share bytes would make the texts of a small file take far more memory than it.
  if (column_bytes > d.row_bytes - sizeof(RowHeader))
    return damaged("a table's columns are longer than its rows");
  for (std::uint32_t i = 0; i < d.row_count; ++i) {
    const std::uint64_t at = d.rows_offset + std::uint64_t{i} * d.row_bytes;
    const auto row = load<RowHeader>(file, at);
    if (row.in_use == 0) continue;
    table.rows.push_back(decode_row(file.subspan(at, d.row_bytes), table, rows.columns));
    table.rows.back().is_consistent =
        is_whole(row, later.empty() ? row : load<RowHeader>(later, at));
    rows.at.push_back(at);
  }
  return table;
}

Result<FileHeader> decode_header(Bytes file) {
  if (file.size() < sizeof(FileHeader)) return damaged("the file is too short");
  const auto header = load<FileHeader>(file, 0);
  if (header.magic != kMagic) return damaged("the file does not begin as an engine's");
  if (header.layout_version != kLayoutVersion) {
    return base::fail(Status::unsupported, "read an engine's file",
                      base::format("its layout is {}, and this release knows {}",
                                   header.layout_version, kLayoutVersion),
                      "use the spinwire-stat of the engine's release");
  }
  if (header.file_bytes > file.size()) return damaged("the end of the file is missing");
  if (header.table_count > kTablesMax || header.table_bytes < sizeof(TableDescriptor) ||
      header.column_bytes < sizeof(ColumnDescriptor) ||
      !lies_within(file, header.tables_offset,
                   std::uint64_t{header.table_count} * header.table_bytes))
    return damaged("the tables lie outside of the file");
  return header;
}

/// Reads an open file, to its end or until `bytes` are full.
Result<std::size_t> read_file(int fd, std::span<std::byte> bytes, std::uint64_t offset) {
  std::size_t size = 0;
  while (size < bytes.size()) {
    const ssize_t got =
        ::pread(fd, bytes.data() + size, bytes.size() - size, static_cast<off_t>(offset + size));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return base::fail_errno(Status::system, kAsked, "pread", errno, "try again");
    if (got == 0) break;
    size += static_cast<std::size_t>(got);
  }
  return size;
}

/// Errors: system, invalid_argument (the file is too long).
Result<std::uint64_t> size_of(int fd) {
  struct stat about {};
  if (::fstat(fd, &about) != 0)
    return base::fail_errno(Status::system, kAsked, "fstat", errno, "try again");
  if (about.st_size < 0 || static_cast<std::uint64_t>(about.st_size) > kFileMax)
    return damaged("the file is too long");
  return static_cast<std::uint64_t>(about.st_size);
}

/// Decodes events. `left` of them may yet be decoded for this and further tables.
Result<void> decode_event_table(Bytes file, Bytes later, const TableDescriptor& d,
                                std::uint64_t& left, std::vector<EventCopy>& events) {
  if (d.row_bytes < sizeof(EventRecord) ||
      !lies_within(file, d.rows_offset, std::uint64_t{d.row_bytes} * d.row_count))
    return damaged("a table of events lies outside of the file");
  if (d.row_count > left) return damaged("the file has too many events");
  left -= d.row_count;
  decode_events(file, later, d, events);
  return {};
}

Result<void> decode_latency_table(Bytes file, Bytes later, const TableDescriptor& d,
                                  std::vector<LatencyHistogram>& latencies) {
  constexpr std::uint32_t kLatenciesMax = 1024;
  if (d.row_bytes < sizeof(LatencyRecord) ||
      !lies_within(file, d.rows_offset, std::uint64_t{d.row_bytes} * d.row_count))
    return damaged("a table of latencies lies outside of the file");
  if (latencies.size() + d.row_count > kLatenciesMax) return damaged("too many latencies");
  decode_latencies(file, later, d, latencies);
  return {};
}

Result<Decoded> decode_file(Bytes bytes, Bytes later) {
  if (!later.empty() && later.size() != bytes.size()) return damaged("the file's length changes");
  const auto header = decode_header(bytes);
  if (!header) return tl::unexpected(header.error());
  Decoded all;
  EngineReading& reading = all.reading;
  reading.file.pid = header->pid;
  reading.file.engine = header->engine;
  reading.release = text_of(header->release);
  reading.program = text_of(header->program);
  reading.device = text_of(header->device);
  reading.opened_at = Nanoseconds(std::max<std::int64_t>(header->opened_ns, 0));
  std::uint64_t values = kValuesMax;
  std::uint64_t events = kEventsMax;
  std::vector<EventCopy> copies;
  for (std::uint32_t i = 0; i < header->table_count; ++i) {
    const auto table = load<TableDescriptor>(
        bytes, header->tables_offset + std::uint64_t{i} * header->table_bytes);
    if (table.kind == kEventTable) {
      const auto good = decode_event_table(bytes, later, table, events, copies);
      if (!good) return tl::unexpected(good.error());
    }
    if (table.kind == kLatencyTable) {
      const auto good = decode_latency_table(bytes, later, table, reading.latencies);
      if (!good) return tl::unexpected(good.error());
    }
    if (table.kind != kRowTable) continue;
    auto decoded = decode_table(bytes, later, *header, table, values, all.rows.emplace_back());
    if (!decoded) return tl::unexpected(decoded.error());
    reading.tables.push_back(std::move(*decoded));
  }
  reading.events = order_events(std::move(copies));
  return all;
}

Nanoseconds read_clock(clockid_t clock) noexcept {
  timespec now{};
  (void)::clock_gettime(clock, &now);
  return std::chrono::seconds(now.tv_sec) + Nanoseconds(now.tv_nsec);
}

/// Fills `bytes` from `offset` on. Errors: invalid_argument (the file has become shorter).
Result<void> read_all(const ReadBytes& read, std::span<std::byte> bytes, std::uint64_t offset) {
  const auto got = read(bytes, offset);
  if (!got) return tl::unexpected(got.error());
  if (*got != bytes.size()) return damaged("the file's length changes");
  return {};
}

/// Copies a row anew, and then its header. A row without a subject has no values.
Result<MetricRow> read_row(const ReadBytes& read, const MetricTable& table, const Rows& rows,
                           std::uint64_t at) {
  std::vector<std::byte> row(rows.row_bytes);
  std::array<std::byte, sizeof(RowHeader)> later{};
  if (auto good = read_all(read, row, at); !good) return tl::unexpected(good.error());
  if (auto good = read_all(read, later, at); !good) return tl::unexpected(good.error());
  const auto header = load<RowHeader>(row, 0);
  MetricRow decoded;
  if (header.in_use != 0) decoded = decode_row(row, table, rows.columns);
  decoded.is_consistent = is_whole(header, load<RowHeader>(later, 0));
  return decoded;
}

/// Reads the rows of a table anew that are not consistent. Returns whether all are now. So many
/// `bytes` may yet be read for this and further tables.
Result<bool> read_torn_rows(const ReadBytes& read, MetricTable& table, Rows& rows,
                            std::uint64_t& bytes) {
  bool all = true;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < table.rows.size(); ++i) {
    if (!table.rows[i].is_consistent && rows.bytes_to_read <= bytes) {
      bytes -= rows.bytes_to_read;
      auto row = read_row(read, table, rows, rows.at[i]);
      if (!row) return tl::unexpected(row.error());
      if (row->is_consistent) {
        if (row->values.empty()) continue;  // the subject has gone
        table.rows[i] = std::move(*row);
      }
    }
    all = all && table.rows[i].is_consistent;
    if (kept != i) table.rows[kept] = std::move(table.rows[i]);
    rows.at[kept++] = rows.at[i];
  }
  table.rows.resize(kept);
  rows.at.resize(kept);
  return all;
}

void set_times(EngineReading& reading) {
  reading.read_at = read_clock(CLOCK_MONOTONIC);
  const MetricTable* const engine = reading.find("engine");
  if (engine == nullptr || engine->rows.empty()) return;
  constexpr std::uint64_t kPositive = ~std::uint64_t{0} >> 1;
  const auto nanoseconds = [&](std::string_view column) {
    const std::size_t i = engine->find(column);
    return i < engine->columns.size() ? Nanoseconds(static_cast<std::int64_t>(
                                            engine->rows[0].values[i].number & kPositive))
                                      : Nanoseconds(0);
  };
  reading.written_at = nanoseconds("spinwire_written_timestamp_seconds");
  const Nanoseconds uptime = nanoseconds("spinwire_written_monotonic_seconds");
  if (reading.file.is_alive && uptime.count() > 0 && uptime < reading.read_at)
    reading.since_written = reading.read_at - uptime;
}

}  // namespace

Result<EngineReading> read_rows(std::uint64_t size, const ReadBytes& read) {
  constexpr int kReadings = 64;
  std::uint64_t read_again = kReadAgainMax;
  std::vector<std::byte> bytes(size);
  std::vector<std::byte> later(size);
  for (auto* const copy : {&bytes, &later}) {
    if (auto good = read_all(read, *copy, 0); !good) return tl::unexpected(good.error());
  }
  auto decoded = decode_file(bytes, later);
  if (!decoded) return tl::unexpected(decoded.error());
  std::vector<MetricTable>& tables = decoded->reading.tables;
  bool all = false;
  for (int i = 0; i < kReadings && !all; ++i) {
    if (i != 0) std::this_thread::yield();  // the engine may wait for this processor
    all = true;
    for (std::size_t t = 0; t < tables.size(); ++t) {
      const auto consistent = read_torn_rows(read, tables[t], decoded->rows[t], read_again);
      if (!consistent) return tl::unexpected(consistent.error());
      all = all && *consistent;
    }
  }
  return std::move(decoded->reading);
}

}  // namespace observe

std::string_view to_string(MetricKind kind) noexcept {
  constexpr std::array<std::string_view, 5> kNames = {"counter", "gauge", "label", "state",
                                                      "summary"};
  const auto i = static_cast<std::size_t>(kind);
  return i < kNames.size() ? kNames[i] : "unknown";
}

namespace observe {
namespace {

/// What readers know besides the tables of a file, for metrics().
constexpr Metric kReaders[] = {
    {"file", "pid", "", "the process", MetricKind::label},
    {"file", "engine", "", "number of the engine in its process", MetricKind::label},
    {"file", "program", "", "the process's name", MetricKind::label},
    kUpMetric,
    {"latency", "work", "", "message, write, read, atomic, call or handler", MetricKind::label},
    {"latency", "stage", "", "total, posting, transfer or delivery", MetricKind::label},
    {"latency", "method", "", "number of the method; empty: all", MetricKind::label},
    kLatencyMetric,
};

}  // namespace
}  // namespace observe

std::vector<Metric> metrics() {
  std::vector<Metric> all(std::begin(observe::kReaders), std::end(observe::kReaders));
  for (std::size_t i = 0; i < observe::kTables; ++i) {
    const observe::TableColumns& table = observe::table_columns(static_cast<observe::Table>(i));
    for (const observe::Column& column : table.columns)
      all.push_back({table.name, column.name, column.unit, column.help, column.kind});
  }
  return all;
}

std::size_t MetricTable::find(std::string_view column) const noexcept {
  const auto found = std::find_if(columns.begin(), columns.end(),
                                  [&](const MetricColumn& each) { return each.name == column; });
  return static_cast<std::size_t>(found - columns.begin());
}

double MetricTable::number(const MetricRow& row, std::string_view column) const noexcept {
  const std::size_t i = find(column);
  return i < row.values.size() && i < columns.size()
             ? static_cast<double>(row.values[i].number) / columns[i].per_unit
             : 0.0;
}

std::string_view MetricTable::text(const MetricRow& row, std::string_view column) const noexcept {
  const std::size_t i = find(column);
  return i < row.values.size() ? std::string_view(row.values[i].text) : std::string_view();
}

const MetricTable* EngineReading::find(std::string_view table) const noexcept {
  const auto found = std::find_if(tables.begin(), tables.end(),
                                  [&](const MetricTable& each) { return each.name == table; });
  return found != tables.end() ? &*found : nullptr;
}

Result<EngineReading> decode_engine(std::span<const std::byte> bytes,
                                    std::span<const std::byte> later) {
  using namespace observe;  // NOLINT: the decoder
  return base::no_throw("read an engine's file", [&]() -> Result<EngineReading> {
    auto decoded = decode_file(bytes, later);
    if (!decoded) return tl::unexpected(decoded.error());
    return std::move(decoded->reading);
  });
}

Result<EngineReading> read_engine(const EngineFile& file) {
  return base::no_throw("read an engine's file", [&]() -> Result<EngineReading> {
    const base::UniqueFd fd(observe::open_file(file.path));
    if (!fd) {
      const int error = errno;
      const Status why = error == ENOENT                    ? Status::not_connected
                         : error == ELOOP || error == EPERM ? Status::invalid_argument
                                                            : Status::system;
      return base::fail_errno(why, base::format("read an engine's file {}", file.path), "open",
                              error, "give a regular file of your own");
    }
    const auto size = observe::size_of(fd.get());
    if (!size) return tl::unexpected(size.error());
    auto reading = observe::read_rows(*size, [&](std::span<std::byte> bytes, std::uint64_t offset) {
      return observe::read_file(fd.get(), bytes, offset);
    });
    if (!reading) return reading;
    reading->file.path = file.path;
    // The name is this user's; the contents may be anything.
    if (file.pid != 0) {
      reading->file.pid = file.pid;
      reading->file.engine = file.engine;
    }
    reading->file.is_alive = observe::is_locked(fd.get());
    observe::set_times(*reading);
    return reading;
  });
}

}  // namespace spinwire
