// GoogleTest and main(). The tests of each folder are compiled in units of a few files (see
// TEST_UNITS in the Makefile), so each test file keeps its helpers in a namespace of its own.
#include <src/gtest-all.cc>

namespace {
/// Child test programs must run all their tests, not this process's share.
struct NoSharesForChildren : testing::Environment {
  void SetUp() override {
    for (const char* name : {"GTEST_TOTAL_SHARDS", "GTEST_SHARD_INDEX"}) unsetenv(name);
  }
};
}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  testing::AddGlobalTestEnvironment(new NoSharesForChildren);
  return RUN_ALL_TESTS();
}
