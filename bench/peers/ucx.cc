// UCX on one host: active messages for requests and replies, put and get for one-sided operations.
#include <ucp/api/ucp.h>

#include <cstring>
#include <string>
#include <vector>

#include "peers/harness/measure.h"
#include "peers/harness/window.h"
#include "peers/ucx_worker.h"

namespace spinwire::bench {
namespace {

constexpr unsigned kRequest = 0;
constexpr unsigned kReply = 1;

// ---- messages -----------------------------------------------------------------------------------

class UcxMessages : public PeerNodeBase {
 public:
  UcxMessages(const Options& options, Role role)
      : options_(options),
        role_(role),
        window_(options),
        ucx_(UCP_FEATURE_AM),
        requests_(options.window * stride_of(options.size), std::byte{3}),
        replies_(options.window * stride_of(options.reply_size)),
        landings_(2 * std::size_t{options.window}) {
    for (Landing& landing : landings_) free_landings_.push_back(&landing);
    set_handler(kRequest, [](void* self, const void*, std::size_t, void* data, std::size_t length,
                             const ucp_am_recv_param_t* about) {
      return static_cast<UcxMessages*>(self)->receive(kRequest, data, length, about);
    });
    set_handler(kReply, [](void* self, const void*, std::size_t, void* data, std::size_t length,
                           const ucp_am_recv_param_t* about) {
      return static_cast<UcxMessages*>(self)->receive(kReply, data, length, about);
    });
  }

  [[nodiscard]] std::string address() const { return ucx_.address(); }
  void connect(const std::string& theirs) { ucx_.connect(theirs); }
  void step() {
    ucx_.progress();
    if (!role_.is_client) return;
    for (; window_.has_unsent(); window_.pop()) {
      const std::uint32_t slot = window_.next();
      std::byte* const request = requests_.data() + slot * stride_of(options_.size);
      window_.stamp(slot, request);
      send(kRequest, request, options_.size);
    }
  }
  [[nodiscard]] std::uint64_t done() const { return window_.done(); }
  [[nodiscard]] std::uint64_t bad() const { return window_.bad(); }

 private:
  /// Where the bytes of a rendezvous message go.
  struct Landing {
    UcxMessages* owner = nullptr;
    unsigned kind = 0;
    std::size_t length = 0;
    std::vector<std::byte> bytes;
  };

  void set_handler(unsigned id, ucp_am_recv_callback_t handler) {
    ucp_am_handler_param_t params{};
    params.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB |
                        UCP_AM_HANDLER_PARAM_FIELD_ARG | UCP_AM_HANDLER_PARAM_FIELD_FLAGS;
    params.id = id;
    params.cb = handler;
    params.arg = this;
    params.flags = UCP_AM_FLAG_WHOLE_MSG;
    check_ucx(ucp_worker_set_am_recv_handler(ucx_.worker(), &params), "handler");
  }

  /// The bytes have to stay as they are until the message was answered.
  void send(unsigned id, const std::byte* bytes, std::size_t size) {
    ucp_request_param_t params;
    params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK;
    params.cb.send = free_ucx_request;
    const ucs_status_ptr_t sent =
        ucp_am_send_nbx(ucx_.endpoint(), id, nullptr, 0, bytes, size, &params);
    if (UCS_PTR_IS_ERR(sent)) [[unlikely]]
      check_ucx(UCS_PTR_STATUS(sent), "send");
  }

  ucs_status_t receive(unsigned kind, void* data, std::size_t length,
                       const ucp_am_recv_param_t* about) {
    if ((about->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) return land(kind, data, length);
    take(kind, static_cast<const std::byte*>(data), length);
    return UCS_OK;
  }
  void take(unsigned kind, const std::byte* data, std::size_t length) {
    if (kind == kReply) return window_.on_reply(data, length);
    std::byte* const reply =
        replies_.data() + (answered_++ % options_.window) * stride_of(options_.reply_size);
    if (!build_reply(options_, data, length, reply)) return window_.count_bad();
    send(kReply, reply, options_.reply_size);
  }

  /// Fetches a rendezvous message.
  ucs_status_t land(unsigned kind, void* descriptor, std::size_t length) {
    if (free_landings_.empty()) give_up("ucx: more messages arrive than the window has");
    Landing* const landing = free_landings_.back();
    free_landings_.pop_back();
    landing->owner = this;
    landing->kind = kind;
    landing->length = length;
    if (landing->bytes.size() < length) landing->bytes.resize(length);
    ucp_request_param_t params;
    params.op_attr_mask =
        UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
    params.user_data = landing;
    params.cb.recv_am = [](void* request, ucs_status_t status, std::size_t, void* user_data) {
      check_ucx(status, "rendezvous");
      auto& landed = *static_cast<Landing*>(user_data);
      landed.owner->take(landed.kind, landed.bytes.data(), landed.length);
      landed.owner->free_landings_.push_back(&landed);
      ucp_request_free(request);
    };
    const ucs_status_ptr_t received =
        ucp_am_recv_data_nbx(ucx_.worker(), descriptor, landing->bytes.data(), length, &params);
    if (UCS_PTR_IS_ERR(received)) check_ucx(UCS_PTR_STATUS(received), "rendezvous");
    return UCS_INPROGRESS;
  }

  Options options_;
  Role role_;
  Window window_;
  UcxWorker ucx_;
  std::uint64_t answered_ = 0;
  std::vector<std::byte> requests_;
  std::vector<std::byte> replies_;
  std::vector<Landing> landings_;
  std::vector<Landing*> free_landings_;
};

// ---- one-sided operations -----------------------------------------------------------------------

/// The server's memory is allocated by UCX, which shares it with the client. A put is counted when
/// its callback runs; over shared memory the bytes are there then.
class UcxOneSided : public PeerNodeBase {
 public:
  UcxOneSided(const Options& options, Role role)
      : options_(options),
        role_(role),
        window_(options),
        ucx_(UCP_FEATURE_RMA),
        local_(options.window * stride_of(options.size), std::byte{3}),
        places_(options.window) {
    for (std::uint32_t slot = 0; slot < options.window; ++slot) places_[slot] = {this, slot};
    if (role.is_server) map_memory();
  }

