#!/usr/bin/awk -f
# Prepares a public header for Doxygen, without moving a line:
#   - The comment at the head becomes the description of the file.
#   - Functions that the compiler writes (= default, = delete) are left out.
#   - A member that is declared behind the braces of its type refers to the comment of that type.
#   - Functions that copy, move or test an object, and have no comment, get one.
function describe(text) {
  if (!documented && $0 !~ /\/\/\/</) $0 = "/** " text " */" $0
}
NR == 1 && /^\/\/ / { head = 1 }
head && !/^\/\// { head = 0 }
head { file = file substr($0, 3) "\n" }
match($0, /^  \} [a-z_]+;$/) { $0 = $0 "  ///< See its type." }
/= (default|delete);$/ { $0 = "" }
/^ +(SPINWIRE_API |\[\[nodiscard\]\] |constexpr )*explicit operator bool\(\)/ {
  describe("Whether this names something, and is not empty.")
}
match($0, /^ +(SPINWIRE_API )?([A-Z][A-Za-z]+& operator=|[A-Z][A-Za-z]+)\([A-Z][A-Za-z]+&&( [a-z]+)?\)/) {
  describe("Takes over what the other one has.")
}
match($0, /^ +(SPINWIRE_API )?([A-Z][A-Za-z]+& operator=|[A-Z][A-Za-z]+)\((const )?[A-Z][A-Za-z]+&? (other|from)\)/) {
  describe("Copies the other one.")
}
{ documented = /^ *\/\/\// || (documented && /^ *\/\//); print }
END { if (file != "") print "/** \\file\n" file "*/" }
