"""Writes the report as one page, and the summary for README."""

import html
import json

import chart
import hdr
import plot
import report as curve_report
from results import Point, Results, size_name

STYLE = """:root { color-scheme: light dark; --back: #fff; --front: #1a1a1a; --soft: #666; --line: #ccc }
@media (prefers-color-scheme: dark) {
  :root { --back: #16181c; --front: #e4e4e4; --soft: #9a9a9a; --line: #444 } }
body { background: var(--back); color: var(--front); font: 15px/1.5 sans-serif; max-width: 1120px;
  margin: 2em auto; padding: 0 1em }
h2 { margin-top: 2em; border-bottom: 1px solid var(--line) }
table { border-collapse: collapse; font-size: 13px }
th, td { text-align: right; padding: 2px 10px; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left }
.note { color: var(--soft) }
.plots { display: flex; flex-wrap: wrap; gap: 12px }
""" + chart.STYLE

ABOUT_CURVES = ("Medians of runs in random order. A plot shows the placement of the two processors that most "
                "runs had: one (one thread), smt (two threads of a core), ccx (two cores that share a cache) or "
                "far.")


def escape(text):
    return html.escape(str(text))


def table(head, rows):
    """Returns a table; numbers are rounded."""
    def cell(value):
        return f"{value:,.4g}" if isinstance(value, float) and value < 1e4 else (
            f"{value:,.0f}" if isinstance(value, (int, float)) else escape(value))

    lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"] if head else []
    lines += ["<tr>" + "".join(f"<td>{cell(value)}</td>" for value in row) + "</tr>" for row in rows]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def note(text):
    return f'<p class="note">{escape(text)}</p>'


def plots(*drawings):
    return '<div class="plots">\n' + "\n".join(d for d in drawings if d) + "\n</div>"


# ---- the sections: each gets its own data ---------------------------------------------------------


def machine_section(pairs):
    return table((), pairs)


def panels_of(results):
    """Returns (title, axis, lines, names) of all plots."""
    for point_chart, mode, window in sorted({(p.chart, p.mode, p.window) for p in results.points()
                                             if p.chart != "copy"}):
        for panel in curve_report.panels_of(results, point_chart, mode, window) or ():
            yield panel


def curves_section(data):
    results = results_of(data)
    drawings = [chart.lines(p.title, "bytes", p.y_title, p.lines, p.x_names) for p in panels_of(results)]
    if not drawings:
        return note("No run counted: other programs used the processors all the time. Measure on a quiet "
                    "machine, or with REPORT_ARGS=--accept-busy.")
    notes = [ABOUT_CURVES]
    if data["missing"]:
        notes.append("Left out, because it is not built: " + ", ".join(data["missing"]) + ".")
    if data["accept_busy"]:
        notes.append("Other programs ran meanwhile: these figures are no measure of the libraries.")
    if results.disturbed:
        notes.append(f"{results.disturbed} of {len(results.lines)} runs do not count, because other programs "
                     "used the processors.")
    if results.failures:
        notes.append(f"{len(results.failures)} runs failed; the first: {results.failures[0]['why']}")
    return "\n".join(map(note, notes)) + plots(*drawings)


def results_of(data):
    """Returns the results of the peer programs that a report holds."""
    results = Results(data["accept_busy"])
    for line in data["runs"]:
        results.add(Point(line["chart"], line["mode"], line["window"], line["size"], line["batch"]),
                    line["library"], json.dumps(line))
    results.failures = list(data["failures"])
    return results


def latencies_section(data):
    points = {name: hdr.shares(counts) for name, counts in data.items()}
    pairs = {name: line for name, line in points.items() if "two processes" in name}
    alone = {name: line for name, line in points.items() if "two processes" not in name}
    wanted = (0.5, 0.9, 0.99, 0.999, 0.9999)
    rows = [(name, *(hdr.percentile(line, share) for share in wanted), line[-1][0])
            for name, line in points.items()]
    return (note("Single operations of 32 bytes, as round trips in nanoseconds; HdrHistogram's buckets of two "
                 "digits.") +
            plots(chart.percentiles("Latency between two processes", shorten(pairs)),
                  chart.percentiles("Latency on one thread", shorten(alone))) +
            table(("operation", "p50", "p90", "p99", "p99.9", "p99.99", "max"), rows))


