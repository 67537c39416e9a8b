#include "doctor/waiting_room.h"

#include <poll.h>

#include <chrono>
#include <string>
#include <utility>

namespace spinwire::doctor {
namespace {

constexpr Link::Limit kLookInterval{100};
/// A client gives up after 30 s without a frame.
constexpr auto kTellInterval = std::chrono::seconds(2);
/// Further clients wait in the kernel, and are told nothing.
constexpr std::size_t kMostClients = 64;

bool has_left(const Link& link) {
  pollfd polled{link.fd(), POLLRDHUP, 0};
  return ::poll(&polled, 1, 0) > 0;
}

}  // namespace

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

void WaitingRoom::run() {
  bool is_full = false;
  while (!is_over_) {
    if (is_full) std::this_thread::sleep_for(kLookInterval);
    const int fd = is_full ? -1 : listener_.accept(kLookInterval);
    const std::lock_guard lock(mutex_);
    if (fd >= 0) {
      clients_.push_back(Client{Link(fd)});
      came_.notify_one();
    }
    look_after_clients();
    is_full = clients_.size() >= kMostClients;
  }
}

void WaitingRoom::look_after_clients() {
  std::uint32_t ahead = is_serving_ ? 1 : 0;
  for (auto client = clients_.begin(); client != clients_.end();) {
    if (tell(*client, ahead)) {
      ++client;
      ++ahead;
    } else {
      client = clients_.erase(client);
    }
  }
}

bool WaitingRoom::tell(Client& client, std::uint32_t ahead) {
  if (ahead == 0) return true;
  if (has_left(client.link)) return false;
  if (!client.understands) {
    const auto facts = client.link.peek(LinkKind::facts);
    client.understands = facts && !fact(decode_facts(*facts), kWaitsFact).empty();
  }
  if (!client.understands || (client.ahead == ahead && now() < client.next_report)) return true;
  client.ahead = ahead;
  client.next_report = now() + kTellInterval;
  const Facts said{{kAheadFact, std::to_string(ahead)}};
  return client.link.send(LinkKind::busy, encode_facts(said), Link::Limit(0)).has_value();
}

}  // namespace spinwire::doctor
