#include "common/stat_live.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "common/cli.h"

namespace spinwire::tools {
namespace {

using Time = std::chrono::steady_clock;

/// The alternate screen, without the cursor, and keys as they are pressed.
class Terminal {
 public:
  Terminal() : is_terminal_(::isatty(STDOUT_FILENO) == 1) {
    has_keys_ = is_terminal_ && ::tcgetattr(STDIN_FILENO, &before_) == 0;
    if (has_keys_) {
      termios keys = before_;
      keys.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
      has_keys_ = ::tcsetattr(STDIN_FILENO, TCSANOW, &keys) == 0;
    }
    if (is_terminal_) put("\x1b[?1049h\x1b[?25l");
  }
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;
  ~Terminal() {
    if (is_terminal_) put("\x1b[?25h\x1b[?1049l");
    if (has_keys_) (void)::tcsetattr(STDIN_FILENO, TCSANOW, &before_);
  }

  [[nodiscard]] ScreenSize size() const {
    winsize window{};
    if (!is_terminal_) return {};
    if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) != 0 || window.ws_row == 0) return {24, 80};
    return {window.ws_row, window.ws_col};
  }
  /// Replaces the screen; a text that is as high as the screen must not scroll it.
  void show(std::string text) const {
    if (!is_terminal_) return put(text);
    std::string screen = "\x1b[H";
    if (text.ends_with('\n')) text.pop_back();
    for (const char c : text) {
      if (c == '\n') screen += "\x1b[K\r";
      screen += c;
    }
    put(screen += "\x1b[K\x1b[J");
  }
  /// Waits until `end`, or for a key that changes what is shown or quits.
  [[nodiscard]] KeyMeans wait_until(Time::time_point end, const OnKey& on_key) const {
    while (!stop_requested()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Time::now()).count();
      if (left <= 0) return KeyMeans::nothing;
      constexpr long kTurnMs = 100;  // between looks for a stop signal
      pollfd keys{has_keys_ ? STDIN_FILENO : -1, POLLIN, 0};
      if (::poll(&keys, 1, static_cast<int>(std::min<long>(left, kTurnMs))) <= 0) continue;
      char key = 0;
      const KeyMeans means = ::read(STDIN_FILENO, &key, 1) == 1 ? on_key(key) : KeyMeans::quit;
      if (means != KeyMeans::nothing) return means;
    }
    return KeyMeans::quit;
  }

 private:
  static void put(const std::string& text) {
    (void)std::fwrite(text.data(), 1, text.size(), stdout);
    (void)std::fflush(stdout);
  }

  bool is_terminal_ = false;
  bool has_keys_ = false;
  termios before_{};
};

}  // namespace

bool show_live(const DrawScreen& draw, const OnKey& on_key, std::chrono::nanoseconds interval,
               std::size_t count) {
  const Terminal terminal;
  for (std::size_t i = 0; count == 0 || i < count; ++i) {
    const auto begin = Time::now();
    if (i != 0 && terminal.size().lines == 0) terminal.show("\n");
    std::string text = draw(terminal.size(), true);
    if (text.empty()) return false;
    terminal.show(std::move(text));
    if (count != 0 && i + 1 == count) break;
    KeyMeans means = KeyMeans::redraw;
    while ((means = terminal.wait_until(begin + interval, on_key)) == KeyMeans::redraw)
      terminal.show(draw(terminal.size(), false));
    if (means == KeyMeans::quit) break;
  }
  return true;
}

}  // namespace spinwire::tools
