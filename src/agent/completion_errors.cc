// Failed completions: their effect on the connection, and the text of the error. Cold.

#include <utility>

#include "agent/agent.h"
#include "agent/completion.h"
#include "base/error.h"

namespace spinwire::agent {
namespace {

const char* kind_text(OperationKind kind) noexcept {
  switch (kind) {
    case OperationKind::send:
    case OperationKind::send_imm:
    case OperationKind::raw_send:
    case OperationKind::raw_send_imm:
    case OperationKind::send_gathered:
    case OperationKind::notice:
      return "a SEND";
    case OperationKind::write:
    case OperationKind::write_imm:
    case OperationKind::raw_write_imm:
    case OperationKind::write_gathered:
    case OperationKind::noticed_write:
      return "a WRITE";
    case OperationKind::read:
      return "a READ";
    case OperationKind::compare_swap:
    case OperationKind::fetch_add:
      return "an atomic";
    case OperationKind::credit_write:
      return "the WRITE of a credit";
    case OperationKind::credit_message:
      return "a message about credit";
    case OperationKind::rendezvous_read:
      return "the READ of a rendezvous message";
    case OperationKind::rendezvous_bind:
    case OperationKind::rendezvous_unbind:
    case OperationKind::lease_bind:
    case OperationKind::lease_unbind:
      return "a memory window's work request";
    case OperationKind::rendezvous_offer:
    case OperationKind::rendezvous_offer_imm:
      return "the offer of a rendezvous message";
    case OperationKind::control_message:
    case OperationKind::credit_return:
    case OperationKind::goodbye:
    case OperationKind::cancelled:
      break;
  }
  return "a control message";
}

/// The likely cause of a completion status, and the remedy.
const char* likely_cause(const EngineContext& ctx, ibv_wc_status status) noexcept {
  const bool is_embedded = ctx.device->info().gid_type == GidType::embedded;
  switch (status) {
    case IBV_WC_RETRY_EXC_ERR:
      return is_embedded
                 ? "the peer's process is gone, has closed its device, or its queue pair has failed"
                 : "the peer's process is gone or its queue pair has failed; else packets are lost "
                   "on the way: see both GIDs, the MTU of every hop, and flow control";
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return "the peer has no receive posted: see whether its engine is polled";
    case IBV_WC_REM_ACCESS_ERR:
      return "the peer's memory was revoked, is smaller or of other rights than was used, or in "
             "another protection domain than the peer's end (own_domain)";
    case IBV_WC_REM_OP_ERR:
      if (is_embedded)
        return "the memory lies in no pool, and the process that copies it, the other one's of a "
               "send, needs SOFTVERBS_TRUST_PAGES=1; or the peer's device could not do it";
      [[fallthrough]];
    case IBV_WC_REM_INV_REQ_ERR:
      return "the peer's device could not do it: see its events and the longest message it takes";
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_ACCESS_ERR:
      return "local memory was deregistered while in use, is of another connection's domain, or "
             "lacks a right that the operation needs";
    case IBV_WC_LOC_LEN_ERR:
      return "the local device takes no message of that length: see its max_msg_sz";
    case IBV_WC_LOC_QP_OP_ERR:
    case IBV_WC_LOC_EEC_OP_ERR:
      return "the local device could not execute it: some devices report a wrong length, an "
             "invalid key or a wrong queue-pair state this way; see that no memory is deregistered "
             "while in use";
    case IBV_WC_MW_BIND_ERR:
      return "the local device could not bind a window: its memory lacks the rights, or is gone";
    case IBV_WC_WR_FLUSH_ERR:
      return "the local queue pair failed earlier and reported no error: the peer asked for what "
             "it may not do, or the device failed; see the device's events";
    case IBV_WC_FATAL_ERR:
      return "the local device has failed: see the system's log, then open another engine";
    default:
      return "see the completion's status; the connection cannot be used any more";
  }
}

/// Whether the peer's device refused our word in the peer's credit cell. A peer keeps its cell
/// until its queue pair is gone, but the system may free a dead process's memory before its queue
/// pairs.
bool is_cell_gone(OperationKind kind, ibv_wc_status status) noexcept {
  return kind == OperationKind::credit_write && status == IBV_WC_REM_ACCESS_ERR;
}

/// What a failed operation says of its connection.
Status connection_status(OperationKind kind, ibv_wc_status status) noexcept {
  if (is_cell_gone(kind, status)) return Status::peer_lost;
  // A flush on a connection that does not end means that the local queue pair has failed.
  return status == IBV_WC_WR_FLUSH_ERR ? Status::local_error : status_of(status);
}

Error operation_error(const EngineContext& ctx, const Agent& a, OperationKind kind,
                      const ibv_wc& wc) {
  const verbs::QueuePairOptions& ours = a.attributes.queue_pair;
  return base::make_error(
      connection_status(kind, wc.status),
      base::format("{} on queue pair {:#x} ({}) to {}, queue pair {:#x} ({})", kind_text(kind),
                   wc.qp_num, verbs::gid_text(ours.place.gid), a.peer.name.data(),
                   a.peer.queue_pair.qp_num, verbs::gid_text(a.peer.queue_pair.gid)),
      base::format("completion status {} ({}), vendor error {:#x}; ack_timeout {}, retry_count {}, "
                   "rnr_retry {}",
                   static_cast<int>(wc.status), ibv_wc_status_str(wc.status), wc.vendor_err,
                   ours.retry.ack_timeout, ours.retry.retry_count, ours.retry.rnr_retry),
      is_cell_gone(kind, wc.status)
          ? "the peer's process is gone: its credit cell was freed before its queue pair"
          : likely_cause(ctx, wc.status));
}

/// Why a receive failed. A message longer than its receive is the peer's fault; other errors are
/// local. Soft-RoCE reports both with one status.
Error receive_error(const Agent& a, const ibv_wc& wc) noexcept {
  const bool is_peers_fault = wc.status == IBV_WC_LOC_LEN_ERR ||
                              wc.status == IBV_WC_LOC_QP_OP_ERR ||
                              wc.status == IBV_WC_REM_INV_REQ_ERR;
  return base::make_error(
      is_peers_fault ? Status::protocol : status_of(wc.status),
      base::format("receive a message from {}", a.peer.name.data()),
      base::format("completion status {} ({}), vendor error {:#x}", static_cast<int>(wc.status),
                   ibv_wc_status_str(wc.status), wc.vendor_err),
      is_peers_fault
          ? "the peer sent more than the limit it was told"
          : "the local memory of a receive is gone, or the device has failed: see its events");
}

}  // namespace

void on_operation_failed(EngineContext& ctx, Agent& a, OperationKind kind,
                         const ibv_wc& wc) noexcept {
  if (kind == OperationKind::goodbye) return;  // the peer was gone first; continue_close() follows
  if (wc.status == IBV_WC_WR_FLUSH_ERR && a.state == ConnectionState::draining) return;
  try {
    // The peer's device refuses the key that the peer offered: the peer is at fault.
    const bool offered =
        kind == OperationKind::rendezvous_read && wc.status == IBV_WC_REM_ACCESS_ERR;
    Error cause = operation_error(ctx, a, kind, wc);
    offered ? fail_protocol(ctx, a, std::move(cause)) : fail(ctx, a, std::move(cause));
  } catch (...) {
    fail(ctx, a, base::out_of_memory());
  }
}

void on_receive_failed(EngineContext& ctx, Agent& a, const ibv_wc& wc) noexcept {
  if (a.own_queue != kNone) stop_own_receives(ctx, a);
  if (wc.status == IBV_WC_WR_FLUSH_ERR) return;
  Error cause = receive_error(a, wc);
  const bool is_peers_fault = cause.status == Status::protocol;
  is_peers_fault ? fail_protocol(ctx, a, std::move(cause)) : fail(ctx, a, std::move(cause));
}

}  // namespace spinwire::agent
