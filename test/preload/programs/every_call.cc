// A libibverbs program that makes the calls which the other tests do not make, on the softverbs
// device. Each call must work as documented or fail with a fitting errno.
#include <endian.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

void must(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "failed: %s (errno %d: %s)\n", what, errno, std::strerror(errno));
  std::exit(1);
}
/// Checks for null and an errno.
void refused(const void* answer, const char* what) {
  must(answer == nullptr && (errno == EOPNOTSUPP || errno == EINVAL), what);
  errno = 0;
}

ibv_context* open_softverbs() {
  int count = 0;
  ibv_device** list = ibv_get_device_list(&count);
  must(list != nullptr && count > 0, "the list of devices");
  ibv_device* device = list[count - 1];
  must(std::strcmp(ibv_get_device_name(device), "softverbs") == 0, "its name");
  must(ibv_get_device_guid(device) != 0 && ibv_get_device_index(device) == -1, "its numbers");
  must(std::strcmp(ibv_node_type_str(device->node_type), "InfiniBand channel adapter") == 0,
       "its type");
  ibv_context* context = ibv_open_device(device);
  ibv_free_device_list(list);
  must(context != nullptr, "opening softverbs");
  return context;
}

void questions(ibv_context* context) {
  ibv_device_attr attr{};
  must(ibv_query_device(context, &attr) == 0 && attr.max_qp > 0, "query_device");
  ibv_device_attr_ex more{};
  must(ibv_query_device_ex(context, nullptr, &more) == 0, "query_device_ex");
  must(more.orig_attr.max_qp == attr.max_qp && more.phys_port_cnt_ex == 1, "the same of it");
  ibv_port_attr port{};
  must(ibv_query_port(context, 1, &port) == 0 && port.state == IBV_PORT_ACTIVE, "query_port");
  must(ibv_query_port(context, 2, &port) != 0, "no second port");
  ibv_gid gid{};
  must(ibv_query_gid(context, 1, 0, &gid) == 0, "query_gid");
  must(ibv_query_gid(context, 1, 1, &gid) != 0, "no second GID");
  ibv_gid_entry entry{};
  must(ibv_query_gid_ex(context, 1, 0, &entry, 0) == 0, "query_gid_ex");
  must(std::memcmp(&entry.gid, &gid, sizeof gid) == 0 && entry.gid_type == IBV_GID_TYPE_ROCE_V2,
       "the same GID");
  ibv_gid_entry table[4];
  must(ibv_query_gid_table(context, table, 4, 0) == 1, "query_gid_table");
  __be16 pkey = 0;
  must(ibv_query_pkey(context, 1, 0, &pkey) == 0 && pkey == htobe16(0xffff), "query_pkey");
  must(ibv_get_pkey_index(context, 1, pkey) == 0, "get_pkey_index");
  must(ibv_get_pkey_index(context, 1, htobe16(5)) < 0, "no such P_Key");
  ibv_values_ex values{};
  values.comp_mask = IBV_VALUES_MASK_RAW_CLOCK;
  must(ibv_query_rt_values_ex(context, &values) == EOPNOTSUPP, "no clock");
  must(ibv_fork_init() == 0 || errno != 0, "fork_init");
}

void memory(ibv_context* context, ibv_pd* pd) {
  static std::uint64_t bytes[64];
  const auto here = reinterpret_cast<std::uint64_t>(bytes);
  constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE;
  ibv_mr* mr = ibv_reg_mr_iova(pd, bytes, sizeof bytes, here, kAccess);
  must(mr != nullptr && mr->addr == bytes && mr->length == sizeof bytes, "reg_mr_iova");
  refused(ibv_reg_mr_iova(pd, bytes, sizeof bytes, 4096, kAccess), "other addresses");
  refused(ibv_reg_dmabuf_mr(pd, 0, 4096, 0, 0, kAccess), "dmabuf");
  must(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, kAccess) == 0, "rereg_mr");
  must(ibv_rereg_mr(mr, 64, nullptr, nullptr, 0, kAccess) == IBV_REREG_MR_ERR_INPUT &&
           errno == EINVAL,
       "an unknown flag of rereg_mr");
  ibv_sge sge{here, 8, mr->lkey};
  must(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1) == EOPNOTSUPP, "advise_mr");
  refused(ibv_alloc_null_mr(pd), "alloc_null_mr");
  ibv_alloc_dm_attr dm{};
  refused(ibv_alloc_dm(context, &dm), "alloc_dm");
  refused(ibv_import_pd(context, 0), "import_pd");
  refused(ibv_import_mr(pd, 0), "import_mr");
  refused(ibv_import_dm(context, 0), "import_dm");
  ibv_unimport_mr(mr);
  ibv_unimport_pd(pd);
  // Windows of type 1 are not reported and cannot be made. Windows of type 2 are not bound by
  // ibv_bind_mw().
  refused(ibv_alloc_mw(pd, IBV_MW_TYPE_1), "a window of type 1");
  ibv_mw* mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
  must(mw != nullptr, "a window");
  ibv_mw_bind bind{};
  must(ibv_bind_mw(nullptr, mw, &bind) == EINVAL, "bind_mw");
  must(ibv_dealloc_mw(mw) == 0 && ibv_dereg_mr(mr) == 0, "giving them back");
}

