// ibv_cq_ex: completions read one by one, field by field.
#include <cstring>

#include "preload/host.h"
#include "preload/interpose.h"

namespace spinwire::preload {

namespace {

/// A queue that a program made with ibv_create_cq_ex(). ibv_cq_ex begins with the members of
/// ibv_cq, so it serves as both.
struct Reader : ibv_cq_ex {
  ibv_wc wc;                         ///< the completion being read
  void (*lock)(FairLock&) noexcept;  ///< does nothing if the program has one thread
  void (*unlock)(FairLock&) noexcept;
  FairLock polling;  ///< from start_poll() to end_poll()
};
static_assert(sizeof(Reader) <= sizeof(ibv_cq) + softverbs::kCqExtension);
static_assert(offsetof(ibv_cq_ex, comp_mask) <= sizeof(ibv_cq));

Reader& reader_of(ibv_cq_ex* cq) noexcept { return *static_cast<Reader*>(cq); }
const ibv_wc& current(ibv_cq_ex* cq) noexcept { return reader_of(cq).wc; }

/// Takes the next completion: 0, ENOENT, or an error.
int read_next(Reader& r) noexcept {
  const int got = ibv_poll_cq(reinterpret_cast<ibv_cq*>(&r), 1, &r.wc);
  if (got == 0) return ENOENT;
  if (got < 0) return EIO;
  r.wr_id = r.wc.wr_id;
  r.status = r.wc.status;
  return 0;
}

int start_poll(ibv_cq_ex* cq, ibv_poll_cq_attr* attr) noexcept {
  if (attr == nullptr || attr->comp_mask != 0) return EINVAL;
  Reader& r = reader_of(cq);
  r.lock(r.polling);
  const int error = read_next(r);
  if (error != 0) r.unlock(r.polling);  // end_poll() is not called then
  return error;
}
int next_poll(ibv_cq_ex* cq) noexcept { return read_next(reader_of(cq)); }
void end_poll(ibv_cq_ex* cq) noexcept {
  Reader& r = reader_of(cq);
  r.unlock(r.polling);
}

void fill(Reader& r, std::uint64_t fields, bool one_thread) noexcept {
  r.lock = one_thread ? [](FairLock&) noexcept {} : [](FairLock& l) noexcept { l.lock(); };
  r.unlock = one_thread ? [](FairLock&) noexcept {} : [](FairLock& l) noexcept { l.unlock(); };
  r.start_poll = start_poll;
  r.next_poll = next_poll;
  r.end_poll = end_poll;
  r.read_opcode = [](ibv_cq_ex* cq) { return current(cq).opcode; };
  r.read_vendor_err = [](ibv_cq_ex* cq) { return current(cq).vendor_err; };
  r.read_wc_flags = [](ibv_cq_ex* cq) { return static_cast<unsigned>(current(cq).wc_flags); };
  const auto asked = [fields](std::uint64_t field) { return (fields & field) != 0; };
  if (asked(IBV_WC_EX_WITH_BYTE_LEN))
    r.read_byte_len = [](ibv_cq_ex* cq) { return current(cq).byte_len; };
  if (asked(IBV_WC_EX_WITH_IMM))
    r.read_imm_data = [](ibv_cq_ex* cq) { return current(cq).imm_data; };
  if (asked(IBV_WC_EX_WITH_QP_NUM))
    r.read_qp_num = [](ibv_cq_ex* cq) { return current(cq).qp_num; };
  if (asked(IBV_WC_EX_WITH_SRC_QP))
    r.read_src_qp = [](ibv_cq_ex* cq) { return current(cq).src_qp; };
  if (asked(IBV_WC_EX_WITH_SLID))
    r.read_slid = [](ibv_cq_ex* cq) { return std::uint32_t{current(cq).slid}; };
  if (asked(IBV_WC_EX_WITH_SL)) r.read_sl = [](ibv_cq_ex* cq) { return current(cq).sl; };
  if (asked(IBV_WC_EX_WITH_DLID_PATH_BITS))
    r.read_dlid_path_bits = [](ibv_cq_ex* cq) { return current(cq).dlid_path_bits; };
}

}  // namespace

ibv_cq_ex* create_cq_ex(ibv_context* context, ibv_cq_init_attr_ex* attr) noexcept {
  constexpr std::uint32_t kKnown = IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD;
  const std::uint32_t flags =
      (attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS) != 0 ? attr->flags : 0;
  const bool has_domain = (attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_PD) != 0;
  if (has_domain && (attr->parent_domain == nullptr || attr->parent_domain->context != context))
    return refuse_with<ibv_cq_ex>(EINVAL);
  // A completion queue overrun is an error on this device, as on most.
  if ((attr->comp_mask & ~kKnown) != 0 ||
      (attr->wc_flags & ~std::uint64_t{IBV_WC_STANDARD_FLAGS}) != 0 ||
      (flags & ~std::uint32_t{IBV_CREATE_CQ_ATTR_SINGLE_THREADED}) != 0)
    return refuse_with<ibv_cq_ex>(EOPNOTSUPP);
  ibv_cq* cq = create_cq(context, static_cast<int>(attr->cqe), attr->cq_context, attr->channel,
                         static_cast<int>(attr->comp_vector));
  if (cq == nullptr) return nullptr;
  auto* const r = reinterpret_cast<Reader*>(cq);
  fill(*r, attr->wc_flags, (flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED) != 0);
  return r;
}

}  // namespace spinwire::preload
