// Refuses calls with a code of the application's. Cold.
#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

#include "rpc/server_call.h"
#include "rpc/transport/connection_transport.h"

namespace spinwire::rpc {

Status refuse_with_code(Rpc& r, CallRef call, std::uint32_t code, std::string_view text) noexcept {
  constexpr std::size_t kCode = wire::kRefusalCodeBytes;
  ServerSession* const s = find_server(r, call.session);
  if (s == nullptr) return Status::not_connected;
  text = text.substr(0, kSlotPayloadBytes - kCode);
  std::array<std::byte, kSlotPayloadBytes> payload{};
  std::memcpy(payload.data(), &code, kCode);
  std::copy_n(reinterpret_cast<const std::byte*>(text.data()), text.size(), payload.data() + kCode);
  if (!s->takes_refusal_codes)
    return answer_call(r, call, Status::refused, payload.data() + kCode, text.size(), nullptr);
  if (call.transport == Transport::connection) return refuse_over_connection(r, call, code, text);
  ServerSlot* const v = find_slot(*s, call.number);
  if (v == nullptr || v->state != ServerSlotState::running) return Status::not_connected;
  constexpr std::uint8_t kStatus = static_cast<std::uint8_t>(Status::refused) | wire::kHasCode;
  return finish_reply(r, *s, *v, call.number, kStatus, payload.data(), kCode + text.size(),
                      nullptr);
}

}  // namespace spinwire::rpc
