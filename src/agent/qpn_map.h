// Agents by the number of their queue pair. Hot.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <utility>

namespace spinwire::agent {

struct Agent;

/// Maps a queue-pair number to its agent: two loads, no hashing. Pages are allocated at connect
/// time. A page that becomes empty is kept for the next one or freed: devices number their queue
/// pairs on and on, so pages would otherwise add up while connections come and go.
class QpnMap {
 public:
  [[nodiscard]] Agent* find(std::uint32_t qpn) const noexcept {
    const Page* page = pages_[(qpn >> kPageBits) & (kPages - 1)].get();
    return page != nullptr ? page->agents[qpn & (kPageSize - 1)] : nullptr;
  }
  /// May throw std::bad_alloc. Set-up.
  void set(std::uint32_t qpn, Agent* agent) {
    auto& page = pages_[(qpn >> kPageBits) & (kPages - 1)];
    auto& spare = pages_[kPages];
    if (page == nullptr) page = spare != nullptr ? std::move(spare) : std::make_unique<Page>();
    Agent*& entry = page->agents[qpn & (kPageSize - 1)];
    if (entry == nullptr) ++page->used;
    entry = agent;
  }
  void clear(std::uint32_t qpn) noexcept {
    auto& page = pages_[(qpn >> kPageBits) & (kPages - 1)];
    if (page == nullptr) return;
    Agent*& entry = page->agents[qpn & (kPageSize - 1)];
    if (entry == nullptr) return;
    entry = nullptr;
    if (--page->used != 0) return;
    auto& spare = pages_[kPages];
    if (spare == nullptr) {
      spare = std::move(page);
    } else {
      page.reset();
    }
  }
  /// Pages in memory, with the spare one. For tests.
  [[nodiscard]] std::uint32_t pages() const noexcept {
    std::uint32_t count = 0;
    for (std::uint32_t i = 0; i <= kPages; ++i) count += pages_[i] != nullptr ? 1 : 0;
    return count;
  }

 private:
  static constexpr unsigned kPageBits = 10;
  static constexpr std::uint32_t kPageSize = 1u << kPageBits;
  static constexpr std::uint32_t kPages = 1u << (24 - kPageBits);
  struct Page {
    std::array<Agent*, kPageSize> agents{};
    std::uint32_t used = 0;  ///< entries that are not null
  };
  /// The last one is a spare page, or null.
  std::unique_ptr<std::unique_ptr<Page>[]> pages_ =
      std::make_unique<std::unique_ptr<Page>[]>(kPages + 1);
};

}  // namespace spinwire::agent
