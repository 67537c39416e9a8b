// Protection domains of single connections. Set-up.
#include <errno.h>

#include <algorithm>

#include "base/error.h"
#include "verbs/opened_device.h"

namespace spinwire::verbs {

Result<void> Device::make_domain(Domain& domain) {
  retired_domains_.reserve(domains_ + 1);
  domain.pd = provider().alloc_pd(context());
  if (domain.pd != nullptr) {
    ++domains_;
    return {};
  }
  const int error = errno;
  const bool full = error == ENOMEM || error == ENOSPC || error == EMFILE || error == EAGAIN;
  return base::fail(
      full ? Status::limit : Status::system,
      "make a protection domain for a connection (own_domain)",
      base::format("ibv_alloc_pd: {}; connections of this engine have {}, device {} has {} for all "
                   "programs",
                   base::errno_text(error), domains_, info_.name, max_domains_),
      "close others first, or let the connection share the engine's domain");
}

ibv_mr* Device::register_slab(Domain& domain, std::span<std::byte> slab) noexcept {
  domain.slab = provider().reg_mr(domain.pd, slab.data(), slab.size(), IBV_ACCESS_LOCAL_WRITE);
  return domain.slab;
}

bool Device::end_domain(Domain& domain) noexcept {
  if (domain.slab != nullptr) {
    if (provider().dereg_mr(domain.slab) != 0) return false;
    domain.slab = nullptr;
    return true;
  }
  if (provider().dealloc_pd(domain.pd) != 0) return false;
  domain.pd = nullptr;
  --domains_;
  return true;
}

void Device::retire_domain(const Domain& domain) noexcept {
  retired_domains_.push_back(
      domain);  // NOLINT(bugprone-exception-escape): reserved when it was made
}

bool Device::poll_retired_domains() noexcept {
  destroy_left();  // a domain's queue pair goes before it
  if (retired_domains_.empty()) return false;
  Domain& first = retired_domains_.front();
  if (!end_domain(first) || first.pd != nullptr) {
    std::rotate(retired_domains_.begin(), retired_domains_.begin() + 1, retired_domains_.end());
  } else {
    retired_domains_.erase(retired_domains_.begin());
  }
  return true;
}

}  // namespace spinwire::verbs
