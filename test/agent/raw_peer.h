// A peer without an engine: a queue pair of the embedded device, connected out-of-band. The test
// decides every byte that it sends. One thread.
#pragma once

#include <infiniband/verbs.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "softverbs/rc_link.h"
#include "spinwire/clock.h"
#include "spinwire/endpoint.h"
#include "wire/credit_word.h"
#include "wire/message_header.h"
#include "wire/rendezvous_messages.h"

namespace raw_peer {

namespace wire = spinwire::wire;
using spinwire::Endpoint;

using Bytes = std::vector<std::byte>;

/// A message as it is on the wire.
inline Bytes message(const wire::MessageHeader& header, std::span<const std::byte> body = {}) {
  Bytes bytes(wire::kMessageHeaderBytes);
  wire::put(wire::encode(header), bytes.data());
  bytes.insert(bytes.end(), body.begin(), body.end());
  return bytes;
}
/// A message whose length field is right.
inline Bytes message(wire::MessageKind kind, std::span<const std::byte> body = {},
                     std::uint8_t flags = 0, std::uint16_t granted = 0) {
  return message({kind, flags, granted, static_cast<std::uint32_t>(body.size())}, body);
}

/// How a message is sent.
struct How {
  ibv_wr_opcode opcode = IBV_WR_SEND;
  std::uint32_t immediate = 0;
  std::uint32_t invalidate = 0;
  std::uint64_t address = 0;  ///< of a WRITE
  std::uint32_t rkey = 0;
};

/// A message from the engine.
struct Heard {
  wire::MessageHeader header{};
  Bytes body;
  bool invalidates = false;
  std::uint32_t invalidated = 0;
};

class Peer {
 public:
  static constexpr std::uint32_t kReceives = 16;
  static constexpr std::size_t kSlot = 8192;         ///< for one message, either way
  static constexpr std::uint32_t kSlots = 64;        ///< for messages to the engine
  static constexpr std::size_t kOffered = 1u << 21;  ///< start of the memory to be pulled
  static constexpr std::size_t kMemory = 2 * kOffered;

  explicit Peer(const spinwire::Clock& clock = spinwire::Clock::real()) : node_(options(clock)) {}

  /// Makes a new queue pair, which replaces the last. Returns the endpoint for the engine.
  Endpoint open() {
    close();
    qp_ = node_.make_qp();
    softverbs_test::must(node_.init(qp_) == 0, "INIT");
    for (std::uint32_t i = 0; i < kReceives; ++i) post_receive(i);
    granted_ = kReceives;
    outstanding_ = 0;
    sent_ = 0;
    dead_ = false;
    told_ = 0;
    heard.clear();
    cell() = 0;
    const softverbs_test::Endpoint mine = node_.endpoint(qp_);
    Endpoint e;
    std::copy_n(mine.gid.raw, e.gid.size(), e.gid.begin());
    e.gid_type = spinwire::GidType::embedded;
    e.qp_num = mine.qpn;
    e.psn = mine.psn;
    e.mtu = 4096;
    e.max_message = 1u << 30;
    e.eager_bytes = kSlot - wire::kMessageHeaderBytes;
    e.credits = kReceives;
    e.incarnation = 1;
    e.credit_cell_address = node_.address(0);
    e.credit_cell_rkey = node_.mr->rkey;
    e.credit_cell_token = kToken;
    e.peer_timeout_ms = 3600000;
    e.max_rd_atomic = 1;
    e.application_fields = true;
    return e;
  }
  /// Connects to the engine's endpoint.
  void join(const Endpoint& engine) {
    engine_ = engine;
    softverbs_test::Endpoint to{};
    std::copy(engine.gid.begin(), engine.gid.end(), to.gid.raw);
    to.qpn = engine.qp_num;
    to.psn = engine.psn;
    softverbs_test::must(node_.rtr(qp_, to) == 0, "RTR");
    softverbs_test::must(node_.rts(qp_) == 0, "RTS");
  }
  /// Destroys the queue pair without a goodbye.
  void close() {
    if (qp_ == nullptr) return;
    while (spinwire::softverbs::destroy_qp(qp_) == EBUSY) control();
    std::erase(node_.qps, qp_);
    qp_ = nullptr;
  }
  void fail() {
    if (qp_ != nullptr) node_.fail(qp_);
  }

