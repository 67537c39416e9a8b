// spinwire-devices: lists every device, port and GID, marks the one that an engine would choose,
// and says why the others were not chosen.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "common/cli.h"
#include "spinwire/spinwire.h"

namespace {

using namespace spinwire;  // NOLINT: a program of one file
using tools::fail;

struct Options {
  std::string file;
  std::optional<std::string> name;
  std::optional<std::uint32_t> port;
  std::optional<std::int32_t> gid_index;
  std::optional<std::string> address;
  bool open = false;
};

Result<Config> settings(const Options& options) {
  auto config = Config::load(options.file);
  if (!config) return config;
  if (options.name) config->device.name = *options.name;
  if (options.port) config->device.port = *options.port;
  if (options.gid_index) config->device.gid_index = *options.gid_index;
  if (options.address) config->device.address = *options.address;
  return config;
}

const char* yes_no(bool value) { return value ? "yes" : "no"; }

int show_opened(const Config& config) {
  const auto engine = Engine::open(config);
  if (!engine) return fail(engine.error());
  const DeviceInfo& d = engine->device();
  fmt::print("\nopened {}:{}, port {}, GID {} ({}, {}{}{}), link layer {}\n", d.provider, d.name,
             d.port, d.gid_index, to_string(d.gid_type), d.gid.text(), d.netdev.empty() ? "" : ", ",
             d.netdev, to_string(d.link_layer));
  fmt::print("  GUID {}\n", d.guid.text());
  fmt::print(
      "  MTU {} bytes, inline {} bytes, {} READs and atomics of ours and {} of the peer at once\n",
      d.mtu, d.inline_bytes, d.initiator_depth, d.responder_depth);
  fmt::print("  up to {} bytes in an operation\n", d.max_operation_bytes);
  fmt::print(
      "  shared receives {}, memory windows {}, datagrams {}, atomics {}, without locks {}\n",
      yes_no(d.shared_receives), yes_no(d.memory_windows), yes_no(d.datagrams), yes_no(d.atomics),
      yes_no(d.single_threaded));
  const auto has = [&](MemoryFlags flag) { return yes_no(contains(d.memory_flags, flag)); };
  fmt::print("  memory flags: on_demand {}, relaxed_ordering {}, zero_based {}, huge_pages {}\n",
             has(MemoryFlags::on_demand), has(MemoryFlags::relaxed_ordering),
             has(MemoryFlags::zero_based), has(MemoryFlags::huge_pages));
  return tools::kDone;
}

int run(const Options& options) {
  const auto config = settings(options);
  if (!config) return fail(config.error());
  const auto devices = list_devices(*config);
  if (!devices) return fail(devices.error());
  bool chosen = false;
  for (const DeviceCandidate& candidate : *devices) {
    chosen = chosen || candidate.chosen;
    fmt::print("{} {}\n", candidate.chosen ? '*' : ' ', candidate.text());
  }
  if (!chosen) return fail(fmt::format("no device is \"{}\"", config->device.name));
  return options.open ? show_opened(*config) : tools::kDone;
}

}  // namespace

int main(int argc, char** argv) {
  tools::set_program("spinwire-devices");
  tools::log_to_stderr();
  Options options;
  CLI::App app("Lists the devices and marks the one that an engine would choose.",
               "spinwire-devices");
  app.add_option("-c,--conf", options.file, "configuration file");
  app.add_option("-d,--device", options.name, "device name or auto; overrides the configuration");
  app.add_option("-i,--port", options.port, "port of the device; 0 chooses any");
  app.add_option("-x,--gid-index", options.gid_index, "GID index; -1 chooses any");
  app.add_option("-a,--address", options.address, "choose the GID of this local IP address");
  app.add_flag("-o,--open", options.open,
               "open an engine on the device and print its capabilities");
  int code = 0;
  if (!tools::parse_arguments(app, argc, argv, code)) return code;
  return run(options);
}
