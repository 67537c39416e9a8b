#!/usr/bin/env python3
"""Writes the manual pages: fills in the sources NAME.SECTION.in beside this file.

make_pages.py --bin FOLDER --out FOLDER --version VERSION --date DATE

A source is mdoc(7). Lines that consist of one of these are replaced:

  @OPTIONS PROGRAM [SUBCOMMAND]@  the options that PROGRAM SUBCOMMAND --help lists
  @SETTINGS@                      the settings of conf/default.toml, which a test compares with the
                                  library's table of keys
  @METRICS@                       the metrics that spinwire-stat --list names
  @GUIDE HEADING@                 that part of the guide, include/*.md, without its heading

@VERSION@ and @DATE@ are replaced anywhere.
"""
import argparse
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DESCRIPTION_COLUMN = 30  # of CLI11's help
# What a text is, where the option's name does not say it.
ARGUMENTS = {'conf': 'file', 'config': 'file', 'output': 'file', 'bind': 'address',
             'serve': 'address'}


def fail(text):
    sys.exit(f'make_pages: {text}')


def escape(text):
    """Text for roff, also where it begins a line."""
    text = text.replace('\\', '\\e')
    return '\\&' + text if text[:1] in ('.', "'") else text


def sentences(text):
    """The text with a line for each sentence, as roff wants it."""
    return re.sub(r'(?<![ (]e\.g)([.:?!])  *(?=[A-Z(\\])', '\\1\n', text).split('\n')


def sentence(text):
    """The text with a capital letter and a full stop. A name keeps its first letter."""
    if not text:
        return text
    first = text.split()[0]
    if re.fullmatch("[a-z][a-z']*", first):
        text = text[0].upper() + text[1:]
    return text if text[-1] in '.:!?' else text + '.'


# ---- options ----------------------------------------------------------------------------------


class Option:
    """A line of CLI11's help, taken apart."""

    def __init__(self, text, description):
        flags, _, rest = text.partition(' ')
        self.flags = flags.split(',')
        self.description = description
        rest, self.excludes = self.cut(rest, r'Excludes: (.*)$')
        rest, self.needs = self.cut(rest, r'Needs: ([^:]*)$')
        rest, required = self.cut(rest, r'(REQUIRED)$')
        self.required = bool(required)
        rest, self.times = self.cut(rest, r'x (\d+)$')
        rest, self.range = self.cut(rest, r':[A-Z]+ in \[([^]]*)\]')
        rest, self.default = self.cut(rest, r'=((?!\d+b)[^{}\[\]()]+)$')
        self.argument = self.name_argument(rest)

    @staticmethod
    def cut(text, pattern):
        """The text without what the pattern matches, and the pattern's group."""
        found = re.search(pattern, text)
        if not found:
            return text, ''
        return (text[:found.start()] + text[found.end():]).strip(), found.group(1)

    def name_argument(self, kind):
        if not kind:
            return ''
        choices = re.search(r'\{([^}]*)\}', kind)
        if choices:
            return ' | '.join(choices.group(1).split(','))
        if '[b, kb' in kind:
            return 'size'
        if '[UNIT]' in kind:
            return 'time'
        if kind.startswith('TEXT'):
            name = self.flags[-1].lstrip('-')
            return ARGUMENTS.get(name, name)
        return 'number'

    def mdoc(self):
        argument = f' Ar {self.argument}' if self.argument else ''
        if self.times:
            argument += ' ...'
        if self.flags[0].startswith('-'):
            flags = [('Fl ' + f[1:].replace('-', '\\-') if f.startswith('--') else 'Fl ' + f[1:])
                     for f in self.flags]
            yield '.It ' + ' , '.join(flags) + argument
        else:
            yield f'.It Ar {self.flags[0]}'
        if self.description:
            yield from map(escape, sentences(sentence(self.description)))
        if self.default:
            yield escape(f'The default is {self.default}.')
        if self.range:
            yield 'From {} to {}.'.format(*self.range.split(' - '))
        if self.times:
            yield f'Takes {self.times} values.'
        if self.required:
            yield 'Required.'
        if self.excludes:
            yield 'Not together with ' + escape(', '.join(self.excludes.split())) + '.'
        if self.needs:
            yield 'Needs ' + escape(', '.join(self.needs.split())) + '.'


