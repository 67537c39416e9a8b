# shellcheck shell=bash
# Sourced by install_test.sh: builds each installed example by the command in its head and by CMake, from
# the installed tree alone, and runs it. Uses stage, root, cxx and die.
# shellcheck disable=SC2154

# The command of an example's head, for this compiler and without optimisation, which takes long.
command_of() {
  sed -nE "s|^//   g\+\+ (.*) -O2 (.*)|$cxx \1 -O0 \2|p" "$1"/*.cc
}

# build_example NAME: in copies of the installed folder. Prints what failed.
build_example() {
  local name=$1 work=$stage/examples/$1 command
  cp -r "$root/share/doc/spinwire/examples/$name" "$work"
  command=$(command_of "$work")
  [[ -n "$command" ]] || { echo "$name has no command in its head" && return 1; }
  (cd "$work" && eval "$command") >"$work/log" 2>&1 || { cat "$work/log" && return 1; }
  command -v cmake >/dev/null || return 0
  { cmake -S "$work" -B "$work/build" -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_BUILD_TYPE=Debug \
    -DCMAKE_PREFIX_PATH="$root" && cmake --build "$work/build"; } >"$work/log" 2>&1 ||
    { cat "$work/log" && return 1; }
  LD_LIBRARY_PATH=$root/lib "$work/build/$name" --help >/dev/null || [[ "$name" == sim-test ]]
}

# run_example NAME ARGUMENT...: the program that the command has built.
run_example() {
  LD_LIBRARY_PATH=$root/lib timeout 120 "$stage/examples/$1/$1" "${@:2}" >"$stage/examples/$1/output" 2>&1 || {
    cat "$stage/examples/$1/output" >&2
    die "the example $1 failed"
  }
}

# Three nodes, and a client that appends ten records.
run_replicated_log() {
  local nodes i pids=() code=0
  nodes=$(python3 -c 'import socket
s = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
print(",".join("127.0.0.1:%d" % one.getsockname()[1] for one in s))')
  for i in 0 1 2; do
    LD_LIBRARY_PATH=$root/lib timeout 120 "$stage/examples/replicated-log/replicated-log" --id $i --nodes "$nodes" \
      --file "$stage/log.$i" --new --records 8192 2>"$stage/log.$i.err" &
    pids+=($!)
  done
  (run_example log-client append --nodes "$nodes" --count 10) || code=$?
  kill "${pids[@]}" 2>/dev/null || true
  wait "${pids[@]}" || true
  [[ $code -eq 0 ]] || { cat "$stage"/log.*.err >&2 && exit 1; }
  grep -q '^10 records' "$stage/examples/log-client/output" || die 'the log did not take ten records'
}

test_examples() {
  local name running=()
  mkdir "$stage/examples"
  for name in "$root"/share/doc/spinwire/examples/*/; do
    name=$(basename "$name")
    build_example "$name" >"$stage/examples/$name.failed" 2>&1 &
    running+=("$!:$name")
    [[ ${#running[@]} -lt 2 ]] || await_example
  done
  while [[ ${#running[@]} -gt 0 ]]; do await_example; done
  run_example tour
  run_example echo both --count 100
  run_example market-feed --count 100
  run_example kv-store demo --count 100
  run_example file-push both "$stage/examples/echo/echo.cc"
  run_example gateway demo --count 100
  run_example sim-test 1
  run_replicated_log
  echo "  ok: examples: $(cd "$stage/examples" && echo ./*/ | sed 's|\./||g; s|/||g')"
}

# Waits for the oldest of `running`.
await_example() {
  local name=${running[0]#*:}
  wait "${running[0]%%:*}" || {
    cat "$stage/examples/$name.failed" >&2
    die "the example $name does not build from the installed tree"
  }
  running=("${running[@]:1}")
}
