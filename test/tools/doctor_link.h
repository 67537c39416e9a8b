// The doctors' link, and what a doctor has found.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
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

}  // namespace tools_test
