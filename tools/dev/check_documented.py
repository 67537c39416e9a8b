#!/usr/bin/env python3
"""Checks that each public type, enumerator, function, variable and member has a comment of its own in the headers.

check_documented.py HEADER...
check_documented.py --enumerators HEADER...   lists the enumerators instead, as spinwire::Status::ok

A comment is `///` above the declaration, or `///<` behind it. Not asked for: the namespace spinwire::detail, what is
private, a friend, defaulted or deleted, and functions that only copy, move, destroy, compare or test an object.
"""
import dataclasses
import re
import sys

NO_COMMENT_NEEDED = re.compile(
    r'=\s*(default|delete)$|^friend\b|~\w+\(|\boperator(=|==|!=)\s*\(|\boperator bool\(|'
    r'(?<!\w)(?P<name>\w+)\((const )?(?P=name)&&?')


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


def main():
    if sys.argv[1:2] == ['--enumerators']:
        for path in sys.argv[2:]:
            for declaration in Header(path).found:
                if declaration.kind == 'enumerator' and 'detail' not in declaration.scope.split('::'):
                    print(f'{declaration.scope}::{declaration.name}')
        return False
    bad = False
    for path in sys.argv[1:]:
        for declaration in Header(path).undescribed():
            bad = True
            print(f'{path}:{declaration.line + 1}: {declaration.kind} {declaration.scope}::{declaration.name} '
                  'has no comment', file=sys.stderr)
    return bad


if __name__ == '__main__':
    sys.exit(main())
