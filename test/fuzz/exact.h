// For decoders whose every byte is a field, or is checked to be zero.
#pragma once

#include "fuzz/fuzz.h"

namespace fuzz {

/// What decodes as a T has exactly the bytes that it encodes to.
template <typename T>
void run_exact(std::span<const std::byte> bytes) {
  T value;
  if (!decode(bytes, value)) return;
  expect(same(encode(value), bytes), "the bytes of what was decoded");
}

}  // namespace fuzz
