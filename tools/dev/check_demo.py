#!/usr/bin/env python3
"""Runs `make demo` and checks what it shows: each part that README.md and tools/dev/demo.sh promise, with the
results of a program that has done its work. The exit status alone says little: a program that does nothing
succeeds. Then plants faults in the output and checks that each is found.

  tools/dev/check_demo.py [COMMAND...]      default: ${MAKE:-make} --no-print-directory demo
"""

import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROMISE = 'make demo    # installs what is missing, builds, and shows a tour, an echo, a measurement and more'

# The lines that a part must print. `%` stands for a number above zero, `*` for any text.
PARTS = {
    'tour': ['device: *', 'connected: messages up to % bytes', 'the server got "hello", the client "hello yourself"',
             '"number" came with 4711', '1048576 bytes in the place that the receiver named',
             'written, noticed, read back', '40 + 2 was 42, and is 7 now', 'the owner got it back: "lease"',
             'usable for % ms, then: lease_expired', 'cancelled; 0 messages are outstanding, blocked by: nothing',
             'closed; the books of both engines balance'],
    'echo': ['200000 round trips of 32 bytes in % s', 'min % us p50 % us p90 % us p99 % us p99.9 % us max % us'],
    'spinwire-perf': ['$ spinwire-perf --port 0 # listens on 127.0.0.1:%',
                      'rate send, 32 bytes, window 64, 2000000 operations in % s on *',
                      '% million/s, % Gbit/s',
                      'completion: min % ns p50 % ns p90 % ns p99 % ns p99.9 % ns max % ns'],
    'file-push': ['received % bytes in % s (% MB/s), xxh3-128 *', 'sent % bytes in % s (% MB/s), xxh3-128 *',
                  'cmp: the copy is equal to the file'],
    'kv-store': ['a server with % buckets of % slots in a process of its own, on 127.0.0.1:%',
                 '100000 operations in % s (% million/s), every value whole and none older than one seen before',
                 'put (call) % min % us p50 % us p90 % us p99 % us max % us',
                 'get (READ) % min % us p50 % us p90 % us p99 % us max % us'],
    'market-feed': ['50000 ticks in % s, % orders, all filled*',
                    'tick to order % % % % % %', 'order round trip % % % % % %'],
}


def pattern_of(line):
    """The expression for a line of PARTS. A space stands for any number of them."""
    wild = {'%': r'(?=[0-9.]*[1-9])[0-9.]+', '*': '.*', ' ': ' +'}
    return re.compile('^ *' + ''.join(wild.get(c, re.escape(c)) for c in line) + '$')


def numbers_in(lines, expression):
    """All groups of the expression in the part, as one list."""
    return [group for line in lines for found in [re.search(expression, line)] if found for group in found.groups()]


def complaints_of_lines(part, lines):
    """The lines that are missing. Two processes print them, so their order says nothing."""
    for expected in PARTS[part]:
        pattern = pattern_of(expected)
        if not any(pattern.match(line) for line in lines):
            yield f'{part}: it does not show "{expected}" (% is a number above zero, * any text)'


def complaints_of_sums(parts):
    """What is printed twice, or can be added up."""
    pushed = numbers_in(parts['file-push'], r'^(?:received|sent) ([0-9]+) bytes.*xxh3-128 ([0-9a-f]+)$')
    if len(pushed) != 4 or pushed[:2] != pushed[2:] or int(pushed[0]) < 20 << 20 or len(pushed[1]) != 32:
        yield f'file-push: bytes and hashes of both ends, of 20 MiB or more: {pushed}'
    operations = numbers_in(parts['kv-store'], r'^ *(?:put \(call\)|get \(READ\)) +([0-9]+) ')
    if sum(map(int, operations)) != 100000:
        yield f'kv-store: puts and gets are not 100000 in all: {operations}'
    orders = numbers_in(parts['market-feed'],
                        r's, ([0-9]+) orders, all filled(?:; ([0-9]+) more could not be placed)?$')
    if sum(int(n or 0) for n in orders) != 50000:
        yield f'market-feed: orders that were filled, and not placed, are not 50000 in all: {orders}'
    for part, unit in (('echo', 'us'), ('spinwire-perf', 'ns')):
        times = [float(t) for line in parts[part] if 'p99.9' in line
                 for t in re.findall(rf'(?:min|p50|p90|p99|p99\.9|max) +([0-9.]+) {unit}', line)]
        if len(times) != 6 or times != sorted(times):
            yield f'{part}: no six times that rise: {times}'


