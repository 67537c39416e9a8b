#include "config/local_paths.h"

#include <string>
#include <utility>

#include "base/error.h"

namespace spinwire::config {
namespace {

std::string text_of(const LocalPath& path) {
  return path.gid_index ? base::format("port {}, GID index {}", path.port, *path.gid_index)
                        : base::format("port {}", path.port);
}

tl::unexpected<Error> no_such_path(const LocalPath& path, std::string found) {
  return base::fail(Status::no_device, base::format("use the local path {}", text_of(path)),
                    std::move(found),
                    "name ports and GID indexes of the engine's device; a port of another device "
                    "needs an engine of its own");
}

tl::unexpected<Error> no_such_pkey(const LocalPath& path, std::uint32_t pkeys,
                                   std::uint16_t pkey_index) {
  return base::fail(
      Status::limit, base::format("use the local path {}", text_of(path)),
      base::format("pkey_index is {}, and the port's table of partition keys has {} entr{}",
                   pkey_index, pkeys, pkeys == 1 ? "y" : "ies"),
      "give a pkey_index (queue_pair.pkey_index for sessions) that all local paths have");
}

Result<void> check_local_path(verbs::Device& device, const LocalPath& path,
                              std::uint16_t pkey_index) {
  const std::uint32_t ports = device.ports();
  if (path.port == 0 || path.port > ports) {
    return no_such_path(path, base::format("device {} has {} port{}, counted from 1",
                                           device.info().name, ports, ports == 1 ? "" : "s"));
  }
  const auto sizes = device.table_sizes(static_cast<std::uint8_t>(path.port));
  if (!sizes) return tl::unexpected(sizes.error());
  if (path.gid_index.value_or(0) >= sizes->gids) {
    return no_such_path(path, base::format("the GID table of port {} of device {} has {} entries, "
                                           "counted from 0",
                                           path.port, device.info().name, sizes->gids));
  }
  if (pkey_index >= sizes->pkeys) return no_such_pkey(path, sizes->pkeys, pkey_index);
  return {};
}

}  // namespace

Result<void> check_local_paths(verbs::Device& device, const std::vector<LocalPath>& paths,
                               std::uint16_t pkey_index) {
  for (const LocalPath& path : paths) {
    if (auto good = check_local_path(device, path, pkey_index); !good) return good;
  }
  return {};
}

Result<void> check_local_paths(verbs::Device& device, const std::vector<LocalPath>& paths,
                               const ConnectionSettings& settings, bool through_cm,
                               std::uint16_t pkey_index) {
  if (paths.empty()) return {};
  if (through_cm) {
    return base::fail(Status::invalid_argument,
                      base::format("connect through {} local paths", paths.size()),
                      "rdma_cm finds the port and the GID by the addresses",
                      "leave local_paths out, or connect with Via::tcp");
  }
  if (settings.port || settings.gid_index) {
    return base::fail(Status::invalid_argument,
                      base::format("connect through {} local paths", paths.size()),
                      "the settings of the connection name a port or a GID index, too",
                      "give ports and GID indexes in local_paths only");
  }
  return check_local_paths(device, paths, pkey_index);
}

LocalPath engines_own(const verbs::Device& device) noexcept {
  return {device.place().port, static_cast<std::uint32_t>(device.place().gid_index)};
}

bool is_engines_own(const verbs::Device& device, const LocalPath& path) noexcept {
  const LocalPath own = engines_own(device);
  return path.port == own.port && path.gid_index.value_or(*own.gid_index) == *own.gid_index;
}

Result<void> use_local_path(verbs::QueuePairOptions& to, verbs::Device& device,
                            const LocalPath& path) {
  const int any = path.port == device.place().port ? device.place().gid_index : -1;
  const int gid_index = path.gid_index ? static_cast<int>(*path.gid_index) : any;
  auto place = device.query_place(static_cast<std::uint8_t>(path.port), gid_index);
  if (!place) {
    Error why = std::move(place.error());
    // What is wrong with a path that exists may pass.
    if (why.status == Status::no_device) why.status = Status::system;
    return tl::unexpected(std::move(why));
  }
  if (to.path.pkey_index >= place->pkeys)
    return no_such_pkey(path, place->pkeys, to.path.pkey_index);
  to.place = *place;
  return {};
}

}  // namespace spinwire::config
