// The doctors' link, and what a doctor has found.
#pragma once

#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "tools/doctor_host.h"
#include "tools/programs.h"

namespace tools_test {

inline Outcome compare(const DoctorHost& here, const std::string& address) {
  Outcome o = run("spinwire-doctor", {address, "--root", here.root(), "--json"});
  for (const nlohmann::json& f : parse_object(o.out).value("findings", nlohmann::json::array())) {
    if (f.at("severity") == "warning" || f.at("severity") == "error") {
      EXPECT_TRUE(is_line_for_a_shell(f.at("remedy")));
    }
  }
  return o;
}

/// The beginning of a finding, as --json prints it.
inline std::string finding(const std::string& check, const std::string& severity) {
  return "{\"check\":\"" + check + "\",\"severity\":\"" + severity + '"';
}
inline bool has(const Outcome& o, const std::string& check, const std::string& severity) {
  return o.out.find(finding(check, severity)) != std::string::npos;
}

/// Kinds of frames but facts, which are 1, and clock, which is 3.
inline constexpr std::uint16_t kEndFrame = 2;
inline constexpr std::uint16_t kEndpointFrame = 4;
inline constexpr std::uint16_t kBusyFrame = 5;

inline std::string frame(const std::string& text, std::uint16_t version = 1, std::uint16_t kind = 1,
                         std::uint32_t length = 0) {
  if (length == 0) length = static_cast<std::uint32_t>(text.size());
  std::string bytes = "SWDR";
  bytes.append(reinterpret_cast<const char*>(&version), sizeof version);
  bytes.append(reinterpret_cast<const char*>(&kind), sizeof kind);
  bytes.append(reinterpret_cast<const char*>(&length), sizeof length);
  return bytes + text;
}

inline int tcp_socket(sockaddr_in& address, int port) {
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
}

/// A doctor that serves on a free port of loopback.
class Serving {
 public:
  /// `settings` are NAME=VALUE.
  explicit Serving(const DoctorHost& host, const Words& settings = {})
      : program_(command(host, settings)), address_(program_.wait_for("listening on ")) {
    EXPECT_EQ(address_.find("127.0.0.1:"), 0u) << program_.err();
  }
  [[nodiscard]] const std::string& address() const { return address_; }
  [[nodiscard]] int port() const { return std::stoi(address_.substr(address_.find(':') + 1)); }
  /// Ends it by a signal; its exit code.
  int stop() {
    program_.signal(SIGTERM);
    return program_.wait();
  }
  [[nodiscard]] const std::string& err() const { return program_.err(); }

 private:
  static Words command(const DoctorHost& host, const Words& settings) {
    Words words{"/usr/bin/env"};
    words.insert(words.end(), settings.begin(), settings.end());
    words.insert(words.end(),
                 {bin() + "/spinwire-doctor", "--serve", "127.0.0.1:0", "--root", host.root()});
    return words;
  }

  Program program_;
  std::string address_;
};

/// What the server answers to these bytes, until it closes.
inline std::string answer_of(int port, const std::string& bytes) {
  sockaddr_in address{};
  const int fd = tcp_socket(address, port);
  EXPECT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
  std::string answer;
  char some[4096];
  for (ssize_t got = 0; (got = ::recv(fd, some, sizeof some, 0)) > 0;)
    answer.append(some, static_cast<std::size_t>(got));
  ::close(fd);
  return answer;
}

/// A client of the doctors' protocol that does as it likes.
class LinkClient {
 public:
  explicit LinkClient(const std::string& address) {
    sockaddr_in to{};
    fd_ = tcp_socket(to, std::stoi(address.substr(address.find(':') + 1)));
    EXPECT_EQ(::connect(fd_, reinterpret_cast<sockaddr*>(&to), sizeof to), 0);
    // Only a defect leaves a client without an answer.
    const timeval limit{60, 0};
    EXPECT_EQ(::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit), 0);
  }
  LinkClient(const LinkClient&) = delete;
  LinkClient& operator=(const LinkClient&) = delete;
  ~LinkClient() { ::close(fd_); }

  void send(const std::string& text, std::uint16_t kind = 1) const {
    const std::string bytes = frame(text, 1, kind);
    EXPECT_EQ(::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  /// The text of the next frame, which must be of that kind; empty at the end.
  [[nodiscard]] std::string receive(std::uint16_t kind = 1) const {
    char head[12];
    if (::recv(fd_, head, sizeof head, MSG_WAITALL) != sizeof head) return {};
    std::uint16_t got = 0;
    std::memcpy(&got, head + 6, sizeof got);
    EXPECT_EQ(got, kind);
    std::uint32_t length = 0;
    std::memcpy(&length, head + 8, sizeof length);
    std::string text(length, '\0');
    EXPECT_EQ(::recv(fd_, text.data(), length, MSG_WAITALL), static_cast<ssize_t>(length));
    return text;
  }
  [[nodiscard]] int fd() const { return fd_; }

 private:
  int fd_ = -1;
};

}  // namespace tools_test
