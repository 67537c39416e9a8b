#!/usr/bin/env -S python3 -B
"""Tests what the report makes of results, with results that are made up. Runs no program."""

import contextlib
import io
import json
import os
import sys
import tempfile
import unittest
import xml.etree.ElementTree

sys.path.insert(1, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "curve"))

import callgrind  # noqa: E402
import chart  # noqa: E402
import check_report  # noqa: E402
import hdr  # noqa: E402
import make_report  # noqa: E402
import page  # noqa: E402
import sections  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"


def run_of(library, size, ns, mode="2p", window=1, chart_name="exchange", busy=False):
    return {"library": library, "chart": chart_name, "bad": 0, "busy": busy, "slices": 10, "ns": ns, "mode": mode,
            "window": window, "size": size, "batch": 1, "placements": {"ccx": {"ns": ns, "slices": 10}}}


def synthetic():
    """Returns the content of a report in which nothing is missing."""
    runs = [run_of(library, size, base + size / 10, window=window)
            for library, base in (("calls", 200), ("ucx", 400), ("libfabric", 500), ("ring", 100))
            for size in (32, 1024, 65536) for window in (1, 32)]
    counts = [(100, 900), (200, 90), (5000, 9), (70000, 1)]
    perf = {"rate_mops": 2, "p50_ns": 400, "p99_ns": 900, "p999_ns": 2000, "p9999_ns": 90000,
            "max_ns": 100000}
    return {
        "time": "2026-01-02 03:04:05 UTC", "seconds": 7.0, "notes": {},
        "sections": {
            "machine": [("processor", "A <fast> one"), ("processors", "2"), ("commit", "abc")],
            "curves": {"runs": runs, "failures": [], "missing": [], "accept_busy": False},
            "latencies": {"write, two processes": counts, "call, one thread": counts},
            "stages": {"recorded": [("call_32_bytes_window_1", 10.0), ("call_64_bytes_window_1", 12.0)],
                       "stages": {"a call": {"rpc": 100.0, "softverbs": 50.5}}},
            "sessions": {"rows": [{**perf, "sessions": n} for n in (1, 100, 20000)], "why": ""},
            "clients": [{"clients": n, "mops": 3.0 / n, "p50": 5, "p99": 9, "p99.9": 99} for n in (1, 16)],
            "factors": [{"shape": "calls", "base": {},
                         "rates": {"everything on": 4.0, "direct": 1.0, "inline": 3.8, "deferred": 3.0},
                         "ranges": {"everything on": [3.9, 4.2], "direct": [0.9, 1.1], "inline": [3.5, 4.0],
                                    "deferred": [2.9, 3.1]},
                         "settings": {"direct": {"SPINWIRE_RPC_DIRECT_DATAGRAMS": "off"},
                                      "inline": {"SPINWIRE_QUEUES_INLINE_BYTES": "0"},
                                      "deferred": ["--post", "now"]}}],
            "simulation": {"rows": [(3, "nodes killed")], "verdict": ["3 runs passed, 0 failed"]},
        },
    }


def drawings_of(text):
    """Returns the titles of the plots in a page. Each must be valid XML with its axes named."""
    titles = []
    for part in text.split("<svg ")[1:]:
        root = xml.etree.ElementTree.fromstring("<svg " + part.split("</svg>")[0] + "</svg>")
        titles.append(root.find(SVG + "title").text)
        assert len(root.findall(SVG + "text")) > 3, titles[-1]
    return titles


class HdrTest(unittest.TestCase):
    # As spinwire-perf wrote it: 30,000 durations of 80 ns to 30 us.
    LINE = ("Tag=lat.send.32,1795705037.628,0.004,30076.000,HISTFAAAAId4AQF8AIP/HISTEwAAAFQAAAAAAAAAAgAAAAAA"
            "AAABAAAAD/////8/8AAAAAAAAJ8B8BYR4s4BE8bJARHMHRHuBBF6EToRDBEKEQwREBEcERAPEBMMDwgTCCkEBwJ3BAUOBwgHBAkC"
            "BQQHCgcCGwQnAkEC0QECGQItBgcCRwIrAs0HAoEzE/g=\n")

    def test_a_log_is_decoded(self):
        begin, length, counts = hdr.read_log("#[a comment]\n" + self.LINE)["lat.send.32"]
        self.assertEqual((begin, length), (1795705037.628, 0.004))
        self.assertEqual(sum(count for _, count in counts), 30000)
        self.assertEqual(counts[0], (80, 1464))
        self.assertEqual(counts[-1][0], 29952)
        self.assertEqual(hdr.shares(counts)[-1][1], 1)

    def test_numbers_have_up_to_nine_bytes(self):
        self.assertEqual(list(hdr.numbers(bytes([2, 1, 0x80, 1]))), [1, -1, 64])
        self.assertEqual(list(hdr.numbers(bytes([0xFE] + [0xFF] * 8))), [(1 << 63) - 1])

    def test_percentiles_are_the_least_value_that_reaches_them(self):
        points = hdr.shares([(10, 90), (20, 9), (30, 1)])
        self.assertEqual([hdr.percentile(points, p) for p in (0.5, 0.9, 0.95, 0.999)], [10, 10, 20, 30])


