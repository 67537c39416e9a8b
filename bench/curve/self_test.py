#!/usr/bin/env -S python3 -B
"""Tests the statistics, the budgets and the plots of the curve driver. Runs no program."""

import contextlib
import io
import json
import os
import tempfile
import unittest
import xml.etree.ElementTree

import budgets
import plot
import report
import run
from results import Point, Results, size_name


def line(ns, placement="one", slices=10, bad=0, busy=False, all_slices=10):
    return json.dumps({"bad": bad, "busy": busy, "slices": all_slices, "ns": ns, "mode": "1t", "window": 1, "size": 0, "batch": 1,
                       "placements": {placement: {"ns": ns, "slices": slices}}})


def filled(*rows):
    """Results of (point, library, ns, placement) rows."""
    results = Results()
    for point, library, ns, *placement in rows:
        results.add(point, library, line(ns, *placement))
    return results


class ResultsTest(unittest.TestCase):
    point = Point("exchange", "2p", 1, 32)

    def test_medians_are_filed_by_placement(self):
        results = filled((self.point, "ucx", 1, "smt"), (self.point, "ucx", 9, "far"),
                         (self.point, "ucx", 2, "smt"), (self.point, "ucx", 30, "smt"))
        self.assertEqual(results.median(self.point, "ucx", "smt"), 2)
        self.assertEqual(results.median(self.point, "ucx", "far"), 9)
        self.assertIsNone(results.median(self.point, "ucx", "ccx"))

    def test_runs_with_few_slices_do_not_count(self):
        results = Results()
        results.add(self.point, "ucx", line(5, "smt", slices=2))
        self.assertIsNone(results.median(self.point, "ucx", "smt"))
        results.add(self.point, "ucx", line(5, "smt", slices=2, all_slices=2))
        self.assertEqual(results.median(self.point, "ucx", "smt"), 5)

    def test_wrong_operations_are_a_failure(self):
        with self.assertRaises(ValueError):
            Results().add(self.point, "ucx", line(5, bad=1))

    def test_disturbed_runs_do_not_count(self):
        for accepted, median in ((False, None), (True, 5)):
            results = Results(accept_busy=accepted)
            results.add(self.point, "ucx", line(5, "smt", busy=True))
            self.assertEqual(results.median(self.point, "ucx", "smt"), median)
            self.assertEqual(results.disturbed, int(not accepted))

    def test_a_ratio_needs_a_common_placement(self):
        results = filled((self.point, "ucx", 10, "far"), (self.point, "calls", 1, "smt"))
        self.assertEqual(results.ratio(self.point, "calls", "ucx"), (None, None))
        results.add(self.point, "calls", line(5, "far"))
        self.assertEqual(results.ratio(self.point, "calls", "ucx"), (0.5, "far"))

    def test_sizes_have_short_names(self):
        self.assertEqual([size_name(n) for n in (0, 1000, 1024, 8 << 20)], ["0", "1000", "1K", "8M"])
        self.assertEqual(run.sizes_of("32,1M,4K"), (32, 4096, 1 << 20))


