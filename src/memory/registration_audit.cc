// RegistrationTable::audit(): checks that entries, lists and keys agree. Cold.
#include "base/auditor.h"
#include "memory/registration_table.h"

namespace spinwire::memory {

void RegistrationTable::check_entry(base::Auditor& audit, std::uint32_t index) const {
  const Entry& entry = entries_.at(index);
  const bool ended = entry.state == State::ended;
  audit.expect((entry.mr == nullptr) == ended, "registration {} is {} the device", index,
               ended ? "still with" : "not with");
  if (!entry.exposure) {
    // Dropped memory waits for the device without its control words.
    const OwnMemory* const own = entry.own;
    audit.expect(own != nullptr || entry.state != State::live, "registration {} has no owner",
                 index);
    audit.expect(own == nullptr || (own->table == this && own->entry == index &&
                                    own->block.owner == own && own->block.refs != 0),
                 "control words of registered memory {} were overwritten", index);
    audit.expect(own == nullptr || keys_.holds(entry.rkey, index),
                 "registered memory {} is not found by its key {:#x}", index, entry.rkey);
    return;
  }
  audit.expect((entry.held == nullptr) == (ended || entry.of_device), "exposure {} holds {}", index,
               ended ? "a block after its end" : "no block");
  audit.expect(entry.held == nullptr || entry.held->refs != 0,
               "exposure {} holds a block that is free", index);
  audit.expect(keys_.holds(entry.rkey, index), "exposure {} is not found by its key {:#x}", index,
               entry.rkey);
}

void RegistrationTable::check_list(base::Auditor& audit, const List& list, std::uint32_t size,
                                   State state) const {
  const char* const what = state == State::pending ? "pending" : "ended";
  std::uint32_t count = 0;
  const Entry* before = nullptr;
  for (const Entry& entry : list) {
    if (!audit.expect(entry.state == state && entry.links.prev == before && ++count <= size,
                      "the list of {} registrations is broken at {}", what,
                      entries_.index_of(entry)))
      return;
    before = &entry;
  }
  std::uint32_t there = 0;
  for (const Entry& entry : entries_) there += entry.state == state ? 1 : 0;
  audit.expect(count == size && there == count, "{} registrations are {}, {} listed, {} counted",
               there, what, count, size);
}

Result<void> RegistrationTable::audit() const {
  return base::run_audit("audit of the registrations", [&] {
    base::Auditor audit;
    if (pd_ == nullptr) return audit.take_fault();
    for (std::uint32_t i = 0; i < limit() && audit.ok(); ++i) {
      if (entries_.in_use(i)) check_entry(audit, i);
    }
    check_list(audit, pending_, pending_count_, State::pending);
    check_list(audit, ended_, ended_count_, State::ended);
    return audit.take_fault();
  });
}

}  // namespace spinwire::memory
