// What engines show to other programs of their user. Each engine keeps a file in memory
// (observability.directory), and its control steps write counters, pool levels and rows of
// connections and sessions into it. What happens to them goes there at once, as events, of which
// the file keeps the last ones. The file can be read while the engine runs and after its process
// has died, by the functions here; spinwire-stat is made from them. The file describes itself, so
// that a program reads files of other releases.
//
// An engine reads nothing from its file, so what is written there by others does no harm. A process
// of the same user that makes the file shorter ends the engine's process by SIGBUS, as it could by
// kill(). The file's mode of 0400 prevents that by mistake, except for root.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spinwire/clock.h"
#include "spinwire/export.h"
#include "spinwire/rpc.h"
#include "spinwire/status.h"

namespace spinwire {

/// Kind of a metric.
enum class MetricKind : std::uint8_t {
  counter,  ///< a number that only grows while its row's subject exists
  gauge,    ///< a number as it is now
  label,    ///< a text that tells rows of a table apart
  state,    ///< a text that changes, such as what blocks a connection
  summary,  ///< quantiles, sum and count of samples; no column of a table
};
/// The name, as written in the header. Any thread; never allocates.
SPINWIRE_API std::string_view to_string(MetricKind kind) noexcept;

/// A metric of this release. Names follow the rules of Prometheus.
struct Metric {
  /// "engine", "pool", "connection", "session" or "served_session"; or "file" or "latency", for
  /// what a reader knows besides the tables of a file.
  std::string_view table;
  std::string_view name;  ///< such as "spinwire_polls_total"; of labels without "spinwire_"
  std::string_view unit;  ///< "seconds", "bytes"; empty: a count or a text
  std::string_view help;  ///< what it means, for people
  MetricKind kind;        ///< how its values change
};
/// Whether the process of the engine runs. For Prometheus, every sample has the labels of its
/// table.
inline constexpr Metric kUpMetric{
    "file", "spinwire_up", "", "1: the engine's process runs; 0: it has died", MetricKind::gauge};
/// The latencies: EngineReading::latencies.
inline constexpr Metric kLatencyMetric{
    "latency", "spinwire_latency_seconds", "seconds",
    "latencies of sampled operations and calls, by stage and method", MetricKind::summary};
/// All metrics of this release, by table. Any thread. Set-up.
[[nodiscard]] SPINWIRE_API std::vector<Metric> metrics();

/// A column of a table in a file.
struct MetricColumn {
  std::string name;                     ///< as Metric::name
  std::string unit;                     ///< as Metric::unit
  std::string help;                     ///< as Metric::help
  MetricKind kind = MetricKind::gauge;  ///< how its values change
  std::uint32_t per_unit = 1;           ///< MetricValue::number of one unit
};
/// A value of a metric.
struct MetricValue {
  std::uint64_t number = 0;  ///< of counters and gauges
  std::string text;          ///< of labels and states; printable ASCII
};
/// A row of a table: the values of one subject.
struct MetricRow {
  std::vector<MetricValue> values;  ///< by column
  /// Whether all values were written together. False if the engine died while it wrote the row.
  bool is_consistent = true;
};
/// A table of a file, with a row for each subject.
struct SPINWIRE_API MetricTable {
  std::string name;                   ///< as Metric::table
  std::vector<MetricColumn> columns;  ///< in the order of MetricRow::values
  std::vector<MetricRow> rows;        ///< one for each subject

