#!/usr/bin/env -S python3 -B
"""Measures Spinwire beside UCX, libfabric, a bare ring and memcpy: sizes × windows × modes.

Runs the programs of bench/peers in random order, again and again until the repetitions are done or
the time is up. Writes curve.json, plots and index.html into the report's folder, prints the medians
and where Spinwire is behind its budgets.

  exchange  a request and a reply of the same size: Spinwire's messages and calls
  one_way   long requests with replies of 16 bytes
  write     one-sided WRITEs, until their completion
  read      one-sided READs
"""

import argparse
import collections
import json
import os
import random
import subprocess
import sys
import time

import budgets
import report
from results import Point, Results

EXCHANGE_SIZES = (0, 16, 32, 33, 48, 49, 64, 128, 256, 512, 1024, 2048, 4000, 4096, 8192, 16384,
                  32768, 65536)
ONE_WAY_SIZES = (65536, 262144, 1 << 20, 8 << 20)
ONE_SIDED_SIZES = (8, 64, 256, 1024, 4096, 16384, 65536, 262144, 1 << 20, 8 << 20)
WINDOWS = (1, 8, 32)
CHARTS = ("exchange", "one_way", "write", "read")
# A window of more bytes than this costs seconds to set up and shows nothing new.
MOST_WINDOW_BYTES = 128 << 20

# Which program a library is, and what it is asked for in an exchange.
EXCHANGE_LIBRARIES = {
    "ring": ("peer-ring", "messages"),
    "ucx": ("peer-ucx", "messages"),
    "libfabric": ("peer-libfabric", "messages"),
    "messages": ("peer-spinwire", "messages"),
    "calls": ("peer-spinwire", "calls"),
}
ONE_SIDED_LIBRARIES = {
    "ucx": "peer-ucx",
    "libfabric": "peer-libfabric",
    "spinwire": "peer-spinwire",
}

Job = collections.namedtuple("Job", "point library program arguments")


def make_job(point, library, program, what, reply_size):
    arguments = [f"--mode={point.mode}", f"--what={what}", f"--window={point.window}",
                 f"--batch={point.batch}", f"--size={point.size}", f"--rsize={reply_size}"]
    return Job(point, library, program, arguments)


def jobs_of(point):
    """Returns a job for each library that can be measured at the point."""
    if point.chart == "copy":
        return [make_job(point, "memcpy", "peer-memcpy", "messages", 0)]
    if point.chart in ("write", "read"):
        return [make_job(point, library, program, point.chart, 0)
                for library, program in ONE_SIDED_LIBRARIES.items()]
    reply_size = 16 if point.chart == "one_way" else point.size
    return [make_job(point, library, program, what, reply_size)
            for library, (program, what) in EXCHANGE_LIBRARIES.items()
            if not (point.chart == "one_way" and library == "ring")]


def plan_shapes():
    """Returns the 32-byte shapes of the design's budgets."""
    return [Point("exchange", "2p", 1, 32), Point("exchange", "2p", 32, 32),
            Point("exchange", "2p", 30, 32, 3), Point("exchange", "sym", 32, 32),
            Point("exchange", "1t", 32, 32), Point("exchange", "1t", 1, 32)]


def plan_curve(charts, modes, windows, sizes):
    """Returns the points of the curves, and the copies that they are compared with."""
    default = {"exchange": EXCHANGE_SIZES, "one_way": ONE_WAY_SIZES, "write": ONE_SIDED_SIZES,
               "read": ONE_SIDED_SIZES}
    points = []
    for chart in charts:
        for size in sizes or default[chart]:
            if size == 0 and chart != "exchange":
                continue
            for window in windows:
                if window > 1 and window * size > MOST_WINDOW_BYTES:
                    continue
                points += [Point(chart, mode, window, size) for mode in modes if mode != "sym"]
    if "sym" in modes and "exchange" in charts:
        points.append(Point("exchange", "sym", 32, 32))
    copies = {Point("copy", "1t", p.window, p.size) for p in points}
    return points + sorted(copies)


def tries_of(args):
    """Yields the seconds of each try: beside other programs a short run may measure nothing."""
    yield args.secs
    if args.accept_busy:
        yield from (8 * args.secs, 32 * args.secs)


