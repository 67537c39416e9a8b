// The slots of kv-store: what a reader accepts is one write's, whatever mixture of two it has read.
#include "../../tools/common/kv_table.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <string_view>

namespace kv_table_test {
namespace {

namespace kv = spinwire::tools::kv;
using kv::Bucket;
using kv::Look;
using kv::Slot;

TEST(KvTable, WhatWasWrittenIsFoundUnderItsKey) {
  const auto bucket = std::make_unique<Bucket>();
  std::string_view value;
  EXPECT_EQ(kv::look(*bucket, "a", value), Look::absent);
  for (const char* key : {"a", "b", "c", "d"}) {
    Slot* const slot = kv::place_of(*bucket, key);
    ASSERT_NE(slot, nullptr);
    kv::write(*slot, key, std::string(kv::kValueBytes, *key));
  }
  EXPECT_EQ(kv::place_of(*bucket, "e"), nullptr);
  EXPECT_EQ(kv::look(*bucket, "e", value), Look::absent);
  kv::write(*kv::place_of(*bucket, "b"), "b", "");
  EXPECT_EQ(kv::look(*bucket, "b", value), Look::there);
  EXPECT_EQ(value, "");
  EXPECT_EQ(kv::look(*bucket, "d", value), Look::there);
  EXPECT_EQ(value, std::string(kv::kValueBytes, 'd'));
}

// A READ may bring any cacheline as it was before a write or after it.
TEST(KvTable, NoMixtureOfTwoWritesIsAccepted) {
  Slot before{};
  kv::write(before, "key", std::string(400, 'x'));
  Slot after = before;
  kv::write(after, "key", std::string(400, 'y'));
  constexpr std::size_t kLine = 64;  // each of which differs
  constexpr unsigned kLines = sizeof(Slot) / kLine;
  Bucket bucket{};
  std::string_view value;
  for (unsigned newer = 0; newer < 1u << kLines; ++newer) {
    bucket[0] = before;
    for (unsigned line = 0; line < kLines; ++line) {
      if ((newer >> line & 1) == 0) continue;
      std::memcpy(reinterpret_cast<char*>(bucket.data()) + line * kLine,
                  reinterpret_cast<const char*>(&after) + line * kLine, kLine);
    }
    const Look found = kv::look(bucket, "key", value);
    if (newer == 0 || newer == (1u << kLines) - 1) {
      EXPECT_EQ(found, Look::there) << newer;
      EXPECT_EQ(value, std::string(400, newer == 0 ? 'x' : 'y')) << newer;
    } else {
      EXPECT_EQ(found, Look::torn) << newer;
    }
  }
}

TEST(KvTable, ASlotThatIsBeingWrittenIsNotAccepted) {
  Bucket bucket{};
  kv::write(bucket[0], "key", "value");
  ++bucket[0].version;
  bucket[0].checksum = kv::checksum_of(bucket[0], bucket[0].version);  // even if all else agrees
  std::string_view value;
  EXPECT_EQ(kv::look(bucket, "key", value), Look::torn);
  // One that is whole is found beside it.
  kv::write(bucket[1], "other", "value");
  EXPECT_EQ(kv::look(bucket, "other", value), Look::there);
}

TEST(KvTable, SizesThatAreNoneAreNotBelieved) {
  Bucket bucket{};
  kv::write(bucket[0], "key", "value");
  bucket[0].value_size = 1u << 30;
  bucket[0].checksum = kv::checksum_of(bucket[0], bucket[0].version);
  std::string_view value;
  EXPECT_EQ(kv::look(bucket, "key", value), Look::torn);
  EXPECT_TRUE(value.empty());
}

}  // namespace
}  // namespace kv_table_test
