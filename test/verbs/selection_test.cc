// The choice of device and port, and the reasons for the others, with fake devices.
#include "verbs/selection.h"

#include <arpa/inet.h>
#include <endian.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "verbs/opened_device.h"
#include "verbs/providers.h"

namespace selection_test {

using spinwire::Clock;
using spinwire::DeviceCandidate;
using spinwire::Error;
using spinwire::GidType;
using spinwire::Status;
using spinwire::verbs::check_limits;
using spinwire::verbs::DeviceOptions;
using spinwire::verbs::DeviceWish;
using spinwire::verbs::GidEntry;
using spinwire::verbs::Provider;
using spinwire::verbs::select_device;
using spinwire::verbs::Selection;
using spinwire::verbs::survey_devices;

ibv_gid mapped(const std::string& address) {
  ibv_gid gid{};
  gid.raw[10] = gid.raw[11] = 0xff;
  EXPECT_EQ(::inet_pton(AF_INET, address.c_str(), gid.raw + 12), 1);
  return gid;
}

struct Port {
  ibv_port_state state = IBV_PORT_ACTIVE;
  std::uint8_t phys_state = 5;
  std::uint8_t layer = IBV_LINK_LAYER_ETHERNET;
  std::vector<GidEntry> gids;
};

struct FakeDevice {
  std::vector<Port> ports;
  bool may_open = true;
  bool iwarp = false;
};

/// The host's devices, and a count of those open.
struct Host {
  std::map<std::string, FakeDevice> devices;
  int open = 0;

