#include "control/neighbours.h"

#include <linux/neighbour.h>
#include <linux/rtnetlink.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <span>

#include "base/error.h"
#include "base/unique_fd.h"
#include "control/address.h"

namespace spinwire::control {
namespace {

using Hop = std::array<std::uint8_t, 16>;

constexpr const char* kNextHopAsked = "find out whether a peer's RDMA address is known";

bool is_mapped_v4(const Hop& address) noexcept {
  constexpr Hop kPrefix = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::equal(kPrefix.begin(), kPrefix.begin() + 12, address.begin());
}
std::span<const std::uint8_t> raw_bytes(const Hop& address) noexcept {
  return is_mapped_v4(address) ? std::span(address).subspan(12) : std::span(address);
}

/// A message to the kernel: a header, a body of type Body, and attributes.
template <typename Body>
class NetlinkRequest {
 public:
  NetlinkRequest(std::uint16_t type, const Body& body) noexcept {
    header_.nlmsg_type = type;
    header_.nlmsg_flags = NLM_F_REQUEST;
    std::memcpy(bytes_.data() + NLMSG_HDRLEN, &body, sizeof body);
  }
  void add(std::uint16_t type, std::span<const std::uint8_t> value) noexcept {
    const auto length = static_cast<std::uint16_t>(RTA_LENGTH(value.size()));
    const rtattr attribute{length, type};
    std::memcpy(bytes_.data() + size_, &attribute, sizeof attribute);
    std::memcpy(bytes_.data() + size_ + RTA_LENGTH(0), value.data(), value.size());
    size_ += RTA_ALIGN(length);
  }
  void add(std::uint16_t type, std::uint32_t value) noexcept {
    std::array<std::uint8_t, sizeof value> raw{};
    std::memcpy(raw.data(), &value, sizeof value);
    add(type, raw);
  }
  std::span<const std::byte> bytes() noexcept {
    header_.nlmsg_len = static_cast<std::uint32_t>(size_);
    std::memcpy(bytes_.data(), &header_, sizeof header_);
    return std::span(bytes_).first(size_);
  }

