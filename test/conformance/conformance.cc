// verbs-conformance: tests a device against the InfiniBand specification and libibverbs' manual,
// through plain `ibv_*` calls. One unit: GoogleTest, the layer of planted defects, and each
// *_cases.cc beside this file.
//
//   verbs-conformance [--device NAME] [--port N] [--gid INDEX] [--timeout MS]    tests a device
//   verbs-conformance --prove [--jobs N]      proves that each case fails on a broken device
//   verbs-conformance --defect NAME           tests a device with this defect
//   verbs-conformance --list-defects          lists defects and the cases that must detect them
#include <src/gtest-all.cc>

#include "conformance/conformance_ends.h"
#include "conformance/defect_proof.h"

// One #include per file of cases.
#include "conformance.inc"

// Last, because it defines libibverbs' functions, for which verbs.h has macros.
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

/// Sets one option; false if the option or its value is invalid.
bool set(const std::string& option, const char* value, Wish& wish) {
  if (option == "--device") return settings.device = value, true;
  if (option == "--defect") return plant(value);
  char* end = nullptr;
  const long number = std::strtol(value, &end, 10);
  if (end == value || *end != '\0' || number < 0) return false;
  if (option == "--port")
    return settings.port = static_cast<std::uint8_t>(number), number > 0 && number < 256;
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
  auto* const missing = new conformance::Missing;  // GoogleTest's from now on
  testing::UnitTest::GetInstance()->listeners().Append(missing);
  const int result = RUN_ALL_TESTS();
  conformance::print_departures();
  if (missing->count() != 0) std::printf("[  FAILED  ] %u cases were skipped\n", missing->count());
  return missing->count() != 0 ? 1 : result;
}
