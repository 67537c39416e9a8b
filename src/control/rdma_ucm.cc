#include "control/rdma_ucm.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace spinwire::control {
namespace ucm {
namespace {

constexpr const char* kDevice = "/dev/infiniband/rdma_cm";

// Copied from the kernel's rdma/rdma_user_cm.h, which cannot be included: librdmacm's header
// defines the same enumerators.
enum class Command : std::uint32_t { create_id = 0, destroy_id = 1, get_event = 12, resolve = 21 };
struct Header {
  Command command;
  std::uint16_t in;   ///< bytes of the command
  std::uint16_t out;  ///< bytes of the answer
};
struct CreateId {
  std::uint64_t key;
  std::uint64_t response;
  std::uint16_t port_space;
  std::uint8_t qp_type;
  std::uint8_t reserved[5];
};
struct Created {
  std::uint32_t id;
};
struct DestroyId {
  std::uint64_t response;
  std::uint32_t id;
  std::uint32_t reserved;
};
struct Destroyed {
  std::uint32_t events_reported;
};
struct ResolveAddress {
  std::uint32_t id;
  std::uint32_t timeout_ms;
  std::uint16_t from_size;
  std::uint16_t to_size;
  std::uint32_t reserved;
  sockaddr_storage from;
  sockaddr_storage to;
};
struct GetEvent {
  std::uint64_t response;
};
struct Event {
  std::uint64_t key;
  std::uint32_t id;
  std::uint32_t kind;
  std::int32_t status;      ///< 0, or an errno value below 0
  std::uint32_t rest[123];  ///< for connections; the kernel writes less
};
static_assert(sizeof(Header) == 8 && sizeof(CreateId) == 24 && sizeof(DestroyId) == 16 &&
              sizeof(ResolveAddress) == 16 + 2 * 128 && sizeof(Event) == 512);

/// 0 or an errno value.
template <typename Body>
int run(int fd, Command command, const Body& body, std::size_t answer = 0) noexcept {
  struct {
    Header header;
    Body body;
  } const request{{command, sizeof(Body), static_cast<std::uint16_t>(answer)}, body};
  ssize_t written = 0;
  do {
    written = ::write(fd, &request, sizeof request);
  } while (written < 0 && errno == EINTR);
  if (written < 0) return errno;
  return written == static_cast<ssize_t>(sizeof request) ? 0 : EIO;
}

std::uint64_t address_of(void* answer) noexcept { return reinterpret_cast<std::uintptr_t>(answer); }

Status status_of(int error) noexcept {
  switch (error) {
    case ENOENT:
    case ENODEV:
    case ENXIO:
    case EACCES:
    case EPERM:
      return Status::no_device;
    case ENOMEM:
      return Status::no_memory;
    default:
      return Status::system;
  }
}

}  // namespace
}  // namespace ucm

Result<UcmChannel> UcmChannel::open() {
  UcmChannel made;
  made.fd_ = base::UniqueFd(::open(ucm::kDevice, O_RDWR | O_NONBLOCK | O_CLOEXEC));
  if (!made) {
    const int error = errno;
    return base::fail_errno(ucm::status_of(error), "open rdma_cm", ucm::kDevice, error,
                            "load the kernel module rdma_ucm (modprobe rdma_ucm) and see that "
                            "/dev/infiniband/rdma_cm may be opened");
  }
  return made;
}

Result<std::uint32_t> UcmChannel::resolve(std::uint64_t key, const Address& to, const Address& from,
                                          Nanoseconds timeout) {
  const auto refused = [](const char* command, int error) {
    return base::fail_errno(ucm::status_of(error), "resolve an address", command, error,
                            "give an address of a network that an RDMA device is on");
  };
  ucm::Created made{};
  const ucm::CreateId create{key, ucm::address_of(&made), RDMA_PS_TCP, IBV_QPT_RC, {}};
  if (const int error = ucm::run(fd(), ucm::Command::create_id, create, sizeof made); error != 0)
    return refused("RDMA_USER_CM_CMD_CREATE_ID", error);
  ucm::ResolveAddress resolve{};
  resolve.id = made.id;
  resolve.timeout_ms = static_cast<std::uint32_t>(timeout / std::chrono::milliseconds(1));
  resolve.from_size = static_cast<std::uint16_t>(from.size());
  resolve.to_size = static_cast<std::uint16_t>(to.size());
  std::memcpy(&resolve.from, from.data(), from.size());
  std::memcpy(&resolve.to, to.data(), to.size());
  if (const int error = ucm::run(fd(), ucm::Command::resolve, resolve); error != 0) {
    destroy(made.id);
    return refused("RDMA_USER_CM_CMD_RESOLVE_ADDR", error);
  }
  return made.id;
}

void UcmChannel::destroy(std::uint32_t id) noexcept {
  ucm::Destroyed done{};
  (void)ucm::run(fd(), ucm::Command::destroy_id, ucm::DestroyId{ucm::address_of(&done), id, 0},
                 sizeof done);
}

std::optional<UcmEvent> UcmChannel::next() noexcept {
  ucm::Event event{};
  if (ucm::run(fd(), ucm::Command::get_event, ucm::GetEvent{ucm::address_of(&event)},
               sizeof event) != 0)
    return std::nullopt;
  return UcmEvent{event.key, static_cast<rdma_cm_event_type>(event.kind), -event.status};
}

}  // namespace spinwire::control
