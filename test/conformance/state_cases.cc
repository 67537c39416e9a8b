// The queue pair's state machine (InfiniBand specification volume 1, 10.3.1, and the table of
// attributes in 11.2.5.2): every transition, for connections and for datagrams.
#include <optional>

#include "conformance/conformance_ends.h"

namespace conformance::state_cases {

// RESET to ERR is left out: the specification's text allows it, the kernel's table does not, and
// nothing can be outstanding.
constexpr ibv_qp_state kStates[] = {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS,
                                    IBV_QPS_SQD,   IBV_QPS_SQE,  IBV_QPS_ERR};

const char* name_of(ibv_qp_state state) {
  constexpr const char* kNames[] = {"Reset", "Init", "Rtr", "Rts", "Sqd", "Sqe", "Err"};
  return kNames[state];
}

/// The attributes that a transition requires, and one that it does not accept.
struct Demand {
  ibv_qp_state from;
  ibv_qp_state to;
  int required;
  int forbidden;
};

constexpr int kRcInit = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
constexpr int kRcRtr = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
constexpr int kRcRts =
    IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
constexpr int kUdInit = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;

constexpr Demand kRc[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, kRcInit,
     IBV_QP_QKEY | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_SQ_PSN |
         IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MIN_RNR_TIMER |
         IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_MAX_DEST_RD_ATOMIC},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_QKEY | IBV_QP_AV | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT},
    {IBV_QPS_INIT, IBV_QPS_RTR, kRcRtr,
     IBV_QP_QKEY | IBV_QP_PORT | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
         IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC},
    {IBV_QPS_RTR, IBV_QPS_RTS, kRcRts,
     IBV_QP_QKEY | IBV_QP_PORT | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
         IBV_QP_MAX_DEST_RD_ATOMIC},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0,
     IBV_QP_QKEY | IBV_QP_PORT | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
         IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY},
};
constexpr Demand kUd[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, kUdInit,
     IBV_QP_ACCESS_FLAGS | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
         IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_ACCESS_FLAGS | IBV_QP_AV | IBV_QP_SQ_PSN},
    {IBV_QPS_INIT, IBV_QPS_RTR, 0,
     IBV_QP_ACCESS_FLAGS | IBV_QP_PORT | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
         IBV_QP_RQ_PSN | IBV_QP_SQ_PSN},
    {IBV_QPS_RTR, IBV_QPS_RTS, IBV_QP_SQ_PSN,
     IBV_QP_ACCESS_FLAGS | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
         IBV_QP_DEST_QPN},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0, IBV_QP_ACCESS_FLAGS | IBV_QP_PORT | IBV_QP_SQ_PSN},
    {IBV_QPS_SQE, IBV_QPS_RTS, 0, IBV_QP_ACCESS_FLAGS | IBV_QP_PORT | IBV_QP_SQ_PSN},
};

std::span<const Demand> demands(ibv_qp_type type) {
  return type == IBV_QPT_UD ? std::span<const Demand>(kUd) : std::span<const Demand>(kRc);
}

std::optional<Demand> demand(ibv_qp_type type, ibv_qp_state from, ibv_qp_state to) {
  // Transitions to RESET and ERR take no attributes.
  constexpr int kAny = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_SQ_PSN;
  if (to == IBV_QPS_RESET || to == IBV_QPS_ERR) return Demand{from, to, 0, kAny};
  for (const Demand& d : demands(type)) {
    if (d.from == from && d.to == to) return d;
  }
  return std::nullopt;
}

/// Valid values for all attributes.
ibv_qp_attr everything(const End& end, const End& peer) {
  ibv_qp_attr attr = end.rtr_attr(peer);
  const ibv_qp_attr first = end.init_attr(), last = end.rts_attr();
  attr.port_num = first.port_num;
  attr.qp_access_flags = first.qp_access_flags;
  attr.qkey = first.qkey;
  attr.timeout = last.timeout;
  attr.retry_cnt = last.retry_cnt;
  attr.rnr_retry = last.rnr_retry;
  attr.sq_psn = last.sq_psn;
  attr.max_rd_atomic = last.max_rd_atomic;
  return attr;
}

