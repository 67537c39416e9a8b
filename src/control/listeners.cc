#include "control/listeners.h"

#include <algorithm>
#include <utility>

#include "control/tokens.h"

namespace spinwire::control {

namespace {

constexpr int kBacklog = 512;

}  // namespace

template <typename Open>
Result<ListenerId> Listeners::add(std::shared_ptr<ListenerOwner> owner, Open&& open) {
  generation_ = std::max((generation_ + 1) & kGenerationBits, 1u);
  auto listener = std::make_unique<Listener>();
  listener->owner = std::move(owner);
  listener->generation = generation_;
  auto free = std::find(listeners_.begin(), listeners_.end(), nullptr);
  if (free == listeners_.end()) free = listeners_.insert(listeners_.end(), nullptr);
  const auto index = static_cast<std::uint32_t>(free - listeners_.begin());
  if (Result<void> opened = open(*listener, index); !opened) return tl::unexpected(opened.error());
  *free = std::move(listener);
  return ListenerId{index, generation_};
}

Result<ListenerId> Listeners::listen(const Address& at, std::shared_ptr<ListenerOwner> owner,
                                     Network* network) {
  return add(std::move(owner), [&](Listener& listener, std::uint32_t index) -> Result<void> {
    auto socket = ListenSocket::open(at, kBacklog, network);
    if (!socket) return tl::unexpected(socket.error());
    listener.socket = std::move(*socket);
    return epoll_.add(listener.socket.fd(), token(TokenKind::listener, index, listener.generation),
                      interest_);
  });
}

Result<ListenerId> Listeners::listen_cm(const Address& at, std::shared_ptr<ListenerOwner> owner,
                                        CmChannel& channel) {
  return add(std::move(owner), [&](Listener& listener, std::uint32_t index) -> Result<void> {
    const std::uint64_t name = token(TokenKind::handshake, index, listener.generation);
    auto id = CmId::create(channel, cm_context(kCmListenerBit | name));
    if (!id) return tl::unexpected(id.error());
    if (auto bound = id->listen(at, kBacklog); !bound) return bound;
    listener.cm = std::move(*id);
    return {};
  });
}

Result<ListenerId> Listeners::adopt(ListenSocket&& socket, std::shared_ptr<ListenerOwner> owner) {
  return add(std::move(owner), [&](Listener& listener, std::uint32_t index) -> Result<void> {
    listener.is_shared = true;
    auto added =
        epoll_.add(socket.fd(), token(TokenKind::listener, index, listener.generation), interest_);
    if (added) listener.socket = std::move(socket);
    return added;
  });
}

int Listeners::share(ListenerId id) noexcept {
  Listener* const listener = find(id);
  if (listener == nullptr || listener->cm) return -1;
  listener->is_shared = true;
  return listener->socket.fd();
}

int Listeners::release(ListenerId id) noexcept {
  Listener& listener = *find(id);
  unwatch(listener);
  listener.is_released = true;
  ++released_;
  return listener.socket.release();
}

void Listeners::unwatch(const Listener& listener) noexcept {
  if (!listener.cm && !listener.is_released) epoll_.remove(listener.socket.fd());
}

void Listeners::stop(ListenerId id) noexcept {
  const Listener* const listener = find(id);
  if (listener == nullptr) return;
  unwatch(*listener);
  if (listener->is_released) --released_;
  listeners_[id.index].reset();
}

void Listeners::stop_all() noexcept {
  for (const auto& listener : listeners_) {
    if (listener != nullptr) unwatch(*listener);
  }
  listeners_.clear();
  released_ = 0;
}

void Listeners::watch(Interest interest) noexcept {
  interest_ = interest;
  for (std::size_t i = 0; i < listeners_.size(); ++i) {
    if (listeners_[i] == nullptr || listeners_[i]->cm || listeners_[i]->is_released) continue;
    const auto index = static_cast<std::uint32_t>(i);
    (void)epoll_.modify(listeners_[i]->socket.fd(),
                        token(TokenKind::listener, index, listeners_[i]->generation), interest);
  }
}

Listeners::Listener* Listeners::find(ListenerId id) const noexcept {
  if (id.index >= listeners_.size() || listeners_[id.index] == nullptr) return nullptr;
  return listeners_[id.index]->generation == id.generation ? listeners_[id.index].get() : nullptr;
}

std::shared_ptr<ListenerOwner> Listeners::owner_of(ListenerId id) const noexcept {
  const Listener* const listener = find(id);
  return listener != nullptr ? listener->owner : nullptr;
}

std::string Listeners::address_of(ListenerId id) const {
  const Listener* const listener = find(id);
  if (listener == nullptr || listener->is_released) return {};
  if (!listener->cm) return listener->socket.local().str();
  const auto bound = listener->cm.local_address();
  return bound ? bound->str() : std::string();
}

std::vector<std::string> Listeners::addresses() const {
  std::vector<std::string> all;
  for (std::size_t i = 0; i < listeners_.size(); ++i) {
    const Listener* const listener = listeners_[i].get();
    if (listener == nullptr || listener->is_released) continue;
    all.push_back((listener->cm ? "rdma_cm " : "tcp ") +
                  address_of({static_cast<std::uint32_t>(i), listener->generation}));
  }
  return all;
}

}  // namespace spinwire::control
