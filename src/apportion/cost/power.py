"""The power in a profile: read once where the machine has an energy counter, and used where one has none."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from apportion.cost.draw import Sizes
from apportion.cost.profile import Profile
from apportion.cost.sample import CostError
from apportion.device.energy import find_source
from apportion.device.measure import Candidate, Shape, measure
from apportion.device.power import Drawn, Power, PowerCurve
from apportion.device.target import Target
from apportion.errors import MeasureError
from apportion.models.cut import slice_network
from apportion.models.network import Network
from apportion.models.partition import Partition
from apportion.models.save import save

WHOLE, CHEAPEST = "whole", "cheapest"
SECONDS = 1.0  # of reading the counter, for each of the two in every process
PROCESSES = 2


def read_power(
    network: Network, partition: Partition, cheapest: Sizes, target: Target, shape: Shape
) -> PowerCurve | None:
    """What the whole network and its cheapest slice draw, by the device's counter; None where that says nothing."""
    if find_source(target.device).joules is None:
        return None
    sliced = slice_network(network, partition, partition.keep(cheapest))
    with tempfile.TemporaryDirectory(prefix="apportion-power-") as scratch:
        candidates = []
        for name, made in ((WHOLE, network), (CHEAPEST, sliced)):
            folder = Path(scratch) / name
            save(made, folder)
            candidates.append(Candidate(name=name, ref=str(folder), factory=network.origin.factory))
        session = measure(candidates, target, shape, processes=PROCESSES, seconds=0.3, energy_seconds=SECONDS)
    try:
        session.require()
        whole, least = (Drawn.of(session.energy(name), session.latency(name)) for name in (WHOLE, CHEAPEST))
    except (MeasureError, ValueError, ZeroDivisionError):  # a counter that stood still; prices are none the worse
        return None
    return PowerCurve(whole=whole, cheapest=least, source=session.conditions["energy"]["why"])


def parse_power(text: str, target: Target) -> Power | PowerCurve:
    """The power that a user gives: a number of watts, or the path of a profile on the same target that holds one.

    Raises:
        CostError: neither of them.
    """
    try:
        watts = float(text)
    except ValueError:
        return _power_of(Path(text), target)
    try:
        return Power(watts=watts, source="as given")
    except ValueError:
        raise CostError(f"--power {text} is no power; give watts above 0, or a profile that holds them") from None


def _power_of(path: Path, target: Target) -> PowerCurve:
    if not path.is_file():
        raise CostError(f"--power {path} is neither a number of watts nor a file; give watts above 0, or a profile")
    profile = Profile.load(path)
    if profile.target.name != target.name:
        raise CostError(f"{path} holds the power of {profile.target.name}, not of {target.name}; give one of its own")
    if profile.power is None:
        raise CostError(f"{path} holds no power; calibrate on a machine with an energy counter, or give watts")
    processor = profile.machine.get("processor", "an unknown processor")
    return replace(profile.power, source=f"from {path}, read by {profile.power.source} on {processor}")
