// Replaces the C library's heap functions by versions that count calls, or fail, on a test's
// request.
#include "engine/failed_allocations.h"
#include "engine/zero_cost.h"

#if SPINWIRE_TEST_COUNTS_HEAP
namespace {
void* fail() noexcept {
  ++zero_cost_test::failed_allocations;
  return nullptr;
}
}  // namespace

// The C library's own functions, which all other heap functions end in.
extern "C" {
void* __libc_malloc(std::size_t size) noexcept;
void* __libc_calloc(std::size_t count, std::size_t size) noexcept;
void* __libc_realloc(void* old, std::size_t size) noexcept;
void* __libc_memalign(std::size_t alignment, std::size_t size) noexcept;
void __libc_free(void* block) noexcept;

__attribute__((visibility("default"))) void* malloc(std::size_t size) noexcept {
  using namespace zero_cost_test;
  if (is_to_fail()) return fail();
  return count_heap_call(__libc_malloc(size), Moved::taken);
}
__attribute__((visibility("default"))) void* calloc(std::size_t count, std::size_t size) noexcept {
  using namespace zero_cost_test;
  if (is_to_fail()) return fail();
  return count_heap_call(__libc_calloc(count, size), Moved::taken);
}
__attribute__((visibility("default"))) void* realloc(void* old, std::size_t size) noexcept {
  using namespace zero_cost_test;
  if (is_to_fail()) return fail();
  count_heap_call(old, Moved::given_back);
  return count_heap_call(__libc_realloc(old, size), Moved::taken);
}
__attribute__((visibility("default"))) void* aligned_alloc(std::size_t alignment,
                                                           std::size_t size) noexcept {
  using namespace zero_cost_test;
  if (is_to_fail()) return fail();
  return count_heap_call(__libc_memalign(alignment, size), Moved::taken);
}
__attribute__((visibility("default"))) void free(void* block) noexcept {
  using namespace zero_cost_test;
  count_heap_call(block, Moved::given_back);
  __libc_free(block);
}
}
#endif
