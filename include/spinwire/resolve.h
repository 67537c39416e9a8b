// Host names: from "host:port" to the addresses that listen(), connect() and open_session() take.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "spinwire/callback.h"
#include "spinwire/export.h"
#include "spinwire/status.h"

namespace spinwire {

/// Addresses as "a.b.c.d:port" or "[v6]:port", the best first: give the first to connect() or
/// open_session(), and the others as alternatives.
using Addresses = std::vector<std::string>;

/// Resolves "host:port", where the host is a name or an address, in the way of getaddrinfo(3), and
/// waits for the name service: call it before the loop. Set-up; any thread. Errors:
///   invalid_argument  no host, no port from 0 to 65535, or no such host
///   timed_out         the name service does not answer now
///   no_memory         there is no memory
///   system            the name service failed
[[nodiscard]] SPINWIRE_API Result<Addresses> resolve(std::string_view name);

/// Reports the addresses that Engine::resolve() has found, or why there are none.
using ResolveCallback = Callback<void(const Result<Addresses>&)>;

}  // namespace spinwire