def complaints(output):
    """All that the output lacks."""
    lines = output.splitlines()
    parts = {}
    part = ''
    for line in lines:
        heading = re.match(r'== ([a-z-]+): .', line)
        part = heading[1] if heading else part
        parts.setdefault(part, []).append(line)
    if list(parts)[1:] != list(PARTS):
        return [f'parts: {", ".join(list(parts)[1:])}; expected: {", ".join(PARTS)}']
    found = [c for each in PARTS for c in complaints_of_lines(each, parts[each])] + list(complaints_of_sums(parts))
    if 'install-deps: ' not in output:
        found.append('it does not say whether it has installed what is missing')
    if not re.fullmatch(r'demo: all done in [0-9]+ s', lines[-1]):
        found.append(f'the last line is "{lines[-1]}"')
    return found


FAULTS = [
    ('a part is missing', r'(?s)\n== echo: .*?(?=\n== )', ''),
    ('the tour stops in the middle', r'(?s)\n6\. Atomics.*?(?=\n== )', ''),
    ('the tour reads another value', r'and is 7 now', 'and is 8 now'),
    ('echo does nothing', r'(?m)^200000 round trips', '0 round trips'),
    ('echo measures nothing', r'p50 [0-9.]+ us', 'p50 0.000 us'),
    ('percentiles that fall', r'(?m)^(  min [0-9.]+ us  p50 )[0-9.]+', r'\g<1>9999999'),
    ('no rate', r'(?m)^  [0-9.]+ million/s', '  0.000 million/s'),
    ('half of the operations', r'2000000 operations', '1000000 operations'),
    ('another hash', r'(sent .* xxh3-128 ).{4}', r'\g<1>0000'),
    ('fewer bytes', r'(?m)^received [0-9]+', 'received 17'),
    ('no comparison of the copy', r'(?m)^cmp: .*$', ''),
    ('a put that is not counted', r'(put \(call\) +)[0-9]+', r'\g<1>1'),
    ('an old value', r'every value whole', 'a value not whole'),
    ('an order that is not counted', r'[0-9]+ orders', '1 orders'),
    ('no end', r'\ndemo: all done.*', ''),
]


def check_faults(output):
    """The planted faults that complaints() does not find."""
    for name, expression, text in FAULTS:
        faulty, planted = re.subn(expression, text, output, count=1)
        if planted == 0:
            yield f'self-test: cannot plant "{name}"'
        elif not complaints(faulty):
            yield f'self-test: not found: {name}'


def main():
    command = sys.argv[1:] or [os.environ.get('MAKE', 'make'), '--no-print-directory', 'demo']
    run = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    print(run.stdout, end='', flush=True)
    if run.returncode != 0:
        sys.exit(f'check_demo: `{" ".join(command)}` ends with status {run.returncode}')
    bad = complaints(run.stdout)
    with open(os.path.join(ROOT, 'README.md'), encoding='utf-8') as readme:
        if PROMISE not in readme.read().splitlines():
            bad.append(f'README.md does not say "{PROMISE}": change what is checked, too')
    bad = bad or list(check_faults(run.stdout))
    for each in bad:
        print(f'check_demo: {each}', file=sys.stderr)
    if bad:
        sys.exit(1)
    print('check_demo: every part shows its results')


if __name__ == '__main__':
    main()
