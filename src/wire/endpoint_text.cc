// An endpoint as a line of text.
#include <arpa/inet.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <utility>

#include "base/error.h"
#include "wire/handshake.h"

namespace spinwire {
namespace {

constexpr std::string_view kName = "spinwire-endpoint-1";  // the number is the format's version
constexpr std::string_view kRaw = "raw";                   // words without a value
constexpr std::string_view kGoodbyeReasons = "goodbye-reasons";
constexpr std::string_view kApplicationFields = "application-fields";
constexpr std::string_view kPrivateData = "private-data";  // not there if empty
// Not there without a proof.
constexpr std::string_view kProofKey = "key";
constexpr std::string_view kProofNonce = "nonce";
constexpr std::string_view kProofAnswers = "answers";  // nor if it answers none
constexpr std::string_view kProofCode = "proof";
constexpr std::string_view kSpace = " \t\r\n";

tl::unexpected<Error> bad_text(std::string found) {
  return base::fail(Status::invalid_argument, "read an endpoint from text", std::move(found),
                    "pass the whole line that Endpoint::text() gave at the other end");
}

constexpr std::array<std::pair<GidType, std::string_view>, 4> kTypes{{
    {GidType::infiniband, "ib"},
    {GidType::roce_v1, "rocev1"},
    {GidType::roce_v2, "rocev2"},
    {GidType::embedded, "softverbs"},
}};

std::string_view type_word(GidType type) noexcept {
  for (const auto& [known, word] : kTypes) {
    if (known == type) return word;
  }
  return "unknown";
}

/// A numeric field: its name, its form, and its accessors.
struct Number {
  std::string_view name;
  bool hex;
  bool of_raw;  ///< used in the endpoint of a raw connection
  std::uint64_t (*get)(const Endpoint&);
  /// Returns false if the field cannot hold the value.
  bool (*set)(Endpoint&, std::uint64_t);
};

template <auto Member>
constexpr Number number(std::string_view name, bool hex, bool of_raw = false) {
  return {name, hex, of_raw,
          [](const Endpoint& e) { return static_cast<std::uint64_t>(e.*Member); },
          [](Endpoint& e, std::uint64_t value) {
            using Field = std::remove_reference_t<decltype(e.*Member)>;
            if (value > std::numeric_limits<Field>::max()) return false;
            e.*Member = static_cast<Field>(value);
            return true;
          }};
}

constexpr std::array kNumbers{
    number<&Endpoint::lid>("lid", false, true),
    number<&Endpoint::qp_num>("qpn", true, true),
    number<&Endpoint::psn>("psn", true, true),
    number<&Endpoint::mtu>("mtu", false, true),
    number<&Endpoint::max_message>("message", false),
    number<&Endpoint::eager_bytes>("eager", false),
    number<&Endpoint::credits>("credits", false),
    number<&Endpoint::incarnation>("incarnation", true),
    number<&Endpoint::credit_cell_address>("cell", true),
    number<&Endpoint::credit_cell_rkey>("cell-key", true),
    number<&Endpoint::credit_cell_token>("cell-token", true),
    number<&Endpoint::peer_timeout_ms>("peer-timeout-ms", false),
    number<&Endpoint::max_rd_atomic>("rd-atomic", false, true),
};
constexpr std::size_t kGidField = kNumbers.size();
constexpr std::size_t kTypeField = kNumbers.size() + 1;
constexpr std::size_t kFields = kNumbers.size() + 2;

std::string_view field_name(std::size_t field) noexcept {
  if (field == kGidField) return "gid";
  return field == kTypeField ? "type" : kNumbers[field].name;
}

bool is_used(const Endpoint& e, std::size_t field) noexcept {
  return !e.raw || field >= kNumbers.size() || kNumbers[field].of_raw;
}

Result<void> set_number(Endpoint& e, const Number& field, std::string_view value) {
  const bool hex = value.starts_with("0x");
  const std::string_view digits = hex ? value.substr(2) : value;
  std::uint64_t read = 0;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), read, hex ? 16 : 10);
  if (error != std::errc{} || end != digits.data() + digits.size())
    return bad_text(base::format("{} is '{}', no number", field.name, value));
  if (!field.set(e, read))
    return bad_text(base::format("{} is {}, more than the field holds", field.name, value));
  return {};
}

