#include "control/endpoint_proof.h"

#include <sodium.h>

#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"

namespace spinwire::control {
namespace {

constexpr std::string_view kEndpointContext = "spinwire endpoint";

static_assert(crypto_auth_hmacsha256_BYTES == std::tuple_size_v<EndpointCode> &&
              crypto_auth_hmacsha256_KEYBYTES == sizeof(NoiseSecret::bytes) &&
              sizeof(EndpointProof::key) == sizeof(KeyId));

/// The code of an endpoint: of the context, the name of the key behind its length, the nonce, the
/// code that the endpoint answers, and its text without the proof, which has each value in one
/// form.
EndpointCode code_of(const Key& key, Endpoint endpoint, const EndpointProof& proof) {
  endpoint.proof = {};
  const std::string text = endpoint.text();
  const std::string_view name = key.name.view();
  const auto length = static_cast<unsigned char>(name.size());
  const auto bytes = [](std::string_view of) {
    return reinterpret_cast<const unsigned char*>(of.data());
  };
  crypto_auth_hmacsha256_state state;
  crypto_auth_hmacsha256_init(&state, key.endpoint.bytes.data(), key.endpoint.bytes.size());
  crypto_auth_hmacsha256_update(&state, bytes(kEndpointContext), kEndpointContext.size());
  crypto_auth_hmacsha256_update(&state, &length, 1);
  crypto_auth_hmacsha256_update(&state, bytes(name), name.size());
  crypto_auth_hmacsha256_update(&state, proof.nonce.data(), proof.nonce.size());
  crypto_auth_hmacsha256_update(&state, proof.answers.data(), proof.answers.size());
  crypto_auth_hmacsha256_update(&state, bytes(text), text.size());
  EndpointCode code;
  crypto_auth_hmacsha256_final(&state, code.data());
  sodium_memzero(&state, sizeof state);
  return code;
}

bool is_same_code(const EndpointCode& a, const EndpointCode& b) noexcept {
  return sodium_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace

void EndpointKeys::prove(Endpoint& endpoint, const EndpointNonce& nonce,
                         const EndpointCode& answers) const {
  const Key& key = keys_.first();
  EndpointProof proof{key.id, nonce, answers, {}};
  proof.code = code_of(key, endpoint, proof);
  endpoint.proof = proof;
}

Result<const Key*> EndpointKeys::check(const Endpoint& peer, const EndpointCode& ours,
                                       bool must_answer) {
  const auto refuse = [&](AuthenticationFailure why, std::string found) {
    counts_.count(why);
    return base::fail(Status::unauthenticated, "join a peer's endpoint", std::move(found),
                      "give both ends the same key with the same name in security.key_file, and "
                      "bring the endpoint of this connection's peer as it is");
  };
  const EndpointProof& proof = peer.proof;
  if (proof.empty())
    return refuse(AuthenticationFailure::no_proof, "the endpoint has no proof of a key");
  const Key* const key = keys_.find(proof.key);
  if (key == nullptr) {
    return refuse(AuthenticationFailure::unknown_key,
                  "its proof is of a key that is not in our key file");
  }
  if (!is_same_code(proof.code, code_of(*key, peer, proof))) {
    return refuse(
        AuthenticationFailure::wrong_proof,
        base::format("its proof of the key '{}' is wrong: the key has another name there, "
                     "or the endpoint was altered or forged",
                     key->name.view()));
  }
  if (is_same_code(proof.code, ours))
    return refuse(AuthenticationFailure::wrong_proof, "it is our own, which has come back");
  const bool answers = !is_same_code(proof.answers, {});
  if (answers ? !is_same_code(proof.answers, ours) || is_same_code(ours, {}) : must_answer) {
    return refuse(AuthenticationFailure::unconfirmed_proof,
                  answers ? "it answers another endpoint than ours"
                          : "it does not answer our endpoint, so it may be an old one");
  }
  ++counts_.authenticated;
  return key;
}

}  // namespace spinwire::control