  /// The place of a column; columns.size() if there is none.
  [[nodiscard]] std::size_t find(std::string_view column) const noexcept;
  /// A value by the name of its column: 0 or empty if there is none. In units.
  [[nodiscard]] double number(const MetricRow& row, std::string_view column) const noexcept;
  /// A text by the name of its column; empty if there is none.
  [[nodiscard]] std::string_view text(const MetricRow& row, std::string_view column) const noexcept;
};

/// An event of an engine's flight recorder.
struct EngineEvent {
  std::uint64_t number = 0;  ///< events of an engine count from 1
  Nanoseconds at{0};         ///< the last time; since the Unix epoch
  Nanoseconds first_at{0};   ///< the first time
  std::uint32_t count = 1;   ///< how often it came without another event of its subject
  /// "engine", "connection", "session", "served_session", or "stranger": a peer that was refused.
  std::string subject;
  /// Names the connection or session, like the label of its row; else empty.
  std::string id;
  std::string kind;  ///< one of event_kinds(), or "event-NUMBER" of a later release
  std::string text;  ///< printable ASCII
  /// False if the engine was writing the event: after its death, or again and again.
  bool is_consistent = true;
};
/// A kind of events.
struct EventKindInfo {
  std::string_view name;  ///< stable: EngineEvent::kind
  std::string_view help;  ///< what such an event says, in a sentence
};
/// The kinds of events of this release. Any thread. Set-up.
[[nodiscard]] SPINWIRE_API std::vector<EventKindInfo> event_kinds();

/// Latencies of sampled operations or calls; setting observability.sample.
struct SPINWIRE_API LatencyHistogram {
  /// "message", "long_message" (above the eager limit), "write", "read", "atomic",
  /// "write_and_send", "raw_send", "call" or "handler"
  std::string work;
  /// "total"; also "posting" (accepted until posted), "transfer" (posted until the poll that found
  /// it completed; of a call from its acceptance on), "delivery" (from then until the callback)
  std::string stage;
  std::optional<Method> method;  ///< none: all methods
  std::uint64_t samples = 0;     ///< recorded
  double sum_seconds = 0;        ///< of all samples
  Nanoseconds longest{0};        ///< of all samples
  /// Samples by time. Below 32 ns each nanosecond has a bucket; above, each power of two has 16.
  /// These are the buckets of an HdrHistogram (hdrhistogram.org) with one significant digit.
  std::vector<std::uint64_t> buckets;
  bool is_consistent = true;  ///< false: it changed while it was read

  /// The time within which a share (0 … 1) of the samples lies, rounded up by at most 6.3%.
  [[nodiscard]] Nanoseconds quantile(double share) const noexcept;
};

/// The file of an engine.
struct EngineFile {
  std::string path;          ///< of the file
  std::uint32_t pid = 0;     ///< the process of the engine
  std::uint32_t engine = 0;  ///< distinguishes the engines of a process
  bool is_alive = false;     ///< false: the process ended without closing the engine
};

/// What the file of an engine said when it was read.
struct SPINWIRE_API EngineReading {
  EngineFile file;            ///< the file that was read
  std::string release;        ///< of the library that wrote the file
  std::string program;        ///< the process's name
  std::string device;         ///< that the engine uses
  Nanoseconds opened_at{0};   ///< since the Unix epoch
  Nanoseconds written_at{0};  ///< the last control step that wrote; since the Unix epoch
  /// Time since that control step: for how long the application has not polled. 0 for a dead
  /// engine.
  Nanoseconds since_written{0};
  Nanoseconds read_at{0};           ///< by the clock of CLOCK_MONOTONIC
  std::vector<MetricTable> tables;  ///< counters and levels, by subject
  /// The last events of all subjects together, and of each one, in the order of their last time.
  std::vector<EngineEvent> events;
  std::vector<LatencyHistogram> latencies;  ///< those that have a sample

  /// Null if the file has no such table.
  [[nodiscard]] const MetricTable* find(std::string_view table) const noexcept;
};

/// The default of observability.directory.
inline constexpr std::string_view kObservabilityDirectory = "/dev/shm";

/// The files of this user's engines in a folder, ordered by process and engine. Any thread. Set-up.
/// Errors: system (the folder cannot be read).
[[nodiscard]] SPINWIRE_API Result<std::vector<EngineFile>> list_engines(
    const std::string& directory = std::string(kObservabilityDirectory));
/// Reads an engine's file. Trusts nothing in it. Any thread. Set-up. Errors:
///   not_connected     there is no such file any more
///   invalid_argument  not a file of an engine, damaged, or of another user
///   unsupported       a layout that this release does not know
///   system            the operating system refused
[[nodiscard]] SPINWIRE_API Result<EngineReading> read_engine(const EngineFile& file);
/// Decodes the bytes of a file: read_engine() without the file. `later`, unless empty, is what the
/// file held when it was read once more; rows that changed in between are not consistent. Errors:
/// invalid_argument, unsupported.
[[nodiscard]] SPINWIRE_API Result<EngineReading> decode_engine(
    std::span<const std::byte> bytes, std::span<const std::byte> later = {});
/// Removes the files of engines whose processes died without closing them, except the `keep`
/// newest. Returns how many were removed. Any thread. Set-up. Errors: system (the folder cannot be
/// read).
[[nodiscard]] SPINWIRE_API Result<std::size_t> remove_dead_engines(
    std::size_t keep = 0, const std::string& directory = std::string(kObservabilityDirectory));

}  // namespace spinwire
