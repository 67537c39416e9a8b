#include "control/address.h"

#include <arpa/inet.h>
#include <net/if.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/printable.h"

namespace spinwire::control {
namespace {

constexpr std::size_t kShownMax = 80;
constexpr std::string_view kForms = "write \"a.b.c.d:port\" or \"[v6]:port\"";

tl::unexpected<Error> bad(std::string_view text, std::string found, std::string_view remedy) {
  std::string shown(text.substr(0, kShownMax));
  std::transform(shown.begin(), shown.end(), shown.begin(), base::shown);
  return base::fail(
      Status::invalid_argument,
      base::format("parse the address \"{}{}\"", shown, text.size() > kShownMax ? "..." : ""),
      std::move(found), std::string(remedy));
}

bool consists_of(std::string_view text, std::string_view allowed) noexcept {
  return !text.empty() && text.find_first_not_of(allowed) == std::string_view::npos;
}

template <typename T>
std::optional<T> to_number(std::string_view digits) noexcept {
  T value{};
  const char* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, value);
  if (digits.empty() || error != std::errc() || stop != end) return std::nullopt;
  return value;
}

// inet_pton needs a terminated string; no valid address is longer than the buffer.
bool to_binary(int family, std::string_view text, void* out) noexcept {
  std::array<char, INET6_ADDRSTRLEN> copy{};
  if (text.size() >= copy.size()) return false;
  std::copy(text.begin(), text.end(), copy.begin());
  return inet_pton(family, copy.data(), out) == 1;
}

// An interface's number, or its name.
std::optional<std::uint32_t> to_scope(std::string_view text) noexcept {
  if (auto number = to_number<std::uint32_t>(text)) return number;
  std::array<char, IF_NAMESIZE> name{};
  if (text.empty() || text.size() >= name.size()) return std::nullopt;
  if (text.find('\0') != std::string_view::npos) return std::nullopt;
  std::copy(text.begin(), text.end(), name.begin());
  const unsigned index = if_nametoindex(name.data());
  return index != 0 ? std::optional<std::uint32_t>(index) : std::nullopt;
}

struct Split {
  std::string_view host;
  std::string_view port;
  bool v6 = false;
};

Result<Split> split(std::string_view text) {
  if (text.empty()) return bad(text, "it is empty", kForms);
  if (text.front() == '[') {
    const std::size_t close = text.find(']');
    if (close == std::string_view::npos) return bad(text, "'[' has no ']'", kForms);
    const std::string_view rest = text.substr(close + 1);
    if (rest.empty() || rest.front() != ':') return bad(text, "no ':port' follows ']'", kForms);
    return Split{text.substr(1, close - 1), rest.substr(1), true};
  }
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return bad(text, "it has no port", kForms);
  if (text.find(':') != colon) {
    return bad(text, "it has several colons", "write an IPv6 address in brackets: \"[v6]:port\"");
  }
  return Split{text.substr(0, colon), text.substr(colon + 1), false};
}

bool parse_v6(std::string_view host, sockaddr_in6& out) noexcept {
  const std::size_t percent = host.find('%');
  if (percent != std::string_view::npos) {
    const auto scope = to_scope(host.substr(percent + 1));
    if (!scope) return false;
    out.sin6_scope_id = *scope;
    host = host.substr(0, percent);
  }
  return consists_of(host, "0123456789abcdefABCDEF:.") && to_binary(AF_INET6, host, &out.sin6_addr);
}

}  // namespace

Address::Address() noexcept {
  std::memset(&storage_, 0, sizeof(storage_));
  storage_.v4.sin_family = AF_INET;
}

Result<Address> Address::parse(std::string_view text) {
  const auto parts = split(text);
  if (!parts) return tl::make_unexpected(parts.error());
  if (!consists_of(parts->port, "0123456789")) {
    return bad(text, "the port is not a number", kForms);
  }
  const auto port = to_number<std::uint16_t>(parts->port);
  if (!port) return bad(text, "the port is above 65535", "ports are 0 to 65535");

  Address address;
  if (parts->v6) {
    sockaddr_in6& v6 = address.storage_.v6;
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(*port);
    if (!parse_v6(parts->host, v6)) {
      return bad(text, "what the brackets hold is no IPv6 address, or its scope no interface",
                 "as in \"[::1]:7471\" or \"[fe80::1%eth0]:7471\"; `ip address` lists interfaces");
    }
    return address;
  }
  address.storage_.v4.sin_port = htons(*port);
  if (!consists_of(parts->host, "0123456789.")) {
    return bad(
        text, parts->host.empty() ? "it has no host" : "the host is a name, not an address",
        "names are not accepted here, since looking one up blocks: resolve it first and pass "
        "the numeric address");
  }
  if (!to_binary(AF_INET, parts->host, &address.storage_.v4.sin_addr)) {
    return bad(text, "the host is no IPv4 address",
               "it has four decimal numbers of 0 to 255 without leading zeros, as in 127.0.0.1");
  }
  return address;
}