Result<void> set_field(Endpoint& e, std::size_t field, std::string_view value) {
  if (field == kGidField) {
    if (::inet_pton(AF_INET6, std::string(value).c_str(), e.gid.data()) != 1)
      return bad_text(base::format("gid is '{}', no GID in the notation of IPv6", value));
    return {};
  }
  if (field == kTypeField) {
    for (const auto& [type, word] : kTypes) {
      if (value == word) {
        e.gid_type = type;
        return {};
      }
    }
    return bad_text(
        base::format("type is '{}', allowed are ib, rocev1, rocev2 and softverbs", value));
  }
  return set_number(e, kNumbers[field], value);
}

/// Reads bytes of two digits each.
Result<void> read_bytes(std::string_view name, std::string_view digits, std::span<std::byte> to) {
  for (std::size_t i = 0; i < to.size(); ++i) {
    const char* const at = digits.data() + 2 * i;
    std::uint8_t byte = 0;
    const auto [end, error] = std::from_chars(at, at + 2, byte, 16);
    if (error != std::errc{} || end != at + 2) {
      return bad_text(base::format("{} has '{}' where hexadecimal digits belong", name,
                                   std::string_view(at, 2)));
    }
    to[i] = std::byte{byte};
  }
  return {};
}

Result<void> set_private_data(Endpoint& e, std::string_view digits) {
  std::array<std::byte, kPrivateDataMax> bytes{};
  const std::size_t count = digits.size() / 2;
  if (digits.size() % 2 != 0 || count == 0 || count > kPrivateDataMax) {
    return bad_text(base::format("{} has {} hexadecimal digits, allowed are 2 to {}, two a byte",
                                 kPrivateData, digits.size(), 2 * kPrivateDataMax));
  }
  const auto given = std::span(bytes).first(count);
  if (auto read = read_bytes(kPrivateData, digits, given); !read) return read;
  (void)e.private_data.assign(given);
  return {};
}

/// A part of the proof.
struct ProofPart {
  std::string_view name;
  std::span<std::uint8_t> bytes;
};
std::array<ProofPart, 4> parts_of(EndpointProof& proof) noexcept {
  return {{{kProofKey, proof.key},
           {kProofNonce, proof.nonce},
           {kProofCode, proof.code},
           {kProofAnswers, proof.answers}}};
}
bool is_zero(std::span<const std::uint8_t> bytes) noexcept {
  return std::all_of(bytes.begin(), bytes.end(), [](std::uint8_t byte) { return byte == 0; });
}

Result<void> set_proof(const ProofPart& part, std::string_view digits) {
  if (!is_zero(part.bytes)) return bad_text(base::format("{} is there twice", part.name));
  if (digits.size() != 2 * part.bytes.size()) {
    return bad_text(base::format("{} has {} hexadecimal digits, there must be {}", part.name,
                                 digits.size(), 2 * part.bytes.size()));
  }
  if (auto read = read_bytes(part.name, digits, std::as_writable_bytes(part.bytes)); !read)
    return read;
  if (is_zero(part.bytes)) return bad_text(base::format("{} is all zeroes", part.name));
  return {};
}

/// Removes and returns the first word of the text; empty at its end.
std::string_view take_word(std::string_view& text) noexcept {
  const std::size_t begin = std::min(text.find_first_not_of(kSpace), text.size());
  text.remove_prefix(begin);
  const std::string_view word = text.substr(0, text.find_first_of(kSpace));
  text.remove_prefix(word.size());
  return word;
}

