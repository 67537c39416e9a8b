// The facts of one host, all of which are files below a root folder. Tests give another root.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace spinwire::doctor {

/// What a file holds, without the last line end, or why it cannot be read.
struct Reading {
  std::optional<std::string> text;
  std::string why;  ///< of the system, if there is no text

  explicit operator bool() const noexcept { return text.has_value(); }
};

class Host {
 public:
  explicit Host(std::filesystem::path root);

  /// Paths are absolute, as on the host. At most 1 MiB of a file is read.
  [[nodiscard]] Reading read(std::string_view path) const;
  /// The number that a file begins with.
  [[nodiscard]] std::optional<std::int64_t> number(std::string_view path) const;
  /// Names in a folder, in order; empty if the folder cannot be read.
  [[nodiscard]] std::vector<std::string> list(std::string_view folder) const;
  [[nodiscard]] bool exists(std::string_view path) const;
  /// 0, or the error of opening the file for reading and writing. Opens nothing.
  [[nodiscard]] int access_error(std::string_view path) const;
  /// Whether the folder lies on a file system in memory. Below another root, unless there is a file
  /// /probe/disk.
  [[nodiscard]] bool is_in_memory(std::string_view path) const;
  /// The last part of a symbolic link's target; empty if it is none.
  [[nodiscard]] std::string link_name(std::string_view path) const;

  /// The path MTU that a port uses, in bytes. sysfs does not show it, so libibverbs is asked; below
  /// another root, the file `active_mtu` of the port. 0: not known.
  [[nodiscard]] std::uint32_t active_mtu(std::string_view device, int port) const;
  /// The time since the Unix epoch. Below another root, later by the nanoseconds in
  /// /probe/ahead_ns.
  [[nodiscard]] std::int64_t unix_ns() const;
  /// A limit for what the other doctor does. "first": until a client's engine has connected, or
  /// until a server's facts have come. "busy": for a server that serves others. "clock": for all
  /// times that a server tells. Below another root, the number in /probe/NAME_limit_ms.
  [[nodiscard]] std::int64_t limit_ms(std::string_view name, std::int64_t usual) const;
  /// A round trip that was measured. Below another root, the number in /probe/round_trip_ns.
  [[nodiscard]] double round_trip_us(double measured) const;
  /// Makes a harmless system call that the library needs: memfd_create, membarrier, pidfd_open or
  /// process_vm_readv. Returns 0 or its error. Below another root, the number in /probe/NAME.
  [[nodiscard]] int probe(std::string_view call) const;

 private:
  [[nodiscard]] std::filesystem::path under(std::string_view path) const;

  std::filesystem::path root_;
  bool is_real_;
};

/// The rest of the line that begins with `name` and a colon, without leading spaces.
[[nodiscard]] std::optional<std::string> field(std::string_view text, std::string_view name);
/// The processors of a list such as "0-3,8". What is no number is left out.
[[nodiscard]] std::vector<int> processors(std::string_view list);
/// "0-3,8"
[[nodiscard]] std::string processors_text(const std::vector<int>& processors);
/// "8 MiB"; exact.
[[nodiscard]] std::string size_text(std::uint64_t bytes);

}  // namespace spinwire::doctor
