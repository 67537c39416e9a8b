#include "base/format_into.h"

#include <algorithm>

namespace spinwire::base::detail {

std::size_t format_into(std::span<char> to, fmt::string_view how, fmt::format_args args) noexcept {
  return std::min(fmt::vformat_to_n(to.data(), to.size(), how, args).size, to.size());
}

}  // namespace spinwire::base::detail
