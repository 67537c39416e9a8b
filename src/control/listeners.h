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
  void stop(ListenerId id) noexcept;
  void stop_all() noexcept;
  /// Sets the interest in peers that connect by TCP to any listener.
  void watch(Interest interest) noexcept;

  [[nodiscard]] bool contains(ListenerId id) const noexcept { return find(id) != nullptr; }
  /// Null once the listener is stopped.
  [[nodiscard]] std::shared_ptr<ListenerOwner> owner_of(ListenerId id) const noexcept;
  /// Empty once the listener is stopped.
  [[nodiscard]] std::string address_of(ListenerId id) const;
  /// Calls ListenSocket::accept() of a listener that exists.
  Result<std::optional<Accepted>> accept(ListenerId id) { return find(id)->socket.accept(); }

 private:
  struct Listener {
    ListenSocket socket;  ///< for TCP; else `cm`
    CmId cm;
    std::shared_ptr<ListenerOwner> owner;
    std::uint32_t generation = 0;
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
};

}  // namespace spinwire::control
