"""Draws plots as SVG that stands within a page: its colours are those of the page, light or dark."""

import html
import math

from plot import number_name, scale, ticks

WIDTH, HEIGHT = 520, 340
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 34, 62
ROW = 22  # of a chart of bars

# Dark enough on white and light enough on black.
COLOURS = ("#c0504d", "#4f81bd", "#d98c28", "#8064a2", "#4e9a4e", "#7f8c99", "#b05a8c", "#2f9a9a")
BY_NAME = {"calls": COLOURS[0], "messages": COLOURS[2], "spinwire": COLOURS[0], "ucx": COLOURS[1],
           "libfabric": COLOURS[3], "ring": COLOURS[5], "memcpy": COLOURS[4]}

STYLE = """svg { color: inherit; max-width: 100%; height: auto; font: 12px sans-serif }
svg text { fill: currentColor }
svg .grid { stroke: currentColor; stroke-opacity: 0.2; stroke-width: 1 }"""


def colour_of(name, index):
    return BY_NAME.get(name, COLOURS[index % len(COLOURS)])


def text(x, y, words, anchor="middle", more=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{html.escape(str(words))}</text>'


def svg(width, height, title, body):
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img"><title>{html.escape(title)}</title>\n' + "\n".join(body) +
            "\n</svg>")


def axes(title, x_title, y_title):
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return [text(WIDTH / 2, 18, title, more=' font-weight="bold"'),
            text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 26, x_title),
            text(14, middle, y_title, more=f' transform="rotate(-90 14 {middle:.1f})"')]


def legend(names):
    """Returns a line of names below the axis."""
    body, x = [], LEFT
    for index, name in enumerate(names):
        body.append(f'<rect x="{x:.0f}" y="{HEIGHT - 14}" width="10" height="10" '
                    f'fill="{colour_of(name, index)}"/>')
        body.append(text(x + 14, HEIGHT - 5, name, "start"))
        x += 28 + 6.6 * len(name)
    return body


def y_grid(low, high, to_y):
    body = []
    for tick in ticks(low, high):
        y = to_y(tick)
        body.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        body.append(text(LEFT - 6, y + 4, number_name(tick), "end"))
    return body


def lines(title, x_title, y_title, series, x_names=None):
    """Draws lines on logarithmic axes; `series` has a list of (x, y), both above 0, by name. `x_names`
    has the text below a value of x. Returns an empty text without points."""
    points = [point for line in series.values() for point in line]
    if not points:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = min(ys) / 1.15, max(ys) * 1.15
    to_x = scale(min(xs), max(xs), LEFT + 8, WIDTH - RIGHT - 8)
    to_y = scale(low, high, HEIGHT - BOTTOM, TOP)
    body = axes(title, x_title, y_title) + y_grid(low, high, to_y)
    last = -math.inf
    for value, name in sorted((x_names or {x: number_name(x) for x in set(xs)}).items()):
        x = to_x(value)
        body.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}"/>')
        if x - last >= 30:
            body.append(text(x, HEIGHT - BOTTOM + 15, name))
            last = x
    for index, (name, line) in enumerate(series.items()):
        colour = colour_of(name, index)
        places = [(to_x(x), to_y(y)) for x, y in sorted(line)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        body.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        if len(places) < 40:
            body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in places]
    return svg(WIDTH, HEIGHT, title, body + legend(series))


def percentiles(title, distributions):
    """Draws latency over percentile, whose axis is by nines. Each distribution is a sorted list of
    (nanoseconds, share of operations that are at most as long)."""
    most = 1 - 1e-5
    series = {}
    for name, points in distributions.items():
        line = [(1 / (1 - min(share, most)), ns) for ns, share in points if ns > 0]
        if line:
            series[name] = line
    names = {1 / (1 - p / 100): f"{p:g}%" for p in (0, 50, 90, 99, 99.9, 99.99, 99.999)}
    reached = max((x for line in series.values() for x, _ in line), default=1)
    begun = min((x for line in series.values() for x, _ in line), default=1)
    return lines(title, "percentile", "nanoseconds", series,
                 {x: name for x, name in names.items() if begun <= x <= reached * 1.001})


def bars(title, unit, rows, names=None):
    """Draws a bar for each (name, values); the values of a row stand one after the other. `names` are
    those of the values."""
    rows = [(name, values if isinstance(values, (list, tuple)) else [values]) for name, values in rows]
    if not rows:
        return ""
    label = 10 + 6.6 * max(len(name) for name, _ in rows)
    width = max(WIDTH + 120, label + 300)
    most = max(sum(values) for _, values in rows) or 1
    height = TOP + ROW * len(rows) + (54 if names else 30)
    body = [text(width / 2, 18, title, more=' font-weight="bold"')]
    for row, (name, values) in enumerate(rows):
        y = TOP + ROW * row
        body.append(text(label - 6, y + 14, name, "end"))
        x = label
        for index, value in enumerate(values):
            length = value / most * (width - label - 80)
            colour = COLOURS[index % len(COLOURS)]
            body.append(f'<rect x="{x:.1f}" y="{y + 3}" width="{length:.1f}" height="{ROW - 6}" '
                        f'fill="{colour}"/>')
            x += length
        body.append(text(x + 6, y + 14, f"{sum(values):,.4g}" if most < 10000 else f"{sum(values):,.0f}",
                         "start"))
    body.append(text((label + width) / 2, TOP + ROW * len(rows) + 16, unit))
    x = label
    for index, name in enumerate(names or ()):
        body.append(f'<rect x="{x:.0f}" y="{height - 18}" width="10" height="10" '
                    f'fill="{COLOURS[index % len(COLOURS)]}"/>')
        body.append(text(x + 14, height - 9, name, "start"))
        x += 28 + 6.8 * len(name)
    return svg(round(max(width, x)), height, title, body)
