#pragma once

// The library is built with hidden symbols. SPINWIRE_API marks what is part of its binary
// interface: put it on the classes and functions that users call, and on nothing else.
#define SPINWIRE_API __attribute__((visibility("default")))

namespace spinwire::detail {
/// The library's access to private members; see src/base/internals.h.
struct Internals;
}  // namespace spinwire::detail
