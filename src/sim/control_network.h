// The control ports' network of a simulation, in one thread. Each engine holds one end of a pair of
// local sockets and the network the other, so exchanges and epoll sets work as on real networks.
// The network decides by its owner's clock when bytes arrive. Cold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "base/unique_fd.h"
#include "control/address.h"
#include "control/epoll_set.h"
#include "control/socket.h"
#include "spinwire/status.h"

namespace spinwire::sim {

using control::Accepted;
using control::Address;
using control::Connecting;

class ControlNetwork;

/// The connections to one port that wait to be accepted.
struct SimulatedListener final : control::AcceptQueue,
                                 std::enable_shared_from_this<SimulatedListener> {
  explicit SimulatedListener(ControlNetwork& its_network) noexcept : network(its_network) {}

  ControlNetwork& network;
  Address at;
  std::uint32_t host = 0;
  int event = -1;  ///< the listener's descriptor, an eventfd that counts `waiting`
  base::UniqueFd
      kept;  ///< of a released listener: `event` may be closed, and its number used again
  std::deque<Accepted> waiting;

  Result<std::optional<Accepted>> accept(int fd) override;
  void release() noexcept override;
  void add(Accepted connection);
};

/// A host of the network. The first host's address is 10.0.0.1, the next one's 10.0.0.2, and so on.
class SimulatedHost final : public control::Network {
 public:
  SimulatedHost(ControlNetwork& network, std::uint32_t number) noexcept
      : network_(network), number_(number) {}

  /// Listens on the host's own address, the loopback address or any address; port 0 takes a free
  /// port. Errors: in_use, invalid_argument (another host's address), limit, system.
  Result<Listening> listen(const Address& address) override;
  Result<Listening> adopt(int fd) override;
  /// Connects to a listener. An address without a listener refuses at once; an unreachable one does
  /// not respond. Errors: limit, system.
  Result<Connecting> connect(const Address& remote) override;

  [[nodiscard]] Address address(std::uint16_t port) const;
  [[nodiscard]] std::uint32_t number() const noexcept { return number_; }
  /// Counts the network's actions on this host's descriptors: see EpollSet::follow().
  [[nodiscard]] const std::uint64_t* change_count() const noexcept override { return &changes_; }

 private:
  friend class ControlNetwork;

  ControlNetwork& network_;
  std::uint32_t number_;
  std::uint16_t next_port_ = 49152;
  std::uint64_t changes_ = 0;
};

/// Decides whether and when bytes pass between two hosts.
class LinkModel {
 public:
  virtual ~LinkModel() = default;
  /// Whether bytes may pass; bytes in flight wait until they may.
  virtual bool is_up(std::uint32_t from, std::uint32_t to) = 0;
  /// Delay of the next bytes, in ticks.
  virtual std::uint64_t draw_control_delay(std::uint32_t from, std::uint32_t to) = 0;
};

class ControlNetwork {
 public:
  /// `model` must outlive the network.
  explicit ControlNetwork(LinkModel& model) noexcept : model_(model) {}
  ControlNetwork(const ControlNetwork&) = delete;
  ControlNetwork& operator=(const ControlNetwork&) = delete;

  /// Limit on the number of hosts, which are numbered from 0.
  static constexpr std::uint32_t kMostHosts = 65534;
  SimulatedHost& add_host();
  /// Call it first. Errors: limit, no_memory, system.
  Result<void> open();

  /// Reads the bytes sent and delivers those that are due. May throw std::bad_alloc.
  void run(std::uint64_t now);
  /// The tick at which run() has bytes to deliver; kNever if none in flight may pass.
  [[nodiscard]] std::uint64_t next() const;
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};

 private:
  friend class SimulatedHost;
  friend struct SimulatedListener;

  struct Piece {
    std::uint64_t due;
    std::vector<std::byte> bytes;  ///< empty: the stream's end
  };
  /// One direction of a link.
  struct ByteStream {
    std::deque<Piece> pieces;
    std::uint64_t last_due = 0;
    bool ready = false;          ///< bytes, or the end, can be read
    bool ended = false;          ///< the stream's end was read
    bool end_delivered = false;  ///< the stream's end was delivered
  };
  struct Link {
    std::uint32_t number = 0;
    std::uint32_t hosts[2];
    base::UniqueFd ends[2];  ///< the network's ends: each faces a host's end
    ByteStream streams[2];   ///< by the index of the sending host
    Accepted called;         ///< the called host's end, until the listener gets it
    std::weak_ptr<SimulatedListener> listener;
    std::uint64_t announced_at = 0;  ///< tick at which the listener gets the connection
    bool begun = false;              ///< `announced_at` is set
    bool announced = false;
    bool over = false;
  };

  [[nodiscard]] std::shared_ptr<SimulatedListener> find(std::uint32_t host,
                                                        std::uint16_t port) const;
  /// The host of an address, as host `seen_by` resolves it; kMostHosts if there is none.
  [[nodiscard]] std::uint32_t host_of(const Address& address, std::uint32_t seen_by) const;
  Result<void> add(std::unique_ptr<Link> link);
  /// Finds the links with bytes to read, with one system call for up to 64 events.
  void poll_links();
  void advance(Link& link, std::uint64_t now);
  /// Gives a new connection to its listener, if the listener still exists.
  void announce(Link& link, std::uint64_t now);
  void collect_sent(Link& link, unsigned from, std::uint64_t now);
  void deliver_due(Link& link, unsigned from, std::uint64_t now);
  void notify(std::uint32_t host) noexcept;
  [[nodiscard]] std::uint64_t next_of(const Link& link) const;

  LinkModel& model_;
  std::vector<std::unique_ptr<SimulatedHost>> hosts_;
  std::vector<std::weak_ptr<SimulatedListener>> listeners_;
  std::vector<std::shared_ptr<SimulatedListener>> released_;  ///< connections wait there
  std::vector<std::unique_ptr<Link>> links_;                  ///< by number, in ascending order
  std::uint32_t last_link_ = 0;
  control::EpollSet ready_;
};

}  // namespace spinwire::sim
