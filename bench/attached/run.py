#!/usr/bin/env -S python3 -B
"""Measures what an attached spinwire-stat costs the engines that it shows.

A slice is a run of spinwire-perf at full rate, both ends in one thread on one processor. Metrics and
flight recorder are on, as always. Every second slice has a spinwire-stat attached, on another
processor, which draws its live view ten times a second. The slices of a pair follow each other, in
random order. Prints the medians, and the ratio of rates with and without with its confidence interval;
fails if that shows that the tool costs more than --limit.

Then counts instructions by callgrind, which do not depend on load: a reader must add none.

--record FILE writes the figures with the commit, the machine and the command, if they are known to the
limit, the instructions were counted and the tree has no changes.
"""

import argparse
import datetime
import fcntl
import json
import os
import platform
import pty
import random
import re
import select
import shutil
import statistics
import struct
import subprocess
import sys
import termios
import threading

CONFIDENCE = 0.95
RESAMPLES = 4000
SCREENS_PER_SECOND = 10
FEWEST_SCREENS = 3  # while instructions are counted
LEAST_SHARE = 0.5  # of the screens that a slice should have; else the machine is busy
FEWEST_PAIRS = 10  # a verdict from fewer means nothing
FEWEST_RECORDED = 30  # slices
TERMINAL = (50, 160)  # lines, columns
SCREEN = b"\x1b[H"  # the cursor goes home before each one


# ---- statistics -------------------------------------------------------------------------------


def ratio_of_medians(pairs):
    """Returns the median rate with the tool, divided by that without."""
    return statistics.median(p[1] for p in pairs) / statistics.median(p[0] for p in pairs)


