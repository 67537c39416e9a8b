// The first steps of a user's program: includes the installed headers, links, and prints the
// version.
#include <spinwire/version.h>

#include <cstdio>
#include <string>

int main() {
  const std::string expected = std::to_string(SPINWIRE_VERSION_MAJOR) + "." +
                               std::to_string(SPINWIRE_VERSION_MINOR) + "." +
                               std::to_string(SPINWIRE_VERSION_PATCH);
  std::printf("%s\n", std::string(spinwire::version()).c_str());
  return spinwire::version() == expected ? 0 : 1;
}
