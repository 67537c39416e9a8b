// The names of engines' files: spinwire-UID-PID-ENGINE. Cold.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "spinwire/observe.h"

namespace spinwire::observe {

std::string file_name(uid_t user, std::uint32_t pid, std::uint32_t engine);
/// The process and engine of a file's name; none: it is no engine's file, or of another user.
std::optional<EngineFile> parse_file_name(std::string_view name, uid_t user);
/// Whether the engine that made an open file still exists: it holds the file's lock.
bool is_locked(int fd) noexcept;
/// A regular file of this user, opened for reading; -1 with errno if there is none.
int open_file(const std::string& path) noexcept;
/// Field 22 of /proc/self/stat: when the process started; 0: unknown.
std::uint64_t process_start() noexcept;

}  // namespace spinwire::observe
