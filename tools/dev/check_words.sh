#!/usr/bin/env bash
# Checks that the tree uses the words of its glossary (src/README.md) and no retired ones: private
# names for things that have a standard term.
#
#   tools/dev/check_words.sh               checks all tracked files
#   tools/dev/check_words.sh --self-test   plants each retired word and checks that it is found
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# Retired words and what to write instead. A word is in lower case, with underscores in a name of
# several words; `s?`, `e?` and `[a-z_]+` are regular expressions. It is found on its own, as a part
# of a name (its_word, word_) and, unless it has `[a-z_]+`, in CamelCase (TheWord, kWord, WordOf).
retired=(
  'patience|patient'                  'timeout, or rto for the retransmission time-out'
  'loans?'                            'LeaseGranted: memory leased to a peer'
  'holdings?'                         'LeaseHeld: memory leased from a peer'
  'bulk'                              'long call, rendezvous message, or the transport'
  'promised|allotted|kept for peers'  'reserved'
  'conceal'                           'close_key'
  'direct_runs?|receive_runs|release_runs?|run_completion' 'DirectBatch'
  'fall_silent|falls_silent'          'abort'
  'untold|to_tell'                    'pending cancellations'
  'lined_up'                          'run_queue, or the queue by its purpose'
  'goes_later|met_itself|make_due'    'a verb with an object'
  'look_at|look_at_[a-z_]+|look_into' 'check_, poll_, scan_ or examine_ with an object'
  'looked_at'                         'the time of the check, by its purpose'
  'tell_[a-z_]+'                      'send_, report_ or notify_ with an object'
  'say_[a-z_]+'                       'send_ with an object'
  'ask_destination|ask_probe'         'a verb that says what is requested'
  'lose_[a-z_]+'                      'drop_, fail_ or report_ with an object'
  'leave_[a-z_]+'                     'remove_from_, release_ or retire_ with an object'
  'take_stock|take_what_came|take_end|take_final_cause|take_events' 'what it does: copy_, drain_, record_'
  'reply_space|reply_written'         'reserve_reply, commit_reply'
  'whoever'                           'the subject: the peer, the caller, the engine'
  'starved|scarce|deficit'            'credit_blocked, receive_shortage or buffer_waiters'
  'by hand|by_hand'                   'out-of-band'
  'carriers?'                         'transport'
  'least_patience|least_timeout'      'min_rto'
  'errands?|roads?|doomed|restless'   'the standard term for it'
  'port_trouble'                      'check_port'
  'detours?'                          'slow_path'
  'speakers?'                         'Capabilities: versions and features of an end'
  'seats?'                            'DirectorySlot'
  'beats?|beat_interval|last_beat'    'keepalive, or sequence for the number in a credit word'
  'resent'                            'retransmitted'
  'credits_granted'                   'reserved_receives, or granted_credits of one connection'
  'lies_in_wait|impatient|doubts'     'a fact'
  'revived?'                          'reconnect'
  'notes_queue|note_queue'            'control message queue'
)

# Names whose word is retired for one purpose only: an expression, what to write instead, and for the
# self-test texts that it finds and texts that it does not.
retired_names=(
  '\bPool(Id)?::large\b' 'rendezvous'
  'Pool::large|PoolId::large' 'Pool::larger|large'
  '\bkNoQueuePair\b' 'a type or an optional value, not a sentinel'
  'kNoQueuePair;' 'kNoQueuePairs'
  '\bFate\b' 'RequestFaults'
  'Fate draw(' 'Fates|fate'
  '\blies_in\b' 'is_within'
  'lies_in(known' 'lies_inside('
  '\bEngineContext& s\b' 'ctx'
  'EngineContext& s)' 'EngineContext& ctx)|EngineContext& state)'
  '\bReplyBuffer& space\b' 'buffer'
  'ReplyBuffer& space =' 'ReplyBuffer& buffer =|space ='
  'stats\(?\)?\.(retransmits|slowed|unsent|late)\b'
  'retransmitted_requests, cwnd_reductions, send_queue_full, late_replies'
  'stats.retransmits|rpc_stats().slowed|rpc_stats().unsent|r.stats.late;' 'stats.late_replies|call.late'
)

