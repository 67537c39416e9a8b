// The keys of an engine: those that its peers may prove, read from a key file. Cold.
//
// A key file has one key a line, "NAME HEX": a name of up to 32 letters, digits, '.', '_' and '-',
// and 32 bytes in hexadecimal. Empty lines, and text behind '#', are skipped. Only the file's
// owner, this user or root, may have access to it. The first key is the one by which this end
// proves itself when it connects; every key is accepted from a peer. So keys can be replaced one
// engine after the other. A handshake takes from a key what it needs when it makes or reads the
// proof, and no secret of the key outlives its ring.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "control/key_name.h"
#include "control/noise.h"
#include "spinwire/status.h"
#include "wire/handshake.h"

namespace spinwire::control {

/// The remedy of an Error for a peer that has not proved a key.
inline constexpr const char* kSameKeyRemedy =
    "give both ends the same key with the same name in security.key_file, and reload or restart "
    "the end whose file has changed";

using KeyId = std::array<std::uint8_t, wire::kKeyIdBytes>;

struct Key {
  KeyName name;
  NoisePsk psk;          ///< derived from the secret of the file
  NoiseSecret endpoint;  ///< as well; for the proofs of out-of-band endpoints
  /// Derived from the secret, too, and not secret itself. Tells a server which key a client has; to
  /// others it says no more than that two connections use one key.
  KeyId id{};
};

class KeyRing {
 public:
  static constexpr std::size_t kKeysMax = 16;

  /// Empty: no key.
  KeyRing() noexcept = default;

  /// Reads a key file. Errors: bad_config (the file, its owner or rights, or the line, and what is
  /// wrong), no_memory, system (no random numbers for handshakes).
  static Result<KeyRing> load(const std::string& path);
  /// Reads the text of a key file; `origin` names it in errors. Errors: bad_config, system.
  static Result<KeyRing> parse(std::string_view text, std::string_view origin);

  [[nodiscard]] bool empty() const noexcept { return keys_.empty(); }
  [[nodiscard]] std::size_t size() const noexcept { return keys_.size(); }
  /// The key by which this end proves itself. There must be one.
  [[nodiscard]] const Key& first() const noexcept { return keys_.front(); }
  [[nodiscard]] const std::vector<Key>& all() const noexcept { return keys_; }
  /// "new, old": the names in the order of the file. May throw std::bad_alloc.
  [[nodiscard]] std::string names() const;
  /// Null: no such key.
  [[nodiscard]] const Key* find(const KeyId& id) const noexcept;

 private:
  std::vector<Key> keys_;
};

}  // namespace spinwire::control
