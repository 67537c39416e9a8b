// Reading the file of an engine that goes on writing. Tests give another source of its bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "spinwire/observe.h"

namespace spinwire::observe {

/// Copies the bytes of a file from `offset` on; returns how many, fewer only at the file's end.
using ReadBytes = std::function<Result<std::size_t>(std::span<std::byte>, std::uint64_t offset)>;

/// Copies a file of `size` bytes twice, and then each row that its engine was writing by itself,
/// until the row was whole once, or many times. So the time does not follow the length of the file
/// where few rows change. A row whose subject has gone meanwhile is left out.
/// Errors: invalid_argument, unsupported, those of `read`.
Result<EngineReading> read_rows(std::uint64_t size, const ReadBytes& read);

}  // namespace spinwire::observe
