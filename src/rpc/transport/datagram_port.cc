#include "rpc/transport/datagram_port.h"

#include <algorithm>
#include <bit>

#include "agent/receive_slots.h"
#include "base/error.h"
#include "base/random.h"

namespace spinwire::rpc {

namespace {

std::uint32_t random_bits(base::Random& random, unsigned bits) noexcept {
  return static_cast<std::uint32_t>(random.next()) & ((1u << bits) - 1);
}
constexpr std::uint32_t kQueuePairMax = (1u << 24) - 1;

}  // namespace

DatagramPort::DatagramPort(agent::EngineContext& ctx, const DatagramPortOptions& options) noexcept
    : limit_(options.send_depth),
      depth_(options.send_depth),
      mask_(options.send_depth - 1),
      entry_mask_(mask_),
      list_length_(agent::receive_list_length(ctx)),
      receive_depth_(options.receive_depth),
      context_(ctx),
      mtu_(std::min(ctx.device->place().mtu, kLongestDatagram)) {}

Result<std::unique_ptr<DatagramPort>> DatagramPort::open(agent::EngineContext& ctx,
                                                         const DatagramPortOptions& options) {
  std::unique_ptr<DatagramPort> port(new DatagramPort(ctx, options));
  verbs::Device& device = *ctx.device;
  base::Random random(base::random_seed());
  verbs::DatagramOptions asked;
  asked.send_depth = options.send_depth;
  asked.receive_depth = options.receive_depth;
  asked.inline_bytes = device.info().inline_bytes;
  asked.psn = random_bits(random, 24);
  asked.qkey = options.qkey;
  port->inline_ = asked.inline_bytes >= kLineBytes ? unsigned{IBV_SEND_INLINE} : 0u;
  auto qp = device.create_datagram_qp(asked);
  if (!qp) return tl::unexpected(qp.error());
  port->qp_ = *qp;
  if (auto made = port->make_sends(); !made) return tl::unexpected(made.error());
  if (auto made = port->make_receives(); !made) return tl::unexpected(made.error());
  return port;
}

Result<void> DatagramPort::make_sends() {
  if (inline_ != 0) entry_mask_ = std::min(mask_, std::bit_ceil(list_length_) - 1);
  const std::uint32_t count = entry_mask_ + 1;
  entries_ = std::make_unique<Entry[]>(count);
  held_blocks_ = std::make_unique<HeldBlock[]>(depth_);
  lines_block_ = context_.arena->allocate(memory::PoolId::control,
                                          count * kLineBytes + depth_ * sizeof(wire::RpcWords));
  if (lines_block_ == nullptr) return tl::unexpected(base::out_of_memory());
  lines_ = lines_block_->payload;
  headers_ = reinterpret_cast<wire::RpcWords*>(lines_ + count * kLineBytes);
  for (std::uint32_t i = 0; i < count; ++i) {
    Entry& e = entries_[i];
    e = {};
    e.wr.opcode = IBV_WR_SEND;
    e.wr.next = &entries_[(i + 1) & entry_mask_].wr;
    e.wr.num_sge = 1;
    e.wr.send_flags = inline_;
    e.wr.sg_list = e.sges;
    e.sges[0] = {reinterpret_cast<std::uint64_t>(line_of(i)), 0, lines_block_->lkey};
  }
  return {};
}

Result<void> DatagramPort::make_receives() {
  empty_slots_.reserve(receive_depth_);
  receives_.make(receive_depth_, agent::receive_id);
  std::uint32_t there = 0;
  while (there < receive_depth_ && fill(there)) ++there;
  if (there != receive_depth_) {
    return base::fail(
        Status::limit, "open the port of remote calls",
        base::format("the receive pool has blocks for {} of {} receives", there, receive_depth_),
        "raise memory.receive_bytes, or lower rpc.receive_depth");
  }
  if (context_.config.rpc.direct_datagrams == DirectPath::automatic)
    direct_.device = context_.device->provider().direct;
  if (direct_.device == nullptr) return {};
  direct_.qp = qp_;
  direct_.sender = direct_.device->sender(qp_);
  round_ = direct_.sender->round;
  batches_.wr_id = kBatchCompletion;
  // Long ones are kept in the rendezvous pool.
  batches_.longest = context_.config.memory.rendezvous_bytes != 0 ? wire::kBlockDatagramBytes
                                                                  : wire::kPageDatagramBytes;
  (void)renew_spare();
  return {};
}

Block* DatagramPort::renew_spare() noexcept {
  if (spare_ != nullptr) detail::release(spare_);  // the slice that keeps it holds a reference
  spare_ = context_.arena->allocate(memory::PoolId::receive,
                                    wire::rpc_payload(wire::kPageDatagramBytes));
  direct_.device->receive_batches(qp_, spare_ != nullptr ? &batches_ : nullptr);
  return spare_;
}

Block* DatagramPort::take_long_spare() noexcept {
  if (long_spare_ != nullptr) return std::exchange(long_spare_, nullptr);
  constexpr std::size_t kBytes = wire::rpc_payload(wire::kBlockDatagramBytes);
  return context_.arena->allocate(memory::PoolId::rendezvous, kBytes);
}

void DatagramPort::release_long_spare() noexcept {
  if (long_spare_ != nullptr) detail::release(std::exchange(long_spare_, nullptr));
}

std::byte* DatagramPort::copy_to_spare(Block& spare, const verbs::DirectBatch& batch,
                                       const std::byte* bytes,
                                       std::uint32_t length) const noexcept {
  std::byte* const grh = spare.payload + kReceiveOffset;
  direct_.device->write_route(batch, length, grh);
  std::memcpy(grh + kGrhBytes, bytes, std::min(length, mtu_));
  return grh;
}

namespace {
/// Stands in for the lane of a peer that has none. It never has room, so sends go by work requests.
verbs::DirectLane lane_without_room;
}  // namespace

bool DatagramPort::reaches_directly(const verbs::DatagramAddress& to) noexcept {
  return to.lane != &lane_without_room;
}

void DatagramPort::resolve(verbs::DatagramAddress& to) noexcept {
  verbs::DirectLane* const lane = sends_directly() ? direct_.device->lane(to.ah) : nullptr;
  to.lane = lane != nullptr && to.qp_num <= kQueuePairMax ? lane : &lane_without_room;
}

void DatagramPort::post_receives_up_to(std::uint32_t count) noexcept {
  for (count = std::min(count, receives_.size()); receives_posted_ < count; ++receives_posted_)
    give_back(receives_posted_, false);
  post_receives();
}

DatagramPort::~DatagramPort() {
  if (qp_ != nullptr) {
    (void)context_.device->to_error(qp_);
    context_.device->destroy_qp(qp_);
  }
  for (std::uint32_t i = done_; i != sent_; ++i) {
    if (HeldBlock& held = held_blocks_[i & mask_]; held.block != nullptr) release_held(held);
  }
  for (std::uint32_t slot = 0; slot < receives_.size(); ++slot) {
    if (Block* block = receives_.memory(slot); block != nullptr) detail::release(block);
  }
  if (lines_block_ != nullptr) detail::release(lines_block_);
  if (spare_ != nullptr) detail::release(spare_);
  release_long_spare();
}

void DatagramPort::post() noexcept {
  ibv_send_wr* const first = &entries_[posted_ & entry_mask_].wr;
  ibv_send_wr& last = entries_[(sent_ - 1) & entry_mask_].wr;
  ibv_send_wr* const next = std::exchange(last.next, nullptr);
  // Signaled often enough that a full queue empties, and at once when a block is held.
  if (holds_ || sent_ - signaled_ >= depth_ / 4) [[unlikely]] {
    last.send_flags |= IBV_SEND_SIGNALED;
    signaled_ = sent_;
  }
  ibv_send_wr* bad = nullptr;
  const bool taken = !failed_ && ibv_post_send(qp_, first, &bad) == 0;
  last.next = next;
  last.send_flags &= ~unsigned{IBV_SEND_SIGNALED};
  if (std::exchange(holds_, false)) restore_entries();
  if (!taken) [[unlikely]]
    drop_unposted(failed_ ? first : bad);
  posted_ = sent_;
}

/// Restores the prebuilt form of entries that were used for longer datagrams.
void DatagramPort::restore_entries() noexcept {
  for (std::uint32_t i = posted_; i != sent_; ++i) {
    Entry& e = entries_[i & entry_mask_];
    e.sges[0] = {reinterpret_cast<std::uint64_t>(line_of(i)), 0, lines_block_->lkey};
    e.wr.num_sge = 1;
    e.wr.send_flags |= inline_;
  }
}

/// Drops the datagrams that the device did not take, as if the network had lost them.
void DatagramPort::drop_unposted(const ibv_send_wr* bad) noexcept {
  const ibv_send_wr* last = nullptr;
  do {
    last = &entries_[--sent_ & entry_mask_].wr;
    if (HeldBlock& held = held_blocks_[sent_ & mask_]; held.block != nullptr) release_held(held);
    ++send_failures;
  } while (last != bad && sent_ != posted_);
  signaled_ = sent_ - depth_;  // so that the next list ends with a signaled send
}

void DatagramPort::release_held(HeldBlock& held) noexcept {
  if (held.header_in_headroom) held.block->header_in_use = 0;
  detail::release(std::exchange(held.block, nullptr));
  --held_;
}

void DatagramPort::on_sent(const ibv_wc& wc) noexcept {
  if (wc.status != IBV_WC_SUCCESS) [[unlikely]] {
    ++send_failures;
    failed_ = true;
  }
  // Completes all sends up to this one, at most `depth_`.
  const std::uint32_t end = static_cast<std::uint32_t>(wc.wr_id >> 1) + 1;
  if (end - done_ > depth_) [[unlikely]]
    return;
  for (; done_ != end && held_ != 0; ++done_) {
    if (HeldBlock& held = held_blocks_[done_ & mask_]; held.block != nullptr) release_held(held);
  }
  done_ = end;
  limit_ = end + depth_;
}

Block* DatagramPort::block_for_receive() noexcept {
  return context_.arena->allocate(memory::PoolId::receive,
                                  kPayloadOffset - wire::kRpcHeaderBytes + mtu_);
}

bool DatagramPort::fill(std::uint32_t slot) noexcept {
  Block* const block = block_for_receive();
  receives_.memory(slot) = block;
  if (block == nullptr) return false;
  receives_.aim(slot, block->payload + kReceiveOffset, static_cast<std::uint32_t>(kGrhBytes) + mtu_,
                block->lkey);
  return true;
}

void DatagramPort::replace(std::uint32_t slot) noexcept {
  detail::release(receives_.memory(slot));  // the slice that keeps it holds a reference
  if (!fill(slot)) return empty_slots_.push_back(slot);
  give_back(slot, false);
}

void DatagramPort::post_receives() noexcept {
  // Receives that the device does not take wait for the next attempt.
  if (receives_.count() != 0) (void)receives_.chain().post(qp_);
}

void DatagramPort::upkeep() noexcept {
  if (sends_directly() && spare_ == nullptr) (void)renew_spare();
  while (!empty_slots_.empty() && fill(empty_slots_.back())) {
    receives_.add(empty_slots_.back());
    empty_slots_.pop_back();
  }
  post_receives();
  if (failed_ && context_.device->restart_sends(qp_)) failed_ = false;
}

}  // namespace spinwire::rpc