int attempt(const End& end, const End& peer, ibv_qp_state to, int mask) {
  ibv_qp_attr attr = everything(end, peer);
  attr.qp_state = to;
  return end.modify(attr, IBV_QP_STATE | mask);
}

/// Brings a new datagram queue pair from RTS to SQE by a send that fails locally.
void fail_a_send(const End& end) {
  const ibv_ah_attr where = end.address_of(end);
  ibv_ah_attr attr = where;
  const Ah ah(ibv_create_ah(end.pd, &attr));
  must(ah != nullptr, "ibv_create_ah");
  ibv_sge forbidden = end.memory.sge(0, 8);
  forbidden.lkey ^= 0x5a5a5a;
  Send(1, IBV_WR_SEND, {forbidden}).to(ah.get(), end.qp->qp_num, end.options.qkey).on(end);
  EXPECT_EQ(end.sent().status, IBV_WC_LOC_PROT_ERR);
}

/// Returns false if the device cannot reach the state.
bool bring_to(const End& end, const End& peer, ibv_qp_state state) {
  if (state == IBV_QPS_RESET) return true;
  end.to_init();
  if (state == IBV_QPS_INIT) return true;
  if (state == IBV_QPS_ERR) return end.to_error(), true;
  end.to_rtr(peer);
  if (state == IBV_QPS_RTR) return true;
  end.to_rts();
  if (state == IBV_QPS_SQD) return end.move_to(IBV_QPS_SQD) == 0;
  if (state == IBV_QPS_SQE) fail_a_send(end);
  return true;
}

struct Move {
  ibv_qp_type type;
  ibv_qp_state from;
  ibv_qp_state to;
};

std::string name_of_move(const testing::TestParamInfo<Move>& info) {
  return std::string(info.param.type == IBV_QPT_UD ? "Ud" : "Rc") + name_of(info.param.from) +
         "To" + name_of(info.param.to);
}

/// All pairs of states that the table allows, or all that it forbids.
std::vector<Move> moves(bool allowed) {
  std::vector<Move> list;
  for (const ibv_qp_type type : {IBV_QPT_RC, IBV_QPT_UD}) {
    for (const ibv_qp_state from : kStates) {
      if (from == IBV_QPS_SQD || (from == IBV_QPS_SQE && type == IBV_QPT_RC)) continue;
      for (const ibv_qp_state to : kStates) {
        const bool drains = from == IBV_QPS_RTS && to == IBV_QPS_SQD;  // see SendQueueDrain
        if (drains || (from == IBV_QPS_RESET && to == IBV_QPS_ERR)) continue;
        if (demand(type, from, to).has_value() == allowed) list.push_back({type, from, to});
      }
    }
  }
  return list;
}

class StateMove : public Verbs, public testing::WithParamInterface<Move> {
 protected:
  StateMove() {
    options_.type = GetParam().type;
    end_.emplace(context.get(), pd.get(), options_);
    peer_.emplace(context.get(), pd.get(), options_);
    must(bring_to(*end_, *peer_, GetParam().from), "the first state");
  }
  [[nodiscard]] const End& subject() const { return *end_; }
  [[nodiscard]] const End& peer() const { return *peer_; }

 private:
  EndOptions options_;
  std::optional<End> end_;
  std::optional<End> peer_;
};

class LegalMove : public StateMove {};

TEST_P(LegalMove, IsMade) {
  const auto [type, from, to] = GetParam();
  const Demand d = *demand(type, from, to);
  ASSERT_EQ(subject().state(), from);
  EXPECT_EQ(attempt(subject(), peer(), to, d.required), 0);
  EXPECT_EQ(subject().state(), to);
}