def shorten(series):
    return {name.split(",")[0]: line for name, line in series.items()}


def stages_section(data):
    folders = sorted({folder for counts in data["stages"].values() for folder in counts},
                     key=lambda f: -sum(counts.get(f, 0) for counts in data["stages"].values()))
    parts = [(name, [counts.get(folder, 0) for folder in folders])
             for name, counts in data["stages"].items()]
    recorded = data["recorded"]
    drawings = [chart.bars("Instructions of one operation, both ends", "instructions, by folder of src/",
                           parts, folders)] if parts else []
    for what in ("call", "message"):
        series = {f"window {window}": by_size(recorded, what, window) for window in (1, 32)}
        series = {name: line for name, line in series.items() if len(line) > 1}
        names = {x: size_name(x) for line in series.values() for x, _ in line}
        drawings.append(chart.lines(f"Instructions of a {what} over its size", "bytes",
                                    "instructions, both ends", series, names))
    rows = [(name, count) for name, count in recorded]
    return (note("Callgrind counts them; the small programs of bench/count run under a manual clock, so counts "
                 "are exact. The code of the headers is compiled into its callers.") + plots(*drawings) +
            "<details><summary>All recorded counts</summary>" + table(("count", "instructions"), rows) +
            "</details>")


def by_size(recorded, what, window):
    """Returns (bytes, instructions) of the recorded counts over sizes."""
    line = []
    for name, count in recorded:
        words = name.split("_")
        if words[0] == what and name.endswith(f"_bytes_window_{window}") and words[1] != "0":
            line.append((int(words[1]), count))
    return sorted(line)


def sessions_section(data):
    rows = data["rows"]
    kinds = (("p50", "p50_ns"), ("p99", "p99_ns"), ("p99.9", "p999_ns"), ("p99.99", "p9999_ns"))
    series = {name: [(r["sessions"], r[key]) for r in rows] for name, key in kinds}
    names = {r["sessions"]: plot.number_name(r["sessions"]) for r in rows}
    rate = {"calls": [(r["sessions"], r["rate_mops"]) for r in rows]}
    return (note("Calls of 32 bytes, 32 in flight, spread over the sessions in turn; both ends on one thread. "
                 "The time runs from the call to its reply.") +
            (note(data["why"]) if data["why"] else "") +
            plots(chart.lines("Latency over sessions", "sessions", "nanoseconds", series, names),
                  chart.lines("Rate over sessions", "sessions", "million calls per second", rate, names)) +
            table(("sessions", "million/s", *(name for name, _ in kinds), "max"),
                  [(r["sessions"], float(r["rate_mops"]), *(r[key] for _, key in kinds), r["max_ns"])
                   for r in rows]))


def clients_section(data):
    names = {r["clients"]: str(r["clients"]) for r in data}
    return (note("Processes that each have 16 calls of 32 bytes in flight to one server. The server has the first "
                 "processor, the clients share the others: with two processors, 16 clients share one. The rate is "
                 "all calls by the time from the first call's begin to the last one's end.") +
            plots(chart.lines("Rate of a server", "clients", "million calls per second",
                              {"calls": [(r["clients"], r["mops"]) for r in data]}, names),
                  chart.lines("Latency of the clients", "clients", "nanoseconds",
                              {name: [(r["clients"], r[name]) for r in data]
                               for name in ("p50", "p99", "p99.9")}, names)))


def span(least, most):
    return f"{least:.3g} to {most:.3g}"


def factors_section(data):
    parts = [note("Each is switched off alone, by a setting or an option of spinwire-perf; the share is what the rate "
                  "loses without it. A negative share is a cost. Where the runs with it and without it overlap, the "
                  "share is not known: measure again on a machine that is idle. Hugepages are left out where none are "
                  "free. bench/README.md says what cannot be switched off, and why.")]
    for group in data:
        full = group["rates"]["everything on"]
        ranges = group["ranges"]
        low, high = ranges["everything on"]
        rows = [("everything on", "", full, span(low, high), "")]
        for name, off in group["settings"].items():
            rate = group["rates"][name]
            words = " ".join(off if isinstance(off, list) else (f"{key}={value}" for key, value in off.items()))
            least, most = ranges[name]
            is_known = most < low or high < least
            rows.append((name, words, rate, span(least, most),
                         f"{100 * (1 - rate / full):.0f}%" if is_known else "not known"))
        base = " ".join(f"{key}={value}" for key, value in group["base"].items())
        parts.append(f"<h3>{escape(group['shape'])}</h3>" + (note("all with " + base) if base else "") +
                     plots(chart.bars("Rate without one of them", "million per second",
                                      [(name, rate) for name, rate in group["rates"].items()])) +
                     table(("without", "switched off by", "million/s", "runs", "share"), rows))
    return "\n".join(parts)


