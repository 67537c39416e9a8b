#include "verbs/providers.h"

namespace spinwire::verbs {

std::span<const Provider* const> providers() noexcept {
  static const Provider* const all[] = {&softverbs_provider(), &rdmacore_provider()};
  return all;
}

}  // namespace spinwire::verbs
