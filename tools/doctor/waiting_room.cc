#include "doctor/waiting_room.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <exception>
#include <string>
#include <utility>

namespace spinwire::doctor {
namespace {

constexpr Link::Limit kRoundInterval{100};
/// A client gives up after 30 s without a frame.
constexpr auto kReportInterval = std::chrono::seconds(2);
/// Further clients wait in the kernel, and get no reports.
constexpr std::size_t kMostClients = 64;

bool has_left(const Link& link) {
  pollfd polled{link.fd(), POLLRDHUP, 0};
  return ::poll(&polled, 1, 0) > 0;
}

/// While it lives, new threads are started without the signals that end the doctor. So the serving
/// thread gets them, whose waits they interrupt.
class StopSignalsBlocked {
 public:
  StopSignalsBlocked() {
    sigset_t stops;
    ::sigemptyset(&stops);
    ::sigaddset(&stops, SIGINT);
    ::sigaddset(&stops, SIGTERM);
    ::pthread_sigmask(SIG_BLOCK, &stops, &before_);
  }
  StopSignalsBlocked(const StopSignalsBlocked&) = delete;
  StopSignalsBlocked& operator=(const StopSignalsBlocked&) = delete;
  ~StopSignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_{};
};

}  // namespace

WaitingRoom::WaitingRoom(const Link& listener, Link::Limit facts_limit)
    : listener_(listener), facts_limit_(facts_limit) {
  const StopSignalsBlocked blocked;
  thread_ = std::thread([this] { run(); });
}

WaitingRoom::~WaitingRoom() {
  is_over_ = true;
  thread_.join();
}

std::optional<Link> WaitingRoom::next(Link::Limit limit) {
  std::unique_lock lock(mutex_);
  is_serving_ = false;
  if (!came_.wait_for(lock, limit, [this] { return !clients_.empty(); })) return std::nullopt;
  is_serving_ = true;
  Link link = std::move(clients_.front().link);
  clients_.pop_front();
  return link;
}

void WaitingRoom::run() noexcept {
  while (!is_over_) {
    try {
      run_round();
    } catch (const std::exception&) {
      // There is no memory now. The doctor serves on, and the clients wait.
      std::this_thread::sleep_for(kRoundInterval);
    }
  }
}

void WaitingRoom::run_round() {
  if (is_full_) std::this_thread::sleep_for(kRoundInterval);
  const int fd = is_full_ ? -1 : listener_.accept(kRoundInterval);
  const std::lock_guard lock(mutex_);
  if (fd >= 0) {
    clients_.push_back(Client{Link(fd), now() + facts_limit_});
    came_.notify_one();
  }
  update_clients();
  is_full_ = clients_.size() >= kMostClients;
}

void WaitingRoom::update_clients() {
  std::uint32_t ahead = is_serving_ ? 1 : 0;
  for (auto client = clients_.begin(); client != clients_.end();) {
    if (update_client(*client, ahead)) {
      ++client;
      ++ahead;
    } else {
      client = clients_.erase(client);
    }
  }
}

bool WaitingRoom::update_client(Client& client, std::uint32_t ahead) {
  if (ahead == 0) return true;
  if (has_left(client.link)) return false;
  if (!client.has_sent_facts) {
    const auto facts = client.link.peek(LinkKind::facts);
    client.has_sent_facts = facts.has_value();
    client.understands_busy = facts && !fact(decode_facts(*facts), kWaitsFact).empty();
  }
  if (!client.has_sent_facts && now() >= client.facts_deadline) {
    // A doctor of another version learns ours from the header.
    (void)client.link.send(LinkKind::end, "", Link::Limit(0));
    return false;
  }
  if (!client.understands_busy || (client.ahead == ahead && now() < client.next_report))
    return true;
  client.ahead = ahead;
  client.next_report = now() + kReportInterval;
  const Facts said{{kAheadFact, std::to_string(ahead)}};
  return client.link.send(LinkKind::busy, encode_facts(said), Link::Limit(0)).has_value();
}

}  // namespace spinwire::doctor
