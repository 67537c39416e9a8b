#include "base/check.h"

#include "base/log_message.h"

namespace spinwire::base {

void check_failed(const char* condition, const char* why, const char* file, int line) noexcept {
  log(LogLevel::error, "{}:{}: broken invariant ({}): {}", file, line, condition, why);
  __builtin_trap();
}

}  // namespace spinwire::base
