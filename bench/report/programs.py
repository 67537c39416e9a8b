"""Runs the programs of this tree for the report."""

import contextlib
import json
import os
import select
import subprocess
import time


class Failed(Exception):
    """A measurement that cannot be made; its text says why."""


class Programs:
    """The programs of a folder, and where they run. None runs for longer than until the deadline."""

    def __init__(self, folder, deadline):
        self.folder = folder
        self.deadline = deadline
        self.processors = sorted(os.sched_getaffinity(0))

    def path(self, name):
        path = os.path.join(self.folder, name)
        if not os.access(path, os.X_OK):
            raise Failed(f"{name} is not built")
        return path

    def run(self, name, arguments, environment=None, seconds=60):
        """Returns what a program wrote to stdout."""
        return self.wait(self.start(name, arguments, environment), seconds)

    def start(self, name, arguments, environment=None, under=()):
        """Starts a program, `under` another one such as valgrind."""
        try:
            return subprocess.Popen([*under, self.path(name), *map(str, arguments)],
                                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                    env={**os.environ, **(environment or {})})
        except FileNotFoundError:
            raise Failed(f"{under[0]} is not installed") from None

    def wait(self, process, seconds=60):
        name = os.path.basename(process.args[0])
        left = self.deadline - time.monotonic()
        try:
            out, err = process.communicate(timeout=max(0.1, min(seconds, left)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise Failed(f"the time limit was over in {name}" if left < seconds else
                         f"{name} did not end within {seconds} s") from None
        if process.returncode != 0:
            last = err.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
            raise Failed(last[0])
        return out

    def perf(self, arguments, environment=None, seconds=60):
        """Returns the result of spinwire-perf."""
        return json.loads(self.run("spinwire-perf", [*arguments, "--json"], environment, seconds))

    @contextlib.contextmanager
    def server(self, arguments=(), environment=None):
        """A serving spinwire-perf on the first processor; yields the options of its clients."""
        process = self.start("spinwire-perf", ["--port", 0, *arguments, *self.pinned(0)], environment)
        try:
            yield ["127.0.0.1", "--port", port_of(process)]
        finally:
            process.terminate()
            process.communicate()

    def pinned(self, place):
        """Returns the option that pins a program; place 0 has a processor of its own if there are two."""
        others = self.processors[1:] or self.processors
        cpu = self.processors[0] if place == 0 else others[(place - 1) % len(others)]
        return ["--cpu", cpu]


def port_of(process, seconds=30):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ready, _, _ = select.select([process.stdout], [], [], 1)
        line = process.stdout.readline() if ready else ""
        if "listening on " in line:
            return int(line.rsplit(":", 1)[1])
        if ready and not line:
            break
    process.terminate()  # else the next line waits for its end
    raise Failed(f"the server did not start: {process.stderr.read().strip()[-200:]}")