  /// Posts the bytes unchanged. Returns false if the queue pair is full.
  bool send(std::span<const std::byte> bytes, const How& how = {}) {
    if (qp_ == nullptr || outstanding_ >= kSlots || bytes.size() > kSlot) return false;
    const std::size_t at = kOut + sent_ % kSlots * kSlot;
    std::copy(bytes.begin(), bytes.end(), node_.bytes(at, bytes.size()).begin());
    softverbs_test::Send s(sent_, node_.sge(at, static_cast<std::uint32_t>(bytes.size())),
                           how.opcode);
    if (bytes.empty()) s.wr.num_sge = 0;
    if (how.opcode == IBV_WR_SEND_WITH_INV) {
      s.wr.invalidate_rkey = how.invalidate;
    } else {
      s.wr.imm_data = how.immediate;
    }
    s.to(how.address, how.rkey);
    if (s.post(qp_) != 0) return false;
    ++sent_;
    ++outstanding_;
    return true;
  }
  bool send(wire::MessageKind kind, std::span<const std::byte> body = {}, const How& how = {}) {
    return send(message(kind, body), how);
  }
  /// Writes a word into the engine's credit cell.
  bool write_cell(std::uint64_t word) {
    return send(std::as_bytes(std::span(&word, 1)),
                {IBV_WR_RDMA_WRITE, 0, 0, engine_.credit_cell_address, engine_.credit_cell_rkey});
  }
  bool write_granted(std::uint32_t granted) {
    return write_cell(
        wire::encode(wire::CreditWord{granted, ++sequence_}, engine_.credit_cell_token));
  }
  /// Grants credit for `more` messages, for which there are receives while the peer is polled.
  bool grant(std::uint32_t more) { return write_granted(granted_ += more); }

  /// Takes completions, up to a batch.
  void poll() {
    ibv_wc wc[16];
    const int n = ibv_poll_cq(node_.cq, 16, wc);
    for (int i = 0; i < n; ++i) take(wc[i]);
  }
  void control() const { spinwire::softverbs::control_device(node_.context); }

  /// For lines that the device would not write.
  [[nodiscard]] spinwire::softverbs::Qp& queue_pair() const {
    return *static_cast<spinwire::softverbs::Qp*>(qp_);
  }
  /// Whether the queue pair has failed.
  [[nodiscard]] bool dead() const { return dead_; }
  [[nodiscard]] bool idle() const { return outstanding_ == 0; }
  [[nodiscard]] const Endpoint& engine() const { return engine_; }
  /// The total credit that the engine has granted, in its messages or in the cell here.
  [[nodiscard]] std::uint32_t granted() {
    return std::max({engine_.credits, told_, wire::decode_credit_word(cell()).granted});
  }
  /// Memory for rendezvous offers.
  [[nodiscard]] std::span<std::byte> offered(std::size_t size) {
    return node_.bytes(kOffered, size);
  }
  [[nodiscard]] std::uint32_t rkey() const { return node_.mr->rkey; }
  [[nodiscard]] wire::RendezvousOffer offer(std::uint32_t length, std::uint32_t id) const {
    return {node_.address(kOffered), length, rkey(), id, false};
  }
  /// The same, by the local key of the memory.
  [[nodiscard]] wire::LocalOffer local_offer(std::uint32_t length, std::uint32_t id) const {
    return {node_.address(kOffered), length, node_.mr->lkey, id, 0, false};
  }
  [[nodiscard]] softverbs_test::Node& node() { return node_; }

  std::vector<Heard> heard;  ///< since open()

 private:
  static constexpr std::uint32_t kToken = 0x51de;
  static constexpr std::size_t kIn = 4096;
  static constexpr std::size_t kOut = kIn + kReceives * kSlot;
  static_assert(kOut + kSlots * kSlot <= kOffered);

  static softverbs_test::NodeOptions options(const spinwire::Clock& clock) {
    softverbs_test::NodeOptions o;
    o.srq_depth = 0;
    o.recv_depth = kReceives;
    o.send_depth = kSlots;
    o.memory = kMemory;
    o.clock = clock;
    return o;
  }
  std::uint64_t& cell() { return *reinterpret_cast<std::uint64_t*>(node_.memory.data()); }
  void post_receive(std::uint64_t slot) {
    (void)node_.post_recv(slot, kIn + slot * kSlot, kSlot, qp_);
  }
  void take(const ibv_wc& wc) {
    if (qp_ == nullptr || wc.qp_num != qp_->qp_num) return;  // of an earlier queue pair
    if (wc.status != IBV_WC_SUCCESS) dead_ = true;

    if (wc.status != IBV_WC_SUCCESS) return;
    if ((wc.opcode & IBV_WC_RECV) == 0) {
      --outstanding_;
      return;
    }
    if (wc.opcode == IBV_WC_RECV && wc.byte_len >= wire::kMessageHeaderBytes) record_message(wc);
    post_receive(wc.wr_id);
  }
  void record_message(const ibv_wc& wc) {
    const auto bytes = node_.bytes(kIn + wc.wr_id * kSlot, wc.byte_len);
    Heard h;
    std::memcpy(&h.header, bytes.data(), sizeof h.header);
    h.body.assign(bytes.begin() + wire::kMessageHeaderBytes, bytes.end());
    told_ = std::max<std::uint32_t>(told_, h.header.granted);  // too few messages to wrap
    h.invalidates = (wc.wc_flags & IBV_WC_WITH_INV) != 0;
    h.invalidated = h.invalidates ? wc.invalidated_rkey : 0;
    heard.push_back(std::move(h));
  }

  softverbs_test::Node node_;
  ibv_qp* qp_ = nullptr;
  Endpoint engine_;
  std::uint32_t granted_ = 0;  ///< to the engine
  std::uint8_t sequence_ = 0;
  std::uint32_t told_ = 0;  ///< credit granted by the engine
  std::uint64_t sent_ = 0;
  std::uint32_t outstanding_ = 0;
  bool dead_ = false;
};

}  // namespace raw_peer