class ClientsTest(unittest.TestCase):
    def test_clients_that_run_one_after_the_other_are_no_faster_than_one(self):
        first, second = hdr.Interval(10.0, 1.0, [(5, 2000000)]), hdr.Interval(11.0, 1.0, [(7, 2000000)])
        self.assertAlmostEqual(sections.together([first])["mops"], 2)
        self.assertAlmostEqual(sections.together([first, second])["mops"], 2)
        both = sections.together([first, second._replace(begin=10.0)])
        self.assertAlmostEqual(both["mops"], 4)
        self.assertEqual((both["p50"], both["p99"]), (5, 7))


class CallgrindTest(unittest.TestCase):
    TEXT = """events: Ir
fl=/x/src/rpc/call.cc
fn=call
10 7
calls=3 0
11 1000
fi=/x/src/base/ring.h
12 5
fe=/x/src/rpc/call.cc
13 1
fl=/x/bench/count/call.cc
1 2
fl=/usr/include/c++/12/vector
1 4
"""

    def test_instructions_count_once_and_for_their_folder(self):
        self.assertEqual(callgrind.by_folder(self.TEXT),
                         {"rpc": 8, "base": 5, "program": 2, "system libraries": 4})

    def test_folders_with_next_to_no_instructions_are_left_out(self):
        self.assertEqual(callgrind.per_operation({"rpc": 640, "base": 3}, 64), {"rpc": 10})


class ChartTest(unittest.TestCase):
    def test_lines_have_a_name_each(self):
        root = xml.etree.ElementTree.fromstring(
            chart.lines("a < b", "x", "y", {"ucx": [(1, 2), (4, 8)], "calls": [(1, 1), (4, 2)]}))
        self.assertEqual(len(root.findall(SVG + "polyline")), 2)
        words = [element.text for element in root.findall(SVG + "text")]
        for name in ("a < b", "x", "y", "ucx", "calls"):
            self.assertIn(name, words)

    def test_nothing_is_drawn_of_nothing(self):
        self.assertEqual(chart.lines("t", "x", "y", {}), "")
        self.assertEqual(chart.bars("t", "u", []), "")

    def test_bars_stand_one_after_the_other(self):
        root = xml.etree.ElementTree.fromstring(chart.bars("t", "u", [("row", [30, 10])], ["a", "b"]))
        first, second = root.findall(SVG + "rect")[:2]
        self.assertAlmostEqual(float(first.get("x")) + float(first.get("width")), float(second.get("x")),
                               places=0)
        self.assertAlmostEqual(float(first.get("width")), 3 * float(second.get("width")), delta=0.5)

    def test_percentiles_go_by_nines(self):
        text = chart.percentiles("t", {"write": [(10, 0.5), (20, 0.9), (30, 0.99), (40, 1)]})
        root = xml.etree.ElementTree.fromstring(text)
        xs = [float(point.split(",")[0]) for point in root.find(SVG + "polyline").get("points").split()]
        self.assertAlmostEqual((xs[2] - xs[1]) / (xs[1] - xs[0]), 1 / 0.699, delta=0.02)


class PageTest(unittest.TestCase):
    def test_all_sections_are_drawn(self):
        text = page.page(synthetic())
        titles = drawings_of(text)
        for title in ("exchange, two processes, window 1 (ccx)", "Latency between two processes",
                      "Latency on one thread", "Instructions of one operation, both ends",
                      "Instructions of a call over its size", "Latency over sessions", "Rate of a server",
                      "Rate without one of them"):
            self.assertIn(title, titles)
        self.assertNotIn("Left out: ", text)
        self.assertIn("A &lt;fast&gt; one", text)
        self.assertIn("<td>75%</td>", text)  # the share of an optimisation
        self.assertIn("<td>3.5 to 4</td><td>not known</td>", text)  # less than the runs differ
        self.assertIn("<td>--post now</td>", text)
        self.assertIn("nodes killed", text)

    def test_the_page_needs_nothing_from_elsewhere(self):
        text = page.page(synthetic()).replace("http://www.w3.org/2000/svg", "")
        for word in ("http", "<script", "<img", "<link", "@import", "url("):
            self.assertNotIn(word, text)
        self.assertIn("prefers-color-scheme: dark", text)

    def test_what_is_missing_is_said(self):
        content = synthetic()
        for key in list(content["sections"]):
            del content["sections"][key]
            content["notes"][key] = f"no {key} today"
        text = page.page(content)
        for key, _, _ in page.SECTIONS:
            self.assertIn(f"Left out: no {key} today.", text)

    def test_libraries_that_are_not_built_and_busy_machines_are_named(self):
        content = synthetic()
        content["sections"]["curves"]["missing"] = ["peer-ucx"]
        self.assertIn("not built: peer-ucx.", page.page(content))
        for run in content["sections"]["curves"]["runs"]:
            run["busy"] = True
        self.assertIn("No run counted", page.page(content))
        content["sections"]["curves"]["accept_busy"] = True
        self.assertIn("no measure of the libraries", page.page(content))


