// Two contexts of the embedded device, connected by one pair of queue pairs and driven by bare
// verbs.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstdint>

#include "base/shared_memory.h"

namespace spinwire::bench {

/// Creates an RC queue pair with `depth` work requests that completes to `cq`. Its receives come
/// from `srq`, or are its own if `srq` is null. Never returns null: a failure ends the program.
ibv_qp* make_queue_pair(ibv_pd* pd, ibv_cq* cq, ibv_srq* srq, std::uint32_t depth);
/// Takes a new queue pair to RTS, connected to queue pair `qp_num` of the device of `to`.
void connect_queue_pair(ibv_qp* qp, ibv_context* to, std::uint32_t qp_num);

/// One end. Keeps `kSlots` receives posted; sends arriving messages back or counts them.
class VerbsEnd {
 public:
  static constexpr std::uint32_t kSlots = 128;
  static constexpr std::uint32_t kBytes = 32;

  VerbsEnd();
  VerbsEnd(const VerbsEnd&) = delete;
  VerbsEnd& operator=(const VerbsEnd&) = delete;
  ~VerbsEnd();

  void connect(const VerbsEnd& to);
  /// Takes a control step, which opens the peer's shared memory.
  void settle();
  /// Takes up to 32 completions, reposts their receives and sends as many messages with one
  /// doorbell. Returns the number of messages that arrived. Hot.
  std::uint32_t step() noexcept;
  /// Posts `count` messages (at most 32) with one doorbell. Hot.
  void send(std::uint32_t count) noexcept;

 private:
  static constexpr std::uint32_t kBatch = 32;

  void post_receives(std::uint32_t count) noexcept;
  [[nodiscard]] ibv_sge slot(std::uint32_t index) const noexcept;

  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_cq* cq_ = nullptr;
  ibv_srq* srq_ = nullptr;
  ibv_mr* mr_ = nullptr;
  ibv_qp* qp_ = nullptr;
  std::array<ibv_wc, kBatch> completions_{};
  std::array<ibv_send_wr, kBatch> sends_{};
  std::array<ibv_sge, kBatch> send_sges_{};
  std::array<ibv_recv_wr, kBatch> receives_{};
  std::array<ibv_sge, kBatch> receive_sges_{};
  base::SharedMemory memory_;
};

}  // namespace spinwire::bench
