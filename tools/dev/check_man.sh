#!/usr/bin/env bash
# Checks the manual pages. mandoc must find nothing to warn of, every program must have a page with
# exactly the options of its --help, references must lead to pages, and spinwire(7) must have every
# status.
#
#   tools/dev/check_man.sh FOLDER OF THE PAGES PROGRAM...
set -euo pipefail
pages=$1
shift
bad=0

complain() {
  echo "check_man: $*" >&2
  bad=1
}

render() { mandoc -T ascii -O width=200 "$1" | sed 's/.\x08//g'; }

# The options that --help lists, of the program and of its subcommands.
options_of_help() {
  local help subcommand
  help=$("$@" --help)
  printf '%s\n' -h --help
  sed -nE 's/^  (-[^ ]+).*/\1/p' <<<"$help" | tr , '\n'
  [[ $# -eq 1 ]] || return 0
  for subcommand in $(sed -nE '/^Subcommands:/,/^$/s/^  ([a-z-]+) .*/\1/p' <<<"$help"); do
    options_of_help "$@" "$subcommand"
  done
}

# The options in the tags of the page's lists.
options_of_page() {
  render "$1" | sed -nE '/^OPTIONS/,/^[A-NP-Z]/s/^     (-[^ ].*)/\1/p' | sed 's/  .*//' |
    grep -oE '(^|, )--?[a-zA-Z][a-zA-Z0-9-]*' | sed 's/, //'
}

mandoc -T lint -W warning "$pages"/*.[157] || complain 'mandoc warns of the pages above'

for program in "$@"; do
  name=$(basename "$program")
  page=$pages/$name.1
  if [[ ! -e "$page" ]]; then
    complain "$name has no page"
    continue
  fi
  diff -u --label "$name --help" <(options_of_help "$program" | sort -u) \
    --label "$name(1)" <(options_of_page "$page" | sort -u) >&2 ||
    complain "$name(1) and --help have different options"
done

while read -r name section; do
  [[ -e "$pages/$name.$section" ]] || complain "a page refers to $name($section), which does not exist"
done < <(sed -nE 's/^\.Xr ((spinwire|softverbs)[^ ]*) ([0-9]).*/\1 \3/p' "$pages"/*.[157] | sort -u)

described=$(render "$pages/spinwire.7" | sed -n '/^STATUSES/,/^[A-RT-Z]/s/^     \([a-z]\)/\1/p')
for status in $(sed -nE '/^enum class.*Status/,/^};/s/^ +([a-z_]+),.*/\1/p' include/spinwire/status.h); do
  grep -qwE "$status" <<<"$described" || complain "spinwire(7) does not say what to do on $status"
done
exit $bad