void foreign_descriptors(ibv_context* context) {
  must(ibv_import_device(context->cmd_fd) == nullptr && errno == EOPNOTSUPP, "import_device");
  const int duplicate = ::dup(context->cmd_fd);
  must(duplicate >= 0, "a duplicate of cmd_fd");
  must(ibv_import_device(duplicate) == nullptr && errno == EOPNOTSUPP,
       "import_device of a duplicate");
  ::close(duplicate);
  must(ibv_import_device(-1) == nullptr && errno == EINVAL, "import_device of no descriptor");
  // libibverbs looks for the device of a character device in the list of devices.
  for (const char* file : {"/dev/null", "/dev/ptmx"}) {
    const int fd = ::open(file, O_RDWR | O_NOCTTY);
    if (fd < 0) continue;
    must(ibv_import_device(fd) == nullptr, file);
    ::close(fd);
  }
  int count = 0;
  ibv_device** list = ibv_get_device_list(&count);
  must(list != nullptr && std::strcmp(ibv_get_device_name(list[count - 1]), "softverbs") == 0,
       "the device is in the list again");
  ibv_free_device_list(list);
}

/// What UCX asks before it uses a device.
void device_file() {
  constexpr const char* kFile = "/dev/infiniband/softverbs";
  struct stat file {};
  must(::stat(kFile, &file) == 0 && S_ISCHR(file.st_mode) && (file.st_mode & 0777) == 0666, "stat");
  struct stat64 file64 {};
  must(::stat64(kFile, &file64) == 0 && S_ISCHR(file64.st_mode), "stat64");
  must(::access(kFile, R_OK | W_OK) == 0 && ::access(kFile, F_OK) == 0, "access");
  must(::access(kFile, X_OK) != 0 && errno == EACCES, "the device cannot be executed");
  must(::faccessat(AT_FDCWD, kFile, R_OK, AT_EACCESS) == 0, "faccessat");
  // Other paths reach the system.
  must(::stat("/dev/infiniband/softverbs0", &file) != 0 && errno == ENOENT, "no such file");
  must(::access("/dev/infiniband/softverb", R_OK) != 0 && errno == ENOENT, "nor this");
  must(::stat("/dev/null", &file) == 0 && file.st_rdev != 0 && file.st_ino != 0, "a real file");
  must(::access("/dev/null", R_OK) == 0 && ::access("/proc/self", X_OK) == 0, "a real folder");
  const char* volatile nowhere = nullptr;
  must(::access(nowhere, R_OK) != 0 && errno == EFAULT, "a null pointer");
}

void others(ibv_context* context, ibv_pd* pd) {
  ibv_td_init_attr td{};
  td.comp_mask = 1;
  refused(ibv_alloc_td(context, &td), "options of alloc_td");
  ibv_parent_domain_init_attr parent{};
  refused(ibv_alloc_parent_domain(context, &parent), "a parent domain of nothing");
  parent.pd = pd;
  parent.comp_mask = 64;
  refused(ibv_alloc_parent_domain(context, &parent), "options of alloc_parent_domain");
  ibv_cq_init_attr_ex cq{};
  cq.cqe = 16;
  cq.wc_flags = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP;
  refused(ibv_create_cq_ex(context, &cq), "time stamps");
  ibv_xrcd_init_attr xrcd{};
  xrcd.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
  refused(ibv_open_xrcd(context, &xrcd), "open_xrcd");
  ibv_wq_init_attr wq{};
  refused(ibv_create_wq(context, &wq), "create_wq");
  ibv_counters_init_attr counters{};
  refused(ibv_create_counters(context, &counters), "create_counters");
}

ibv_qp* make_qp(ibv_pd* pd, ibv_cq* cq, ibv_qp_type type) {
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = cq;
  init.qp_type = type;
  init.cap = {8, 8, 1, 1, 0};
  return ibv_create_qp(pd, &init);
}

