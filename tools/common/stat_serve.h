// The HTTP endpoint of spinwire-stat, for Prometheus on the same host.
#pragma once

#include <functional>
#include <string>

#include "spinwire/status.h"

namespace spinwire::tools {

/// Makes the answer to a request. Its error becomes the body of "500 Internal Server Error".
using MetricsText = std::function<Result<std::string>()>;

/// Answers "GET /metrics" with `text()` until a stop signal. `address` is "127.0.0.1:PORT" or
/// "[::1]:PORT"; port 0 takes a free one. Prints the address once it listens. All users of this
/// host can read the metrics. Requests whose header Host is another than localhost, 127.0.0.1 or
/// [::1] are refused. Clients have a time limit, and a silent one delays no other. Requests within
/// a fifth of a second get the same text. Errors: invalid_argument (not a loopback address),
/// in_use, system.
Result<void> serve_metrics(const std::string& address, const MetricsText& text);

}  // namespace spinwire::tools
