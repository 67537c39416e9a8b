// Whether devices that are opened meanwhile trust the pages of peers in other processes.
#pragma once

#include <cstdlib>
#include <string>

#include "softverbs/softverbs_device.h"

/// Sets SOFTVERBS_TRUST_PAGES for this process and the children that it starts; "" removes it.
class TrustPages {
 public:
  explicit TrustPages(const char* value) {
    if (const char* const before = std::getenv(kName)) before_ = before;
    set(value);
  }
  TrustPages(const TrustPages&) = delete;
  TrustPages& operator=(const TrustPages&) = delete;
  ~TrustPages() { set(before_.c_str()); }

 private:
  static constexpr const char* kName = spinwire::softverbs::kTrustPagesVariable;
  static void set(const char* value) {
    if (*value == '\0') {
      (void)::unsetenv(kName);
    } else {
      (void)::setenv(kName, value, 1);
    }
  }
  std::string before_;
};
