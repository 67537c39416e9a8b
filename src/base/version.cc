// The text of the version, from the numbers in the public header.
#include "spinwire/version.h"

#define SPINWIRE_STRING_OF(x) #x
#define SPINWIRE_STRING(x) SPINWIRE_STRING_OF(x)

namespace spinwire {

std::string_view version() noexcept {
  return SPINWIRE_STRING(SPINWIRE_VERSION_MAJOR) "." SPINWIRE_STRING(
      SPINWIRE_VERSION_MINOR) "." SPINWIRE_STRING(SPINWIRE_VERSION_PATCH);
}

}  // namespace spinwire
