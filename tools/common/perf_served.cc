#include "common/perf_served.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace spinwire::tools {
namespace {

/// Time limit of a client's next step in the dialogue.
constexpr Nanoseconds kTimeout = std::chrono::seconds(5);

}  // namespace

ServedClient::ServedClient(Engine& engine, Connection client, PerfNews& news)
    : engine_(engine),
      clock_(engine.clock()),
      news_(news),
      client_(client),
      step_deadline_(clock_, kTimeout),
      peer_(client.peer()) {
  ConnectionHandlers handlers;
  handlers.on_message = [this](Connection, Message& m) { on_message(m); };
  handlers.on_closed = [this](Connection, const Error& e) { on_closed(e); };
  (void)client_.set_handlers(handlers);
}

void ServedClient::cold_turn() {
  if (!said_.empty()) say({});
  if (state_ == State::tidying) {
    tidy();
  } else if ((state_ == State::waiting || state_ == State::leaving) && step_deadline_.passed()) {
    break_off("the client stopped responding");
    step_deadline_ = Deadline(clock_, kTimeout);
  }
}

void ServedClient::check_progress() {
  if (state_ != State::running || (expected_ == 0 && !pong_)) return;
  const std::uint64_t seen = received_ + answers_posted_;
  if (seen != seen_) {
    seen_ = seen;
    step_deadline_ = Deadline(clock_, kProgressTimeout);
  } else if (step_deadline_.passed()) {
    break_off("the client stopped sending");
  }
}

// ---- arrivals: hot ----------------------------------------------------------------------------

void ServedClient::on_message(Message& message) {
  if (state_ == State::running && received_ < expected_) [[likely]]
    return on_data(message);
  PerfRequest request;
  PerfFinish finish;
  if (state_ == State::waiting && perf_decode(message.bytes(), request)) {
    on_request(request);
  } else if (state_ == State::running && perf_decode(message.bytes(), finish)) {
    on_finish();
  } else {
    break_off(
        fmt::format("a message of {} bytes that is not part of the dialogue", message.size()));
  }
}

void ServedClient::on_data(Message& message) {
  const std::uint64_t number = received_++;
  bool good = message.size() == request_.size &&
              perf_is_stamped(message.data(), message.size(), number ^ request_.seed);
  // The warm-up checks all bytes; measured messages check only the stamps.
  if (number < request_.warmup && good) {
    good = perf_find_wrong(message.bytes(), request_.seed) == message.size();
  }
  if (!good) [[unlikely]] {
    if (wrong_++ == 0) first_wrong_ = number;
  }
  if (echo_) reply(message.take());
}

void ServedClient::reply(Buffer message) {
  Status status = Status::would_block;
  if (pending_count_ == 0) [[likely]]
    status = client_.send(message);
  if (status == Status::ok) [[likely]]
    return;
  if (status != Status::would_block || pending_count_ == pending_.size()) {
    return break_off("the client sent more than its window, or left");
  }
  pending_[(pending_first_ + pending_count_++) % pending_.size()] = std::move(message);
}

/// Answers the client's next write once all its bytes have arrived.
void ServedClient::look_for_write() {
  const std::uint64_t value = answers_posted_ ^ request_.seed;
  if (state_ != State::running || answers_posted_ == request_.total ||
      answers_posted_ - answers_written_ >= 2 ||
      !perf_is_stamped(memory_.data(), request_.size, value)) {
    return;
  }
  const std::uint64_t place = (answers_posted_ & 1) * perf_stride(request_.size);
  perf_stamp(answers_.data() + place, request_.size, value);
  const auto done = [this](const Completion&) { ++answers_written_; };
  const Status status =
      client_.write(answers_.slice(place, request_.size), request_.reply, done, Post::now);
  if (status == Status::ok) {
    ++answers_posted_;
  } else if (status != Status::would_block && status != Status::not_connected) {
    break_off(fmt::format("the answer was not accepted: {}", to_string(status)));
  }
}

void ServedClient::send_pending() {
  while (pending_count_ != 0 && client_.send(pending_[pending_first_]) == Status::ok) {
    pending_[pending_first_].reset();
    pending_first_ = (pending_first_ + 1) % pending_.size();
    --pending_count_;
  }
}

// ---- the dialogue -----------------------------------------------------------------------------

void ServedClient::enter(State state) {
  state_ = state;
  step_deadline_ = Deadline(clock_, state == State::running ? kProgressTimeout : kTimeout);
}

void ServedClient::on_request(const PerfRequest& request) {
  PerfOffer offer;
  request_ = request;
  if (!request.valid()) {
    perf_set_text(offer.why, "the request is invalid for this version of spinwire-perf");
  } else if (request.op == PerfOp::send) {
    offer.slots = request.window;
  } else if (!offer_memory(offer) || (request.op == PerfOp::pong && !prepare_writes(offer))) {
    offer.slots = 0;
  }
  pong_ = request.op == PerfOp::pong && offer.slots != 0;
  seen_ = 0;
  received_ = wrong_ = 0;
  expected_ = request.op == PerfOp::send ? request.total : 0;
  echo_ = request.op == PerfOp::send && request.test == PerfTest::lat;
  pending_.clear();
  if (echo_) pending_.resize(request.window);
  pending_first_ = pending_count_ = 0;
  enter(offer.slots != 0 ? State::running : State::leaving);
  if (offer.slots != 0) {
    news_.push_back("measuring for " + peer_);
  } else {
    fault_ = perf_text(offer.why);
  }
  say(perf_encode(offer));
}

