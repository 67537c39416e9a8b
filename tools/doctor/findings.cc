#include "doctor/findings.h"

#include <fmt/core.h>

#include <algorithm>

#include "common/json.h"

namespace spinwire::doctor {
namespace {

/// A text that may hold the output of a program, which may hold a peer's text: '?' for each byte
/// that is not printable. Line ends within it stay.
std::string printable(std::string text) {
  while (text.ends_with('\n')) text.pop_back();
  for (char& c : text) {
    if (c == '\t') c = ' ';
    if ((c < ' ' || c > '~') && c != '\n') c = '?';
  }
  return text;
}

/// Marks all lines but the first, so that none of them looks like one of the report's own.
std::string continued(std::string text) {
  constexpr std::string_view kMark = "\n               | ";
  for (std::size_t at = text.find('\n'); at != std::string::npos;
       at = text.find('\n', at + kMark.size()))
    text.replace(at, 1, kMark);
  return text;
}

}  // namespace

std::string_view to_string(Severity severity) noexcept {
  switch (severity) {
    case Severity::ok:
      return "ok";
    case Severity::note:
      return "note";
    case Severity::warning:
      return "warning";
    case Severity::error:
      return "error";
  }
  return "?";
}

void Findings::add(std::string_view check, Severity severity, std::string text,
                   std::string evidence, std::string remedy) {
  if (severity > Severity::note && remedy.empty()) remedy = "# no command mends this";
  all_.push_back({std::string(check), severity, printable(std::move(text)),
                  printable(std::move(evidence)), std::move(remedy)});
}

void Findings::add_unknown(std::string_view check, std::string_view subject, std::string_view path,
                           std::string_view why) {
  add(check, Severity::note, fmt::format("not known: {}", subject),
      fmt::format("{}: {}", path, why));
}

Severity Findings::worst() const noexcept {
  Severity worst = Severity::ok;
  for (const Finding& finding : all_) worst = std::max(worst, finding.severity);
  return worst;
}

int Findings::exit_code() const noexcept {
  return std::max(static_cast<int>(worst()) - static_cast<int>(Severity::note), 0);
}

std::string Findings::text(bool with_ok) const {
  std::string text;
  std::size_t in_order = 0;
  for (int severity = static_cast<int>(Severity::error); severity >= 0; --severity) {
    for (const Finding& f : all_) {
      if (static_cast<int>(f.severity) != severity) continue;
      in_order += f.severity == Severity::ok ? 1 : 0;
      if (f.severity == Severity::ok && !with_ok) continue;
      text += fmt::format("{:7}  {:12} {}\n", to_string(f.severity), f.check, continued(f.text));
      if (!f.evidence.empty()) text += fmt::format("{:9}read: {}\n", "", continued(f.evidence));
      if (!f.remedy.empty()) text += fmt::format("{:9}run:  {}\n", "", f.remedy);
    }
  }
  return text + fmt::format("{} findings, {} in order\n", all_.size() - in_order, in_order);
}

std::string Findings::json() const {
  tools::Json findings = tools::Json::array();
  for (const Finding& f : all_) {
    findings.push_back({{"check", f.check},
                        {"severity", to_string(f.severity)},
                        {"text", f.text},
                        {"evidence", f.evidence},
                        {"remedy", f.remedy}});
  }
  return tools::json_line(
      {{"version", 1}, {"worst", to_string(worst())}, {"findings", std::move(findings)}});
}

}  // namespace spinwire::doctor
