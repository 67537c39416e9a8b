// The HTTP endpoint of spinwire-stat, for Prometheus on the same host.
#pragma once

#include <functional>
#include <string>

#include "spinwire/status.h"

namespace spinwire::tools {

/// Answers "GET /metrics" with `text()` until a stop signal. `address` is "127.0.0.1:PORT" or
/// "[::1]:PORT"; port 0 takes a free one. Prints the address once it listens. One request at a
/// time, with time limits, so that a slow client only delays others. Errors: invalid_argument (not
/// a loopback address), in_use, system.
Result<void> serve_metrics(const std::string& address, const std::function<std::string()>& text);

}  // namespace spinwire::tools
