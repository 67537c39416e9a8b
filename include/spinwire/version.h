// The version of the headers, and that of the linked library. The build reads its own version here.
#pragma once

#include <string_view>

#include "spinwire/export.h"

/// Major version of these headers. Libraries of one major version have the same soname.
#define SPINWIRE_VERSION_MAJOR 0
/// Minor version of these headers.
#define SPINWIRE_VERSION_MINOR 1
/// Patch level of these headers.
#define SPINWIRE_VERSION_PATCH 0

namespace spinwire {

/// The version of the library that is linked, as "major.minor.patch". It differs from the macros
/// above when a program runs with another shared library than it was compiled for. Any thread;
/// never allocates.
SPINWIRE_API std::string_view version() noexcept;

}  // namespace spinwire
