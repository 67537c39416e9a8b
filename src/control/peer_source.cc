#include "control/peer_source.h"

#include <unistd.h>

#include <algorithm>

#include "base/error.h"
#include "verbs/providers.h"

namespace spinwire::control {
namespace {

/// The prefix of GIDs of softverbs, with a kind that no GID has. The process id follows.
constexpr std::array<std::uint8_t, 4> kProcessPrefix = {0xfd, 0x53, 0x57, 0};
constexpr std::size_t kProcessAt = kProcessPrefix.size();
constexpr Source kThisHost = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1};

/// The process that a source stands for; 0: none.
std::uint32_t process_in(const Address& source) noexcept {
  const Source bytes = source.as_v6();
  std::uint32_t process = 0;
  if (source.port() != 0 ||
      !std::equal(kProcessPrefix.begin(), kProcessPrefix.end(), bytes.begin()))
    return 0;
  for (std::size_t i = 0; i < sizeof process; ++i) process = process << 8 | bytes[kProcessAt + i];
  return process;
}

}  // namespace

Address source_of(const Address& peer, const Source& gid, GidType type) noexcept {
  if (!peer.is_loopback() || type != GidType::embedded) return peer;
  const std::uint32_t process = verbs::process_of_embedded(gid);
  if (process == 0 || process == static_cast<std::uint32_t>(::getpid())) return peer;
  Source source{};
  std::copy(kProcessPrefix.begin(), kProcessPrefix.end(), source.begin());
  for (std::size_t i = 0; i < sizeof process; ++i)
    source[kProcessAt + i] = static_cast<std::uint8_t>(process >> (24 - 8 * i));
  return Address::from_v6(source, 0);
}

Source event_source(const Address& source) noexcept {
  const Address host = Address::from_v6(source.as_v6(), 0);  // ::ffff:a.b.c.d becomes a.b.c.d
  // A connection to the unspecified address reaches this host.
  if (host.is_loopback() || host.is_any()) return kThisHost;
  const Source found = host.source();
  return found != Source{} ? found : host.as_v6();  // no peer is the engine itself
}

Source event_source(const Source& gid, GidType type) noexcept {
  // An embedded GID names no host, because all of its kind are of this one.
  if (type == GidType::embedded)
    return event_source(source_of(Address::from_v6(kThisHost, 0), gid, type));
  // Other GIDs are no IP addresses: all hosts of a subnet of InfiniBand share the upper half.
  if (type != GidType::roce_v1 && type != GidType::roce_v2) return gid;
  return event_source(Address::from_v6(gid, 0));
}

std::string source_text(const Address& source) {
  const std::uint32_t process = process_in(source);
  return process != 0 ? base::format("process {} of this host", process) : source.str();
}

}  // namespace spinwire::control