def run_job(job, args, results):
    command = [os.path.join(args.bin, job.program), *job.arguments, "--warm-up=0.02", "--slice-ms=2"]
    try:
        for seconds in tries_of(args):
            done = subprocess.run([*command, f"--secs={seconds}"], capture_output=True, text=True, timeout=60 + 2 * seconds,
                                  check=False)
            if done.returncode != 0:
                raise ValueError(done.stderr.strip().splitlines()[-1] if done.stderr.strip()
                                 else f"exit code {done.returncode}: {done.stdout.strip()[:200]}")
            if json.loads(done.stdout)["placements"]:
                break
        results.add(job.point, job.library, done.stdout)
    except (ValueError, KeyError) as why:
        results.add_failure(job.point, job.library, str(why))
    except subprocess.TimeoutExpired:
        results.add_failure(job.point, job.library, "did not end within a minute")


def measure(points, args):
    """Runs all jobs, interleaved; returns the results."""
    results = Results(args.accept_busy)
    jobs = [job for point in points for job in jobs_of(point) if has_program(job, args)]
    begin = time.monotonic()
    end = begin + args.limit
    order = random.Random(args.seed)
    count = 0
    for repetition in range(args.reps):
        order.shuffle(jobs)
        for job in jobs:
            now = time.monotonic()
            if now > end:
                print(f"\nthe time limit ended the measurement: {count} of "
                      f"{args.reps * len(jobs)} runs")
                return results
            if sys.stderr.isatty():
                print(f"\rrepetition {repetition + 1} of {args.reps}, {count} of "
                      f"{args.reps * len(jobs)} runs, {now - begin:.0f} s ", end="",
                      file=sys.stderr)
            run_job(job, args, results)
            count += 1
    return results


def has_program(job, args):
    return os.access(os.path.join(args.bin, job.program), os.X_OK)


def describe_machine():
    model = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            model = next((line.split(":", 1)[1].strip() for line in info
                          if line.startswith("model name")), "")
    except OSError:
        pass
    return {"processor": model, "processors": len(os.sched_getaffinity(0)),
            "load": os.getloadavg(), "time": time.strftime("%Y-%m-%d %H:%M:%S")}


def words(text):
    return tuple(text.split(","))


def sizes_of(text):
    units = {"K": 1 << 10, "M": 1 << 20}
    return tuple(sorted(int(w[:-1]) * units[w[-1]] if w[-1] in units else int(w)
                        for w in text.split(",")))


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", default="build/bin", help="folder of the peer programs")
    parser.add_argument("--out", default="build/curve", help="folder of the report")
    parser.add_argument("--reps", type=int, default=2, help="repetitions of all runs")
    parser.add_argument("--limit", type=float, default=540, help="seconds that all runs may take")
    parser.add_argument("--secs", type=float, default=0.1, help="seconds of a run")
    parser.add_argument("--shapes", action="store_true", help="only the 32-byte shapes")
    parser.add_argument("--charts", type=words, default=CHARTS, help="some of: " + ",".join(CHARTS))
    parser.add_argument("--modes", type=words, default=("1t", "2p", "sym"), help="1t,2p,sym")
    parser.add_argument("--windows", type=lambda t: tuple(map(int, t.split(","))), default=WINDOWS,
                        help="1,8,32")
    parser.add_argument("--sizes", type=sizes_of, help="instead of each chart's own: 0,32,4K,1M")
    parser.add_argument("--seed", type=int, help="of the order of the runs")
    parser.add_argument("--accept-busy", action="store_true",
                        help="count runs that other programs have disturbed all the time")
    parser.add_argument("--read", metavar="FILE", help="report on a curve.json; measure nothing")
    args = parser.parse_args(argv)
    if not set(args.charts) <= set(CHARTS) or not set(args.modes) <= {"1t", "2p", "sym"}:
        parser.error("unknown chart or mode")
    return args


def read_results(path, accept_busy):
    """Returns the results that an earlier run has written."""
    results = Results(accept_busy)
    with open(path, encoding="utf-8") as file:
        for line in json.load(file)["runs"]:
            point = Point(line["chart"], line["mode"], line["window"], line["size"], line["batch"])
            results.add(point, line["library"], json.dumps(line))
    return results


def main(argv):
    args = parse(argv)
    if args.read:
        results = read_results(args.read, args.accept_busy)
    else:
        points = plan_shapes() if args.shapes else plan_curve(args.charts, args.modes, args.windows,
                                                              args.sizes)
        missing = {job.program for point in points for job in jobs_of(point)
                   if not has_program(job, args)}
        if missing:
            print(f"left out, not built: {', '.join(sorted(missing))}", file=sys.stderr)
        machine = describe_machine()
        results = measure(points, args)
        if not args.shapes:
            report.write_files(results, machine, args.out)
    report.print_table(results)
    report.print_verdicts(budgets.judge_ratios(results) + budgets.judge_curves(results) +
                          budgets.judge_copies(results))
    if not args.shapes:
        report.print_steps(budgets.find_steps(results))
    report.print_failures(results)
    return 1 if not results.points() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
