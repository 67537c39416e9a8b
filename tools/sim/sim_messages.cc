// Connections of the simulated workload: messages of all lengths, which must arrive whole, once and
// in order.
#include <algorithm>
#include <cstring>
#include <utility>

#include "sim/sim_world.h"

namespace spinwire::tools {

void SimWorld::listen(NodeId node) {
  ListenOptions options;
  const ConnectionHandlers handlers = {
      .on_ready = {},
      .on_message = [this, node](Connection, Message& m) { on_message(node, m); },
      .on_offer = {},
      .on_lease = {},
      .on_memory_request = [this, node](Connection,
                                        MemoryRequest& r) { on_memory_request(node, r); },
      .on_returned = [this, node](Connection, const Returned& r) { on_returned(node, r); },
      .on_closed = {},
      .on_interrupted = {}};
  options.handlers = handlers;
  options.on_connect_request = [this, node](PeerRequest& r) { on_peer_request(node, r); };
  options.on_session_request = [this, node](PeerRequest& r) { on_peer_request(node, r); };
  SimHost& host = hosts_[home(node)];
  const bool adopts = host.listener >= 0;
  auto listener = adopts ? sim_.engine(node).adopt_listener(host.listener, options)
                         : sim_.engine(node).listen(Simulation::address(home(node)), options);
  if (adopts && listener) host.listener = -1;
  if (!listener) return fail("node {}: {}", node, listener.error().message());
  actors_[node].listener = std::move(*listener);
  host.good_since = sim_.now();
}

void SimWorld::connect(NodeId from, NodeId to) {
  if (is_leaving(from)) return;
  const auto index = static_cast<std::uint32_t>(links_.size());
  SimLink& l = links_.emplace_back();
  l.reconnects = (has_failovers_ || has_local_paths_) && sim_.chance(has_local_paths_ ? 0.8 : 0.5);
  choose_targets(l, from, to);
  choose_local_paths(l);
  l.troubled = l.troubled || hosts_[home(from)].shaky ||
               std::any_of(l.targets.begin(), l.targets.end(),
                           [this](const auto& target) { return hosts_[target.first].shaky; });
  ConnectOptions options;
  options.timeout = l.timeout = has_own_ports(l) ? 100ms : 500ms;
  options.alternatives = alternatives(l);
  options.local_paths = l.local_paths;
  if (l.reconnects) options.reconnect = {10'000, 1ms, 20ms};
  options.handlers.on_ready = [this, index](Connection) { on_link_ready(index); };
  options.handlers.on_interrupted = [this, index](Connection, const Error& why) {
    on_link_interrupted(index, why);
  };
  options.handlers.on_closed = [this, index](Connection, const Error& why) {
    on_link_closed(index, why);
  };
  auto made = sim_.engine(from).connect(Simulation::address(to), options);
  if (!made) {
    l.over = true;
    if (is_every_link_down(l) && made.error().status == Status::system) return connect_later(l);
    return fail("connection {}: {}", index, made.error().message());
  }
  l.handle = *made;
  actors_[from].links.push_back(index);
  rouse(from);
}

void SimWorld::on_link_ready(std::uint32_t index) {
  SimLink& l = links_[index];
  if (l.ready && !l.interrupted) fail("connection {} is ready twice", index);
  l.ready = true;
  l.interrupted = false;
  ++l.epoch;
  l.sent = 0;
  on_path_ready(l, "connection", index, l.handle.peer());
  note_port(l, "connection", index, l.handle.local_path());
}

void SimWorld::on_link_interrupted(std::uint32_t index, const Error& why) {
  SimLink& l = links_[index];
  if (!sim_.alive(l.from)) return;
  sim_.note(static_cast<std::uint64_t>(why.status) << 32 | index);
  if (!l.ready || !l.reconnects || std::exchange(l.interrupted, true))
    fail("connection {} is interrupted twice", index);
  if (!has_reason(l, why))
    fail("connection {} from {} to {} is interrupted without a reason: {}", index, l.from, l.to(),
         why.message());
  on_path_down(l, "connection", index, why);
}

void SimWorld::on_link_closed(std::uint32_t index, const Error& why) {
  SimLink& l = links_[index];
  if (!sim_.alive(l.from)) return;
  sim_.note(static_cast<std::uint64_t>(why.status) << 32 | index);
  if (std::exchange(l.over, true)) fail("connection {} is closed twice", index);
  check_end(l, "connection", index, why);
  if (why.status != Status::ok && !has_reason(l, why))
    fail("connection {} from {} to {} ends without a reason: {}", index, l.from, l.to(),
         why.message());
  if (why.status == Status::ok && !l.closing && !l.leaving && !l.troubled)
    fail("connection {} closed without a request", index);
  connect_later(l);
}

/// Another connection takes the place of one that is over.
void SimWorld::connect_later(const SimLink& l) {
  if (winding_up_) return;
  const auto again = [this, from = l.from, to = l.to(), incarnation = l.incarnation] {
    if (is_incarnation(from, incarnation) && !winding_up_) connect(from, to);
  };
  sim_.at(sim_.now() + below(pace_ * 8), again);
}

void SimWorld::send_message(std::uint32_t index) {
  SimLink& l = links_[index];
  const std::uint64_t number = messages_.size();
  auto size = static_cast<std::uint32_t>(8 + sim_.random(sim_.chance(0.5) ? 100 : 3000));
  if (sim_.chance(0.03)) size = static_cast<std::uint32_t>(3000 + sim_.random(100'000));
  Buffer buffer = sim_.engine(l.from).allocate(size);
  if (!buffer) return;
  fill(buffer.bytes().first(size), number, false);
  const Status status =
      l.handle.send(buffer.slice(), [this, number](const Completion& c) { on_sent(number, c); });
  if (status == Status::would_block || (status == Status::not_connected && l.leaving)) return;
  if (status != Status::ok)
    return fail("message {} of {} bytes was refused: {}", number, size, to_string(status));
  SimMessage& m = messages_.emplace_back();
  m.link = index;
  m.place = ++l.sent;
  m.epoch = l.epoch;
  m.size = size;
  ++outcome_.messages;
  ++unsent_;
}

void SimWorld::on_sent(std::uint64_t number, const Completion& completion) {
  SimMessage& m = messages_[number];
  const SimLink& l = links_[m.link];
  if (!is_incarnation(l.from, l.incarnation)) return;
  sim_.note(number << 8 | static_cast<std::uint64_t>(completion.status));
  if (++m.ended != 1) return fail("message {} ends for the {}th time", number, m.ended);
  --unsent_;
  m.status = completion.status;
  const bool was_closed = m.status == Status::flushed && l.closing;
  if (m.status != Status::ok && !l.troubled && !is_cut_off(l) && !was_closed)
    fail("message {} ends with {} without a reason", number, to_string(m.status));
}

void SimWorld::on_message(NodeId node, Message& message) {
  if (!sim_.alive(node)) return;
  std::uint64_t number = 0;
  if (message.size() < sizeof number)
    return fail("a message of {} bytes reached node {}", message.size(), node);
  std::memcpy(&number, message.data(), sizeof number);
  if (number >= messages_.size())
    return fail("a message reached node {} that was never sent", node);
  SimMessage& m = messages_[number];
  SimLink& l = links_[m.link];
  sim_.note(number);
  if (!l.may_reach(home(node))) return fail("message {} comes to node {}", number, node);
  if (++m.delivered != 1) return fail("message {} comes for the {}th time", number, m.delivered);
  // The server may hear of the end of an earlier connection only after the client has another: each
  // connection has its own order.
  l.delivered.resize(std::max<std::size_t>(l.delivered.size(), l.epoch + 1));
  std::uint64_t& delivered = l.delivered[m.epoch];
  if (m.place != ++delivered)
    return fail("message {}, the {}th of its connection, comes as the {}th", number, m.place,
                delivered);
  if (message.size() != m.size || !holds({message.data(), message.size()}, number, false))
    return fail("message {} comes with other bytes or another length", number);
  count(SimEvent::messages);
}

}  // namespace spinwire::tools
