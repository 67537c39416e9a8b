#include "engine/acceptance.h"

#include "base/error.h"
#include "base/internals.h"

namespace spinwire::engine {

Result<PrivateData> copy_private_data(const char* asked, std::span<const std::byte> bytes) {
  PrivateData copy;
  if (copy.assign(bytes) != Status::ok) {
    return base::fail(Status::invalid_argument, asked,
                      base::format("private data of {} bytes", bytes.size()),
                      base::format("give up to {} bytes", kPrivateDataMax));
  }
  return copy;
}

Result<PrivateData> ask_to_accept(const Callback<void(PeerRequest&)>& callback,
                                  const PeerIdentity& peer, const PrivateData& ours,
                                  bool carries_data) {
  if (!callback) return ours;
  auto request = detail::make<PeerRequest>(peer, ours, carries_data);
  callback(request);
  using detail::Internals;
  if (Internals::is_accepted(request)) return Internals::private_data(request);
  Error why{Status::refused, "accept a peer", Internals::refusal_text(request), "ask its operator"};
  why.code = Internals::refusal_code(request);
  why.goodbye = Internals::refusal_goodbye(request);
  return tl::unexpected(std::move(why));
}

}  // namespace spinwire::engine