class CheckTest(unittest.TestCase):
    def faults_after(self, *changes):
        """Returns the faults of a whole page in which these texts were replaced; each must occur."""
        content = synthetic()
        content["sections"]["curves"]["runs"] += [
            run_of(library, size, 100 + size, mode=mode, window=window, chart_name=name)
            for library in ("spinwire", "ucx", "calls") for size in (32, 65536) for mode in ("1t", "2p")
            for window in (1, 32) for name in ("exchange", "write") if (library == "spinwire") == (name == "write")]
        content["sections"]["stages"]["recorded"] += [("message_32_bytes_window_1", 10.0),
                                                      ("message_64_bytes_window_1", 12.0)]
        text = page.page(content)
        for old, new in changes:
            self.assertIn(old, text)
            text = text.replace(old, new)
        return list(check_report.faults_of(text))

    def test_a_whole_page_has_no_fault(self):
        self.assertEqual(self.faults_after(), [])

    def test_what_is_missing_is_found(self):
        for fault, *changes in (
                ("there is no section 'The machine'", ('<h2 id="machine">', "<h2>")),
                ("leads nowhere", ('href="#clients"', 'href="#customers"')),
                ("leads nowhere", ('href="#clients"', 'href="clients.html"')),
                ("needs something from elsewhere", ("<p>", '<p><img src="x.png">')),
                ("there is no picture 'Rate of a server'", ("Rate of a server", "Speed of a server")),
                ("a picture is no XML", ("</title>", "</titel>")),
                ("is empty", ("<polyline", "<line"), ("<rect", "<line"), ("<circle", "<line")),
                ("a coordinate that is no number", ('points="', 'points="nan,1 ')),
                ("a table has no rows", ("<td>", "<th>"), ("</td>", "</th>")),
                ("it is left out: no server", ("Processes that each have", "Left out: no server.</p>"))):
            self.assertIn(fault, " ".join(self.faults_after(*changes)), changes)


class SummaryTest(unittest.TestCase):
    def test_the_summary_says_where_it_was_measured(self):
        text = page.summary(synthetic())
        root = xml.etree.ElementTree.fromstring(text)
        self.assertEqual(len(root.findall(SVG + "svg")), 2)
        words = " ".join(element.text for element in root.findall(SVG + "text"))
        for part in ("A <fast> one, processors: 2", "2026-01-02", "commit abc", "medians"):
            self.assertIn(part, words)

    def test_a_report_without_curves_has_none(self):
        content = synthetic()
        del content["sections"]["curves"]
        with self.assertRaises(ValueError):
            page.summary(content)


class DriverTest(unittest.TestCase):
    def test_an_earlier_report_is_written_again(self):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            path = os.path.join(folder, "report.json")
            with open(path, "w", encoding="utf-8") as file:
                json.dump(synthetic(), file)
            self.assertEqual(make_report.main(["--read", path, "--out", folder]), 0)
            self.assertEqual(make_report.main(["--read", path, "--record", os.path.join(folder, "s.svg")]), 0)
            self.assertEqual(sorted(os.listdir(folder)), ["index.html", "report.json", "s.svg"])

    def test_a_program_that_is_missing_leaves_out_its_section_only(self):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
            content = make_report.measure(make_report.parse(["--bin", folder, "--only", "factors,sessions"]))
            self.assertEqual(set(content["sections"]), {"machine"})
            self.assertIn("is not built", content["notes"]["factors"])
            self.assertEqual(content["notes"]["curves"], "not asked for")

    def test_every_factor_is_a_setting_or_an_option(self):
        with open("tools/spinwire_perf.cc", encoding="utf-8") as file:
            options = file.read()
        with open("conf/default.toml", encoding="utf-8") as file:
            known, section = set(), ""
            for line in file:
                if line.startswith("["):
                    section = line.strip("[]\n")
                elif "=" in line and not line.startswith("#"):
                    known.add(f"SPINWIRE_{section}_{line.split('=')[0].strip()}".upper())
        for _, arguments, base, factors in sections.FACTORS:
            self.assertLessEqual(set(base), known)
            for off in factors.values():
                if isinstance(off, dict):
                    self.assertLessEqual(set(off), known)
                else:
                    self.assertIn(off[0], options)


if __name__ == "__main__":
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
    unittest.main()