class DemandingMove : public StateMove {};

TEST_P(DemandingMove, NeedsAllItsAttributes) {
  const auto [type, from, to] = GetParam();
  const Demand d = *demand(type, from, to);
  for (int bit = 1; bit <= d.required; bit <<= 1) {
    if ((d.required & bit) == 0) continue;
    EXPECT_EQ(attempt(subject(), peer(), to, d.required & ~bit), EINVAL) << "without " << bit;
    EXPECT_EQ(subject().state(), from);
  }
  EXPECT_EQ(attempt(subject(), peer(), to, d.required), 0) << "refusals leave nothing behind";
}

TEST_P(LegalMove, TakesNoOtherAttribute) {
  const auto [type, from, to] = GetParam();
  const Demand d = *demand(type, from, to);
  for (int bit = 1; bit <= d.forbidden; bit <<= 1) {
    if ((d.forbidden & bit) == 0) continue;
    EXPECT_EQ(attempt(subject(), peer(), to, d.required | bit), EINVAL) << "with " << bit;
    EXPECT_EQ(subject().state(), from);
  }
}

INSTANTIATE_TEST_SUITE_P(States, LegalMove, testing::ValuesIn(moves(true)), name_of_move);

std::vector<Move> demanding_moves() {
  std::vector<Move> list = moves(true);
  std::erase_if(list, [](const Move& m) { return demand(m.type, m.from, m.to)->required == 0; });
  return list;
}
INSTANTIATE_TEST_SUITE_P(States, DemandingMove, testing::ValuesIn(demanding_moves()), name_of_move);

class IllegalMove : public StateMove {};

TEST_P(IllegalMove, IsRefused) {
  const auto [type, from, to] = GetParam();
  // Tries no attributes, and those of every legal transition to the target state.
  std::vector<int> masks = {0};
  for (const Demand& d : demands(type)) {
    if (d.to == to) masks.push_back(d.required);
  }
  for (const int mask : masks) {
    EXPECT_EQ(attempt(subject(), peer(), to, mask), EINVAL);
    EXPECT_EQ(subject().state(), from);
  }
}

INSTANTIATE_TEST_SUITE_P(States, IllegalMove, testing::ValuesIn(moves(false)), name_of_move);

// ---- meaning of states ------------------------------------------------------------------------

class States : public Verbs {};

TEST_F(States, CurrentStateHasToAgree) {
  const Pair link = pair();
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTS;
  attr.cur_qp_state = IBV_QPS_INIT;
  EXPECT_EQ(link.a.modify(attr, IBV_QP_STATE | IBV_QP_CUR_STATE), EINVAL);
  attr.cur_qp_state = IBV_QPS_RTS;
  EXPECT_EQ(link.a.modify(attr, IBV_QP_STATE | IBV_QP_CUR_STATE), 0);
  EXPECT_EQ(link.a.state(), IBV_QPS_RTS);
}

TEST_F(States, ReceivesAreRefusedInReset) {
  for (const ibv_qp_type type : {IBV_QPT_RC, IBV_QPT_UD}) {
    EndOptions options;
    options.type = type;
    const End subject = end(options);
    EXPECT_EQ(subject.receive_into(1, {subject.memory.sge(0, 64)}), EINVAL);
    subject.to_init();
    EXPECT_EQ(subject.receive_into(1, {subject.memory.sge(0, 64)}), 0);
  }
}

TEST_F(States, SendsAreRefusedBeforeReadyToSend) {
  const End a = end(), b = end();
  const auto refused = [&] {
    Send send(1, IBV_WR_SEND, {a.memory.sge(0, 8)});
    ibv_send_wr* bad = nullptr;
    EXPECT_EQ(ibv_post_send(a.qp.get(), &send.wr, &bad), EINVAL);
    EXPECT_EQ(bad, &send.wr);
  };
  refused();
  a.to_init();
  refused();
  b.to_init();
  a.to_rtr(b);
  refused();
  b.to_rtr(a);
  b.receive(2, 0, 64);
  a.to_rts();
  Send(1, IBV_WR_SEND, {a.memory.sge(0, 8)}).on(a);
  expect_recv(b.received(), b, 2, 8);
}