def confidence_interval(pairs, seed=1):
    """Returns the interval of the ratio of medians, by resampling pairs of slices."""
    draw = random.Random(seed)
    ratios = sorted(ratio_of_medians(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    cut = int(len(ratios) * (1 - CONFIDENCE) / 2)
    return ratios[cut], ratios[-1 - cut]


def verdict(pairs, limit):
    """Returns the text of the result, whether the limit is surely exceeded, and whether that is
    known."""
    if len(pairs) < FEWEST_PAIRS:
        return (f"ratio {ratio_of_medians(pairs):.4f}: not known to {limit:.1%}; take {FEWEST_PAIRS} "
                "slices or more"), False, False
    low, high = confidence_interval(pairs)
    text = (f"ratio {ratio_of_medians(pairs):.4f}, with {CONFIDENCE:.0%} confidence "
            f"{low:.4f} to {high:.4f}")
    if low >= 1 - limit:
        return text + f": within {limit:.1%}", False, True
    if high < 1 - limit:
        return text + f": the tool costs more than {limit:.1%}", True, True
    return text + f": not known to {limit:.1%}; take more slices on a machine that is idle", False, False


def count_screens(rest, read):
    """Returns the screens in what was read, and its end, with which the next one may begin."""
    text = rest + read
    return text.count(SCREEN), text[-(len(SCREEN) - 1):]


# ---- the tool ---------------------------------------------------------------------------------


class Attached:
    """A spinwire-stat in a terminal of its own that shows a process."""

    def __init__(self, args, pid):
        self._pid, self._args = pid, args
        self._stop = threading.Event()
        self.screens = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        # The process may not have opened its engine yet: then the tool ends, and is started again.
        while not self._stop.is_set():
            self._attach()
            self._stop.wait(0.02)

    def _attach(self):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", *TERMINAL, 0, 0))
        rest = b""
        command = pinned(self._args.tool_cpu, [program(self._args, "spinwire-stat"),
                                               str(self._pid), "--interval",
                                               str(1 / SCREENS_PER_SECOND)])
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL,
                              env={**os.environ, "TERM": "xterm"}) as tool:
            os.close(theirs)
            try:
                while not self._stop.is_set() and tool.poll() is None:
                    if select.select([ours], [], [], 0.05)[0]:
                        shown, rest = count_screens(rest, os.read(ours, 1 << 16))
                        self.screens += shown
            except OSError:
                pass  # the tool has ended
            finally:
                tool.kill()
        os.close(ours)

    def detach(self):
        self._stop.set()
        self._thread.join()


def run_attached(args, command, with_tool):
    """Runs a command; returns its output, its errors, and the screens that were drawn meanwhile. The
    output is empty if it failed."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as run:
        tool = Attached(args, run.pid) if with_tool else None
        try:
            text, errors = run.communicate()
        finally:
            if tool:
                tool.detach()
    return text if run.returncode == 0 else "", errors, tool.screens if tool else 0


def program(args, name):
    return os.path.join(args.bin, name)


def check_programs(args):
    """Ends unless all programs are there: without spinwire-stat, nothing would be attached."""
    names = ["spinwire-perf", "spinwire-stat"] if args.slices > 0 else ["spinwire-stat"]
    if args.operations > 0:
        names.append("count-message-echo")
        if not shutil.which("valgrind"):
            raise SystemExit("valgrind is not installed: apt-get install valgrind, or count nothing "
                             "with --operations=0")
    for name in names:
        if not os.access(program(args, name), os.X_OK):
            raise SystemExit(f"{program(args, name)} is missing: make bench-attached, or give --bin")


def pinned(cpu, command):
    return ["taskset", "-c", str(cpu), *command] if cpu is not None else command


# ---- rates ------------------------------------------------------------------------------------


def check_screens(screens, seconds):
    """Ends if the tool has drawn too seldom: then the slice does not show what it costs."""
    wanted = SCREENS_PER_SECOND * seconds
    if screens < LEAST_SHARE * wanted:
        raise SystemExit(f"spinwire-stat has drawn {screens} screens of {wanted:.0f} in a slice: the "
                         "processor of the tool is busy")


def take_slice(args, operations, with_tool):
    """Runs spinwire-perf once; returns its rate in million operations a second."""
    command = pinned(args.cpu, [program(args, "spinwire-perf"), "rate", "--one-thread", "--json",
                                "--size", str(args.size), "--count", str(operations)])
    text, errors, screens = run_attached(args, command, with_tool)
    if not text:
        raise SystemExit("spinwire-perf failed:\n" + errors)
    rate = json.loads(text)["rate_mops"]
    if with_tool:
        check_screens(screens, operations / (rate * 1e6))
    return rate


def measure_rates(args):
    """Returns pairs of rates: without the tool, and with it."""
    operations = 200000
    operations = max(int(take_slice(args, operations, False) * 1e6 * args.secs), operations)
    order = random.Random(args.seed)
    pairs = []
    for number in range(args.slices):
        pair = [0.0, 0.0]
        for with_tool in order.sample((False, True), 2):
            pair[with_tool] = take_slice(args, operations, with_tool)
        pairs.append(pair)
        if sys.stderr.isatty():
            print(f"\rslice {number + 1} of {args.slices} ", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return pairs


# ---- instructions -----------------------------------------------------------------------------


def count_instructions(args, with_tool):
    """Returns the instructions of the engines' loop, and the screens that were drawn meanwhile."""
    command = pinned(args.cpu, [
        "valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", "--collect-atstart=no",
        "--toggle-collect=*spinwire::bench::counted*",
        program(args, "count-message-echo"), "32", str(args.operations)])
    text, errors, screens = run_attached(args, command, with_tool)
    lines = [line for line in errors.splitlines() if "Collected : " in line]
    if not lines:
        raise SystemExit(f"callgrind failed:\n{text}{errors}")
    return int(lines[-1].split()[-1]), screens


def compare_instructions(args):
    """Returns whether a reader adds none, and the text of the result."""
    without, _ = count_instructions(args, False)
    with_tool, screens = count_instructions(args, True)
    if screens < FEWEST_SCREENS:
        raise SystemExit(f"spinwire-stat has shown {screens} screens; make --operations more")
    return with_tool == without, (
        f"instructions of {args.operations} round trips: {without} without the tool, {with_tool} "
        f"with it ({screens} screens): {with_tool - without:+d}")


# ---- the record -------------------------------------------------------------------------------


def machine():
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        model = re.search(r"^model name\s*:\s*(.*)$", info.read(), re.MULTILINE)
    return (f"{os.cpu_count()} processors, {model.group(1) if model else platform.machine()}; "
            f"Linux {platform.release()}")


def commit():
    """Returns the commit of the tree that this file belongs to."""
    found = subprocess.run(["git", "describe", "--always", "--dirty"], stdout=subprocess.PIPE,
                           cwd=os.path.dirname(os.path.abspath(__file__)),
                           stderr=subprocess.DEVNULL, text=True, check=False)
    return found.stdout.strip() or "unknown"


def record_text(args, lines):
    """Returns what --record writes: how it was measured, then the figures."""
    command = (f"bench/attached/run.py --slices={args.slices} --secs={args.secs:g} "
               f"--size={args.size} --operations={args.operations} --limit={args.limit:g} "
               f"--cpu={args.cpu} --tool-cpu={args.tool_cpu}")
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    return "\n".join(["What an attached spinwire-stat costs; see bench/README.md.",
                      f"command: {command}", f"commit:  {commit()}, {date}",
                      f"machine: {machine()}", *lines]) + "\n"


def check_recordable(args):
    """Ends, before anything is measured, if the figures would not be recorded."""
    if args.slices < FEWEST_RECORDED:
        raise SystemExit(f"--record needs {FEWEST_RECORDED} slices")
    if args.cpu == args.tool_cpu or args.operations <= 0:
        raise SystemExit("--record needs another processor for the tool, and --operations")
    if "dirty" in commit():
        raise SystemExit("--record needs a tree without changes: else its commit does not say what was "
                         "measured")


def record(args, lines, is_known):
    """Writes the figures to the file of --record. Refuses those that show nothing."""
    if not is_known:
        raise SystemExit(f"not recorded: that needs an interval within or beyond {args.limit:.1%}")
    with open(args.record, "w", encoding="utf-8") as file:
        file.write(record_text(args, lines))


# ---- main -------------------------------------------------------------------------------------


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cpus = sorted(os.sched_getaffinity(0))
    parser.add_argument("--bin", default="build/bin", help="folder of the programs")
    parser.add_argument("--slices", type=int, default=30, help="pairs of slices; 0: only count")
    parser.add_argument("--secs", type=float, default=2, help="seconds of a slice")
    parser.add_argument("--size", type=int, default=32, help="bytes of a message")
    parser.add_argument("--cpu", type=int, default=cpus[0], help="processor of the engines")
    parser.add_argument("--tool-cpu", type=int, default=cpus[-1], help="processor of the tool")
    parser.add_argument("--limit", type=float, default=0.01, help="part of the rate that it may cost")
    parser.add_argument("--operations", type=int, default=640000,
                        help="round trips to count; 0: none")
    parser.add_argument("--record", metavar="FILE", help="write the figures to this file")
    parser.add_argument("--seed", type=int, help="of the order of the slices")
    return parser.parse_args(argv)


def main(argv):
    args = parse(argv)
    check_programs(args)
    if args.record:
        check_recordable(args)
    if args.cpu == args.tool_cpu:
        print("attached: this machine has one processor for both; the rates show the tool's own time",
              file=sys.stderr)
    too_much = is_known = False
    adds_none = True
    lines = []

    def tell(line):
        lines.append(line)
        print(line)

    if args.slices > 0:
        pairs = measure_rates(args)
        tell(f"{len(pairs)} slices of {args.secs:g} s each: median rate "
             f"{statistics.median(p[0] for p in pairs):.3f} million/s without the tool, "
             f"{statistics.median(p[1] for p in pairs):.3f} with it at 10 Hz")
        text, too_much, is_known = verdict(pairs, args.limit)
        tell(text)
    if args.operations > 0:
        adds_none, text = compare_instructions(args)
        tell(text)
    if args.record:
        record(args, lines, is_known)
    return 0 if adds_none and not too_much else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
