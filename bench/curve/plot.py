"""Draws log-log plots as SVG."""

import dataclasses
import html
import math

WIDTH, HEIGHT = 560, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 50
COLOURS = {
    "calls": "#c0392b",
    "messages": "#e67e22",
    "spinwire": "#c0392b",
    "ucx": "#2471a3",
    "libfabric": "#7d3c98",
    "ring": "#5d6d7e",
    "memcpy": "#1e8449",
}
OTHER_COLOUR = "#000000"


@dataclasses.dataclass
class Panel:
    """One set of axes. Each line is a list of (x, y); both are more than 0."""

    title: str
    x_title: str
    y_title: str
    lines: dict  # by name
    x_names: dict  # by x: what stands below it


def ticks(low, high):
    """Returns the numbers 1, 2 and 5 times a power of ten from `low` to `high`, thinned out."""
    if low <= 0 or high < low:
        return []
    found = [
        factor * 10.0**exponent
        for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for factor in (1, 2, 5)
    ]
    inside = [tick for tick in found if low * 0.999 <= tick <= high * 1.001]
    return inside if len(inside) <= 10 else [t for t in inside if f"{t:e}".startswith("1")]


def number_name(value):
    """Returns 1500000 as "1.5M" and 0.25 as "0.25"."""
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:g}{unit}"
    return f"{value:g}"


def scale(low, high, begin, end):
    """Returns a function from [low, high], logarithmic, to [begin, end]."""
    span = math.log(high / low) or 1.0
    return lambda value: begin + math.log(value / low) / span * (end - begin)


def draw_panel(panel, left):
    """Returns the SVG elements of a panel whose left edge is at `left`."""
    points = [point for line in panel.lines.values() for point in line]
    if not points:
        return []
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = min(ys) / 1.15, max(ys) * 1.15
    to_x = scale(min(xs), max(xs), left + LEFT, left + WIDTH - RIGHT)
    to_y = scale(low, high, HEIGHT - BOTTOM, TOP)

    def text(x, y, words, anchor="middle", more=""):
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{html.escape(words)}</text>'

    middle = (TOP + HEIGHT - BOTTOM) / 2
    svg = [
        text(left + WIDTH / 2, 20, panel.title, more=' font-weight="bold"'),
        text(left + (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, panel.x_title),
        text(left + 16, middle, panel.y_title,
             more=f' transform="rotate(-90 {left + 16} {middle:.1f})"'),
    ]
    for tick in ticks(low, high):
        y = to_y(tick)
        svg.append(f'<line class="grid" x1="{left + LEFT}" y1="{y:.1f}" '
                   f'x2="{left + WIDTH - RIGHT}" y2="{y:.1f}"/>')
        svg.append(text(left + LEFT - 6, y + 4, number_name(tick), "end"))
    last = -math.inf
    for x_value, name in sorted(panel.x_names.items()):
        x = to_x(x_value)
        svg.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" '
                   f'y2="{HEIGHT - BOTTOM}"/>')
        if x - last >= 26:
            svg.append(text(x, HEIGHT - BOTTOM + 16, name))
            last = x
    # The legend stands on the left, above lines that rise and below lines that fall.
    longest = sorted(max(panel.lines.values(), key=len))
    rises = longest[-1][1] >= longest[0][1]
    legend = TOP + 14 if rises else HEIGHT - BOTTOM - 16 * len(panel.lines)
    for index, (name, line) in enumerate(panel.lines.items()):
        colour = COLOURS.get(name, OTHER_COLOUR)
        places = [(to_x(x), to_y(y)) for x, y in sorted(line)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        svg.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        svg += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in places]
        y = legend + 16 * index
        svg.append(f'<line x1="{left + LEFT + 10}" y1="{y}" x2="{left + LEFT + 34}" y2="{y}" '
                   f'stroke="{colour}" stroke-width="2"/>')
        svg.append(text(left + LEFT + 40, y + 4, name, "start"))
    return svg


def draw(panels):
    """Returns an SVG document with the panels side by side."""
    body = [line for i, panel in enumerate(panels) for line in draw_panel(panel, i * WIDTH)]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH * len(panels)}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        "<style>.grid { stroke: #dddddd; stroke-width: 1 }</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        *body,
        "</svg>",
        "",
    ])
