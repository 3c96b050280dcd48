"""Running the command as a user does: as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).parents[2]


class Command:
    """Runs ``apportion`` with arguments; the repository's root is on the path, so that factories in tests are found."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self.env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "COLUMNS": "80"}

    def start(self, *args: object) -> subprocess.Popen:
        if args[0] == "fit" and "--repair-steps" not in args:
            args = (*args, "--repair-steps", 10)  # repair is judged elsewhere
        return subprocess.Popen(
            [sys.executable, "-m", "apportion", *map(str, args)],
            cwd=self.cwd,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *args: object) -> subprocess.CompletedProcess:
        process = self.start(*args)
        out, err = process.communicate(timeout=600)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def json(self, *args: object) -> dict:
        done = self(*args, "--json")
        assert done.stdout.count("\n") == 1, done.stderr
        return {**json.loads(done.stdout), "exit": done.returncode}


@pytest.fixture
def apportion(tmp_path):
    return Command(tmp_path)


@pytest.fixture
def images(tmp_path):
    """Inputs for ``tests.factories:small_cnn``."""
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "images.safetensors"
    save_file({"0": torch.randn(120, 3, 16, 16, generator=generator)}, path)
    return path
