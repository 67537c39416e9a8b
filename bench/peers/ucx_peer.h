// The same echo over UCX active messages and its shared-memory transport.
#pragma once

#include <ucp/api/ucp.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "common/echo_pair.h"

namespace spinwire::bench {

/// A worker with one endpoint.
class UcxNode {
 public:
  using Handler = ucp_am_recv_callback_t;

  /// `handler` takes the messages named `id`, with `owner` as its argument.
  UcxNode(unsigned id, Handler handler, void* owner) {
    ::setenv("UCX_TLS", "posix,self", 0);  // what the environment says wins
    ucp_config_t* config = nullptr;
    check(ucp_config_read(nullptr, nullptr, &config));
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES;
    params.features = UCP_FEATURE_AM;
    check(ucp_init(&params, config, &context_));
    ucp_config_release(config);
    ucp_worker_params_t worker{};
    worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    worker.thread_mode = UCS_THREAD_MODE_SINGLE;
    check(ucp_worker_create(context_, &worker, &worker_));
    ucp_am_handler_param_t take{};
    take.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                      UCP_AM_HANDLER_PARAM_FIELD_ARG | UCP_AM_HANDLER_PARAM_FIELD_FLAGS;
    take.id = id;
    take.cb = handler;
    take.arg = owner;
    take.flags = UCP_AM_FLAG_WHOLE_MSG;
    check(ucp_worker_set_am_recv_handler(worker_, &take));
  }
  UcxNode(const UcxNode&) = delete;
  UcxNode& operator=(const UcxNode&) = delete;
  // The process ends with its measurements; tearing down would need the other end's help.

  [[nodiscard]] std::string address() const {
    ucp_address_t* address = nullptr;
    std::size_t length = 0;
    check(ucp_worker_get_address(worker_, &address, &length));
    std::string copy(reinterpret_cast<const char*>(address), length);
    ucp_worker_release_address(worker_, address);
    return copy;
  }
  void connect(const std::string& address) {
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
    params.address = reinterpret_cast<const ucp_address_t*>(address.data());
    check(ucp_ep_create(worker_, &params, &endpoint_));
  }
  void poll() noexcept { ucp_worker_progress(worker_); }
  /// `body` has to stay as it is until the message was answered or the node is idle.
  void send(unsigned id, const EchoBody& body) noexcept {
    ucp_request_param_t params{};
    params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK;
    params.cb.send = [](void* request, ucs_status_t, void*) { ucp_request_free(request); };
    const ucs_status_ptr_t sent =
        ucp_am_send_nbx(endpoint_, id, nullptr, 0, &body, sizeof body, &params);
    if (UCS_PTR_IS_ERR(sent)) [[unlikely]]
      check(UCS_PTR_STATUS(sent));
  }
  static EchoBody body_of(const void* data, std::size_t length,
                          const ucp_am_recv_param_t* about) noexcept {
    EchoBody body{};
    if (length != sizeof body || (about->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0)
        [[unlikely]] {
      give_up("ucx: a message is not of the length sent");
    }
    std::memcpy(&body, data, sizeof body);
    return body;
  }

 private:
  static void check(ucs_status_t status) {
    if (status != UCS_OK) give_up(std::string("ucx: ") + ucs_status_string(status));
  }

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_ep_h endpoint_ = nullptr;
};

inline constexpr unsigned kUcxRequest = 0;
inline constexpr unsigned kUcxReply = 1;

class UcxServer {
 public:
  UcxServer() : node_(kUcxRequest, take, this) {}
  [[nodiscard]] UcxNode& node() noexcept { return node_; }
  void poll() noexcept { node_.poll(); }

 private:
  static ucs_status_t take(void* self, const void*, std::size_t, void* data, std::size_t length,
                           const ucp_am_recv_param_t* about) {
    auto& s = *static_cast<UcxServer*>(self);
    EchoBody& reply = s.replies_[s.answered_++ % kMostWindow];
    reply = UcxNode::body_of(data, length, about);
    ++reply.number;
    s.node_.send(kUcxReply, reply);
    return UCS_OK;
  }

  UcxNode node_;
  std::uint64_t answered_ = 0;
  std::array<EchoBody, kMostWindow> replies_{};
};

class UcxClient {
 public:
  UcxClient() : node_(kUcxReply, take, this) {}
  [[nodiscard]] UcxNode& node() noexcept { return node_; }
  void start(std::uint32_t window) noexcept {
    running_ = true;
    for (; window != 0; --window) send_next();
  }
  void stop() noexcept { running_ = false; }
  [[nodiscard]] std::uint64_t done() const noexcept { return done_; }
  [[nodiscard]] std::uint64_t outstanding() const noexcept { return sent_ - done_; }
  void poll() noexcept {
    node_.poll();
    for (; unsent_ != 0; --unsent_) send_next();
  }

 private:
  static ucs_status_t take(void* self, const void*, std::size_t, void* data, std::size_t length,
                           const ucp_am_recv_param_t* about) {
    auto& c = *static_cast<UcxClient*>(self);
    if (UcxNode::body_of(data, length, about).number != c.done_ + 1) [[unlikely]]
      give_up("ucx: a reply is not the one to be expected");
    ++c.done_;
    if (c.running_) ++c.unsent_;
    return UCS_OK;
  }
  void send_next() noexcept {
    EchoBody& request = requests_[sent_ % kMostWindow];
    request = {sent_++, {1, 2, 3}};
    node_.send(kUcxRequest, request);
  }

  UcxNode node_;
  std::uint64_t sent_ = 0;
  std::uint64_t done_ = 0;
  std::uint32_t unsent_ = 0;
  bool running_ = false;
  std::array<EchoBody, kMostWindow> requests_{};
};

}  // namespace spinwire::bench
