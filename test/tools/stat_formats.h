// A check of the format that spinwire-stat writes for Prometheus.
#pragma once

#include <gtest/gtest.h>

#include <cctype>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace stat_test {

/// Checks a text by the specification of Prometheus' format, version 0.0.4, and is stricter than
/// the parser there: each family has one HELP and one TYPE, in this order and before its samples,
/// which come together; each series once; sums and counts are complete.
class PrometheusText {
 public:
  /// Fails the test if the text is wrong.
  explicit PrometheusText(const std::string& text) : PrometheusText(text, nullptr) {
    for (const std::string& error : errors_) ADD_FAILURE() << error;
  }
  /// What is wrong with a text.
  static std::vector<std::string> errors_of(const std::string& text) {
    return PrometheusText(text, nullptr).errors_;
  }
  [[nodiscard]] std::size_t count(const std::string& name) const {
    const auto found = counts_.find(name);
    return found != counts_.end() ? found->second : 0;
  }
  [[nodiscard]] const std::set<std::string>& families() const { return families_; }

 private:
  using Labels = std::map<std::string, std::string>;
  /// The parts of a histogram or summary with the same labels.
  struct Parts {
    std::vector<std::pair<double, double>> buckets;  ///< "le" and value, as they come
    std::optional<double> sum, count;
  };
  struct Family {
    std::string name, type;
    bool has_samples = false;
    std::map<Labels, Parts> parts;
  };

