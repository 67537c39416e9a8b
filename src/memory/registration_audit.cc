// RegistrationTable::audit(): do entries, lists and keys agree? Cold.
#include <fmt/core.h>

#include <string>
#include <utility>

#include "base/error.h"
#include "memory/registration_table.h"

namespace spinwire::memory {

/// What is wrong with an entry in use; empty if nothing.
std::string RegistrationTable::fault_of(std::uint32_t index) const {
  const Entry& entry = entries_.at(index);
  const bool ended = entry.state == State::ended;
  if ((entry.mr == nullptr) != ended)
    return base::format("registration {} is {} the device", index,
                        ended ? "still with" : "not with");
  if (!entry.exposure) {
    // Dropped memory waits for the device without its control words.
    if (entry.own == nullptr && entry.state == State::live)
      return base::format("registration {} is nobody's", index);
    const bool linked =
        entry.own == nullptr || (entry.own->table == this && entry.own->entry == index &&
                                 entry.own->block.owner == entry.own && entry.own->block.refs != 0);
    return linked ? std::string()
                  : base::format("control words of registered memory {} were overwritten", index);
  }
  if ((entry.held == nullptr) != ended)
    return base::format("exposure {} holds {}", index,
                        ended ? "a block after its end" : "no block");
  if (entry.held != nullptr && entry.held->refs == 0)
    return base::format("exposure {} holds a block that is free", index);
  std::uint32_t at = buckets_[bucket_of(entry.rkey)];
  for (std::uint32_t left = limit(); at != index; at = entries_.at(at).chain, --left) {
    if (at >= limit() || left == 0)
      return base::format("exposure {} is not found by its key {:#x}", index, entry.rkey);
  }
  return {};
}

/// Of the list of those in `state`.
std::string RegistrationTable::fault_of(const List& list, State state) const {
  std::uint32_t count = 0;
  for (std::uint32_t at = list.head, before = kNone; at != kNone;
       before = at, at = entries_.at(at).next) {
    if (!entries_.in_use(at) || entries_.at(at).state != state || entries_.at(at).prev != before ||
        ++count > list.size) {
      return base::format("the list of {} registrations is broken at {}",
                          state == State::pending ? "pending" : "ended", at);
    }
  }
  std::uint32_t there = 0;
  for (std::uint32_t i = 0; i < limit(); ++i)
    there += entries_.in_use(i) && entries_.at(i).state == state ? 1 : 0;
  if (count == list.size && there == count) return {};
  return base::format("{} registrations are {}, {} listed, {} counted", there,
                      state == State::pending ? "pending" : "ended", count, list.size);
}

std::string RegistrationTable::find_fault() const {
  for (std::uint32_t i = 0; i < limit(); ++i) {
    if (!entries_.in_use(i)) continue;
    if (std::string fault = fault_of(i); !fault.empty()) return fault;
  }
  std::string fault = fault_of(pending_, State::pending);
  return fault.empty() ? fault_of(ended_, State::ended) : fault;
}

Result<void> RegistrationTable::audit() const {
  return base::no_throw("audit of the registrations", [&]() -> Result<void> {
    if (pd_ == nullptr) return {};
    std::string fault = find_fault();
    if (fault.empty()) return {};
    return base::fail(Status::system, "audit of the registrations", std::move(fault),
                      "memory was overwritten, or the library has a defect");
  });
}

}  // namespace spinwire::memory
