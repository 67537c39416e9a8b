// verbs-conformance: tries a device by what the InfiniBand specification and libibverbs' manual
// promise, through plain `ibv_*` calls. One unit: GoogleTest, the layer of planted defects, and
// each
// *_cases.cc beside this file.
//
//   verbs-conformance [--device NAME] [--gid INDEX] [--timeout MS]    try a device
//   verbs-conformance --prove [--jobs N]      see that each case fails on a device broken for it
//   verbs-conformance --defect NAME           try a device that is broken so
//   verbs-conformance --list-defects          what can be broken, and which cases must see it
#include <src/gtest-all.cc>

#include "conformance/conformance_ends.h"
#include "conformance/prove.h"

// One #include a file of cases.
#include "conformance.inc"

// Defines some of libibverbs' functions, which verbs.h has macros for: last.
#include "conformance/broken_control.cc"
#include "conformance/broken_work.cc"

namespace conformance {

int usage() {
  std::fputs(
      "usage: verbs-conformance [--device NAME] [--gid INDEX] [--timeout MS] [--defect NAME]\n"
      "       verbs-conformance --prove [--jobs N] | --list-defects\n",
      stderr);
  return 2;
}

struct Wish {
  bool prove = false;
  bool list = false;
  unsigned jobs = 4;
};

/// One option with a value; false if there is no such option, or no such value.
bool set(const std::string& option, const char* value, Wish& wish) {
  if (option == "--device") return settings.device = value, true;
  if (option == "--defect") return plant(value);
  char* end = nullptr;
  const long number = std::strtol(value, &end, 10);
  if (end == value || *end != '\0' || number < 0) return false;
  if (option == "--gid") return settings.gid_index = static_cast<int>(number), true;
  if (option == "--timeout") return settings.timeout = std::chrono::milliseconds(number), true;
  if (option == "--report") return report_to(static_cast<int>(number)), true;
  if (option == "--jobs") return wish.jobs = static_cast<unsigned>(std::max(number, 1L)), true;
  return false;
}

bool parse(int argc, char** argv, Wish& wish) {
  if (const char* name = std::getenv("VERBS_DEVICE"); name != nullptr) settings.device = name;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--prove") {
      wish.prove = true;
    } else if (option == "--list-defects") {
      wish.list = true;
    } else if (i + 1 == argc || !set(option, argv[++i], wish)) {
      return false;
    }
  }
  return true;
}

}  // namespace conformance

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  conformance::Wish wish;
  if (!conformance::parse(argc, argv, wish)) return conformance::usage();
  if (wish.list) return conformance::list_defects();
  if (wish.prove) return conformance::prove(wish.jobs);
  const int result = RUN_ALL_TESTS();
  conformance::print_departures();
  return result;
}