# Files that quote others' words.
others=(':!LICENSE' ':!tools/dev/check_words.sh')

# The words' forms in CamelCase, as alternatives of a regular expression: look_into, LookInto.
camel() {
  tr '|' '\n' <<<"$1" | { grep -v "[][ ]" || true; } | sed -E 's/(^|_)([a-z])/\U\2/g' | paste -sd '|'
}

# A regular expression that finds the words.
as_word() {
  local lower c
  lower=$(tr '|' '\n' <<<"$1" | sed -E 's/^([a-z])/[\U\1\L\1]/' | paste -sd '|')
  printf '(^|[^A-Za-z])(%s)([^A-Za-z]|$)' "$lower"
  c=$(camel "$1")
  [[ -z "$c" ]] || printf '|[a-z0-9](%s)([^a-z]|$)|(^|[^A-Za-z0-9])(%s)[A-Z]' "$c" "$c"
}

# Reports what an expression finds. 1 if it finds something.
refuse() {
  local found
  found=$(git grep -nIE "$1" -- . "${others[@]}" || true)
  [[ -n "$found" ]] || return 0
  printf '%s\n' "$found" | sed 's/^/  /' >&2
  echo "check_words: '$2' is retired; write $3" >&2
  return 1
}

check() {
  local i bad=0
  for ((i = 0; i < ${#retired[@]}; i += 2)); do
    refuse "$(as_word "${retired[i]}")" "${retired[i]}" "${retired[i + 1]}" || bad=1
  done
  for ((i = 0; i < ${#retired_names[@]}; i += 4)); do
    refuse "${retired_names[i]}" "${retired_names[i]}" "${retired_names[i + 1]}" || bad=1
  done
  return $bad
}

# Each expression must find its words and names in planted lines, and not within a longer word.
self_test() {
  local i word text expression name bad=0
  must_find() {
    grep -qE "$1" <<<"$2" && return
    echo "check_words: self-test: '$1' does not find '$2'" >&2
    bad=1
  }
  must_not_find() {
    grep -qE "$1" <<<"$2" || return 0
    echo "check_words: self-test: '$1' finds '$2'" >&2
    bad=1
  }
  for ((i = 0; i < ${#retired[@]}; i += 2)); do
    expression=$(as_word "${retired[i]}")
    while read -r word; do
      for text in "  call $word now" "${word}_ = 1" "its_$word()" "${word^} begins"; do
        must_find "$expression" "$text"
      done
      must_not_find "$expression" "x${word}x"
      name=$(camel "$word")
      [[ "$word" != *' '* && -n "$name" && "$word" != *_it ]] || continue
      for text in "class Rpc$name {" "TEST(All${name}AreLate, x)" "k$name = 1" "${name}Of(x)"; do
        must_find "$expression" "$text"
      done
    done < <(tr '|' '\n' <<<"${retired[i]}" | sed -E 's/[a-z]\?//; s/\[a-z_\]\+/it/')
  done
  for ((i = 0; i < ${#retired_names[@]}; i += 4)); do
    expression=${retired_names[i]}
    while read -r text; do
      must_find "$expression" "$text"
    done < <(tr '|' '\n' <<<"${retired_names[i + 2]}")
    while read -r text; do
      must_not_find "$expression" "$text"
    done < <(tr '|' '\n' <<<"${retired_names[i + 3]}")
  done
  [[ $bad -ne 0 ]] || echo 'check_words: self-test passed'
  return $bad
}

case "${1:-}" in
  --self-test) self_test ;;
  '') check ;;
  *) sed -n '2,6s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac
