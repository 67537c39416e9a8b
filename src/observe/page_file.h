// The file of an engine, as its engine writes it. The engine never reads from it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "observe/latency.h"
#include "observe/metric_tables.h"
#include "observe/page_layout.h"
#include "observe/recorder.h"
#include "spinwire/status.h"

namespace spinwire::observe {

/// Dead engines whose files the next engine leaves for spinwire-stat.
inline constexpr std::size_t kDeadFilesKept = 4;

struct PageFileOptions {
  std::string directory;
  std::string device;
  double ticks_per_ns = 1;
  std::uint64_t opened_tick = 0;
  /// By Table.
  std::array<std::uint32_t, kTables> rows{};
  /// Events of all subjects, and rings of events, by EventSubject.
  std::uint32_t events = kEventsOfAll;
  std::array<std::uint32_t, kEventSubjects> event_rings{};
  std::uint32_t latencies = kLatencyRows;  ///< histograms
};

/// A mapped file with all pages allocated, so that writing to it never raises SIGBUS because memory
/// has run out. It appears under its name when it is complete, with a lock that lasts until the
/// process ends, however it ends. A forked child does not have the mapping. Move-only.
class PageFile {
 public:
  /// Also removes the files of dead engines but the newest kDeadFilesKept. Set-up. Errors: limit,
  /// no_memory, unsupported (the folder is not in memory), system.
  static Result<PageFile> create(const PageFileOptions& options);

  PageFile() noexcept = default;
  PageFile(PageFile&& other) noexcept { *this = std::move(other); }
  PageFile& operator=(PageFile&& other) noexcept;
  /// Removes the file.
  ~PageFile() { close(); }
  void close() noexcept;

  explicit operator bool() const noexcept { return data_ != nullptr; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] std::uint32_t rows(Table table) const noexcept { return place(table).rows; }
  /// Writes a row that readers take as a whole or not at all. `words` of `row` are the columns of
  /// the table. The page's contents have no effect on where and how much is written.
  void write(Table table, std::uint32_t index, const RowWords& row, std::size_t words) noexcept {
    write_row(table, index, true, {row.data(), words});
  }
  /// Memory for events of all subjects, and of one kind of subject.
  [[nodiscard]] EventRings all_events() const noexcept { return rings(events_.back()); }
  [[nodiscard]] EventRings events(EventSubject subject) const noexcept {
    return rings(events_[static_cast<std::size_t>(subject)]);
  }
  /// Writes a histogram.
  void write(std::uint32_t index, const LatencyRecord& latency) noexcept;
  [[nodiscard]] std::uint32_t latencies() const noexcept { return latencies_.rows; }
  /// Marks a row as having no subject.
  void clear(Table table, std::uint32_t index) noexcept { write_row(table, index, false, {}); }

 private:
  struct Place {
    std::size_t offset = 0;
    std::size_t row_bytes = 0;
    std::uint32_t rows = 0;
  };
  struct EventPlace {
    std::size_t offset = 0;
    std::uint32_t rings = 0;
    std::uint32_t length = 0;
  };
  [[nodiscard]] EventRings rings(const EventPlace& place) const noexcept {
    return {data_ + place.offset, place.rings, place.length};
  }
  [[nodiscard]] const Place& place(Table table) const noexcept {
    return places_[static_cast<std::size_t>(table)];
  }
  void lay_out(const PageFileOptions& options);
  /// Writes the descriptors; returns the header.
  FileHeader describe(const PageFileOptions& options);
  void write_row(Table table, std::uint32_t index, bool in_use,
                 std::span<const std::uint64_t> words) noexcept;

  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  std::array<Place, kTables> places_{};
  Place latencies_;
  std::array<EventPlace, kEventSubjects + 1> events_{};  ///< by EventSubject; the last: of all
  std::uint64_t sequence_ = 0;  ///< of the last row written; ours, so that no peer can change it
  std::string path_;
};

}  // namespace spinwire::observe
