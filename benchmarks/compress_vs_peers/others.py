"""Peers that need environments of their own: modelopt's FastNAS and Olive."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.compress_vs_peers.points import Point

NAMES = ("FastNAS", "Olive")


def run(pair) -> None:
    """Adds the points of the peers that can be installed and run here."""


def not_run(points: Sequence[Point]) -> dict[str, str]:
    """Why a peer has no points."""
    return {name: "no environment" for name in NAMES if not any(point.tool == name for point in points)}