TEST_F(States, DatagramsAreRefusedBeforeReadyToSend) {
  EndOptions options;
  options.type = IBV_QPT_UD;
  const End a = end(options);
  ibv_ah_attr where = a.address_of(a);
  const Ah ah(ibv_create_ah(pd.get(), &where));
  ASSERT_NE(ah, nullptr);
  for (const ibv_qp_state state : {IBV_QPS_INIT, IBV_QPS_RTR}) {
    ASSERT_EQ(attempt(a, a, state, state == IBV_QPS_INIT ? kUdInit : 0), 0);
    Send send(1, IBV_WR_SEND, {a.memory.sge(0, 8)});
    send.to(ah.get(), a.qp->qp_num, options.qkey);
    EXPECT_EQ(a.post(send.wr), EINVAL);
  }
}

TEST_F(States, ReadyToReceiveReceives) {
  const End a = end(), b = end();
  a.to_init();
  b.to_init();
  b.receive(3, 0, 64);
  b.to_rtr(a);
  a.to_rtr(b);
  a.to_rts();
  fill(a.memory.at(0, 33), 1);
  Send(1, IBV_WR_SEND, {a.memory.sge(0, 33)}).on(a);
  expect_recv(b.received(), b, 3, 33);
  EXPECT_TRUE(holds(b.memory.at(0, 33), 1));
  expect_wc(a.sent(), a, 1, IBV_WC_SUCCESS);
}

TEST_F(States, QueryTellsWhatWasSet) {
  const Pair link = pair();
  const ibv_qp_attr attr = link.a.query(0xfffff);
  EXPECT_EQ(attr.qp_state, IBV_QPS_RTS);
  EXPECT_EQ(attr.cur_qp_state, IBV_QPS_RTS);
  EXPECT_EQ(attr.path_mtu, IBV_MTU_1024);
  EXPECT_EQ(attr.dest_qp_num, link.b.qp->qp_num);
  EXPECT_EQ(attr.rq_psn, link.b.psn());
  EXPECT_EQ(attr.sq_psn, link.a.psn());
  EXPECT_EQ(attr.qp_access_flags, static_cast<unsigned>(kRemote));
  EXPECT_EQ(attr.port_num, settings.port);
  EXPECT_EQ(attr.pkey_index, 0);
  EXPECT_EQ(attr.timeout, link.a.options.timeout);
  EXPECT_EQ(attr.retry_cnt, link.a.options.retries);
  EXPECT_EQ(attr.rnr_retry, link.a.options.rnr_retries);
  EXPECT_EQ(attr.min_rnr_timer, link.a.options.rnr_timer);
  EXPECT_GE(attr.max_rd_atomic, 1);
  EXPECT_GE(attr.max_dest_rd_atomic, 1);
  EXPECT_EQ(std::memcmp(&attr.ah_attr.grh.dgid, link.b.gid().raw, sizeof(ibv_gid)), 0);
}

TEST_F(States, QueryTellsHowItWasMade) {
  EndOptions options;
  options.signal_all = true;
  const End subject = end(options);
  ibv_qp_attr attr{};
  ibv_qp_init_attr init{};
  ASSERT_EQ(ibv_query_qp(subject.qp.get(), &attr, IBV_QP_CAP, &init), 0);
  EXPECT_EQ(init.qp_type, IBV_QPT_RC);
  EXPECT_EQ(init.send_cq, subject.send_cq.get());
  EXPECT_EQ(init.recv_cq, subject.recv_cq.get());
  EXPECT_EQ(init.srq, nullptr);
  EXPECT_EQ(init.sq_sig_all, 1);
  EXPECT_EQ(attr.cap.max_send_wr, subject.cap.max_send_wr);
  EXPECT_EQ(attr.cap.max_recv_wr, subject.cap.max_recv_wr);
  EXPECT_GE(attr.cap.max_send_wr, options.send_wr);
  EXPECT_GE(attr.cap.max_send_sge, options.sges);
  EXPECT_GE(attr.cap.max_inline_data, options.inline_bytes);
}

