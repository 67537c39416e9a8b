#!/usr/bin/env python3
"""Checks that each relative link of the Markdown pages below a folder leads to a file.

check_links.py FOLDER...      prints each dead link; exit code 1: there is one, or there is no link at all
"""
import pathlib
import re
import sys

FENCED = re.compile(r'^```.*?^```', re.S | re.M)
LINK = re.compile(r'\]\(([^)#\s]+)(?:#[^)\s]*)?\)')


def dead_links(page):
    text = FENCED.sub('', page.read_text(encoding='utf-8'))
    targets = [target for target in LINK.findall(text) if '://' not in target]
    return len(targets), [target for target in targets if not (page.parent / target).exists()]


def main():
    links = 0
    bad = False
    for folder in sys.argv[1:]:
        for page in sorted(pathlib.Path(folder).rglob('*.md')):
            count, dead = dead_links(page)
            links += count
            for target in dead:
                bad = True
                print(f'{page}: the link to {target} leads nowhere', file=sys.stderr)
    if links == 0:
        sys.exit('check_links: no page has a link')
    return bad


if __name__ == '__main__':
    sys.exit(main())