Result<Address> Address::from(const sockaddr* address, socklen_t size) {
  constexpr const char* asked = "read a socket address";
  if (size < sizeof(sa_family_t)) {
    return base::fail(Status::invalid_argument, asked, base::format("{} bytes", size),
                      "pass a whole sockaddr");
  }
  const int family = address->sa_family;
  if (family != AF_INET && family != AF_INET6) {
    return base::fail(Status::unsupported, asked, base::format("address family {}", family),
                      "use an IPv4 or IPv6 socket");
  }
  const socklen_t need = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  if (size < need) {
    return base::fail(Status::invalid_argument, asked, base::format("{} bytes of {}", size, need),
                      "pass a whole sockaddr");
  }
  Address result;
  std::memcpy(&result.storage_, address, need);
  return result;
}

socklen_t Address::size() const noexcept {
  return family() == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
}

std::uint16_t Address::port() const noexcept {
  return ntohs(family() == AF_INET ? storage_.v4.sin_port : storage_.v6.sin6_port);
}

bool Address::is_any() const noexcept {
  if (family() == AF_INET) return storage_.v4.sin_addr.s_addr == htonl(INADDR_ANY);
  return IN6_IS_ADDR_UNSPECIFIED(&storage_.v6.sin6_addr) != 0;
}

std::array<std::uint8_t, 16> Address::as_v6() const noexcept {
  std::array<std::uint8_t, 16> bytes{};
  if (family() == AF_INET) {
    bytes[10] = bytes[11] = 0xff;
    std::memcpy(bytes.data() + 12, &storage_.v4.sin_addr, 4);
  } else {
    std::memcpy(bytes.data(), &storage_.v6.sin6_addr, 16);
  }
  return bytes;
}

Address Address::from_v6(const std::array<std::uint8_t, 16>& bytes, std::uint32_t scope) noexcept {
  Address result;
  in6_addr v6;
  std::memcpy(&v6, bytes.data(), sizeof v6);
  if (IN6_IS_ADDR_V4MAPPED(&v6) != 0) {
    std::memcpy(&result.storage_.v4.sin_addr, bytes.data() + 12, 4);
    return result;
  }
  result.storage_.v6.sin6_family = AF_INET6;
  result.storage_.v6.sin6_addr = v6;
  if (IN6_IS_ADDR_LINKLOCAL(&v6) != 0) result.storage_.v6.sin6_scope_id = scope;
  return result;
}

bool Address::is_loopback() const noexcept {
  if (family() == AF_INET) return ntohl(storage_.v4.sin_addr.s_addr) >> 24 == 127;
  return IN6_IS_ADDR_LOOPBACK(&storage_.v6.sin6_addr) != 0;
}

Source Address::source() const noexcept {
  Source source = as_v6();
  if (family() == AF_INET6 && !IN6_IS_ADDR_LINKLOCAL(&storage_.v6.sin6_addr))
    std::fill(source.begin() + 8, source.end(), std::uint8_t{0});
  return source;
}

AddressText Address::text() const noexcept {
  AddressText out;
  char* const begin = out.text.data();
  char* const limit = begin + out.text.size();
  char* end = begin;
  const bool v6 = family() == AF_INET6;
  if (v6) *end++ = '[';
  const void* binary = v6 ? static_cast<const void*>(&storage_.v6.sin6_addr)
                          : static_cast<const void*>(&storage_.v4.sin_addr);
  // Neither call can fail: the family is known and the buffer holds the longest text.
  inet_ntop(family(), binary, end, static_cast<socklen_t>(limit - end));
  end += std::strlen(end);
  if (v6) {
    if (storage_.v6.sin6_scope_id != 0) {
      *end++ = '%';
      end = std::to_chars(end, limit, storage_.v6.sin6_scope_id).ptr;
    }
    *end++ = ']';
  }
  *end++ = ':';
  end = std::to_chars(end, limit, port()).ptr;
  out.length = static_cast<std::uint8_t>(end - begin);
  return out;
}

bool operator==(const Address& a, const Address& b) noexcept {
  if (a.family() != b.family() || a.port() != b.port() || a.as_v6() != b.as_v6()) return false;
  return a.family() == AF_INET || a.storage_.v6.sin6_scope_id == b.storage_.v6.sin6_scope_id;
}

}  // namespace spinwire::control
