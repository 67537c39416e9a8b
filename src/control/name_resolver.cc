#include "control/name_resolver.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <new>
#include <string>
#include <utility>

#include "base/error.h"
#include "control/address.h"
#include "control/control_port.h"

namespace spinwire::control {
namespace {

struct HostAndPort {
  std::string host;
  std::string port;
};

Result<HostAndPort> split_name(std::string_view name) {
  const std::size_t colon = name.rfind(':');
  const std::string_view port = colon == name.npos ? name : name.substr(colon + 1);
  std::uint16_t number = 0;
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), number);
  const std::string_view host = name.substr(0, colon == name.npos ? 0 : colon);
  const bool good = error == std::errc() && end == port.data() + port.size() && !host.empty() &&
                    host.find(':') == host.npos;
  if (good) return HostAndPort{std::string(host), std::string(port)};
  return base::fail(Status::invalid_argument, base::format("resolve \"{}\"", name),
                    "it is no host and port", "write \"name:7777\"");
}

Status status_of_lookup(int error) noexcept {
  switch (error) {
    case EAI_NONAME:
    case EAI_NODATA:
      return Status::invalid_argument;
    case EAI_AGAIN:
      return Status::timed_out;
    case EAI_MEMORY:
      return Status::no_memory;
    default:
      return Status::system;
  }
}

}  // namespace

Result<Addresses> resolve_name(std::string_view name, Lookup lookup) {
  if (const auto numeric = Address::parse(name)) return Addresses{numeric->str()};
  const auto parts = split_name(name);
  if (!parts) return tl::unexpected(parts.error());
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int error = lookup(parts->host.c_str(), parts->port.c_str(), &hints, &list);
  if (error != 0) {
    const int number = errno;
    return base::fail(
        status_of_lookup(error), base::format("resolve \"{}\"", name),
        error == EAI_SYSTEM ? base::errno_text(number) : std::string(::gai_strerror(error)),
        "check the name, /etc/hosts and the name service");
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, ::freeaddrinfo);
  Addresses found;
  for (const addrinfo* each = list; each != nullptr; each = each->ai_next) {
    const auto address = Address::from(each->ai_addr, each->ai_addrlen);
    if (!address) continue;  // of another family
    std::string text = address->str();
    if (std::find(found.begin(), found.end(), text) == found.end())
      found.push_back(std::move(text));
  }
  if (!found.empty()) return found;
  return base::fail(Status::invalid_argument, base::format("resolve \"{}\"", name),
                    "the host has no IP address", "check the name");
}

/// Shared with the thread, so that either may end first.
struct NameResolver::Job {
  std::string name;
  ResolveCallback done;
  Lookup lookup;
  HelperEvent event;
  Result<Addresses> result;
  std::atomic<bool> is_over{false};  ///< `result` is written

  static void* run(void* argument) noexcept {
    const std::unique_ptr<std::shared_ptr<Job>> self(static_cast<std::shared_ptr<Job>*>(argument));
    Job& job = **self;
    job.result =
        base::no_throw("resolve a name", [&] { return resolve_name(job.name, job.lookup); });
    const HelperEvent event = job.event;
    job.is_over.store(true, std::memory_order_release);
    raise(event);
    return nullptr;
  }
};

NameResolver::~NameResolver() {
  if (event_ != nullptr) port_.unwatch(event_->get());
}

Result<void> NameResolver::open() {
  if (event_ != nullptr) return {};
  auto made = open_helper_event("resolve names", port_, *this);
  if (!made) return tl::unexpected(made.error());
  event_ = std::move(*made);
  return {};
}

Result<void> NameResolver::begin(std::string_view name, const ResolveCallback& done) {
  if (jobs_.size() == kMost) {
    return base::fail(Status::limit, base::format("resolve \"{}\"", name),
                      base::format("{} names are being resolved", kMost),
                      "wait until one of them is");
  }
  if (auto opened = open(); !opened) return opened;
  jobs_.reserve(kMost);
  auto job = std::make_shared<Job>();
  job->name = name;
  job->done = done;
  job->lookup = lookup_;
  job->event = event_;
  auto argument = std::make_unique<std::shared_ptr<Job>>(job);
  const auto thread = start_helper_thread("resolve a name", Job::run, argument.get());
  if (!thread) return tl::unexpected(thread.error());
  (void)argument.release();
  ::pthread_detach(*thread);
  jobs_.push_back(std::move(job));
  return {};
}

void NameResolver::on_readable() {
  clear(event_);
  // Callbacks may begin others.
  for (std::size_t i = 0; i < jobs_.size();) {
    if (!jobs_[i]->is_over.load(std::memory_order_acquire)) {
      ++i;
      continue;
    }
    const std::shared_ptr<Job> job = std::move(jobs_[i]);
    jobs_.erase(jobs_.begin() + static_cast<std::ptrdiff_t>(i));
    if (job->done) job->done(job->result);
  }
}

void NameResolver::abort() noexcept {
  for (const auto& job : jobs_) job->done = nullptr;
}

}  // namespace spinwire::control
