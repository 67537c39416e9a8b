// The slots of kv-store: a reader accepts only the bytes of one write, whatever mixture it has
// read.
#include "../../tools/examples/kv-store/kv_table.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <string_view>

namespace kv_table_test {
namespace {

using kv::Bucket;
using kv::Look;
using kv::Slot;

TEST(KvTable, WhatWasWrittenIsFoundUnderItsKey) {
  const auto bucket = std::make_unique<Bucket>();
  std::string_view value;
  std::uint64_t version = 0;
  EXPECT_EQ(kv::look(*bucket, "a", value, version), Look::absent);
  for (const char* key : {"a", "b", "c", "d"}) {
    Slot* const slot = kv::place_of(*bucket, key);
    ASSERT_NE(slot, nullptr);
    kv::write(*slot, key, std::string(kv::kValueBytes, *key));
  }
  EXPECT_EQ(kv::place_of(*bucket, "e"), nullptr);
  EXPECT_EQ(kv::look(*bucket, "e", value, version), Look::absent);
  kv::write(*kv::place_of(*bucket, "b"), "b", "");
  EXPECT_EQ(kv::look(*bucket, "b", value, version), Look::there);
  EXPECT_EQ(value, "");
  EXPECT_EQ(kv::look(*bucket, "d", value, version), Look::there);
  EXPECT_EQ(value, std::string(kv::kValueBytes, 'd'));
}

TEST(KvTable, WhatWasDeletedMakesRoom) {
  const auto bucket = std::make_unique<Bucket>();
  std::string_view value;
  std::uint64_t version = 0;
  for (const char* key : {"a", "b", "c", "d"}) kv::write(*kv::place_of(*bucket, key), key, key);
  const std::uint64_t before = (*bucket)[1].version;
  kv::write((*bucket)[1], {}, {});
  EXPECT_EQ(kv::look(*bucket, "b", value, version), Look::absent);
  EXPECT_EQ(kv::look(*bucket, "", value, version), Look::absent);
  // A key keeps its slot although an earlier slot is free.
  EXPECT_EQ(kv::place_of(*bucket, "d"), &(*bucket)[3]);
  ASSERT_EQ(kv::place_of(*bucket, "e"), &(*bucket)[1]);
  kv::write((*bucket)[1], "e", "new");
  EXPECT_EQ(kv::look(*bucket, "e", value, version), Look::there);
  EXPECT_EQ(value, "new");
  EXPECT_EQ(version, before + 4);
}

// A READ may return any cache line as it was before or after a write.
TEST(KvTable, NoMixtureOfTwoWritesIsAccepted) {
  Slot before{};
  kv::write(before, "key", std::string(400, 'x'));
  Slot after = before;
  kv::write(after, "key", std::string(400, 'y'));
  constexpr std::size_t kLine = 64;  // each line differs
  constexpr unsigned kLines = sizeof(Slot) / kLine;
  Bucket bucket{};
  std::string_view value;
  std::uint64_t version = 0;
  for (unsigned newer = 0; newer < 1u << kLines; ++newer) {
    bucket[0] = before;
    for (unsigned line = 0; line < kLines; ++line) {
      if ((newer >> line & 1) == 0) continue;
      std::memcpy(reinterpret_cast<char*>(bucket.data()) + line * kLine,
                  reinterpret_cast<const char*>(&after) + line * kLine, kLine);
    }
    const Look found = kv::look(bucket, "key", value, version);
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
  bucket[0].checksum = kv::checksum_of(bucket[0], bucket[0].version);  // though all else agrees
  std::string_view value;
  std::uint64_t version = 0;
  EXPECT_EQ(kv::look(bucket, "key", value, version), Look::torn);
  // A whole slot beside it is found.
  kv::write(bucket[1], "other", "value");
  EXPECT_EQ(kv::look(bucket, "other", value, version), Look::there);
}

TEST(KvTable, SizesThatAreNoneAreNotBelieved) {
  Bucket bucket{};
  kv::write(bucket[0], "key", "value");
  bucket[0].value_size = 1u << 30;
  bucket[0].checksum = kv::checksum_of(bucket[0], bucket[0].version);
  std::string_view value;
  std::uint64_t version = 0;
  EXPECT_EQ(kv::look(bucket, "key", value, version), Look::torn);
  EXPECT_TRUE(value.empty());
}

}  // namespace
}  // namespace kv_table_test
