"""What every mistake must look like to a user."""

from __future__ import annotations

import subprocess


def assert_one_line(done: subprocess.CompletedProcess, code: int, *parts: str) -> None:
    """One line on standard error that says these things, nothing on standard output, and the exit code."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("apportion: ")
    for part in parts:
        assert part in lines[0]
