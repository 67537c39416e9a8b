// Checks that the control port's counts and lists agree with its handshakes, and that those that
// would give way are the ones that a search of all handshakes finds. Cold.
#include <algorithm>
#include <map>
#include <string>
#include <variant>

#include "base/auditor.h"
#include "control/control_port.h"

namespace spinwire::control {

class PortAuditor : public base::Auditor {
 public:
  explicit PortAuditor(ControlPort& port) : port_(port) {}

  std::string run() {
    for (const Handshake& h : port_.handshakes_) {
      set_place("handshake " + std::to_string(h.id.index) + ": ");
      check(h);
    }
    set_place({});
    check_counts();
    if (!ok()) return take_fault();
    if (std::string fault = port_.eviction_order_.audit(); !fault.empty())
      return "the eviction order: " + fault;
    check_victims();
    return take_fault();
  }

 private:
  void check(const Handshake& h) {
    const auto member = port_.eviction_order_.find(h.id.index);
    expect(member.has_value() == h.inbound, "only inbound ones are in the eviction order");
    if (!h.inbound) return;
    ++inbound_;
    ++counts_[h.source];
    if (h.is_authenticated) ++proved_;
    if (h.held_for != HeldFor::nothing) ++held_;
    if (h.held_for == HeldFor::connection) ++held_for_connections_;
    const auto listed = std::count(port_.held_.begin(), port_.held_.end(), h.id.index);
    expect(listed == (h.held_for != HeldFor::nothing ? 1 : 0),
           "it is listed {} times among those that wait for room", listed);
    if (!member) return;
    expect(member->source == h.source && h.source == h.peer().source(),
           "it counts for another source than its peer's");
    expect(member->group == ControlPort::group_of(h), "it is in another group than its own");
    expect(member->since == h.waits_since, "it waits since {}, in the order since {}",
           h.waits_since, member->since);
  }

  void check_counts() {
    expect(inbound_ == port_.inbound_, "{} are inbound, counted {}", inbound_, port_.inbound_);
    expect(inbound_ == port_.eviction_order_.size(), "{} are inbound, {} in the eviction order",
           inbound_, port_.eviction_order_.size());
    expect(port_.handshakes_.size() == port_.inbound_ + port_.outbound_,
           "there are {}, counted {} inbound and {} outbound", port_.handshakes_.size(),
           port_.inbound_, port_.outbound_);
    expect(proved_ == port_.proved_, "{} peers have proved a key, counted {}", proved_,
           port_.proved_);
    expect(held_ == port_.held_.size(), "{} wait for room, {} listed", held_, port_.held_.size());
    expect(held_for_connections_ == port_.held_for_connections_,
           "{} wait for a connection, counted {}", held_for_connections_,
           port_.held_for_connections_);
  }

  // ---- which of them give way, as handshake_eviction.cc says ----

  void check_victims() {
    const std::uint32_t limit = port_.inbound_limit();
    const bool many_wait = held_for_connections_ > limit / 2;
    const auto search = [&](bool proved) {
      return search_silent(limit, [&](const Handshake& h) {
        if (h.is_authenticated != proved) return false;
        return h.held_for != HeldFor::connection || many_wait || is_heavy(h, limit);
      });
    };
    const Handshake* victim = search(false);
    const bool many_are_proved = proved_ > limit - std::max(limit / 4, 1u);
    if (victim == nullptr && many_are_proved) victim = search(true);
    compare("new peer", port_.find_victim(), victim);

    const auto is_connection = [](const Handshake& h) {
      return std::holds_alternative<Accept>(h.dialogue) ||
             std::holds_alternative<CmAccept>(h.dialogue);
    };
    compare("new half-open connection", port_.find_half_open_victim(),
            search_silent(port_.options_.half_open, is_connection));
  }

  [[nodiscard]] bool is_heavy(const Handshake& h, std::uint32_t limit) const {
    return counts_.at(h.source) > limit / 4;
  }
  [[nodiscard]] bool has_had_its_time(const Handshake& h, std::uint32_t limit) const {
    return port_.heard_time_ - h.waits_since >= port_.time_of_source(is_heavy(h, limit));
  }
  template <typename IsEligible>
  [[nodiscard]] const Handshake* search_silent(std::uint32_t limit, IsEligible&& is_eligible) {
    const Handshake* found = nullptr;
    for (const Handshake& h : port_.handshakes_) {
      if (!h.inbound || !is_eligible(h) || !ControlPort::may_give_way(h)) continue;
      if (!is_heavy(h, limit) && !has_had_its_time(h, limit)) continue;
      if (found == nullptr || goes_before(h, *found)) found = &h;
    }
    return found != nullptr && has_had_its_time(*found, limit) ? found : nullptr;
  }
  [[nodiscard]] bool goes_before(const Handshake& a, const Handshake& b) const {
    const std::uint32_t of_a = counts_.at(a.source), of_b = counts_.at(b.source);
    return of_a != of_b ? of_a > of_b : a.waits_since < b.waits_since;
  }
  /// Of those that are equal in every respect of the rules, each may give way.
  void compare(const char* what, const Handshake* chosen, const Handshake* found) {
    if (!expect((chosen != nullptr) == (found != nullptr),
                "for a {} one gives way, and a search of all finds none, or the reverse", what))
      return;
    if (chosen == nullptr) return;
    expect(!goes_before(*chosen, *found) && !goes_before(*found, *chosen) &&
               chosen->is_authenticated == found->is_authenticated,
           "for a {} handshake {} gives way, a search of all finds {}", what, chosen->id.index,
           found->id.index);
  }

  ControlPort& port_;
  std::map<Source, std::uint32_t> counts_;
  std::uint32_t inbound_ = 0, proved_ = 0, held_ = 0, held_for_connections_ = 0;
};

Result<void> ControlPort::audit() noexcept {
  return base::run_audit("audit the control port", [this] { return PortAuditor(*this).run(); });
}

}  // namespace spinwire::control
