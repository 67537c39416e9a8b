// The application's part in accepting peers: private data, and the callbacks of a listener that
// accept or refuse what peers ask for. Cold.
#pragma once

#include <span>

#include "spinwire/callback.h"
#include "spinwire/engine.h"
#include "spinwire/identity.h"

namespace spinwire::engine {

/// Copies an application's private data. Errors: invalid_argument.
Result<PrivateData> copy_private_data(const char* asked, std::span<const std::byte> bytes);

/// Asks the application whether to accept a peer, and answers the private data to give to it. An
/// empty callback accepts every peer with `ours`. `carries_data`: the peer can be given some.
/// Errors: refused (with the application's code).
Result<PrivateData> ask_to_accept(const Callback<void(PeerRequest&)>& callback,
                                  const PeerIdentity& peer, const PrivateData& ours,
                                  bool carries_data = true);

}  // namespace spinwire::engine