  static Host* current;
  Host() { current = this; }
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;
  ~Host() {
    EXPECT_EQ(open, 0) << "every device that was opened is closed";
    current = nullptr;
  }
};
Host* Host::current = nullptr;

struct Context {
  ibv_context verbs{};
  ibv_device device{};
  const FakeDevice* fake = nullptr;
};

const FakeDevice& fake(ibv_context* context) { return *reinterpret_cast<Context*>(context)->fake; }

Provider make_provider() {
  Provider p{};
  p.name = "fake";
  p.reaches_other_hosts = true;
  p.device_names = [] {
    std::vector<std::string> names;
    for (const auto& [name, device] : Host::current->devices) names.push_back(name);
    return names;
  };
  p.open_device = [](const std::string& name, const Clock&) -> spinwire::Result<ibv_context*> {
    const FakeDevice& device = Host::current->devices.at(name);
    if (!device.may_open)
      return tl::unexpected(Error{Status::no_device, "open", "EACCES", "give the right"});
    auto* context = new Context;
    context->fake = &device;
    context->device.transport_type = device.iwarp ? IBV_TRANSPORT_IWARP : IBV_TRANSPORT_IB;
    context->verbs.device = &context->device;
    ++Host::current->open;
    return &context->verbs;
  };
  p.close_device = [](ibv_context* context) {
    --Host::current->open;
    delete reinterpret_cast<Context*>(context);
    return 0;
  };
  p.query_device = [](ibv_context* context, ibv_device_attr* attr) {
    attr->phys_port_cnt = static_cast<std::uint8_t>(fake(context).ports.size());
    attr->node_guid = htobe64(0x0002c903001d05f0);
    return 0;
  };
  p.query_port = [](ibv_context* context, std::uint8_t port, ibv_port_attr* attr) {
    if (port == 0 || port > fake(context).ports.size()) return EINVAL;
    const Port& found = fake(context).ports[port - 1u];
    attr->state = found.state;
    attr->phys_state = found.phys_state;
    attr->link_layer = found.layer;
    attr->gid_tbl_len = 16;
    return 0;
  };
  p.gid_table = [](ibv_context* context, std::uint8_t port, int slots) {
    EXPECT_EQ(slots, 16);
    return fake(context).ports[port - 1u].gids;
  };
  return p;
}

const Provider* const kFake[] = {[] {
  static const Provider provider = make_provider();
  return &provider;
}()};

Port roce(const std::string& address) {
  Port port;
  port.gids = {{0, mapped(address), GidType::roce_v1, "eth0"},
               {1, mapped(address), GidType::roce_v2, "eth0"}};
  return port;
}

Port in_state(ibv_port_state state, std::uint8_t phys_state) {
  Port port = roce("10.0.0.9");
  port.state = state;
  port.phys_state = phys_state;
  return port;
}

/// Closes what it holds.
struct Opened {
  explicit Opened(const DeviceWish& wish) : result(select_device(kFake, wish, Clock::real())) {}
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;
  ~Opened() {
    if (result) (void)result->provider->close_device(result->context);
  }
  [[nodiscard]] std::string place() const {
    if (!result) return "none";
    return result->name + "/" + std::to_string(result->port) + "/" +
           std::to_string(result->gid.index);
  }
  spinwire::Result<Selection> result;
};

DeviceWish wish(const std::string& name, std::uint8_t port = 0, int gid = -1) {
  DeviceWish result;
  result.name = name;
  result.port = port;
  result.gid.index = gid;
  return result;
}

/// The reason given for a device and port.
std::string reason(const std::vector<DeviceCandidate>& candidates, const std::string& device,
                   int port, int gid) {
  for (const DeviceCandidate& c : candidates) {
    if (c.device == device && c.port == port && c.gid_index == gid) return c.reason;
  }
  return "not told of";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Selection, TakesTheNamedDeviceAndTellsOfTheOthers) {
  Host host;
  host.devices["mlx5_0"].ports = {roce("10.0.0.1")};
  host.devices["mlx5_1"].ports = {roce("10.0.0.2")};
  const Opened opened(wish("mlx5_1"));
  EXPECT_EQ(opened.place(), "mlx5_1/1/1");
  const auto& told = opened.result->candidates;
  ASSERT_EQ(told.size(), 2u);
  EXPECT_TRUE(contains(reason(told, "mlx5_1", 1, 0), "RoCEv1"));
  EXPECT_FALSE(told[0].chosen);
  EXPECT_TRUE(told[1].chosen);
  EXPECT_EQ(told[1].guid.text(), "0002:c903:001d:05f0");
  EXPECT_EQ(told[1].gid.text(), "10.0.0.2");
  EXPECT_EQ(told[1].text(),
            "fake:mlx5_1 port 1 GID 1 (RoCEv2, 10.0.0.2, eth0): chosen: RoCEv2 and routable");
}

TEST(Selection, AutoTakesTheDeviceOfTheAddress) {
  Host host;
  host.devices["mlx5_0"].ports = {roce("10.0.0.1")};
  host.devices["mlx5_1"].ports = {in_state(IBV_PORT_DOWN, 3), roce("10.0.0.2")};
  EXPECT_EQ(Opened(wish("auto")).place(), "mlx5_0/1/1");
  DeviceWish by_address = wish("auto");
  by_address.gid.address = spinwire::verbs::parse_host_address("10.0.0.2");
  EXPECT_EQ(Opened(by_address).place(), "mlx5_1/2/1");
  EXPECT_EQ(Opened(wish("fake:auto")).place(), "mlx5_0/1/1");
  EXPECT_EQ(Opened(wish("fake:mlx5_1")).place(), "mlx5_1/2/1");
  EXPECT_EQ(Opened(wish("other:mlx5_1")).place(), "none");
}

TEST(Selection, AutoPassesOverWhatCannotBeUsed) {
  Host host;
  host.devices["a_closed"].may_open = false;
  host.devices["b_iwarp"].iwarp = true;
  host.devices["b_iwarp"].ports = {roce("10.0.0.1")};
  host.devices["c_down"].ports = {in_state(IBV_PORT_DOWN, 2)};
  host.devices["d_nameless"].ports = {Port{}};
  host.devices["e_good"].ports = {roce("10.0.0.5")};
  const Opened opened(wish("auto"));
  EXPECT_EQ(opened.place(), "e_good/1/1");
  const auto& told = opened.result->candidates;
  EXPECT_TRUE(contains(reason(told, "a_closed", 0, -1), "EACCES"));
  EXPECT_TRUE(contains(reason(told, "b_iwarp", 0, -1), "iWARP"));
  EXPECT_TRUE(contains(reason(told, "c_down", 1, -1), "link is down"));
  EXPECT_TRUE(contains(reason(told, "d_nameless", 1, -1), "give its interface an address"));
}

TEST(Selection, AnUnknownNameIsAnsweredWithThoseThereAre) {
  Host host;
  host.devices["mlx5_0"].ports = {roce("10.0.0.1")};
  host.devices["mlx5_1"].ports = {roce("10.0.0.2")};
  const Opened opened(wish("mlx5_2"));
  ASSERT_FALSE(opened.result);
  EXPECT_EQ(opened.result.error().status, Status::no_device);
  EXPECT_EQ(opened.result.error().found, "fake has mlx5_0, mlx5_1");
}

TEST(Selection, SaysWhyANamedPortCannotBeUsed) {
  const struct {
    ibv_port_state state;
    std::uint8_t phys;
    const char* says;
  } cases[] = {
      {IBV_PORT_DOWN, 3, "disabled: set its interface up"},
      {IBV_PORT_DOWN, 2, "look at the cable"},
      {IBV_PORT_INIT, 5, "start opensm"},
      {IBV_PORT_ARMED, 5, "subnet manager has yet to activate"},
      {IBV_PORT_NOP, 0, "state 0"},
  };
  for (const auto& c : cases) {
    Host host;
    host.devices["mlx5_0"].ports = {in_state(c.state, c.phys)};
    const Opened opened(wish("mlx5_0", 1));
    ASSERT_FALSE(opened.result) << c.says;
    EXPECT_TRUE(contains(opened.result.error().found, c.says)) << opened.result.error().found;
  }
  Host host;
  host.devices["mlx5_0"].ports = {roce("10.0.0.1")};
  const Opened opened(wish("mlx5_0", 3));
  ASSERT_FALSE(opened.result);
  EXPECT_TRUE(contains(opened.result.error().found, "it has 1 port")) << "port 3 was asked for";
}

TEST(Selection, AnIndexThatIsNotThereIsRefused) {
  Host host;
  host.devices["mlx5_0"].ports = {roce("10.0.0.1")};
  EXPECT_EQ(Opened(wish("mlx5_0", 0, 0)).place(), "mlx5_0/1/0");
  const Opened empty(wish("mlx5_0", 0, 7));
  ASSERT_FALSE(empty.result);
  EXPECT_TRUE(contains(empty.result.error().found, "nothing at GID index 7"));
  const Opened beyond(wish("mlx5_0", 0, 16));
  ASSERT_FALSE(beyond.result);
  EXPECT_TRUE(contains(beyond.result.error().found, "its table ends at 15"));
}

TEST(Selection, TheSurveyShowsAllAndOpensNone) {
  Host host;
  host.devices["mlx5_0"].ports = {roce("10.0.0.1")};
  host.devices["mlx5_1"].ports = {roce("10.0.0.2")};
  const auto all = survey_devices(kFake, wish("mlx5_1"), Clock::real());
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(std::count_if(all.begin(), all.end(), [](const auto& c) { return c.chosen; }), 1);
  EXPECT_TRUE(contains(reason(all, "mlx5_0", 1, 1), "device mlx5_1 was asked for"));
  EXPECT_EQ(survey_devices(kFake, wish("no"), Clock::real()).size(), 4u);
}

TEST(Selection, TheEmbeddedDeviceIsTakenByNameOnly) {
  const auto& all = spinwire::verbs::providers();
  const Provider* const embedded[] = {all[0]};
  EXPECT_FALSE(select_device(embedded, wish("auto"), Clock::real()));
  for (const char* name : {"softverbs", "softverbs:softverbs", "softverbs:auto"}) {
    auto opened = select_device(embedded, wish(name), Clock::real());
    ASSERT_TRUE(opened) << opened.error().message();
    EXPECT_EQ(opened->gid.type, GidType::embedded);
    EXPECT_EQ(opened->port, 1);
    (void)opened->provider->close_device(opened->context);
  }
}

ibv_device_attr limits() {
  ibv_device_attr attr{};
  attr.max_cqe = 1000;
  attr.max_srq = 1;
  attr.max_srq_wr = 500;
  attr.max_qp_wr = 100;
  attr.max_sge = 2;
  return attr;
}

TEST(DeviceLimits, NamesTheSettingWhatWasAskedAndWhatThereIs) {
  DeviceOptions asked;
  asked.completion_depth = 1000;
  asked.receive_depth = 500;
  asked.send_depth = 100;
  EXPECT_TRUE(check_limits(limits(), asked, "mlx5_0"));
  const struct {
    std::uint32_t DeviceOptions::*member;
    const char* says;
  } cases[] = {
      {&DeviceOptions::completion_depth, "queues.completion_depth = 1001"},
      {&DeviceOptions::receive_depth, "queues.receive_depth = 501"},
      {&DeviceOptions::send_depth, "queues.send_depth = 101"},
  };
  for (const auto& c : cases) {
    DeviceOptions more = asked;
    more.*c.member += 1;
    const auto refused = check_limits(limits(), more, "mlx5_0");
    ASSERT_FALSE(refused) << c.says;
    EXPECT_EQ(refused.error().status, Status::limit);
    EXPECT_EQ(refused.error().asked, c.says);
    EXPECT_EQ(refused.error().found, "device mlx5_0 has " + std::to_string(more.*c.member - 1));
  }
  ibv_device_attr unshared = limits();
  unshared.max_srq = unshared.max_srq_wr = 0;  // works without
  EXPECT_TRUE(check_limits(unshared, asked, "mlx5_0"));
  DeviceOptions own = asked;
  own.shared_receives = false;
  own.receive_depth = 501;  // in many queues
  EXPECT_TRUE(check_limits(limits(), own, "mlx5_0"));
  ibv_device_attr narrow = limits();
  narrow.max_sge = 1;
  EXPECT_FALSE(check_limits(narrow, asked, "mlx5_0"));
}

}  // namespace selection_test
