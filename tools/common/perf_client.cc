#include "common/perf_client.h"

#include <fmt/core.h>

#include <algorithm>
#include <random>
#include <utility>

namespace spinwire::tools {
namespace {

/// Time limit of the server's next step in the dialogue.
constexpr Nanoseconds kAnswerTime = std::chrono::seconds(10);

std::uint64_t random_seed() {
  std::random_device device;
  return (std::uint64_t{device()} << 32 | device());
}

}  // namespace

PerfClient::PerfClient(Engine engine, const PerfOptions& options, std::string address)
    : engine_(std::move(engine)),
      op_(options.op),
      exact_(options.test == PerfTest::lat),
      echoed_(options.test == PerfTest::lat &&
              (options.op == PerfOp::send || options.op == PerfOp::pong)),
      pong_(options.op == PerfOp::pong),
      clock_(engine_.clock()),
      size_(options.size),
      seed_(random_seed()),
      total_(options.warmup + options.count),
      warmup_(options.warmup),
      window_(options.window),
      post_(post_of(options.post, options.window)),
      options_(options),
      step_deadline_(clock_, kAnswerTime) {
  ConnectionHandlers handlers;
  handlers.on_message = [this](Connection, Message& m) { on_message(m); };
  handlers.on_closed = [this](Connection, const Error& e) { on_closed(e); };
  dialer_.emplace(engine_, std::move(address), handlers, options.wait);
}

double PerfClient::seconds() const noexcept {
  return static_cast<double>(end_ - begin_) / clock_.ticks_per_ns() / 1e9;
}

int PerfClient::turn() {
  if (state_ == State::running && said_.empty()) [[likely]] {
    const int events = engine_.poll();
    run_turn(events);
    return events;
  }
  const int events = drive(engine_);
  if (!said_.empty()) say({});
  switch (state_) {
    case State::dialing:
      if (dialer_->turn() == Dialer::State::failed) {
        fault_ = dialer_->error().message();
        enter(State::over);
      } else if (dialer_->turn() == Dialer::State::ready) {
        server_ = dialer_->connection();
        ask();
      }
      break;
    case State::asking:
    case State::ending:
      if (step_deadline_.passed()) break_off("the server does not answer");
      break;
    case State::closing:
      if (step_deadline_.passed()) enter(State::over);
      break;
    default:
      break;
  }
  return events;
}

// ---- measuring: hot ---------------------------------------------------------------------------

void PerfClient::run_turn(int events) {
  if (state_ != State::running) [[unlikely]]
    return;
  if (events == 0 && (++idle_turns_ & 0xfff) == 0) [[unlikely]]
    check_progress();
  idle_care_.turn(engine_, events);
  if (pong_) look_for_write();
  if (!exact_) {
    if (finished_ != completed_) finish_up_to(completed_, clock_.now());
  }
  if (posted_ != total_) {
    post_more();
  } else if (finished_ == total_ && completed_ == total_) {
    fault_ = find_fault();
    enter(State::ending);
    say(perf_encode(PerfFinish{}));
  }
}

void PerfClient::post_more() {
  std::uint64_t now = 0;
  while (posted_ != total_ && posted_ - finished_ < window_ && posted_ - completed_ < places_) {
    // Reads the clock once for a burst; a latency test reads it for each operation.
    if (now == 0 || exact_) now = clock_.now();
    const Status status = post(post_place_);
    if (status != Status::ok) {
      // After not_connected, on_closed reports the reason.
      const bool later = status == Status::would_block || status == Status::no_buffer ||
                         status == Status::not_connected;
      if (!later) refused_ = status;
      break;
    }
    started_[post_place_] = now;
    if (posted_ == warmup_) begin_ = now;
    ++posted_;
    post_place_ = next(post_place_, places_);
    remote_place_ = next(remote_place_, remote_places_);
  }
  if (now != 0 && post_ == Post::defer) (void)engine_.flush();
  if (refused_ != Status::ok) [[unlikely]] {
    break_off(fmt::format("{} {} of {} bytes was not accepted: {}", to_string(op_), posted_, size_,
                          to_string(refused_)));
  }
}

Status PerfClient::post(std::uint32_t slot) {
  const BufferSlice& local = local_[slot];
  const auto done = [this](const Completion& c) { on_complete(c); };
  switch (op_) {
    case PerfOp::send:
      perf_stamp(local.data(), size_, posted_ ^ seed_);
      return server_.send(local, done, post_);
    case PerfOp::write:
    case PerfOp::pong:
      perf_stamp(local.data(), size_, posted_ ^ seed_);
      return server_.write(local, remote_[remote_place_], done, post_);
    case PerfOp::atomic:
      return server_.fetch_add(
          remote_[remote_place_], 1, [this](const Completion& found) { on_found(found); }, post_);
    default:
      // A stamp that the memory does not hold, so that only the READ can bring the right one.
      perf_stamp(local.data(), size_, ~(remote_place_ ^ seed_));
      return server_.read(local, remote_[remote_place_], done, post_);
  }
}

void PerfClient::on_complete(const Completion& completion) {
  if (completion.status != Status::ok) [[unlikely]] {
    // on_closed normally carries the reason. This status is for a connection that closes without
    // one.
    if (failed_ == Status::ok) failed_ = completion.status;
    return;
  }
  ++completed_;
  if (exact_ && !echoed_) finish_up_to(completed_, clock_.now());
}

/// An atomic is over. It has found how many were there before it, as they run in their order.
void PerfClient::on_found(const Completion& completion) {
  if (completion.status == Status::ok && completion.value != completed_ / remote_places_)
      [[unlikely]] {
    if (wrong_++ == 0) first_wrong_ = completed_;
  }
  on_complete(completion);
}

void PerfClient::on_reply(const Message& reply) {
  const std::uint64_t now = clock_.now();
  if (replied_ == posted_) [[unlikely]]
    return break_off("the server sent a reply without a message");
  if (reply.size() != size_ || !perf_is_stamped(reply.data(), size_, replied_ ^ seed_))
      [[unlikely]] {
    if (wrong_++ == 0) first_wrong_ = replied_;
  }
  finish_up_to(++replied_, now);
}

/// The write may have arrived in the last poll; otherwise memory changed without an event.
void PerfClient::look_for_write() {
  if (replied_ == posted_ || !perf_is_stamped(reply_at_, size_, replied_ ^ seed_)) return;
  finish_up_to(++replied_, clock_.now());
}

void PerfClient::finish_up_to(std::uint64_t count, std::uint64_t now) {
  while (finished_ != count) {
    if (op_ == PerfOp::read) {
      const BufferSlice& local = local_[finish_place_];
      if (!perf_is_stamped(local.data(), size_, finish_remote_ ^ seed_)) [[unlikely]] {
        if (wrong_++ == 0) first_wrong_ = finished_;
      }
      finish_remote_ = next(finish_remote_, remote_places_);
    }
    if (finished_ >= warmup_) histogram_.record(now - started_[finish_place_]);
    ++finished_;
    finish_place_ = next(finish_place_, places_);
  }
  end_ = now;
}

/// An earlier READ's callback may run while later READs are in flight; here all are complete.
std::string PerfClient::find_fault() const {
  if (pong_) {
    const std::size_t wrong = perf_find_wrong({reply_at_, size_}, seed_);
    return wrong == size_ ? "" : fmt::format("the last write back differs at byte {}", wrong);
  }
  if (op_ != PerfOp::read) return {};
  const std::uint64_t used = std::min<std::uint64_t>(places_, total_);
  for (std::uint64_t i = 0; i < used; ++i) {
    const std::size_t wrong = perf_find_wrong({local_[i].data(), size_}, seed_);
    if (wrong != size_)
      return fmt::format("the data read differs at byte {} of place {}", wrong, i);
  }
  return {};
}

void PerfClient::check_progress() {
  const std::uint64_t now = clock_.now();
  const std::uint64_t progress = completed_ + replied_;
  if (progress != progress_seen_ || progress_at_ == 0) {
    progress_seen_ = progress;
    progress_at_ = now;
  } else if (now - progress_at_ > clock_.ticks(kProgressTimeout)) {
    break_off(
        fmt::format("no operation completed for {} s; {} of {} are done",
                    std::chrono::duration_cast<std::chrono::seconds>(kProgressTimeout).count(),
                    finished_, total_));
  }
}

// ---- the dialogue -----------------------------------------------------------------------------

void PerfClient::enter(State state) {
  state_ = state;
  step_deadline_ = Deadline(clock_, kAnswerTime);
}

/// The first message of the dialogue.
void PerfClient::ask() {
  if (pong_ && !expose_reply()) return;
  const PerfRequest request{.size = size_,
                            .total = total_,
                            .warmup = warmup_,
                            .seed = seed_,
                            .window = window_,
                            .test = options_.test,
                            .op = op_,
                            .reply = reply_};
  enter(State::asking);
  say(perf_encode(request));
}

bool PerfClient::expose_reply() {
  reply_memory_ = engine_.allocate(size_, Pool::lease);
  if (!reply_memory_) {
    break_off(fmt::format("no memory for {} bytes; raise memory.lease_bytes", size_));
    return false;
  }
  std::fill_n(reply_memory_.data(), size_, std::byte{0});
  perf_stamp(reply_memory_.data(), size_, ~seed_);  // no valid stamp of any number or length
  auto region = engine_.expose(reply_memory_.slice(), Access::remote_write);
  if (!region) {
    break_off(region.error().message());
    return false;
  }
  reply_ = *region;
  reply_at_ = reply_memory_.data();
  return true;
}

void PerfClient::on_message(Message& message) {
  if (state_ == State::running && echoed_ && !pong_) [[likely]]
    return on_reply(message);
  PerfOffer offer;
  PerfVerdict verdict;
  if (state_ == State::asking && perf_decode(message.bytes(), offer)) {
    on_offer(offer);
  } else if (state_ == State::ending && perf_decode(message.bytes(), verdict)) {
    if (verdict.good == 0 && fault_.empty()) fault_ = perf_text(verdict.why);
    if (wrong_ != 0 && fault_.empty()) {
      fault_ = fmt::format("{} of {} {} brought wrong data, the first is number {}", wrong_, total_,
                           echoed_                 ? "replies"
                           : op_ == PerfOp::atomic ? "atomics"
                                                   : "reads",
                           first_wrong_);
    }
    enter(State::closing);
    (void)server_.close();
  } else {
    break_off("the server sent an unknown message; is it of the same version?");
  }
}

void PerfClient::on_offer(const PerfOffer& offer) {
  if (offer.slots == 0) return break_off(perf_text(offer.why));
  const bool one_sided = op_ != PerfOp::send;
  if (!one_sided && size_ > server_.max_message()) {
    return break_off(
        fmt::format("messages of {} bytes exceed the {} that both ends accept; raise "
                    "connections.max_message_bytes at both, or use --op write",
                    size_, server_.max_message()));
  }
  if (offer.slots > window_ || (one_sided && offer.region.length / offer.slots < size_)) {
    return break_off("the server offers unusable memory");
  }
  remote_places_ = offer.slots;
  for (std::uint32_t i = 0; one_sided && i < remote_places_; ++i) {
    remote_.push_back(offer.region.slice(i * perf_stride(size_), size_));
  }
  if (allocate_buffers()) enter(State::running);
}

/// A reply may arrive before the completion of its own message, so these tests get twice the
/// places.
bool PerfClient::allocate_buffers() {
  places_ = op_ == PerfOp::send || pong_ ? window_ * 2 : window_;
  started_.resize(places_);
  if (op_ == PerfOp::send) {
    // Each operation has a block of its own: the protocol's header then lies right before the
    // bytes.
    for (std::uint32_t i = 0; i < places_; ++i) buffers_.push_back(engine_.allocate(size_));
  } else {
    buffers_.push_back(engine_.allocate(places_ * perf_stride(size_)));
  }
  const Buffer spare = engine_.allocate(sizeof(PerfFinish));  // for the dialogue's last message
  if (!buffers_.back() || !spare) {
    break_off(
        fmt::format("no memory for {} times {} bytes; raise memory.send_bytes", places_, size_));
    return false;
  }
  for (std::uint32_t i = 0; i < places_; ++i) {
    local_.push_back(op_ == PerfOp::send ? buffers_[i].slice()
                                         : buffers_[0].slice(i * perf_stride(size_), size_));
    perf_fill(local_.back().bytes(), op_ == PerfOp::read ? ~seed_ : seed_);
  }
  return true;
}

/// Sends a message of the dialogue, or the rest of the last one. Keeps it while sending would
/// block.
void PerfClient::say(std::span<const std::byte> message) {
  if (!message.empty()) said_.assign(message.begin(), message.end());
  const Status status = server_.send_copy(said_);
  if (status == Status::would_block || status == Status::no_buffer) return;
  said_.clear();
  if (status == Status::message_too_long) {
    break_off("messages of the dialogue do not fit; raise connections.eager_bytes to 256");
  }
}

void PerfClient::break_off(std::string why) {
  if (fault_.empty()) fault_ = fmt::format("{}: {}", dialer_->address(), why);
  enter(State::closing);
  (void)server_.close();
}

void PerfClient::on_closed(const Error& error) {
  if (fault_.empty() && state_ != State::closing) {
    fault_ = fmt::format(
        "lost the server {}: {}", dialer_->address(),
        error.status != Status::ok ? error.message() : "it closed the connection before the end");
  }
  said_.clear();
  enter(State::over);
}

}  // namespace spinwire::tools