TEST_F(States, AccessCanBeChangedWhileReady) {
  const Pair link = pair();
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_RTS;
  attr.qp_access_flags = kRemoteRead;
  ASSERT_EQ(link.b.modify(attr, IBV_QP_STATE | IBV_QP_ACCESS_FLAGS), 0);
  EXPECT_EQ(link.b.query(IBV_QP_ACCESS_FLAGS).qp_access_flags, static_cast<unsigned>(kRemoteRead));
  Send(1, IBV_WR_RDMA_READ, {link.a.memory.sge(0, 8)})
      .at(link.b.memory.address(), link.b.memory.rkey())
      .on(link.a);
  expect_wc(link.a.sent(), link.a, 1, IBV_WC_SUCCESS, IBV_WC_RDMA_READ);
  Send(2, IBV_WR_RDMA_WRITE, {link.a.memory.sge(0, 8)})
      .at(link.b.memory.address(), link.b.memory.rkey())
      .on(link.a);
  // For the two possible statuses see RemoteAccess.QueuePairWithoutTheRight.
  const ibv_wc_status refused = link.a.sent().status;
  EXPECT_TRUE(refused == IBV_WC_REM_ACCESS_ERR || refused == IBV_WC_REM_INV_REQ_ERR)
      << ibv_wc_status_str(refused);
}

struct Value {
  const char* name;
  ibv_qp_state to;
  void (*spoil)(ibv_qp_attr&);
};
class BadValue : public Verbs, public testing::WithParamInterface<Value> {};

TEST_P(BadValue, IsRefused) {
  const End a = end(), b = end();
  const Value& value = GetParam();
  const ibv_qp_state before = value.to == IBV_QPS_INIT  ? IBV_QPS_RESET
                              : value.to == IBV_QPS_RTR ? IBV_QPS_INIT
                                                        : IBV_QPS_RTR;
  ASSERT_TRUE(bring_to(a, b, before));
  ibv_qp_attr attr = everything(a, b);
  attr.qp_state = value.to;
  value.spoil(attr);
  const int mask = IBV_QP_STATE | demand(IBV_QPT_RC, before, value.to)->required;
  EXPECT_EQ(a.modify(attr, mask), EINVAL);
  EXPECT_EQ(a.state(), before);
}

INSTANTIATE_TEST_SUITE_P(
    Values, BadValue,
    testing::Values(
        Value{"Port0", IBV_QPS_INIT, [](ibv_qp_attr& a) { a.port_num = 0; }},
        Value{"Port200", IBV_QPS_INIT, [](ibv_qp_attr& a) { a.port_num = 200; }},
        Value{"Mtu", IBV_QPS_RTR, [](ibv_qp_attr& a) { a.path_mtu = static_cast<ibv_mtu>(7); }},
        Value{"Responder", IBV_QPS_RTR, [](ibv_qp_attr& a) { a.max_dest_rd_atomic = 255; }},
        Value{"Initiator", IBV_QPS_RTS, [](ibv_qp_attr& a) { a.max_rd_atomic = 255; }}),
    [](const auto& value) { return value.param.name; });

// ---- RESET and back ---------------------------------------------------------------------------

