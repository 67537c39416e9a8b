// Posting through ibv_qp_ex: each ibv_wr_* call adds to a list of ordinary work requests, which
// wr_complete posts.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>

#include "preload/host.h"
#include "preload/interpose.h"

namespace spinwire::preload {

namespace {

/// The handle of the base. Distinguishes it from a queue pair, whose handle is small.
constexpr std::uint32_t kBuilderHandle = 0xffff'ffff;

}  // namespace

struct SendBuilder : ibv_qp_ex {
  ibv_qp* qp = nullptr;
  std::mutex mutex;  ///< from wr_start to wr_complete
  int error = 0;     ///< the first error; the list is then not posted
  std::size_t depth = 0;
  std::size_t max_sge = 0;
  std::size_t max_inline = 0;
  std::size_t count = 0;
  // One entry more than the depth: excess work requests are written there.
  std::unique_ptr<ibv_send_wr[]> works;
  std::unique_ptr<ibv_sge[]> elements;
  std::unique_ptr<std::byte[]> bytes;

  void fail(int why) noexcept {
    if (error == 0) error = why;
  }
  /// The work request that was begun last.
  ibv_send_wr& last() noexcept { return works[count == 0 ? depth : count - 1]; }
  ibv_sge* elements_of(const ibv_send_wr& wr) noexcept {
    return &elements[static_cast<std::size_t>(&wr - works.get()) * max_sge];
  }
  std::byte* bytes_of(const ibv_send_wr& wr) noexcept {
    return &bytes[static_cast<std::size_t>(&wr - works.get()) * max_inline];
  }
};

namespace {

SendBuilder& builder_of(ibv_qp_ex* qp) noexcept { return *static_cast<SendBuilder*>(qp); }

ibv_send_wr& begin(ibv_qp_ex* qp, ibv_wr_opcode opcode) noexcept {
  SendBuilder& b = builder_of(qp);
  const bool fits = b.count != b.depth;
  if (!fits) b.fail(ENOMEM);
  ibv_send_wr& wr = b.works[b.count];
  if (fits) ++b.count;
  wr = {};
  wr.wr_id = qp->wr_id;
  wr.opcode = opcode;
  wr.send_flags = qp->wr_flags;
  return wr;
}
ibv_send_wr& begin_remote(ibv_qp_ex* qp, ibv_wr_opcode opcode, std::uint32_t key,
                          std::uint64_t address) noexcept {
  ibv_send_wr& wr = begin(qp, opcode);
  wr.wr.rdma.remote_addr = address;
  wr.wr.rdma.rkey = key;
  return wr;
}

void write(ibv_qp_ex* qp, std::uint32_t key, std::uint64_t address) {
  begin_remote(qp, IBV_WR_RDMA_WRITE, key, address);
}
void write_imm(ibv_qp_ex* qp, std::uint32_t key, std::uint64_t address, __be32 imm) {
  begin_remote(qp, IBV_WR_RDMA_WRITE_WITH_IMM, key, address).imm_data = imm;
}
void read(ibv_qp_ex* qp, std::uint32_t key, std::uint64_t address) {
  begin_remote(qp, IBV_WR_RDMA_READ, key, address);
}
void send(ibv_qp_ex* qp) { begin(qp, IBV_WR_SEND); }
void send_imm(ibv_qp_ex* qp, __be32 imm) { begin(qp, IBV_WR_SEND_WITH_IMM).imm_data = imm; }
void send_inv(ibv_qp_ex* qp, std::uint32_t key) {
  begin(qp, IBV_WR_SEND_WITH_INV).invalidate_rkey = key;
}
void local_inv(ibv_qp_ex* qp, std::uint32_t key) {
  begin(qp, IBV_WR_LOCAL_INV).invalidate_rkey = key;
}
void bind_mw(ibv_qp_ex* qp, ibv_mw* mw, std::uint32_t key, const ibv_mw_bind_info* info) {
  ibv_send_wr& wr = begin(qp, IBV_WR_BIND_MW);
  wr.bind_mw.mw = mw;
  wr.bind_mw.rkey = key;
  wr.bind_mw.bind_info = *info;
}

void begin_atomic(ibv_qp_ex* qp, ibv_wr_opcode opcode, std::uint32_t key, std::uint64_t address,
                  std::uint64_t compare_add, std::uint64_t swap) noexcept {
  ibv_send_wr& wr = begin(qp, opcode);
  wr.wr.atomic.remote_addr = address;
  wr.wr.atomic.rkey = key;
  wr.wr.atomic.compare_add = compare_add;
  wr.wr.atomic.swap = swap;
}
void cmp_swp(ibv_qp_ex* qp, std::uint32_t key, std::uint64_t address, std::uint64_t compare,
             std::uint64_t swap) {
  begin_atomic(qp, IBV_WR_ATOMIC_CMP_AND_SWP, key, address, compare, swap);
}
void fetch_add(ibv_qp_ex* qp, std::uint32_t key, std::uint64_t address, std::uint64_t add) {
  begin_atomic(qp, IBV_WR_ATOMIC_FETCH_AND_ADD, key, address, add, 0);
}

void set_ud_addr(ibv_qp_ex* qp, ibv_ah* ah, std::uint32_t number, std::uint32_t key) {
  ibv_send_wr& wr = builder_of(qp).last();
  wr.wr.ud.ah = ah;
  wr.wr.ud.remote_qpn = number;
  wr.wr.ud.remote_qkey = key;
}

void set_sge_list(ibv_qp_ex* qp, std::size_t count, const ibv_sge* list) {
  SendBuilder& b = builder_of(qp);
  if (count > b.max_sge) return b.fail(EINVAL);
  ibv_send_wr& wr = b.last();
  wr.sg_list = b.elements_of(wr);
  wr.num_sge = static_cast<int>(count);
  std::copy_n(list, count, wr.sg_list);
}
void set_sge(ibv_qp_ex* qp, std::uint32_t key, std::uint64_t address, std::uint32_t length) {
  const ibv_sge sge{address, length, key};
  set_sge_list(qp, 1, &sge);
}

/// Copies the bytes, because the caller may change them as soon as the call returns.
void set_inline_data_list(ibv_qp_ex* qp, std::size_t count, const ibv_data_buf* list) {
  SendBuilder& b = builder_of(qp);
  ibv_send_wr& wr = b.last();
  std::byte* const bytes = b.bytes_of(wr);
  std::size_t length = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (list[i].length > b.max_inline - length) return b.fail(EINVAL);
    if (list[i].length != 0) std::memcpy(bytes + length, list[i].addr, list[i].length);
    length += list[i].length;
  }
  wr.sg_list = b.elements_of(wr);
  wr.num_sge = 1;
  wr.send_flags |= IBV_SEND_INLINE;
  *wr.sg_list = {reinterpret_cast<std::uint64_t>(bytes), static_cast<std::uint32_t>(length), 0};
}
void set_inline_data(ibv_qp_ex* qp, void* address, std::size_t length) {
  const ibv_data_buf buffer{address, length};
  set_inline_data_list(qp, 1, &buffer);
}

void start(ibv_qp_ex* qp) {
  SendBuilder& b = builder_of(qp);
  b.mutex.lock();
  b.count = 0;
  b.error = 0;
}
int complete(ibv_qp_ex* qp) {
  SendBuilder& b = builder_of(qp);
  for (std::size_t i = 1; i < b.count; ++i) b.works[i - 1].next = &b.works[i];
  int error = b.error;
  if (error == 0 && b.count != 0) {
    ibv_send_wr* bad = nullptr;
    const Guard guard(b.qp->context);
    error = guard.host().bare.post_send(b.qp, b.works.get(), &bad);
  }
  b.mutex.unlock();
  return error;
}
void abort_list(ibv_qp_ex* qp) { builder_of(qp).mutex.unlock(); }

void fill_calls(ibv_qp_ex& qp) noexcept {
  qp.wr_atomic_cmp_swp = cmp_swp;
  qp.wr_atomic_fetch_add = fetch_add;
  qp.wr_bind_mw = bind_mw;
  qp.wr_local_inv = local_inv;
  qp.wr_rdma_read = read;
  qp.wr_rdma_write = write;
  qp.wr_rdma_write_imm = write_imm;
  qp.wr_send = send;
  qp.wr_send_imm = send_imm;
  qp.wr_send_inv = send_inv;
  qp.wr_set_ud_addr = set_ud_addr;
  qp.wr_set_inline_data = set_inline_data;
  qp.wr_set_inline_data_list = set_inline_data_list;
  qp.wr_set_sge = set_sge;
  qp.wr_set_sge_list = set_sge_list;
  qp.wr_start = start;
  qp.wr_complete = complete;
  qp.wr_abort = abort_list;
}

}  // namespace

