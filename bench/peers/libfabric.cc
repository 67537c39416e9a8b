// libfabric on one host, by its shared-memory provider: messages that are injected where they are
// short enough, RMA for one-sided operations.
#include <algorithm>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "peers/fabric_endpoint.h"
#include "peers/harness/measure.h"
#include "peers/harness/window.h"

namespace spinwire::bench {
namespace {

// ---- messages -----------------------------------------------------------------------------------

class FabricMessages : public PeerNodeBase {
 public:
  FabricMessages(const Options& options, Role role)
      : options_(options),
        role_(role),
        window_(options),
        fabric_(FI_MSG),
        receive_bytes_(stride_of(std::max(options.size, options.reply_size))),
        requests_(options.window * stride_of(options.size), std::byte{3}),
        replies_(options.window * stride_of(options.reply_size)),
        // Both directions of a window, and as many more while the sum of their bytes is small.
        received_((receive_bytes_ <= 4096 ? 4 : 2) * options.window * receive_bytes_ +
                  kSpare * receive_bytes_),
        receives_(received_.size() / receive_bytes_),
        sends_(4 * std::size_t{options.window}) {
    if (role.is_client && role.is_server && options.size < sizeof(Head))
      give_up("libfabric: --mode=sym needs requests and replies of 16 bytes");
    for (std::size_t i = 0; i < receives_.size(); ++i) post_receive(i);
  }
  void close() { fabric_.close(); }

  [[nodiscard]] std::string address() const { return fabric_.address(); }
  void connect(const std::string& theirs) { fabric_.connect(theirs); }
  void step() {
    while (!unsent_.empty() && send(unsent_.front())) unsent_.pop_front();
    fabric_.progress([this](const fi_cq_data_entry& entry) {
      if ((entry.flags & FI_RECV) == 0) return;
      const auto index =
          static_cast<std::size_t>(static_cast<fi_context2*>(entry.op_context) - receives_.data());
      take(received_.data() + index * receive_bytes_, entry.len);
      post_receive(index);
    });
    if (!role_.is_client || !fabric_.is_connected() || !unsent_.empty()) return;
    for (; window_.has_unsent(); window_.pop()) {
      const std::uint32_t slot = window_.next();
      std::byte* const request = requests_.data() + slot * stride_of(options_.size);
      window_.stamp(slot, request);
      if (!send({request, options_.size})) return;
    }
  }
  [[nodiscard]] std::uint64_t done() const { return window_.done(); }
  [[nodiscard]] std::uint64_t bad() const { return window_.bad(); }

 private:
  static constexpr std::size_t kSpare = 2;

  struct Outgoing {
    const std::byte* at;
    std::size_t size;
  };

  void post_receive(std::size_t index) {
    fabric_.post_receive(received_.data() + index * receive_bytes_, receive_bytes_,
                         &receives_[index]);
  }
  bool send(const Outgoing& message) {
    if (!fabric_.send(message.at, message.size, &sends_[sent_ % sends_.size()])) return false;
    ++sent_;
    return true;
  }
  void take(const std::byte* data, std::size_t size) {
    const bool is_request =
        role_.is_server &&
        (!role_.is_client || (size >= sizeof(Head) && (load_head(data).value & kRequestMark) != 0));
    if (!is_request) return window_.on_reply(data, size);
    std::byte* const reply =
        replies_.data() + (answered_++ % options_.window) * stride_of(options_.reply_size);
    if (!build_reply(options_, data, size, reply)) return window_.count_bad();
    const Outgoing message{reply, options_.reply_size};
    if (!unsent_.empty() || !send(message)) unsent_.push_back(message);
  }

  Options options_;
  Role role_;
  Window window_;
  FabricEndpoint fabric_;
  std::size_t receive_bytes_;
  std::uint64_t answered_ = 0;
  std::uint64_t sent_ = 0;
  std::vector<std::byte> requests_;
  std::vector<std::byte> replies_;
  std::vector<std::byte> received_;
  std::vector<fi_context2> receives_;
  std::vector<fi_context2> sends_;
  std::deque<Outgoing> unsent_;  ///< replies
};

// ---- one-sided operations -----------------------------------------------------------------------

class FabricOneSided : public PeerNodeBase {
 public:
  FabricOneSided(const Options& options, Role role)
      : options_(options),
        role_(role),
        window_(options),
        fabric_(FI_MSG | FI_RMA),
        local_(options.window * stride_of(options.size), std::byte{3}),
        opened_(local_.size(), std::byte{5}),
        contexts_(options.window) {
    write_heads(options, opened_.data());
    if (role.is_server) ours_ = fabric_.open_memory(opened_.data(), opened_.size());
  }
  void close() { fabric_.close(); }

  [[nodiscard]] std::string address() const {
    const std::string memory(reinterpret_cast<const char*>(&ours_), sizeof ours_);
    return join_parts({fabric_.address(), memory});
  }
  void connect(const std::string& theirs) {
    const std::vector<std::string> parts = split_parts(theirs);
    fabric_.connect(parts.at(0));
    std::memcpy(&theirs_, parts.at(1).data(), sizeof theirs_);
  }
  void step() {
    fabric_.progress([this](const fi_cq_data_entry& entry) {
      const auto slot = static_cast<std::uint32_t>(static_cast<fi_context2*>(entry.op_context) -
                                                   contexts_.data());
      if (slot < options_.window) window_.end_one_sided(slot, local_.data());
    });
    if (!role_.is_client) return;
    for (; window_.has_unsent(); window_.pop()) {
      const std::uint32_t slot = window_.next();
      const std::size_t at = slot * stride_of(options_.size);
      window_.stamp(slot, local_.data() + at);
      if (!fabric_.access(options_.what == What::write, local_.data() + at, options_.size,
                          theirs_.address + at, theirs_.key, &contexts_[slot]))
        return;
    }
  }
  [[nodiscard]] std::uint64_t done() const { return window_.done(); }
  [[nodiscard]] std::uint64_t bad() const { return window_.bad(); }

 private:
  Options options_;
  Role role_;
  Window window_;
  FabricEndpoint fabric_;
  std::vector<std::byte> local_;
  std::vector<std::byte> opened_;
  std::vector<fi_context2> contexts_;
  FabricEndpoint::Memory ours_{};
  FabricEndpoint::Memory theirs_{};
};

}  // namespace
}  // namespace spinwire::bench

int main(int argc, char** argv) {
  using namespace spinwire::bench;
  const Options options =
      parse_options(argc, argv, "Requests, replies and one-sided operations over libfabric",
                    {What::messages, What::calls, What::write, What::read});
  return options.is_one_sided() ? measure_peer<FabricOneSided>("libfabric", options)
                                : measure_peer<FabricMessages>("libfabric", options);
}
