// A network within one thread, for simulations: the control ports of engines meet in pairs of local
// sockets, whose other ends are here. So exchanges and epoll sets are those of real networks, while
// the network says when bytes arrive, by a clock of its owner's, and depends on nothing of the
// system's. Cold.
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

class SimulatedNetwork;

/// Where connections to one port wait to be accepted.
struct SimulatedListener final : control::AcceptQueue {
  Address at;
  std::uint32_t host = 0;
  int event = -1;  ///< the listener's descriptor, an eventfd that counts those that wait
  std::deque<Accepted> waiting;

  Result<std::optional<Accepted>> accept(int fd) override;
  void add(Accepted connection);
};

/// One of the network's hosts; its address is 10.0.0.1 for the first, and so on.
class SimulatedHost final : public control::Network {
 public:
  SimulatedHost(SimulatedNetwork& network, std::uint32_t number) noexcept
      : network_(network), number_(number) {}

  /// On its own address, the loopback address or any; port 0 takes a free one. Errors: in_use,
  /// invalid_argument (another host's address), limit, system.
  Result<Listening> listen(const Address& address) override;
  /// An address without a listener refuses at once; one that cannot be reached does not answer.
  /// Errors: limit, system.
  Result<Connecting> connect(const Address& remote) override;

  [[nodiscard]] Address address(std::uint16_t port) const;
  [[nodiscard]] std::uint32_t number() const noexcept { return number_; }
  /// Counts what the network did to this host's descriptors: see EpollSet::follow().
  [[nodiscard]] const std::uint64_t* change_count() const noexcept override { return &changes_; }

 private:
  friend class SimulatedNetwork;

  SimulatedNetwork& network_;
  std::uint32_t number_;
  std::uint16_t next_port_ = 49152;
  std::uint64_t changes_ = 0;
};

/// What becomes of bytes between two hosts: its owner says.
class LinkModel {
 public:
  virtual ~LinkModel() = default;
  /// Nothing passes while it is not; what is on the way waits.
  virtual bool open(std::uint32_t from, std::uint32_t to) = 0;
  /// Ticks that the next bytes take.
  virtual std::uint64_t delay(std::uint32_t from, std::uint32_t to) = 0;
};

class SimulatedNetwork {
 public:
  /// `model` outlives it.
  explicit SimulatedNetwork(LinkModel& model) noexcept : model_(model) {}
  SimulatedNetwork(const SimulatedNetwork&) = delete;
  SimulatedNetwork& operator=(const SimulatedNetwork&) = delete;

  /// Hosts are numbered from 0, up to kMostHosts.
  static constexpr std::uint32_t kMostHosts = 65534;
  SimulatedHost& add_host();
  /// Before anything else. Errors: limit, no_memory, system.
  Result<void> open();

  /// Takes what was sent and brings what has come to its time. May throw std::bad_alloc.
  void run(std::uint64_t now);
  /// The tick when run() has something to bring; kNever if nothing is on the way that may pass.
  [[nodiscard]] std::uint64_t next() const;
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};

 private:
  friend class SimulatedHost;

  struct Piece {
    std::uint64_t due;
    std::vector<std::byte> bytes;  ///< none: the stream's end
  };
  /// From one end to the other.
  struct Way {
    std::deque<Piece> pieces;
    std::uint64_t last_due = 0;
    bool ready = false;  ///< bytes, or the end, are to be taken
    bool ended = false;  ///< the stream's end was taken
    bool told = false;   ///< and brought
  };
  struct Link {
    std::uint32_t number = 0;
    std::uint32_t hosts[2];
    base::UniqueFd ends[2];  ///< ours: each faces the host's
    Way ways[2];             ///< from the host of that index to the other
    Accepted called;         ///< until it has come to its listener: the other host's end
    std::weak_ptr<SimulatedListener> listener;
    std::uint64_t announced_at = 0;  ///< tick when it comes there
    bool begun = false;              ///< that tick is known
    bool announced = false;
    bool over = false;
  };

  [[nodiscard]] std::shared_ptr<SimulatedListener> find(std::uint32_t host,
                                                        std::uint16_t port) const;
  /// The host of an address, as another host sees it; kMostHosts if there is none.
  [[nodiscard]] std::uint32_t host_of(const Address& address, std::uint32_t seen_by) const;
  Result<void> add(std::unique_ptr<Link> link);
  /// Learns what is to be taken, with one system call for up to 64 of them.
  void look();
  void advance(Link& link, std::uint64_t now);
  /// The first sign of a connection comes to its listener, if there still is one.
  void announce(Link& link, std::uint64_t now);
  void take(Link& link, unsigned from, std::uint64_t now);
  void bring(Link& link, unsigned from, std::uint64_t now);
  void notify(std::uint32_t host) noexcept;
  [[nodiscard]] std::uint64_t next_of(const Link& link) const;

  LinkModel& model_;
  std::vector<std::unique_ptr<SimulatedHost>> hosts_;
  std::vector<std::weak_ptr<SimulatedListener>> listeners_;
  std::vector<std::unique_ptr<Link>> links_;  ///< by number, in ascending order
  std::uint32_t last_link_ = 0;
  control::EpollSet ready_;
};

}  // namespace spinwire::sim
