"""What the report measures. Each function returns what goes into the report's JSON file."""

import collections
import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile

import callgrind
import hdr
import run as curve
from programs import Failed

# Counted for "instructions by stage"; programs of bench/count with their arguments.
STAGES = {
    "a call of 32 bytes, window 1": ("count-call", 1, 32),
    "a call of 32 bytes, window 32": ("count-call", 32, 32),
    "the same by work requests": ("count-call", 32, 32, "verbs"),
    "a message and its echo, window 1": ("count-message-echo", 1),
    "a message and its echo, window 32": ("count-message-echo", 32),
    "a write of 8 bytes, window 32": ("count-write", 32),
    "an idle poll": ("count-idle-poll", 1),
}
STAGE_OPERATIONS = 640

# How much is measured. `scale` is a part of the usual operations, `factors` a number of shapes; sizes are bytes.
Extent = collections.namedtuple(
    "Extent", "scale stages sessions clients factors rounds simulation_seconds charts windows sizes long_sizes "
              "curve_rounds run_seconds")
FULL = Extent(scale=1, stages=tuple(STAGES), sessions=(1, 10, 100, 1000, 5000, 10000, 20000),
              clients=(1, 2, 4, 8, 16), factors=99, rounds=3, simulation_seconds=30,
              charts=("exchange", "one_way", "write"), windows=(1, 32),
              sizes=(32, 64, 256, 1024, 4096, 16384, 65536), long_sizes=(1 << 20, 8 << 20), curve_rounds=2,
              run_seconds=0.1)
# Every table and picture, of figures that mean nothing.
QUICK = Extent(scale=0.005, stages=("a call of 32 bytes, window 1", "an idle poll"), sessions=(1, 100),
               clients=(1, 2), factors=1, rounds=1, simulation_seconds=2,
               charts=("exchange", "write"), windows=(1, 32), sizes=(32, 1024),
               long_sizes=(), curve_rounds=1, run_seconds=0.01)

# What is measured with everything on; and what switches one thing off: settings, or options of
# spinwire-perf for what an application does itself.
OBSERVING_OFF = {"SPINWIRE_OBSERVABILITY_SAMPLE": "0", "SPINWIRE_OBSERVABILITY_DIRECTORY": ""}
FACTORS = [
    ("calls of 32 bytes, 32 in flight", ["rpc", "--window", 32], {}, {
        "direct datagrams": {"SPINWIRE_RPC_DIRECT_DATAGRAMS": "off"},
        "datagrams instead of a connection": {"SPINWIRE_RPC_TRANSPORT": "connection"},
        "hugepages": {"SPINWIRE_MEMORY_HUGEPAGES": "off"},
        "deferred posting": ["--post", "now"],
        "congestion control (costs)": {"SPINWIRE_RPC_TARGET_RTT": "0ns"},
        "observability (costs)": OBSERVING_OFF,
    }),
    ("calls of 32 bytes over 10,000 sessions, 32 in flight",
     ["rpc", "--window", 32, "--sessions", 10000], {}, {
         "prefetch of the next session": ["--no-prefetch"],
         "direct datagrams": {"SPINWIRE_RPC_DIRECT_DATAGRAMS": "off"},
     }),
    ("messages of 32 bytes, 64 in flight", ["rate", "--op", "send"], {}, {
        "direct messages": {"SPINWIRE_CONNECTIONS_DIRECT_MESSAGES": "off"},
        "hugepages": {"SPINWIRE_MEMORY_HUGEPAGES": "off"},
        "shared receive queue": {"SPINWIRE_QUEUES_SHARED_RECEIVE_QUEUE": "off"},
        "observability (costs)": OBSERVING_OFF,
    }),
    ("messages of 32 bytes by work requests, 64 in flight", ["rate", "--op", "send"],
     {"SPINWIRE_CONNECTIONS_DIRECT_MESSAGES": "off"}, {
         "deferred posting, one doorbell": ["--post", "now"],
         "inline payloads": {"SPINWIRE_QUEUES_INLINE_BYTES": "0"},
         "receives reposted 16 at once": {"SPINWIRE_QUEUES_RECEIVE_POSTLIST": "1"},
         "completions drained 32 at once": {"SPINWIRE_QUEUES_POLL_BATCH": "1"},
         "shared receive queue": {"SPINWIRE_QUEUES_SHARED_RECEIVE_QUEUE": "off"},
     }),
    ("writes of 32 bytes, 64 in flight", ["rate", "--op", "write"], {}, {
        "deferred posting, one doorbell": ["--post", "now"],
        "inline payloads": {"SPINWIRE_QUEUES_INLINE_BYTES": "0"},
        "completions drained 32 at once": {"SPINWIRE_QUEUES_POLL_BATCH": "1"},
    }),
]

