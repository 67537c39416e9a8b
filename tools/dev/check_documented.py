#!/usr/bin/env python3
"""Checks that each public type, enumerator, function, variable and member has a comment of its own in the headers,
and that the comment of a function that answers a Status or a Result lists its errors.

check_documented.py HEADER...
check_documented.py --enumerators HEADER...   lists the enumerators instead, as spinwire::Status::ok
check_documented.py --self-test               checks planted headers

A comment is `///` above the declaration, or `///<` behind it. Not asked for: the namespace spinwire::detail, what is
private, a friend, defaulted or deleted, and functions that only copy, move, destroy, compare or test an object.

A list of errors begins with "Errors:" or "Answers:", perhaps with words before the colon. "see the overload" stands for
the list of another function of that name. Functions named status() and ..._status() report how something else ended.
"""
import dataclasses
import os
import re
import sys
import tempfile

NO_COMMENT_NEEDED = re.compile(
    r'=\s*(default|delete)$|^friend\b|~\w+\(|\boperator(=|==|!=)\s*\(|\boperator bool\(|'
    r'(?<!\w)(?P<name>\w+)\((const )?(?P=name)&&?')
CAN_FAIL = re.compile(r'((static|virtual|inline|constexpr) )*(Status|Result) (?!(\w+_)?status\()')
ERRORS = re.compile(r'\b(Errors|Answers)\b[^.:]*:')


@dataclasses.dataclass
class Declaration:
    scope: str  # such as "spinwire::Connection"
    kind: str  # "type", "function", "enumerator", "variable"
    name: str
    text: str
    line: int  # of the declaration's beginning, from 0
    last: int
    is_alone: bool = True  # begins its line


def without_comments(text):
    """The text with blanks in place of comments, strings and preprocessor lines."""
    blank = lambda found: re.sub(r'[^\n]', ' ', found.group())
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"|\'[^\'\\\n]\'|^#(?:[^\n]*\\\n)*[^\n]*', blank, text,
                  flags=re.S | re.M)


def matching(code, at):
    """The place of the bracket that closes the one at `at`."""
    depth = 0
    for i in range(at, len(code)):
        depth += code[i] in '({'
        depth -= code[i] in ')}'
        if depth == 0:
            return i
    sys.exit('check_documented: a bracket is not closed')


def plain(text):
    """A declaration on one line, without attributes and without template arguments."""
    text = ' '.join(re.sub(r'\[\[.*?\]\]|SPINWIRE_API|alignas\(\d+\)', ' ', text, flags=re.S).split())
    while re.search(r'<[^<>()]*(\([^()]*\))?[^<>()]*>', text):
        text = re.sub(r'<[^<>()]*(\([^()]*\))?[^<>()]*>', '', text)
    return re.sub(r'^(template\b *)+', '', text)


class Header:
    def __init__(self, path):
        with open(path, encoding='utf-8') as file:
            text = file.read()
        self.path = path
        self.lines = text.split('\n')
        self.code = without_comments(text)
        self.found = []
        self.read(0, len(self.code), '', True)

    def line_of(self, at):
        return self.code.count('\n', 0, at)

    def add(self, scope, kind, name, begin, end):
        line = self.line_of(begin)
        is_alone = not self.code[self.code.rfind('\n', 0, begin) + 1:begin].strip()
        self.found.append(Declaration(scope, kind, name, plain(self.code[begin:end]), line,
                                      self.line_of(max(begin, end - 1)), is_alone))

    def read(self, at, end, scope, is_public):
        """Finds the declarations of a scope, and of those within it."""
        begin = None
        while at < end:
            char = self.code[at]
            if begin is None:
                label = re.match(r'(public|private|protected):', self.code[at:at + 12])
                if label:
                    is_public = label.group(1) == 'public'
                    at += label.end()
                    continue
                begin = None if char in ' \n;' else at
            if char == '(':
                at = matching(self.code, at)
            elif char == ';':
                if begin is not None:
                    self.declare(begin, at, scope, is_public)
                begin = None
            elif char == '{':
                close = matching(self.code, at)
                if self.enter(begin, at, close, scope, is_public):
                    begin = None
                at = close
            at += 1

    def enter(self, begin, brace, close, scope, is_public):
        """Whether the braces end a declaration; those of a value do not."""
        text = plain(self.code[begin:brace])
        inner = re.match(r'(namespace|class|struct|enum class|enum|union)\b ?([\w:]*)', text)
        if inner and '(' not in text and '=' not in text:
            kind, name = inner.groups()
            path = f'{scope}::{name}' if scope else name
            if kind != 'namespace' and is_public:
                self.add(scope, 'type', name, begin, brace)
            if kind.startswith('enum'):
                if is_public:
                    self.read_enumerators(brace + 1, close, path)
            elif is_public and 'detail' not in path.split('::'):
                self.read(brace + 1, close, path, kind != 'class')
            return True
        head = re.sub(r'\boperator\W+\(', 'operator(', text)
        if '(' in head and '=' not in head.split('(')[0]:
            if not re.search(r'\)[^()]*:.*[\w)]$', head) or self.code[brace + 1:close].strip() == '' or \
               not re.search(r'[:,] *\w+$', head):
                if is_public:
                    self.declare(begin, brace, scope, is_public)
                return True
        return False

    def declare(self, begin, end, scope, is_public):
        text = plain(self.code[begin:end])
        head = re.sub(r'\boperator\W+\(', 'operator(', text)
        if not is_public or text.startswith(('static_assert', 'namespace', 'class ', 'struct ')):
            return
        if text.startswith('using '):
            name = re.match(r'using (\w+) ?=', text)
            if name:
                self.add(scope, 'type', name.group(1), begin, end)
        elif '(' in head and '=' not in head.split('(')[0]:
            name = re.search(r'(?:\w+::)*(operator\W+|~?\w+) ?\(', text)
            if '::' in name.group().removeprefix('operator'):
                return  # a function that its class has declared
            name = name.group(1)
            self.add(scope, 'function', name, begin, end)
        elif not text.startswith(('friend ', 'template')) and ' ' in text:  # "} name;" has its type's comment
            name = re.search(r'(\w+)(\[\w*\])?$', re.split('[={]', text)[0].strip())
            self.add(scope, 'variable', name.group(1), begin, end)

    def read_enumerators(self, at, end, scope):
        for part in re.finditer(r'[^,]+', self.code[at:end]):
            name = re.search(r'\w+', part.group())
            if name:
                begin = at + part.start() + name.start()
                self.add(scope, 'enumerator', name.group(), begin, begin + len(name.group()))

    def is_described(self, declaration):
        above = self.lines[declaration.line - 1].strip()
        own = self.lines[declaration.line:declaration.last + 1]
        is_above = declaration.is_alone and above.startswith('///') and not above.startswith('///<')
        return is_above or any('///<' in line for line in own)

    def undescribed(self):
        for declaration in self.found:
            if 'detail' in declaration.scope.split('::') or NO_COMMENT_NEEDED.search(declaration.text):
                continue
            if not self.is_described(declaration):
                yield declaration

    def comment_of(self, declaration):
        """The comment above, on one line."""
        first = declaration.line
        while self.lines[first - 1].strip().startswith('///'):
            first -= 1
        return ' '.join(line.strip().removeprefix('///').strip() for line in self.lines[first:declaration.line])

    def without_errors(self):
        """The functions that can fail and list no errors."""
        comments = [(d, self.comment_of(d)) for d in self.found
                    if 'detail' not in d.scope.split('::') and CAN_FAIL.match(d.text)
                    and not NO_COMMENT_NEEDED.search(d.text)]
        listed = {(d.scope, d.name) for d, comment in comments if ERRORS.search(comment)}
        for declaration, comment in comments:
            refers = 'see the overload' in comment and (declaration.scope, declaration.name) in listed
            if declaration.kind == 'function' and not refers and not ERRORS.search(comment):
                yield declaration


