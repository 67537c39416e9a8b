"""The budgets of the design, and what was measured against each of them."""

import dataclasses

from results import Point, size_name

# Copies of the payload in one operation: an exchange copies the request, the handler's own copy and
# the reply; everything else moves its bytes once.
COPIES = {"exchange": 3, "one_way": 1, "write": 1, "read": 1}

# Time may exceed that of the smallest size and of the copies by this factor.
CURVE_FACTOR = 1.3
# Largest step from one size to its neighbour that is not listed.
LARGEST_STEP = 1.5
# Share of memcpy's rate that long operations have to reach.
COPY_SHARE = 0.9

OURS = ("calls", "messages", "spinwire")


@dataclasses.dataclass(frozen=True)
class Budget:
    """Most that a ratio of times may be, over a range of points. The worst point counts."""

    shape: str
    chart: str
    modes: tuple
    windows: tuple
    sizes: tuple  # smallest and largest
    against: str
    most: dict  # by library

    def covers(self, point):
        smallest, largest = self.sizes
        return (
            point.chart == self.chart
            and point.mode in self.modes
            and point.window in self.windows
            and smallest <= point.size <= largest
            and point.batch == 1
        )


BOTH = ("1t", "2p")
BUDGETS = (
    Budget("32 B, two processes, window 1", "exchange", ("2p",), (1,), (32, 32), "ring",
           {"calls": 1.4, "messages": 1.4}),
    Budget("32 B, two processes, window 1", "exchange", ("2p",), (1,), (32, 32), "ucx",
           {"calls": 0.7, "messages": 0.7}),
    Budget("32 B, two processes, window 32", "exchange", ("2p",), (32,), (32, 32), "ring",
           {"calls": 1.4, "messages": 1.8}),
    Budget("32 B, symmetric, window 32", "exchange", ("sym",), (32,), (32, 32), "ring",
           {"calls": 2.2, "messages": 2.2}),
    Budget("32 B, one thread, window 32", "exchange", ("1t",), (32,), (32, 32), "ucx",
           {"calls": 0.6, "messages": 0.9}),
    Budget("32 B, one thread, window 1", "exchange", ("1t",), (1,), (32, 32), "ucx",
           {"calls": 1.0, "messages": 1.0}),
    Budget("33 B … 4 KiB, one thread, windows 8 and 32", "exchange", ("1t",), (8, 32), (33, 4096),
           "ucx", {"calls": 0.6, "messages": 0.75}),
    Budget("0 B … 4 KiB, two processes", "exchange", ("2p",), (1, 8, 32), (0, 4096), "ucx",
           {"calls": 0.75, "messages": 0.75}),
    Budget("8 KiB … 64 KiB messages", "exchange", BOTH, (1, 8, 32), (8192, 65536), "ucx",
           {"messages": 0.8}),
    Budget("64 KiB and more, one way", "one_way", BOTH, (1, 8, 32), (65536, 1 << 30), "ucx",
           {"calls": 1.0, "messages": 1.0}),
    Budget("64 KiB and more, WRITE", "write", BOTH, (1, 8, 32), (65536, 1 << 30), "ucx",
           {"spinwire": 1.0}),
    Budget("64 KiB and more, READ", "read", BOTH, (1, 8, 32), (65536, 1 << 30), "ucx",
           {"spinwire": 1.0}),
)

# The lines of the design that other commands measure.
ELSEWHERE = (
    ("Soft-RoCE against perftest", "make compare-softroce"),
    ("idle poll(), instructions", "make count"),
    ("heap and system calls of the hot path", "make test"),
    ("10,000 sessions and connections", "make bench BENCH_ARGS=--benchmark_filter='calls|onnections'"),
)


@dataclasses.dataclass(frozen=True)
class Verdict:
    shape: str
    library: str
    against: str
    measured: float  # None: not measured
    budget: float
    where: str

    @property
    def is_behind(self):
        return self.measured is not None and self.measured > self.budget


def where_of(point, placement):
    return f"{size_name(point.size)} bytes, {point.mode}, window {point.window}, {placement}"


