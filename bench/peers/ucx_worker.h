// A UCX worker with one endpoint.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdlib>
#include <string>

#include "common/setup.h"

namespace spinwire::bench {

inline void check_ucx(ucs_status_t status, const char* what) {
  if (status != UCS_OK) give_up(std::string("ucx: ") + what + ": " + ucs_status_string(status));
}

/// Frees a request that has ended, for operations that need to know nothing more.
inline void free_ucx_request(void* request, ucs_status_t, void*) { ucp_request_free(request); }

class UcxWorker {
 public:
  explicit UcxWorker(std::uint64_t features) {
    // The fastest of UCX's shared-memory transports at nearly all sizes. UCX_TLS in the environment
    // wins.
    ::setenv("UCX_TLS", "posix,self", 0);
    ucp_config_t* config = nullptr;
    check_ucx(ucp_config_read(nullptr, nullptr, &config), "configuration");
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES;
    params.features = features;
    check_ucx(ucp_init(&params, config, &context_), "context");
    ucp_config_release(config);
    ucp_worker_params_t worker{};
    worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    worker.thread_mode = UCS_THREAD_MODE_SINGLE;
    check_ucx(ucp_worker_create(context_, &worker, &worker_), "worker");
  }
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;
  // The process ends with its measurement; tearing down would need the other end's help.

  [[nodiscard]] std::string address() const {
    ucp_address_t* address = nullptr;
    std::size_t length = 0;
    check_ucx(ucp_worker_get_address(worker_, &address, &length), "address");
    std::string copy(reinterpret_cast<const char*>(address), length);
    ucp_worker_release_address(worker_, address);
    return copy;
  }
  void connect(const std::string& address) {
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
    params.address = reinterpret_cast<const ucp_address_t*>(address.data());
    check_ucx(ucp_ep_create(worker_, &params, &endpoint_), "endpoint");
  }
  void progress() noexcept { ucp_worker_progress(worker_); }
  [[nodiscard]] bool is_connected() const noexcept { return endpoint_ != nullptr; }

  [[nodiscard]] ucp_context_h context() const noexcept { return context_; }
  [[nodiscard]] ucp_worker_h worker() const noexcept { return worker_; }
  [[nodiscard]] ucp_ep_h endpoint() const noexcept { return endpoint_; }

 private:
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_ep_h endpoint_ = nullptr;
};

}  // namespace spinwire::bench