def faults_of(path):
    """What is wrong with the comments of a header, a line each."""
    header = Header(path)
    for declaration in header.undescribed():
        yield (f'{path}:{declaration.line + 1}: {declaration.kind} {declaration.scope}::{declaration.name} '
               'has no comment')
    for declaration in header.without_errors():
        yield f'{path}:{declaration.line + 1}: {declaration.scope}::{declaration.name} lists no errors: write "Errors:"'


# The body of a class, and what is wrong with it.
PLANTED = [
    ('/// Opens. Errors: limit.\nResult<int> open();', ''),
    ('/// Opens.\n/// Errors, which change nothing:\n///   limit  many\n[[nodiscard]] static Result<int> open();', ''),
    ('/// Opens.\nResult<int> open();', 'lists no errors'),
    ('/// Errors count. It says no more: nothing.\nStatus open();', 'lists no errors'),
    ('Result<int> open();', 'has no comment'),
    ('/// Ends. Answers ok, or closed: it has ended.\nStatus end() noexcept { return end_(1); }', ''),
    ('/// Ends.\nStatus end() noexcept { return end_(1); }', 'lists no errors'),
    ('/// Ends. Errors: limit.\nStatus end(int);\n/// Ends; see the overload.\nStatus end();', ''),
    ('/// Stops. Errors: limit.\nStatus stop();\n/// Ends; see the overload.\nStatus end();', 'end lists no errors'),
    ('/// How it ended.\nStatus status() const;\n/// How it ended.\nStatus end_status() const;', ''),
    ('/// How many.\nint count() const;\n/// The last.\nStatus last = Status::ok;', ''),
    ('/// How many.\nint count() const;\nint last = 0;', 'has no comment'),
    (' private:\n  Status end();', ''),
]


def self_test():
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'planted.h')
        for body, wanted in PLANTED:
            with open(path, 'w', encoding='utf-8') as file:
                file.write(f'namespace spinwire {{\n/// A class.\nclass Planted {{\n public:\n{body}\n}};\n}}\n')
            found = '\n'.join(faults_of(path))
            if (wanted not in found) if wanted else found:
                failed = True
                print(f'check_documented: self-test: {body}\n  want "{wanted}", got "{found}"', file=sys.stderr)
    if not failed:
        print('check_documented: self-test passed')
    return failed


def main():
    if sys.argv[1:2] == ['--enumerators']:
        for path in sys.argv[2:]:
            for declaration in Header(path).found:
                if declaration.kind == 'enumerator' and 'detail' not in declaration.scope.split('::'):
                    print(f'{declaration.scope}::{declaration.name}')
        return False
    if sys.argv[1:2] == ['--self-test']:
        return self_test()
    bad = False
    for path in sys.argv[1:]:
        for fault in faults_of(path):
            bad = True
            print(fault, file=sys.stderr)
    return bad


if __name__ == '__main__':
    sys.exit(main())
