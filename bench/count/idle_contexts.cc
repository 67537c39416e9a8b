// Counts a poll of the embedded device that finds nothing. Other contexts are connected and have
// each sent a message: count-idle-contexts CONTEXTS QUEUE_PAIRS OPERATIONS.
#include <sys/resource.h>

#include <cstdint>
#include <cstdlib>
#include <vector>

#include "common/setup.h"
#include "common/verbs_link.h"
#include "softverbs/objects.h"
#include "softverbs/softverbs_device.h"

using namespace spinwire;

namespace {

namespace sv = softverbs;

struct Node {
  ibv_context* context = bench::must(sv::open_device(Clock::real(), sv::Driving::by_user));
  ibv_pd* pd = sv::alloc_pd(context);
  ibv_cq* cq = sv::create_cq(context, 1024);
  std::vector<ibv_qp*> queue_pairs;

  ibv_qp* make_queue_pair() {
    queue_pairs.push_back(bench::make_queue_pair(pd, cq, nullptr, 1));
    return queue_pairs.back();
  }
  int poll() {
    ibv_wc wc{};
    return ibv_poll_cq(cq, 1, &wc);
  }
};

/// Raises the limit of open files: every context uses two descriptors.
void allow_descriptors(std::uint64_t contexts) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_max < 4 * contexts + 64)
    bench::give_up("the limit of open files is too low (see ulimit -n)");
}

void connect(Node& hub, Node& other) {
  ibv_qp* const here = hub.make_queue_pair();
  ibv_qp* const there = other.make_queue_pair();
  bench::connect_queue_pair(here, other.context, there->qp_num);
  bench::connect_queue_pair(there, hub.context, here->qp_num);
}

/// Sends an empty message from the first queue pair of `other` to its peer.
void talk(Node& hub, Node& other, ibv_qp* at_hub) {
  ibv_recv_wr receive{};
  ibv_recv_wr* bad_receive = nullptr;
  ibv_send_wr send{};
  send.opcode = IBV_WR_SEND;
  send.send_flags = IBV_SEND_SIGNALED;
  ibv_send_wr* bad_send = nullptr;
  if (ibv_post_recv(at_hub, &receive, &bad_receive) != 0 ||
      ibv_post_send(other.queue_pairs.front(), &send, &bad_send) != 0)
    bench::give_up("cannot post a message");
  bench::run_until(
      "a message arrives", [&] { sv::control_device(hub.context); },
      [&] { return hub.poll() == 1; });
  bench::run_until(
      "it is acknowledged", [] {}, [&] { return other.poll() == 1; });
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t operations = bench::operations_asked(argc, argv);
  if (argc != 4) bench::give_up("arguments: CONTEXTS QUEUE_PAIRS OPERATIONS");
  const std::uint64_t contexts = std::strtoull(argv[1], nullptr, 10);
  const std::uint64_t queue_pairs = std::strtoull(argv[2], nullptr, 10);
  if (contexts == 0 || queue_pairs % contexts != 0)
    bench::give_up("QUEUE_PAIRS must be a multiple of CONTEXTS");
  allow_descriptors(contexts);
  Node hub;
  std::vector<Node> others(contexts);
  for (Node& other : others) {
    const std::size_t first = hub.queue_pairs.size();
    for (std::uint64_t i = 0; i < queue_pairs / contexts; ++i) connect(hub, other);
    talk(hub, other, hub.queue_pairs[first]);
  }
  for (int i = 0; i < 1000; ++i) sv::control_device(hub.context);  // puts idle lanes to sleep
  int events = 0;
  const auto work = [&] { events |= hub.poll(); };
  bench::measured(operations, work);
  if (events != 0) bench::give_up("an idle poll found work");
}
