// Private data of applications through rdma_cm, with a key and without.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "control/key_files.h"
#include "engine/rdma_cm_ends.h"

namespace rdma_cm_private_data_test {
namespace {

using namespace engine_test;  // the names of a test namespace
using key_files::KeyFile;
using key_files::line;
using spinwire::PeerRequest;
using spinwire::Via;
using Bytes = std::vector<std::byte>;

Bytes bytes_of(std::size_t size, unsigned char first) {
  Bytes bytes(size);
  for (std::byte& byte : bytes) byte = std::byte{first++};
  return bytes;
}
Bytes copy(std::span<const std::byte> bytes) { return {bytes.begin(), bytes.end()}; }

class RdmaCmPrivateData : public ThroughRdmaCm, public testing::WithParamInterface<bool> {
 protected:
  [[nodiscard]] Config config() const {
    Config c = small_config();
    c.security.open = !GetParam();
    if (GetParam()) c.security.key_file = file_.path();
    return c;
  }
  /// Listens with these bytes for clients, and notes what they give.
  void listen_with(Node& server, const Bytes& theirs, bool accepts) {
    ListenOptions options;
    options.handlers = server.handlers();
    options.via = Via::rdma_cm;
    theirs_ = theirs;
    options.on_connect_request = [this, accepts](PeerRequest& r) {
      asked_.push_back(copy(r.peer().private_data));
      if (accepts)
        EXPECT_EQ(r.accept(theirs_), Status::ok);
      else
        r.refuse(4711, "not you");
    };
    auto made = server.engine.listen(std::string(address_) + ":0", options);
    ASSERT_TRUE(made) << made.error().message();
    server.listener = std::move(*made);
  }
  static Connection connect_with(Node& client, Node& server, const Bytes& ours) {
    ConnectOptions options;
    options.handlers = client.handlers();
    options.via = Via::rdma_cm;
    options.private_data = ours;
    auto made = client.engine.connect(server.listener.address(), options);
    EXPECT_TRUE(made) << made.error().message();
    return made ? *made : Connection();
  }
  const KeyFile file_{line("2026", 'a')};
  Bytes theirs_;
  std::vector<Bytes> asked_;
};

TEST_P(RdmaCmPrivateData, GoesBothWays) {
  struct Sizes {
    std::size_t ours, theirs;
  };
  for (const Sizes sizes : {Sizes{6, 118}, Sizes{57, 119}, Sizes{0, 256}, Sizes{256, 256}}) {
    SCOPED_TRACE(testing::Message() << sizes.ours << " and " << sizes.theirs << " bytes");
    Node server(config()), client(config());
    asked_.clear();
    const Bytes ours = bytes_of(sizes.ours, 1), theirs = bytes_of(sizes.theirs, 99);
    listen_with(server, theirs, true);
    const Connection c = connect_with(client, server, ours);
    ASSERT_TRUE(until({&client, &server}, [&] {
      return (c.ready() && server.ready.size() == 1) || !client.closed.empty();
    }));
    ASSERT_TRUE(c.ready()) << (client.closed.empty() ? "" : client.closed[0].message());
    EXPECT_EQ(asked_, std::vector<Bytes>{ours});
    EXPECT_EQ(copy(server.ready[0].peer_private_data()), ours);
    EXPECT_EQ(copy(c.peer_private_data()), theirs);
    EXPECT_EQ(server.engine.stats().handshakes_refused, 0u);
    finish(client, server);
  }
}

TEST_P(RdmaCmPrivateData, ARefusalSeesItAndHasItsCodeAndReason) {
  Node server(config()), client(config());
  const Bytes ours = bytes_of(256, 1);
  listen_with(server, {}, false);
  (void)connect_with(client, server, ours);
  ASSERT_TRUE(until({&client, &server}, [&] { return !client.closed.empty(); }));
  EXPECT_EQ(client.closed[0].status, Status::refused) << client.closed[0].message();
  EXPECT_EQ(client.closed[0].code, 4711u);
  EXPECT_EQ(client.closed[0].found, "not you");
  EXPECT_EQ(asked_, std::vector<Bytes>{ours});
  EXPECT_EQ(server.accepts, 0u);
}

TEST_P(RdmaCmPrivateData, ClosedWhileItIsBeingMade) {
  Node server(config()), client(config());
  const Bytes data = bytes_of(200, 1);
  listen_with(server, data, true);
  for (int polls = 0; polls < 120; polls += 8) {
    Connection c = connect_with(client, server, data);
    for (int i = 0; i < polls; ++i) (void)(client.poll() + server.poll());
    EXPECT_EQ(c.close(), Status::ok);
    ASSERT_TRUE(until({&client, &server}, [&] {
      return client.engine.stats().connections == 0 && server.engine.stats().connections == 0;
    })) << polls;
  }
  client.ready.clear();
  server.stale_allowed = client.stale_allowed = true;
  finish(client, server);
}

INSTANTIATE_TEST_SUITE_P(Keys, RdmaCmPrivateData, testing::Bool(),
                         [](const auto& key) { return key.param ? "One" : "None"; });

}  // namespace
}  // namespace rdma_cm_private_data_test
