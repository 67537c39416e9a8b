// A libfabric endpoint with one peer, one completion queue and receives posted for its messages.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "common/setup.h"

namespace spinwire::bench {

inline void check_fabric(ssize_t status, const char* what) {
  if (status < 0)
    give_up(std::string("libfabric: ") + what + ": " + fi_strerror(static_cast<int>(-status)));
}

class FabricEndpoint {
 public:
  /// With the provider that FI_PROV names, "shm" if none.
  explicit FabricEndpoint(std::uint64_t capabilities) {
    fi_info* hints = fi_allocinfo();
    const char* provider = std::getenv("FI_PROV");
    hints->ep_attr->type = FI_EP_RDM;
    hints->caps = capabilities;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->domain_attr->mr_mode = 0;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    hints->fabric_attr->prov_name = ::strdup(provider != nullptr ? provider : "shm");
    check_fabric(fi_getinfo(FI_VERSION(1, 17), nullptr, nullptr, 0, hints, &info_), "provider");
    fi_freeinfo(hints);
    check_fabric(fi_fabric(info_->fabric_attr, &fabric_, nullptr), "fabric");
    check_fabric(fi_domain(fabric_, info_, &domain_, nullptr), "domain");
    fi_av_attr addresses{};
    addresses.type = info_->domain_attr->av_type;
    check_fabric(fi_av_open(domain_, &addresses, &addresses_, nullptr), "address vector");
    fi_cq_attr queue{};
    queue.format = FI_CQ_FORMAT_DATA;
    queue.size = 2048;
    queue.wait_obj = FI_WAIT_NONE;
    check_fabric(fi_cq_open(domain_, &queue, &queue_, nullptr), "completion queue");
    check_fabric(fi_endpoint(domain_, info_, &endpoint_, nullptr), "endpoint");
    check_fabric(fi_ep_bind(endpoint_, &addresses_->fid, 0), "endpoint");
    check_fabric(
        fi_ep_bind(endpoint_, &queue_->fid, FI_TRANSMIT | FI_RECV | FI_SELECTIVE_COMPLETION),
        "endpoint");
    check_fabric(fi_enable(endpoint_), "endpoint");
  }
  FabricEndpoint(const FabricEndpoint&) = delete;
  FabricEndpoint& operator=(const FabricEndpoint&) = delete;

  /// Without this, the provider's segment stays in /dev/shm.
  void close() {
    fi_close(&endpoint_->fid);
    fi_close(&queue_->fid);
    fi_close(&addresses_->fid);
    fi_close(&domain_->fid);
    fi_close(&fabric_->fid);
  }

  [[nodiscard]] std::string address() const {
    std::array<char, 512> name{};
    std::size_t length = name.size();
    check_fabric(fi_getname(&endpoint_->fid, name.data(), &length), "address");
    return {name.data(), length};
  }
  void connect(const std::string& theirs) {
    if (fi_av_insert(addresses_, theirs.data(), 1, &peer_, 0, nullptr) != 1)
      give_up("libfabric: the peer's address is not taken");
  }
  [[nodiscard]] bool is_connected() const noexcept { return peer_ != FI_ADDR_UNSPEC; }

  /// Posts a receive. Its context comes back with the completion.
  void post_receive(std::byte* at, std::size_t size, fi_context2* context) {
    iovec part{at, size};
    fi_msg message{};
    message.msg_iov = &part;
    message.iov_count = 1;
    message.addr = FI_ADDR_UNSPEC;
    message.context = context;
    check_fabric(fi_recvmsg(endpoint_, &message, FI_COMPLETION), "receive");
  }
  /// Sends a message; false if there is no room for it now. A message above the provider's inject
  /// size uses `context` until the peer has it.
  bool send(const std::byte* at, std::size_t size, fi_context2* context) {
    ssize_t status = 0;
    if (size <= info_->tx_attr->inject_size) {
      status = fi_inject(endpoint_, at, size, peer_);
    } else {
      iovec part{const_cast<std::byte*>(at), size};
      fi_msg message{};
      message.msg_iov = &part;
      message.iov_count = 1;
      message.addr = peer_;
      message.context = context;
      status = fi_sendmsg(endpoint_, &message, 0);
    }
    if (status == -FI_EAGAIN) return false;
    check_fabric(status, "send");
    return true;
  }
  /// Starts a write or read whose completion brings `context`; false if there is no room now.
  bool access(bool is_write, std::byte* at, std::size_t size, std::uint64_t there,
              std::uint64_t key, fi_context2* context) {
    iovec part{at, size};
    fi_rma_iov remote{there, size, key};
    fi_msg_rma message{};
    message.msg_iov = &part;
    message.iov_count = 1;
    message.addr = peer_;
    message.rma_iov = &remote;
    message.rma_iov_count = 1;
    message.context = context;
    const ssize_t status = is_write ? fi_writemsg(endpoint_, &message, FI_COMPLETION)
                                    : fi_readmsg(endpoint_, &message, FI_COMPLETION);
    if (status == -FI_EAGAIN) return false;
    check_fabric(status, "one-sided operation");
    return true;
  }

  /// Reads up to 32 completions and hands each to `on_completion`.
  template <typename OnCompletion>
  void progress(OnCompletion&& on_completion) {
    std::array<fi_cq_data_entry, 32> entries;
    const ssize_t count = fi_cq_read(queue_, entries.data(), entries.size());
    if (count < 0 && count != -FI_EAGAIN) {
      fi_cq_err_entry error{};
      fi_cq_readerr(queue_, &error, 0);
      check_fabric(-error.err, "completion");
    }
    for (ssize_t i = 0; i < count; ++i) on_completion(entries[static_cast<std::size_t>(i)]);
  }

  struct Memory {
    std::uint64_t address;  ///< as the peer names it
    std::uint64_t key;
  };
  /// Opens memory to the peer.
  Memory open_memory(std::byte* at, std::size_t size) {
    fid_mr* region = nullptr;
    constexpr std::uint64_t kKey = 1;
    check_fabric(fi_mr_reg(domain_, at, size, FI_REMOTE_READ | FI_REMOTE_WRITE, 0, kKey, 0, &region,
                           nullptr),
                 "memory");
    const bool by_address = (info_->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0;
    return {by_address ? reinterpret_cast<std::uint64_t>(at) : 0, fi_mr_key(region)};
  }

 private:
  fi_info* info_ = nullptr;
  fid_fabric* fabric_ = nullptr;
  fid_domain* domain_ = nullptr;
  fid_av* addresses_ = nullptr;
  fid_cq* queue_ = nullptr;
  fid_ep* endpoint_ = nullptr;
  fi_addr_t peer_ = FI_ADDR_UNSPEC;
};

}  // namespace spinwire::bench
