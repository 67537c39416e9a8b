#include "base/units.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <string>

namespace units_test {
namespace {

using spinwire::Nanoseconds;
using spinwire::base::bytes_text;
using spinwire::base::duration_text;
using spinwire::base::parse_bytes;
using spinwire::base::parse_duration;
using spinwire::base::parse_integer;
using namespace std::chrono_literals;

template <typename Parsed>
std::string complaint(const Parsed& parsed) {
  return parsed ? std::string("none") : parsed.error();
}

TEST(Units, ReadsBytes) {
  EXPECT_EQ(parse_bytes("4096"), 4096u);
  EXPECT_EQ(parse_bytes("0"), 0u);
  EXPECT_EQ(parse_bytes("17B"), 17u);
  EXPECT_EQ(parse_bytes("4KiB"), 4096u);
  EXPECT_EQ(parse_bytes("32MiB"), 32u << 20);
  EXPECT_EQ(parse_bytes("1GiB"), 1u << 30);
  EXPECT_EQ(parse_bytes("2TiB"), 2ull << 40);
}

TEST(Units, SaysWhatIsWrongWithBytes) {
  EXPECT_EQ(complaint(parse_bytes("4KB")),
            "has the unknown unit 'KB'; it is one of B, KiB, MiB, GiB or TiB");
  EXPECT_EQ(complaint(parse_bytes("4 KiB")),
            "has the unknown unit ' KiB'; it is one of B, KiB, MiB, GiB or TiB");
  EXPECT_EQ(complaint(parse_bytes("")),
            "is not a whole number with a unit (B, KiB, MiB, GiB or TiB)");
  EXPECT_NE(complaint(parse_bytes("-1")), "none");
  EXPECT_NE(complaint(parse_bytes("KiB")), "none");
  EXPECT_NE(complaint(parse_bytes("1.5GiB")), "none");
  EXPECT_EQ(complaint(parse_bytes("99999999999999999999999")), "is too large");
  EXPECT_EQ(complaint(parse_bytes("9000000TiB")), "is too large");
}

TEST(Units, ReadsDurations) {
  EXPECT_EQ(parse_duration("250ns"), Nanoseconds(250));
  EXPECT_EQ(parse_duration("100us"), Nanoseconds(100us));
  EXPECT_EQ(parse_duration("1ms"), Nanoseconds(1ms));
  EXPECT_EQ(parse_duration("5s"), Nanoseconds(5s));
  EXPECT_EQ(parse_duration("2min"), Nanoseconds(2min));
  EXPECT_EQ(parse_duration("1h"), Nanoseconds(1h));
}

TEST(Units, DurationsNeedAUnit) {
  EXPECT_EQ(complaint(parse_duration("100")), "needs a unit: ns, us, ms, s, min or h");
  EXPECT_EQ(complaint(parse_duration("100KiB")),
            "has the unknown unit 'KiB'; it is one of ns, us, ms, s, min or h");
  EXPECT_EQ(complaint(parse_duration("3000000h")), "is too large");
}

TEST(Units, ReadsIntegers) {
  EXPECT_EQ(parse_integer("-1"), -1);
  EXPECT_EQ(parse_integer("42"), 42);
  EXPECT_EQ(complaint(parse_integer("0x10")), "is not a whole number");
  EXPECT_EQ(complaint(parse_integer("")), "is not a whole number");
  EXPECT_EQ(complaint(parse_integer("9223372036854775808")), "is too large");
}

TEST(Units, TextsReadBackExactly) {
  for (const std::uint64_t n :
       {0ull, 1ull, 1000ull, 4096ull, 1048512ull, 32ull << 20, 3ull << 40}) {
    EXPECT_EQ(parse_bytes(bytes_text(n)), n) << bytes_text(n);
  }
  for (const Nanoseconds n : {0ns, 1ns, Nanoseconds(1500us), Nanoseconds(90s), Nanoseconds(1h)}) {
    EXPECT_EQ(parse_duration(duration_text(n)), n) << duration_text(n);
  }
}

TEST(Units, TextsAreShort) {
  EXPECT_EQ(bytes_text(32u << 20), "32MiB");
  EXPECT_EQ(bytes_text(1048512), "1048512");
  EXPECT_EQ(bytes_text(1024), "1KiB");
  EXPECT_EQ(duration_text(100us), "100us");
  EXPECT_EQ(duration_text(1500ms), "1500ms");
  EXPECT_EQ(duration_text(60s), "1min");
  EXPECT_EQ(duration_text(1h), "1h");
  EXPECT_EQ(duration_text(-5ms), "-5ms");
}

}  // namespace
}  // namespace units_test
