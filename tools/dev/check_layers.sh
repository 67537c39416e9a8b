#!/usr/bin/env bash
# Checks that includes inside src/ point down only, and that no folder names the namespace of a folder
# that it may not include, as a forward declaration would:
#   sim -> engine -> rpc -> agent -> {config, control} -> {memory, observe, verbs, wire} -> base
# Also checks that engine/ and rpc/ ask agents by the functions of agent/'s headers, never through their fields.
#
#   tools/dev/check_layers.sh [ROOT]        checks ROOT/src (default: this tree)
#   tools/dev/check_layers.sh --self-test   plants violations and checks that each is found
set -euo pipefail

# What each folder may include besides itself and the public headers.
declare -A may_include=(
  [base]=''
  [softverbs]='base'
  [verbs]='base'
  [wire]='base'
  [memory]='base verbs'
  [control]='base observe verbs wire'
  [config]='base memory verbs'
  [agent]='base config control memory observe verbs wire'
  [rpc]='base agent config control memory observe verbs wire'
  [observe]='base'
  [engine]='base observe rpc agent config control memory verbs wire'
  [sim]='base engine observe rpc agent config control memory verbs wire softverbs'
)

# Only the providers know the embedded device, so other code cannot ask which device it runs on. There
# are two exceptions: verbs/direct_*.h forwards direct datagrams and messages, and sim uses the device.
sees_softverbs() {
  [[ "$1" == src/verbs/provider*.cc || "$1 $2" == 'src/verbs/direct_datagrams.h softverbs/ud/ud_direct.h' ||
    "$1 $2" == 'src/verbs/direct_messages.h softverbs/rc/rc_direct.h' ]]
}

# What engine/ and rpc/ may name of an EngineContext: its base EngineParts, which the engine makes and gives to
# its agents; and the pool of agents, to visit or find one. All else is agent/'s own.
engine_parts='config|clock|slot|now|device|arena|registrations|stats|windows|timers|attributes|incarnation'
engine_parts+='|max_transfer|endpoint_keys|recorder|latencies|until_sample|keys|owns|agents|find'

# Types of namespace spinwire::detail, which tells no layer, and the folders that may name them.
declare -A named_by=([EngineCore]='engine sim')

# Prints the rule that including $2 in file $1 breaks, if any.
broken_rule() {
  local file=$1 include=$2 from to
  from=${file#src/}
  from=${from%%/*}
  to=${include%%/*}
  if [[ "$include" == spinwire/* ]]; then
    return
  elif [[ "$include" == */../* || "$include" == ../* || "$include" != */* ]]; then
    echo 'private includes are written relative to src/'
  elif [[ -z "${may_include[$to]+set}" ]]; then
    echo "'$to' is no folder of src/; third-party headers go in <>"
  elif [[ "$to" == "$from" || " ${may_include[$from]} " == *" $to "* ]]; then
    return
  elif [[ "$to" == softverbs ]]; then
    sees_softverbs "$file" "$include" ||
      echo 'softverbs is known to src/verbs/provider*.cc and, in part, to verbs/direct_*.h'
  else
    echo "$from may include: itself${may_include[$from]:+ ${may_include[$from]}}"
  fi
}

