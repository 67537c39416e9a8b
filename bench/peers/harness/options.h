// The command line that all peer programs share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace spinwire::bench {

enum class Mode : std::uint8_t {
  one_thread,     ///< "1t": both ends on one thread
  two_processes,  ///< "2p": a client's process and a server's
  symmetric,      ///< "sym": two processes, each of them client and server
};
std::string_view to_string(Mode mode) noexcept;

enum class What : std::uint8_t {
  messages,  ///< a message there and one back
  calls,     ///< a remote call and its reply
  write,     ///< one-sided, until the completion
  read,
};
std::string_view to_string(What what) noexcept;

struct Options {
  Mode mode = Mode::two_processes;
  What what = What::messages;
  std::uint32_t window = 32;  ///< requests under way
  std::uint32_t batch = 1;    ///< requests that go out together; divides `window`
  std::size_t size = 32;      ///< bytes of a request, or of a one-sided operation
  std::size_t reply_size = 32;
  double seconds = 2;
  double warm_up_seconds = 0.25;
  double slice_ms = 10;
  int client_cpu = 0;  ///< also the one of "1t"
  int server_cpu = 1;
  bool verbose = false;

  [[nodiscard]] bool is_one_sided() const noexcept {
    return what == What::write || what == What::read;
  }
};

/// Most requests under way, and most bytes of one.
inline constexpr std::uint32_t kWidestWindow = 64;
inline constexpr std::size_t kLongestRequest = std::size_t{1} << 28;

/// Parses the command line of the peer program `about`, which does what `supported` lists. The
/// first of them is the default of --what. Ends the program for --help, and with exit code 2 for a
/// bad command line.
Options parse_options(int argc, char** argv, std::string_view about,
                      const std::vector<What>& supported);

}  // namespace spinwire::bench
