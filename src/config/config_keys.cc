#include "config/config_keys.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <type_traits>
#include <vector>

#include "base/units.h"

namespace spinwire::config {
namespace {

using std::string_view;

constexpr std::array<string_view, 3> kPolicies{"require", "prefer", "off"};
constexpr std::array<string_view, 2> kAutomaticOrOff{"automatic", "off"};
constexpr std::array<string_view, 2> kControlModes{"automatic", "manual"};
constexpr std::array<string_view, 3> kTransports{"automatic", "datagram", "connection"};
constexpr std::array<string_view, 2> kBooleans{"false", "true"};
// In Access order.
constexpr std::array<string_view, 8> kAccess{
    "local",         "remote_read",        "remote_write",        "remote_read_write",
    "remote_atomic", "remote_read_atomic", "remote_write_atomic", "remote_all"};

constexpr std::int64_t kKiB = 1 << 10;
constexpr std::int64_t kMiB = 1 << 20;
constexpr std::int64_t kGiB = 1 << 30;
constexpr std::int64_t kTiB = std::int64_t{1} << 40;
constexpr std::int64_t kMicrosecond = 1'000;
constexpr std::int64_t kMillisecond = 1'000'000;
constexpr std::int64_t kSecond = 1'000'000'000;
constexpr std::int64_t kHour = 3600 * kSecond;

/// A member of a section, seen as a number.
template <auto Section, auto Member>
std::int64_t get_number(const Config& config) {
  const auto& value = config.*Section.*Member;
  using Value = std::remove_cvref_t<decltype(value)>;
  if constexpr (std::is_same_v<Value, Nanoseconds>) {
    return value.count();
  } else if constexpr (std::is_same_v<Value, std::uint64_t>) {
    // Code may set a value that no file can express; that value is out of range in any case.
    return static_cast<std::int64_t>(std::min<std::uint64_t>(value, INT64_MAX));
  } else {
    return static_cast<std::int64_t>(value);
  }
}

/// `value` must be in the key's range; every range fits its member.
template <auto Section, auto Member>
void set_number(Config& config, std::int64_t value) {
  auto& member = config.*Section.*Member;
  member = static_cast<std::remove_cvref_t<decltype(member)>>(value);
}

/// The row of a setting that is held as a number.
template <auto Section, auto Member>
constexpr ConfigKey with_access(ConfigKey key) {
  key.get = &get_number<Section, Member>;
  key.set = &set_number<Section, Member>;
  return key;
}

// Shorthands for the table, so that each row names its section and its member once.
#define SPINWIRE_NUMBER(section, Type, name, kind, least, most, unit, help) \
  with_access<&Config::section, &Config::Type::name>(                       \
      {#section, #name, ValueKind::kind, least, most, unit, help})
#define SPINWIRE_CHOICE(section, Type, name, choices, help) \
  with_access<&Config::section, &Config::Type::name>(       \
      {#section, #name, ValueKind::choice, 0, std::ssize(choices) - 1, "", help, choices})

#define SPINWIRE_BOOLEAN(section, Type, name, help)   \
  with_access<&Config::section, &Config::Type::name>( \
      {#section, #name, ValueKind::boolean, 0, 1, "", help, kBooleans})

// clang-format off
constexpr std::array kKeys{
    ConfigKey{"device", "name", ValueKind::text, 1, 63, "bytes",
              "device to open, e.g. \"softverbs\", \"mlx5_0\", \"rxe0\", or \"auto\"", {}, nullptr, nullptr,
              [](Config& config) -> std::string& { return config.device.name; }},
    SPINWIRE_NUMBER(device, Device, port, integer, 0, 255, "",
                    "port of the device; 0: the library chooses"),
    SPINWIRE_NUMBER(device, Device, gid_index, integer, -1, 255, "",
                    "index in the port's GID table; -1: the library chooses"),
    ConfigKey{"device", "address", ValueKind::text, 0, 63, "bytes",
              "IP address of this host that selects the GID; empty: any", {}, nullptr,
              nullptr, [](Config& config) -> std::string& { return config.device.address; }},

    SPINWIRE_CHOICE(memory, Memory, hugepages, kPolicies, "place the pools in hugepages"),
    SPINWIRE_CHOICE(memory, Memory, lock, kPolicies, "lock the pools in memory"),
    SPINWIRE_NUMBER(memory, Memory, send_bytes, bytes, 2 * kMiB, kTiB, "", "send pool"),
    SPINWIRE_NUMBER(memory, Memory, receive_bytes, bytes, 2 * kMiB, kTiB, "", "receive pool"),
    SPINWIRE_NUMBER(memory, Memory, lease_bytes, bytes, 2 * kMiB, kTiB, "",
                    "pool of memory exposed to peers"),
    SPINWIRE_NUMBER(memory, Memory, rendezvous_bytes, bytes, 0, kTiB, "",
                    "pool that receives messages above eager_bytes"),
    SPINWIRE_NUMBER(memory, Memory, windows, integer, 0, 65536, "",
                    "memory windows: for leases, and rendezvous messages without direct_messages"),

    SPINWIRE_NUMBER(queues, Queues, send_depth, integer, 16, 32768, "work requests",
                    "send queue of each connection"),
    SPINWIRE_NUMBER(queues, Queues, receive_depth, integer, 16, 32768, "work requests",
                    "posted receives of the engine"),
    SPINWIRE_CHOICE(queues, Queues, shared_receive_queue, kAutomaticOrOff,
                    "off: each connection has a part of the receives"),
    SPINWIRE_NUMBER(queues, Queues, completion_depth, integer, 64, 4194304, "entries",
                    "completion queue of the engine"),
    SPINWIRE_NUMBER(queues, Queues, operations, integer, 16, 1048576, "",
                    "operations in flight, all connections together"),
    SPINWIRE_NUMBER(queues, Queues, inline_bytes, bytes, 0, kKiB, "",
                    "payloads up to this length go inline"),
    SPINWIRE_NUMBER(queues, Queues, max_send_sge, integer, 1, 64, "",
                    "parts of a gathered send or write, if the device has one element more"),
    SPINWIRE_NUMBER(queues, Queues, receive_postlist, integer, 1, 64, "work requests",
                    "receives reposted at once"),
    SPINWIRE_NUMBER(queues, Queues, poll_batch, integer, 1, 64, "entries",
                    "completions drained at once"),

    SPINWIRE_NUMBER(connections, Connections, maximum, integer, 1, 65536, "",
                    "connections of the engine"),
    SPINWIRE_NUMBER(connections, Connections, maximum_per_source, integer, 0, 65536, "",
                    "accepted connections of one peer host or process; 0: three quarters of maximum, fewer "
                    "beside others"),
    SPINWIRE_NUMBER(connections, Connections, own_domains, integer, 0, 65536, "",
                    "connections with a protection domain of their own, at once"),
    SPINWIRE_NUMBER(connections, Connections, handshakes, integer, 1, 4096, "",
                    "unfinished handshakes at once, inbound and outbound each"),
    SPINWIRE_NUMBER(connections, Connections, eager_bytes, bytes, 256, kMiB - 64, "",
                    "the receiver READs longer messages (rendezvous)"),
    SPINWIRE_NUMBER(connections, Connections, max_message_bytes, bytes, 256, kGiB, "",
                    "longest message"),
    SPINWIRE_NUMBER(connections, Connections, rendezvous_timeout, duration, kMillisecond, kHour, "",
                    "how long a rendezvous message waits for a block; alike at both ends"),
    SPINWIRE_CHOICE(connections, Connections, direct_messages, kAutomaticOrOff,
                    "send short messages without work requests if the device can"),
    SPINWIRE_NUMBER(connections, Connections, credits, integer, 1, 32768, "receives",
                    "most receives reserved for one peer"),
    SPINWIRE_NUMBER(connections, Connections, mtu, integer, 256, 4096, "bytes",
                    "path MTU, a power of two"),
    SPINWIRE_NUMBER(connections, Connections, connect_timeout, duration, kMillisecond, kHour, "",
                    "an outbound connection must be ready within this time"),
    SPINWIRE_NUMBER(connections, Connections, handshake_timeout, duration, kMillisecond, kHour, "",
                    "an inbound handshake must complete within this time"),
    SPINWIRE_NUMBER(connections, Connections, close_timeout, duration, kMillisecond, kHour, "",
                    "a closing connection waits this long for its completions"),
    SPINWIRE_NUMBER(connections, Connections, keepalive_interval, duration, kMillisecond, kHour, "",
                    "each end shows the other that it polls, this often at least"),
    SPINWIRE_NUMBER(connections, Connections, peer_timeout, duration, 25 * kMillisecond, kHour, "",
                    "a peer that is silent, or holds something up, for this long is lost"),
    SPINWIRE_NUMBER(connections, Connections, credit_idle_timeout, duration, kMillisecond, kHour, "",
                    "credit unused for this long returns to the engine"),

    SPINWIRE_NUMBER(leases, Leases, count, integer, 0, 65536, "",
                    "leases of each connection at once, each way"),
    SPINWIRE_NUMBER(leases, Leases, max_bytes, bytes, 0, kGiB, "",
                    "longest lease that a peer may request"),
    SPINWIRE_NUMBER(leases, Leases, total_bytes, bytes, 0, kTiB, "",
                    "all leases that a peer requested, together"),
    SPINWIRE_NUMBER(leases, Leases, max_alignment, bytes, 1, 2 * kMiB, "",
                    "largest alignment that a peer may request, a power of two"),
    SPINWIRE_NUMBER(leases, Leases, max_duration, duration, kMillisecond, kHour, "",
                    "longest duration of a lease"),
    SPINWIRE_NUMBER(leases, Leases, maximum, integer, 0, 32768, "",
                    "leases of the engine at once, each way"),
    SPINWIRE_NUMBER(leases, Leases, guard, duration, kMicrosecond, kSecond, "",
                    "no operation on a lease starts within this time of its end"),

    SPINWIRE_NUMBER(queue_pair, QueuePair, ack_timeout, integer, 1, 31, "",
                    "time until a retry: 4.096 us * 2^n"),
    SPINWIRE_NUMBER(queue_pair, QueuePair, retry_count, integer, 0, 7, "",
                    "retries until the peer is lost"),
    SPINWIRE_NUMBER(queue_pair, QueuePair, rnr_retry, integer, 0, 7, "",
                    "retries when the peer has no receive posted; 7: without end"),
    SPINWIRE_NUMBER(queue_pair, QueuePair, min_rnr_timer, integer, 1, 31, "",
                    "time between RNR retries, in the InfiniBand encoding; 12: 0.64 ms"),
    SPINWIRE_NUMBER(queue_pair, QueuePair, initiator_depth, integer, 1, 128, "",
                    "our READs and atomics outstanding at once, limited by device and peer"),
    SPINWIRE_NUMBER(queue_pair, QueuePair, responder_depth, integer, 1, 128, "",
                    "the peer's READs and atomics outstanding at once, limited by the device"),
    SPINWIRE_NUMBER(queue_pair, QueuePair, service_level, integer, 0, 15, "",
                    "InfiniBand service level"),
    SPINWIRE_NUMBER(queue_pair, QueuePair, traffic_class, integer, 0, 255, "",
                    "of the global header; on RoCEv2 DSCP and ECN"),
    SPINWIRE_NUMBER(queue_pair, QueuePair, flow_label, integer, 0, 0xfffff, "",
                    "of the global header; on RoCEv2 it picks the UDP source port"),
    SPINWIRE_NUMBER(queue_pair, QueuePair, hop_limit, integer, 1, 255, "",
                    "of the global header; the TTL on RoCEv2"),
    SPINWIRE_NUMBER(queue_pair, QueuePair, pkey_index, integer, 0, 65535, "",
                    "index in the port's table of partition keys"),
    SPINWIRE_NUMBER(queue_pair, QueuePair, src_path_bits, integer, 0, 127, "",
                    "added to the port's LID; InfiniBand only"),
    SPINWIRE_NUMBER(queue_pair, QueuePair, static_rate, integer, 0, 24, "",
                    "rate in the InfiniBand encoding; 0: the port's rate"),
    SPINWIRE_NUMBER(queue_pair, QueuePair, psn, integer, -1, 0xffffff, "",
                    "number of the first packet; -1: random"),
    SPINWIRE_CHOICE(queue_pair, QueuePair, access, kAccess,
                    "most rights that a key may give a peer"),

    SPINWIRE_CHOICE(rpc, Rpc, transport, kTransports,
                    "how calls travel; automatic: by datagram if the devices can, else by connection"),
    SPINWIRE_CHOICE(rpc, Rpc, direct_datagrams, kAutomaticOrOff,
                    "send datagrams without work requests if the device can"),
    SPINWIRE_NUMBER(rpc, Rpc, sessions, integer, 1, 1048575, "",
                    "sessions of the engine, opened and served each"),
    SPINWIRE_NUMBER(rpc, Rpc, sessions_per_source, integer, 0, 1048575, "",
                    "served sessions of one client host or process; 0: three quarters of sessions, fewer "
                    "beside others"),
    SPINWIRE_NUMBER(rpc, Rpc, window, integer, 1, 64, "",
                    "calls of a session at once, a power of two"),
    SPINWIRE_NUMBER(rpc, Rpc, backlog, integer, 1, 4096, "",
                    "further calls that wait, per session"),
    SPINWIRE_NUMBER(rpc, Rpc, send_depth, integer, 64, 32768, "",
                    "datagrams being sent by work requests, a power of two"),
    SPINWIRE_NUMBER(rpc, Rpc, receive_depth, integer, 64, 32768, "",
                    "posted receives for datagrams"),
    SPINWIRE_NUMBER(rpc, Rpc, min_rto, duration, 10 * kMicrosecond, 10 * kSecond, "",
                    "shortest retransmission time-out of a request"),
    SPINWIRE_NUMBER(rpc, Rpc, call_timeout, duration, kMicrosecond, kHour, "",
                    "time-out of a call that names none"),
    SPINWIRE_NUMBER(rpc, Rpc, target_rtt, duration, 0, kSecond, "",
                    "target round trip of congestion control; 0 disables it"),

    ConfigKey{"security", "key_file", ValueKind::text, 0, 4095, "bytes",
              "file with the keys that peers must prove; empty: no key, loopback addresses only", {}, nullptr,
              nullptr, [](Config& config) -> std::string& { return config.security.key_file; }},
    SPINWIRE_BOOLEAN(security, Security, open,
                     "true: without a key, every host may connect"),

    SPINWIRE_CHOICE(engine, Engine, control, kControlModes,
                    "manual: poll() takes no control step"),
    SPINWIRE_NUMBER(engine, Engine, control_interval, duration, kMicrosecond, kSecond, "",
                    "time between control steps"),

    ConfigKey{"observability", "directory", ValueKind::text, 0, 4095, "bytes",
              "folder in memory for the file that spinwire-stat reads; empty: no file", {}, nullptr, nullptr,
              [](Config& config) -> std::string& { return config.observability.directory; }},
    SPINWIRE_NUMBER(observability, Observability, rows, integer, 0, 65536, "",
                    "connections, sessions and served sessions in that file, each; a quarter is for those in trouble"),
    SPINWIRE_NUMBER(observability, Observability, sample, integer, 0, 1'000'000'000, "",
                    "of so many operations and calls, one has its latency measured; 0: none"),
    SPINWIRE_NUMBER(observability, Observability, longest_poll, duration, 0, kHour, "",
                    "longer polls are recorded there; 0: none"),
    SPINWIRE_NUMBER(observability, Observability, longest_callback, duration, 0, kHour, "",
                    "longer callbacks are recorded there; 0: none"),
    SPINWIRE_NUMBER(observability, Observability, longest_pause, duration, 0, kHour, "",
                    "longer times without a poll are recorded there; 0: none"),
};
// clang-format on

#undef SPINWIRE_NUMBER
#undef SPINWIRE_CHOICE
#undef SPINWIRE_BOOLEAN

std::string upper(string_view text) {
  std::string result(text);
  for (char& c : result) {
    if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
  }
  return result;
}

std::string quote(string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      result += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    } else {
      result += c;
    }
  }
  return result + '"';
}

/// The present value of a text. No accessor changes the config.
const std::string& text_of(const ConfigKey& key, const Config& config) {
  return key.text(const_cast<Config&>(config));
}

}  // namespace

std::span<const ConfigKey> config_keys() noexcept { return kKeys; }

const ConfigKey* find_config_key(string_view section, string_view name) noexcept {
  const auto* key = std::find_if(kKeys.begin(), kKeys.end(), [&](const ConfigKey& k) {
    return k.section == section && k.name == name;
  });
  return key == kKeys.end() ? nullptr : key;
}

bool is_config_section(string_view section) noexcept {
  return std::any_of(kKeys.begin(), kKeys.end(),
                     [&](const ConfigKey& key) { return key.section == section; });
}

std::string full_name(const ConfigKey& key) { return fmt::format("{}.{}", key.section, key.name); }

std::string environment_name(const ConfigKey& key) {
  return fmt::format("SPINWIRE_{}_{}", upper(key.section), upper(key.name));
}

std::string range_text(const ConfigKey& key) {
  if (key.kind == ValueKind::boolean) return "false or true";
  if (key.kind == ValueKind::choice) {
    std::string list;
    for (std::size_t i = 0; i < key.choices.size(); ++i) {
      if (i != 0) list += i + 1 == key.choices.size() ? " or " : ", ";
      list += quote(key.choices[i]);
    }
    return list;
  }
  std::string range =
      fmt::format("{} .. {}", value_text(key, key.least), value_text(key, key.most));
  if (!key.unit.empty()) range += fmt::format(" {}", key.unit);
  return range;
}

std::string remedy_text(const ConfigKey& key) {
  const std::string range = range_text(key);
  switch (key.kind) {
    case ValueKind::text:
      return fmt::format("give a text of {}", range);
    case ValueKind::integer:
      return fmt::format("give a whole number in {}", range);
    case ValueKind::bytes:
      return fmt::format("give a number of bytes, or a text such as \"4KiB\", in {}", range);
    case ValueKind::duration:
      return fmt::format("give a text with a unit, such as \"100us\", in {}", range);
    case ValueKind::choice:
    case ValueKind::boolean:
      break;
  }
  return fmt::format("give {}", range);
}

std::string value_text(const ConfigKey& key, std::int64_t value) {
  switch (key.kind) {
    case ValueKind::bytes:
      return value < 0 ? fmt::format("{}", value)
                       : base::bytes_text(static_cast<std::uint64_t>(value));
    case ValueKind::duration:
      return base::duration_text(Nanoseconds(value));
    case ValueKind::choice:
    case ValueKind::boolean:
      if (value >= 0 && value <= key.most) {
        return std::string(key.choices[static_cast<std::size_t>(value)]);
      }
      break;
    case ValueKind::text:
    case ValueKind::integer:
      break;
  }
  return fmt::format("{}", value);
}

std::string present_text(const ConfigKey& key, const Config& config) {
  return key.kind == ValueKind::text ? quote(text_of(key, config))
                                     : value_text(key, key.get(config));
}

std::string toml_value(const ConfigKey& key, const Config& config) {
  const std::string text = present_text(key, config);
  const bool digits_only = text.find_first_not_of("-0123456789") == std::string::npos;
  const bool is_bare = key.kind == ValueKind::text || key.kind == ValueKind::boolean || digits_only;
  return is_bare ? text : quote(text);
}

tl::expected<void, std::string> set_from_number(const ConfigKey& key, Config& config,
                                                std::int64_t number) {
  if (number < key.least || number > key.most) {
    return tl::unexpected<std::string>("is out of range");
  }
  key.set(config, number);
  return {};
}

tl::expected<void, std::string> set_from_text(const ConfigKey& key, Config& config,
                                              string_view text) {
  const auto store = [&](const auto& value) -> tl::expected<void, std::string> {
    if (!value) return tl::unexpected(value.error());
    return set_from_number(key, config, static_cast<std::int64_t>(*value));
  };
  switch (key.kind) {
    case ValueKind::text:
      key.text(config) = text;
      if (in_range(key, config)) return {};
      return tl::unexpected<std::string>(text.empty() ? "is empty" : "is too long");
    case ValueKind::integer:
      return store(base::parse_integer(text));
    case ValueKind::bytes:
      return store(base::parse_bytes(text));
    case ValueKind::duration:
      return store(base::parse_duration(text).map([](Nanoseconds d) { return d.count(); }));
    case ValueKind::choice:
    case ValueKind::boolean:
      break;
  }
  const auto found = std::find(key.choices.begin(), key.choices.end(), text);
  if (found == key.choices.end()) return tl::unexpected<std::string>("is none of the choices");
  key.set(config, found - key.choices.begin());
  return {};
}

bool in_range(const ConfigKey& key, const Config& config) {
  const std::int64_t value = key.kind == ValueKind::text
                                 ? static_cast<std::int64_t>(text_of(key, config).size())
                                 : key.get(config);
  return value >= key.least && value <= key.most;
}

std::size_t edit_distance(string_view a, string_view b) {
  // Three rows of the Damerau-Levenshtein table, because a swap of neighbours needs the row before
  // the previous one.
  std::vector<std::size_t> before(b.size() + 1);
  std::vector<std::size_t> above(b.size() + 1);
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    before.swap(above);
    above.swap(row);
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const bool same = a[i - 1] == b[j - 1];
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (same ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
  }
  return row[b.size()];
}

const ConfigKey& nearest_config_key(string_view section, string_view name) {
  const auto distance = [&](const ConfigKey& key) {
    const std::size_t by_name = edit_distance(key.name, name);
    const std::size_t by_section = section.empty() ? 0 : edit_distance(key.section, section);
    // The right name in the wrong section is nearer than any wrong name.
    return by_name == 0 ? std::min<std::size_t>(by_section, 1) : 1 + by_name + by_section;
  };
  return *std::min_element(kKeys.begin(), kKeys.end(),
                           [&](const auto& a, const auto& b) { return distance(a) < distance(b); });
}

string_view nearest_config_section(string_view section) {
  return std::min_element(kKeys.begin(), kKeys.end(),
                          [&](const auto& a, const auto& b) {
                            return edit_distance(a.section, section) <
                                   edit_distance(b.section, section);
                          })
      ->section;
}

const ConfigKey& nearest_environment_key(string_view variable) {
  return *std::min_element(kKeys.begin(), kKeys.end(), [&](const auto& a, const auto& b) {
    return edit_distance(environment_name(a), variable) <
           edit_distance(environment_name(b), variable);
  });
}

}  // namespace spinwire::config
