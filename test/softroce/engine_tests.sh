# shellcheck shell=bash disable=SC2154  # run.sh has made $work and set $bin
# The tests that run on an engine's device: which they are, which of them run in the machine, and the
# table of both devices.
#
# The set is what the test program declares in the folders below. Exceptions stand in
# engine_tests.txt, a pattern, a kind and a reason each:
#
#   left-out    not run on Soft-RoCE
#   softroce    run there only: the embedded device skips it
#
# A row that names no test, or none that an earlier row does not name, is an error. So is a row
# `softroce` whose test does run on the embedded device, and one `left-out` whose test says by itself
# that it is for the embedded device only.

engine_folders='agent|engine|rpc|scenarios'
engine_shares=3

# "SUITE.TEST" of each test in these folders, from what the program itself says of them.
declared_tests() {
  "$bin/spinwire-tests" --gtest_list_tests "--gtest_output=json:$work/declared.json" >/dev/null ||
    return
  awk -F'"' -v folders="^test/($engine_folders)/" '
    $2 == "name" { name = $4 }
    $2 == "testsuite" { suite = name }
    $2 == "file" && $4 ~ folders { print suite "." name }' "$work/declared.json"
}

# plan_engine_tests: writes "TEST|KIND|REASON" of each declared test into $work/plan. KIND is `run` or
# that of its row. Prints what is wrong with the rows.
plan_engine_tests() {
  local rows=${1:-test/softroce/engine_tests.txt}
  declared_tests >"$work/declared" || return
  awk -F' *[|] *' '
    function matches(name, pattern) {
      gsub(/[.]/, "[.]", pattern)
      gsub(/[*]/, ".*", pattern)
      return name ~ ("^" pattern "$")
    }
    FILENAME == ARGV[1] {
      if ($0 ~ /^#/ || NF == 0) next
      pattern[++rows] = $1; kind[rows] = $2; reason[rows] = $3
      if (NF != 3 || $3 == "" || $2 !~ /^(left-out|softroce)$/) print "row \047" $0 "\047 is not PATTERN | KIND | REASON"
      next
    }
    {
      for (i = 1; i <= rows && !matches($1, pattern[i]); ++i);
      if (i <= rows) ++used[i]
      print $1 "|" (i <= rows ? kind[i] : "run") "|" (i <= rows ? reason[i] : "") >plan
    }
    END { for (i = 1; i <= rows; ++i) if (!used[i]) print "row \047" pattern[i] "\047 names no test of its own" }
  ' plan="$work/plan" "$rows" "$work/declared"
}

# planned KIND...: their names as a filter.
planned() {
  awk -F'|' -v kinds=" $* " 'index(kinds, " " $2 " ") { printf "%s%s", separator, $1; separator = ":" }' \
    "$work/plan"
}

# Fails where the rows do not fit the tests. What they call Soft-RoCE's is skipped on the embedded
# device, which takes no time.
TheExceptionsFitTheTests() {
  local wrong ran
  wrong=$(plan_engine_tests)
  expect_equal 'rows of engine_tests.txt that are wrong' "$wrong" ''
  check 'there are hundreds of tests' test "$(wc -l <"$work/plan")" -gt 500
  ran=$(env -u SPINWIRE_TEST_DEVICE timeout 60 "$bin/spinwire-tests" --gtest_color=no \
    --gtest_filter="$(planned softroce)" | sed -n 's/^\[       OK \] \([^ ]*\).*/\1/p')
  expect_equal 'tests that are said to run on Soft-RoCE only, and run on softverbs' "$ran" ''
  # A row that names nothing, one that names what another does, and one without a reason.
  printf '%s\n' 'NoSuchSuite.* | left-out | gone' 'RdmaCm* | softroce | a reason' \
    'RdmaCm.* | softroce | twice' 'RpcCalls.* | left-out |' >"$dir/rows"
  cp "$work/plan" "$dir/plan"
  plan_engine_tests "$dir/rows" >"$dir/wrong"
  mv "$dir/plan" "$work/plan"
  expect_equal 'rows that are found wrong' "$(wc -l <"$dir/wrong")" 3
}

run_engine_share() {
  local share=$1 status=0
  timeout 480 "$vm" --timeout 400 --env SPINWIRE_TEST_DEVICE=rxe0 \
    --env SPINWIRE_TEST_ADDRESS=10.77.0.1 --env SPINWIRE_TEST_SLOWNESS=20 \
    --env GTEST_TOTAL_SHARDS=$engine_shares --env GTEST_SHARD_INDEX="$share" -- \
    "$bin/spinwire-tests" --gtest_color=no --gtest_filter="$(planned run softroce)" \
    >"$work/share-$share" 2>&1 || status=$?
  expect_equal 'exit status' $status 0
  expect_text output '[  PASSED  ]' "$work/share-$share"
  ((status == 0)) || grep -E -A5 '^\[  FAILED  \]|Failure' "$work/share-$share" | tail -n 40
}
engine_tests=()
for ((share = 0; share < engine_shares; ++share)); do
  engine_tests+=("RunsTheEnginesTests$((share + 1))")
  eval "RunsTheEnginesTests$((share + 1))() { run_engine_share $share; }"
done

# The table: each test, whether it runs on either device, and why not.
print_engine_table() {
  [[ -e "$work/plan" ]] && compgen -G "$work/share-*" >/dev/null || return 0
  cat "$work"/share-* | awk -F'|' '
    FILENAME != "-" { kind[$1] = $2; reason[$1] = $3; order[++count] = $1; next }
    /^\[ RUN      \] / { text = ""; split($0, word, " "); current = word[4]; next }
    /^\[       OK \] / { split($0, word, " "); result[word[4]] = "yes"; next }
    /^\[  SKIPPED \] .*\(/ { if (!(current in result)) { result[current] = "skipped"; reason[current] = text }; next }
    /^\[  FAILED  \] .*\(/ { result[current] = "FAILED"; next }
    /: Skipped$/ { text = ""; next }
    /^[^ \[]/ { if (text == "") text = $0 }
    END {
      format = "%-86s %-10s %-9s %s\n"
      printf format, "test", "softverbs", "Soft-RoCE", "reason if not"
      for (i = 1; i <= count; ++i) {
        name = order[i]
        soft = kind[name] == "softroce" ? "no" : "yes"
        real = kind[name] == "left-out" ? "no" : result[name]
        why = reason[name]
        sub(/^for softverbs only: /, "", why)
        if (real == "skipped") real = "no"
        if (real == "") real = "unknown"
        if (real == "yes" && name ~ /\/Window$/) why = "by registrations: windows are off"
        printf format, name, soft, real, why
        ++total[soft == "yes" ? (real == "yes" ? "both" : "softverbs") : "Soft-RoCE"]
        if (soft == "yes" && real == "no") ++because[why]
        if (real == "no" && why == "") print "no reason is given: " name
      }
      printf "\non both devices: %d, on softverbs only: %d, on Soft-RoCE only: %d\n", total["both"], total["softverbs"], total["Soft-RoCE"]
      print "shown on softverbs only, by reason:"
      for (why in because) printf "  %3d  %s\n", because[why], why | "sort -rn"
    }' "$work/plan" -
}
