#!/usr/bin/env -S python3 -B
"""Measures what the report shows, and writes build/report/index.html and report.json.

Needs no network and no more than ten minutes. What cannot be measured is left out, and the page says
why.
"""

import argparse
import json
import os
import sys
import time

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "curve"))

import page  # noqa: E402
import sections  # noqa: E402
from programs import Failed, Programs  # noqa: E402

# The curves take what is left of the time, up to this.
MOST_CURVE_SECONDS = 200


def measurements(args, programs, deadline):
    """Returns (key, function) of all sections, in the order in which they are measured."""
    extent = sections.QUICK if args.quick else sections.FULL

    def stages():
        recorded = sections.read_counts(args.counts)
        return {"recorded": recorded, "stages": sections.measure_stages(programs, extent)}

    def curves():
        seconds = min(MOST_CURVE_SECONDS, deadline - time.monotonic())
        results, missing = sections.measure_curves(args.bin, extent, seconds, args.accept_busy)
        return {"runs": results.lines, "failures": results.failures, "missing": missing,
                "accept_busy": args.accept_busy}

    return (("machine", lambda: sections.describe_machine(args.bin)),
            ("latencies", lambda: sections.measure_latencies(programs, extent)),
            ("stages", stages),
            ("sessions", lambda: sections.measure_sessions(programs, extent)),
            ("clients", lambda: sections.measure_clients(programs, extent)),
            ("factors", lambda: sections.measure_factors(programs, extent)),
            ("simulation", lambda: sections.simulate(programs, extent)),
            ("curves", curves))


def measure(args):
    """Returns the content of a report."""
    begin = time.monotonic()
    deadline = begin + args.limit
    content = {"time": time.strftime("%Y-%m-%d %H:%M:%S %Z"), "sections": {}, "notes": {}}
    for key, take in measurements(args, Programs(args.bin, deadline), deadline):
        if args.only and key not in args.only and key != "machine":
            content["notes"][key] = "not asked for"
            continue
        if time.monotonic() > deadline:
            content["notes"][key] = f"the time limit of {args.limit:.0f} s was over"
            continue
        print(f"report: {key} ...", file=sys.stderr)
        try:
            content["sections"][key] = take()
        except (Failed, OSError, ValueError) as why:
            content["notes"][key] = str(why)
            print(f"report: {key} is left out: {why}", file=sys.stderr)
    content["seconds"] = time.monotonic() - begin
    return content


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", default="build/bin", help="folder of the programs")
    parser.add_argument("--out", default="build/report", help="folder of the report")
    parser.add_argument("--counts", default="bench/instructions.txt", help="the recorded counts")
    parser.add_argument("--limit", type=float, default=420, help="end after about so many seconds")
    parser.add_argument("--quick", action="store_true",
                        help="measure next to nothing, to see that the report can be made")
    parser.add_argument("--only", type=lambda t: set(t.split(",")), help="some sections: machine,curves,...")
    parser.add_argument("--accept-busy", action="store_true",
                        help="count runs that other programs have disturbed all the time")
    parser.add_argument("--read", metavar="FILE", help="write the page of a report.json; measure nothing")
    parser.add_argument("--record", metavar="FILE", help="write the summary there")
    args = parser.parse_args(argv)
    unknown = (args.only or set()) - {key for key, _, _ in page.SECTIONS}
    if unknown:
        parser.error("unknown section: " + ", ".join(sorted(unknown)))
    return args


def write(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def main(argv):
    args = parse(argv)
    if args.read:
        with open(args.read, encoding="utf-8") as file:
            content = json.load(file)
    else:
        content = measure(args)
    if args.record:
        try:
            write(args.record, page.summary(content))
        except ValueError as why:
            print(f"report: {why}", file=sys.stderr)
            return 1
        print(f"written: {args.record}")
        return 0
    os.makedirs(args.out, exist_ok=True)
    if not args.read:
        write(os.path.join(args.out, "report.json"), json.dumps(content))
    write(os.path.join(args.out, "index.html"), page.page(content))
    print(f"written: {args.out}/index.html")
    return 0 if content["sections"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
