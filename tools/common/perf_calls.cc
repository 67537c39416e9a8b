#include "common/perf_calls.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/dialer.h"
#include "common/perf_options.h"

namespace spinwire::tools {
namespace {

/// Sessions that are opened at once: a server limits handshakes.
constexpr std::uint32_t kOpening = 16;

/// Whether the bytes between the stamps hold the pattern.
bool is_filled(std::span<const std::byte> bytes, std::uint64_t seed) noexcept {
  return perf_find_wrong(bytes, seed) == bytes.size();
}

}  // namespace

// ---- answering: hot ---------------------------------------------------------------------------

void PerfAnswerer::expect(const CallShape& shape) {
  shape_ = shape;
  release();
  reply_.clear();
  if (shape.reply_size <= kPerfShort) reply_.resize(shape.reply_size);
  perf_fill(reply_, ~shape.seed);
  books_ = {};
}

void PerfAnswerer::release() noexcept {
  replies_.clear();
  next_reply_ = 0;
}

/// A reply buffer that is not in use by an earlier reply; null if there is no memory for another.
Buffer* PerfAnswerer::free_reply() noexcept {
  if (!replies_.empty()) {
    next_reply_ = next_reply_ + 1 < replies_.size() ? next_reply_ + 1 : 0;
    if (replies_[next_reply_].unique()) [[likely]]
      return &replies_[next_reply_];
  }
  Buffer more = engine_.allocate(shape_.reply_size);
  if (!more) return nullptr;
  perf_fill(more.bytes(), ~shape_.seed);
  next_reply_ = replies_.size();
  replies_.push_back(std::move(more));
  return &replies_.back();
}

Status PerfAnswerer::answer(Request& request, std::uint64_t value) noexcept {
  if (shape_.reply_size <= kPerfShort) [[likely]] {
    perf_stamp(reply_.data(), reply_.size(), value);
    return request.reply(reply_);
  }
  Buffer* const reply = free_reply();
  if (reply == nullptr) return Status::no_buffer;
  perf_stamp(reply->data(), reply->size(), value);
  return request.reply(reply->slice());
}

void PerfAnswerer::take(Request& request) noexcept {
  const std::span<const std::byte> bytes = request.bytes();
  std::uint64_t value = 0;
  bool good = bytes.size() == shape_.size;
  if (good) [[likely]] {
    std::memcpy(&value, bytes.data(), std::min(sizeof value, bytes.size()));
    good = perf_is_stamped(bytes.data(), bytes.size(), value);
  }
  // The warm-up checks all bytes; measured calls check only the stamps.
  if (books_.calls < shape_.warmup && good) good = is_filled(bytes, shape_.seed);
  ++books_.calls;
  books_.sum += value;
  books_.wrong += good ? 0 : 1;
  const Status status = answer(request, value + 1);
  if (status == Status::ok || status == Status::not_connected) [[likely]]
    return;
  (void)request.refuse(status == Status::no_buffer ? "no room; raise the server's memory.send_bytes"
                                                   : to_string(status));
}

// ---- sessions ---------------------------------------------------------------------------------

void PerfCaller::open(const CallShape& shape, const std::string& address) {
  shape_ = shape;
  address_ = address;
  exact_ = shape.window == 1;
  post_ = post_of(asked_post_, shape.window);
  fault_.clear();
  sessions_.clear();
  sessions_.reserve(shape.sessions);
  asked_ = ready_ = 0;
  nobody_there_ = closing_ = false;
  open_more();
}

/// Opens the first session alone: if that fails, the others would fail as well.
void PerfCaller::open_more() {
  while (fault_.empty() && asked_ < shape_.sessions && asked_ - ready_ < kOpening &&
         (asked_ == 0 || ready_ != 0)) {
    SessionOptions options;
    options.window = shape_.session_window();
    options.on_ready = [this](Session) { ++ready_; };
    options.on_closed = [this](Session, const Error& e) { on_closed(e); };
    auto session = engine_.open_session(address_, options);
    if (!session) return fail(session.error().message());
    sessions_.push_back(*session);
    ++asked_;
    ++open_;
  }
}

void PerfCaller::on_closed(const Error& error) {
  --open_;
  if (closing_ && error.status == Status::ok) return;
  nobody_there_ = ready_ == 0 && worth_retrying(error.status);
  fail(error.status == Status::ok ? fmt::format("{} ended a session before the end", address_)
                                  : error.message());
}

void PerfCaller::close() {
  closing_ = true;
  for (Session s : sessions_) (void)s.close();
}

void PerfCaller::fail(std::string why) {
  if (fault_.empty()) fault_ = std::move(why);
  running_ = false;
}

// ---- calling: hot -----------------------------------------------------------------------------

/// Describes what exceeds the engine's limits; empty if nothing does.
std::string PerfCaller::find_excess() const {
  if (const std::size_t longest = session().max_call(); shape_.size > longest) {
    return fmt::format(
        "requests of {} bytes exceed the {} that a session accepts; raise "
        "connections.max_message_bytes at both ends",
        shape_.size, longest);
  }
  return {};
}

bool PerfCaller::prepare() {
  if (std::string excess = find_excess(); !excess.empty()) {
    fail(std::move(excess));
  } else if (!allocate_buffers()) {
    fail(
        fmt::format("no memory for {} requests of {} bytes and as many replies of {}; raise "
                    "memory.send_bytes or memory.lease_bytes",
                    shape_.window, shape_.size, shape_.reply_size));
  }
  return fault_.empty();
}

bool PerfCaller::allocate_buffers() {
  const bool long_replies = shape_.reply_size > session().max_inline_call();
  started_.resize(shape_.window);
  numbers_.resize(shape_.window);
  ended_.reserve(shape_.window);
  for (std::uint32_t i = 0; i < shape_.window; ++i) {
    free_.push_back(shape_.window - 1 - i);
    buffers_.push_back(engine_.allocate(shape_.size));
    if (!buffers_.back()) return false;
    requests_.push_back(buffers_.back().slice());
    perf_fill(requests_.back().bytes(), shape_.seed);
    if (!long_replies) continue;
    buffers_.push_back(engine_.allocate(shape_.reply_size, Pool::lease));
    if (!buffers_.back()) return false;
    replies_.push_back(buffers_.back().slice());
  }
  return true;
}

void PerfCaller::go_on() {
  if (!ended_.empty()) {
    // Reads the clock once for all completions of one poll.
    const std::uint64_t now = clock_.now();
    for (const std::uint32_t slot : ended_) record(slot, now);
    ended_.clear();
  }
  if (running_ && posted_ != shape_.total) call_more();
}

void PerfCaller::call_more() {
  const auto wanted = [this] {
    return std::min<std::uint64_t>(shape_.batch, shape_.total - posted_);
  };
  Status status = Status::ok;
  std::uint64_t now = 0;
  while (posted_ != shape_.total && free_.size() >= wanted()) {
    if (now == 0) now = clock_.now();  // read once for a burst
    for (std::uint64_t left = wanted(); left != 0 && status == Status::ok; --left) {
      const std::uint32_t slot = free_.back();
      if (status = call(slot); status != Status::ok) break;
      free_.pop_back();
      started_[slot] = now;
      if (posted_ == shape_.warmup) begin_ = now;
      ++posted_;
    }
    if (status != Status::ok) break;
  }
  if (now != 0 && post_ == Post::defer) (void)engine_.flush();
  // After not_connected, on_closed reports the reason.
  if (status != Status::ok && status != Status::would_block && status != Status::not_connected)
      [[unlikely]] {
    fail(fmt::format("call {} was not accepted: {}", posted_, to_string(status)));
  }
}

Status PerfCaller::call(std::uint32_t slot) {
  // Slots are spread over the sessions. With more sessions than slots, the sessions take turns.
  std::uint32_t index = slot % shape_.sessions;
  if (shape_.sessions > shape_.window) {
    index = next_session_;
    next_session_ = index + 1 == shape_.sessions ? 0 : index + 1;
    if (prefetches_) sessions_[next_session_].prefetch();
  }
  const BufferSlice& bytes = requests_[slot];
  const std::uint64_t value = posted_ ^ shape_.seed;
  perf_stamp(bytes.data(), shape_.size, value);
  CallOptions options;
  options.post = post_;
  if (!replies_.empty()) options.reply_into = replies_[slot];
  const auto done = [this, slot](Reply& reply) { on_reply(slot, reply); };
  Session& session = sessions_[index];
  const Status status =
      shape_.size <= kSlotPayloadBytes
          ? session.call(method_, std::span<const std::byte>(bytes.bytes()), done, options)
          : session.call(method_, bytes, done, options);
  if (status == Status::ok) [[likely]] {
    numbers_[slot] = posted_;
    sum_ += perf_value(value, shape_.size);
  }
  return status;
}

void PerfCaller::on_reply(std::uint32_t slot, const Reply& reply) {
  const std::uint64_t now = exact_ ? clock_.now() : 0;
  const std::uint64_t number = numbers_[slot];
  const std::uint64_t expected = perf_value(number ^ shape_.seed, shape_.size) + 1;
  if (reply.status() != Status::ok) [[unlikely]] {
    if (reply.status() != Status::flushed) {
      fail(fmt::format("{}: call {} ended with: {}{}{}", address_, number,
                       to_string(reply.status()), reply.text().empty() ? "" : ", ",
                       perf_shown(reply.text())));
    }
  } else if (reply.bytes().size() != shape_.reply_size ||
             !perf_is_stamped(reply.bytes().data(), shape_.reply_size, expected) ||
             (number < shape_.warmup && !is_filled(reply.bytes(), ~shape_.seed))) [[unlikely]] {
    fail(fmt::format("{}: the reply to call {} differs from what was expected", address_, number));
  }
  if (exact_) {
    record(slot, now);
  } else {
    ended_.push_back(slot);
  }
}

void PerfCaller::record(std::uint32_t slot, std::uint64_t now) noexcept {
  if (numbers_[slot] >= shape_.warmup) histogram_.record(now - started_[slot]);
  free_.push_back(slot);
  ++finished_;
  end_ = now;
}

}  // namespace spinwire::tools
