// A callable kept in place: no heap, no virtual call, one indirect jump.
#pragma once

#include <cstddef>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

namespace spinwire {

template <typename Signature>
class Callback;

/// Holds a function or a lambda whose captures are trivially copyable and fit into 32 bytes
/// (anything else is a compile error: capture a pointer instead). Copying copies the captures.
/// Calling an empty callback is undefined; test it first. Hot.
template <typename R, typename... Args>
class Callback<R(Args...)> {
 public:
  static constexpr std::size_t kCapacity = 32;

  Callback() noexcept {}  // the storage needs no value until there is something in it
  Callback(std::nullptr_t) noexcept {}

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

  R operator()(Args... args) const { return invoke_(storage_, std::forward<Args>(args)...); }

 private:
  template <typename D>
  static R call(void* storage, Args... args) {
    return (*std::launder(static_cast<D*>(storage)))(std::forward<Args>(args)...);
  }

  R (*invoke_)(void*, Args...) = nullptr;
  alignas(void*) mutable std::byte storage_[kCapacity];
};

}  // namespace spinwire