def simulation_section(data):
    return ("".join(map(note, data["verdict"])) +
            "<details open><summary>What happened in it</summary>" +
            table((), [(what, count) for count, what in data["rows"]]) + "</details>")


SECTIONS = (("machine", "The machine", machine_section),
            ("curves", "Latency and rate over size", curves_section),
            ("latencies", "Latency distributions", latencies_section),
            ("stages", "Instructions by stage", stages_section),
            ("sessions", "Sessions from 1 to 20,000", sessions_section),
            ("clients", "A server with 1 to 16 clients", clients_section),
            ("factors", "What each optimisation gives", factors_section),
            ("simulation", "A short simulation", simulation_section))


def page(content):
    """Returns the HTML of a report."""
    body = []
    for key, title, write in SECTIONS:
        data, why = content["sections"].get(key), content["notes"].get(key)
        body.append(f'<h2 id="{key}">{escape(title)}</h2>')
        body.append(write(data) if data else note("Left out: " + (why or "not measured") + "."))
    contents = " · ".join(f'<a href="#{key}">{escape(title)}</a>' for key, title, _ in SECTIONS)
    return ("<!DOCTYPE html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n"
            "<meta name=\"viewport\" content=\"width=device-width\">\n<title>Spinwire: report</title>\n"
            f"<style>\n{STYLE}\n</style>\n<h1>Spinwire: report</h1>\n"
            + note(f"Measured {content['time']}, in {content['seconds']:.0f} s. make report writes this page.") +
            f"<p>{contents}</p>\n" + "\n".join(body) + "\n</html>\n")


# ---- the summary ----------------------------------------------------------------------------------


def named_places(title):
    """A title of a curve, for readers who do not know the names of placements."""
    return title.replace("(ccx)", "(processors that share a cache)").replace("(far)", "(distant processors)")


def summary(content):
    """Returns an SVG of two plots, with how and where they were measured. Raises ValueError if the report
    has no curves between two processes."""
    results = results_of(content["sections"].get("curves") or {"accept_busy": False, "runs": [],
                                                               "failures": []})
    chosen = [panel for window, index in ((1, 0), (32, 1))
              for panel in (curve_report.panels_of(results, "exchange", "2p", window) or [])[index:index + 1]]
    if len(chosen) != 2:
        raise ValueError("the report has no exchanges between two processes")
    machine = dict(content["sections"]["machine"])
    drawings = [chart.lines(named_places(p.title), "bytes", p.y_title, p.lines, p.x_names) for p in chosen]
    placed = [drawing.replace("<svg ", f'<svg x="{index * chart.WIDTH}" ', 1)
              for index, drawing in enumerate(drawings)]
    width, height = 2 * chart.WIDTH, chart.HEIGHT + 44
    busy = "; other programs ran meanwhile" if content["sections"]["curves"]["accept_busy"] else ""
    captions = [
        f"Exchanges of equal requests and replies between two processes of one host, by shared memory; "
        f"medians, make report{busy}",
        f"{machine['processor']}, processors: {machine['processors']}; "
        f"{content['time'][:10]}, commit {machine.get('commit', 'unknown')}",
    ]
    style = (".sheet { color: #1a1a1a } .back { fill: #ffffff }\n"
             "@media (prefers-color-scheme: dark) { .sheet { color: #e4e4e4 } .back { fill: #16181c } }\n"
             ".sheet text { fill: currentColor }\n"
             ".grid { stroke: currentColor; stroke-opacity: 0.2; stroke-width: 1 }")
    body = [f"<style>{style}</style>", '<rect class="back" width="100%" height="100%"/>', *placed]
    body += [chart.text(width / 2, chart.HEIGHT + 16 + 18 * index, words)
             for index, words in enumerate(captions)]
    return (f'<svg xmlns="http://www.w3.org/2000/svg" class="sheet" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">\n' +
            "\n".join(body) + "\n</svg>\n")
