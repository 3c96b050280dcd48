"""Running the child process under limits; whatever becomes of it is a value, not an exception."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_MEMORY_BYTES = 16 * 2**30
CHILD = "apportion.device.child"
_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a child may take and how much memory it may hold."""

    seconds: float = 300.0
    memory_bytes: int = DEFAULT_MEMORY_BYTES


@dataclass(frozen=True)
class Failure:
    """What became of a candidate that could not be measured.

    ``kind`` is one of: died, hung, out of memory, non-finite, failed.
    """

    kind: str
    message: str


@dataclass(frozen=True)
class Ended:
    """How a child ended: with a result, or with a failure about the candidate it was working on (if it said)."""

    result: dict[str, Any] | None
    failure: Failure | None = None
    culprit: str | None = None


def run_child(
    job: dict[str, Any], environment: dict[str, str], limits: Limits, steps: int = 1, child: str = CHILD
) -> Ended:
    """Runs one job in a fresh process, which may take the time limit for each of its steps.

    Args:
        child: the module that is run; it reads the job from its standard input and writes to the file ``result`` names.
    """
    with tempfile.TemporaryDirectory(prefix="apportion-") as scratch:
        result, marker, errors = (Path(scratch) / name for name in ("result.json", "marker", "errors"))
        search = os.pathsep.join(path for path in sys.path if path)  # a factory is found where the parent found it
        with errors.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", child],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, **environment, "PYTHONPATH": search},
            )
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps({**job, "result": str(result), "marker": str(marker)}).encode())
            process.stdin.close()
            failure = _watch(process, limits, steps)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        culprit = marker.read_text() if marker.is_file() else None
        if failure is None and process.returncode < 0:
            name = signal.Signals(-process.returncode).name
            failure = Failure("died", f"killed by {name}{_HINTS.get(name, '')}")
        if failure is None and (process.returncode or not result.is_file()):
            lines = errors.read_text(errors="replace").strip().splitlines()
            failure = Failure("failed", lines[-1][:300] if lines else f"exit code {process.returncode}")
        if failure is not None:
            return Ended(None, failure, culprit)
        return Ended(json.loads(result.read_text()))


_HINTS = {
    "SIGILL": " (an instruction this machine does not have)",
    "SIGKILL": " (most likely the system ran out of memory)",
}


def _watch(process: subprocess.Popen[bytes], limits: Limits, steps: int) -> Failure | None:
    deadline = time.monotonic() + limits.seconds * steps
    while True:
        try:
            process.wait(_POLL_S)
            return None
        except subprocess.TimeoutExpired:
            pass
        if time.monotonic() > deadline:
            return Failure("hung", f"killed after {limits.seconds * steps:g} s")
        held = _resident_bytes(process.pid)
        if held > limits.memory_bytes:
            return Failure("out of memory", f"held {held / 2**30:.1f} GiB of {limits.memory_bytes / 2**30:.1f} allowed")


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
