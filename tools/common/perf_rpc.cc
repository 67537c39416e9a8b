#include "common/perf_rpc.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>

#include "common/dialer.h"

namespace spinwire::tools {
namespace {

/// Time limit of the peer's next step.
constexpr Nanoseconds kStepTimeout = std::chrono::seconds(10);
constexpr Nanoseconds kPause = std::chrono::milliseconds(50);  ///< between attempts to connect

/// The refusal of a server that has as many clients as it serves at once.
constexpr std::string_view kBusy = "other clients are being measured";

CallShape shape_of(const PerfOptions& o) {
  std::random_device device;
  return {.size = o.size,
          .reply_size = o.reply_size,
          .total = o.warmup + o.count,
          .warmup = o.warmup,
          .seed = std::uint64_t{device()} << 32 | device(),
          .window = o.window,
          .batch = o.batch,
          .sessions = o.sessions};
}

/// The server's own calls: as many as it likes, with a different pattern.
CallShape shape_back(CallShape shape) {
  shape.seed = ~shape.seed;
  shape.total = ~std::uint64_t{0};
  return shape;
}

CallOptions long_timeout() {
  CallOptions options;
  options.timeout = kStepTimeout;
  return options;
}

}  // namespace

// ---- the client -------------------------------------------------------------------------------

RpcPerfClient::RpcPerfClient(Engine engine, const PerfOptions& options, std::string address)
    : engine_(std::move(engine)),
      answerer_(engine_),
      caller_(engine_),
      options_(options),
      address_(std::move(address)),
      wait_(engine_.clock(), options.wait),
      retry_at_(engine_.clock(), kPause),
      step_deadline_(engine_.clock(), kStepTimeout) {
  const CallShape shape = shape_of(options);
  caller_.set_posting(options.post, options.prefetch);
  if (auto ready = options.symmetric ? serve(shape) : Result<void>(); !ready) {
    give_up(ready.error().message());
  } else {
    caller_.open(shape, address_);
  }
}

/// Serves the calls that the server makes to us.
Result<void> RpcPerfClient::serve(const CallShape& shape) {
  answerer_.expect(shape_back(shape));
  auto served = engine_.serve(kPerfCallBack, [this](Request& r) { answerer_.take(r); });
  if (!served) return served;
  auto where = resolve(options_.bind, 0);
  if (!where) return tl::unexpected(where.error());
  auto listener = engine_.listen(*where, {});
  if (!listener) return tl::unexpected(listener.error());
  listener_ = std::move(*listener);
  return {};
}

int RpcPerfClient::turn() {
  if (state_ != State::running) {
    const int events = drive(engine_);
    caller_.turn();
    cold_turn();
    return events;
  }
  const int events = engine_.poll();
  caller_.turn();
  idle_care_.turn(engine_, events);
  if (served_before_ == ~std::uint64_t{0} && caller_.warm()) [[unlikely]]
    served_before_ = answerer_.books().calls;
  if (caller_.finished() || !caller_.fault().empty()) [[unlikely]]
    finish();
  return events;
}

void RpcPerfClient::cold_turn() {
  switch (state_) {
    case State::opening:
      if (!caller_.fault().empty()) return retry();
      if (!caller_.ready() || (prepared_ && !retry_at_.passed())) break;
      prepared_ = prepared_ || caller_.prepare();
      if (prepared_) ask();
      break;
    case State::asking:
    case State::ending:
      if (!caller_.fault().empty()) give_up(caller_.fault());
      break;
    case State::closing:
      if (caller_.closed() || step_deadline_.passed()) enter(State::over);
      break;
    default:
      break;
  }
}

/// Tries again, as the server may not be up yet.
void RpcPerfClient::retry() {
  if (!caller_.worth_another_try() || wait_.passed()) return give_up(caller_.fault());
  if (!retry_at_.passed()) return;
  retry_at_ = Deadline(engine_.clock(), kPause);
  caller_.open(CallShape(caller_.shape()), address_);
}

void RpcPerfClient::ask() {
  CallAsk ask;
  ask.shape = caller_.shape();
  if (options_.symmetric) perf_set_text(ask.caller, listener_.address());
  Buffer bytes = engine_.allocate(sizeof ask);
  if (!bytes) return give_up("no memory for a request; raise memory.send_bytes");
  std::memcpy(bytes.data(), &ask, sizeof ask);
  enter(State::asking);
  const auto done = [this](Reply& reply) {
    if (state_ != State::asking) return;
    if (reply.text() == kBusy && !wait_.passed()) {
      retry_at_ = Deadline(engine_.clock(), kPause);
      return enter(State::opening);
    }
    if (reply.status() != Status::ok) {
      return give_up(fmt::format("{}: {}{}{}", address_, to_string(reply.status()),
                                 reply.text().empty() ? "" : ": ", perf_shown(reply.text())));
    }
    if (!perf_decode(reply.bytes(), admission_))
      return give_up("the server sent an unknown message; is it of the same version?");
    enter(State::running);
    caller_.start(admission_.method);
  };
  const Status status = caller_.session().call(kPerfAsk, bytes.slice(), done, long_timeout());
  if (status != Status::ok) give_up(fmt::format("the first request: {}", to_string(status)));
}

void RpcPerfClient::finish() {
  if (!caller_.fault().empty()) return give_up(caller_.fault());
  served_ = answerer_.books().calls - served_before_;
  caller_.stop();
  enter(State::ending);
  const auto done = [this](Reply& reply) { on_books(reply); };
  const Status status =
      caller_.session().call(kPerfEnd, perf_encode(admission_), done, long_timeout());
  if (status != Status::ok) give_up(fmt::format("the last request: {}", to_string(status)));
}

void RpcPerfClient::on_books(const Reply& reply) {
  if (state_ != State::ending) return;
  CallTally tally;
  if (reply.status() != Status::ok || !perf_decode(reply.bytes(), tally)) {
    return give_up(fmt::format("{}: no tally: {}", address_, to_string(reply.status())));
  }
  fault_ = find_fault(tally);
  enter(State::closing);
  caller_.close();
}

std::string RpcPerfClient::find_fault(const CallTally& tally) const {
  const auto differ = [](const CallBooks& served, std::uint64_t calls, std::uint64_t sum) {
    return served.calls != calls || served.sum != sum;
  };
  if (tally.served.wrong != 0) {
    return fmt::format("{} of {} calls arrived with wrong data", tally.served.wrong,
                       tally.served.calls);
  }
  if (differ(tally.served, caller_.finished_calls(), caller_.sum())) {
    return fmt::format("{} calls were made, and {} others served", caller_.finished_calls(),
                       tally.served.calls);
  }
  if (std::string fault = perf_text(tally.fault); !fault.empty()) return fault;
  const CallBooks& ours = answerer_.books();
  if (ours.wrong != 0 || differ(ours, tally.called, tally.called_sum)) {
    return fmt::format("the server made {} calls; {} were served here, {} of them wrong",
                       tally.called, ours.calls, ours.wrong);
  }
  return {};
}

void RpcPerfClient::enter(State state) {
  state_ = state;
  step_deadline_ = Deadline(engine_.clock(), kStepTimeout);
}

/// Tells a measuring server that this client leaves. Does not wait for the reply.
void RpcPerfClient::leave() {
  if (state_ == State::running)
    (void)caller_.session().call(kPerfEnd, perf_encode(admission_), [](Reply&) {});
}

void RpcPerfClient::give_up(std::string why) {
  leave();
  if (fault_.empty()) fault_ = std::move(why);
  enter(State::closing);
  caller_.close();
}

// ---- the server -------------------------------------------------------------------------------

namespace {

std::string_view host_of(std::string_view address) { return address.substr(0, address.rfind(':')); }

/// Why the server does not call the address that a client gives; empty: it does, or is to call
/// none. Only the client's own host: no client makes the server connect to others.
std::string find_wrong_caller(const Request& request, const CallAsk& ask) {
  const std::string caller = perf_text(ask.caller);
  const std::string_view host = host_of(request.peer().address);
  if (caller.empty() || host_of(caller) == host) return {};
  return fmt::format(
      "the server calls back at {} only, where the client comes from; give --bind {}", host, host);
}

}  // namespace

Result<void> RpcPerfServer::serve(std::uint32_t places, std::function<bool()> has_room) {
  has_room_ = std::move(has_room);
  auto served = engine_.serve(kPerfAsk, [this](Request& r) { on_ask(r); });
  if (served) served = engine_.serve(kPerfEnd, [this](Request& r) { on_end(r); });
  for (std::uint32_t i = 0; i < places && served; ++i) {
    const auto method = static_cast<Method>(kPerfCall + i);
    places_.push_back(std::make_unique<ServedCaller>(engine_, news_, method));
    served = engine_.serve(method, [p = places_.back().get()](Request& r) { p->take(r); });
  }
  return served;
}

void RpcPerfServer::on_ask(Request& request) {
  CallAsk ask;
  if (!perf_decode(request.bytes(), ask) || !ask.shape.valid()) {
    (void)request.refuse("the request is invalid");
    return;
  }
  const auto free =
      std::find_if(places_.begin(), places_.end(), [](const auto& p) { return p->idle(); });
  if (free == places_.end() || !has_room_()) {
    (void)request.refuse(kBusy);
    return;
  }
  if (const std::string wrong = find_wrong_caller(request, ask); !wrong.empty())
    return static_cast<void>(request.refuse(wrong));
  running_.push_back(free->get());
  running_.back()->begin(request, ask);
}

void RpcPerfServer::on_end(Request& request) {
  CallAdmission admission;
  const bool is_valid = perf_decode(request.bytes(), admission) && admission.method >= kPerfCall;
  const std::size_t place = is_valid ? std::size_t{admission.method} - kPerfCall : places_.size();
  if (place >= places_.size()) return static_cast<void>(request.refuse("the request is invalid"));
  places_[place]->finish(request);
}

/// Hot.
void RpcPerfServer::go_on() {
  bool is_any_idle = false;
  for (ServedCaller* caller : running_) {
    caller->turn();
    is_any_idle |= caller->idle();
  }
  if (!is_any_idle) [[likely]]
    return;
  std::erase_if(running_, [this](const ServedCaller* caller) {
    if (!caller->idle()) return false;
    ++served_;
    failed_ += caller->failed() ? 1 : 0;
    return true;
  });
}

void ServedCaller::begin(Request& request, const CallAsk& ask) {
  shape_ = ask.shape;
  client_ = request.session();
  answerer_.expect(shape_);
  step_deadline_ = Deadline(engine_.clock(), kStepTimeout);
  seen_ = 0;
  news_.emplace_back("measuring for a caller");
  if (perf_text(ask.caller).empty()) {
    state_ = State::running;
    (void)request.reply(perf_encode(admission_));
    return;
  }
  waiting_ = request.defer();
  caller_ = std::make_unique<PerfCaller>(engine_);
  caller_->open(shape_back(shape_), perf_text(ask.caller));
  state_ = State::calling_back;
}

void ServedCaller::finish(Request& request) {
  if (state_ != State::running || !(request.session() == client_))
    return static_cast<void>(request.refuse("no measurement was begun"));
  waiting_ = request.defer();
  state_ = State::stopping;
  if (caller_ != nullptr) caller_->stop();
}

void ServedCaller::turn() {
  if (caller_ != nullptr) {
    caller_->turn();
    if (state_ == State::calling_back) [[unlikely]]
      call_back();
  }
  if (state_ == State::stopping && (caller_ == nullptr || caller_->idle())) return report_counts();
  if (state_ == State::closing && caller_->closed()) {
    caller_.reset();
    state_ = State::idle;
    return;
  }
  if ((++turns_ & 0xfff) == 0) [[unlikely]]
    check_progress();
}

void ServedCaller::call_back() {
  if (caller_->ready() && caller_->prepare()) {
    state_ = State::running;
    (void)waiting_.reply(perf_encode(admission_));
    caller_->start(kPerfCallBack);
  } else if (!caller_->fault().empty()) {
    (void)waiting_.refuse("the server cannot call back");
    end(caller_->fault());
  }
}

void ServedCaller::check_progress() {
  if (seen_ != answerer_.books().calls) {
    seen_ = answerer_.books().calls;
    step_deadline_ = Deadline(engine_.clock(), kStepTimeout);
  } else if (step_deadline_.passed() && state_ != State::closing) {
    end("the client stopped responding");
  }
}

void ServedCaller::report_counts() {
  CallTally tally;
  tally.served = answerer_.books();
  if (caller_ != nullptr) {
    tally.called = caller_->finished_calls();
    tally.called_sum = caller_->sum();
    perf_set_text(tally.fault, caller_->fault());
  }
  (void)waiting_.reply(perf_encode(tally));
  const std::uint64_t wrong = tally.served.wrong;
  end(wrong != 0
          ? fmt::format("{} of {} calls differ from what was sent", wrong, tally.served.calls)
          : perf_text(tally.fault));
}

void ServedCaller::end(const std::string& how) {
  news_.push_back(fmt::format("rpc, {} bytes, window {}, {} calls: {}", shape_.size, shape_.window,
                              answerer_.books().calls, how.empty() ? "all data as sent" : how));
  failed_ = !how.empty();
  answerer_.release();
  if (caller_ != nullptr) {
    caller_->close();
    state_ = State::closing;
    return;
  }
  state_ = State::idle;
}

}  // namespace spinwire::tools
