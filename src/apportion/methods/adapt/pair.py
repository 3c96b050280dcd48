"""Two networks measured beside each other: a slice and the whole, or the whole in int8 and in float."""

from __future__ import annotations

import tempfile
from pathlib import Path

from apportion.device.measure import Candidate, Session, measure
from apportion.device.measure import Shape as InputShape
from apportion.device.probe import int8_twin, working_target
from apportion.models.network import Network
from apportion.models.save import save

WHOLE, MADE = "whole", "made"


def measure_pair(whole: str, made: Path, target: str, shape: InputShape, *, int8: bool) -> Session:
    """The model beside the whole network in float, in four fresh processes, both with the instructions it needs."""
    candidates = [Candidate(name=WHOLE, ref=whole), Candidate(name=MADE, ref=str(made))]
    where = working_target(target)
    twin = int8_twin(where) if int8 else None
    session = measure(candidates, where.with_isa(twin.isa) if twin else where, shape, processes=4, tolerance=0.01)
    session.require()
    return session


def share_in_int8(whole: str, network: Network, target: str, shape: InputShape) -> float:
    """The latency of the whole network in int8, as a share of what it takes in float in the same processes."""
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / MADE
        save(network.replace(calibration=(network.inputs,)), made)
        return measure_pair(whole, made, target, shape, int8=True).ratio(MADE, WHOLE).value