class BudgetsTest(unittest.TestCase):
    def verdict(self, results, shape, library, against):
        return next(v for v in budgets.judge_ratios(results)
                    if (v.shape, v.library, v.against) == (shape, library, against))

    def test_the_worst_point_counts(self):
        sizes = {64: 5, 512: 8, 4096: 2}
        results = Results()
        for size, ns in sizes.items():
            point = Point("exchange", "1t", 8, size)
            results.add(point, "calls", line(ns))
            results.add(point, "ucx", line(10))
        v = self.verdict(results, "33 B … 4 KiB, one thread, windows 8 and 32", "calls", "ucx")
        self.assertEqual(v.measured, 0.8)
        self.assertTrue(v.is_behind)
        self.assertIn("512", v.where)

    def test_what_was_not_measured_is_not_behind(self):
        v = self.verdict(Results(), "32 B, symmetric, window 32", "calls", "ring")
        self.assertIsNone(v.measured)
        self.assertFalse(v.is_behind)

    def test_curves_are_compared_with_the_copies(self):
        results = filled((Point("write", "1t", 1, 8), "spinwire", 100),
                         (Point("write", "1t", 1, 4096), "spinwire", 300),
                         (Point("copy", "1t", 1, 4096), "memcpy", 100))
        (v,) = budgets.judge_curves(results)
        self.assertEqual(v.measured, 1.5)
        self.assertTrue(v.is_behind)

    def test_long_operations_are_compared_with_memcpy(self):
        results = filled((Point("write", "1t", 1, 1 << 20), "spinwire", 100),
                         (Point("copy", "1t", 1, 1 << 20), "memcpy", 95))
        (v,) = budgets.judge_copies(results)
        self.assertFalse(v.is_behind)

    def test_steps_are_found(self):
        results = filled((Point("exchange", "1t", 8, 32), "calls", 50),
                         (Point("exchange", "1t", 8, 48), "calls", 246),
                         (Point("exchange", "1t", 8, 64), "calls", 250))
        (step,) = budgets.find_steps(results)
        self.assertEqual((step.smaller.size, step.larger.size), (32, 48))
        self.assertAlmostEqual(step.ratio, 4.92)
        self.assertFalse(step.is_cliff)  # nobody knows without the copies
        for size in (32, 48):
            results.add(Point("copy", "1t", 8, size), "memcpy", line(4))
        self.assertTrue(budgets.find_steps(results)[0].is_cliff)

    def test_steps_over_a_missing_size_do_not_count(self):
        results = filled((Point("exchange", "1t", 8, 32), "calls", 50),
                         (Point("exchange", "1t", 8, 48), "ucx", 60),
                         (Point("exchange", "1t", 8, 64), "calls", 100))
        self.assertEqual(budgets.find_steps(results), [])


class PlanTest(unittest.TestCase):
    def test_every_library_is_measured(self):
        points = run.plan_curve(run.CHARTS, ("1t", "2p", "sym"), run.WINDOWS, None)
        jobs = [job for point in points for job in run.jobs_of(point)]
        self.assertEqual({j.library for j in jobs}, set(report.LIBRARIES))
        self.assertEqual(len(jobs), len(set((j.point, j.library) for j in jobs)))

    def test_every_budget_has_points(self):
        points = run.plan_curve(run.CHARTS, ("1t", "2p", "sym"), run.WINDOWS, None)
        for budget in budgets.BUDGETS:
            self.assertTrue(any(map(budget.covers, points)), budget.shape)


class PlotTest(unittest.TestCase):
    def test_ticks_lie_inside(self):
        self.assertEqual(plot.ticks(3, 60), [5, 10, 20, 50])
        self.assertEqual(plot.ticks(1, 1e6), [1, 10, 100, 1e3, 1e4, 1e5, 1e6])
        self.assertEqual(plot.ticks(0, 1), [])

    def test_the_scale_is_logarithmic(self):
        to_x = plot.scale(1, 100, 0, 200)
        self.assertAlmostEqual(to_x(10), 100)

    def test_a_plot_is_valid_xml_with_a_line_per_library(self):
        panel = plot.Panel("a < b", "x", "y", {"ucx": [(1, 2), (4, 8)], "calls": [(1, 1), (4, 2)]},
                           {1: "1", 4: "4"})
        root = xml.etree.ElementTree.fromstring(plot.draw([panel, panel]))
        lines = root.findall("{http://www.w3.org/2000/svg}polyline")
        self.assertEqual(len(lines), 4)

    def test_files_and_tables_are_written(self):
        results = Results()
        for size in (0, 32, 64):
            for library, ns in (("calls", 50 + size), ("ucx", 60 + size)):
                results.add(Point("exchange", "1t", 8, size), library, line(ns))
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
            report.write_files(results, {"processor": "p", "time": "t"}, folder)
            report.print_table(results)
            report.print_verdicts(budgets.judge_ratios(results))
            report.print_steps(budgets.find_steps(results))
            self.assertIn("curve-exchange-1t-w8.svg", os.listdir(folder))
            with open(os.path.join(folder, "curve.json"), encoding="utf-8") as file:
                self.assertEqual(len(json.load(file)["medians"]), 6)
        self.assertIn("124.0 (1)", out.getvalue())


if __name__ == "__main__":
    unittest.main()