def judge_ratios(results):
    """Returns a verdict for each budget and library, at the point where the ratio is largest."""
    verdicts = []
    for budget in BUDGETS:
        for library, most in budget.most.items():
            worst, where = None, ""
            for point in filter(budget.covers, results.points()):
                ratio, placement = results.ratio(point, library, budget.against)
                if ratio is not None and (worst is None or ratio > worst):
                    worst, where = ratio, where_of(point, placement)
            verdicts.append(Verdict(budget.shape, library, budget.against, worst, most, where))
    return verdicts


def series(results):
    """Yields each line of a plot that is ours: library, placement and its points by size."""
    lines = {}
    for point in results.points():
        if point.batch != 1:
            continue
        for library in results.libraries(point):
            if library in OURS:
                key = (point.chart, point.mode, point.window, library)
                lines.setdefault(key, []).append(point)
    for (_, _, _, library), points in sorted(lines.items()):
        placement = results.common_placement([(p, library) for p in points])
        if placement is not None and len(points) > 1:
            yield library, placement, sorted(points)


def judge_curves(results):
    """Returns the worst ratio of each chart's times to those of the smallest size and the copies."""
    worst = {}
    for library, placement, points in series(results):
        base = results.median(points[0], library, placement)
        for point in points[1:]:
            copy = results.copy_ns(point.size, point.window)
            if copy is None:
                continue
            ratio = results.median(point, library, placement) / (base + COPIES[point.chart] * copy)
            key = (point.chart, library)
            if key not in worst or ratio > worst[key][0]:
                worst[key] = (ratio, where_of(point, placement))
    return [
        Verdict(f"the curve of {chart}: smallest size + {COPIES[chart]} × memcpy", library,
                "model", ratio, CURVE_FACTOR, where)
        for (chart, library), (ratio, where) in sorted(worst.items())
    ]


def judge_copies(results, smallest=65536):
    """Returns the worst ratio of long operations to memcpy."""
    worst = {}
    for point in results.points():
        copy = results.copy_ns(point.size, point.window)
        if point.chart not in ("one_way", "write", "read") or point.size < smallest or copy is None:
            continue
        for library in results.libraries(point):
            if library not in OURS:
                continue
            placement = results.common_placement([(point, library)])
            ratio = results.median(point, library, placement) / (COPIES[point.chart] * copy)
            key = (point.chart, library)
            if key not in worst or ratio > worst[key][0]:
                worst[key] = (ratio, where_of(point, placement))
    return [
        Verdict(f"64 KiB and more, {chart}", library, "memcpy", ratio, 1 / COPY_SHARE, where)
        for (chart, library), (ratio, where) in sorted(worst.items())
    ]


@dataclasses.dataclass(frozen=True)
class Step:
    library: str
    placement: str
    smaller: Point
    larger: Point
    ratio: float
    copies: float  # the ratio that the smallest size's time and the copies explain; None: unknown

    @property
    def is_cliff(self):
        return self.copies is not None and self.ratio > LARGEST_STEP * self.copies


def find_steps(results):
    """Returns each step between neighbouring sizes that is larger than LARGEST_STEP.

    Sizes are neighbours if nothing was measured between them, by any library."""
    steps = []
    sizes = {}
    for point in results.points():
        sizes.setdefault((point.chart, point.mode, point.window), set()).add(point.size)
    for library, placement, points in series(results):
        base = results.median(points[0], library, placement)
        for smaller, larger in zip(points, points[1:]):
            ratio = results.median(larger, library, placement) / results.median(
                smaller, library, placement)
            between = sizes[larger.chart, larger.mode, larger.window]
            if ratio <= LARGEST_STEP or any(smaller.size < n < larger.size for n in between):
                continue
            copies = None
            before = results.copy_ns(smaller.size, smaller.window)
            after = results.copy_ns(larger.size, larger.window)
            if before is not None and after is not None:
                factor = COPIES[larger.chart]
                copies = (base + factor * after) / (base + factor * before)
            steps.append(Step(library, placement, smaller, larger, ratio, copies))
    return steps
