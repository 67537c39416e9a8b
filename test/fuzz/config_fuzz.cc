// The text of a configuration file.
#include "fuzz/fuzz.h"
#include "spinwire/config.h"

namespace fuzz {

using spinwire::Config;

void run(std::span<const std::byte> data) {
  const auto read = Config::parse(text_of(alone(data)), "input");
  if (!read) {
    expect(!read.error().found.empty() && !read.error().remedy.empty(), "words of a refusal");
    return;
  }
  const std::string text = read->to_toml();
  const auto again = Config::parse(text, "written");
  expect(again && again->to_toml() == text, "a configuration written and read");
}

void sow(Seeds& seeds) {
  seeds.add(Config().to_toml());
  seeds.add("[memory]\nsend_bytes = \"64MiB\"\nhugepages = \"off\"\n");
  seeds.add("[connections]\nkeepalive = \"20ms\"\neager_bytes = 4096\n");
  seeds.add("[device]\nname = \"auto\"\nport = 1\ngid_index = 3\n");
  seeds.add("[queue_pair]\naccess = \"remote_read\"\npsn = -1\n");
  seeds.add("[conections]\nmaximum = 1\n");
  seeds.add("[connections]\nmaximum = true\n[[queues]]\n");
}

}  // namespace fuzz
