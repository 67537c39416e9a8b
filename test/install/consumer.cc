// What a user's program does first: include the installed headers, link, and ask for the version.
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
