// What the fuzzers share: input by fields, checks, and seeds. A target includes this once, takes an
// input in fuzz::run() and gives in fuzz::sow() what to begin with.
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

/// Ends the run, with the input kept, where something does not hold.
inline void expect(bool holds, std::string_view what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %.*s\n", static_cast<int>(what.size()), what.data());
  std::abort();
}

/// The same bytes.
inline bool same(std::span<const std::byte> a, std::span<const std::byte> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}
inline bool printable(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= 0x20 && c < 0x7f; });
}
inline std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
/// Exactly these bytes in a block of their own, so that a look beyond them is seen.
inline Bytes alone(std::span<const std::byte> bytes) { return {bytes.begin(), bytes.end()}; }

/// Takes the input from its front; what is not there reads as 0.
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

/// Where the first inputs go, a file each.
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

/// TARGET --seeds FOLDER writes them and does no more.
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
