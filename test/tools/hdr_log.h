// HdrHistogram's log format, decoded by what its specification says.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace tools_test {

/// A log in HdrHistogram's format, read by what its specification says.
class HdrLog {
 public:
  struct Interval {
    std::string tag;
    double longest = 0;
    std::map<std::uint64_t, std::uint64_t> counts;  ///< by the least value of their bucket
  };
  HdrLog(const std::string& text, std::uint64_t digits) : half_(digits == 1 ? 16 : 128) {
    EXPECT_NE(text.find("#[Histogram log format version 1.3]\n"), std::string::npos) << text;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with('#') || line.starts_with('"')) continue;
      std::istringstream fields(line);
      Interval& interval = intervals.emplace_back();
      std::string skipped, longest, encoded;
      std::getline(fields, interval.tag, ',');
      std::getline(fields, skipped, ',');
      std::getline(fields, skipped, ',');
      std::getline(fields, longest, ',');
      std::getline(fields, encoded);
      interval.longest = std::stod(longest);
      decode(from_base64(encoded), interval);
    }
  }
  std::vector<Interval> intervals;

 private:
  using Octets = std::vector<std::uint8_t>;
  static Octets from_base64(const std::string& text) {
    EXPECT_EQ(text.size() % 4, 0u);
    const std::string digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    Octets out;
    unsigned bits = 0, count = 0;
    for (const char c : text) {
      if (c == '=') break;
      EXPECT_NE(digits.find(c), std::string::npos);
      bits = bits << 6 | static_cast<unsigned>(digits.find(c));
      if ((count += 6) >= 8) out.push_back(static_cast<std::uint8_t>(bits >> (count -= 8)));
    }
    return out;
  }
  static std::uint64_t number(const Octets& from, std::size_t at, std::size_t bytes) {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < bytes; ++i) value = value << 8 | from.at(at + i);
    return value;
  }
  void decode(const Octets& all, Interval& interval) const {
    EXPECT_EQ(number(all, 0, 4), 0x1c849314u);
    EXPECT_EQ(number(all, 4, 4), all.size() - 8);
    // zlib with one stored block.
    EXPECT_EQ(number(all, 8, 2) % 31, 0u);
    EXPECT_EQ(all.at(10), 1);
    const std::size_t length = all.at(11) | all.at(12) << 8;
    EXPECT_EQ(length ^ 0xffff, static_cast<std::size_t>(all.at(13) | all.at(14) << 8));
    EXPECT_EQ(15 + length + 4, all.size());
    std::uint32_t a = 1, b = 0;
    for (std::size_t i = 0; i < length; ++i) {
      a = (a + all.at(15 + i)) % 65521;
      b = (b + a) % 65521;
    }
    EXPECT_EQ(number(all, 15 + length, 4), b << 16 | a);
    const Octets plain(all.begin() + 15, all.end() - 4);
    EXPECT_EQ(number(plain, 0, 4), 0x1c849313u);
    EXPECT_EQ(number(plain, 4, 4), plain.size() - 40);
    EXPECT_EQ(number(plain, 8, 4), 0u);
    EXPECT_EQ(number(plain, 12, 4), half_ == 16 ? 1u : 2u) << "significant digits";
    EXPECT_EQ(number(plain, 16, 8), 1u) << "lowest value";
    EXPECT_EQ(number(plain, 32, 8), 0x3ff0000000000000u) << "the double 1.0";
    std::size_t index = 0;
    for (std::size_t at = 40; at < plain.size();) {
      std::uint64_t raw = 0;
      for (int shift = 0;; shift += 7) {
        const std::uint8_t byte = plain.at(at++);
        if (shift == 56) {
          raw |= std::uint64_t{byte} << shift;
          break;
        }
        raw |= std::uint64_t{byte & 0x7fu} << shift;
        if ((byte & 0x80) == 0) break;
      }
      const auto value = static_cast<std::int64_t>(raw >> 1) ^ -static_cast<std::int64_t>(raw & 1);
      if (value < 0) {
        index += static_cast<std::size_t>(-value);
        continue;
      }
      const std::uint64_t half = index / half_;
      const std::uint64_t least = half < 2 ? index : (half_ + index % half_) << (half - 1);
      interval.counts[least] = static_cast<std::uint64_t>(value);
      ++index;
    }
  }

  /// One significant digit: 32 values of the first bucket, then halves of 16. Two: 256, and 128.
  std::uint64_t half_;
};

}  // namespace tools_test
