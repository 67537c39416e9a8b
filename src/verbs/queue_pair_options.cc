// Checks the options of a queue pair against the device's limits. Cold.
#include <errno.h>

#include <utility>

#include "base/error.h"
#include "verbs/opened_device.h"

namespace spinwire::verbs {
namespace {

std::string reasons(std::span<const GidEntry> table, std::span<const GidVerdict> verdicts) {
  std::string text;
  for (std::size_t i = 0; i < table.size(); ++i)
    text += base::format("{}GID {} ({}): {}", i == 0 ? "" : "; ", table[i].index,
                         gid_text(table[i].gid), verdicts[i].reason);
  return text.empty() ? "it has no GID" : text;
}

}  // namespace

Place place_of(std::uint8_t port, const ibv_port_attr& attr, const GidEntry& gid) noexcept {
  Place place;
  place.port = port;
  place.gid_index = gid.index;
  place.gid = gid.gid;
  place.gid_type = gid.type;
  place.link_layer = layer_of(attr);
  place.lid = attr.lid;
  place.mtu = mtu_bytes(attr.active_mtu);
  place.pkeys = attr.pkey_tbl_len;
  return place;
}

Result<Place> Device::find_place(std::uint8_t port, int gid_index) {
  if (port == 0) port = place_.port;
  if (port == place_.port && (gid_index < 0 || gid_index == place_.gid_index)) return place_;
  if (port > ports_) return over_limit({"port", port, ports_}, info_.name);
  return query_place(port, gid_index);
}

Result<Device::TableSizes> Device::table_sizes(std::uint8_t port) {
  ibv_port_attr attr{};
  if (const int error = provider().query_port(context(), port, &attr); error != 0) {
    return base::fail_errno(Status::system, base::format("use port {}", port), "ibv_query_port",
                            error, "");
  }
  return TableSizes{static_cast<std::uint32_t>(attr.gid_tbl_len), attr.pkey_tbl_len};
}

bool Device::is_link_up(std::uint8_t port) {
  ibv_port_attr attr{};
  return provider().query_port(context(), port, &attr) == 0 && check_port(attr).empty();
}

Result<Place> Device::query_place(std::uint8_t port, int gid_index) {
  std::string asked = base::format("use port {}", port);
  if (gid_index >= 0) asked += base::format(", GID index {}", gid_index);
  ibv_port_attr attr{};
  if (const int error = provider().query_port(context(), port, &attr); error != 0)
    return base::fail_errno(Status::system, std::move(asked), "ibv_query_port", error, "");
  if (std::string fault = check_port(attr); !fault.empty())
    return base::fail(Status::no_device, std::move(asked), std::move(fault),
                      "set the link of the port up, or use another port");
  const std::vector<GidEntry> table = provider().gid_table(context(), port, attr.gid_tbl_len);
  GidWish wish;
  wish.index = gid_index;
  const std::vector<GidVerdict> verdicts = judge_gids(layer_of(attr), table, wish);
  const int best = best_gid(verdicts);
  if (best < 0)
    return base::fail(Status::no_device, std::move(asked), reasons(table, verdicts),
                      "give the index of an existing GID");
  return place_of(port, attr, table[static_cast<std::size_t>(best)]);
}

Result<void> Device::check(const QueuePairOptions& asked) {
  const bool raw = asked.receive_depth != 0;
  const Limit depths[] = {
      {"send_depth", asked.send_depth, max_send_depth_},
      {"initiator_depth", asked.initiator_depth, max_initiator_depth_},
      {"responder_depth", asked.responder_depth, max_responder_depth_},
  };
  const Limit sizes[] = {
      {"raw.receive_depth", asked.receive_depth, max_send_depth_},
      {"raw.max_send_sge", asked.send_elements, info_.max_sge},
      {"raw.max_recv_sge", asked.receive_elements, info_.max_sge},
  };
  if (auto good = check_each(depths, info_.name); !good) return good;
  if (asked.path.pkey_index >= asked.place.pkeys) {
    return over_limit({"pkey_index", asked.path.pkey_index, std::max(asked.place.pkeys, 1u) - 1},
                      info_.name);
  }
  if (auto good = raw ? check_each(sizes, info_.name) : Result<void>{}; !good) return good;
  if (!raw && asked.send_elements > info_.max_sge) {
    // The header of a message takes an element.
    return over_limit({"max_send_sge", asked.send_elements - 1, info_.max_sge - 1}, info_.name);
  }
  if (!raw && asked.send_depth <= options_.send_depth && asked.inline_bytes <= info_.inline_bytes &&
      asked.send_elements <= send_elements_)
    return {};
  ibv_qp* const qp = try_qp(asked);
  const int error = errno;
  if (qp != nullptr) {
    (void)provider().destroy_qp(qp);
    return {};
  }
  if (asked.inline_bytes > info_.inline_bytes)
    return over_limit({"inline_bytes", asked.inline_bytes, info_.inline_bytes}, info_.name);
  if (raw) {
    return base::fail_errno(
        Status::limit,
        base::format("raw.receive_depth = {}, max_send_sge = {}, max_recv_sge = {}, with "
                     "send_depth = {} and inline_bytes = {}",
                     asked.receive_depth, asked.send_elements, asked.receive_elements,
                     asked.send_depth, asked.inline_bytes),
        "ibv_create_qp", error, "lower one of them: no attribute reports which values go together");
  }
  return base::fail_errno(Status::limit,
                          base::format("send_depth = {}, with max_send_sge = {}", asked.send_depth,
                                       asked.send_elements - 1),
                          "ibv_create_qp", error,
                          base::format("lower one of them; the engine's own {} and {} work",
                                       options_.send_depth, send_elements_ - 1));
}

}  // namespace spinwire::verbs