bool ServedClient::offer_memory(PerfOffer& offer) {
  // One place for each operation in flight. With too little memory, half as many, each used again.
  for (std::uint32_t slots = request_.window; slots != 0; slots /= 2) {
    memory_ = engine_.allocate(slots * perf_stride(request_.size), Pool::lease);
    if (!memory_) continue;
    offer_slots(slots, offer);
    return offer.slots != 0;
  }
  perf_set_text(offer.why,
                fmt::format("the server has no memory for {} bytes; raise its memory.lease_bytes",
                            request_.size));
  return false;
}

bool ServedClient::prepare_writes(PerfOffer& offer) {
  const std::uint64_t stride = perf_stride(request_.size);
  answers_ = engine_.allocate(2 * stride);
  if (!answers_) {
    perf_set_text(offer.why, fmt::format("the server has no memory for {} bytes; raise its "
                                         "memory.send_bytes",
                                         2 * stride));
    return false;
  }
  perf_fill({answers_.data(), request_.size}, request_.seed);
  perf_fill({answers_.data() + stride, request_.size}, request_.seed);
  answers_posted_ = answers_written_ = 0;
  return true;
}

void ServedClient::offer_slots(std::uint32_t slots, PerfOffer& offer) {
  for (std::uint32_t i = 0; i < slots; ++i) {
    std::byte* at = memory_.data() + i * perf_stride(request_.size);
    if (request_.op == PerfOp::read) {
      perf_stamp(at, request_.size, i ^ request_.seed);
      perf_fill({at, request_.size}, request_.seed);
    } else {
      std::fill_n(at, request_.size, std::byte{0});
      // A value that differs from the awaited stamp, even in a few bytes.
      if (request_.op == PerfOp::pong) perf_stamp(at, request_.size, ~request_.seed);
    }
  }
  const Access access = request_.op == PerfOp::read     ? Access::remote_read
                        : request_.op == PerfOp::atomic ? Access::remote_atomic
                                                        : Access::remote_write;
  auto region = engine_.expose(memory_.slice(), access);
  if (!region) return perf_set_text(offer.why, region.error().message());
  exposed_ = *region;
  slots_ = slots;
  offer.region = *region;
  offer.slots = slots;
}

/// Describes the first place that does not hold how many atomics used it; empty if there is none.
std::string ServedClient::find_wrong_sum() const {
  for (std::uint64_t i = 0; i < slots_; ++i) {
    const std::uint64_t expected = request_.total / slots_ + (i < request_.total % slots_ ? 1 : 0);
    std::uint64_t found = 0;
    std::memcpy(&found, memory_.data() + i * perf_stride(request_.size), sizeof found);
    if (found != expected)
      return fmt::format("place {} holds {} after {} atomics", i, found, expected);
  }
  return {};
}

/// Describes the first fault in the client's data; empty if there is none.
std::string ServedClient::find_fault() const {
  if (wrong_ != 0) {
    return fmt::format("{} of {} messages differ from what was sent, the first is number {}",
                       wrong_, expected_, first_wrong_);
  }
  if (request_.op == PerfOp::atomic) return find_wrong_sum();
  if (request_.op != PerfOp::write && request_.op != PerfOp::pong) return {};
  const std::uint64_t used = std::min<std::uint64_t>(slots_, request_.total);
  for (std::uint64_t i = 0; i < used; ++i) {
    const std::byte* at = memory_.data() + i * perf_stride(request_.size);
    // The last operation that used this place.
    const std::uint64_t last = request_.total - 1 - (request_.total - 1 - i) % slots_;
    if (!perf_is_stamped(at, request_.size, last ^ request_.seed)) {
      return fmt::format("place {} does not hold write {}", i, last);
    }
    const std::size_t wrong = perf_find_wrong({at, request_.size}, request_.seed);
    if (wrong != request_.size) {
      return fmt::format("write {} differs from what was sent at byte {}", last, wrong);
    }
  }
  return {};
}

void ServedClient::on_finish() {
  PerfVerdict verdict;
  fault_ = find_fault();
  verdict.good = fault_.empty() ? 1 : 0;
  perf_set_text(verdict.why, fault_);
  enter(State::leaving);
  say(perf_encode(verdict));
}

/// Sends a message of the dialogue, or the rest of the last one. Keeps it while sending would
/// block.
void ServedClient::say(std::span<const std::byte> message) {
  if (!message.empty()) said_.assign(message.begin(), message.end());
  const Status status = client_.send_copy(said_);
  if (status == Status::would_block || status == Status::no_buffer) return;
  said_.clear();
  if (status == Status::message_too_long) {
    break_off("messages of the dialogue do not fit; raise connections.eager_bytes to 256");
  }
}

void ServedClient::break_off(std::string why) {
  if (fault_.empty()) fault_ = std::move(why);
  enter(State::leaving);
  (void)client_.close();
}

void ServedClient::on_closed(const Error& error) {
  const bool asked = state_ == State::running || state_ == State::leaving;
  if (fault_.empty() && error.status != Status::ok) fault_ = error.message();
  if (fault_.empty() && state_ != State::leaving) fault_ = "the client left before the end";
  const std::string what = asked
                               ? fmt::format("{}: {} {}, {} bytes, window {}, {} operations", peer_,
                                             to_string(request_.test), to_string(request_.op),
                                             request_.size, request_.window, request_.total)
                               : peer_;
  news_.push_back(fmt::format("{}: {}", what, fault_.empty() ? "all data as sent" : fault_));
  said_.clear();
  client_ = {};
  enter(State::tidying);
}

void ServedClient::tidy() {
  if (answers_written_ != answers_posted_) return;
  pong_ = false;
  pending_.clear();
  pending_count_ = 0;
  if (exposed_ && engine_.revoke(exposed_) == Status::would_block) return;
  enter(State::over);
}

}  // namespace spinwire::tools
