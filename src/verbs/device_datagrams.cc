// Queue pairs and address handles for unreliable datagrams. Set-up.
#include <errno.h>

#include "base/error.h"
#include "verbs/opened_device.h"

namespace spinwire::verbs {

namespace {

tl::unexpected<Error> refused(const char* asked, const char* call, int error) {
  return base::fail(error == ENOMEM ? Status::no_memory : Status::system, asked,
                    base::format("{}: {}", call, base::errno_text(error)),
                    error == EOPNOTSUPP || error == EINVAL
                        ? "the device may have no unreliable datagrams"
                        : "see whether the device is still there and may be used");
}

}  // namespace

/// Tests whether the device has datagram queue pairs, which no attribute reports. Only errors that
/// mean "unsupported" count.
void Device::probe_datagrams() noexcept {
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = cq_;
  init.qp_type = IBV_QPT_UD;
  init.cap = {1, 1, 1, 1, 0};
  ibv_qp* const qp = provider().create_qp(queue_pd(), &init);
  int error = qp != nullptr ? 0 : errno;
  if (qp != nullptr) {  // not every port carries them
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = place_.port;
    attr.pkey_index = options_.pkey_index;
    error = provider().modify_qp(qp, &attr,
                                 IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
    (void)provider().destroy_qp(qp);
  }
  info_.datagrams = error != EOPNOTSUPP && error != ENOSYS && error != EINVAL;
}

Result<ibv_qp*> Device::create_datagram_qp(const DatagramOptions& options) {
  destroy_left();
  leaving_.reserve(queue_pairs_ + 1);
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = cq_;
  init.qp_type = IBV_QPT_UD;
  init.cap = {options.send_depth, options.receive_depth, kSendElements, 1, options.inline_bytes};
  ibv_qp* const qp = provider().create_qp(queue_pd(), &init);
  if (qp == nullptr) return refused("make a queue pair for datagrams", "ibv_create_qp", errno);
  ++queue_pairs_;
  if (const int error = raise_datagram_qp(qp, options); error != 0) {
    destroy_qp(qp);
    return refused("bring a queue pair for datagrams up", "ibv_modify_qp", error);
  }
  return qp;
}

int Device::raise_datagram_qp(ibv_qp* qp, const DatagramOptions& options) noexcept {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = place_.port;
  attr.pkey_index = options_.pkey_index;
  attr.qkey = options.qkey;
  int error =
      provider().modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
  attr.qp_state = IBV_QPS_RTR;
  if (error == 0) error = provider().modify_qp(qp, &attr, IBV_QP_STATE);
  attr.qp_state = IBV_QPS_RTS;
  attr.sq_psn = options.psn;
  if (error == 0) error = provider().modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN);
  return error;
}

bool Device::restart_sends(ibv_qp* qp) noexcept {
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTS;
  attr.cur_qp_state = IBV_QPS_SQE;
  return provider().modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_CUR_STATE) == 0;
}

Result<ibv_ah*> Device::create_ah(const QueuePairOptions& options, const RemoteQueuePair& remote) {
  ibv_ah_attr attr = address_of(options, remote);
  ibv_ah* const ah = provider().create_ah(queue_pd(), &attr);
  if (ah == nullptr) return refused("address a peer's datagrams", "ibv_create_ah", errno);
  return ah;
}

int Device::wait_for_neighbour(const Place& from, const ibv_gid& gid) noexcept {
  QueuePairOptions options;
  options.place = from;
  RemoteQueuePair remote;
  remote.gid = gid;
  ibv_ah_attr attr = address_of(options, remote);
  errno = 0;
  ibv_ah* const ah = provider().create_ah(queue_pd(), &attr);
  if (ah == nullptr) return errno != 0 ? errno : EOPNOTSUPP;
  (void)provider().destroy_ah(ah);
  return 0;
}

void Device::destroy_ah(ibv_ah* ah) noexcept { (void)provider().destroy_ah(ah); }

bool Device::peer_has_ended(const ibv_ah* ah) const noexcept {
  return provider().peer_has_ended != nullptr && provider().peer_has_ended(ah);
}

}  // namespace spinwire::verbs
