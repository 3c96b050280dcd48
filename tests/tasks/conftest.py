"""Fixtures of the task tests: real data where they are, made-up domains where they need not be real."""

from __future__ import annotations

import io

import numpy as np
import pytest

from apportion.tasks.domain import Domain, data_root


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, so that nothing is read from an earlier run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def data():
    """Skips, with the reason, where the data folder is absent."""
    if not (data_root() / "text").is_dir():
        pytest.skip(f"no data under {data_root()}; set APPORTION_DATA")


@pytest.fixture
def pillow():
    return pytest.importorskip("PIL.Image", reason="pillow is not installed")


def made_domain(counts, name="made", kind="text", content=None) -> Domain:
    """A domain with so many examples per class."""
    label_N = np.repeat(np.arange(len(counts)), counts)
    return Domain(
        name=name,
        kind=kind,
        classes=tuple(f"c{place}" for place in range(len(counts))),
        label_N=label_N,
        content=content or tuple(f"{name} text {row}" for row in range(len(label_N))),
        licence="none",
        provenance="made up",
        checksum=f"{name}{counts}",
    )


def png(pillow, colour=(200, 10, 10), side=12) -> bytes:
    file = io.BytesIO()
    pillow.new("RGB", (side, side), colour).save(file, format="PNG")
    return file.getvalue()
