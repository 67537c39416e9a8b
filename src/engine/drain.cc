#include "engine/drain.h"

#include <algorithm>

#include "agent/goodbye.h"
#include "rpc/rpc_state.h"
#include "rpc/session_goodbye.h"

namespace spinwire::engine {

using agent::Agent;

void Drain::begin(Nanoseconds timeout, const DrainOptions& options) noexcept {
  options_ = options;
  report_ = {};
  context_.recorder.record(observe::EventKind::drain, {"begun"});
  deadline_ = context_.clock.now() + context_.clock.ticks(timeout);
  context_.timers.reschedule(timer_, deadline_);
  stage_ = Stage::served;
  has_half_open_ = false;
  connector_.refuse_peers(goodbye());
  for (Agent& a : context_.agents) {
    if (agent::is_half_open(a)) agent::close_half_open(context_, a, goodbye());
  }
  if (calls_ != nullptr) rpc::end_served_in_order(*calls_, goodbye());
  schedule_.step_soon();
}

std::string_view Drain::stage_name() const noexcept {
  switch (stage_) {
    case Stage::none:
      return "none";
    case Stage::served:
      return "waits for served sessions";
    case Stage::sessions:
      return "waits for sessions";
    case Stage::connections:
      return "waits for connections";
    case Stage::over:
      return "over";
  }
  return "unknown";
}

Nanoseconds Drain::time_left() const noexcept {
  const std::uint64_t now = context_.clock.now();
  return is_under_way() && deadline_ > now ? context_.clock.duration(deadline_ - now)
                                           : Nanoseconds(0);
}

Goodbye Drain::goodbye() const noexcept {
  return has_begun() ? goodbye_with(options_.retry_after) : Goodbye{};
}

void Drain::step(std::uint64_t now) noexcept {
  if (!is_under_way()) return;
  if (now >= deadline_) {
    cut();
    // A callback may have begun another drain.
    return now < deadline_ ? void() : finish();
  }
  if (stage_ == Stage::served) {
    if (calls_ != nullptr && calls_->servers.size() != 0) return;
    stage_ = Stage::sessions;
    if (calls_ != nullptr) rpc::end_own_in_order(*calls_);
  }
  if (stage_ == Stage::sessions) {
    if (calls_ != nullptr && calls_->clients.size() != 0) return;
    stage_ = Stage::connections;
    has_half_open_ = true;
  }
  if (has_half_open_) close_connections();
  if (context_.agents.size() == 0) finish();
}

void Drain::close_connections() noexcept {
  has_half_open_ = false;
  for (Agent& a : context_.agents) {
    agent::stop_reconnecting(a);  // also one that ends already
    if (agent::is_ending(a)) continue;
    agent::is_half_open(a) ? agent::close_half_open(context_, a, goodbye())
                           : agent::close(context_, a, goodbye());
    agent::is_ending(a) ? schedule_.step_soon() : void(has_half_open_ = true);
  }
}

/// The time is over: counts what remains, and ends it without waiting.
void Drain::cut() noexcept {
  if (calls_ != nullptr) {
    calls_->servers.for_each([this](const rpc::ServerSession& s) {
      ++report_.served_sessions;
      report_.served_calls += rpc::calls_in_progress(s);
    });
    report_.sessions = calls_->clients.size();
  }
  report_.connections = context_.agents.size();
  if (calls_ != nullptr) rpc::end_all_sessions(*calls_);
  for (Agent& a : context_.agents) agent::close_at_once(context_, a, goodbye());
  schedule_.step_soon();
}

void Drain::finish() noexcept {
  stage_ = Stage::over;
  context_.recorder.record(observe::EventKind::drain, {"ended"});
  context_.timers.cancel(timer_);
  const auto run = options_.on_drained;
  options_.on_drained = nullptr;
  if (run) run(report_);
}

}  // namespace spinwire::engine
