// The device's functions for direct datagrams. Hot, but for release_batches().
#include "softverbs/ud/ud_direct.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "softverbs/lane/lane_data.h"
#include "softverbs/queues.h"
#include "softverbs/ud/ud_datagram.h"

namespace spinwire::softverbs {

static_assert(kDirectHeader + kDirectPayload == kLinePayload);

namespace {

/// Position of the lane's serial in DirectBatch::source, above the number of the sender's queue
/// pair.
constexpr unsigned kSerialShift = 24;

DirectSender* sender(ibv_qp* base) noexcept { return static_cast<Qp*>(base); }

DirectLane* lane(ibv_ah* base) noexcept {
  const Ah& ah = *static_cast<const Ah*>(base);
  return ah.plain && ah.peer->context->faults == nullptr ? &ah.peer->out : nullptr;
}

void open_group(ibv_ah* base, Line& line, std::uint64_t position, std::uint64_t word) noexcept {
  begin_group(*static_cast<const Ah*>(base)->peer, line, position, word);
}

void complete_group(ibv_ah* base) noexcept { publish_group(*static_cast<const Ah*>(base)->peer); }

void wake(ibv_ah* base) noexcept { ring_doorbell(*static_cast<const Ah*>(base)->peer); }

void publish(ibv_qp* base) noexcept { publish_held(context_of(base->context)); }

/// Renews DirectLane::direct_limit; false if the lane cannot take a direct datagram now.
bool open_limit(const DirectEnd& by, const DatagramAddress& to) noexcept {
  Peer& peer = *static_cast<const Ah*>(to.ah)->peer;
  return to.lane == &peer.out && by.sender->sends_at_once && open_direct_limit(peer);
}

Sent send_checked(const DirectEnd& by, const DatagramAddress& to, std::uint64_t low,
                  std::uint64_t high, const std::byte* payload, std::uint64_t length) noexcept {
  return open_limit(by, to) ? send_direct(by, to, low, high, payload, length) : Sent::refused;
}

/// Whether the lane takes a line, and has room for so many bytes beside the lines.
inline bool has_direct_room(const DirectEnd& by, const OutLane& out, std::uint64_t bytes) noexcept {
  return out.tail < out.direct_limit && by.sender->sends_at_once &&
         out.data_next + bytes <= out.data_bound;
}
[[gnu::cold, gnu::noinline]] bool make_direct_room(const DirectEnd& by, const DatagramAddress& to,
                                                   std::uint64_t bytes) noexcept {
  OutLane& out = *static_cast<OutLane*>(to.lane);
  const bool within = out.tail < out.direct_limit && by.sender->sends_at_once;
  if (within && make_data_room(out, static_cast<std::uint32_t>(bytes), Acks::known)) return true;
  return open_limit(by, to) && has_data_room(out, static_cast<std::uint32_t>(bytes), Acks::all);
}

/// Writes a datagram's bytes beside its line, and queues the line. `short_one`: a payload of up to
/// base::kLongestLine bytes, for which no function is called.
template <bool short_one>
[[gnu::always_inline]] inline Sent write_beside(const DirectEnd& by, const DatagramAddress& to,
                                                std::uint64_t low, std::uint64_t high,
                                                const std::byte* payload,
                                                std::uint64_t length) noexcept {
  OutLane& out = *static_cast<OutLane*>(to.lane);
  std::byte* const at = next_in_data(out);
  std::memcpy(at, &low, sizeof low);
  std::memcpy(at + sizeof low, &high, sizeof high);
  if constexpr (short_one) {
    base::copy_line(at + kDirectHeader, payload, length);
  } else {
    std::memcpy(at + kDirectHeader, payload, length);
  }
  const std::uint64_t bytes = kDirectHeader + length;
  const std::uint64_t position = out.tail;
  Line& line = out.lines[position % kLaneLines];
  (void)place_in_data(out, line, position, static_cast<std::uint32_t>(bytes));
  std::memcpy(line.payload, &low, sizeof low);
  std::memcpy(line.payload + sizeof low, &high, sizeof high);
  line.set_trailer(bytes, out.ack_on_top, to.qkey);
  out.tail = position + 1;
  const std::uint64_t constant = by.sender->datagram_word | to.qp_num;
  return queue_line(out, *by.sender->round, line, position, lane_mark(position) << 56 | constant,
                    [&to]() -> Peer& { return *static_cast<const Ah*>(to.ah)->peer; });
}

/// What send_long() does with a payload that is longer, or finds no room at first.
[[gnu::noinline]] Sent send_any_length(const DirectEnd& by, const DatagramAddress& to,
                                       std::uint64_t low, std::uint64_t high,
                                       const std::byte* payload, std::uint64_t length) noexcept {
  const std::uint64_t bytes = kDirectHeader + length;
  if (bytes > kLongestDirect) [[unlikely]]
    return Sent::refused;
  const OutLane& out = *static_cast<const OutLane*>(to.lane);
  if (!has_direct_room(by, out, bytes) && !make_direct_room(by, to, bytes)) [[unlikely]]
    return Sent::refused;
  return write_beside<false>(by, to, low, high, payload, length);
}

Sent send_long(const DirectEnd& by, const DatagramAddress& to, std::uint64_t low,
               std::uint64_t high, const std::byte* payload, std::uint64_t length) noexcept {
  const OutLane& out = *static_cast<const OutLane*>(to.lane);
  if (length > base::kLongestLine || !has_direct_room(by, out, kDirectHeader + length))
    return send_any_length(by, to, low, high, payload, length);
  return write_beside<true>(by, to, low, high, payload, length);
}

void receive_batches(ibv_qp* base, DirectBatches* batches) noexcept {
  Qp& qp = *static_cast<Qp*>(base);
  if (batches != nullptr)
    CompletionHead{IBV_WC_RECV, qp.qp_num, 0}.fill(batches->completion, batches->wr_id, 0);
  if (std::exchange(qp.direct, batches) != batches) forget_batches(context_of(base->context), qp);
}

void write_route(const DirectBatch& batch, std::uint32_t length, std::byte* to) noexcept {
  const ibv_grh grh = route_header(*static_cast<const InLane*>(batch.lane), length);
  std::memcpy(to, &grh, sizeof grh);
}

}  // namespace

const DirectDatagrams& direct_datagrams() noexcept {
  static constexpr DirectDatagrams calls{sender,          lane,           send_checked, send_long,
                                         open_group,      complete_group, wake,         publish,
                                         receive_batches, write_route};
  return calls;
}

DirectOutcome report_batch(InLane& lane, const Qp& qp, Cq& cq, std::uint64_t word,
                           std::uint32_t limit) noexcept {
  DirectBatches& batches = *qp.direct;
  DirectBatch batch;
  batch.first = lane.next;
  batch.limit = std::min(lane.next + limit, lane.end);
  batch.data = lane.data;
  batch.word = word;
  batch.source = lane.serial << kSerialShift | word_psn(word);
  batch.lane = &lane;
  batch.qkey = qp.attr.qkey;
  std::uint64_t length = 0;
  // Without room in the caller's array no completion can report the batch.
  if (cq.room == 0 || batch.bytes(*lane.next, length, batches.longest) == nullptr) [[unlikely]]
    return DirectOutcome::none;
  if (batches.count == DirectBatches::kMost) [[unlikely]]
    return DirectOutcome::full;
  lane.batch = batch;
  batches.batches[batches.count++] = &lane.batch;
  if (batches.count == 1) *completion_slot(cq) = batches.completion;
  lane.batch_reported = true;
  lane.batch_cq = &cq;
  lane.batch_qp = &qp;
  return DirectOutcome::reported;
}

void release_batches(Context& c, const Qp& qp) noexcept {
  if (qp.direct == nullptr) return;
  for (const auto& lane : c.lanes) {
    if (lane != nullptr && lane->batch_reported && lane->batch_qp == &qp)
      lane->batch_reported = false;
  }
}

void forget_batches(Context& c, const Qp& qp) noexcept {
  if (qp.qp_type != IBV_QPT_UD) return;
  for (const auto& lane : c.lanes) {
    if (lane != nullptr && lane->batch_qp == &qp) lane->batch_cq = nullptr;
  }
}

}  // namespace spinwire::softverbs