 private:
  nlmsghdr header_{};
  std::size_t size_ = NLMSG_SPACE(sizeof(Body));
  std::array<std::byte, 128> bytes_{};
};

/// The kernel's answer: a body of type Body, and attributes.
template <typename Body>
class NetlinkAnswer {
 public:
  /// Sends the request. Returns 0, or an errno value: the kernel's or that of the system call.
  int ask(int fd, NetlinkRequest<Body>& request) noexcept {
    const auto bytes = request.bytes();
    if (::send(fd, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
      return errno;
    const ssize_t got = ::recv(fd, bytes_.data(), bytes_.size(), MSG_DONTWAIT);
    if (got < 0) return errno;
    nlmsghdr header{};
    const auto size = static_cast<std::size_t>(got);
    if (size < sizeof header) return EPROTO;
    std::memcpy(&header, bytes_.data(), sizeof header);
    end_ = std::min<std::size_t>(header.nlmsg_len, size);
    if (header.nlmsg_type == NLMSG_ERROR) return error();
    if (end_ < NLMSG_SPACE(sizeof(Body))) return EPROTO;
    std::memcpy(&body, bytes_.data() + NLMSG_HDRLEN, sizeof body);
    return 0;
  }
  /// The value of an attribute; empty: there is none.
  [[nodiscard]] std::span<const std::byte> find(std::uint16_t type) const noexcept {
    rtattr attribute{};
    for (std::size_t at = NLMSG_SPACE(sizeof(Body)); at + sizeof attribute <= end_;
         at += RTA_ALIGN(attribute.rta_len)) {
      std::memcpy(&attribute, bytes_.data() + at, sizeof attribute);
      if (attribute.rta_len < RTA_LENGTH(0) || attribute.rta_len > end_ - at) return {};
      if (attribute.rta_type == type)
        return std::span(bytes_).subspan(at + RTA_LENGTH(0), attribute.rta_len - RTA_LENGTH(0));
    }
    return {};
  }

  Body body{};

 private:
  [[nodiscard]] int error() const noexcept {
    nlmsgerr report{};
    if (end_ < NLMSG_HDRLEN + sizeof report) return EPROTO;
    std::memcpy(&report, bytes_.data() + NLMSG_HDRLEN, sizeof report);
    return report.error < 0 ? -report.error : EPROTO;
  }

  std::array<std::byte, 2048> bytes_{};
  std::size_t end_ = 0;
};

/// Where packets leave to.
struct NextHop {
  bool is_ours = false;  ///< they stay on this host
  std::uint32_t interface = 0;
  Hop address{};
};

/// A gateway as an attribute has it, of either family.
void set_gateway(NextHop& hop, std::span<const std::byte> raw) noexcept {
  if (raw.size() != 4 && raw.size() != hop.address.size()) return;
  hop.address = raw.size() == 4 ? Hop{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff} : Hop{};
  std::memcpy(hop.address.data() + hop.address.size() - raw.size(), raw.data(), raw.size());
}

/// Returns 0, or an errno value.
int find_next_hop(int fd, const Hop& to, std::uint32_t interface, NextHop& hop) noexcept {
  rtmsg body{};
  body.rtm_family = is_mapped_v4(to) ? AF_INET : AF_INET6;
  body.rtm_dst_len = static_cast<unsigned char>(8 * raw_bytes(to).size());
  NetlinkRequest<rtmsg> request(RTM_GETROUTE, body);
  request.add(RTA_DST, raw_bytes(to));
  if (interface != 0) request.add(RTA_OIF, interface);
  NetlinkAnswer<rtmsg> route;
  if (const int error = route.ask(fd, request); error != 0) return error;
  hop.is_ours = route.body.rtm_type == RTN_LOCAL;
  hop.address = to;
  if (const auto oif = route.find(RTA_OIF); oif.size() == sizeof hop.interface)
    std::memcpy(&hop.interface, oif.data(), sizeof hop.interface);
  set_gateway(hop, route.find(RTA_GATEWAY));
  constexpr std::size_t kViaFamily = 2;  // struct rtvia
  if (const auto via = route.find(RTA_VIA); via.size() > kViaFamily)
    set_gateway(hop, via.subspan(kViaFamily));
  return 0;
}

}  // namespace

Result<bool> is_next_hop_known(const std::array<std::uint8_t, 16>& to, std::uint32_t interface) {
  constexpr const char* kRemedy = "load the kernel's rdma_ucm, which resolves addresses";
  const base::UniqueFd fd(::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE));
  if (!fd) {
    const Status why = errno == EMFILE || errno == ENFILE ? Status::limit : Status::system;
    return base::fail_errno(why, kNextHopAsked, "socket", errno, kRemedy);
  }
  NextHop hop;
  if (const int error = find_next_hop(fd.get(), to, interface, hop); error != 0)
    return base::fail_errno(Status::peer_lost, kNextHopAsked, "RTM_GETROUTE", error, kRemedy);
  if (hop.is_ours) return true;
  ndmsg body{};
  body.ndm_family = is_mapped_v4(hop.address) ? AF_INET : AF_INET6;
  body.ndm_ifindex = static_cast<int>(hop.interface);
  NetlinkRequest<ndmsg> request(RTM_GETNEIGH, body);
  request.add(NDA_DST, raw_bytes(hop.address));
  NetlinkAnswer<ndmsg> neighbour;
  const int error = neighbour.ask(fd.get(), request);
  if (error == ENOENT) return false;
  if (error != 0)
    return base::fail_errno(Status::system, kNextHopAsked, "RTM_GETNEIGH", error, kRemedy);
  constexpr int kUsable =
      NUD_PERMANENT | NUD_NOARP | NUD_REACHABLE | NUD_PROBE | NUD_STALE | NUD_DELAY;
  return (neighbour.body.ndm_state & kUsable) != 0;
}

void ask_for_next_hop(const std::array<std::uint8_t, 16>& to,
                      const std::array<std::uint8_t, 16>& from, std::uint32_t interface) noexcept {
  constexpr std::uint16_t kDiscard = 9;
  const Address source = Address::from_v6(from, interface);
  const base::UniqueFd fd(
      ::socket(source.family(), SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_UDP));
  if (!fd || ::bind(fd.get(), source.data(), source.size()) != 0) return;
  const Address there = Address::from_v6(to, interface);
  sockaddr_storage where{};
  std::memcpy(&where, there.data(), there.size());
  const std::uint16_t port = htons(kDiscard);
  std::memcpy(reinterpret_cast<std::byte*>(&where) + offsetof(sockaddr_in, sin_port), &port,
              sizeof port);
  (void)::sendto(fd.get(), "", 0, 0, reinterpret_cast<const sockaddr*>(&where), there.size());
}

}  // namespace spinwire::control
