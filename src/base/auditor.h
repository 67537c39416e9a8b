// Audits: checks of a part's counts against its lists and records. Cold.
#pragma once

#include <fmt/core.h>

#include <string>
#include <utility>

#include "base/error.h"

namespace spinwire::base {

/// Keeps the first fault that an audit finds. Later checks are skipped where they depend on ok().
class Auditor {
 public:
  [[nodiscard]] bool ok() const noexcept { return fault_.empty(); }

  /// Checks `condition`, and records a fault, behind the current place. Returns `condition`.
  template <typename... Args>
  bool expect(bool condition, fmt::format_string<Args...> format, const Args&... args) {
    if (!condition && ok()) fault_ = place_ + fmt::vformat(format, fmt::make_format_args(args...));
    return condition;
  }
  /// Names the record that the following checks are about, such as "session 3: "; empty: none.
  void set_place(std::string place) noexcept { place_ = std::move(place); }
  [[nodiscard]] std::string take_fault() noexcept { return std::move(fault_); }

 private:
  std::string place_;
  std::string fault_;
};

/// Runs `audit`, which checks with an Auditor or a class derived from it. Errors: system, with the
/// fault; no_memory.
template <typename Audit>
[[nodiscard]] Result<void> run_audit(const char* asked, Audit&& audit) noexcept {
  return no_throw(asked, [&]() -> Result<void> {
    std::string fault = audit();
    if (fault.empty()) return {};
    return fail(Status::system, asked, std::move(fault),
                "memory was overwritten, or the library has a defect");
  });
}

}  // namespace spinwire::base