# Many clients share a processor, so some of them wait for long.
LONG_TIMEOUTS = {"SPINWIRE_RPC_CALL_TIMEOUT": "60s"}

LATENCIES = {"message and echo": ["lat", "--op", "send"], "write": ["lat", "--op", "write"],
             "read": ["lat", "--op", "read"], "write and write back": ["lat", "--op", "pong"],
             "call": ["rpc", "--window", 1]}


def first(path, pattern):
    """Returns what the pattern's group first finds in the file; empty: nothing."""
    try:
        with open(path, encoding="utf-8") as file:
            found = re.search(pattern, file.read(), re.MULTILINE)
            return found.group(1).strip() if found else ""
    except OSError:
        return ""


def describe_machine(folder):
    """Returns (name, value) pairs."""
    def output(*command):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
            return (done.stdout.strip().splitlines() or [""])[0] if done.returncode == 0 else ""
        except (OSError, subprocess.TimeoutExpired):
            return ""

    virtual = re.search(r"\bhypervisor\b", first("/proc/cpuinfo", r"^flags\s*:(.*)$"))
    cache = [first(f"/sys/devices/system/cpu/cpu0/cache/index{i}/size", "(.*)") for i in range(4)]
    versions = [f"{name} {version}" for name, package in (("UCX", "libucx0"), ("libfabric", "libfabric1"))
                if (version := output("dpkg-query", "-W", "-f=${Version}", package))]
    pairs = [
        ("processor", first("/proc/cpuinfo", r"^model name\s*:(.*)$") or os.uname().machine),
        ("processors", f"{len(os.sched_getaffinity(0))}" + (", of a virtual machine" if virtual else "")),
        ("caches", ", ".join(filter(None, cache))),
        ("frequency governor",
         first("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "(.*)") or "not shown"),
        ("memory", first("/proc/meminfo", r"^MemTotal:(.*)$")),
        ("free hugepages", first("/proc/meminfo", r"^HugePages_Free:(.*)$")),
        ("system", first("/etc/os-release", r'^PRETTY_NAME="(.*)"$')),
        ("kernel", os.uname().release),
        ("compiler", output("g++", "--version")),
        ("compared with", ", ".join(versions) or "nothing"),
        ("commit", output("git", "describe", "--always", "--dirty")),
        ("device", "softverbs, within this host"),
        ("programs", folder),
        ("load before", " ".join(f"{load:.1f}" for load in os.getloadavg())),
    ]
    return [pair for pair in pairs if pair[1]]


def measure_latencies(programs, extent):
    """Returns by kind the counts of a histogram: between two processes, and on one thread."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "log")

        def take(name, arguments):
            programs.perf([*arguments, "--count", int(200000 * extent.scale), "--hdr", log])
            found[name] = read_interval(log).counts

        with programs.server() as there:
            for name, arguments in LATENCIES.items():
                take(f"{name}, two processes", [arguments[0], *there, *arguments[1:], *programs.pinned(1)])
        for name in ("message and echo", "call"):
            take(f"{name}, one thread", [*LATENCIES[name], "--one-thread"])
    return found


def measure_stages(programs, extent):
    """Returns by count the instructions by folder."""
    if not shutil.which("valgrind"):
        raise Failed("valgrind is not installed: run tools/install-deps.sh")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in extent.stages:
            program, *arguments = STAGES[name]
            out = os.path.join(folder, "out")
            valgrind = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}",
                        "--compress-strings=no", "--compress-pos=no", "--collect-atstart=no",
                        "--toggle-collect=*spinwire::bench::counted*"]
            programs.wait(programs.start(program, [*arguments, STAGE_OPERATIONS], under=valgrind), 120)
            with open(out, encoding="utf-8") as file:
                counts = callgrind.by_folder(file.read())
            found[name] = callgrind.per_operation(counts, STAGE_OPERATIONS)
    return found


def read_counts(path):
    """Returns (name, recorded) of bench/instructions.txt."""
    rows = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            words = line.split()
            if len(words) >= 4 and not line.startswith("#") and words[1] != "-":
                rows.append((words[0], float(words[1])))
    return rows


def measure_sessions(programs, extent):
    """Returns a result of spinwire-perf for each number of sessions, up to the first that fails."""
    rows = []
    for sessions in extent.sessions:
        try:
            rows.append(programs.perf(["rpc", "--one-thread", "--window", 32, "--sessions", sessions,
                                       "--count", int(1000000 * extent.scale)], seconds=120))
        except Failed as why:
            if not rows:
                raise
            return {"rows": rows, "why": f"{sessions} sessions and more are left out: {why}"}
    return {"rows": rows, "why": ""}


def measure_clients(programs, extent):
    """Returns the rate of a server by the number of its clients: all calls of all clients, divided by
    the time from the first one's begin to the last one's end."""
    rows = []
    with programs.server(["--clients", max(extent.clients)]) as there, tempfile.TemporaryDirectory() as folder:
        for clients in extent.clients:
            count = max(1000, int(8000000 * extent.scale / clients))
            logs = [os.path.join(folder, str(client)) for client in range(clients)]
            started = [programs.start("spinwire-perf", [
                "rpc", *there, "--window", 16, "--count", count, "--warmup", 500, "--hdr", log,
                *programs.pinned(1 + client)], LONG_TIMEOUTS) for client, log in enumerate(logs)]
            for process in started:
                programs.wait(process, 120)
            rows.append({"clients": clients, **together(map(read_interval, logs))})
    return rows


def read_interval(path):
    """Returns the only interval of a log."""
    with open(path, encoding="utf-8") as file:
        (interval,) = hdr.read_log(file.read()).values()
    return interval


def together(intervals):
    """Returns the rate and the percentiles of clients that ran at the same time."""
    intervals = list(intervals)
    counts = hdr.merge(interval.counts for interval in intervals)
    points = hdr.shares(counts)
    seconds = (max(i.begin + i.length for i in intervals) - min(i.begin for i in intervals))
    return {"mops": sum(count for _, count in counts) / max(seconds, 0.001) / 1e6,
            "p50": hdr.percentile(points, 0.5), "p99": hdr.percentile(points, 0.99),
            "p99.9": hdr.percentile(points, 0.999)}


def measure_factors(programs, extent):
    """Returns for each shape the median rate with everything on, and with one thing off, and the lowest
    and highest rate of each. The variants take turns, so that all of them see the same machine. Hugepages
    are left out where there are none: switching them off changes nothing."""
    found = []
    has_hugepages = first("/proc/meminfo", r"^HugePages_Free: *([1-9].*)$")
    for shape, arguments, base, factors in FACTORS[:extent.factors]:
        factors = {name: off for name, off in factors.items() if has_hugepages or name != "hugepages"}
        variants = {"everything on": {}, **factors}
        rates = {name: [] for name in variants}
        for _ in range(extent.rounds):
            for name, off in variants.items():
                options, settings = (off, {}) if isinstance(off, list) else ([], off)
                result = programs.perf([*arguments, *options, "--one-thread", "--count",
                                        int(1000000 * extent.scale)], {**base, **settings})
                rates[name].append(result["rate_mops"])
        medians = {name: statistics.median(values) for name, values in rates.items()}
        found.append({"shape": shape, "base": base, "rates": medians,
                      "ranges": {name: [min(values), max(values)] for name, values in rates.items()},
                      "settings": factors})
    return found


def simulate(programs, extent):
    """Returns what a short simulation counted, as (count, what), and its last line."""
    out = programs.run("spinwire-sim", ["--seed", 1, "--runs", int(200 * extent.scale) or 1, "--seconds",
                                        extent.simulation_seconds, "--jobs", len(programs.processors)], seconds=180)
    rows = [(int(number), what) for number, what in re.findall(r"^ +(\d+) (.*)$", out, re.MULTILINE)]
    return {"rows": rows, "verdict": out.strip().splitlines()[-2:]}


def measure_curves(folder, extent, limit, accept_busy):
    """Returns the results of the peer programs."""
    points = [p for p in curve.plan_curve(extent.charts, ("1t", "2p"), extent.windows, extent.sizes)
              if p.chart != "one_way" or p.size == 65536]
    if extent.long_sizes:
        points += curve.plan_curve(("one_way",), ("1t", "2p"), (1,), extent.long_sizes)
    arguments = curve.parse(["--bin", folder, "--reps", str(extent.curve_rounds), "--limit", str(limit), "--secs",
                             str(extent.run_seconds), *(["--accept-busy"] if accept_busy else [])])
    jobs = [job for point in points for job in curve.jobs_of(point)]
    missing = sorted({job.program for job in jobs if not curve.has_program(job, arguments)})
    return curve.measure(points, arguments), missing
