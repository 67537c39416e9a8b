# shellcheck shell=bash disable=SC2154  # softroce_test.sh has made $work and set $bin
# The tests that run on an engine's device: their names, those that run in the machine, and a table of
# both devices.
#
# The set is what the test program declares in the folders below. Exceptions are in engine_tests.txt,
# each a pattern, a kind and a reason:
#
#   left-out    not run on Soft-RoCE
#   softroce    run on Soft-RoCE only; the embedded device skips the test
#
# A row is an error if it names no test, or only tests that earlier rows name. A `softroce` row is also
# an error if its test runs on the embedded device.

engine_folders='agent|attack|engine|rpc|scenarios'
engine_shares=2
engine_test_limit=150 # seconds for one test; the average is one second

# Prints "SUITE.TEST" of each test that the program declares in these folders.
declared_tests() {
  "$bin/spinwire-tests" --gtest_list_tests "--gtest_output=json:$work/declared.json" >/dev/null ||
    return
  sed 's|\\/|/|g' "$work/declared.json" | awk -F'"' -v folders="^test/($engine_folders)/" '
    $2 == "name" { name = $4 }
    $2 == "testsuite" { suite = name }
    $2 == "file" && $4 ~ folders { print suite "." name }'
}

# plan_engine_tests [ROWS]: prints "TEST|KIND|REASON" of each declared test. KIND is `run` or that of its
# row. Errors in the rows go to standard error.
plan_engine_tests() {
  declared_tests >"$work/declared" || return
  awk -F' *[|] *' '
    function matches(name, pattern) {
      gsub(/[.]/, "[.]", pattern)
      gsub(/[*]/, ".*", pattern)
      return name ~ ("^" pattern "$")
    }
    FILENAME == ARGV[1] {
      if ($0 ~ /^#/ || NF == 0) next
      if (NF != 3 || $3 == "" || $2 !~ /^(left-out|softroce)$/) {
        print "row \047" $0 "\047 is not PATTERN | KIND | REASON" >"/dev/stderr"
        next
      }
      pattern[++rows] = $1; kind[rows] = $2; reason[rows] = $3
      next
    }
    {
      for (i = 1; i <= rows && !matches($1, pattern[i]); ++i);
      ++used[i]
      print $1 "|" (i <= rows ? kind[i] : "run") "|" (i <= rows ? reason[i] : "")
    }
    END {
      for (i = 1; i <= rows; ++i)
        if (!used[i]) print "row \047" pattern[i] "\047 names no test of its own" >"/dev/stderr"
    }' "${1:-test/softroce/engine_tests.txt}" "$work/declared"
}

# planned KIND...: prints the names of these tests.
planned() {
  awk -F'|' -v kinds=" $* " 'index(kinds, " " $2 " ") { print $1 }' "$work/plan"
}

# Fails if the rows do not fit the tests. Tests of kind `softroce` are run on the embedded device, which
# must skip them.
TheExceptionsFitTheTests() {
  local ran
  plan_engine_tests >/dev/null 2>"$dir/wrong"
  expect_equal 'rows of engine_tests.txt that are wrong' "$(cat "$dir/wrong")" ''
  check 'there are hundreds of tests' test "$(wc -l <"$work/plan")" -gt 500
  ran=$(env -u SPINWIRE_TEST_DEVICE timeout 60 "$bin/spinwire-tests" --gtest_color=no \
    --gtest_filter="$(planned softroce | paste -sd:)" | sed -n 's/^\[       OK \] \([^ ]*\).*/\1/p')
  expect_equal 'tests that are said to run on Soft-RoCE only, and run on softverbs' "$ran" ''
  # A row without a test, a row that repeats another's tests, and a row without a reason.
  printf '%s\n' 'NoSuchSuite.* | left-out | gone' 'RdmaCm* | softroce | a reason' \
    'RdmaCm.* | softroce | twice' 'RpcCalls.* | left-out |' >"$dir/rows"
  plan_engine_tests "$dir/rows" >/dev/null 2>"$dir/wrong"
  expect_equal 'rows that are found wrong' "$(wc -l <"$dir/wrong")" 3
}

# Tests that hang, die or do not exist fail alone; the others run.
AHangingTestFailsAlone() {
  local status=0 name
  cat >"$dir/program" <<'END'
#!/bin/bash
for name in $(tr : ' ' <<<"${2#--gtest_filter=}"); do
  [[ "$name" != S.Gone ]] || continue
  echo "[ RUN      ] $name"
  [[ "$name" != S.Hangs ]] || sleep 1000
  [[ "$name" != S.Dies ]] || kill -SEGV $$
  echo "[       OK ] $name (0 ms)"
done
END
  chmod +x "$dir/program"
  printf '%s\n' S.First S.Hangs S.Gone S.Second S.Dies S.Last >"$dir/list"
  timeout 60 test/softroce/run_each.sh 2 "$dir/program" "$dir/list" >"$dir/out" 2>&1 || status=$?
  expect_equal 'exit status' $status 1
  for name in First Second Last; do expect_text output "[       OK ] S.$name" "$dir/out"; done
  expect_text output 'S.Hangs takes longer than 2 s' "$dir/out"
  expect_text output 'S.Dies ends the program with status 139' "$dir/out"
  expect_text output 'S.Gone does not exist' "$dir/out"
  expect_text output 'of these tests 3 failed' "$dir/out"
}

# Of three tests that fail at first, the two with a failed attack stay failed.
AFailedAttackIsNotMended() {
  (
    # shellcheck disable=SC2034
    work=$dir/work passed_tests=0 failed_tests=() repeated_tests=()
    mkdir "$work"
    fails_once() {
      echo "[  FAILED  ] $1 (5 ms)" >"$dir/out"
      [[ "$dir" == *-again ]]
    }
    WithNone() { fails_once EngineAttack.Runs; }
    WithAnAttack() { fails_once Over/AttackByJoin.Opens/Datagram; }
    WithAHostilePeer() { fails_once HostilePeer.Overruns; }
    run_tests 1 WithNone WithAnAttack WithAHostilePeer
    echo "passed: $passed_tests, failed: ${failed_tests[*]}"
  ) >"$dir/out"
  expect_text output 'passed: 1, failed: Softroce.WithAnAttack Softroce.WithAHostilePeer' "$dir/out"
  expect_text output 'succeeded once: Over/AttackByJoin.Opens/Datagram' "$dir/out"
}

# run_engine_tests SHARE: runs every so-many-th test.
run_engine_tests() {
  local share=$1 status=0
  planned run softroce | awk -v n="$engine_shares" -v share="$share" 'NR % n == share' >"$dir/list"
  timeout 1300 "$vm" --timeout 1200 --env SPINWIRE_TEST_DEVICE=rxe0 \
    --env SPINWIRE_TEST_ADDRESS=10.77.0.1 --env SPINWIRE_TEST_SLOWNESS=20 -- \
    test/softroce/run_each.sh "$engine_test_limit" "$bin/spinwire-tests" "$dir/list" \
    >"$dir/out" 2>&1 || status=$?
  expect_equal 'exit status' $status 0
  expect_text output 'of these tests 0 failed' "$dir/out"
  ((status == 0)) || show_failed_tests "$dir/out"
}
engine_tests=(TheExceptionsFitTheTests AHangingTestFailsAlone AFailedAttackIsNotMended TheThreatModelIsCompared)
for ((share = 0; share < engine_shares; ++share)); do
  engine_tests+=("RunsTheEnginesTests$((share + 1))")
  eval "RunsTheEnginesTests$((share + 1))() { run_engine_tests $share; }"
done

# without_results LOG LIST: the tests in the list of which the log has no result; all if one failed.
without_results() {
  awk '
    FILENAME == ARGV[1] {
      if (/^\[(       OK |  SKIPPED )\] [^ ]+ \(/) { split($0, word, "] "); sub(/ .*/, "", word[2]); ended[word[2]] = 1 }
      if (/^\[  FAILED  \] /) bad = 1
      next
    }
    bad || !($1 in ended)' "$1" "$2"
}

# All of them on the embedded device, for the table: which run there and which are skipped. The logs of
# `make test` and of the slow tests tell the same if they are of this program; the others run.
RunsTheSameOnSoftverbs() {
  local status=0 log
  planned run softroce >"$dir/list"
  for log in "${bin%/bin}"/log/{tests,slow-tests}.log; do
    [[ ! "$log" -nt "$bin/spinwire-tests" ]] || cat "$log"
  done >"$dir/log"
  echo >>"$dir/log"
  without_results "$dir/log" "$dir/list" >"$dir/others"
  cp "$dir/log" "$dir/out"
  echo "$(wc -l <"$dir/others") of $(wc -l <"$dir/list") run now, of the others there are results in ${bin%/bin}/log"
  [[ -s "$dir/others" ]] || return 0
  env -u SPINWIRE_TEST_DEVICE test/softroce/run_each.sh 600 "$bin/spinwire-tests" "$dir/others" \
    >"$dir/run" 2>&1 || status=$?
  cat "$dir/run" >>"$dir/out"
  expect_equal 'exit status' $status 0
  expect_text output 'of these tests 0 failed' "$dir/run"
  ((status == 0)) || show_failed_tests "$dir/run"
}
engine_tests+=(RunsTheSameOnSoftverbs)

# misplaced_rows MODEL TABLE: rows of "On every device" in the threat model that end in "(softverbs)" though one of
# their tests ran on Soft-RoCE, and rows without that whose tests in these folders all did not.
misplaced_rows() {
  awk '
    function pattern_of(name) {
      gsub(/…/, "*", name)
      if (name !~ /[.]/) name = name ".*"
      gsub(/[.]/, "[.]", name)
      gsub(/[*]/, ".*", name)
      return "^([^/ ]+/)?" name "(/[^ ]*)?$"
    }
    FILENAME == ARGV[1] {
      if ($2 ~ /^(yes|elsewhere|no)$/ && $3 ~ /^(yes|no|FAILED)$/) ran[$1] = $3
      next
    }
    /^### / { wanted = /On every device/ }
    !wanted || !/^\| / { next }
    {
      marked = /[(]softverbs[)] \|$/
      yes = no = 0
      rest = substr($0, index($0, " | ") + 3)
      while (match(rest, /`[^`]+`/)) {
        name = substr(rest, RSTART + 1, RLENGTH - 2)
        rest = substr(rest, RSTART + RLENGTH)
        if (name ~ /^Softroce[.]/) ++yes
        if (name !~ /^([A-Z]|[*]\/)/) continue
        wanted_name = pattern_of(name)
        for (each in ran) if (each ~ wanted_name) ran[each] == "no" ? ++no : ++yes
      }
      if (marked ? yes || !no : no && !yes) print "  " substr($0, 1, 100)
    }' "$2" "$1"
}

# Compares the threat model with the table, if all of it ran.
check_threat_model() {
  local rows
  grep -q '^test  *softverbs' "$work/table" || return 0
  rows=$(misplaced_rows src/control/README.md "$work/table")
  [[ -n "$rows" ]] || return 0
  echo "rows of src/control/README.md that are wrong about '(softverbs)':"
  echo "$rows"
  failed_tests+=(Softroce.TheThreatModel)
}

# Runs neither device.
TheThreatModelIsCompared() {
  printf '%s\n' 'By/A.One/0 yes yes' 'A.Two yes no a reason' 'B.One elsewhere no a reason' >"$dir/table"
  printf '%s\n' '### On every device' '| promise | test |' '| right | `A.O…`, `B` |' '| right | `B`, `Other` (softverbs) |' \
    '| unmarked | `A.Two` |' '| marked | `A`, `B` (softverbs) |' '| of no device | `Other` |' '### By device' '| x | `B` |' \
    >"$dir/model"
  misplaced_rows "$dir/model" "$dir/table" >"$dir/wrong"
  expect_equal 'wrong rows' "$(cut -d' ' -f4 "$dir/wrong" | paste -sd,)" unmarked,marked
}

# The table: each test, whether it ran on either device, and why not. Tests that are left out run on
# softverbs in other stages.
print_engine_table() {
  compgen -G "$work/RunsTheEnginesTests*/out" >/dev/null || return 0
  [[ -e "$work/RunsTheSameOnSoftverbs/out" ]] || return 0
  cat "$work"/RunsTheEnginesTests*/out | awk -F'|' '
    FILENAME == ARGV[1] { kind[$1] = $2; reason[$1] = $3; order[++count] = $1; next }
    FNR == 1 { ++device }  # 1: softverbs, 2: Soft-RoCE
    /^\[ RUN      \] / { text = ""; next }
    /^\[       OK \] / { split($0, word, " "); result[device, word[4]] = "yes"; next }
    /^\[  SKIPPED \] .*\(/ {
      split($0, word, " ")
      # A test may run suites again in another way, in which some are skipped.
      if (result[device, word[4]] == "yes") next
      result[device, word[4]] = "no"
      skipped[word[4]] = text
      next
    }
    /^\[  FAILED  \] .*\(/ { split($0, word, "[], ]+"); result[device, word[3]] = "FAILED"; next }
    /: Skipped$/ { text = ""; next }
    /^[^ \[]/ { if (text == "") text = $0 }
    function ran(which, name) {
      if (kind[name] == "left-out") return which == 1 ? "elsewhere" : "no"
      return (which, name) in result ? result[which, name] : "not run"
    }
    END {
      format = "%-86s %-10s %-9s %s\n"
      printf format, "test", "softverbs", "Soft-RoCE", "reason if not"
      for (i = 1; i <= count; ++i) {
        name = order[i]
        soft = ran(1, name)
        real = ran(2, name)
        why = name in skipped ? skipped[name] : reason[name]
        sub(/^for softverbs only: /, "", why)
        if (real == "yes" && name ~ /\/Window$/) why = "by registrations: windows are off"
        printf format, name, soft, real, why
        on_soft = soft == "yes" || soft == "elsewhere"
        ++total[on_soft && real == "yes" ? "both" : on_soft ? "softverbs" : real == "yes" ? "Soft-RoCE" : "neither"]
        if (on_soft && real == "no") ++because[why]
      }
      printf "\non both devices: %d, on softverbs only: %d, on Soft-RoCE only: %d, on neither: %d\n",
        total["both"], total["softverbs"], total["Soft-RoCE"], total["neither"]
      print "on softverbs only, by reason:"
      for (why in because) printf "  %3d  %s\n", because[why], why | "sort -rn"
    }' "$work/plan" "$work/RunsTheSameOnSoftverbs/out" -
  return 0
}
