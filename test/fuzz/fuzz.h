// Shared by the fuzzers: input by fields, checks, and seeds. A target includes this file once,
// reads an input in fuzz::run() and writes its seeds in fuzz::sow().
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fuzz {

using Bytes = std::vector<std::byte>;

/// Ends the run and keeps the input unless `holds`.
inline void expect(bool holds, std::string_view what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %.*s\n", static_cast<int>(what.size()), what.data());
  std::abort();
}

/// Whether the bytes are equal.
inline bool same(std::span<const std::byte> a, std::span<const std::byte> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}
inline bool printable(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= 0x20 && c < 0x7f; });
}
inline std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
/// A copy in a block of its own, so that a sanitizer detects a read beyond it.
inline Bytes alone(std::span<const std::byte> bytes) { return {bytes.begin(), bytes.end()}; }

/// Reads the input from its front; beyond the end it reads zeroes.
class Input {
 public:
  explicit Input(std::span<const std::byte> bytes) : rest_(bytes) {}
  template <std::unsigned_integral T>
  T take() {
    T value = 0;
    const std::size_t there = std::min(sizeof value, rest_.size());
    if (there != 0) std::memcpy(&value, rest_.data(), there);
    rest_ = rest_.subspan(there);
    return value;
  }
  std::span<const std::byte> bytes(std::size_t count) {
    const auto taken = rest_.first(std::min(count, rest_.size()));
    rest_ = rest_.subspan(taken.size());
    return taken;
  }
  [[nodiscard]] std::span<const std::byte> rest() const { return rest_; }
  [[nodiscard]] bool empty() const { return rest_.empty(); }

 private:
  std::span<const std::byte> rest_;
};

/// Writes the seeds, one file each.
class Seeds {
 public:
  explicit Seeds(std::string folder) : folder_(std::move(folder)) {}
  void add(std::initializer_list<std::span<const std::byte>> parts) {
    std::ofstream file(folder_ + "/seed-" + std::to_string(count_++), std::ios::binary);
    for (const auto part : parts) file << text_of(part);
    if (!file.flush()) {
      std::fprintf(stderr, "cannot write seeds to %s\n", folder_.c_str());
      std::exit(1);
    }
  }
  void add(std::span<const std::byte> bytes) { add({bytes}); }
  void add(std::string_view text) { add(std::as_bytes(std::span(text))); }

 private:
  std::string folder_;
  unsigned count_ = 0;
};

void run(std::span<const std::byte> data);
void sow(Seeds& seeds);

}  // namespace fuzz

/// TARGET --seeds FOLDER only writes the seeds.
extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  if (*argc == 3 && std::string_view((*argv)[1]) == "--seeds") {
    fuzz::Seeds seeds((*argv)[2]);
    fuzz::sow(seeds);
    std::exit(0);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::run(std::as_bytes(std::span(data, size)));
  return 0;
}
