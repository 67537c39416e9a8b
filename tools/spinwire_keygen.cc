// spinwire-keygen: writes a new key into a key file for security.key_file.
#include <fcntl.h>
#include <fmt/core.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <string>
#include <string_view>

#include "common/cli.h"

namespace {

using namespace spinwire;  // NOLINT: a program of one file
using tools::fail;

constexpr std::size_t kNameMax = 32;
constexpr std::size_t kFileMax = 8192;
constexpr std::size_t kKeysMax = 16;

struct Options {
  std::string file;
  std::string name;
  bool add = false;
};

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm date{};
  ::gmtime_r(&now, &date);
  return fmt::format("{:04}-{:02}-{:02}", date.tm_year + 1900, date.tm_mon + 1, date.tm_mday);
}

bool is_name(std::string_view text) {
  constexpr std::string_view kAllowed =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
  return !text.empty() && text.size() <= kNameMax &&
         text.find_first_not_of(kAllowed) == std::string_view::npos;
}

/// "NAME HEX" of 32 random bytes; empty if the kernel gives none. Reserves room for a newline
/// before it, so that no copy of the key stays behind when that is added.
std::string make_line(std::string_view name) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::array<std::uint8_t, 32> secret{};
  if (::getrandom(secret.data(), secret.size(), 0) != static_cast<ssize_t>(secret.size()))
    return {};
  std::string line;
  line.reserve(name.size() + 2 * secret.size() + 3);
  line.append(name).append(1, ' ');
  for (const std::uint8_t byte : secret) {
    line += kDigits[byte >> 4];
    line += kDigits[byte & 15];
  }
  ::explicit_bzero(secret.data(), secret.size());
  return line += '\n';
}

int fail_call(const std::string& file, std::string_view call, int error) {
  return fail(fmt::format("{}: {}: {}", file, call, std::strerror(error)));
}

bool write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t put = ::write(fd, text.data(), text.size());
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(put));
  }
  return true;
}

/// A key file in memory, zeroed at the end.
struct Text {
  std::array<char, kFileMax + 1> bytes{};
  std::size_t size = 0;

  Text() = default;
  Text(const Text&) = delete;
  Text& operator=(const Text&) = delete;
  ~Text() { ::explicit_bzero(bytes.data(), bytes.size()); }
  [[nodiscard]] std::string_view view() const { return {bytes.data(), size}; }
};

/// Reads a whole file. False: an error, in errno.
bool read_all(int fd, Text& text) {
  while (text.size < text.bytes.size()) {
    const ssize_t got = ::read(fd, text.bytes.data() + text.size, text.bytes.size() - text.size);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got == 0;
    text.size += static_cast<std::size_t>(got);
  }
  return errno = EFBIG, false;
}

/// What keeps a file from a further key; empty: nothing.
std::string find_obstacle(std::string_view text, std::string_view name, std::size_t size) {
  constexpr std::string_view kSpace = " \t\r";
  if (text.size() + size > kFileMax)
    return fmt::format("it would have more than {} bytes; remove old keys", kFileMax);
  std::size_t keys = 0;
  while (!text.empty()) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    line = line.substr(0, line.find('#'));
    line.remove_prefix(std::min(line.find_first_not_of(kSpace), line.size()));
    if (line.empty()) continue;
    if (line.substr(0, line.find_first_of(kSpace)) == name)
      return fmt::format("there is a key '{}' already; choose another --name", name);
    if (++keys == kKeysMax)
      return fmt::format("it has {} keys already, the most; remove old ones", kKeysMax);
  }
  return {};
}

int create(const Options& options, const std::string& line) {
  const int fd = ::open(options.file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0 && errno == EEXIST) {
    return fail(fmt::format("{}: the file exists; give another name, or add a key to it with --add",
                            options.file));
  }
  if (fd < 0) return fail_call(options.file, "open", errno);
  // The umask may have taken rights of the owner away.
  const bool written = ::fchmod(fd, 0600) == 0 && write_all(fd, line) && ::fsync(fd) == 0;
  const int error = errno;
  ::close(fd);
  if (written) return tools::kDone;
  ::unlink(options.file.c_str());
  return fail_call(options.file, "write", error);
}

