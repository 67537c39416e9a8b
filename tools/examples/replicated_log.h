// What the programs replicated-log and log-client share: the calls of clients, and the log itself,
// a file of records that peers' devices read and write.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "common/values.h"
#include "spinwire/spinwire.h"

namespace replicated_log {

using spinwire::tools::Failure;

// ---- the calls --------------------------------------------------------------------------------

using Text = std::array<char, 32>;

/// Appends a record. The reply is its index, once the record is on a majority of the nodes. A
/// client gives its records the numbers 1, 2, 3, …, and repeats a call that failed under the same
/// number: a number is appended once, and each repetition has the same index.
inline constexpr spinwire::Method kAppend = 1;
struct Append {
  std::uint64_t client;   // random
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
  Log(const std::string& path, std::uint64_t capacity)
      : file_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)),
        bytes_((capacity + 1) * sizeof(Record)) {
    if (file_ < 0 || ::flock(file_, LOCK_EX | LOCK_NB) != 0 ||
        ::ftruncate(file_, static_cast<off_t>(bytes_)) != 0)
      throw Failure(path + ": " + std::strerror(errno));
    void* const mapped = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (mapped == MAP_FAILED) throw Failure(path + ": " + std::strerror(errno));
    head_ = static_cast<Head*>(mapped);
    records_ = {reinterpret_cast<Record*>(head_ + 1), capacity};
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
    for (size_ = committed(); size_ != records_.size(); ++size_) {
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
    std::uint64_t epoch;
    std::uint64_t committed;
  };

  [[nodiscard]] std::uint64_t hash_before(std::uint64_t index) const {
    return index != 0 ? records_[index - 1].hash : 0;
  }

  int file_;
  std::size_t bytes_;
  Head* head_ = nullptr;
  std::span<Record> records_;
  std::uint64_t size_ = 0;
};

}  // namespace replicated_log
