// The file of an engine, as spinwire-stat reads it.
#include <array>
#include <cstdint>
#include <cstring>

#include "fuzz/fuzz.h"
#include "observe/latency.h"
#include "observe/page_layout.h"
#include "spinwire/observe.h"

namespace fuzz {

using namespace spinwire;

namespace {

void check_latency(const LatencyHistogram& latency) {
  expect(printable(latency.work) && printable(latency.stage), "names of a latency");
  expect(latency.buckets.size() == observe::kLatencyBuckets, "buckets of a latency");
  expect(latency.sum_seconds >= 0 && latency.longest.count() >= 0, "times of a latency");
  std::uint64_t samples = 0;
  for (const std::uint64_t count : latency.buckets) samples += count;
  expect(latency.samples == samples, "samples are those of the buckets");
  Nanoseconds least{0};
  for (const double share : {0.0, 0.5, 0.99, 1.0}) {
    const Nanoseconds time = latency.quantile(share);
    expect(least <= time && time <= latency.longest, "percentiles do not fall");
    least = time;
  }
}

}  // namespace

void run(std::span<const std::byte> data) {
  // The first half is the file, the second what it held later.
  const Bytes whole = alone(data);
  const Bytes first = alone(data.first(data.size() / 2));
  const Bytes later = alone(data.last(data.size() / 2));
  for (const auto& reading : {decode_engine(whole), decode_engine(first, later)}) {
    if (!reading) {
      expect(reading.error().status == Status::invalid_argument ||
                 reading.error().status == Status::unsupported,
             "status of a refusal");
      continue;
    }
    expect(printable(reading->device) && printable(reading->program), "texts of a file");
    for (const LatencyHistogram& latency : reading->latencies) check_latency(latency);
    for (const EngineEvent& event : reading->events) {
      expect(printable(event.text) && printable(event.kind), "texts of an event");
      expect(event.at.count() >= 0 && event.first_at.count() >= 0, "times of an event");
    }
    for (const MetricTable& table : reading->tables) {
      expect(table.find(table.columns.front().name) == 0, "a column is found by its name");
      for (const MetricRow& row : table.rows) {
        expect(row.values.size() == table.columns.size(), "a row has a value for each column");
        for (const MetricValue& value : row.values) expect(printable(value.text), "text of a row");
      }
    }
  }
}

namespace {

/// The bytes of all parts, one behind the other.
template <typename... Parts>
Bytes joined(const Parts&... parts) {
  Bytes all;
  const auto append = [&all](const auto& part) {
    const auto bytes = std::as_bytes(std::span(&part, 1));
    all.insert(all.end(), bytes.begin(), bytes.end());
  };
  (append(parts), ...);
  return all;
}

/// A file with a table, which has a counter, a text and two rows, and with an event.
Bytes small_file(std::uint32_t layout = observe::kLayoutVersion) {
  using observe::ColumnDescriptor;
  using observe::FileHeader;
  using observe::TableDescriptor;
  FileHeader header;
  header.layout_version = layout;
  header.table_count = 2;
  header.table_bytes = sizeof(TableDescriptor);
  header.column_bytes = sizeof(ColumnDescriptor);
  header.tables_offset = sizeof(FileHeader);
  std::memcpy(header.device.data(), "softverbs", 9);
  TableDescriptor table;
  std::memcpy(table.name.data(), "engine", 6);
  table.column_count = 2;
  table.columns_offset = sizeof header + 2 * sizeof table;
  table.rows_offset = table.columns_offset + 2 * sizeof(ColumnDescriptor);
  table.row_bytes = 40;
  table.row_count = 2;
  std::array<ColumnDescriptor, 2> columns;
  std::memcpy(columns[0].name.data(), "spinwire_polls_total", 20);
  columns[0].offset = 16;
  columns[0].bytes = 8;
  std::memcpy(columns[1].name.data(), "peer", 4);
  columns[1].kind = static_cast<std::uint32_t>(MetricKind::label);
  columns[1].offset = 24;
  columns[1].bytes = 16;
  const std::array<std::uint64_t, 10> rows = {2, 1, 7, 0x4141, 0x4242, 4, 1, 8, 0x4343, 0};
  TableDescriptor events;
  std::memcpy(events.name.data(), "events", 6);
  events.kind = observe::kEventTable;
  events.rows_offset = table.rows_offset + sizeof rows;
  events.row_bytes = sizeof(observe::EventRecord);
  events.row_count = 1;
  observe::EventRecord event;
  event.sequence = 2;
  event.number = event.count = event.kind = event.subject = 1;
  std::memcpy(event.text.data(), "ready", 5);
  header.file_bytes = events.rows_offset + sizeof event;
  return joined(header, table, events, columns, rows, event);
}

/// A file with latencies only: of calls, and of one method.
Bytes file_of_latencies() {
  using observe::LatencyRecord;
  observe::FileHeader header;
  header.table_count = 1;
  header.table_bytes = sizeof(observe::TableDescriptor);
  header.column_bytes = sizeof(observe::ColumnDescriptor);
  header.tables_offset = sizeof header;
  observe::TableDescriptor table;
  std::memcpy(table.name.data(), "latencies", 9);
  table.kind = observe::kLatencyTable;
  table.rows_offset = sizeof header + sizeof table;
  table.row_bytes = sizeof(LatencyRecord);
  std::array<LatencyRecord, 2> rows;
  table.row_count = static_cast<std::uint32_t>(rows.size());
  rows[0].samples = 3;
  rows[0].sum_ns = 5300;
  rows[0].max_ns = 5000;
  rows[0].work = static_cast<std::uint32_t>(observe::TimedWork::call);
  rows[0].buckets[31] = 2;
  rows[0].buckets[150] = 1;
  rows[1] = rows[0];
  rows[1].method = 7;
  rows[1].buckets.back() = ~std::uint64_t{0};
  header.file_bytes = table.rows_offset + sizeof rows;
  return joined(header, table, rows);
}

}  // namespace

void sow(Seeds& seeds) {
  const Bytes file = small_file();
  seeds.add({file});
  seeds.add({file, file});
  Bytes later = file;
  later[later.size() - sizeof(observe::EventRecord) - 40] = std::byte{6};
  seeds.add({file, later});
  later[later.size() - sizeof(observe::EventRecord)] = std::byte{3};
  seeds.add({file, later});
  seeds.add({small_file(9)});
  const Bytes latencies = file_of_latencies();
  seeds.add({latencies});
  seeds.add({latencies, latencies});
  Bytes changed = latencies;
  changed[changed.size() - sizeof(observe::LatencyRecord)] = std::byte{2};
  seeds.add({latencies, changed});
}

}  // namespace fuzz
