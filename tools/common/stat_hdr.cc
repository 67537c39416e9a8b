#include "common/stat_hdr.h"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string_view>

#include "common/stat_findings.h"

namespace spinwire::tools {
namespace {

using Octets = std::string;

template <typename T>
void put_big_endian(Octets& out, T value) {
  for (int shift = 8 * static_cast<int>(sizeof value) - 8; shift >= 0; shift -= 8)
    out += static_cast<char>(static_cast<std::uint64_t>(value) >> shift & 0xff);
}

/// A signed number as ZigZag LEB128, in at most nine bytes; the ninth has eight bits.
void put_zigzag(Octets& out, std::int64_t value) {
  std::uint64_t rest =
      static_cast<std::uint64_t>(value) << 1 ^ static_cast<std::uint64_t>(value >> 63);
  for (int i = 0; i < 8; ++i) {
    const auto low = static_cast<unsigned>(rest & 0x7f);
    rest >>= 7;
    if (rest == 0) {
      out += static_cast<char>(low);
      return;
    }
    out += static_cast<char>(low | 0x80u);
  }
  out += static_cast<char>(rest);
}

/// The counts up to the last that is not 0; a run of zeroes is its length below zero.
Octets encode_counts(std::span<const std::uint64_t> counts) {
  std::size_t end = counts.size();
  while (end != 0 && counts[end - 1] == 0) --end;
  Octets out;
  for (std::size_t i = 0; i < end;) {
    std::size_t zeroes = 0;
    while (i + zeroes < end && counts[i + zeroes] == 0) ++zeroes;
    if (zeroes != 0) {
      put_zigzag(out, -static_cast<std::int64_t>(zeroes));
      i += zeroes;
    } else {
      put_zigzag(out, static_cast<std::int64_t>(counts[i++]));
    }
  }
  return out;
}

/// A zlib stream (RFC 1950) of one stored block: the counts are short, and need no library.
Octets zlib_stored(const Octets& bytes) {
  std::uint32_t a = 1;
  std::uint32_t b = 0;
  for (const char c : bytes) {
    a = (a + static_cast<unsigned char>(c)) % 65521;
    b = (b + a) % 65521;
  }
  const auto length = static_cast<std::uint16_t>(bytes.size());
  const auto little_endian = [](std::uint16_t value) {
    return Octets{static_cast<char>(value & 0xff), static_cast<char>(value >> 8)};
  };
  Octets out{'\x78', '\x01', '\x01'};
  out += little_endian(length) + little_endian(static_cast<std::uint16_t>(~length)) + bytes;
  put_big_endian(out, b << 16 | a);
  return out;
}

std::string base64(std::string_view bytes) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t group = 0;
    for (std::size_t k = 0; k < 3; ++k)
      group = group << 8 | (i + k < bytes.size() ? static_cast<unsigned char>(bytes[i + k]) : 0u);
    for (std::size_t k = 0; k < 4; ++k)
      out += i + k <= bytes.size() ? kDigits[group >> (18 - 6 * k) & 63] : '=';
  }
  return out;
}

/// A histogram in the compressed encoding V2, as base64.
std::string hdr_encoding(std::span<const std::uint64_t> buckets, std::uint32_t digits) {
  constexpr std::uint32_t kEncoding = 0x1c849313;    // V2, words of any length
  constexpr std::uint32_t kCompressed = 0x1c849314;  // the same, compressed
  constexpr std::uint64_t kHighest = (std::uint64_t{1} << 36) - 1;
  const Octets counts = encode_counts(buckets);
  Octets plain;
  put_big_endian(plain, kEncoding);
  put_big_endian(plain, static_cast<std::uint32_t>(counts.size()));
  put_big_endian(plain, std::uint32_t{0});  // normalizing index offset
  put_big_endian(plain, digits);
  put_big_endian(plain, std::uint64_t{1});  // lowest value
  put_big_endian(plain, kHighest);
  put_big_endian(plain, std::bit_cast<std::uint64_t>(1.0));  // conversion ratio of doubles
  const Octets stream = zlib_stored(plain + counts);
  Octets all;
  put_big_endian(all, kCompressed);
  put_big_endian(all, static_cast<std::uint32_t>(stream.size()));
  return base64(all + stream);
}

}  // namespace

std::string latency_name(const LatencyHistogram& latency) {
  std::string name = latency.work + '.' + latency.stage;
  if (latency.method) name += fmt::format(".method-{}", *latency.method);
  return name;
}

std::string hdr_head(std::string_view title) {
  return fmt::format(
      "#[{}, in nanoseconds]\n#[Histogram log format version 1.3]\n"
      "\"StartTimestamp\",\"Interval_Length\",\"Interval_Max\",\"Interval_Compressed_Histogram\"\n",
      title);
}

std::string hdr_line(const HdrInterval& interval) {
  return fmt::format("Tag={},{:.3f},{:.3f},{:.3f},{}\n", interval.tag, interval.begin_seconds,
                     interval.length_seconds, static_cast<double>(interval.longest_ns),
                     hdr_encoding(interval.buckets, interval.digits));
}

std::string hdr_log(std::span<const EngineReading> readings) {
  constexpr std::uint32_t kDigits = 1;  // its buckets are those of Spinwire
  std::string log = hdr_head("Latencies of Spinwire's engines");
  for (const EngineReading& reading : readings) {
    const double length = std::max(to_seconds(reading.written_at - reading.opened_at), 0.0);
    for (const LatencyHistogram& latency : reading.latencies) {
      log += hdr_line({.tag = fmt::format("{}-{}.{}", reading.file.pid, reading.file.engine,
                                          latency_name(latency)),
                       .begin_seconds = to_seconds(reading.opened_at),
                       .length_seconds = length,
                       .longest_ns = static_cast<std::uint64_t>(latency.longest.count()),
                       .digits = kDigits,
                       .buckets = latency.buckets});
    }
  }
  return log;
}

}  // namespace spinwire::tools
