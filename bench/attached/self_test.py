#!/usr/bin/env -S python3 -B
"""Tests the statistics of the driver in this folder. Runs no program."""

import os
import random
import tempfile
import unittest
import unittest.mock

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

    def test_few_slices_show_nothing(self):
        for count in (1, run.FEWEST_PAIRS - 1):
            for ratio in (1, 0.5):
                text, too_much, is_known = run.verdict(slices(ratio, count=count), 0.01)
                self.assertIn("not known", text)
                self.assertFalse(too_much or is_known)

    def test_the_interval_has_the_ratio(self):
        low, high = run.confidence_interval(slices(0.95))
        self.assertLess(low, 0.95)
        self.assertGreater(high, 0.95)
        self.assertLess(high - low, 0.01)

    def test_one_slow_slice_changes_little(self):
        pairs = slices(1)
        pairs[3][1] /= 10
        self.assertAlmostEqual(run.ratio_of_medians(pairs), run.ratio_of_medians(slices(1)), 3)


class ScreensTest(unittest.TestCase):
    def test_screens_are_counted_wherever_a_read_ends(self):
        text = b"one" + run.SCREEN + b"two" + run.SCREEN + run.SCREEN
        for size in range(1, len(text) + 1):
            rest, count = b"", 0
            for at in range(0, len(text), size):
                shown, rest = run.count_screens(rest, text[at:at + size])
                count += shown
            self.assertEqual(count, 3, size)

    def test_a_tool_that_draws_too_seldom_is_not_attached(self):
        run.check_screens(10, 2)
        with self.assertRaises(SystemExit):
            run.check_screens(9, 2)


class ProgramsTest(unittest.TestCase):
    def test_missing_programs_are_named(self):
        with self.assertRaisesRegex(SystemExit, "spinwire-perf is missing"):
            run.check_programs(run.parse(["--bin=/nonexistent", "--operations=0"]))


class RecordTest(unittest.TestCase):
    @staticmethod
    def is_recorded(path, commit, arguments, is_known):
        args = run.parse(["--record", path, *arguments])
        with unittest.mock.patch.object(run, "commit", lambda: commit):
            try:
                run.check_recordable(args)
                run.record(args, ["figure"], is_known)
            except SystemExit:
                return False
        return os.path.exists(path)

    def test_it_says_what_was_measured_and_how(self):
        args = run.parse(["--slices=30", "--secs=2", "--size=64", "--operations=1000",
                          "--cpu=0", "--tool-cpu=1"])
        text = run.record_text(args, ["first figure", "second figure"])
        self.assertIn("command: bench/attached/run.py --slices=30 --secs=2 --size=64 --operations=1000 "
                      "--limit=0.01 --cpu=0 --tool-cpu=1\n", text)
        for part in ("commit:  ", "machine: ", "\nfirst figure\nsecond figure\n"):
            self.assertIn(part, text)

    def test_what_shows_nothing_is_not_recorded(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "attached.txt")
            good = ["--cpu=0", "--tool-cpu=1"]
            for arguments, commit, is_known in (
                    (good, "abc", False), ([*good, "--slices=29"], "abc", True),
                    (good, "abc-dirty", True), (["--cpu=1", "--tool-cpu=1"], "abc", True),
                    ([*good, "--operations=0"], "abc", True)):
                self.assertFalse(self.is_recorded(path, commit, arguments, is_known), arguments)
            self.assertTrue(self.is_recorded(path, "abc", good, True))
            with open(path, encoding="utf-8") as file:
                self.assertTrue(file.read().endswith("\nfigure\n"))


if __name__ == "__main__":
    unittest.main()
