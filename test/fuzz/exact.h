// For formats in which every byte is a field or checked to be zero.
#pragma once

#include "fuzz/fuzz.h"

namespace fuzz {

/// Bytes that decode as a T are exactly the bytes that the T encodes to.
template <typename T>
void run_exact(std::span<const std::byte> bytes) {
  T value;
  if (!decode(bytes, value)) return;
  expect(same(encode(value), bytes), "the bytes of what was decoded");
}

}  // namespace fuzz
