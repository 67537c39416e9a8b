// Every test in one unit: GoogleTest itself, then each *_test.cc below test/. The build writes
// tests.inc, one #include a file, whenever the set of files changes. Because they share a unit,
// each test file keeps its helpers in a namespace of its own name.
#include <src/gtest-all.cc>

#include "tests.inc"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
