"""Reads HdrHistogram's log format, as spinwire-perf and spinwire-stat write it."""

import base64
import collections
import struct
import zlib


Interval = collections.namedtuple("Interval", "begin length counts")


def read_log(text):
    """Returns intervals by tag: seconds since 1970, seconds, and a sorted list of (least value of a
    bucket, count)."""
    intervals = {}
    for line in text.splitlines():
        if line.startswith("Tag="):
            tag, begin, length, _, encoded = line[4:].split(",")
            intervals[tag] = Interval(float(begin), float(length), decode(encoded))
    return intervals


def merge(histograms):
    """Returns the counts of several histograms together."""
    total = collections.Counter()
    for counts in histograms:
        for value, count in counts:
            total[value] += count
    return sorted(total.items())


def decode(encoded):
    """Returns the counts of a histogram in the compressed encoding V2."""
    raw = base64.b64decode(encoded)
    cookie, length = struct.unpack(">II", raw[:8])
    if cookie != 0x1C849314:
        raise ValueError("no compressed histogram")
    plain = zlib.decompress(raw[8:8 + length])
    cookie, length, _, digits = struct.unpack(">IIII", plain[:16])
    if cookie != 0x1C849313:
        raise ValueError("no histogram in encoding V2")
    half = 1 << (2 * 10**digits - 1).bit_length() - 1
    index, counts = 0, []
    for value in numbers(plain[40:40 + length]):
        if value < 0:
            index -= value
            continue
        octave, place = divmod(index, half)
        counts.append((index if octave < 2 else (half + place) << (octave - 1), value))
        index += 1
    return counts


def numbers(data):
    """Yields the signed numbers of a ZigZag LEB128 text."""
    value = shift = 0
    for byte in data:
        if shift == 56:
            value |= byte << shift
            last = True
        else:
            value |= (byte & 0x7F) << shift
            last = byte < 0x80
        shift += 7
        if last:
            yield value >> 1 ^ -(value & 1)
            value = shift = 0


def shares(counts):
    """Returns (value, share of all that are at most in its bucket), cumulative."""
    total = sum(count for _, count in counts)
    seen, points = 0, []
    for value, count in counts:
        seen += count
        points.append((value, seen / total))
    return points


def percentile(points, share):
    """Returns the least value that this share of all does not exceed, of what shares() returned."""
    return next((value for value, reached in points if reached >= share), points[-1][0])