  [[nodiscard]] std::string address() const {
    const std::string memory(reinterpret_cast<const char*>(&memory_), sizeof memory_);
    return join_parts({ucx_.address(), memory, key_});
  }
  void connect(const std::string& theirs) {
    const std::vector<std::string> parts = split_parts(theirs);
    ucx_.connect(parts.at(0));
    if (!role_.is_client) return;
    std::memcpy(&remote_, parts.at(1).data(), sizeof remote_);
    check_ucx(ucp_ep_rkey_unpack(ucx_.endpoint(), parts.at(2).data(), &remote_key_), "remote key");
  }
  void step() {
    ucx_.progress();
    if (!role_.is_client) return;
    // An operation may end at once and make its slot wait again: one window a step.
    for (std::uint32_t n = 0; n < options_.window && window_.has_unsent(); ++n) {
      const std::uint32_t slot = window_.next();
      window_.pop();
      start(slot);
    }
  }
  [[nodiscard]] std::uint64_t done() const { return window_.done(); }
  [[nodiscard]] std::uint64_t bad() const { return window_.bad(); }

 private:
  struct Place {
    UcxOneSided* owner;
    std::uint32_t slot;
  };

  void map_memory() {
    ucp_mem_map_params_t params{};
    params.field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS;
    params.length = options_.window * stride_of(options_.size);
    params.flags = UCP_MEM_MAP_ALLOCATE;
    ucp_mem_h handle = nullptr;
    check_ucx(ucp_mem_map(ucx_.context(), &params, &handle), "memory");
    ucp_mem_attr_t attributes{};
    attributes.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS;
    check_ucx(ucp_mem_query(handle, &attributes), "memory");
    memory_ = reinterpret_cast<std::uint64_t>(attributes.address);
    auto* const bytes = static_cast<std::byte*>(attributes.address);
    std::memset(bytes, 5, params.length);
    write_heads(options_, bytes);
    void* packed = nullptr;
    std::size_t length = 0;
    check_ucx(ucp_rkey_pack(ucx_.context(), handle, &packed, &length), "remote key");
    key_.assign(static_cast<const char*>(packed), length);
    ucp_rkey_buffer_release(packed);
  }

  void start(std::uint32_t slot) {
    std::byte* const at = local_.data() + slot * stride_of(options_.size);
    const std::uint64_t there = remote_ + slot * stride_of(options_.size);
    window_.stamp(slot, at);
    ucp_request_param_t params;
    params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    params.user_data = &places_[slot];
    params.cb.send = [](void* request, ucs_status_t status, void* user_data) {
      check_ucx(status, "one-sided operation");
      const Place& place = *static_cast<const Place*>(user_data);
      place.owner->end(place.slot);
      ucp_request_free(request);
    };
    const ucs_status_ptr_t started =
        options_.what == What::write
            ? ucp_put_nbx(ucx_.endpoint(), at, options_.size, there, remote_key_, &params)
            : ucp_get_nbx(ucx_.endpoint(), at, options_.size, there, remote_key_, &params);
    if (started == nullptr) return end(slot);
    if (UCS_PTR_IS_ERR(started)) check_ucx(UCS_PTR_STATUS(started), "one-sided operation");
  }
  void end(std::uint32_t slot) { window_.end_one_sided(slot, local_.data()); }

  Options options_;
  Role role_;
  Window window_;
  UcxWorker ucx_;
  std::vector<std::byte> local_;
  std::vector<Place> places_;
  std::uint64_t memory_ = 0;
  std::string key_;
  std::uint64_t remote_ = 0;
  ucp_rkey_h remote_key_ = nullptr;
};

}  // namespace
}  // namespace spinwire::bench

int main(int argc, char** argv) {
  using namespace spinwire::bench;
  const Options options =
      parse_options(argc, argv, "Requests, replies and one-sided operations over UCX",
                    {What::messages, What::calls, What::write, What::read});
  return options.is_one_sided() ? measure_peer<UcxOneSided>("ucx", options)
                                : measure_peer<UcxMessages>("ucx", options);
}