/// Writes the line at the end of the file, or nothing.
int append(int fd, const Options& options, const Text& text, std::string& line) {
  if (text.size != 0 && !text.view().ends_with('\n')) line.insert(0, 1, '\n');
  const std::string obstacle = find_obstacle(text.view(), options.name, line.size());
  if (!obstacle.empty()) return fail(fmt::format("{}: {}", options.file, obstacle));
  if (write_all(fd, line) && ::fsync(fd) == 0) return tools::kDone;
  const int error = errno;
  // Half a line would keep every engine from opening.
  if (::ftruncate(fd, static_cast<off_t>(text.size)) != 0)
    return fail_call(options.file, "write, and then truncate", errno);
  return fail_call(options.file, "write", error);
}

/// What keeps an open file from being this user's key file; empty: nothing.
std::string find_fault(int fd) {
  struct stat about {};
  if (::fstat(fd, &about) != 0) return fmt::format("fstat: {}", std::strerror(errno));
  if (!S_ISREG(about.st_mode)) return "it is no regular file; name a key file";
  if (about.st_uid != ::geteuid())
    return fmt::format("it belongs to user {}; run spinwire-keygen as that user", about.st_uid);
  if ((about.st_mode & (S_IRWXG | S_IRWXO)) != 0)
    return "others than its owner have access to it; chmod 600";
  return {};
}

/// Other runs of this program hold the lock until their line is there. False: an error, in errno.
bool lock(int fd) {
  constexpr int kTries = 100;
  constexpr timespec kPause{0, 50'000'000};
  for (int i = 0; i < kTries; ++i) {
    if (::flock(fd, LOCK_EX | LOCK_NB) == 0) return true;
    if (errno != EWOULDBLOCK && errno != EINTR) return false;
    (void)::nanosleep(&kPause, nullptr);
  }
  return errno = EWOULDBLOCK, false;
}

int add(const Options& options, std::string& line) {
  const int fd =
      ::open(options.file.c_str(), O_RDWR | O_APPEND | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
  if (fd < 0 && errno == ELOOP)
    return fail(fmt::format("{}: it is a link; name the key file itself", options.file));
  if (fd < 0) return fail_call(options.file, "open", errno);
  Text text;
  int code = tools::kDone;
  if (const std::string fault = find_fault(fd); !fault.empty()) {
    code = fail(fmt::format("{}: {}", options.file, fault));
  } else if (!lock(fd)) {
    code = errno == EWOULDBLOCK
               ? fail(fmt::format("{}: another program has locked it; try again", options.file))
               : fail_call(options.file, "lock", errno);
  } else if (!read_all(fd, text)) {
    code = fail_call(options.file, "read", errno);
  } else {
    code = append(fd, options, text, line);
  }
  ::close(fd);
  return code;
}

int run(const Options& options) {
  std::string line = make_line(options.name);
  if (line.empty()) return fail("the kernel gives no random numbers");
  const int code = options.add ? add(options, line) : create(options, line);
  ::explicit_bzero(line.data(), line.size());
  if (code != tools::kDone) return code;
  fmt::print("{} the key '{}' {} {}\n", options.add ? "added" : "wrote", options.name,
             options.add ? "to" : "into", options.file);
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  tools::set_program("spinwire-keygen");
  Options options;
  options.name = today();
  CLI::App app(
      "Makes a key for security.key_file. Copy the file to every host that may connect.\n"
      "An engine proves the first key of its file and accepts all of them. To replace a key:\n"
      "  1. add a new one with --add, copy the file to all hosts, and have each engine\n"
      "     read it (Engine::reload_keys(), or a restart of the program);\n"
      "  2. move the new line to the top everywhere, and have the file read again;\n"
      "  3. remove the old line, and have the file read again.",
      "spinwire-keygen");
  app.add_option("file", options.file, "The key file; made with mode 0600, never overwritten")
      ->required();
  app.add_option("--name", options.name,
                 "Name of the key, equal at both ends: up to 32 letters, digits, '.', '_' and '-'")
      ->default_str("today's date")
      ->check([](const std::string& name) {
        return is_name(name) ? std::string() : "up to 32 letters, digits, '.', '_' and '-'";
      });
  app.add_flag("--add", options.add, "Add a key at the end of a file that exists");
  int code = 0;
  if (!tools::parse_arguments(app, argc, argv, code)) return code;
  return run(options);
}
