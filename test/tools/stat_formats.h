// A check of the format that spinwire-stat writes for Prometheus.
#pragma once

#include <gtest/gtest.h>

#include <cctype>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <string_view>

namespace stat_test {

/// Checks a text by the specification of Prometheus' format, version 0.0.4. Returns the samples.
class PrometheusText {
 public:
  explicit PrometheusText(const std::string& text) {
    EXPECT_TRUE(text.empty() || text.back() == '\n');
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      rest_ = line;
      const bool good = line.starts_with('#') ? comment() : sample(line);
      EXPECT_TRUE(good) << line;
    }
  }
  [[nodiscard]] std::size_t count(const std::string& name) const {
    const auto found = counts_.find(name);
    return found != counts_.end() ? found->second : 0;
  }

 private:
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
  /// HELP and TYPE come once for each metric, before its samples.
  bool comment() {
    const bool is_help = take("# HELP ");
    if (!is_help && !take("# TYPE ")) return true;
    const std::string metric = name();
    if (metric.empty() || !take(" ") || counts_.contains(metric)) return false;
    if (is_help) {
      for (std::size_t i = 0; i < rest_.size(); ++i) {
        if (rest_[i] == '\\' && (++i == rest_.size() || (rest_[i] != '\\' && rest_[i] != 'n')))
          return false;
      }
      return helped_.insert(metric).second;
    }
    type_of_ = metric;
    is_summary_ = rest_ == "summary";
    return (is_summary_ || rest_ == "counter" || rest_ == "gauge") && typed_.insert(metric).second;
  }
  bool labels() {
    if (!take("{")) return true;
    std::set<std::string> names;
    while (!take("}")) {
      const std::string label = name();
      if (label.empty() || label.find(':') != std::string::npos || !names.insert(label).second ||
          !take("=\""))
        return false;
      while (!rest_.empty() && rest_.front() != '"') {
        const bool escape = rest_.front() == '\\';
        if (escape && (rest_.size() < 2 || std::strchr("\\\"n", rest_[1]) == nullptr)) return false;
        rest_.remove_prefix(escape ? 2 : 1);
      }
      if (!take("\"")) return false;
      (void)take(",");
    }
    return true;
  }
  /// The samples of a metric come together, and each set of labels once.
  bool sample(const std::string& line) {
    const std::string metric = name();
    const bool is_of_type =
        metric == type_of_ ||
        (is_summary_ && (metric == type_of_ + "_sum" || metric == type_of_ + "_count"));
    if (metric.empty() || !is_of_type || !helped_.contains(type_of_) || !labels() || !take(" "))
      return false;
    if (!series_.insert(line.substr(0, line.size() - rest_.size())).second) return false;
    ++counts_[metric];
    char* end = nullptr;
    const std::string value(rest_);
    (void)std::strtod(value.c_str(), &end);
    return !value.empty() && *end == '\0';
  }

  std::string_view rest_;
  std::string type_of_;
  bool is_summary_ = false;
  std::set<std::string> helped_;
  std::set<std::string> typed_;
  std::set<std::string> series_;
  std::map<std::string, std::size_t> counts_;
};

}  // namespace stat_test