def help_section(text, heading):
    """The (names, description) pairs below a heading of a help text."""
    lines = text.split('\n')
    if heading not in lines:
        return []
    pairs = []
    margin = ' ' * DESCRIPTION_COLUMN
    begin = lines.index(heading) + 1
    for line, following in zip(lines[begin:], lines[begin + 1:] + ['']):
        if not line.startswith('  '):
            break
        names, description = line[:DESCRIPTION_COLUMN], line[DESCRIPTION_COLUMN:]
        if line.startswith(margin):
            names, before = pairs.pop()
            description = before + '\n' + description
        elif not names.endswith(' ') or following.startswith(margin):
            names, description = line, ''  # long names; the description follows
        pairs.append((names.strip(), description.strip()))
    return pairs


def options(bin_folder, program, *subcommands):
    run = subprocess.run([bin_folder / program, *subcommands, '--help'], capture_output=True,
                         text=True, check=False)
    if run.returncode != 0:
        fail(f'{program} --help exits with {run.returncode}: {run.stderr}')
    found = help_section(run.stdout, 'Positionals:') + help_section(run.stdout, 'Options:')
    if not found:
        fail(f'{program} {" ".join(subcommands)} --help lists no options')
    yield '.Bl -tag -width Ds'
    for names, description in found:
        yield from Option(names, description).mdoc()
    yield '.El'


# ---- settings and metrics ---------------------------------------------------------------------


def settings():
    """Section headings, and each setting with its default, range and meaning."""
    text = (ROOT / 'conf' / 'default.toml').read_text()
    section = None
    for line in text.splitlines():
        heading = re.fullmatch(r'\[(\w+)\]', line)
        setting = re.fullmatch(r'(\w+) = ("[^"]*"|\S+) +# (.*); ([^;]*)', line)
        if heading:
            if section:
                yield '.El'
            section = heading.group(1)
            yield f'.Ss [{section}]'
            yield '.Bl -tag -width Ds'
        elif setting:
            name, value, meaning, values = setting.groups()
            quoted = value.replace('"', '\\(dq')
            yield f'.It Va {name} No = {quoted}'
            yield escape(sentence(meaning))
            yield escape(f'Values: {values}.')
        elif line and not line.startswith('#'):
            fail(f'conf/default.toml: unexpected line: {line}')
    yield '.El'


def metrics(bin_folder):
    run = subprocess.run([bin_folder / 'spinwire-stat', '--list'], capture_output=True, text=True,
                         check=False)
    if run.returncode != 0 or not run.stdout:
        fail(f'spinwire-stat --list fails: {run.stderr}')
    table = None
    for line in run.stdout.splitlines():
        at, name, kind, unit, meaning = line.split(None, 4)
        if at != table:
            if table:
                yield '.El'
            table = at
            yield f'.Ss Metrics of table {at}'
            yield '.Bl -tag -width Ds'
        yield f'.It Va {name}'
        yield escape(sentence(meaning))
        yield f'A {kind}' + (f', in {unit}.' if unit != '-' else '.')
    yield '.El'


# ---- the guide --------------------------------------------------------------------------------


def inline(text):
    """Markdown within a line: code in bold, emphasis in italics, links without their targets."""
    text = re.sub(r'\[([^]]*)\]\([^)]*\)', r'\1', text)
    parts = re.split(r'(`[^`]*`)', text)
    for i, part in enumerate(parts):
        if part.startswith('`'):
            parts[i] = '\\fB' + part[1:-1].replace('\\', '\\e').replace('-', '\\-') + '\\fR'
        else:
            part = part.replace('\\', '\\e')
            part = re.sub(r'\*\*([^*]+)\*\*', r'\\fB\1\\fR', part)
            parts[i] = re.sub(r'\*([^*]+)\*', r'\\fI\1\\fR', part)
    return ''.join(parts)


