#!/usr/bin/env bash
# Checks that nothing secret is compared in a time that depends on the bytes: in src/control codes, tags, proofs and
# secrets by sodium_memcmp() alone; everywhere in src tokens, and proofs that functions make of them, by
# base::is_same_secret(). Names of a message, a key's identity and public keys are no secrets.
#
#   tools/dev/check_secrets.sh [ROOT]        checks ROOT/src (default: this tree)
#   tools/dev/check_secrets.sh --self-test   plants violations and checks that each is found
set -euo pipefail

# Bytes are not compared by these in src/control, whatever they are.
functions='(^|[^A-Za-z_])((std::)?(memcmp|bcmp|strcmp|strncmp|timingsafe_bcmp)|(std::)?(ranges::)?lexicographical_compare[a-z_]*)\('
path='([A-Za-z_][A-Za-z_0-9]*(\(\))?(\[[^]]*\])?(\.|->))*\*?'
# An operand that is a constant, such as Step::proof or nullptr, is no secret.
constant='(nullptr|k[A-Z]|[A-Z][A-Za-z]*::|sizeof|[0-9])'

# The pattern of comparisons of what has one of these names: the last part of an operand.
comparisons_of() {
  local secret="[a-z_]*($1)_?(\\(\\)|\\.data\\(\\)|\\.bytes(\\(\\))?)?"
  local left="(^|[^A-Za-z_0-9:.>])$path$secret *(==|!=) *+(?!$constant)"
  local right="(?<!nullptr) (==|!=) *$path$secret *([;)&|?,}]|\$)"
  local equal="(std::)?(ranges::)?(equal|mismatch)\\(([^;]*[^A-Za-z:])?$path$secret(\\.c?(begin|end)\\(\\))?[,)]"
  printf '%s' "$left|$right|$equal"
}
# The pattern of comparisons of what a function with one of these names returns, such as session_proof(token) or
# proof_of(header). Functions that say whether something is there return no secret.
results_of() {
  local result="(?!(?:has|is|decode|set|on)_)(?:[a-z]+_)*(?:$1)(?:_of)?(\\((?:[^()]|(?-1))*\\))"
  printf '%s' "(^|[^A-Za-z_0-9])$result *(==|!=) *+(?!$constant)|(?<!nullptr) (==|!=) *([A-Za-z_]+::|$path)$result"
}
in_control="$functions|$(comparisons_of 'code|codes|tag|tags|proof|proofs|secret|secrets|psk|mac|hmac|digest|token|tokens')"
in_control+="|$(results_of 'code|tag|proof|secret|mac|hmac|digest|token')"
elsewhere="$(comparisons_of 'secret|secrets|psk|token|tokens')|$(results_of 'proof|secret|token')"

