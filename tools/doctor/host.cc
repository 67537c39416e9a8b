#include "doctor/host.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <infiniband/verbs.h>
#include <linux/magic.h>
#include <linux/membarrier.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>

namespace spinwire::doctor {
namespace {

constexpr std::size_t kMostBytes = std::size_t{1} << 20;

int error_of(long result) { return result < 0 ? errno : 0; }

int probe_memfd() {
  const int fd = ::memfd_create("spinwire-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  const int error = error_of(fd);
  if (fd >= 0) ::close(fd);
  return error;
}

int probe_pidfd() {
  const long fd = ::syscall(SYS_pidfd_open, ::getpid(), 0);
  const int error = error_of(fd);
  if (fd >= 0) ::close(static_cast<int>(fd));
  return error;
}

int probe_membarrier() {
  const long commands = ::syscall(SYS_membarrier, MEMBARRIER_CMD_QUERY, 0, 0);
  if (commands < 0) return errno;
  return (commands & MEMBARRIER_CMD_GLOBAL_EXPEDITED) != 0 ? 0 : ENOSYS;
}

int probe_process_vm() {
  char from = 1;
  char to = 0;
  const iovec ours{&to, 1};
  const iovec theirs{&from, 1};
  return error_of(::process_vm_readv(::getpid(), &ours, 1, &theirs, 1, 0));
}

std::uint32_t query_mtu(std::string_view device, int port) {
  int count = 0;
  const std::unique_ptr<ibv_device*[], void (*)(ibv_device**)> list(::ibv_get_device_list(&count),
                                                                    ::ibv_free_device_list);
  for (int i = 0; i < count; ++i) {
    if (device != ::ibv_get_device_name(list[static_cast<std::size_t>(i)])) continue;
    const std::unique_ptr<ibv_context, int (*)(ibv_context*)> context(
        ::ibv_open_device(list[static_cast<std::size_t>(i)]), ::ibv_close_device);
    ibv_port_attr attr{};
    if (context == nullptr ||
        ::ibv_query_port(context.get(), static_cast<std::uint8_t>(port), &attr) != 0)
      return 0;
    return 128u << attr.active_mtu;
  }
  return 0;
}

}  // namespace

Host::Host(std::filesystem::path root) : root_(std::move(root)), is_real_(root_ == "/") {}

std::filesystem::path Host::under(std::string_view path) const {
  return root_ / std::filesystem::path(path).relative_path();
}

Reading Host::read(std::string_view path) const {
  const int fd = ::open(under(path).c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return {std::nullopt, std::strerror(errno)};
  std::string text;
  std::array<char, 4096> some{};
  ssize_t got = 0;
  while (text.size() < kMostBytes && (got = ::read(fd, some.data(), some.size())) > 0)
    text.append(some.data(), static_cast<std::size_t>(got));
  const int error = errno;
  ::close(fd);
  if (got < 0) return {std::nullopt, std::strerror(error)};
  if (!text.empty() && text.back() == '\n') text.pop_back();
  return {std::move(text), {}};
}

std::optional<std::int64_t> Host::number(std::string_view path) const {
  const Reading reading = read(path);
  if (!reading) return std::nullopt;
  char* end = nullptr;
  const long long value = std::strtoll(reading.text->c_str(), &end, 10);
  if (end == reading.text->c_str()) return std::nullopt;
  return value;
}

std::vector<std::string> Host::list(std::string_view folder) const {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator i(under(folder), error), end; !error && i != end;
       i.increment(error))
    names.push_back(i->path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

bool Host::exists(std::string_view path) const {
  std::error_code ignored;
  return std::filesystem::exists(under(path), ignored);
}

int Host::access_error(std::string_view path) const {
  return ::access(under(path).c_str(), R_OK | W_OK) == 0 ? 0 : errno;
}

bool Host::is_in_memory(std::string_view path) const {
  if (!is_real_) return !exists("/probe/disk");
  struct statfs system {};
  if (::statfs(under(path).c_str(), &system) != 0) return false;
  const auto type = static_cast<std::uint64_t>(system.f_type);
  return type == TMPFS_MAGIC || type == RAMFS_MAGIC;
}

std::string Host::link_name(std::string_view path) const {
  std::error_code error;
  const std::filesystem::path target = std::filesystem::read_symlink(under(path), error);
  return error ? "" : target.filename().string();
}

std::uint32_t Host::active_mtu(std::string_view device, int port) const {
  if (is_real_) return query_mtu(device, port);
  const auto mtu =
      number(fmt::format("/sys/class/infiniband/{}/ports/{}/active_mtu", device, port));
  return static_cast<std::uint32_t>(mtu.value_or(0));
}

std::int64_t Host::unix_ns() const {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const std::int64_t ahead = is_real_ ? 0 : number("/probe/ahead_ns").value_or(0);
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count() + ahead;
}

std::int64_t Host::limit_ms(std::string_view name, std::int64_t usual) const {
  return is_real_ ? usual : number(fmt::format("/probe/{}_limit_ms", name)).value_or(usual);
}

double Host::round_trip_us(double measured) const {
  const auto planted = is_real_ ? std::nullopt : number("/probe/round_trip_ns");
  return planted ? static_cast<double>(*planted) / 1e3 : measured;
}

int Host::probe(std::string_view call) const {
  if (!is_real_) return static_cast<int>(number(fmt::format("/probe/{}", call)).value_or(0));
  if (call == "memfd_create") return probe_memfd();
  if (call == "membarrier") return probe_membarrier();
  if (call == "pidfd_open") return probe_pidfd();
  if (call == "process_vm_readv") return probe_process_vm();
  return ENOSYS;
}

std::optional<std::string> field(std::string_view text, std::string_view name) {
  std::size_t at = 0;
  while (at < text.size()) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    std::string_view line = text.substr(at, end - at);
    at = end + 1;
    if (!line.starts_with(name)) continue;
    line.remove_prefix(name.size());
    const std::size_t colon = line.find_first_not_of(" \t");
    if (colon == std::string_view::npos || line[colon] != ':') continue;
    line.remove_prefix(colon + 1);
    const std::size_t begin = line.find_first_not_of(" \t");
    return std::string(begin == std::string_view::npos ? "" : line.substr(begin));
  }
  return std::nullopt;
}

std::vector<int> processors(std::string_view list) {
  constexpr int kMost = 8192;
  std::vector<int> found;
  std::istringstream in{std::string(list)};
  for (std::string part; std::getline(in, part, ',');) {
    int first = 0;
    int last = 0;
    const int got = std::sscanf(part.c_str(), "%d-%d", &first, &last);  // NOLINT
    if (got == 1) last = first;
    if (got < 1 || first < 0) continue;
    for (int i = first; i <= std::min(last, kMost); ++i) found.push_back(i);
  }
  return found;
}

std::string processors_text(const std::vector<int>& processors) {
  std::string text;
  for (std::size_t i = 0; i < processors.size();) {
    std::size_t last = i;
    while (last + 1 < processors.size() && processors[last + 1] == processors[last] + 1) ++last;
    text += fmt::format("{}{}", text.empty() ? "" : ",", processors[i]);
    if (last != i) text += fmt::format("-{}", processors[last]);
    i = last + 1;
  }
  return text;
}

std::string size_text(std::uint64_t bytes) {
  constexpr std::array kUnits{"bytes", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  while (bytes != 0 && bytes % 1024 == 0 && unit + 1 < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  return fmt::format("{} {}", bytes, kUnits[unit]);
}

}  // namespace spinwire::doctor
