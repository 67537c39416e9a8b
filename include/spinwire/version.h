#pragma once

#include <string_view>

#include "spinwire/export.h"

// The version of these headers. The build reads its own version from here.
#define SPINWIRE_VERSION_MAJOR 0
#define SPINWIRE_VERSION_MINOR 1
#define SPINWIRE_VERSION_PATCH 0

namespace spinwire {

// The version of the library that is linked, as "major.minor.patch". It differs from the macros
// above when a program runs with another shared library than it was compiled for.
SPINWIRE_API std::string_view version() noexcept;

}  // namespace spinwire
