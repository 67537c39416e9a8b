#include "common/perf_server.h"

#include <algorithm>

namespace spinwire::tools {

Result<void> PerfServer::listen(const std::string& address) {
  // Pools too small for remote calls suffice for the other tests.
  serves_calls_ = calls_.serve(most_clients_, [this] { return has_room(); });
  ListenOptions options;
  options.on_accept = [this](Connection c) { on_accept(c); };
  auto listener = engine_.listen(address, options);
  if (!listener) return tl::unexpected(listener.error());
  listener_ = std::move(*listener);
  return {};
}

void PerfServer::on_accept(Connection client) {
  if (!has_room()) return static_cast<void>(client.close());
  clients_.push_back(std::make_unique<ServedClient>(engine_, client, news_));
}

int PerfServer::turn() {
  // While clients measure, control steps are rare: other clients have time.
  const bool is_hot = is_measuring_ && (++turns_ & 0xfff) != 0;
  const int events = is_hot ? engine_.poll() : drive(engine_);
  bool is_measuring = calls_.running() != 0;
  bool is_any_over = false;
  calls_.turn();
  for (const auto& client : clients_) {
    client->turn();
    if (!is_hot) client->check_progress();
    is_measuring |= client->measuring();
    is_any_over |= client->over();
  }
  is_measuring_ = is_measuring;
  if (is_any_over) [[unlikely]]
    remove_gone();
  if (is_measuring) [[likely]]
    idle_care_.turn(engine_, events);
  return events;
}

void PerfServer::remove_gone() {
  std::erase_if(clients_, [this](const auto& client) {
    if (!client->over()) return false;
    ++served_;
    failed_ += client->failed() ? 1 : 0;
    return true;
  });
}

std::string PerfServer::next_news() {
  std::string line = std::move(news_.front());
  news_.pop_front();
  return line;
}

}  // namespace spinwire::tools
