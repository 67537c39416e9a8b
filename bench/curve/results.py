"""What the peer programs have measured, and medians of it by placement of the two processors."""

import collections
import dataclasses
import json
import statistics

PLACEMENTS = ("one", "smt", "ccx", "far")

# A run counts for a placement if it has at least this many slices there, or half of all its slices.
FEWEST_SLICES = 3


@dataclasses.dataclass(frozen=True, order=True)
class Point:
    """One shape of a measurement, without the library."""

    chart: str  # exchange, one_way, write, read or copy
    mode: str  # 1t, 2p or sym
    window: int
    size: int
    batch: int = 1

    def __str__(self):
        batch = f" batch {self.batch}" if self.batch != 1 else ""
        return f"{self.chart} {self.mode} window {self.window}{batch} {size_name(self.size)}"


def size_name(size):
    """Returns 4096 as "4K"."""
    for unit, factor in (("M", 1 << 20), ("K", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


class Results:
    """Nanoseconds per operation of each run, by point, library and placement."""

    def __init__(self, accept_busy=False):
        self._accept_busy = accept_busy
        self.lines = []  # as the programs printed them
        self.failures = []
        self.disturbed = 0  # runs that do not count, because other programs took the processors
        self._runs = collections.defaultdict(lambda: collections.defaultdict(list))
        self._libraries = collections.defaultdict(set)  # by point

    def add(self, point, library, line):
        """Adds the line that a peer program printed. Raises ValueError if it is no valid line."""
        result = json.loads(line)
        if result["bad"] != 0:
            raise ValueError(f"{result['bad']} operations were wrong")
        self.lines.append({"library": library, "chart": point.chart, **result})
        if not result["placements"] or (result["busy"] and not self._accept_busy):
            self.disturbed += 1
            return
        enough = min(FEWEST_SLICES, result["slices"] / 2)
        for placement, median in result["placements"].items():
            if median["slices"] >= enough:
                self._runs[point, library][placement].append(median["ns"])
                self._libraries[point].add(library)

    def add_failure(self, point, library, why):
        self.failures.append({"point": str(point), "library": library, "why": why})

    def points(self, chart=None):
        return sorted(p for p in self._libraries if chart in (None, p.chart))

    def libraries(self, point):
        return sorted(self._libraries.get(point, ()))

    def runs(self, point, library, placement):
        return self._runs.get((point, library), {}).get(placement, [])

    def median(self, point, library, placement):
        """Returns None if no run counts there."""
        runs = self.runs(point, library, placement)
        return statistics.median(runs) if runs else None

    def common_placement(self, wanted):
        """Returns the placement that all of the (point, library) pairs have most runs of, or None."""
        fewest = {
            placement: min(len(self.runs(p, library, placement)) for p, library in wanted)
            for placement in PLACEMENTS
        }
        best = max(PLACEMENTS, key=lambda placement: fewest[placement])
        return best if fewest[best] else None

    def ratio(self, point, library, against):
        """Returns the ratio of two libraries' medians at a common placement, and that placement."""
        placement = self.common_placement([(point, library), (point, against)])
        if placement is None:
            return None, None
        ours = self.median(point, library, placement)
        return ours / self.median(point, against, placement), placement

    def copy_ns(self, size, window):
        """Returns the time of one memcpy. Copies are measured on one thread for all modes."""
        return self.median(Point("copy", "1t", window, size), "memcpy", "one")

    def medians(self):
        """Returns all medians as a list of flat dictionaries."""
        return [
            {
                **dataclasses.asdict(point),
                "library": library,
                "placement": placement,
                "ns": round(statistics.median(runs), 2),
                "runs": len(runs),
            }
            for (point, library), placed in sorted(self._runs.items())
            for placement, runs in sorted(placed.items())
        ]
