"""What comes of a measurement: tables on stdout, a JSON file, plots."""

import collections
import html
import json
import os

import budgets
import plot
from results import PLACEMENTS, size_name

# In the order of the tables' columns and the plots' legends.
LIBRARIES = ("calls", "messages", "spinwire", "ring", "ucx", "libfabric", "memcpy")
MODES = {"1t": "one thread", "2p": "two processes", "sym": "symmetric"}


def panels_of(results, chart, mode, window):
    """Returns the panels of a plot: time and rate over size, by library. None without results."""
    points = [p for p in results.points(chart)
              if (p.mode, p.window, p.batch) == (mode, window, 1)]
    if len({p.size for p in points}) < 2:
        return None
    # The axis is logarithmic: 0 bytes stand at half of the smallest other size.
    zero = min(p.size for p in points if p.size) / 2
    placement = most_frequent_placement(results, points)
    times = collections.OrderedDict()
    for library in LIBRARIES:
        line = [(p.size or zero, results.median(p, library, placement)) for p in points]
        if library == "memcpy":
            line = [(p.size, results.copy_ns(p.size, window)) for p in points if p.size]
        line = [(x, y) for x, y in line if y]
        if line:
            times[library] = line
    names = {p.size or zero: size_name(p.size) for p in points}
    title = f"{chart}, {MODES[mode]}, window {window} ({placement})"
    if chart == "exchange":
        rates = {name: [(x, 1e3 / y) for x, y in line] for name, line in times.items()
                 if name != "memcpy"}
        rate_title = "million round trips per second"
    else:
        rates = {name: [(x, x / y) for x, y in line] for name, line in times.items()}
        rate_title = "GB per second"
    return [plot.Panel(title, "bytes", "nanoseconds per operation", times, names),
            plot.Panel(title, "bytes", rate_title, rates, names)]


def most_frequent_placement(results, points):
    """Returns the placement that has most runs of all libraries together."""
    counts = collections.Counter()
    for point in points:
        for library in results.libraries(point):
            for placement in PLACEMENTS:
                counts[placement] += len(results.runs(point, library, placement))
    return max(PLACEMENTS, key=lambda placement: counts[placement])


def write_files(results, machine, folder):
    os.makedirs(folder, exist_ok=True)
    content = {"machine": machine, "medians": results.medians(), "failures": results.failures,
               "runs": results.lines}
    with open(os.path.join(folder, "curve.json"), "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
    for name in os.listdir(folder):  # plots of an earlier run
        if name.startswith("curve-") and name.endswith(".svg"):
            os.remove(os.path.join(folder, name))
    images = []
    for chart, mode, window in sorted({(p.chart, p.mode, p.window) for p in results.points()
                                       if p.chart != "copy"}):
        panels = panels_of(results, chart, mode, window)
        if panels is None:
            continue
        images.append(f"curve-{chart}-{mode}-w{window}.svg")
        with open(os.path.join(folder, images[-1]), "w", encoding="utf-8") as file:
            file.write(plot.draw(panels))
    with open(os.path.join(folder, "index.html"), "w", encoding="utf-8") as file:
        file.write("<!DOCTYPE html>\n<meta charset=\"utf-8\">\n<title>Spinwire: curves</title>\n"
                   f"<p>{html.escape(str(machine['processor']))}, {machine['time']}</p>\n")
        file.writelines(f'<p><img src="{image}" alt="{image}"></p>\n' for image in images)
    print(f"written: {folder}/curve.json, {folder}/index.html and {len(images)} plots")


def print_table(results):
    """Prints the medians, one line per point and placement, one column per library."""
    print("\nmedians, nanoseconds per operation (runs)\n")
    groups = collections.OrderedDict()
    for point in results.points():
        groups.setdefault((point.chart, point.mode, point.window, point.batch), []).append(point)
    for (chart, mode, window, batch), points in groups.items():
        libraries = [name for name in LIBRARIES
                     if any(name in results.libraries(p) for p in points)]
        title = f"{chart}, {MODES[mode]}, window {window}"
        print(title + (f", batches of {batch}" if batch != 1 else ""))
        print(f"  {'bytes':>6} {'cores':<5}" + "".join(f"{name:>18}" for name in libraries))
        for point in points:
            for placement in PLACEMENTS:
                cells = [cell_of(results, point, library, placement) for library in libraries]
                if any(cells):
                    print(f"  {size_name(point.size):>6} {placement:<5}" +
                          "".join(f"{cell or '-':>18}" for cell in cells))
        print()


def cell_of(results, point, library, placement):
    ns = results.median(point, library, placement)
    return ns and f"{ns:.1f} ({len(results.runs(point, library, placement))})"


def print_verdicts(verdicts):
    print("budgets of the design: ratio of times, at the worst point\n")
    print(f"  {'shape':<56}{'ours':<10}{'against':<10}{'measured':>9}{'budget':>8}  ")
    for v in verdicts:
        measured = "-" if v.measured is None else f"{v.measured:.2f}"
        verdict = ("not measured" if v.measured is None else "BEHIND" if v.is_behind else "met")
        print(f"  {v.shape:<56}{v.library:<10}{v.against:<10}{measured:>9}{v.budget:>8.2f}  "
              f"{verdict:<13}{v.where}".rstrip())
    for shape, command in budgets.ELSEWHERE:
        print(f"  {shape:<56}measured by: {command}")
    behind = sum(v.is_behind for v in verdicts)
    print(f"\n{behind} of {len(verdicts)} budgets are exceeded")


def print_steps(steps):
    print(f"\nsteps of more than {budgets.LARGEST_STEP} between neighbouring sizes")
    print("  (copies: the step that the smallest size's time and the copies would give)\n")
    for s in steps:
        copies = "-" if s.copies is None else f"{s.copies:.2f}"
        print(f"  {s.library:<9} {s.larger.chart:<9}{s.larger.mode:<4}window {s.larger.window:<3}"
              f"{size_name(s.smaller.size):>6} → {size_name(s.larger.size):<6} {s.ratio:.2f}   "
              f"copies {copies:>5}  {'CLIFF' if s.is_cliff else ''}".rstrip())
    print(f"  {len(steps)} steps")


def print_failures(results):
    if results.disturbed:
        print(f"\n{results.disturbed} of {len(results.lines)} runs do not count: other programs used "
              "the processors all the time")
    counts = collections.Counter((f["library"], f["point"], f["why"]) for f in results.failures)
    for (library, point, why), count in sorted(counts.items()):
        print(f"failed {count} times: {library}, {point}: {why}")
