#!/usr/bin/env -S python3 -B
"""Tests the statistics of the driver in this folder. Runs no program."""

import os
import random
import tempfile
import unittest

import run


def slices(ratio, noise=0.002, count=30):
    draw = random.Random(7)
    return [[10 * draw.gauss(1, noise), 10 * ratio * draw.gauss(1, noise)] for _ in range(count)]


class VerdictTest(unittest.TestCase):
    def test_a_free_tool_is_within_the_limit(self):
        text, too_much, is_known = run.verdict(slices(1), 0.01)
        self.assertIn("within 1.0%", text)
        self.assertTrue(is_known)
        self.assertFalse(too_much)

    def test_a_tool_that_costs_more_fails(self):
        text, too_much, is_known = run.verdict(slices(0.97), 0.01)
        self.assertIn("costs more than 1.0%", text)
        self.assertTrue(too_much)
        self.assertTrue(is_known)

    def test_few_or_noisy_slices_show_nothing(self):
        for pairs in (slices(0.98, noise=0.1), slices(0.99)):
            text, too_much, is_known = run.verdict(pairs, 0.01)
            self.assertIn("not known to 1.0%", text)
            self.assertFalse(too_much)
            self.assertFalse(is_known)

    def test_the_interval_has_the_ratio(self):
        low, high = run.confidence_interval(slices(0.95))
        self.assertLess(low, 0.95)
        self.assertGreater(high, 0.95)
        self.assertLess(high - low, 0.01)

    def test_one_slow_slice_changes_little(self):
        pairs = slices(1)
        pairs[3][1] /= 10
        self.assertAlmostEqual(run.ratio_of_medians(pairs), run.ratio_of_medians(slices(1)), 3)


class RecordTest(unittest.TestCase):
    def test_it_says_what_was_measured_and_how(self):
        args = run.parse(["--slices=30", "--secs=2", "--size=64", "--operations=1000"])
        text = run.record_text(args, ["first figure", "second figure"])
        self.assertIn("command: bench/attached/run.py --slices=30 --secs=2 --size=64 --operations=1000\n",
                      text)
        for part in ("commit:  ", "machine: ", "\nfirst figure\nsecond figure\n"):
            self.assertIn(part, text)

    def test_what_shows_nothing_is_not_recorded(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "attached.txt")
            for slices, is_known in ((30, False), (29, True)):
                args = run.parse([f"--slices={slices}", "--record", path])
                with self.assertRaises(SystemExit):
                    run.record(args, ["figure"], is_known)
                self.assertFalse(os.path.exists(path))
            run.record(run.parse(["--record", path]), ["figure"], True)
            with open(path, encoding="utf-8") as file:
                self.assertTrue(file.read().endswith("\nfigure\n"))


if __name__ == "__main__":
    unittest.main()
