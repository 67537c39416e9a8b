// A typical libibverbs program without softverbs headers. Two contexts with several threads each
// share one completion queue per context; then threads wait on completion channels in every way.
// Exits with 0 if all works as the verbs promise.
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace {

// An integer: the macro mixes it with an enumerator of another type.
constexpr int kLocalWrite = IBV_ACCESS_LOCAL_WRITE;

void must(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "failed: %s (errno %d: %s)\n", what, errno, std::strerror(errno));
  std::exit(1);
}

constexpr std::uint32_t kThreads = 4;
constexpr std::uint32_t kMessages = 2000;  // of each thread
constexpr std::uint32_t kDepth = 32;
constexpr std::uint32_t kSize = 64;

ibv_context* open_softverbs() {
  ibv_device** list = ibv_get_device_list(nullptr);
  must(list != nullptr, "the list of devices");
  ibv_context* context = nullptr;
  for (ibv_device** d = list; *d != nullptr && context == nullptr; ++d) {
    if (std::strcmp(ibv_get_device_name(*d), "softverbs") == 0) context = ibv_open_device(*d);
  }
  ibv_free_device_list(list);
  must(context != nullptr, "opening softverbs");
  return context;
}

struct End {
  ibv_context* context = open_softverbs();
  ibv_comp_channel* channel = ibv_create_comp_channel(context);
  ibv_pd* pd = ibv_alloc_pd(context);
  ibv_cq* cq = ibv_create_cq(context, 1024, this, channel, 0);
  std::vector<std::uint64_t> memory = std::vector<std::uint64_t>(2 * kThreads * kDepth * kSize / 8);
  ibv_mr* mr = ibv_reg_mr(pd, memory.data(), memory.size() * 8, kLocalWrite);
  std::vector<ibv_qp*> qps;

  End() {
    must(channel != nullptr && pd != nullptr && cq != nullptr && mr != nullptr, "set-up");
    for (std::uint32_t i = 0; i < kThreads; ++i) {
      ibv_qp_init_attr init{};
      init.send_cq = init.recv_cq = cq;
      init.qp_type = IBV_QPT_RC;
      init.cap = {kDepth, kDepth, 1, 1, kSize};
      qps.push_back(ibv_create_qp(pd, &init));
      must(qps.back() != nullptr, "a queue pair");
    }
  }
  End(const End&) = delete;
  End& operator=(const End&) = delete;
  ~End() {
    for (ibv_qp* qp : qps) must(ibv_destroy_qp(qp) == 0, "destroying a queue pair");
    must(ibv_destroy_cq(cq) == 0, "destroying the completion queue");
    must(ibv_destroy_comp_channel(channel) == 0, "destroying the channel");
    must(ibv_dereg_mr(mr) == 0 && ibv_dealloc_pd(pd) == 0, "giving memory back");
    must(ibv_close_device(context) == 0, "closing");
  }

  /// A slot of a queue pair: first those for receives, then those for sends.
  std::uint64_t* slot(std::uint32_t qp, std::uint32_t index) {
    return &memory[(std::size_t{qp} * 2 * kDepth + index) * kSize / 8];
  }
  void receive(std::uint32_t qp, std::uint32_t index) {
    ibv_sge sge{reinterpret_cast<std::uint64_t>(slot(qp, index)), kSize, mr->lkey};
    ibv_recv_wr wr{};
    wr.wr_id = std::uint64_t{qp} << 32 | index;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    ibv_recv_wr* bad = nullptr;
    must(ibv_post_recv(qps[qp], &wr, &bad) == 0, "posting a receive");
  }
  void send(std::uint32_t qp, std::uint32_t index, std::uint64_t value) {
    std::uint64_t* bytes = slot(qp, kDepth + index);
    for (std::uint32_t i = 0; i < kSize / 8; ++i) bytes[i] = value * (i + 1);
    ibv_sge sge{reinterpret_cast<std::uint64_t>(bytes), kSize, mr->lkey};
    ibv_send_wr wr{};
    wr.wr_id = std::uint64_t{qp} << 32 | index;
    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.opcode = IBV_WR_SEND;
    wr.send_flags = IBV_SEND_SIGNALED;
    ibv_send_wr* bad = nullptr;
    must(ibv_post_send(qps[qp], &wr, &bad) == 0, "posting a send");
  }
  [[nodiscard]] bool holds(std::uint32_t qp, std::uint32_t index, std::uint64_t value) {
    const std::uint64_t* bytes = slot(qp, index);
    for (std::uint32_t i = 0; i < kSize / 8; ++i) {
      if (bytes[i] != value * (i + 1)) return false;
    }
    return true;
  }
};

