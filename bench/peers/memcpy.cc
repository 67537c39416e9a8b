// The ruler for many bytes: memcpy of one operation's bytes at a time, between as many places as
// the window has.
#include <cstring>
#include <vector>

#include "peers/harness/measure.h"
#include "peers/harness/window.h"

namespace spinwire::bench {
namespace {

class MemcpyNode : public PeerNodeBase {
 public:
  MemcpyNode(const Options& options, Role role) : options_(options), is_client_(role.is_client) {
    if (!is_client_) return;
    from_.assign(options.window * stride_of(options.size), std::byte{1});
    to_.assign(from_.size(), std::byte{2});
  }

  [[nodiscard]] std::string address() const { return {}; }
  void connect(const std::string&) {}
  void step() {
    if (!is_client_) return;
    const std::size_t at = slot_ * stride_of(options_.size);
    std::memcpy(to_.data() + at, from_.data() + at, options_.size);
    asm volatile("" ::: "memory");
    slot_ = slot_ + 1 == options_.window ? 0 : slot_ + 1;
    ++done_;
  }
  [[nodiscard]] std::uint64_t done() const { return done_; }
  [[nodiscard]] std::uint64_t bad() const { return 0; }

 private:
  Options options_;
  bool is_client_;
  std::uint32_t slot_ = 0;
  std::uint64_t done_ = 0;
  std::vector<std::byte> from_;
  std::vector<std::byte> to_;
};

}  // namespace
}  // namespace spinwire::bench

int main(int argc, char** argv) {
  using namespace spinwire::bench;
  return measure_peer<MemcpyNode>(
      "memcpy", parse_options(argc, argv, "Copies by memcpy",
                              {What::write, What::read, What::messages, What::calls}));
}
