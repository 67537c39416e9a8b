#include "control/eviction_order.h"

#include <algorithm>
#include <utility>

#include "base/auditor.h"

namespace spinwire::control {

EvictionOrder::EvictionOrder(std::uint32_t names, std::uint32_t most)
    : at_(names, members_.end()),
      sources_(most),
      order_(most),
      with_more_(std::size_t{most} + 1),
      oldest_(kGroups, base::MinTree(most)) {
  spare_.reserve(most);
  for (std::uint32_t i = 0; i < most; ++i) {
    order_[i] = sources_[i].position = i;
    spare_.push_back(members_.extract(members_.emplace().first));
  }
}

void EvictionOrder::add(std::uint32_t name, const Source& source, HandshakeGroup group,
                        std::uint64_t since) {
  const auto [slot, is_new] = slots_.try_emplace(source, 0);
  if (is_new) {
    slot->second = order_[with_more_[0]];
    sources_[slot->second].slot = slot;
  }
  count_up(slot->second);
  Members::node_type node = std::move(spare_.back());
  spare_.pop_back();
  node.value() = {slot->second, index(group), since, name};
  insert(std::move(node));
}

void EvictionOrder::move(std::uint32_t name, HandshakeGroup group, std::uint64_t since) noexcept {
  const Place before = *at_[name];
  if (before.group == index(group) && before.since == since) return;
  Members::node_type node = extract(name);
  node.value().group = index(group);
  node.value().since = since;
  insert(std::move(node));
}

void EvictionOrder::remove(std::uint32_t name) noexcept {
  const std::uint32_t source = at_[name]->source;
  spare_.push_back(extract(name));
  at_[name] = members_.end();
  count_down(source);
  if (sources_[source].count == 0) slots_.erase(sources_[source].slot);
}

std::optional<EvictionOrder::Member> EvictionOrder::find(std::uint32_t name) const noexcept {
  if (at_[name] == members_.end()) return std::nullopt;
  const Place& place = *at_[name];
  return Member{sources_[place.source].slot->first, group(place.group), place.since};
}

/// Of a group that has one since `latest` or longer.
EvictionOrder::Found EvictionOrder::first_of(std::uint32_t group,
                                             std::uint64_t latest) const noexcept {
  const base::MinTree& oldest = oldest_[group];
  const std::uint32_t begin = oldest.first_at_most(latest);
  const std::uint32_t count = sources_[order_[begin]].count;
  // The sources with an equal count end where those with one less begin.
  const std::uint32_t source = order_[oldest.least_of(begin, with_more_[count - 1])];
  const Place& place = *members_.lower_bound({source, group, 0, 0});
  return {place.name, count, place.since};
}

std::uint64_t EvictionOrder::oldest_in(std::uint32_t source, std::uint32_t group) const noexcept {
  const auto first = members_.lower_bound({source, group, 0, 0});
  const bool is_there = first != members_.end() && first->source == source && first->group == group;
  return is_there ? first->since : base::MinTree::kNone;
}

// ---- members ----

void EvictionOrder::insert(Members::node_type&& node) noexcept {
  const Place place = node.value();
  at_[place.name] = members_.insert(std::move(node)).position;
  update_oldest(place.source, place.group);
}

EvictionOrder::Members::node_type EvictionOrder::extract(std::uint32_t name) noexcept {
  Members::node_type node = members_.extract(at_[name]);
  update_oldest(node.value().source, node.value().group);
  return node;
}

void EvictionOrder::update_oldest(std::uint32_t source, std::uint32_t group) noexcept {
  oldest_[group].set(sources_[source].position, oldest_in(source, group));
}

// ---- positions ----

void EvictionOrder::count_up(std::uint32_t source) noexcept {
  SourceRecord& s = sources_[source];
  swap_positions(s.position, with_more_[s.count]++);  // the first with an equal count
  ++s.count;
}

void EvictionOrder::count_down(std::uint32_t source) noexcept {
  SourceRecord& s = sources_[source];
  --s.count;
  swap_positions(s.position, --with_more_[s.count]);  // the last with an equal count
}

void EvictionOrder::swap_positions(std::uint32_t a, std::uint32_t b) noexcept {
  if (a == b) return;
  std::swap(order_[a], order_[b]);
  sources_[order_[a]].position = a;
  sources_[order_[b]].position = b;
  for (base::MinTree& oldest : oldest_) {
    const std::uint64_t of_a = oldest.at(a), of_b = oldest.at(b);
    if (of_a == of_b) continue;
    oldest.set(a, of_b);
    oldest.set(b, of_a);
  }
}

// ---- audit ----

std::string EvictionOrder::audit() const {
  base::Auditor auditor;
  std::vector<std::uint32_t> counts(sources_.size());
  for (const Place& place : members_) {
    ++counts[place.source];
    auditor.expect(&*at_[place.name] == &place, "handshake {} is found at another place",
                   place.name);
  }
  const auto named = std::count_if(at_.begin(), at_.end(),
                                   [this](const auto& each) { return each != members_.end(); });
  auditor.expect(static_cast<std::size_t>(named) == members_.size(),
                 "{} handshakes are found, {} are there", named, members_.size());
  auditor.expect(spare_.size() + members_.size() == sources_.size(),
                 "{} nodes are spare beside {} handshakes of {}", spare_.size(), members_.size(),
                 sources_.size());
  std::size_t live = 0;
  for (std::uint32_t i = 0; i < sources_.size(); ++i) {
    const SourceRecord& s = sources_[i];
    auditor.set_place("source " + std::to_string(i) + ": ");
    auditor.expect(s.count == counts[i], "it counts {} handshakes of {}", s.count, counts[i]);
    auditor.expect(order_[s.position] == i, "another one is at its position {}", s.position);
    for (std::uint32_t group = 0; group < kGroups; ++group) {
      const std::uint64_t listed = oldest_[group].at(s.position), found = oldest_in(i, group);
      auditor.expect(listed == found, "its oldest of group {} waits since {}, listed {}", group,
                     found, listed);
    }
    if (s.count == 0) continue;
    ++live;
    auditor.expect(s.slot->second == i, "its address leads to source {}", s.slot->second);
  }
  auditor.set_place({});
  auditor.expect(slots_.size() == live, "{} addresses lead to {} sources", slots_.size(), live);
  auditor.expect(
      std::is_sorted(order_.begin(), order_.end(),
                     [&](std::uint32_t a, std::uint32_t b) { return counts[a] > counts[b]; }),
      "a source stands behind one that has fewer handshakes");
  std::vector<std::uint32_t> with_equal(with_more_.size());
  for (const std::uint32_t count : counts) ++with_equal[count];
  for (std::size_t count = with_more_.size(), more = 0; count-- != 0; more += with_equal[count])
    auditor.expect(more == with_more_[count], "{} sources have more than {}, counted {}", more,
                   count, with_more_[count]);
  for (const base::MinTree& oldest : oldest_)
    auditor.expect(oldest.is_consistent(), "a tree has a wrong minimum");
  return auditor.take_fault();
}

}  // namespace spinwire::control