# Code without comments and texts, each line behind its number. Brackets that are open go on in the same line.
code_of() {
  sed -E 's/"([^"\\]|\\.)*"/""/g; s,//.*$,,' "$1" | awk '
    {
      if (open <= 0) { text = ""; at = NR; open = 0 } else sub(/^ +/, text ~ /\($/ ? "" : " ")
      text = text $0
      open += gsub(/\(/, "(") - gsub(/\)/, ")")
      if (open <= 0 || NR - at > 20) { print at ":\t" text; open = 0 }
    }
    END { if (open > 0) print at ":\t" text }'
}

check_file() {
  local file=$1 shown=$2 found pattern=$elsewhere
  [[ $shown != src/control/* ]] || pattern=$in_control
  found=$(code_of "$file" | grep -P "$pattern" || true)
  [[ -z "$found" ]] || { sed "s,^,$shown:," <<<"$found" >&2; return 1; }
}

check_tree() {
  local root=$1 bad=0 file
  while IFS= read -r file; do
    check_file "$file" "${file#"$root"/}" || bad=1
  done < <(find "$root/src" -name '*.cc' -o -name '*.h')
  [[ $bad -eq 0 ]] || echo 'compare codes, tags, proofs and secrets by sodium_memcmp(), tokens by base::is_same_secret()' >&2
  return $bad
}

self_test() {
  local failed=0 folder
  folder=$(mktemp -d)
  expect() {  # good or bad, code, and where it is
    printf '%s\n' "$2" >"$folder/planted.cc"
    local is=good
    check_file "$folder/planted.cc" "${3:-src/control/planted.cc}" 2>"$folder/found" || is=bad
    [[ $is == "$1" ]] || { echo "check_secrets: taken as $is: $2" >&2; failed=1; }
  }
  expect bad '  if (std::memcmp(a.data(), b.data(), a.size()) == 0) return;'
  expect bad '  return memcmp(tag, sealed, kNoiseTagBytes) == 0;'
  expect bad '  if (bcmp(a, b, 16) != 0) return;'
  expect bad '  if (proof.code == code_of(*key, peer, proof)) return;'
  expect bad '  if (proof.code != ours) return;'
  expect bad '  const bool good = peer.tag == expected;'
  expect bad '  return expected != record->tag;'
  expect bad '  if (ours == proof.code && is_sent_) return;'
  expect bad '  return key.secret == other.secret;'
  expect bad '  if (message.psk.bytes == psk_) return;'
  expect bad '  return std::equal(proof.code.begin(), proof.code.end(), ours.begin());'
  expect bad '  return std::equal(ours.begin(), ours.end(), proof.code.begin());'
  expect bad '  return std::ranges::equal(ours, endpoint_code);'
  expect bad '  return our_digest == peer.digest;  // of equal length'
  expect bad '  return std::equal(tag.begin(), tag.end(), ours.begin());'
  expect bad '  return std::equal(ours.begin(), ours.end(), tag.cbegin(), tag.cend());'
  expect bad '  return std::ranges::equal(endpoint_code, ours);'
  expect bad '  return std::ranges::equal(mac, ours);'
  expect bad $'  return std::equal(\n      tag.begin(), tag.end(), ours.begin());'
  expect bad $'  return std::equal(ours.begin(), ours.end(),\n                    proof.code.begin());'
  expect bad '  if (!(tag == ours)) return;'
  expect bad '  if (shown->token == session.path_token) {'
  expect bad '  if (token != ours) return;' src/rpc/planted.cc
  expect bad '  const bool fits = s != nullptr && s->token == join.token &&' src/rpc/planted.cc
  expect bad '  return std::ranges::equal(join.token, ours);' src/rpc/planted.cc
  expect bad '  if (wire::proof_of(header) != wire::session_proof(s->token)) {' src/rpc/planted.cc
  expect bad '  if (theirs != wire::session_proof(s->token)) {' src/rpc/planted.cc
  expect bad '  return wire::session_proof(secret_of(*s, (1 + 2))) == theirs;' src/rpc/planted.cc
  expect bad '  return word >> 32 == credit_proof(static_cast<std::uint32_t>(word), token);' src/wire/planted.h
  expect bad '  if (code_of(*key, peer, proof) != ours) return;'
  expect bad '  if (ours == code_of(*key, peer, proof)) return;'
  expect bad '  if (*ours == port_.secret_of(key)) return;'
  expect good '  if (error.code == other.code) return;' src/rpc/planted.cc
  expect good '  if (base::is_same_secret(wire::proof_of(header), wire::session_proof(t)) == false) {' src/rpc/planted.cc
  expect good '  if (kind_of(token) != RpcKind::reply && has_token(header) == is_sent) return;' src/rpc/planted.cc
  expect good '  if (decode_cm_proof(data) == std::nullopt) return;'
  expect good '  return std::memcmp(a, b, 16) == 0;' src/rpc/planted.cc
  expect good '  checks.field(join.token != 0, "token");' src/wire/planted.cc
  expect good '  return kind_of(token) == TokenKind::handshake;'
  expect good '  return generation == generation_of(token);'
  expect good '  if (base::is_same_secret(s->token, join.token)) return;' src/rpc/planted.cc
  expect good '  return sodium_memcmp(a.data(), b.data(), a.size()) == 0;'
  expect good '  if (sodium_memcmp(proof.code.data(), ours.data(), ours.size()) != 0) return;'
  expect good '  if (step_ == Step::proof) return;'
  expect good '  if (proof != nullptr) return id.reject(wire::encode(proof->seal(refusal)));'
  expect good '  static_assert(wire::kSealTagBytes == kNoiseTagBytes);'
  expect good '  if (sealed.size() < kNoiseTagBytes || count_ == ~std::uint64_t{0}) return false;'
  expect good '  if (!std::equal(proof.key.begin(), proof.key.end(), key.id.begin())) continue;'
  expect good '  // as std::memcmp(tag, other) == 0 would'
  expect good '  fail("proof.code == ours");'
  expect good '  if (outcome && outcome->proof != nullptr) {'
  expect good '  if (decode(frame) != Status::ok) return;'
  rm "$folder/planted.cc" "$folder/found"
  rmdir "$folder"
  [[ $failed -ne 0 ]] || echo 'check_secrets: self-test passed'
  return $failed
}

case "${1:-}" in
  --self-test) self_test ;;
  *) check_tree "$(cd "${1:-$(dirname "${BASH_SOURCE[0]}")/../..}" && pwd)" ;;
esac
