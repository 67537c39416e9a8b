#include "base/mapped_memory.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <string_view>

#include "base/unique_fd.h"

namespace spinwire::base {
namespace {

struct Mapping {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  bool reads = false;
  bool writes = false;
};

/// Decodes "begin-end rwxp offset …"; an empty mapping if the line is none.
Mapping decode_mapping(std::string_view line) noexcept {
  Mapping m;
  const char* const end = line.data() + line.size();
  const auto begin = std::from_chars(line.data(), end, m.begin, 16);
  if (begin.ptr == end || *begin.ptr != '-') return {};
  const auto last = std::from_chars(begin.ptr + 1, end, m.end, 16);
  if (end - last.ptr < 3) return {};
  m.reads = last.ptr[1] == 'r';
  m.writes = last.ptr[2] == 'w';
  return m;
}

/// The part of the bytes that has not been found yet. The list is in the order of addresses.
struct Search {
  enum class State { goes_on, found, missing };

  State examine(const Mapping& m) noexcept {
    if (m.end <= next) return State::goes_on;
    if (m.begin > next || !m.reads || (writes && !m.writes)) return State::missing;
    next = m.end;
    return next >= end ? State::found : State::goes_on;
  }

  std::uint64_t next;
  std::uint64_t end;
  bool writes;
};

}  // namespace

bool is_mapped(const void* begin, std::size_t bytes, bool writes) noexcept {
  // The list of /proc/self is that of the main thread: empty once that thread has ended.
  const UniqueFd list(::open("/proc/thread-self/maps", O_RDONLY | O_CLOEXEC));
  if (!list) return true;
  const auto first = reinterpret_cast<std::uint64_t>(begin);
  Search search{first, first + bytes, writes};
  std::array<char, 8192> text;  // a line is shorter: it ends with one path
  std::size_t held = 0;
  bool is_empty = true;
  while (held < text.size()) {
    const ssize_t got = ::read(list.get(), text.data() + held, text.size() - held);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got < 0 || is_empty;
    is_empty = false;
    held += static_cast<std::size_t>(got);
    std::string_view rest(text.data(), held);
    for (std::size_t n = 0; (n = rest.find('\n')) != rest.npos; rest.remove_prefix(n + 1)) {
      const Search::State state = search.examine(decode_mapping(rest.substr(0, n)));
      if (state != Search::State::goes_on) return state == Search::State::found;
    }
    std::copy(rest.begin(), rest.end(), text.begin());
    held = rest.size();
  }
  return true;
}

}  // namespace spinwire::base
