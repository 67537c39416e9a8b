#include "control/rdma_cm.h"

#include <errno.h>
#include <fcntl.h>
#include <fmt/format.h>

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
    case EMFILE:
    case ENFILE:
      return Status::limit;
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

rdma_conn_param parameters(const CmOffer& offer) noexcept {
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

void copy_parameters(const rdma_conn_param& p, CmNews& news) noexcept {
  news.qp_num = p.qp_num;
  news.initiator_depth = p.initiator_depth;
  news.responder_resources = p.responder_resources;
  news.size = p.private_data == nullptr
                  ? 0
                  : std::min<std::size_t>(p.private_data_len, news.storage.size());
  if (news.size != 0) std::memcpy(news.storage.data(), p.private_data, news.size);
}

}  // namespace

std::string CmNews::found() const {
  std::string text = rdma_event_str(kind);
  if (kind == RDMA_CM_EVENT_REJECTED) {
    // InfiniBand specification volume 1, table 114; those that RDMA_PS_TCP meets.
    constexpr int kInvalidService = 8, kStale = 10, kByApplication = 28;
    const char* reason = status == kInvalidService  ? "nobody listens there"
                         : status == kStale         ? "the peer still knows an older connection"
                         : status == kByApplication ? "by the peer's application"
                                                    : "see the reason's number";
    return fmt::format("{}, reason {} ({})", text, status, reason);
  }
  if (status < 0) text += fmt::format(", {}", base::errno_text(-status));
  return text;
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

bool CmChannel::next(CmNews& news) noexcept {
  rdma_cm_event* event = nullptr;
  if (rdma_get_cm_event(channel_.get(), &event) != 0) return false;
  news.kind = event->event;
  news.status = event->status;
  news.id = event->id;
  news.listener = event->listen_id;
  news.qp_num = 0;
  news.size = 0;
  const bool connecting = event->event == RDMA_CM_EVENT_CONNECT_REQUEST ||
                          event->event == RDMA_CM_EVENT_CONNECT_RESPONSE ||
                          event->event == RDMA_CM_EVENT_ESTABLISHED ||
                          event->event == RDMA_CM_EVENT_REJECTED;
  if (connecting) copy_parameters(event->param.conn, news);
  // Acknowledged at once: destroying an identifier waits for that.
  (void)rdma_ack_cm_event(event);
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

Result<void> CmId::resolve_address(const Address& to, Nanoseconds timeout) {
  // The call takes a pointer to memory that it does not change.
  auto* const address = const_cast<sockaddr*>(to.data());
  return outcome(rdma_resolve_addr(id_.get(), nullptr, address, milliseconds(timeout)),
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

Result<void> CmId::connect(const CmOffer& offer) {
  rdma_conn_param p = parameters(offer);
  return outcome(rdma_connect(id_.get(), &p), "rdma_connect", "see the error");
}

Result<void> CmId::accept(const CmOffer& offer) {
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