Result<void> set_word(Endpoint& e, std::array<bool, kFields>& seen, std::string_view word) {
  const std::size_t equals = std::min(word.find('='), word.size());
  const std::string_view name = word.substr(0, equals);
  if (name == kPrivateData && equals != word.size()) {
    if (!e.private_data.empty()) return bad_text(base::format("{} is there twice", name));
    return set_private_data(e, word.substr(equals + 1));
  }
  for (const ProofPart& part : parts_of(e.proof)) {
    if (name == part.name && equals != word.size()) return set_proof(part, word.substr(equals + 1));
  }
  for (std::size_t field = 0; field < kFields; ++field) {
    if (field_name(field) != name || equals == word.size()) continue;
    if (std::exchange(seen[field], true)) return bad_text(base::format("{} is there twice", name));
    return set_field(e, field, word.substr(equals + 1));
  }
  return bad_text(base::format("'{}' is no part of an endpoint", word));
}

Result<Endpoint> parse_words(std::string_view text) {
  constexpr std::size_t kShown = 40;
  const std::string_view first = take_word(text);
  if (first != kName)
    return bad_text(base::format("it begins with '{}', not '{}'", first.substr(0, kShown), kName));
  Endpoint e;
  std::array<bool, kFields> seen{};
  for (std::string_view word = take_word(text); !word.empty(); word = take_word(text)) {
    bool* const flag = word == kRaw                 ? &e.raw
                       : word == kApplicationFields ? &e.application_fields
                       : word == kGoodbyeReasons    ? &e.goodbye_reasons
                                                    : nullptr;
    if (flag != nullptr && !*flag) {
      *flag = true;
      continue;
    }
    if (auto done = set_word(e, seen, word); !done) return tl::unexpected(done.error());
  }
  for (std::size_t field = 0; field < kFields; ++field) {
    const bool used = is_used(e, field);
    if (!seen[field] && used) return bad_text(base::format("{} is missing", field_name(field)));
    if (seen[field] && !used)
      return bad_text(
          base::format("{} is there, but a raw endpoint does not have it", field_name(field)));
  }
  for (const ProofPart& part : parts_of(e.proof)) {
    if (!e.proof.empty() && part.name != kProofAnswers && is_zero(part.bytes))
      return bad_text(base::format("{} is missing", part.name));
  }
  if (auto valid = wire::check(e); !valid) return tl::unexpected(valid.error());
  return e;
}

}  // namespace

std::string Endpoint::text() const {
  std::array<char, INET6_ADDRSTRLEN> address{};
  ::inet_ntop(AF_INET6, gid.data(), address.data(), address.size());
  std::string line = base::format("{} gid={} type={}", kName, address.data(), type_word(gid_type));
  if (raw) line += base::format(" {}", kRaw);
  if (goodbye_reasons) line += base::format(" {}", kGoodbyeReasons);
  if (application_fields) line += base::format(" {}", kApplicationFields);
  for (const Number& field : kNumbers) {
    if (raw && !field.of_raw) continue;
    const std::uint64_t value = field.get(*this);
    line += field.hex ? base::format(" {}={:#x}", field.name, value)
                      : base::format(" {}={}", field.name, value);
  }
  if (!private_data.empty()) line += base::format(" {}=", kPrivateData);
  for (const std::byte b : private_data.bytes())
    line += base::format("{:02x}", std::to_integer<unsigned>(b));
  EndpointProof shown = proof;
  for (const ProofPart& part : parts_of(shown)) {
    if (is_zero(part.bytes)) continue;
    line += base::format(" {}=", part.name);
    for (const std::uint8_t byte : part.bytes) line += base::format("{:02x}", byte);
  }
  return line;
}

Result<Endpoint> Endpoint::parse(std::string_view text) {
  return base::no_throw("read an endpoint from text", [&] { return parse_words(text); });
}

}  // namespace spinwire
