// Detects the sanitizer of the build, with gcc or clang: SPINWIRE_ASAN and SPINWIRE_TSAN are 0 or
// 1.
#pragma once

#ifdef __has_feature  // clang
#define SPINWIRE_HAS_FEATURE(feature) __has_feature(feature)
#else
#define SPINWIRE_HAS_FEATURE(feature) 0
#endif

#if defined(__SANITIZE_ADDRESS__) || SPINWIRE_HAS_FEATURE(address_sanitizer)
#define SPINWIRE_ASAN 1
#else
#define SPINWIRE_ASAN 0
#endif

#if defined(__SANITIZE_THREAD__) || SPINWIRE_HAS_FEATURE(thread_sanitizer)
#define SPINWIRE_TSAN 1
#else
#define SPINWIRE_TSAN 0
#endif
