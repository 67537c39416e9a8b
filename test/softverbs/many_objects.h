// A peer whose messages lie in many objects of shared memory.
#pragma once

#include <cstdint>
#include <vector>

#include "softverbs/memory/remote_access.h"
#include "softverbs/rc_link.h"

namespace softverbs_test {

/// Makes a peer look like one of another process that says of each of its messages, or parts of
/// them, that the bytes lie in an object of their own.
class ManyObjects {
 public:
  ManyObjects(const Node& sender, sv::Peer& peer) : sender_(sender), peer_(peer) {
    peer_.same_process = false;
    peer_.process = &process_;
  }
  ManyObjects(const ManyObjects&) = delete;
  ManyObjects& operator=(const ManyObjects&) = delete;
  ~ManyObjects() {
    for (const Part& part : parts_) {
      region(part.mr).object = part.object;
      sv::dereg_mr(part.mr);
    }
    sv::unmap_objects(peer_);
    peer_.process = nullptr;
    peer_.same_process = true;
  }
  void send(ibv_qp* qp) {
    const ibv_sge message = bytes(0, 2048);
    must(Send(parts_.size() - 1, message).post(qp) == 0, "post");
  }
  /// Bytes of the sender's memory, under a key whose region names one more object.
  ibv_sge bytes(std::uint64_t offset, std::uint32_t length) {
    constexpr std::uint32_t kFirstObject = 1000;
    ibv_mr* const mr =
        sv::reg_mr(sender_.pd, sender_.memory.data(), sender_.memory.size(), Node::kAllAccess);
    must(mr != nullptr, "reg_mr");
    sv::RegionEntry& entry = region(mr);
    const auto id = static_cast<std::uint32_t>(parts_.size());
    parts_.push_back({mr, entry.object});
    sv::ObjectEntry& object = segment().objects[kFirstObject + id];
    const sv::ObjectEntry& true_object = segment().objects[entry.object];
    object.fd = true_object.fd;
    object.size = true_object.size;
    object.inode = true_object.inode;
    object.generation = entry.object_generation;
    entry.object = kFirstObject + id;
    return {sender_.address(offset), length, mr->lkey};
  }

 private:
  struct Part {
    ibv_mr* mr;
    std::uint32_t object;  ///< the true one
  };
  [[nodiscard]] sv::Segment& segment() const { return *sender_.internals().segment; }
  [[nodiscard]] sv::RegionEntry& region(const ibv_mr* mr) const {
    return segment().regions[sv::region_index(mr->lkey)];
  }

  const Node& sender_;
  sv::Peer& peer_;
  sv::PeerProcess process_;
  std::vector<Part> parts_;
};

}  // namespace softverbs_test
