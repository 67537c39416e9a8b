// Every test in one unit: GoogleTest itself, then each *_test.cc below test/. The build writes
// tests.inc, one #include a file, whenever the set of files changes. Because they share a unit,
// each test file keeps its helpers in a namespace of its own name.
#include <src/gtest-all.cc>

#include "tests.inc"

namespace {
/// Programs that tests start run all that they are told to, not this process's share.
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
