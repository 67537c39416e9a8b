// What the programs replicated-log and log-client share: the calls of clients, and the log itself,
// a file of records that peers' devices read and write.
#pragma once

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "program.h"

namespace replicated_log {

using program::Failure;

// ---- the calls --------------------------------------------------------------------------------

/// Printable characters, up to the first NUL.
using Text = std::array<char, 32>;
inline std::string_view view(const Text& text) {
  return {text.data(), ::strnlen(text.data(), text.size())};
}
inline bool is_printable(char c) { return c >= ' ' && c <= '~'; }

/// Appends a record. The reply is its index, once the record is on a majority of the nodes. A
/// client gives its records the numbers 1, 2, 3, …, and repeats a call that failed under the same
/// number: a number is appended once, and each repetition has the same index.
inline constexpr spinwire::Method kAppend = 1;
inline constexpr std::string_view kNotLeading = "this node does not lead";  // another one may
struct Append {
  std::uint64_t client;   // random, not 0
  std::uint64_t number;   // of the record
  std::uint64_t attempt;  // of the call: never repeated
  Text text;
};

/// Reads records from an index on: the reply has as many as fit. A node answers what it knows to be
/// on a majority, which need not be the newest.
inline constexpr spinwire::Method kRead = 2;
struct Read {
  std::uint64_t from;
};

// ---- the log ----------------------------------------------------------------------------------

struct Record {
  std::uint64_t epoch;   // of the leader that has appended it; not 0
  std::uint64_t client;  // 0: a leader's own, which begins its epoch
  std::uint64_t number;
  Text text;
  std::uint64_t hash;  // of this record and the hash before it, so of all records up to here
};
static_assert(sizeof(Record) == 64);

inline std::uint64_t hash_of(const Record& record, std::uint64_t hash_before) {
  std::array<std::uint64_t, sizeof(Record) / 8> words{};
  std::memcpy(words.data(), &record, sizeof record);
  words.back() = hash_before;
  std::uint64_t hash = 0x9e3779b97f4a7c15;
  for (const std::uint64_t word : words) {
    hash = (hash ^ word) * 0xff51afd7ed558ccd;
    hash ^= hash >> 32;
  }
  return hash;
}

/// A file of records, mapped into memory, so that it outlives its process. A peer that writes to it
/// may die at any byte: a record counts only if its hash and those of all records before are right.
class Log {
 public:
  /// Opens the log of a file, or makes one in a new file, with room for so many records. Changes no
  /// file that is not a log of this user.
  Log(const std::string& path, std::optional<std::uint64_t> new_capacity)
      : file_(::open(path.c_str(),
                     O_RDWR | O_CLOEXEC | O_NOFOLLOW | (new_capacity ? O_CREAT | O_EXCL : 0),
                     0600)) {
    if (file_ < 0 && errno == ENOENT && !new_capacity)
      throw Failure(path + ": there is no such file; --new makes one, but see the source's head");
    expect(path, file_ >= 0 && ::flock(file_, LOCK_EX | LOCK_NB) == 0);
    if (new_capacity) reserve(path, (*new_capacity + 1) * sizeof(Record));
    struct stat found {};
    expect(path, ::fstat(file_, &found) == 0);
    if (!S_ISREG(found.st_mode) || found.st_uid != ::geteuid())
      throw Failure(fmt::format("{}: no file of user {}, but mode {:o} of user {}", path,
                                ::geteuid(), found.st_mode, found.st_uid));
    bytes_ = static_cast<std::size_t>(found.st_size);
    if (bytes_ < 2 * sizeof(Record) || bytes_ % sizeof(Record) != 0)
      throw Failure(fmt::format("{}: no log, but {} bytes", path, bytes_));
    void* const mapped = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    expect(path, mapped != MAP_FAILED);
    head_ = static_cast<Head*>(mapped);
    records_ = {reinterpret_cast<Record*>(head_ + 1), bytes_ / sizeof(Record) - 1};
    if (new_capacity) *head_ = {kMagic, *new_capacity, 0, 0};
    if (head_->magic != kMagic)
      throw Failure(
          fmt::format("{}: no log, but a file that begins with {:016x}", path, head_->magic));
    if (head_->capacity != records_.size() || head_->committed > records_.size())
      throw Failure(fmt::format("{}: a damaged log: {} records committed of {}, room for {}", path,
                                head_->committed, head_->capacity, records_.size()));
    extend();
  }
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;
  ~Log() {
    ::munmap(head_, bytes_);
    ::close(file_);
  }

  /// All records, also those that do not count.
  [[nodiscard]] std::span<Record> records() const { return records_; }
  /// The newest epoch in which this node has given its log to a leader, or has led.
  [[nodiscard]] std::uint64_t epoch() const { return head_->epoch; }
  void set_epoch(std::uint64_t epoch) { head_->epoch = epoch; }
  /// The records that are known to be on a majority, and stay.
  [[nodiscard]] std::uint64_t committed() const { return head_->committed; }
  void set_committed(std::uint64_t count) {
    head_->committed = std::max(head_->committed, std::min<std::uint64_t>(count, records_.size()));
  }

  /// The records that count, as of the last append() or extend().
  [[nodiscard]] std::uint64_t size() const { return size_; }
  [[nodiscard]] std::uint64_t last_epoch() const {
    return size_ != 0 ? records_[size_ - 1].epoch : 0;
  }
  /// Counts again what others may have written.
  void extend() {
    for (size_ = committed(); size_ < records_.size(); ++size_) {
      const Record record = records_[size_];
      if (record.epoch == 0 || record.hash != hash_of(record, hash_before(size_))) break;
    }
  }
  void append(std::uint64_t epoch, std::uint64_t client, std::uint64_t number, const Text& text) {
    Record record{epoch, client, number, text, 0};
    record.hash = hash_of(record, hash_before(size_));
    records_[size_++] = record;
  }

 private:
  struct alignas(sizeof(Record)) Head {
    std::uint64_t magic;
    std::uint64_t capacity;  // in records
    std::uint64_t epoch;
    std::uint64_t committed;
  };

  static constexpr std::uint64_t kMagic = 0x31676f6c6c706572;  // "repllog1"

  static void expect(const std::string& path, bool succeeded) {
    if (!succeeded) throw Failure(path + ": " + std::strerror(errno));
  }
  /// Takes all blocks of a new file now: without, a full file system would end us at an access.
  void reserve(const std::string& path, std::size_t bytes) const {
    const int error = ::posix_fallocate(file_, 0, static_cast<off_t>(bytes));
    if (error == 0) return;
    (void)::unlink(path.c_str());
    throw Failure(fmt::format("{}: {} bytes: {}", path, bytes, std::strerror(error)));
  }

  [[nodiscard]] std::uint64_t hash_before(std::uint64_t index) const {
    return index != 0 ? records_[index - 1].hash : 0;
  }

  int file_;
  std::size_t bytes_ = 0;
  Head* head_ = nullptr;
  std::span<Record> records_;
  std::uint64_t size_ = 0;
};

}  // namespace replicated_log
