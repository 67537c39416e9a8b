// spinwire-doctor: says what of this host slows an engine down or stops it, and the command that
// mends it.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "common/cli.h"
#include "doctor/certify_pair.h"
#include "doctor/checks.h"
#include "doctor/plan.h"
#include "doctor/two_hosts.h"
#include "spinwire/spinwire.h"

namespace {

using namespace spinwire;  // NOLINT: a program of one file

/// Other exit codes say what was found.
constexpr int kNotDone = 3;

struct Options {
  std::string file;
  std::string root = "/";
  bool json = false;
  bool all = false;
  std::string peer;  ///< the other host; empty: this host alone
  bool serves = false;
  std::string address{tools::kDefaultBind};  ///< to serve at
  doctor::Demand demand;
  doctor::Certification certification;
};

int fail(const Error& error) {
  (void)tools::fail(error);
  return kNotDone;
}

/// The other host, or where to serve it. False: it is no address.
bool read_address(const Options& options, std::string& name, int& port) {
  // --serve without an address has none, in spite of the default.
  const std::string own =
      options.address.empty() ? std::string(tools::kDefaultBind) : options.address;
  if (doctor::split_address(options.serves ? own : options.peer, name, port)) return true;
  (void)tools::fail("an address is HOST, HOST:PORT or [IPv6]:PORT");
  return false;
}

/// Serves, compares with another host, or examines this one.
int examine(const Options& options) {
  const bool given = !options.file.empty();
  const auto config = Config::load(options.file);
  if (!config) return fail(config.error());
  if (const auto good = config->check(); !good) return fail(good.error());
  const doctor::Host host(options.root);
  const doctor::Subject subject(host, *config, given);
  const Config measuring = doctor::measuring_config(*config, !given || options.serves);
  std::string name;
  int port = doctor::kLinkPort;
  if ((options.serves || !options.peer.empty()) && !read_address(options, name, port))
    return kNotDone;
  if (options.serves) {
    tools::catch_stop_signals();
    const auto served = doctor::serve(subject, measuring, name, port);
    return served ? 0 : fail(served.error());
  }
  const doctor::Findings findings = options.peer.empty()
                                        ? doctor::examine(subject)
                                        : doctor::examine_pair(subject, measuring, name, port);
  fmt::print("{}", options.json ? findings.json() : findings.text(options.all));
  return findings.exit_code();
}

/// From a demand to settings, or from settings to what they take and allow.
int make_plan(const Options& options) {
  const auto config =
      options.file.empty() ? doctor::plan(options.demand) : Config::load(options.file);
  if (!config) return fail(config.error());
  if (const auto good = config->check(); !good) return fail(good.error());
  if (options.json) {
    fmt::print("{}", doctor::footprint_json(*config));
  } else if (options.file.empty()) {
    fmt::print("{}\n{}", doctor::footprint_text(*config, "# "), doctor::changed_settings(*config));
  } else {
    fmt::print("{}", doctor::footprint_text(*config, ""));
  }
  return tools::kDone;
}

void add_plan(CLI::App& app, Options& options) {
  CLI::App* const plan = app.add_subcommand(
      "plan", "Prints the settings that a demand needs; or, with --config, what settings allow.");
  doctor::Demand& demand = options.demand;
  std::vector<CLI::Option*> needs{
      plan->add_option("--connections", demand.connections, "connections of the engine"),
      plan->add_option("--outstanding", demand.outstanding,
                       "messages of a peer on their way, each connection"),
      plan->add_option("--message-size", demand.message_bytes,
                       "longest message or call, in bytes or as 4KiB")
          ->transform(CLI::AsSizeValue(false)),
      plan->add_option("--long-messages", demand.long_messages,
                       "longest messages that arrive at once, if they exceed 4 KiB"),
      plan->add_option("--sessions", demand.sessions, "sessions opened, and served"),
      plan->add_option("--window", demand.window, "calls of a session at once"),
      plan->add_option("--leases", demand.leases,
                       "leases, and calls with CallOptions::reply_into, at once, each way; 0 "
                       "forbids both"),
      plan->add_option("--lease-bytes", demand.lease_bytes,
                       "memory that is exposed or leased to peers, in bytes or as 64MiB")
          ->transform(CLI::AsSizeValue(false)),
  };
  CLI::Option* const file = plan->add_option("-c,--config", options.file, "settings to explain");
  for (CLI::Option* const need : needs) file->excludes(need->capture_default_str());
  plan->add_flag("--json", options.json, "print the sizes as JSON");
}

/// Returns the option that says to serve.
CLI::Option* add_certify(CLI::App& app, Options& options) {
  CLI::App* const certify = app.add_subcommand("certify",
                                               "Runs the conformance cases, the tests of engine "
                                               "and calls, and a comparison with perftest on "
                                               "a device, and reports every departure and figure.");
  doctor::Certification& what = options.certification;
  certify->add_option("host", options.peer,
                      "certify with HOST[:PORT], where a doctor serves: each host runs the tests, "
                      "and perftest and spinwire-perf measure the way between them");
  CLI::Option* const serves = certify->add_option(
      "--serve", options.address,
      "certify with doctors of other hosts, one after the other, at ADDRESS[:PORT]; this host's "
      "alone without one. Needs a key, or security.open. Others choose neither programs nor "
      "arguments; each has --minutes");
  serves->expected(0, 1)->excludes("host");
  certify->add_option("-d,--device", what.device, "the device, as spinwire-devices names it")
      ->required();
  certify
      ->add_option("--port", what.port,
                   "number of the device's port for all parts; without one, each program chooses")
      ->check(CLI::Range(1, 255));
  certify->add_option("--gid", what.gid_index,
                      "index of the GID for the conformance cases, perftest and the way between "
                      "two hosts");
  certify->add_option("--address", what.address,
                      "IP address of the device's port; without one, tests of rdma_cm are skipped");
  certify->add_option("-c,--config", options.file,
                      "configuration of spinwire-perf, and of the engines between two hosts");
  certify->add_option("--programs", what.programs,
                      "folder of verbs-conformance, spinwire-tests and spinwire-perf; without one, "
                      "that of this program");
  certify->add_option("--tests", what.tests, "GoogleTest filter of the tests of engine and calls")
      ->capture_default_str();
  certify
      ->add_option("--slowness", what.slowness,
                   "the tests wait so many times longer, and runs are so many times shorter")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  certify->add_option("--test-seconds", what.test_seconds, "most time for one test")->group("");
  certify->add_option("--minutes", what.minutes, "most time for everything")
      ->check(CLI::Range(0.01, 1440.0))
      ->capture_default_str();
  certify
      ->add_option("--runs", what.runs,
                   "runs of perftest and of spinwire-perf for each figure; fewer if --minutes is "
                   "short")
      ->check(CLI::Range(1, 100))
      ->capture_default_str();
  certify->add_flag("--json", options.json, "print the report as JSON");
  return serves;
}

/// Certifies with another host, or serves others that do.
Result<doctor::Findings> certify_with_others(const Options& options, const std::string& name,
                                             int port) {
  const doctor::Certification& what = options.certification;
  auto config = Config::load(options.file);
  if (!config) return tl::unexpected(config.error());
  config->device.name = what.device;
  if (what.port > 0) config->device.port = static_cast<std::uint32_t>(what.port);
  if (what.gid_index >= 0) config->device.gid_index = what.gid_index;
  if (const auto good = config->check(); !good) return tl::unexpected(good.error());
  const doctor::Host host(options.root);
  const doctor::Subject subject(host, *config, true);
  const Config measuring = doctor::measuring_config(*config, true);
  if (!options.serves) return doctor::certify_pair(what, subject, measuring, name, port);

  if (config->security.key_file.empty() && !config->security.open)
    return tl::unexpected(Error{Status::invalid_argument, "serve certifications", "there is no key",
                                "set security.key_file on both hosts (spinwire-keygen), or "
                                "security.open on a network where every host is trusted"});
  doctor::Findings findings;
  if (doctor::find_device(what, findings)) {
    const auto served = doctor::serve(subject, measuring, name, port, &what);
    if (!served) return tl::unexpected(served.error());
  }
  return findings;
}

int certify_device(Options& options) {
  tools::catch_stop_signals();
  options.certification.config = options.file;
  const bool is_alone = !options.serves && options.peer.empty();
  std::string name;
  int port = doctor::kLinkPort;
  if (!is_alone && !read_address(options, name, port)) return kNotDone;
  const Result<doctor::Findings> done =
      is_alone ? doctor::certify(options.certification) : certify_with_others(options, name, port);
  if (!done) return fail(done.error());
  const doctor::Findings& findings = *done;
  if (options.serves && findings.all().empty()) return tools::kDone;
  if (!options.json) {
    fmt::print("device {}: {}\n", options.certification.device,
               findings.exit_code() == 0 ? "no departure" : "there are departures");
  }
  fmt::print("{}", options.json ? findings.json() : findings.text(true));
  return findings.exit_code();
}

}  // namespace