def prose(text):
    for line in sentences(inline(text)):
        yield '\\&' + line if line[:1] in ('.', "'") else line


def cells(row):
    return [cell.strip() for cell in row.strip().strip('|').split('|')]


def table(rows):
    """A table: the first column becomes tags; headings of later columns begin their texts."""
    heading = cells(rows[0])
    yield '.Bl -tag -width Ds'
    for row in rows[2:]:
        tag, *rest = cells(row)
        yield '.It ' + inline(tag)
        for i, cell in enumerate(rest):
            if not cell:
                continue
            if i > 0:
                yield '.br'
                cell = f'*{heading[i + 1].capitalize()}:* {cell}'
            else:
                cell = cell[0].upper() + cell[1:]
            yield from prose(cell if cell[-1] in '.!?' else cell + '.')
    yield '.El'


def blocks(lines):
    """Markdown's blocks, as pairs of a kind and lines."""
    block, kind = [], None
    fenced = False
    for line in [*lines, '']:
        if line.startswith('```'):
            if fenced:
                yield 'code', block
                block, kind = [], None
            elif block:
                yield kind, block
                block, kind = [], None
            fenced = not fenced
            continue
        if fenced:
            block.append(line)
            continue
        if line.startswith('|'):
            now = 'table'
        elif line.startswith('- '):
            now = 'list'
        elif line.startswith('### '):
            now = 'heading'
        elif not line:
            now = None
        else:
            now = kind if kind in ('list', 'text') else 'text'
        if now != kind or now == 'heading':
            if block:
                yield kind, block
            block, kind = [], now
        if line:
            block.append(line)


def guide(heading):
    found = None
    for page in sorted((ROOT / 'include').glob('*.md')):
        part = re.search(rf'^## {re.escape(heading)}\n(.*?)(?=^## |\Z)', page.read_text(),
                         re.S | re.M)
        if part and found:
            fail(f'two pages of include/ have the heading "## {heading}"')
        found = part or found
    if not found:
        fail(f'no page of include/ has the heading "## {heading}"')
    first = True
    for kind, lines in blocks(found.group(1).strip('\n').splitlines()):
        if kind == 'heading':
            yield '.Ss ' + inline(lines[0][4:])
            first = True
            continue
        if kind == 'text':
            if not first:
                yield '.Pp'
            yield from prose(' '.join(lines))
        elif kind == 'code':
            yield '.Bd -literal -offset indent'
            yield from map(escape, lines)
            yield '.Ed'
        elif kind == 'list':
            yield '.Bl -bullet'
            for item in '\n'.join(lines).removeprefix('- ').split('\n- '):
                yield '.It'
                yield from prose(' '.join(item.split()))
            yield '.El'
        else:
            yield from table(lines)
        first = False


# ---- pages ------------------------------------------------------------------------------------


def fill(source, args):
    for line in source.read_text().splitlines():
        directive = re.fullmatch(r'@(OPTIONS|SETTINGS|METRICS|GUIDE) ?(.*)@', line)
        if not directive:
            yield line.replace('@VERSION@', args.version).replace('@DATE@', args.date)
        elif directive.group(1) == 'OPTIONS':
            yield from options(args.bin, *directive.group(2).split())
        elif directive.group(1) == 'SETTINGS':
            yield from settings()
        elif directive.group(1) == 'METRICS':
            yield from metrics(args.bin)
        else:
            yield from guide(directive.group(2))


def main():
    parser = argparse.ArgumentParser(description='Writes the manual pages.')
    parser.add_argument('--bin', type=pathlib.Path, required=True, help='folder of the programs')
    parser.add_argument('--out', type=pathlib.Path, required=True, help='folder of the pages')
    parser.add_argument('--version', required=True, help='version of Spinwire')
    parser.add_argument('--date', required=True, help='date of that version')
    args = parser.parse_args()
    args.bin = args.bin.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    for source in sorted(HERE.glob('*.in')):
        lines = list(fill(source, args))
        (args.out / source.stem).write_text('\n'.join(lines) + '\n')


main()