void queue_pairs(ibv_context* context, ibv_pd* pd) {
  ibv_cq* cq = ibv_create_cq(context, 16, nullptr, nullptr, 0);
  must(cq != nullptr, "create_cq");
  refused(ibv_create_cq(context, 16, nullptr, nullptr, 99), "no such vector");
  refused(make_qp(pd, cq, IBV_QPT_UC), "an unreliable connection");
  ibv_qp* qp = make_qp(pd, cq, IBV_QPT_UD);
  must(qp != nullptr, "create_qp");
  must(ibv_qp_to_qp_ex(qp) == nullptr, "made without its calls");
  ibv_gid gid{};
  must(ibv_query_gid(context, 1, 0, &gid) == 0, "query_gid");
  must(ibv_attach_mcast(qp, &gid, 0) == EOPNOTSUPP, "attach_mcast");
  must(ibv_detach_mcast(qp, &gid, 0) == EOPNOTSUPP, "detach_mcast");
  ibv_ece ece{};
  must(ibv_query_ece(qp, &ece) == 0 && ibv_set_ece(qp, &ece) == EOPNOTSUPP, "ECE");
  must(ibv_query_qp_data_in_order(qp, IBV_WR_SEND, 0) == 0, "query_qp_data_in_order");
  ibv_flow_attr flow{};
  refused(ibv_create_flow(qp, &flow), "create_flow");
  // The return address of a datagram.
  ibv_wc wc{};
  ibv_grh grh{};
  grh.sgid = gid;
  ibv_ah_attr way{};
  must(ibv_init_ah_from_wc(context, 1, &wc, &grh, &way) != 0, "no header, no way");
  wc.wc_flags = IBV_WC_GRH;
  must(ibv_init_ah_from_wc(context, 1, &wc, &grh, &way) == 0, "init_ah_from_wc");
  must(std::memcmp(&way.grh.dgid, &gid, sizeof gid) == 0, "where to");
  ibv_ah* ah = ibv_create_ah_from_wc(pd, &wc, &grh, 1);
  must(ah != nullptr, "create_ah_from_wc");
  std::uint8_t mac[6];
  std::uint16_t vlan = 0;
  must(ibv_resolve_eth_l2_from_gid(context, &way, mac, &vlan) != 0, "no Ethernet");
  must(ibv_destroy_ah(ah) == 0 && ibv_destroy_qp(qp) == 0, "giving them back");
  must(ibv_destroy_cq(cq) == 0, "destroy_cq");
}

/// Waiting completions keep their order, and new ones fit.
void growing(ibv_context* context, ibv_pd* pd) {
  constexpr std::uint64_t kEach = 8;
  ibv_cq* cq = ibv_create_cq(context, kEach, nullptr, nullptr, 0);
  std::vector<ibv_qp*> qps;
  for (int i = 0; i < 4; ++i) {
    ibv_qp* qp = make_qp(pd, cq, IBV_QPT_UD);
    must(qp != nullptr, "a queue pair");
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = 1;
    must(
        ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0,
        "INIT");
    if (i == 1) must(ibv_resize_cq(cq, 4 * kEach) == 0, "resize_cq");
    ibv_recv_wr* bad = nullptr;
    ibv_recv_wr wr{};
    for (wr.wr_id = kEach * i; wr.wr_id < kEach * (i + 1); ++wr.wr_id)
      must(ibv_post_recv(qp, &wr, &bad) == 0, "a receive");
    attr.qp_state = IBV_QPS_ERR;
    must(ibv_modify_qp(qp, &attr, IBV_QP_STATE) == 0, "ERR");
    qps.push_back(qp);
  }
  must(cq->cqe >= static_cast<int>(4 * kEach), "its size");
  must(ibv_resize_cq(cq, 0) == EINVAL && ibv_resize_cq(cq, 4) == EINVAL, "sizes below what waits");
  must(ibv_resize_cq(cq, cq->cqe) == 0, "the same size");
  for (std::uint64_t i = 0; i < 4 * kEach; ++i) {
    ibv_wc wc{};
    must(ibv_poll_cq(cq, 1, &wc) == 1 && wc.wr_id == i, "all of them");
  }
  for (ibv_qp* qp : qps) must(ibv_destroy_qp(qp) == 0, "destroy_qp");
  must(ibv_destroy_cq(cq) == 0, "destroy_cq");
}

/// Destroying waits until taken events are acknowledged.
void acknowledging(ibv_context* context, ibv_pd* pd) {
  ibv_cq* cq = ibv_create_cq(context, 1, nullptr, nullptr, 0);
  ibv_qp* qp = make_qp(pd, cq, IBV_QPT_UD);
  must(qp != nullptr, "a queue pair");
  ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = 1;
  must(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0,
       "INIT");
  ibv_recv_wr* bad = nullptr;
  ibv_recv_wr wr{};
  for (int i = 0; i < 4; ++i) must(ibv_post_recv(qp, &wr, &bad) == 0, "a receive");
  attr.qp_state = IBV_QPS_ERR;
  must(ibv_modify_qp(qp, &attr, IBV_QP_STATE) == 0, "ERR");
  ibv_async_event event{};
  must(ibv_get_async_event(context, &event) == 0 && event.element.cq == cq, "the overrun");
  must(ibv_destroy_qp(qp) == 0, "destroy_qp");
  bool acknowledged = false;  // ordered by the queue's mutex
  std::thread later([&] {
    acknowledged = true;
    ibv_ack_async_event(&event);
  });
  must(ibv_destroy_cq(cq) == 0, "destroy_cq");
  must(acknowledged, "not before its event was acknowledged");
  later.join();
}

}  // namespace

int main() {
  ibv_context* context = open_softverbs();
  ibv_pd* pd = ibv_alloc_pd(context);
  must(pd != nullptr, "alloc_pd");
  questions(context);
  memory(context, pd);
  foreign_descriptors(context);
  device_file();
  others(context, pd);
  queue_pairs(context, pd);
  growing(context, pd);
  acknowledging(context, pd);
  must(ibv_dealloc_pd(pd) == 0 && ibv_close_device(context) == 0, "closing");
  std::puts("done");
  return 0;
}