int main(int argc, char** argv) {
  tools::set_program("spinwire-doctor");
  tools::log_to_stderr();
  Options options;
  CLI::App app(
      "Says what of this host slows an engine down or stops it, with the command that mends it.",
      "spinwire-doctor");
  app.footer("Exit status: 0 nothing above a note, 1 warnings, 2 errors, 3 the doctor failed.");
  app.add_option("-c,--config", options.file, "configuration of the engine that is to run here");
  app.add_option("host", options.peer, "compare this host with HOST[:PORT], where a doctor serves");
  CLI::Option* const serves =
      app.add_option(
             "--serve", options.address,
             "serve doctors of other hosts at ADDRESS[:PORT]; this host's alone without one. Tells "
             "every host that reaches the port this host's kernel, versions and ports, also with a "
             "key; serve only while you compare")
          ->expected(0, 1);
  app.add_flag("--json", options.json, "print all findings as JSON");
  app.add_flag("-a,--all", options.all, "also print what is in order");
  app.add_option("--root", options.root, "folder that has the host's /proc, /sys and /dev")
      ->group("");
  add_plan(app, options);
  const CLI::Option* const certify_serves = add_certify(app, options);
  int code = 0;
  if (!tools::parse_arguments(app, argc, argv, code)) return code == tools::kDone ? 0 : kNotDone;
  options.serves = serves->count() != 0 || certify_serves->count() != 0;
  if (app.got_subcommand("certify")) return certify_device(options);
  return app.got_subcommand("plan") ? make_plan(options) : examine(options);
}
