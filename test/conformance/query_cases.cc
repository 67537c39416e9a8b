// The device's reports about itself, and their consistency.
#include <sys/stat.h>
#include <unistd.h>

#include "conformance/conformance_ends.h"

namespace conformance::query_cases {

class Queries : public Verbs {};

TEST_F(Queries, DeviceHasWhatAProgramNeeds) {
  EXPECT_GE(device.phys_port_cnt, 1);
  EXPECT_GT(device.max_qp, 1);
  EXPECT_GT(device.max_qp_wr, 0);
  EXPECT_GT(device.max_sge, 0);
  EXPECT_GT(device.max_cq, 1);
  EXPECT_GT(device.max_cqe, 1);
  EXPECT_GT(device.max_mr, 1);
  EXPECT_GT(device.max_pd, 1);
  EXPECT_GT(device.max_ah, 0);
  EXPECT_GE(device.max_qp_rd_atom, 1);
  EXPECT_GE(device.max_qp_init_rd_atom, 1);
  EXPECT_GE(device.max_pkeys, 1);
  EXPECT_GT(device.max_mr_size, 1u << 20);
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  EXPECT_NE(device.page_size_cap & page, 0u) << "the system's pages can be registered";
  if (device.max_srq > 0) {
    EXPECT_GT(device.max_srq_wr, 0);
    EXPECT_GT(device.max_srq_sge, 0);
  }
}

TEST_F(Queries, DeviceIsNamed) {
  EXPECT_NE(std::string(ibv_get_device_name(context->device)), "");
  EXPECT_NE(ibv_get_device_guid(context->device), 0u);
  EXPECT_EQ(ibv_get_device_guid(context->device), device.node_guid);
  EXPECT_GE(context->num_comp_vectors, 1);
}

TEST_F(Queries, VendorIsTold) { EXPECT_NE(device.vendor_id, 0u); }

// Some programs use a device only if they may read and write its file; UCX is one.
TEST_F(Queries, FileMayBeReadAndWritten) {
  const std::string path = std::string("/dev/infiniband/") + context->device->dev_name;
  struct stat file {};
  ASSERT_EQ(::stat(path.c_str(), &file), 0) << path;
  EXPECT_TRUE(S_ISCHR(file.st_mode)) << path;
  EXPECT_EQ(::access(path.c_str(), R_OK | W_OK), 0) << path;
}

// Few providers can share a context with another process. The others must say so.
TEST_F(Queries, ContextIsImportedOrRefused) {
  const int duplicate = ::dup(context->cmd_fd);
  ASSERT_GE(duplicate, 0);
  ibv_context* const imported = ibv_import_device(duplicate);
  if (imported == nullptr) {
    EXPECT_EQ(errno, EOPNOTSUPP);
    ::close(duplicate);
  } else {
    EXPECT_STREQ(ibv_get_device_name(imported->device), ibv_get_device_name(context->device));
    EXPECT_EQ(ibv_close_device(imported), 0);
  }
  errno = 0;
  EXPECT_EQ(ibv_import_device(-1), nullptr);
  EXPECT_NE(errno, 0);
}

TEST_F(Queries, ExtendedAgrees) {
  ibv_device_attr_ex ex{};
  ASSERT_EQ(ibv_query_device_ex(context.get(), nullptr, &ex), 0);
  EXPECT_EQ(ex.orig_attr.max_qp_wr, device.max_qp_wr);
  EXPECT_EQ(ex.orig_attr.max_cqe, device.max_cqe);
  EXPECT_EQ(ex.orig_attr.device_cap_flags, device.device_cap_flags);
}

TEST_F(Queries, PortIsUp) {
  ibv_port_attr port{};
  ASSERT_EQ(ibv_query_port(context.get(), settings.port, &port), 0);
  EXPECT_EQ(port.state, IBV_PORT_ACTIVE);
  EXPECT_GE(port.active_mtu, IBV_MTU_256);
  EXPECT_LE(port.active_mtu, port.max_mtu);
  EXPECT_GE(port.gid_tbl_len, 1);
  EXPECT_GE(port.pkey_tbl_len, 1);
  EXPECT_GE(port.max_msg_sz, 128u << port.active_mtu);
  EXPECT_TRUE(port.link_layer == IBV_LINK_LAYER_INFINIBAND ||
              port.link_layer == IBV_LINK_LAYER_ETHERNET);
}

TEST_F(Queries, OfOtherPortsAreRefused) {
  ibv_port_attr port{};
  EXPECT_NE(ibv_query_port(context.get(), 0, &port), 0);
  EXPECT_NE(
      ibv_query_port(context.get(), static_cast<std::uint8_t>(device.phys_port_cnt + 1), &port), 0);
}

TEST_F(Queries, GidIsThereAndNotZero) {
  ibv_gid gid{};
  ASSERT_EQ(ibv_query_gid(context.get(), settings.port, choose_gid(context.get()), &gid), 0);
  EXPECT_TRUE(std::ranges::any_of(gid.raw, [](std::uint8_t b) { return b != 0; }));
  ibv_port_attr port{};
  ASSERT_EQ(ibv_query_port(context.get(), settings.port, &port), 0);
  EXPECT_NE(ibv_query_gid(context.get(), settings.port, port.gid_tbl_len, &gid), 0);
  EXPECT_NE(ibv_query_gid(context.get(), 200, 0, &gid), 0);
}

TEST_F(Queries, GidTableAgrees) {
  const int index = choose_gid(context.get());
  ibv_gid gid{};
  ASSERT_EQ(ibv_query_gid(context.get(), settings.port, index, &gid), 0);
  ibv_gid_entry entry{};
  ASSERT_EQ(
      ibv_query_gid_ex(context.get(), settings.port, static_cast<std::uint32_t>(index), &entry, 0),
      0);
  EXPECT_EQ(std::memcmp(&entry.gid, &gid, sizeof gid), 0);
  EXPECT_EQ(entry.port_num, settings.port);
  std::vector<ibv_gid_entry> table(512);
  const ssize_t found = ibv_query_gid_table(context.get(), table.data(), table.size(), 0);
  ASSERT_GT(found, 0);
  EXPECT_TRUE(std::any_of(table.begin(), table.begin() + found, [&](const ibv_gid_entry& e) {
    return std::memcmp(&e.gid, &gid, sizeof gid) == 0;
  }));
}

TEST_F(Queries, PartitionKeyIsFound) {
  __be16 pkey = 0;
  ASSERT_EQ(ibv_query_pkey(context.get(), settings.port, 0, &pkey), 0);
  EXPECT_NE(pkey, 0);
  EXPECT_EQ(ibv_get_pkey_index(context.get(), settings.port, pkey), 0);
  EXPECT_LT(ibv_query_pkey(context.get(), settings.port, 60000, &pkey), 0);
}

TEST_F(Queries, RegionsTellWhatTheyCover) {
  const Memory one_region(pd.get(), 5000), other(pd.get(), 100);
  EXPECT_EQ(one_region.mr()->length, 5000u);
  EXPECT_EQ(reinterpret_cast<std::uint64_t>(one_region.mr()->addr), one_region.address());
  EXPECT_EQ(one_region.mr()->pd, pd.get());
  EXPECT_EQ(one_region.mr()->context, context.get());
  EXPECT_NE(one_region.mr()->lkey, other.mr()->lkey);
  EXPECT_NE(one_region.mr()->rkey, other.mr()->rkey);
}

TEST_F(Queries, QueuePairsAreNumberedApart) {
  const End first = end(), second = end();
  EXPECT_NE(first.qp->qp_num, second.qp->qp_num);
  EXPECT_GT(first.qp->qp_num, 1u) << "0 and 1 are the management queue pairs";
  EXPECT_LT(first.qp->qp_num, 1u << 24);
}

}  // namespace conformance::query_cases
