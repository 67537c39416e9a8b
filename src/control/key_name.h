// The name of a key. It stays valid when Engine::reload_keys() drops the key, because connections
// by that key stay. Cold.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace spinwire::control {

/// Copies share the text. A name is not secret. All copies are used by one thread.
class KeyName {
 public:
  /// No key.
  KeyName() noexcept = default;
  /// May throw std::bad_alloc.
  explicit KeyName(std::string_view name) : text_(std::make_shared<const std::string>(name)) {}

  [[nodiscard]] bool empty() const noexcept { return text_ == nullptr; }
  /// Valid as long as a copy of the name.
  [[nodiscard]] std::string_view view() const noexcept {
    return text_ != nullptr ? std::string_view(*text_) : std::string_view();
  }
  friend bool operator==(const KeyName& name, std::string_view text) noexcept {
    return name.view() == text;
  }

 private:
  std::shared_ptr<const std::string> text_;
};

}  // namespace spinwire::control
