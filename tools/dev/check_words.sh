#!/usr/bin/env bash
# Checks that the tree uses its glossary's words (src/README.md) and none that it has given up: private
# names for things that have a standard term.
#
#   tools/dev/check_words.sh               checks all tracked files
#   tools/dev/check_words.sh --self-test   plants each retired word and sees that it is found
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# A retired word as an extended regular expression, and what to write instead.
retired=(
  'patience'                        'timeout, or rto for the retransmission time-out'
  '[Ll]oans?'                       'LeaseGranted: memory leased to a peer'
  '[Hh]oldings?'                    'LeaseHeld: memory leased from a peer'
  'fall_silent|falls_silent'        'abort'
  'untold'                          'pending cancellations'
  'lined_up'                        'run_queue, or the queue by its purpose'
  'goes_later|met_itself'           'a verb with an object'
  'look_at_[a-z_]+'                 'check_, poll_ or scan_ with an object'
  'tell_[a-z_]+'                    'send_, report_ or notify_ with an object'
  'say_[a-z_]+'                     'send_ with an object'
  'reply_space|reply_written'       'reserve_reply, commit_reply'
  'looked_at'                       'the time of the check, by its purpose'
  '[Ww]hoever'                      'the subject: the peer, the caller, the engine'
  'starved|scarce'                  'credit_blocked, receive_shortage or buffer_waiters'
  'by hand|by_hand'                 'out-of-band'
  'carriers?'                       'transport'
  'least_patience|least_timeout'    'min_rto'
  'errands?|Roads?|doomed|restless' 'the standard term for it'
  'kNoQueuePair'                    'a type or an optional value, not a sentinel'
  'lies_in_wait|impatient|doubts'   'a fact'
  'revive|revived'                  'reconnect'
  'notes_queue|note_queue'          'control message queue'
)

# Files whose words are not ours.
others=(':!LICENSE' ':!tools/dev/check_words.sh')

# A word on its own or as a part of a name: lied_in, LiedIn, lied_.
as_word() { printf '(^|[^A-Za-z]|_)(%s)([^A-Za-z]|$)|[a-z](Patience|Whoever)|(Patience|Whoever)[A-Z]' "$1"; }

check() {
  local i bad=0 found
  for ((i = 0; i < ${#retired[@]}; i += 2)); do
    found=$(git grep -nIE "$(as_word "${retired[i]}")" -- . "${others[@]}" || true)
    [[ -n "$found" ]] || continue
    bad=1
    printf '%s\n' "$found" | sed 's/^/  /' >&2
    echo "check_words: '${retired[i]}' is retired; write ${retired[i + 1]}" >&2
  done
  return $bad
}

# Each expression has to find a word in a line that was planted for it.
self_test() {
  local i word text bad=0
  for ((i = 0; i < ${#retired[@]}; i += 2)); do
    while read -r word; do
      for text in "  call $word now" "${word}_ = 1"; do
        grep -qE "$(as_word "${retired[i]}")" <<<"$text" && continue
        echo "check_words: self-test: '${retired[i]}' does not find '$text'" >&2
        bad=1
      done
    done < <(tr '|' '\n' <<<"${retired[i]}" | sed -E 's/\[[A-Z]([a-z])\]/\1/g; s/s\?//; s/\[a-z_\]\+/it/')
  done
  [[ $bad -ne 0 ]] || echo 'check_words: self-test passed'
  return $bad
}

case "${1:-}" in
  --self-test) self_test ;;
  '') check ;;
  *) sed -n '2,6s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac
