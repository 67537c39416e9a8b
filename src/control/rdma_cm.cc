#include "control/rdma_cm.h"

#include <errno.h>
#include <fcntl.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/error.h"

namespace spinwire::control {
namespace {

Status status_of(int error) noexcept {
  switch (error) {
    case ENODEV:
    case ENOENT:
    case EADDRNOTAVAIL:
      return Status::no_device;
    case EADDRINUSE:
      return Status::in_use;
    case EINVAL:
      return Status::invalid_argument;
    case ENOMEM:
      return Status::no_memory;
    default:
      return Status::system;
  }
}

/// The outcome of a call that answers 0, or -1 and errno.
Result<void> outcome(int answer, const char* call, const char* remedy) {
  if (answer == 0) return {};
  const int error = errno;
  return base::fail_errno(status_of(error), "connect through rdma_cm", call, error, remedy);
}

int milliseconds(Nanoseconds time) noexcept {
  return static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(time).count());
}

rdma_conn_param parameters(const CmParameters& offer) noexcept {
  rdma_conn_param p{};
  p.private_data = offer.data.data();
  p.private_data_len = static_cast<std::uint8_t>(offer.data.size());
  p.responder_resources = offer.responder_resources;
  p.initiator_depth = offer.initiator_depth;
  p.retry_count = offer.retry_count;
  p.rnr_retry_count = offer.rnr_retry;
  p.srq = offer.shared_receives ? 1 : 0;
  p.qp_num = offer.qp_num;
  return p;
}

void copy_parameters(const rdma_conn_param& p, CmEvent& event) noexcept {
  event.qp_num = p.qp_num;
  event.size = p.private_data == nullptr
                   ? 0
                   : std::min<std::size_t>(p.private_data_len, event.storage.size());
  if (event.size != 0) std::memcpy(event.storage.data(), p.private_data, event.size);
}

}  // namespace

std::string CmEvent::found() const noexcept {
  const char* const text = rdma_event_str(kind);
  if (kind == RDMA_CM_EVENT_REJECTED) {
    // InfiniBand specification volume 1, table 114; the reasons that occur with RDMA_PS_TCP.
    constexpr int kInvalidService = 8, kStale = 10, kByApplication = 28;
    const char* reason = status == kInvalidService  ? "nobody listens there"
                         : status == kStale         ? "the peer still knows an older connection"
                         : status == kByApplication ? "by the peer's application"
                                                    : "see the reason's number";
    return base::format("{}, reason {} ({})", text, status, reason);
  }
  if (status < 0) return base::format("{}, {}", text, base::errno_text(-status));
  return base::format("{}", text);
}

Result<CmChannel> CmChannel::open() {
  CmChannel made;
  made.channel_.reset(rdma_create_event_channel());
  if (made.channel_ == nullptr) {
    const int error = errno;
    return base::fail_errno(status_of(error), "open rdma_cm", "rdma_create_event_channel", error,
                            "load the kernel module rdma_ucm (modprobe rdma_ucm) and see that "
                            "/dev/infiniband/rdma_cm may be opened");
  }
  const int flags = fcntl(made.channel_->fd, F_GETFL);
  if (flags < 0 || fcntl(made.channel_->fd, F_SETFL, flags | O_NONBLOCK) != 0)
    return base::fail_errno(Status::system, "open rdma_cm", "fcntl", errno, "see the error");
  return made;
}

bool CmChannel::next(CmEvent& event) noexcept {
  rdma_cm_event* got = nullptr;
  if (rdma_get_cm_event(channel_.get(), &got) != 0) return false;
  event.kind = got->event;
  event.status = got->status;
  event.id = got->id;
  event.listener = got->listen_id;
  event.qp_num = 0;
  event.size = 0;
  const bool connecting =
      got->event == RDMA_CM_EVENT_CONNECT_REQUEST || got->event == RDMA_CM_EVENT_CONNECT_RESPONSE ||
      got->event == RDMA_CM_EVENT_ESTABLISHED || got->event == RDMA_CM_EVENT_REJECTED;
  if (connecting) copy_parameters(got->param.conn, event);
  // Acknowledge at once: destroying an identifier waits for the acknowledgement.
  (void)rdma_ack_cm_event(got);
  return true;
}

Result<CmId> CmId::create(const CmChannel& channel, void* context) {
  rdma_cm_id* id = nullptr;
  if (auto done = outcome(rdma_create_id(channel.get(), &id, context, RDMA_PS_TCP),
                          "rdma_create_id", "see the error");
      !done)
    return tl::unexpected(done.error());
  return CmId(id);
}

Result<void> CmId::resolve_address(const Address& to, Nanoseconds timeout, const Address* from) {
  // The call takes pointers to memory that it does not change.
  auto* const address = const_cast<sockaddr*>(to.data());
  auto* const source = from != nullptr ? const_cast<sockaddr*>(from->data()) : nullptr;
  return outcome(rdma_resolve_addr(id_.get(), source, address, milliseconds(timeout)),
                 "rdma_resolve_addr", "give an address of a network that an RDMA device is on");
}

Result<void> CmId::resolve_route(Nanoseconds timeout) {
  return outcome(rdma_resolve_route(id_.get(), milliseconds(timeout)), "rdma_resolve_route",
                 "see that the peer's network is up");
}

Result<void> CmId::listen(const Address& at, int backlog) {
  auto* const address = const_cast<sockaddr*>(at.data());
  if (auto bound = outcome(rdma_bind_addr(id_.get(), address), "rdma_bind_addr",
                           "give an address of this host that an RDMA device has, and a free port");
      !bound)
    return bound;
  return outcome(rdma_listen(id_.get(), backlog), "rdma_listen", "see the error");
}

Result<void> CmId::connect(const CmParameters& offer) {
  rdma_conn_param p = parameters(offer);
  return outcome(rdma_connect(id_.get(), &p), "rdma_connect", "see the error");
}

Result<void> CmId::accept(const CmParameters& offer) {
  rdma_conn_param p = parameters(offer);
  return outcome(rdma_accept(id_.get(), &p), "rdma_accept", "the peer may have given up; see why");
}

Result<void> CmId::establish() {
  return outcome(rdma_establish(id_.get()), "rdma_establish", "the peer may have given up");
}

void CmId::reject(std::span<const std::byte> data) noexcept {
  (void)rdma_reject(id_.get(), data.data(), static_cast<std::uint8_t>(data.size()));
}

void CmId::disconnect() noexcept { (void)rdma_disconnect(id_.get()); }

Result<void> CmId::attributes(ibv_qp_state state, ibv_qp_attr& attr, int& mask) const {
  attr.qp_state = state;
  return outcome(rdma_init_qp_attr(id_.get(), &attr, &mask), "rdma_init_qp_attr", "see the error");
}

std::string CmId::device() const {
  if (id_->verbs == nullptr) return {};
  const char* name = ibv_get_device_name(id_->verbs->device);
  return name != nullptr ? name : "";
}

Result<Address> CmId::local_address() const {
  const sockaddr* address = rdma_get_local_addr(id_.get());
  return Address::from(address, sizeof(sockaddr_storage));
}
Result<Address> CmId::peer_address() const {
  const sockaddr* address = rdma_get_peer_addr(id_.get());
  return Address::from(address, sizeof(sockaddr_storage));
}

}  // namespace spinwire::control
