#!/usr/bin/env -S python3 -B
"""Checks that a report is whole: every section, table and picture is there, no reference leads nowhere.

check_report.py FOLDER      prints what is wrong; exit code 1: something is
"""

import json
import os
import re
import shutil
import sys
import xml.etree.ElementTree

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "curve"))

import page  # noqa: E402

# The beginnings of the titles of each section's pictures. Curves without a line are not drawn.
PICTURES = {
    "curves": ("exchange, one thread", "exchange, two processes", "write, one thread", "write, two processes"),
    "latencies": ("Latency between two processes", "Latency on one thread"),
    "stages": ("Instructions of one operation", "Instructions of a call over", "Instructions of a message over"),
    "sessions": ("Latency over sessions", "Rate over sessions"),
    "clients": ("Rate of a server", "Latency of the clients"),
    "factors": ("Rate without one of them",),
}
TABLES = {"machine", "latencies", "stages", "sessions", "factors", "simulation"}
# What may be left out on a machine without a program.
NEEDS = {"stages": "valgrind"}


def parts_of(text):
    """Returns the HTML of each section by its key."""
    parts = re.split(r'<h2 id="(\w+)">', text)
    return dict(zip(parts[1::2], parts[2::2]))


def faults_of_pictures(key, part):
    titles = []
    for drawing in re.findall(r"<svg .*?</svg>", part, re.S):
        try:
            root = xml.etree.ElementTree.fromstring(drawing)
        except xml.etree.ElementTree.ParseError as why:
            yield f"{key}: a picture is no XML: {why}"
            continue
        title = root.find("{*}title")
        titles.append(title.text if title is not None else "")
        if not root.findall("{*}polyline") + root.findall("{*}rect") + root.findall("{*}circle"):
            yield f"{key}: '{titles[-1]}' is empty"
        if re.search(r'"[^"]*\b(nan|inf|None)\b[^"]*"', drawing):
            yield f"{key}: '{titles[-1]}' has a coordinate that is no number"
    for beginning in PICTURES.get(key, ()):
        if not any(title.startswith(beginning) for title in titles):
            yield f"{key}: there is no picture '{beginning}'; there are: {titles}"


def faults_of_tables(key, part):
    tables = re.findall(r"<table>.*?</table>", part, re.S)
    if key in TABLES and not tables:
        yield f"{key}: there is no table"
    for table in tables:
        if "<td>" not in table:
            yield f"{key}: a table has no rows"
        if re.search(r"<td>(nan|inf|None)?</td>", table.replace("<td></td>", "")):
            yield f"{key}: a table has a value that is no number"


def faults_of(text):
    """Yields what is wrong with a page."""
    parts = parts_of(text)
    for key, title, _ in page.SECTIONS:
        part = parts.get(key)
        if part is None:
            yield f"{key}: there is no section '{title}'"
            continue
        left_out = re.search(r"Left out: (.*?)\.</p>", part)
        if left_out and "not built" not in left_out.group():
            if key not in NEEDS or shutil.which(NEEDS[key]):
                yield f"{key}: it is left out: {left_out.group(1)}"
            continue
        yield from faults_of_pictures(key, part)
        yield from faults_of_tables(key, part)
    places = set(re.findall(r'\bid="([^"]+)"', text))
    for target in re.findall(r'\bhref="([^"]*)"', text):
        if not target.startswith("#") or target[1:] not in places:
            yield f"the reference to {target} leads nowhere"
    for word in re.findall(r"<(?:script|img|link|iframe)\b|@import|\burl\([^#]", text):
        yield f"the page needs something from elsewhere: {word}"


def faults_of_summary(content):
    try:
        xml.etree.ElementTree.fromstring(page.summary(content))
    except (ValueError, xml.etree.ElementTree.ParseError) as why:
        yield f"bench/summary.svg could not be drawn: {why}"


def main(folder):
    with open(os.path.join(folder, "index.html"), encoding="utf-8") as file:
        faults = list(faults_of(file.read()))
    with open(os.path.join(folder, "report.json"), encoding="utf-8") as file:
        faults += faults_of_summary(json.load(file))
    for fault in faults:
        print(f"check_report: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