  PrometheusText(const std::string& text, std::nullptr_t /*collects errors*/) {
    if (!text.empty() && text.back() != '\n') error("the last line has no end", "");
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      rest_ = line;
      const char* const wrong = line.starts_with('#') ? comment() : sample();
      if (wrong != nullptr) error(wrong, line);
    }
    end_family();
  }
  void error(const std::string& what, std::string_view where) {
    errors_.push_back(what + ": " + std::string(where));
  }

  bool take(std::string_view what) {
    if (!rest_.starts_with(what)) return false;
    rest_.remove_prefix(what.size());
    return true;
  }
  /// [a-zA-Z_:][a-zA-Z0-9_:]*
  std::string name() {
    std::size_t end = 0;
    while (end < rest_.size() &&
           (std::isalpha(static_cast<unsigned char>(rest_[end])) != 0 || rest_[end] == '_' ||
            rest_[end] == ':' ||
            (end != 0 && std::isdigit(static_cast<unsigned char>(rest_[end])) != 0)))
      ++end;
    std::string taken(rest_.substr(0, end));
    rest_.remove_prefix(end);
    return taken;
  }

  /// HELP begins a family, TYPE follows it.
  const char* comment() {
    const bool is_help = take("# HELP ");
    if (!is_help && !take("# TYPE ")) return nullptr;
    const std::string family = name();
    if (family.empty() || !take(" ")) return "no name of a family";
    if (!is_help) {
      if (family != family_.name) return "TYPE without HELP before it";
      if (!family_.type.empty()) return "a second TYPE";
      family_.type = rest_;
      static const std::set<std::string> kTypes = {"counter", "gauge", "histogram", "summary",
                                                   "untyped"};
      return kTypes.contains(family_.type) ? nullptr : "no such type";
    }
    end_family();
    if (!families_.insert(family).second) return "a family that has ended, or a second HELP";
    family_ = {family, "", false, {}};
    for (std::size_t i = 0; i < rest_.size(); ++i) {
      if (rest_[i] == '\\' && (++i == rest_.size() || std::strchr("\\n", rest_[i]) == nullptr))
        return "a bad escape";
    }
    return nullptr;
  }

  const char* label_value(std::string& value) {
    while (!rest_.empty() && rest_.front() != '"') {
      const bool escape = rest_.front() == '\\';
      if (escape && (rest_.size() < 2 || std::strchr("\\\"n", rest_[1]) == nullptr))
        return "a bad escape";
      value += rest_.substr(0, escape ? 2 : 1);
      rest_.remove_prefix(escape ? 2 : 1);
    }
    return take("\"") ? nullptr : "a label's value does not end";
  }
  const char* labels(Labels& all) {
    if (!take("{") || take("}")) return nullptr;
    do {
      const std::string label = name();
      if (label.empty() || label.find(':') != std::string::npos || label.starts_with("__"))
        return "no name of a label";
      if (!take("=\"")) return "a label without a value";
      std::string value;
      if (const char* const wrong = label_value(value); wrong != nullptr) return wrong;
      if (!all.emplace(label, value).second) return "a label twice";
    } while (take(","));
    return take("}") ? nullptr : "no comma between labels";
  }
  static std::optional<double> number(const std::string& text) {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    return text.empty() || *end != '\0' ? std::nullopt : std::optional(value);
  }

  const char* sample() {
    const std::string metric = name();
    if (metric.empty()) return "no name of a metric";
    const bool has_parts = family_.type == "histogram" || family_.type == "summary";
    const bool is_family = metric == family_.name;
    const std::string part = metric.starts_with(family_.name) && !is_family
                                 ? metric.substr(family_.name.size())
                                 : std::string();
    const bool is_part = has_parts && (part == "_sum" || part == "_count" ||
                                       (part == "_bucket" && family_.type == "histogram"));
    if (!is_part && !is_family) return "a sample outside of its family";
    if (family_.type.empty()) return "a sample before TYPE";
    family_.has_samples = true;
    Labels all;
    if (const char* const wrong = labels(all); wrong != nullptr) return wrong;
    if (!take(" ")) return "no space before the value";
    const auto value = number(std::string(rest_));
    if (!value) return "no number";
    if (!series_.emplace(metric, all).second) return "a series twice";
    ++counts_[metric];
    if (family_.type == "counter" && !(*value >= 0)) return "a counter below 0";
    return has_parts ? add_part(part, std::move(all), *value) : nullptr;
  }
  const char* add_part(const std::string& part, Labels all, double value) {
    const bool is_histogram = family_.type == "histogram";
    const char* const place = is_histogram ? "le" : "quantile";
    if (part == "_sum" || part == "_count") {
      if (all.contains(place)) return "a sum or count of a part";
      Parts& parts = family_.parts[all];
      (part == "_sum" ? parts.sum : parts.count) = value;
      return nullptr;
    }
    if (is_histogram && part.empty()) return "a sample outside of its family";
    const auto found = all.find(place);
    const auto at = found == all.end() ? std::nullopt : number(found->second);
    if (!at) return is_histogram ? "a bucket without le" : "a sample without quantile";
    if (!is_histogram && !(*at >= 0 && *at <= 1)) return "a quantile outside of 0 to 1";
    all.erase(found);
    family_.parts[all].buckets.emplace_back(*at, value);
    return nullptr;
  }

  void end_family() {
    if (family_.name.empty()) return;
    if (family_.type.empty() || !family_.has_samples)
      error("a family without TYPE or samples", family_.name);
    for (const auto& [labels, parts] : family_.parts) {
      if (!parts.sum || !parts.count) error("no sum or count", family_.name);
      if (const char* const wrong = family_.type == "histogram" ? buckets(parts) : nullptr)
        error(wrong, family_.name);
    }
    family_ = {};
  }
  static const char* buckets(const Parts& parts) {
    for (std::size_t i = 1; i < parts.buckets.size(); ++i) {
      if (!(parts.buckets[i - 1].first < parts.buckets[i].first)) return "buckets out of order";
      if (parts.buckets[i - 1].second > parts.buckets[i].second)
        return "buckets that do not add up";
    }
    if (parts.buckets.empty() || !std::isinf(parts.buckets.back().first)) return "no bucket +Inf";
    return parts.count && parts.buckets.back().second == *parts.count
               ? nullptr
               : "the bucket +Inf is not the count";
  }

  std::string_view rest_;
  Family family_;
  std::set<std::string> families_;
  std::set<std::pair<std::string, Labels>> series_;
  std::map<std::string, std::size_t> counts_;
  std::vector<std::string> errors_;
};

}  // namespace stat_test