check_tree() {
  local root=$1 bad=0 file line include rule folder
  cd "$root"
  while read -r file; do
    if [[ -z "${may_include[$(cut -d/ -f2 <<<"$file")]+set}" ]]; then
      echo "$file:1: it lies in no layer; the layers are: ${!may_include[*]}" >&2
      bad=1
    fi
  done < <(find src -type f \( -name '*.h' -o -name '*.cc' \) | sort)
  [[ $bad -eq 0 ]] || return 1

  while IFS=: read -r file line include; do
    [[ "$include" =~ [\"\<]([^\"\>]*) ]] && include=${BASH_REMATCH[1]}
    rule=$(broken_rule "$file" "$include")
    if [[ -n "$rule" ]]; then
      echo "$file:$line: includes \"$include\", but $rule" >&2
      bad=1
    fi
  done < <(
    # Angle brackets do not evade the rules: private folders in them count, too.
    folders=$(IFS='|' && echo "${!may_include[*]}")
    grep -rnE --include='*.h' --include='*.cc' \
      "^[[:space:]]*#[[:space:]]*include[[:space:]]*(\"|<($folders)/)" src | sort
  )
  for folder in "${!may_include[@]}"; do
    [[ -d "src/$folder" ]] || continue
    line=$(broken_names "$folder")
    [[ -n "$line" ]] || continue
    echo "$line" >&2
    bad=1
  done
  line=$(reached_fields)
  if [[ -n "$line" ]]; then
    echo "$line" >&2
    bad=1
  fi
  return $bad
}

# Prints "FILE:LINE: ..." for each line of src/engine and src/rpc that reaches into an agent, a lease or the agents' part of
# the context. Variables are known by their declaration; `a` and `h` are agents and leases by convention.
reached_fields() {
  local file names folders=()
  for file in src/engine src/rpc; do
    [[ ! -d "$file" ]] || folders+=("$file")
  done
  ((${#folders[@]} != 0)) || return 0
  while read -r file; do
    names=$(sed -nE 's/.*\b(Agent|LeaseHeld|LeaseGranted)( const)?[&*]( const)? ([a-z_]+)\b.*/\4/p' "$file" |
      sort -u | paste -sd '|')
    # Neither comments nor strings count.
    sed -E 's://.*::; s/"[^"]*"/""/g' "$file" | { grep -nE \
      "\b(a|h${names:+|$names})(\.|->)[a-z]|(^|[^A-Za-z_])\(\*+[a-z_]+\)(\.|->)[a-z]|(\.|->)agent(\.|->)[a-z]" || true; } |
      sed "s|^\([0-9]*\):|$file:\1: reaches into a record of agent/, which has functions: |"
    sed -E 's://.*::; s/"[^"]*"/""/g' "$file" |
      { grep -noE '\b(context_?|ctx)\.[a-z_]+' || true; } |
      { grep -vE "\.($engine_parts)\$" || true; } |
      sed "s|^\([0-9]*\):|$file:\1: reaches into the agents' part of the context: |"
  done < <(find "${folders[@]}" -type f \( -name '*.h' -o -name '*.cc' \) | sort)
}

# Prints "FILE:LINE: ..." for each namespace, and each type of named_by, that the folder of $1 may not name.
broken_names() {
  local from=$1 to others=() types=''
  for to in "${!may_include[@]}"; do
    [[ "$to" == "$from" || " ${may_include[$from]} " == *" $to "* ]] || others+=("$to")
  done
  ((${#others[@]} != 0)) || return 0
  for to in "${!named_by[@]}"; do
    [[ " ${named_by[$to]} " == *" $from "* ]] || types+="|\\b$to\\b"
  done
  local names
  names=$(IFS='|' && echo "${others[*]}")
  # Comments may name anything.
  { grep -rnE --include='*.h' --include='*.cc' \
    "^([^/\"]|/[^/])*(\b($names)::|namespace (spinwire::)?($names)\b$types)" "src/$from" || true; } |
    while IFS=: read -r file line text; do
      if [[ "$text" =~ (^|[^a-z_:])softverbs(::|[^a-z_]) ]] &&
        { sees_softverbs "$file" '' || [[ "$file" == src/verbs/direct_*.h ]]; }; then
        continue
      fi
      echo "$file:$line: names a higher layer: ${text#"${text%%[![:space:]]*}"}"
    done
}

self_test() {
  local tmp failed=0
  tmp=$(mktemp -d)
  trap 'rm -rf "$tmp"' RETURN

  # expect ok|bad FILE INCLUDE, expect_text ok|bad FILE LINE: checks a tree that contains only that file.
  # The check must pass, or fail and name the file.
  expect() { expect_text "$1" "$2" "#include $3"; }
  expect_text() {
    local want=$1 file=$2 include=$3 out got=ok
    rm -rf "$tmp/src"
    mkdir -p "$tmp/$(dirname "$file")"
    printf '// comment\n%s\n' "$include" >"$tmp/$file"
    out=$( (check_tree "$tmp") 2>&1) || got=bad
    [[ $got == bad && "$out" != *"$file:"[12]": "* ]] && got='refused without naming the line'
    if [[ "$got" != "$want" ]]; then
      echo "check_layers: self-test: $include in $file: want $want, got $got: $out" >&2
      failed=1
    fi
  }

  expect ok src/engine/poll.cc '"rpc/client.h"'
  expect ok src/engine/poll.cc '"engine/engine.h"'
  expect ok src/base/pool.h '"spinwire/status.h"'
  expect ok src/base/pool.h '<infiniband/verbs.h>'
  expect ok src/memory/slab.cc '"verbs/opened_device.h"'
  expect ok src/control/tcp.cc '"wire/handshake.h"'
  expect ok src/verbs/provider_table.cc '"softverbs/softverbs_device.h"'
  expect ok src/config/config_check.cc '"memory/arena.h"'
  expect ok src/agent/agent.cc '"config/connection_attributes.h"'
  expect ok src/sim/node.cc '"softverbs/faults.h"'
  expect ok src/sim/node.cc '"engine/engine_core.h"'
  expect ok src/verbs/direct_datagrams.h '"softverbs/ud/ud_direct.h"'
  expect bad src/verbs/direct_datagrams.h '"softverbs/objects.h"'
  expect ok src/verbs/direct_messages.h '"softverbs/rc/rc_direct.h"'
  expect bad src/rpc/peer_address.h '"softverbs/ud/ud_direct.h"'
  expect bad src/engine/poll.cc '"sim/state.h"'
  expect bad src/engine/poll.cc '"softverbs/faults.h"'
  expect bad src/config/config_check.cc '"agent/engine_context.h"'
  expect bad src/control/exchange.cc '"config/config_keys.h"'
  expect bad src/verbs/opened_device.cc '"softverbs/softverbs_device.h"'
  expect bad src/verbs/provider.h '"softverbs/softverbs_device.h"'
  expect bad src/softverbs/lane.cc '"verbs/opened_device.h"'
  expect bad src/base/pool.h '"memory/slab.h"'
  expect bad src/base/pool.h '<memory/slab.h>'
  expect bad src/wire/frame.h '"agent/agent.h"'
  expect bad src/agent/agent.cc '"rpc/session.h"'
  expect bad src/rpc/client.cc '"engine/engine.h"'
  expect bad src/rpc/client.cc '"session.h"'
  expect bad src/rpc/client.cc '"../agent/agent.h"'
  expect bad src/rpc/client.cc '"fmt/format.h"'
  expect bad src/stray.cc '"base/pool.h"'
  expect bad src/util/stray.cc '"base/pool.h"'
  expect_text bad src/agent/agent.h 'namespace spinwire::rpc { struct Rpc; }'
  expect_text bad src/memory/arena.cc '  agent::Agent* owner = nullptr;'
  expect_text bad src/control/socket.cc 'using spinwire::engine::EngineCore;'
  expect_text bad src/base/owner_guard.h '  EngineCore* core = nullptr;'
  expect_text bad src/rpc/client.h 'namespace spinwire::detail { class EngineCore; }'
  expect_text ok src/base/owner_guard.h '  void* target = nullptr;  // an EngineCore'
  expect_text ok src/engine/connector.h 'using spinwire::detail::EngineCore;'
  expect_text ok src/sim/state.h '  detail::EngineCore& core();'
  expect_text bad src/rpc/session.cc 'softverbs::Context* c;'
  expect_text ok src/memory/arena.cc '// what agent::submit() needs'
  expect_text ok src/memory/arena.cc 'base::log(LogLevel::info, "rpc::call");'
  expect_text ok src/rpc/session.cc '  agent::Agent* a = nullptr;  // not engine::'
  expect_text ok src/verbs/provider_softverbs.cc '  softverbs::Context* c = nullptr;'
  expect_text bad src/engine/connector.cc '  a.setup.handshake = handshake;'
  expect_text bad src/engine/connector.cc '  if (a->state == ConnectionState::ready) return;'
  expect_text bad src/engine/connector.cc '  use(*(*a)->qp);'
  expect_text bad src/engine/connector.cc '  for (agent::Agent& each : context_.agents) ++each.index;'
  expect_text bad src/engine/api/leases_api.cc '  post_control(core, *lease->agent->raw);'
  expect_text bad src/engine/poll.cc '  if (context.queued_agents != 0) return;'
  expect_text bad src/engine/api/engine_api.cc '  return core_->context.own_queues->share;'
  expect_text ok src/engine/connector.cc '  if (agent::is_ending(*a)) return;  // else a->setup is there'
  expect_text ok src/engine/connector.cc '  fail(context_, *a, "a->setup.cm");'
  expect_text ok src/engine/poll.cc '  context.stats.completions += context_.now;'
  expect_text bad src/rpc/transport/replies.cc '  if (a->state == ConnectionState::ready) return;'
  expect_text bad src/rpc/rpc_state.cc '  r.context.flush_queue.cut(0);'
  expect_text ok src/rpc/rpc_state.cc '  if (agent::is_ready(*a)) r.context.timers.cancel(t);'
  expect_text ok src/agent/liveness.cc '  a.setup.probe = LossProbe::over;'
  [[ $failed -eq 0 ]] && echo 'check_layers: self-test passed'
  return $failed
}

case "${1:-}" in
  --self-test) self_test ;;
  *) check_tree "${1:-$(dirname "${BASH_SOURCE[0]}")/../..}" ;;
esac
