// A context sleeps: which peers wake it, through which pipe, and what a hostile one can do.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <optional>
#include <vector>

#include "softverbs/lane/wake_pipe.h"
#include "softverbs/memory/peer_file.h"
#include "softverbs/peer_process.h"
#include "softverbs/rc_link.h"

namespace softverbs_test::device_sleep {

using spinwire::base::UniqueFd;
using sv::SleepAnswer;

bool is_readable(int fd, int timeout_ms = 0) {
  pollfd set{fd, POLLIN, 0};
  return ::poll(&set, 1, timeout_ms) == 1;
}

/// A pair in this process; the receiver may sleep.
struct Pair {
  Pair() {
    out = sender.make_qp();
    in = receiver.make_qp();
    connect(sender, out, receiver, in);
    fd = sv::wake_descriptor(receiver.context);
    must(fd >= 0, "wake_descriptor");
    // The first control steps open the lane.
    for (int i = 0; i < 3; ++i) {
      sv::control_device(receiver.context);
      sv::control_device(sender.context);
    }
    poll(receiver);
  }
  static void poll(Node& node) {
    ibv_wc wc{};
    while (node.poll(wc)) {
    }
  }
  bool send(std::uint64_t id) {
    return receiver.post_recv(id, 0, 64) == 0 && Send(id, sender.sge(0, 8)).post(out) == 0;
  }
  Node sender;
  Node receiver;
  ibv_qp* out = nullptr;
  ibv_qp* in = nullptr;
  int fd = -1;
};

TEST(SoftverbsDeviceSleep, AMessageWakesOnlyAContextThatSleeps) {
  Pair p;
  ASSERT_TRUE(p.send(1));
  EXPECT_FALSE(is_readable(p.fd)) << "an awake receiver costs no system call";
  EXPECT_EQ(sv::arm_device(p.receiver.cq), SleepAnswer::work);
  EXPECT_EQ(p.receiver.internals().segment->sleep_serial.load(), 0u);
  Pair::poll(p.receiver);
  ASSERT_EQ(sv::arm_device(p.receiver.cq), SleepAnswer::yes);
  EXPECT_EQ(p.receiver.internals().awake_count, 0u);
  EXPECT_FALSE(is_readable(p.fd));
  ASSERT_TRUE(p.send(2));
  EXPECT_TRUE(is_readable(p.fd));
  EXPECT_EQ(p.receiver.internals().segment->sleep_serial.load(), 0u) << "one byte is enough";
  ibv_wc wc{};
  EXPECT_FALSE(p.receiver.poll(wc)) << "the first poll wakes the lane";
  EXPECT_TRUE(p.receiver.poll(wc));
  EXPECT_EQ(wc.wr_id, 2u);
}

TEST(SoftverbsDeviceSleep, ASenderThatAwaitsAnAcknowledgementSleepsBriefly) {
  Pair p;
  ASSERT_TRUE(p.send(1));
  ASSERT_GE(sv::wake_descriptor(p.sender.context), 0);
  EXPECT_EQ(sv::arm_device(p.sender.cq), SleepAnswer::brief);
  Pair::poll(p.receiver);  // acknowledges
  EXPECT_EQ(sv::arm_device(p.sender.cq), SleepAnswer::work);
  ibv_wc wc{};
  EXPECT_TRUE(p.sender.poll(wc)) << "the next poll reads the acknowledgement, not the 48th";
  EXPECT_EQ(sv::arm_device(p.sender.cq), SleepAnswer::yes);
  // A peer that acknowledges more than was sent makes nobody spin.
  p.sender.internals().peers[0]->out.control->head.store(1000);
  ASSERT_TRUE(p.send(2));
  EXPECT_EQ(sv::arm_device(p.sender.cq), SleepAnswer::brief);
  p.sender.internals().peers[0]->out.control->head.store(1);
}

TEST(SoftverbsDeviceSleep, ALateSenderEndsNoLaterSleep) {
  Pair p;
  ASSERT_EQ(sv::arm_device(p.receiver.cq), SleepAnswer::yes);
  const std::uint64_t first = p.receiver.internals().segment->sleep_serial.load();
  ASSERT_EQ(sv::arm_device(p.receiver.cq), SleepAnswer::yes);
  EXPECT_NE(p.receiver.internals().segment->sleep_serial.load(), first);
}

TEST(SoftverbsDeviceSleep, APeerThatFloodsThePipeMakesNobodyWait) {
  Pair p;
  const sv::WakePipe& pipe = *p.receiver.internals().wake_pipe;
  for (int i = 0; i < 200'000; ++i) pipe.write();  // a full pipe does not block
  EXPECT_TRUE(is_readable(p.fd));
  // Each arming reads once, however much there is.
  int arms = 0;
  while (is_readable(p.fd) && arms < 100) {
    (void)sv::arm_device(p.receiver.cq);
    ++arms;
  }
  EXPECT_LT(arms, 100);
  ASSERT_EQ(sv::arm_device(p.receiver.cq), SleepAnswer::yes);
  ASSERT_TRUE(p.send(1));
  EXPECT_TRUE(is_readable(p.fd));
}

/// The answer to an attempt to sleep.
char arm(Node& node) {
  for (int i = 0; i < 100; ++i) {
    Pair::poll(node);
    node.internals().liveness.next_check = 0;
    sv::control_device(node.context);
    const SleepAnswer answer = sv::arm_device(node.cq);
    if (answer != SleepAnswer::work) return answer == SleepAnswer::brief ? 'b' : 'y';
  }
  return 'w';
}

/// A child whose queue pair is connected to the receiver's, and which obeys commands: 's' sends,
/// 'n' leaves it without descriptors, 'd' gives them back, 'c' takes a control step, 'a' wants to
/// sleep, 'e' closes its device.
void obey(int socket) {
  std::optional<Node> place(std::in_place);
  Node& node = *place;
  ibv_qp* const qp = node.make_qp();
  (void)meet(node, qp, socket);
  must(sv::wake_descriptor(node.context) >= 0, "wake_descriptor");
  rlimit limit{};
  must(getrlimit(RLIMIT_NOFILE, &limit) == 0, "getrlimit");
  const rlim_t before = limit.rlim_cur;
  for (;;) {
    char answer = 'x';
    switch (get<char>(socket)) {
      case 'a':
        answer = arm(node);
        break;
      case 'e':
        place.reset();
        break;
      case 's':
        must(Send(1, node.sge(0, 8), IBV_WR_SEND, IBV_SEND_INLINE).post(qp) == 0, "send");
        break;
      case 'n':
        limit.rlim_cur = 0;
        must(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
        break;
      case 'd':
        limit.rlim_cur = before;
        must(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
        break;
      case 'c':
        node.internals().liveness.next_check = 0;
        sv::control_device(node.context);
        break;
      default:
        return;
    }
    put(socket, answer);
  }
}
char command(const Child& child, char what) {
  put(child.socket(), what);
  return get<char>(child.socket());
}

/// A receiver with two peers in other processes.
struct Star {
  Star() : first(obey), second(obey) {
    (void)meet(receiver, receiver.make_qp(), first.socket());
    (void)meet(receiver, receiver.make_qp(), second.socket());
    fd = sv::wake_descriptor(receiver.context);
    must(fd >= 0, "wake_descriptor");
    for (std::uint64_t i = 0; i < 8; ++i) must(receiver.post_recv(i, 0, 64) == 0, "post_recv");
  }
  bool sleep() {
    for (int i = 0; i < 100; ++i) {
      ibv_wc wc{};
      while (receiver.poll(wc)) ++received;
      sv::control_device(receiver.context);
      if (sv::arm_device(receiver.cq) != SleepAnswer::work) return true;
    }
    return false;
  }
  Node receiver;
  Child first;
  Child second;
  int fd = -1;
  int received = 0;
};

TEST(SoftverbsDeviceSleep, OtherProcessesWakeIt) {
  Star s;
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(s.sleep());
    EXPECT_FALSE(is_readable(s.fd));
    command(i % 2 == 0 ? s.first : s.second, 's');
    EXPECT_TRUE(is_readable(s.fd));
  }
  ASSERT_TRUE(s.sleep());
  EXPECT_EQ(s.received, 3);
}

TEST(SoftverbsDeviceSleep, ASenderWithoutDescriptorsSilencesNoOther) {
  Star s;
  ASSERT_TRUE(s.sleep());
  command(s.first, 'n');
  command(s.first, 's');
  EXPECT_FALSE(is_readable(s.fd));
  EXPECT_NE(s.receiver.internals().segment->sleep_serial.load(), 0u);
  command(s.second, 's');
  EXPECT_TRUE(is_readable(s.fd)) << "the other sender wakes it";
  ASSERT_TRUE(s.sleep());
  EXPECT_EQ(s.received, 2);
  // With descriptors again, the sender's control step wakes the receiver.
  command(s.first, 's');
  EXPECT_FALSE(is_readable(s.fd));
  command(s.first, 'd');
  command(s.first, 'c');
  EXPECT_TRUE(is_readable(s.fd));
}

TEST(SoftverbsDeviceSleep, ASenderThatCouldNotWakeAPeerSleepsBriefly) {
  Star s;
  ASSERT_TRUE(s.sleep());
  command(s.first, 'n');
  command(s.first, 's');
  command(s.second, 's');
  ASSERT_TRUE(s.sleep());  // acknowledges both
  EXPECT_EQ(s.received, 2);
  EXPECT_EQ(command(s.first, 'a'), 'b');
  EXPECT_EQ(command(s.second, 'a'), 'y');
  command(s.first, 'd');
  EXPECT_EQ(command(s.first, 'a'), 'y');
  EXPECT_TRUE(is_readable(s.fd)) << "now it could";
}

// Even if the peers were checked just before.
TEST(SoftverbsDeviceSleep, APeerThatHasClosedIsNoticedBeforeTheNextSleep) {
  Star s;
  ASSERT_TRUE(s.sleep());
  sv::disarm_device(s.receiver.context);
  sv::Context& c = s.receiver.internals();
  c.liveness.next_check = ~std::uint64_t{0};
  command(s.first, 'e');
  EXPECT_EQ(sv::arm_device(s.receiver.cq), SleepAnswer::work);
  sv::control_device(s.receiver.context);
  EXPECT_EQ(c.liveness.gone, 1u);
  // A peer that has closed already costs no sleep.
  c.wake_pipe->write();
  EXPECT_NE(sv::arm_device(s.receiver.cq), SleepAnswer::work);
}

TEST(SoftverbsDeviceSleep, ADescriptorThatIsNotThePipeIsNotWrittenTo) {
  Star s;
  ASSERT_TRUE(s.sleep());
  // As if the receiver's descriptor had been closed and used again: another pipe has its number.
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
  const UniqueFd reader(ends[0]);
  const UniqueFd writer(ends[1]);
  sv::Segment& segment = *s.receiver.internals().segment;
  const std::uint32_t real = segment.wake_fd.load();
  segment.wake_fd.store(static_cast<std::uint32_t>(writer.get()));
  command(s.first, 's');
  EXPECT_FALSE(is_readable(reader.get()));
  EXPECT_NE(segment.sleep_serial.load(), 0u) << "other senders still wake it";
  segment.wake_fd.store(real);
  command(s.second, 's');
  EXPECT_TRUE(is_readable(s.fd));
}

TEST(SoftverbsDeviceSleep, AnErrorThatMayPassIsTriedAgain) {
  Star s;
  ASSERT_TRUE(s.sleep());
  std::atomic<std::uint32_t>& fd = s.receiver.internals().segment->wake_fd;
  const std::uint32_t real = fd.exchange(1'000'000);  // no such file
  command(s.first, 's');
  EXPECT_FALSE(is_readable(s.fd));
  fd = real;
  command(s.first, 'c');
  EXPECT_TRUE(is_readable(s.fd));
}

TEST(SoftverbsDeviceSleep, ADeadPeerWakesIt) {
  Star s;
  ASSERT_TRUE(s.sleep());
  s.first.kill_only();
  EXPECT_TRUE(is_readable(s.fd, 60'000));
}

// ---- the pipe of a peer -----------------------------------------------------------------------

std::uint64_t inode_of(int fd) {
  struct stat st {};
  EXPECT_EQ(fstat(fd, &st), 0);
  return st.st_ino;
}
UniqueFd open_own(int fd, std::uint64_t inode) {
  errno = 0;
  return sv::open_peer_pipe(static_cast<std::uint32_t>(getpid()), static_cast<std::uint32_t>(fd),
                            inode);
}

TEST(SoftverbsPeerPipe, OnlyThePipeItselfIsOpened) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  UniqueFd reader(ends[0]);
  const UniqueFd writer(ends[1]);
  const std::uint64_t inode = inode_of(writer.get());
  EXPECT_FALSE(open_own(writer.get(), inode + 1));
  EXPECT_EQ(errno, ENODEV);
  const UniqueFd zero(::open("/dev/zero", O_RDWR | O_CLOEXEC));
  EXPECT_FALSE(open_own(zero.get(), inode_of(zero.get())));
  EXPECT_EQ(errno, ENODEV);
  // A named pipe may lie on a file system that makes its opener wait.
  const std::string name = "/tmp/peer-pipe-" + std::to_string(getpid());
  ASSERT_EQ(mkfifo(name.c_str(), 0600), 0);
  const UniqueFd fifo(::open(name.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC));
  EXPECT_EQ(unlink(name.c_str()), 0);
  ASSERT_TRUE(fifo);
  EXPECT_FALSE(open_own(fifo.get(), inode_of(fifo.get())));
  EXPECT_EQ(errno, ENODEV);
  // Writing neither blocks nor raises SIGPIPE.
  const UniqueFd opened = open_own(writer.get(), inode);
  ASSERT_TRUE(opened);
  const std::vector<char> bytes(1 << 20);
  EXPECT_GT(::write(opened.get(), bytes.data(), bytes.size()), 0);
  EXPECT_EQ(::write(opened.get(), bytes.data(), bytes.size()), -1);
  EXPECT_EQ(errno, EAGAIN);
  reader.reset();
  EXPECT_EQ(::write(opened.get(), bytes.data(), 1), -1);
  EXPECT_EQ(errno, EAGAIN);
}

}  // namespace softverbs_test::device_sleep
