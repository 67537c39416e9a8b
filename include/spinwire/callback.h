// A callable stored in place: no heap, no virtual call, one indirect jump.
#pragma once

#include <cstddef>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#include "spinwire/export.h"

namespace spinwire {

namespace detail {
/// Logs the exception being handled, which has left a callback.
SPINWIRE_API void log_callback_exception() noexcept;
}  // namespace detail

template <typename Signature>
class Callback;

/// Holds a function or a lambda whose captures are trivially copyable and fit into 32 bytes.
/// Anything else does not compile: capture a pointer instead. Copying copies the captures. Calling
/// an empty callback is undefined; test it first. Hot.
///
/// Callbacks should not throw. An exception that leaves a callback is caught and logged as an
/// error. Then the library gives up what the callback was to handle:
///   - A Connection or Session that is the first argument is closed. In on_accept, the peer is
///     refused.
///   - A Request that was not answered is refused, and so is a PeerRequest or a MemoryRequest that
///     was not accepted.
///   - Memory that was not moved out of a LeaseReply is released.
/// Other callbacks only report, and what they are about goes on:
///   - A Completion, Reply or RawReceive: the operation or call has ended. Its connection or
///     session stays, as after a RawPostedCallback.
///   - A ReplyCompletionCallback: the reply has ended.
///   - A TimerCallback: a timer of Engine::every() runs again.
///   - A ResolveCallback: the name is resolved.
///   - DrainOptions::on_drained: the engine is drained.
///   - A ServedSessionVisitor: the visit goes on with the next session.
///   - A DeviceEventCallback: the event has been reported.
///   - A ReplyWritableCallback: it does not run again until another answer is refused.
/// An exception of the log's callback is dropped, with the message.
template <typename R, typename... Args>
class Callback<R(Args...)> {
 public:
  static constexpr std::size_t kCapacity = 32;  ///< most bytes of captures

  Callback() noexcept {}  ///< Empty. Leaves the storage uninitialized.
  /// Empty.
  Callback(std::nullptr_t) noexcept {}

  /// Holds `f`.
  template <typename F, typename D = std::decay_t<F>,
            typename = std::enable_if_t<!std::is_same_v<D, Callback> &&
                                        std::is_invocable_r_v<R, D&, Args...>>>
  Callback(F&& f) noexcept : invoke_(&call<D>) {
    static_assert(sizeof(D) <= kCapacity, "captures exceed 32 bytes; capture a pointer to them");
    static_assert(alignof(D) <= alignof(void*), "captures are over-aligned");
    static_assert(std::is_trivially_copyable_v<D> && std::is_trivially_destructible_v<D>,
                  "captures must be trivially copyable; capture a pointer to the object");
    ::new (static_cast<void*>(storage_)) D(std::forward<F>(f));
  }

  explicit operator bool() const noexcept { return invoke_ != nullptr; }

  /// Calls the function. Undefined if there is none.
  R operator()(Args... args) const { return invoke_(storage_, std::forward<Args>(args)...); }

 private:
  template <typename D>
  static R call(void* storage, Args... args) {
    D& callable = *std::launder(static_cast<D*>(storage));
#if defined(__cpp_exceptions)
    if constexpr (!std::is_nothrow_invocable_v<D&, Args...>) {
      try {
        return callable(std::forward<Args>(args)...);
      } catch (...) {
        detail::log_callback_exception();
        if constexpr (sizeof...(Args) != 0) close_first(args...);
        if constexpr (!std::is_void_v<R>) return R{};
      }
    } else
#endif
      return callable(std::forward<Args>(args)...);
  }

  /// Closes the callback's connection or session, if its first argument is one.
  template <typename First, typename... Others>
  static void close_first(First& first, Others&...) noexcept {
    if constexpr (requires { first.close(); }) (void)first.close();
  }

  R (*invoke_)(void*, Args...) = nullptr;
  alignas(void*) mutable std::byte storage_[kCapacity];
};

}  // namespace spinwire
