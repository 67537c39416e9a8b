// The listeners of a control port, on TCP and through rdma_cm, by their ids. Cold.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "control/address.h"
#include "control/epoll_set.h"
#include "control/owners.h"
#include "control/rdma_cm.h"
#include "control/socket.h"
#include "spinwire/status.h"

namespace spinwire::control {

class Listeners {
 public:
  /// `epoll`, which must outlive this, watches the sockets; rdma_cm has one channel for all.
  explicit Listeners(EpollSet& epoll) noexcept : epoll_(epoll) {}

  /// Errors: those of ListenSocket::open() and EpollSet::add().
  Result<ListenerId> listen(const Address& at, std::shared_ptr<ListenerOwner> owner,
                            Network* network);
  /// Errors: those of CmId::create() and CmId::listen().
  Result<ListenerId> listen_cm(const Address& at, std::shared_ptr<ListenerOwner> owner,
                               CmChannel& channel);
  /// Owns the socket, unless it fails. Errors: those of EpollSet::add().
  Result<ListenerId> adopt(ListenSocket&& socket, std::shared_ptr<ListenerOwner> owner);
  /// The socket of a listener, which is shared from now on; -1 through rdma_cm.
  int share(ListenerId id) noexcept;
  /// Whether another engine accepts at the listener's socket, or may have done so before.
  [[nodiscard]] bool is_shared(ListenerId id) const noexcept {
    const Listener* const listener = find(id);
    return listener != nullptr && listener->is_shared;
  }
  /// Stops a listener over TCP, but keeps its owner, for handshakes that were accepted before. The
  /// caller closes the socket.
  int release(ListenerId id) noexcept;
  [[nodiscard]] bool has_released() const noexcept { return released_ != 0; }
  /// Drops released listeners for which `is_needed(id)` is false.
  template <typename IsNeeded>
  void forget_released(IsNeeded&& is_needed) noexcept {
    for (std::size_t i = 0; i < listeners_.size(); ++i) {
      if (listeners_[i] == nullptr || !listeners_[i]->is_released) continue;
      if (is_needed(ListenerId{static_cast<std::uint32_t>(i), listeners_[i]->generation})) continue;
      listeners_[i].reset();
      --released_;
    }
  }
  void stop(ListenerId id) noexcept;
  void stop_all() noexcept;
  /// Sets the interest in peers that connect by TCP to any listener.
  void watch(Interest interest) noexcept;

  /// Whether it listens.
  [[nodiscard]] bool contains(ListenerId id) const noexcept {
    const Listener* const listener = find(id);
    return listener != nullptr && !listener->is_released;
  }
  /// Null once the listener is stopped.
  [[nodiscard]] std::shared_ptr<ListenerOwner> owner_of(ListenerId id) const noexcept;
  /// Empty once the listener is stopped.
  [[nodiscard]] std::string address_of(ListenerId id) const;
  /// The addresses of all listeners that listen, with the way to connect. May throw std::bad_alloc.
  [[nodiscard]] std::vector<std::string> addresses() const;
  /// Calls ListenSocket::accept() of a listener that exists.
  Result<std::optional<Accepted>> accept(ListenerId id) { return find(id)->socket.accept(); }

 private:
  struct Listener {
    ListenSocket socket;  ///< for TCP; else `cm`
    CmId cm;
    std::shared_ptr<ListenerOwner> owner;
    std::uint32_t generation = 0;
    bool is_released = false;  ///< without a socket
    bool is_shared = false;
  };

  /// Adds a listener after `open(listener, index)` has opened it.
  template <typename Open>
  Result<ListenerId> add(std::shared_ptr<ListenerOwner> owner, Open&& open);
  [[nodiscard]] Listener* find(ListenerId id) const noexcept;
  void unwatch(const Listener& listener) noexcept;

  EpollSet& epoll_;
  Interest interest_ = Interest::read;
  std::vector<std::unique_ptr<Listener>> listeners_;
  std::uint32_t generation_ = 0;
  std::uint32_t released_ = 0;
};

}  // namespace spinwire::control
