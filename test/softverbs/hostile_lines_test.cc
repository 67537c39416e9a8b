// Peers write anything into the lines of their lanes. What a line says of acknowledgements, places
// and queue pairs counts only as far as the receiver's own records allow it.
#include <gtest/gtest.h>

#include <cstdint>

#include "softverbs/ud_link.h"

namespace softverbs_test::hostile_lines {

// ---- acknowledgements ---------------------------------------------------------------------------

/// b sends a message whose line acknowledges so many lines, and a applies that.
void acknowledge(Link& link, std::uint64_t lines) {
  ASSERT_EQ(link.a.post_recv(1, 0, 64), 0);
  ASSERT_EQ(Send(2, link.b.sge(0, 8)).post(link.qb), 0);
  const sv::OutLane& out = link.b.internals().peers[0]->out;
  out.lines[(out.tail - 1) % sv::kLaneLines].ack = static_cast<std::uint16_t>(lines);
  const std::size_t before = link.at_a.size();
  link.poll_a();  // reads the acknowledgement
  ASSERT_EQ(link.at_a.size(), before + 1);
  link.poll_a();  // applies it
}

TEST(SoftverbsHostileLine, AnAcknowledgementGoesNeitherBeyondWhatWasSentNorBack) {
  Link link;
  for (std::uint64_t i = 0; i < 3; ++i) ASSERT_EQ(link.b.post_recv(i, 0, 64), 0);
  ASSERT_EQ(Send(10, link.a.sge(0, 8)).post(link.qa), 0);
  ASSERT_TRUE(link.run(1, 1));
  for (std::uint64_t i = 11; i < 13; ++i) ASSERT_EQ(Send(i, link.a.sge(0, 8)).post(link.qa), 0);
  const sv::OutLane& out = link.a.internals().peers[0]->out;
  const std::uint64_t head = out.head;
  ASSERT_EQ(out.tail, head + 2);
  const std::uint64_t forged[] = {out.tail + 1, head + sv::kLaneLines, head + 0x7fff, head + 0x8000,
                                  head - 1};
  for (const std::uint64_t lines : forged) {
    ASSERT_NO_FATAL_FAILURE(acknowledge(link, lines));
    EXPECT_EQ(out.acked, head) << lines;
    EXPECT_EQ(out.head, head) << lines;
  }
  EXPECT_EQ(link.at_a.size(), 1 + std::size(forged)) << "a message that b has not taken has ended";
  // What b says in truth counts.
  ASSERT_NO_FATAL_FAILURE(acknowledge(link, head + 1));
  EXPECT_EQ(out.head, head + 1);
  EXPECT_TRUE(link.run(1 + std::size(forged) + 1 + 2, 3 + std::size(forged) + 1));
}

}  // namespace softverbs_test::hostile_lines