bool make_builder(Host& host, ibv_qp* qp, const ibv_qp_cap& cap) noexcept {
  try {
    auto b = std::make_unique<SendBuilder>();
    b->qp = qp;
    b->depth = cap.max_send_wr;
    b->max_sge = std::max(cap.max_send_sge, 1u);
    b->max_inline = cap.max_inline_data;
    b->works = std::make_unique<ibv_send_wr[]>(b->depth + 1);
    b->elements = std::make_unique<ibv_sge[]>((b->depth + 1) * b->max_sge);
    b->bytes = std::make_unique<std::byte[]>((b->depth + 1) * b->max_inline + 1);
    b->qp_base = *qp;
    b->qp_base.handle = kBuilderHandle;
    fill_calls(*b);
    const Guard guard(qp->context);
    host.builders[qp] = std::move(b);
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

void drop_builder(Host& host, const ibv_qp* qp) noexcept { host.builders.erase(qp); }

ibv_qp* actual(ibv_qp* qp) noexcept {
  if (qp->handle != kBuilderHandle) return qp;
  return builder_of(reinterpret_cast<ibv_qp_ex*>(qp)).qp;
}

Host::Host() = default;
Host::~Host() = default;

}  // namespace spinwire::preload

using namespace spinwire;

SOFTVERBS_INTERPOSED ibv_qp_ex* ibv_qp_to_qp_ex(ibv_qp* qp) {
  if (!preload::ours(qp->context)) return SOFTVERBS_NEXT(ibv_qp_to_qp_ex)(qp);
  const preload::Guard guard(qp->context);
  const auto found = guard.host().builders.find(preload::actual(qp));
  return found == guard.host().builders.end() ? nullptr : found->second.get();
}
