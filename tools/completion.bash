# Completes the command lines of Spinwire's tools in bash. The options are those of the program's --help,
# or of its subcommand's. softverbs-preload completes the command that it runs.

# Prints the option (or positional) of a help text that has one of these names, with its type.
_spinwire_entry() {
  awk -v name="$2" '/^  [^ ]/ { n = split($1, names, ","); for (i = 1; i <= n; i++)
    if (names[i] == name) { print $2; exit } }' <<<"$1"
}

# Prints the values that a type of a help text allows: TEXT:{a,b}.
_spinwire_choices() {
  [[ $1 != *'{'*'}'* ]] || tr , ' ' <<<"$(sed -E 's/.*\{([^}]*)\}.*/\1/' <<<"$1")"
}

_spinwire() {
  local program=$1 current=$2 previous=$3 help subcommands word type words
  help=$("$program" --help 2>/dev/null) || return
  subcommands=$(sed -nE '/^Subcommands:/,/^$/s/^  ([a-z-]+) .*/\1/p' <<<"$help")
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    if [[ -n $word ]] && grep -qx -- "$word" <<<"$subcommands"; then
      help=$("$program" "$word" --help 2>/dev/null) || return
      subcommands=
    fi
  done
  if [[ $previous == -* ]]; then
    type=$(_spinwire_entry "$help" "$previous")
    if [[ $type =~ ^(TEXT|U?INT|FLOAT) ]]; then # the option takes a value
      mapfile -t COMPREPLY < <(compgen -W "$(_spinwire_choices "$type")" -- "$current")
      return
    fi
  fi
  if [[ $current == -* ]]; then
    words=$(sed -nE 's/^  (-[^ ]+).*/\1/p' <<<"$help" | tr , '\n')
  else
    words=$subcommands
    while read -r type; do
      words+=" $(_spinwire_choices "$type")"
    done < <(sed -nE '/^Positionals:/,/^$/s/^  [a-z]+ (TEXT:[^ ]*).*/\1/p' <<<"$help")
  fi
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
}

# Its first argument is a command; that command's own completion has the others.
_softverbs_preload() {
  if ((COMP_CWORD > 1)); then
    ! declare -F _command_offset >/dev/null || _command_offset 1 # of the package bash-completion
  elif [[ $2 == -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W '-h --help' -- "$2")
  else
    mapfile -t COMPREPLY < <(compgen -c -- "$2" | sort -u)
  fi
}

complete -o bashdefault -o default -F _softverbs_preload softverbs-preload
complete -o bashdefault -o default -F _spinwire \
  spinwire-devices spinwire-doctor spinwire-keygen spinwire-new-project spinwire-perf spinwire-sim \
  spinwire-stat
