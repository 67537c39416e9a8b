// Resolves host names without blocking polls: a thread waits for the name service, and exists only
// while it does. Cold.
#pragma once

#include <netdb.h>

#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

#include "control/helper_thread.h"
#include "control/owners.h"
#include "spinwire/resolve.h"

namespace spinwire::control {

class ControlPort;

/// Asks the name service, as getaddrinfo(3) does; may block.
using Lookup = int (*)(const char* host, const char* port, const addrinfo* hints, addrinfo** found);

/// Blocks while the lookup does. Errors: those of spinwire::resolve().
Result<Addresses> resolve_name(std::string_view name, Lookup lookup = ::getaddrinfo);

class NameResolver final : public DescriptorOwner {
 public:
  /// Names that are resolved at once, each by a thread.
  static constexpr std::size_t kMost = 16;

  explicit NameResolver(ControlPort& port) noexcept : port_(port) {}
  NameResolver(const NameResolver&) = delete;
  NameResolver& operator=(const NameResolver&) = delete;
  /// Runs no callback. A thread that still waits ends by itself, and touches nothing of ours.
  ~NameResolver() override;

  /// Begins to resolve a name; `done` runs in a later poll. Errors: limit (kMost names, descriptors
  /// or threads), no_memory, system.
  Result<void> begin(std::string_view name, const ResolveCallback& done);
  void on_readable() override;
  /// Drops the callbacks.
  void abort() noexcept;
  /// For tests: names that are resolved from now on.
  void set_lookup(Lookup lookup) noexcept { lookup_ = lookup; }

 private:
  struct Job;

  Result<void> open();

  ControlPort& port_;
  Lookup lookup_ = ::getaddrinfo;
  HelperEvent event_;  ///< the threads raise it
  std::vector<std::shared_ptr<Job>> jobs_;
};

}  // namespace spinwire::control