void connect(const End& from, const End& to) {
  ibv_gid gid{};
  must(ibv_query_gid(to.context, 1, 0, &gid) == 0, "the GID");
  for (std::uint32_t i = 0; i < kThreads; ++i) {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = 1;
    must(ibv_modify_qp(from.qps[i], &attr,
                       IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0,
         "INIT");
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = IBV_MTU_1024;
    attr.dest_qp_num = to.qps[i]->qp_num;
    attr.min_rnr_timer = 12;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = 1;
    attr.ah_attr.grh.dgid = gid;
    must(ibv_modify_qp(from.qps[i], &attr,
                       IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                           IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0,
         "RTR");
    attr.qp_state = IBV_QPS_RTS;
    attr.timeout = 14;
    attr.retry_cnt = attr.rnr_retry = 7;
    must(ibv_modify_qp(from.qps[i], &attr,
                       IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                           IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC) == 0,
         "RTS");
  }
}

/// The threads of each end share a context and a completion queue. Every thread posts to its own
/// queue pair and polls for all.
class Traffic {
 public:
  Traffic(End& sender, End& receiver) : sender_(sender), receiver_(receiver) {
    for (std::uint32_t q = 0; q < kThreads; ++q) {
      for (std::uint32_t i = 0; i < kDepth; ++i) receiver_.receive(q, i);
    }
  }
  void run() {
    std::vector<std::thread> threads;
    for (std::uint32_t q = 0; q < kThreads; ++q) {
      threads.emplace_back([this, q] { send_all(q); });
      threads.emplace_back([this] { receive_all(); });
    }
    for (std::thread& thread : threads) thread.join();
    must(bad_ == 0, "all bytes as sent");
  }

 private:
  void send_all(std::uint32_t qp) {
    for (std::uint32_t n = 0; n < kMessages;) {
      if (n - completed_[qp].load() < kDepth) {
        sender_.send(qp, n % kDepth, n + 1);
        ++n;
      } else {
        poll_sends();
      }
    }
    while (completed_[qp].load() != kMessages) poll_sends();
  }
  void poll_sends() {
    ibv_wc wc[4];
    const int got = ibv_poll_cq(sender_.cq, 4, wc);
    must(got >= 0, "polling");
    for (int i = 0; i < got; ++i) {
      must(wc[i].status == IBV_WC_SUCCESS, "a send");
      ++completed_[wc[i].wr_id >> 32];
    }
    if (got == 0) std::this_thread::yield();
  }
  void receive_all() {
    while (received_.load() != kThreads * kMessages) {
      ibv_wc wc{};
      const int got = ibv_poll_cq(receiver_.cq, 1, &wc);
      must(got >= 0, "polling");
      if (got == 0) {
        std::this_thread::yield();
        continue;
      }
      must(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV, "a receive");
      const auto qp = static_cast<std::uint32_t>(wc.wr_id >> 32);
      const auto slot = static_cast<std::uint32_t>(wc.wr_id);
      // Identifies the message by its bytes: another polling thread may be faster.
      const std::uint64_t value = *receiver_.slot(qp, slot);
      if (value == 0 || value > kMessages || !receiver_.holds(qp, slot, value)) ++bad_;
      sum_[qp] += value;
      receiver_.receive(qp, slot);
      if (++received_ == kThreads * kMessages) check_sums();
    }
  }
  /// Checks that each message arrived once.
  void check_sums() {
    for (std::uint32_t q = 0; q < kThreads; ++q) {
      if (sum_[q].load() != std::uint64_t{kMessages} * (kMessages + 1) / 2) ++bad_;
    }
  }

  End& sender_;
  End& receiver_;
  std::atomic<std::uint32_t> completed_[kThreads] = {};
  std::atomic<std::uint32_t> received_{0};
  std::atomic<std::uint64_t> sum_[kThreads] = {};
  std::atomic<std::uint32_t> bad_{0};
};

bool readable(int fd, int milliseconds) {
  pollfd polled{fd, POLLIN, 0};
  return ::poll(&polled, 1, milliseconds) == 1;
}
bool epoll_says_readable(int fd, int milliseconds) {
  const int set = ::epoll_create1(0);
  epoll_event event{};
  event.events = EPOLLIN;
  must(::epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0, "epoll_ctl");
  const int n = ::epoll_wait(set, &event, 1, milliseconds);
  ::close(set);
  return n == 1;
}

void await_event(End& end) {
  ibv_cq* cq = nullptr;
  void* cq_context = nullptr;
  must(ibv_get_cq_event(end.channel, &cq, &cq_context) == 0, "an event");
  must(cq == end.cq && cq_context == &end, "the event's queue");
  ibv_ack_cq_events(cq, 1);
}
void expect_message(End& end, std::uint64_t value) {
  ibv_wc wc{};
  must(ibv_poll_cq(end.cq, 1, &wc) == 1, "the completion that was told of");
  must(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV, "a receive");
  const auto slot = static_cast<std::uint32_t>(wc.wr_id);
  must(end.holds(0, slot, value), "the bytes");
  end.receive(0, slot);
}
void drain_sends(End& end) {
  ibv_wc wc{};
  while (ibv_poll_cq(end.cq, 1, &wc) != 1) std::this_thread::yield();
  must(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_SEND, "a send");
}

/// Waits until a thread of this process sleeps in the kernel.
void wait_until_asleep(pid_t thread) {
  const std::string path = "/proc/self/task/" + std::to_string(thread) + "/stat";
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  for (std::string text; std::chrono::steady_clock::now() < end; std::this_thread::yield()) {
    std::ifstream stat(path);
    std::getline(stat, text);
    const std::size_t name = text.rfind(')');  // the state follows the name in parentheses
    if (name != std::string::npos && text.compare(name, 3, ") S") == 0) return;
  }
  must(false, "the receiver goes to sleep");
}

/// The receiver never polls before it is woken.
void wait_in_every_way(End& sender, End& receiver) {
  constexpr int kLong = 10000;
  const auto arm = [&] { must(ibv_req_notify_cq(receiver.cq, 0) == 0, "arming"); };
  const int fd = receiver.channel->fd;
  for (std::uint64_t round = 1; round <= 20; ++round) {
    arm();
    must(!readable(fd, 0), "no event before a completion");
    // Blocks; the message is sent while the receiver sleeps.
    std::thread later([&, receiver_thread = ::gettid()] {
      wait_until_asleep(receiver_thread);
      sender.send(0, 0, round);
    });
    await_event(receiver);
    later.join();
    expect_message(receiver, round);
    drain_sends(sender);
    // Waits for the descriptor.
    arm();
    sender.send(0, 0, round + 100);
    must(round % 2 == 0 ? readable(fd, kLong) : epoll_says_readable(fd, kLong), "readable");
    await_event(receiver);
    must(!readable(fd, 0), "one event for one arming");
    expect_message(receiver, round + 100);
    drain_sends(sender);
    // A poll takes the completion first; the event still arrives.
    arm();
    sender.send(0, 0, round + 200);
    ibv_wc wc{};
    while (ibv_poll_cq(receiver.cq, 1, &wc) != 1) std::this_thread::yield();
    receiver.receive(0, static_cast<std::uint32_t>(wc.wr_id));
    must(readable(fd, kLong), "the event of a completion that was polled");
    await_event(receiver);
    drain_sends(sender);
  }
  const int flags = ::fcntl(fd, F_GETFL);
  must(::fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0, "O_NONBLOCK");
  ibv_cq* cq = nullptr;
  void* cq_context = nullptr;
  arm();
  must(ibv_get_cq_event(receiver.channel, &cq, &cq_context) == -1 && errno == EAGAIN, "EAGAIN");
  must(::fcntl(fd, F_SETFL, flags) == 0, "blocking again");
}

/// Overruns a queue that is too small.
void async_event() {
  End end;
  ibv_async_event event{};
  const int flags = ::fcntl(end.context->async_fd, F_GETFL);
  must(::fcntl(end.context->async_fd, F_SETFL, flags | O_NONBLOCK) == 0, "O_NONBLOCK");
  must(ibv_get_async_event(end.context, &event) == -1 && errno == EAGAIN, "no event yet");
  ibv_cq* small = ibv_create_cq(end.context, 1, nullptr, nullptr, 0);
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = small;
  init.qp_type = IBV_QPT_RC;
  init.cap = {8, 8, 1, 1, 0};
  ibv_qp* qp = ibv_create_qp(end.pd, &init);
  must(small != nullptr && qp != nullptr, "a small queue");
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = 1;
  must(ibv_modify_qp(qp, &attr,
                     IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0,
       "INIT");
  ibv_recv_wr* bad = nullptr;
  ibv_recv_wr wr{};
  for (int i = 0; i < 8; ++i) must(ibv_post_recv(qp, &wr, &bad) == 0, "posting a receive");
  attr.qp_state = IBV_QPS_ERR;
  must(ibv_modify_qp(qp, &attr, IBV_QP_STATE) == 0, "ERR");
  must(readable(end.context->async_fd, 0), "the overrun is told");
  must(ibv_get_async_event(end.context, &event) == 0, "the overrun");
  must(event.event_type == IBV_EVENT_CQ_ERR && event.element.cq == small, "whose it is");
  ibv_ack_async_event(&event);
  must(ibv_destroy_qp(qp) == 0 && ibv_destroy_cq(small) == 0, "destroying them");
}

/// Closes the device without destroying everything, which libibverbs allows.
void close_with_leftovers() {
  ibv_context* context = open_softverbs();
  ibv_pd* pd = ibv_alloc_pd(context);
  ibv_comp_channel* channel = ibv_create_comp_channel(context);
  static std::uint64_t word;
  must(ibv_reg_mr(pd, &word, sizeof word, kLocalWrite) != nullptr, "a region");
  ibv_cq* cq = ibv_create_cq(context, 1, nullptr, channel, 0);
  must(cq != nullptr && ibv_req_notify_cq(cq, 0) == 0, "a queue");
  ibv_srq_init_attr shared{};
  shared.attr = {1, 1, 0};
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = cq;
  init.srq = ibv_create_srq(pd, &shared);
  init.qp_type = IBV_QPT_RC;
  init.cap = {1, 0, 1, 0, 0};
  must(init.srq != nullptr && ibv_create_qp(pd, &init) != nullptr, "a queue pair");
  must(ibv_close_device(context) == 0, "closing with objects left");
}

}  // namespace

int main() {
  {
    End a;
    End b;
    connect(a, b);
    connect(b, a);
    Traffic(a, b).run();
    wait_in_every_way(a, b);
  }
  async_event();
  close_with_leftovers();
  std::puts("done");
  return 0;
}
