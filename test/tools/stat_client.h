// A client of spinwire-stat --serve, and a search in what spinwire-stat writes.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace stat_test {

inline bool has(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

/// A connection to a server on loopback.
inline int connect_to(std::uint16_t port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(port);
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to), 0);
  return fd;
}

/// As connect_to(), without waiting for the connection.
inline int begin_to_connect(std::uint16_t port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(port);
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  (void)!::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to);
  EXPECT_EQ(::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) & ~O_NONBLOCK), 0);
  return fd;
}

/// What a server answers on a connection, which this closes.
inline std::string answer_on(int fd, const std::string& request) {
  EXPECT_EQ(::write(fd, request.data(), request.size()), static_cast<ssize_t>(request.size()));
  std::string answer;
  std::array<char, 4096> bytes{};
  for (ssize_t got = 0; (got = ::read(fd, bytes.data(), bytes.size())) > 0;)
    answer.append(bytes.data(), static_cast<std::size_t>(got));
  ::close(fd);
  return answer;
}

/// What a server on loopback answers.
inline std::string ask(std::uint16_t port, const std::string& request) {
  return answer_on(connect_to(port), request);
}

}  // namespace stat_test
