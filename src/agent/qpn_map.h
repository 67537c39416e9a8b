// Agents by the number of their queue pair. Hot.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

namespace spinwire::agent {

struct Agent;

/// Maps a queue-pair number to its agent: two loads, no hashing. Pages are allocated at connect
/// time.
class QpnMap {
 public:
  [[nodiscard]] Agent* find(std::uint32_t qpn) const noexcept {
    const Page* page = pages_[(qpn >> kPageBits) & (kPages - 1)].get();
    return page != nullptr ? (*page)[qpn & (kPageSize - 1)] : nullptr;
  }
  /// May throw std::bad_alloc. Set-up.
  void set(std::uint32_t qpn, Agent* agent) {
    auto& page = pages_[(qpn >> kPageBits) & (kPages - 1)];
    if (page == nullptr) page = std::make_unique<Page>();
    (*page)[qpn & (kPageSize - 1)] = agent;
  }
  void clear(std::uint32_t qpn) noexcept {
    auto& page = pages_[(qpn >> kPageBits) & (kPages - 1)];
    if (page != nullptr) (*page)[qpn & (kPageSize - 1)] = nullptr;
  }

 private:
  static constexpr unsigned kPageBits = 10;
  static constexpr std::uint32_t kPageSize = 1u << kPageBits;
  static constexpr std::uint32_t kPages = 1u << (24 - kPageBits);
  using Page = std::array<Agent*, kPageSize>;
  std::unique_ptr<std::unique_ptr<Page>[]> pages_ =
      std::make_unique<std::unique_ptr<Page>[]>(kPages);
};

}  // namespace spinwire::agent
