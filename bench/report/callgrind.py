"""Reads what callgrind has counted, by the folder of the source."""

import collections
import re


def by_folder(text):
    """Returns the instructions of a callgrind file by the folder of src/ whose code they are. The file
    is written with --compress-strings=no --compress-pos=no."""
    counts = collections.Counter()
    folder, is_call = "other", False
    for line in text.splitlines():
        name, _, value = line.partition("=")
        if name in ("fl", "fi", "fe"):
            folder = folder_of(value)
        elif name == "calls":
            is_call = True
        elif line[:1].isdigit():
            if not is_call:  # the line after calls= has what the callee took
                counts[folder] += int(line.split()[1])
            is_call = False
    return counts


def folder_of(path):
    """Returns "rpc" for a file below src/rpc, and which code any other file is."""
    found = re.search(r"(?:^|/)src/([a-z]+)/", path)
    if found:
        return found.group(1)
    if re.search(r"(?:^|/)include/spinwire/", path):
        return "headers"
    if re.search(r"(?:^|/)bench/", path):
        return "program"
    return "system libraries"


def per_operation(counts, operations):
    """Returns the instructions of an operation, without folders that have next to none."""
    return {folder: count / operations for folder, count in counts.items() if count >= operations / 20}
