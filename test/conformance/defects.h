// The defects that can be planted in a device, and the cases that must detect them. A case that no
// defect makes fail proves nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string_view>

namespace conformance {

struct Defect {
  std::string_view name;
  std::string_view breaks;
  std::string_view seen_by;  ///< patterns as in --gtest_filter; every matching case must fail
};

inline constexpr Defect kDefects[] = {
#include "conformance/defects.inc"
};

inline constexpr std::size_t kNone = std::size(kDefects);
inline std::size_t planted = kNone;

/// The name of a defect, checked at compile time.
class Name {
 public:
  consteval Name(const char* name) : index_(find(name)) {  // NOLINT(google-explicit-constructor)
    if (index_ == kNone) throw "no such defect";
  }
  [[nodiscard]] constexpr std::size_t index() const { return index_; }
  static constexpr std::size_t find(std::string_view name) {
    std::size_t i = 0;
    while (i < kNone && kDefects[i].name != name) ++i;
    return i;
  }

 private:
  std::size_t index_;
};

/// Whether this defect is planted.
inline bool broken(Name name) { return planted == name.index(); }

inline bool plant(std::string_view name) {
  planted = Name::find(name);
  return planted != kNone;
}

}  // namespace conformance
