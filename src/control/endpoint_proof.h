// Proofs of the endpoints that applications exchange out-of-band: an HMAC-SHA-256, by a key of the
// key file that serves for nothing else, of all that the endpoint says. Cold.
//
// An endpoint says by its proof that a holder of the key made it, and for the key of that name. It
// does not say when: an endpoint may be recorded and brought again. So an endpoint that is taken
// after the peer's was joined names the code of the peer's, which it answers. The peer's has a
// nonce that was drawn for this connection, so the answer is not older than the connection.
//
//   first end                                   second end
//   endpoint()            -- A, code a -->      join(A): a holder of the key made A, some time
//   join(B): B is new     <-- B, answers a --   endpoint()
#pragma once

#include "control/key_ring.h"
#include "control/secure_channel.h"
#include "spinwire/endpoint.h"
#include "spinwire/status.h"

namespace spinwire::control {

using EndpointNonce = decltype(EndpointProof::nonce);
using EndpointCode = decltype(EndpointProof::code);

class EndpointKeys {
 public:
  /// `keys` and `counts` must outlive it. There is a key when the functions are called.
  EndpointKeys(const KeyRing& keys, AuthenticationCounts& counts) noexcept
      : keys_(keys), counts_(counts) {}

  /// Gives the endpoint a proof by the first key. `answers`: the code of the peer's endpoint;
  /// zeroes: none. May throw std::bad_alloc.
  void prove(Endpoint& endpoint, const EndpointNonce& nonce, const EndpointCode& answers) const;
  /// Checks the proof of a peer's endpoint, and counts the outcome. `ours`: the code that our own
  /// endpoint has if it answers none; zeroes: ours does not exist yet. `must_answer`: the peer's
  /// must answer ours. Answers the key. May throw std::bad_alloc. Errors: unauthenticated.
  Result<const Key*> check(const Endpoint& peer, const EndpointCode& ours, bool must_answer);

 private:
  const KeyRing& keys_;
  AuthenticationCounts& counts_;
};

}  // namespace spinwire::control