TEST_F(States, ResetForgetsWhatWasPosted) {
  const Pair link = pair();
  link.b.receive(1, 0, 64);
  ASSERT_EQ(link.b.move_to(IBV_QPS_RESET), 0);
  EXPECT_TRUE(nothing(link.b.recv_cq.get())) << "RESET flushes without completions";
  ASSERT_EQ(link.a.move_to(IBV_QPS_RESET), 0);
  connect(link.a, link.b);
  link.b.receive(2, 128, 64);
  Send(3, IBV_WR_SEND, {link.a.memory.sge(0, 8)}).on(link.a);
  expect_recv(link.b.received(), link.b, 2, 8);
  expect_wc(link.a.sent(), link.a, 3, IBV_WC_SUCCESS);
}

TEST_F(States, DatagramSendErrorStopsSendingOnly) {
  EndOptions options;
  options.type = IBV_QPT_UD;
  const Pair link = pair(options, options);
  fail_a_send(link.a);
  EXPECT_EQ(link.a.state(), IBV_QPS_SQE);
  ibv_ah_attr to_b = link.a.address_of(link.b), to_a = link.b.address_of(link.a);
  const Ah ah_b(ibv_create_ah(pd.get(), &to_b)), ah_a(ibv_create_ah(pd.get(), &to_a));
  link.a.receive(7, 0, 256);
  Send(2, IBV_WR_SEND, {link.b.memory.sge(0, 8)})
      .to(ah_a.get(), link.a.qp->qp_num, options.qkey)
      .on(link.b);
  expect_recv(link.a.received(), link.a, 7, 48, IBV_WC_GRH);
  Send(3, IBV_WR_SEND, {link.a.memory.sge(0, 8)})
      .to(ah_b.get(), link.b.qp->qp_num, options.qkey)
      .on(link.a);
  expect_wc(link.a.sent(), link.a, 3, IBV_WC_WR_FLUSH_ERR);
  ASSERT_EQ(link.a.move_to(IBV_QPS_RTS), 0);
  link.b.receive(8, 0, 256);
  Send(4, IBV_WR_SEND, {link.a.memory.sge(0, 8)})
      .to(ah_b.get(), link.b.qp->qp_num, options.qkey)
      .on(link.a);
  expect_wc(link.a.sent(), link.a, 4, IBV_WC_SUCCESS);
  expect_recv(link.b.received(), link.b, 8, 48, IBV_WC_GRH);
}

/// The specification requires it of every device; some devices refuse RTS to SQD.
class SendQueueDrain : public Verbs, public testing::WithParamInterface<ibv_qp_type> {
 protected:
  SendQueueDrain() {
    EndOptions options;
    options.type = GetParam();
    end_.emplace(context.get(), pd.get(), options);
    peer_.emplace(context.get(), pd.get(), options);
  }
  void SetUp() override {
    if (!bring_to(*end_, *peer_, IBV_QPS_SQD)) GTEST_SKIP() << "RTS to SQD is refused";
  }
  std::optional<End> end_;
  std::optional<End> peer_;
};

TEST_P(SendQueueDrain, ComesBackOrEnds) {
  EXPECT_EQ(end_->state(), IBV_QPS_SQD);
  for (const ibv_qp_state illegal : {IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_SQE}) {
    EXPECT_EQ(attempt(*end_, *peer_, illegal, 0), EINVAL);
    EXPECT_EQ(end_->state(), IBV_QPS_SQD);
  }
  EXPECT_TRUE(end_->is_drained());
  EXPECT_EQ(end_->move_to(IBV_QPS_RTS), 0);
  EXPECT_EQ(end_->state(), IBV_QPS_RTS);
  EXPECT_EQ(end_->move_to(IBV_QPS_SQD), 0);
  EXPECT_EQ(end_->move_to(IBV_QPS_ERR), 0);
  EXPECT_EQ(end_->state(), IBV_QPS_ERR);
}

INSTANTIATE_TEST_SUITE_P(States, SendQueueDrain, testing::Values(IBV_QPT_RC, IBV_QPT_UD),
                         [](const auto& type) {
                           return std::string(type.param == IBV_QPT_UD ? "Ud" : "Rc");
                         });

}  // namespace conformance::state_cases
