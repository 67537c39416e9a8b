// What the doctor has found, and how it is printed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace spinwire::doctor {

enum class Severity : std::uint8_t { ok, note, warning, error };
std::string_view to_string(Severity severity) noexcept;

struct Finding {
  std::string check;  ///< name of the check, such as "memlock"
  Severity severity = Severity::ok;
  std::string text;      ///< what is found, and what it does to the program
  std::string evidence;  ///< what was read, and where
  /// The command that mends it, as a line for the shell: what is not its matter follows '#'. Above
  /// a note never empty: without such a command it begins with '#'.
  std::string remedy;
};

class Findings {
 public:
  /// In text and evidence, bytes that are not printable become '?'; line ends stay.
  void add(std::string_view check, Severity severity, std::string text, std::string evidence,
           std::string remedy = {});
  /// What cannot be read: a note.
  void add_unknown(std::string_view check, std::string_view subject, std::string_view path,
                   std::string_view why);

  [[nodiscard]] const std::vector<Finding>& all() const noexcept { return all_; }
  [[nodiscard]] Severity worst() const noexcept;
  /// 0: nothing above a note; 1: warnings; 2: errors.
  [[nodiscard]] int exit_code() const noexcept;

  /// The findings, the worst first. `with_ok`: also what is in order.
  [[nodiscard]] std::string text(bool with_ok) const;
  /// All findings as one JSON object on one line.
  [[nodiscard]] std::string json() const;

 private:
  std::vector<Finding> all_;
};

}  // namespace spinwire::doctor
