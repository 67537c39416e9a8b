// softroce-clock-ahead ADDRESS: sets our clock to that of a host, and prints by how many
// milliseconds it had been ahead. Asks the host's kernel by ICMP timestamps (RFC 792), so the two
// machines of a test agree by another way than spinwire-doctor's.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/ip_icmp.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <optional>

#include "base/unique_fd.h"

namespace {

using Steady = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::int64_t kDayNs = std::int64_t{86'400} * 1'000'000'000;
/// Half of a round trip is the uncertainty; a clock of milliseconds adds one. The second is for a
/// machine that has not had a short one for a while.
constexpr milliseconds kLongestRoundTrip{6}, kLongestAtLast{14};
constexpr milliseconds kWhile{15'000};
constexpr milliseconds kLimit{60'000};

struct Packet {
  icmphdr head{};
  std::array<std::uint32_t, 3> times{};  ///< sent, received, answered: ms of the day, big-endian
};
static_assert(sizeof(Packet) == 20);

std::uint16_t checksum(const Packet& packet) {
  std::array<std::uint16_t, sizeof packet / 2> words{};
  std::memcpy(words.data(), &packet, sizeof packet);
  std::uint32_t sum = std::accumulate(words.begin(), words.end(), 0u);
  while (sum >> 16 != 0) sum = (sum & 0xffff) + (sum >> 16);
  return static_cast<std::uint16_t>(~sum);
}

std::int64_t realtime_ns() {
  timespec now{};
  (void)::clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

/// By how many nanoseconds the host's clock is ahead; nothing: it did not answer, or too slowly.
std::optional<std::int64_t> ask(int fd, std::uint16_t number, milliseconds longest) {
  Packet asked;
  asked.head.type = ICMP_TIMESTAMP;
  asked.head.un.echo.id = static_cast<std::uint16_t>(::getpid());
  asked.head.un.echo.sequence = number;
  asked.head.checksum = checksum(asked);
  const std::int64_t sent = realtime_ns();
  const Steady::time_point begin = Steady::now();
  if (::send(fd, &asked, sizeof asked, 0) != sizeof asked) return std::nullopt;
  for (;;) {
    std::array<std::byte, 128> bytes{};
    const ssize_t got = ::recv(fd, bytes.data(), bytes.size(), 0);
    const auto took = Steady::now() - begin;
    if (got < 0 || took > longest) return std::nullopt;
    const std::size_t ip_bytes = (static_cast<std::size_t>(bytes[0]) & 15) * 4;
    Packet answer;
    if (static_cast<std::size_t>(got) < ip_bytes + sizeof answer) continue;
    std::memcpy(&answer, bytes.data() + ip_bytes, sizeof answer);
    if (answer.head.type != ICMP_TIMESTAMPREPLY ||
        answer.head.un.echo.id != asked.head.un.echo.id || answer.head.un.echo.sequence != number)
      continue;
    // The middle of the host's millisecond, against the middle of the round trip.
    const std::int64_t theirs = ntohl(answer.times[1]) * std::int64_t{1'000'000} + 500'000;
    const std::int64_t ours = sent + std::chrono::nanoseconds(took).count() / 2;
    const std::int64_t ahead = (theirs - ours % kDayNs + kDayNs) % kDayNs;
    return ahead >= kDayNs / 2 ? ahead - kDayNs : ahead;
  }
}

int set_clock(const char* host) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  const spinwire::base::UniqueFd fd(::socket(AF_INET, SOCK_RAW | SOCK_CLOEXEC, IPPROTO_ICMP));
  const timeval timeout{1, 0};
  if (::inet_pton(AF_INET, host, &address.sin_addr) != 1 || !fd ||
      ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout) != 0 ||
      ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    std::perror(host);
    return 2;
  }
  const Steady::time_point begin = Steady::now(), end = begin + kLimit;
  for (std::uint16_t number = 0; Steady::now() < end; ++number) {
    const auto ahead =
        ask(fd.get(), number, Steady::now() - begin < kWhile ? kLongestRoundTrip : kLongestAtLast);
    if (!ahead) continue;
    const std::int64_t now = realtime_ns() + *ahead;
    const timespec time{now / 1'000'000'000, now % 1'000'000'000};
    if (::clock_settime(CLOCK_REALTIME, &time) != 0) {
      std::perror("clock_settime");
      return 2;
    }
    std::printf("%.3f\n", static_cast<double>(*ahead) / 1e6);
    return 0;
  }
  std::fprintf(stderr, "%s has not told its time within %lld ms\n", host,
               static_cast<long long>(kLongestAtLast.count()));
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2) return set_clock(argv[1]);
  std::fprintf(stderr, "usage: %s ADDRESS\n", argv[0]);
  return 2;
}
