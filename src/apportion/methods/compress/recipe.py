"""Recipes of int8: of the ways a runtime can quantise, the quickest on the target whose quality stands."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from apportion.core.meter import Meter, Reading
from apportion.device.measure import Candidate, measure
from apportion.errors import MeasureError, TargetError
from apportion.methods.compress.bench import Bench
from apportion.methods.compress.quantise import Quantise
from apportion.models.network import Int8, Network
from apportion.models.quantise import quantised_layers
from apportion.models.save import save
from apportion.tasks.batches import Examples

TORCH, DYNAMIC = Int8(activations="int8", scope="dynamic"), Int8(activations="uint8", scope="dynamic")
RECIPES = {
    "ort": tuple(
        Int8(activations=signedness, scope=scope) for scope in ("graph", "layers") for signedness in ("uint8", "int8")
    ),
    "openvino": (Int8(),),
    "compile": (TORCH,),
}
STANDS = 0.01  # of quality that a quicker recipe may lose against the best one
PROCESSES, SECONDS_EACH = 5, 0.15  # enough processes that one which was disturbed does not count


@dataclass(frozen=True)
class Tried:
    """A recipe as it was measured on the network: its latency as a share of fp32's, and its own artefact's quality."""

    int8: Int8
    ratio: Reading
    quality: Reading

    def to_json(self) -> dict[str, Any]:
        return {"int8": asdict(self.int8), "ratio": self.ratio.to_json(), "quality": self.quality.to_json()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Tried:
        told = fields["int8"]
        int8 = Int8(activations=told["activations"], scope=told["scope"], in_float=tuple(told["in_float"]))
        return cls(int8, Reading.from_json(fields["ratio"]), Reading.from_json(fields["quality"]))


def quickest(tried: Sequence[Tried], *, saves_time: bool = True) -> Tried | None:
    """The quickest of the recipes of use whose quality stands; None where none is of use.

    It stands if it reads less than the best of them by no more than ``STANDS`` or a standard error, of which few
    examples leave more.

    Args:
        saves_time: only recipes that are quicker than fp32 are of use; else they may be wanted for their size.
    """
    of_use = [one for one in tried if one.ratio.value < 1] if saves_time else list(tried)
    if not of_use:
        return None
    best = max((one.quality for one in of_use), key=lambda quality: quality.value)
    least = best.value - max(STANDS, best.stderr)
    return min((one for one in of_use if one.quality.value >= least), key=lambda one: one.ratio.value)


def recipes_for(network: Network, runtime: str) -> tuple[Int8, ...]:
    """The recipes to try: on ONNX Runtime also ranges taken anew, where linear layers hold most of the weights."""
    weights = {name: layer.weight.numel() for name, layer in quantised_layers(network).items()}  # type: ignore[operator]
    linear = quantised_layers(network.replace(int8=DYNAMIC))
    mostly_linear = 2 * sum(weights[name] for name in linear) > sum(weights.values())
    return RECIPES[runtime] + ((DYNAMIC,) if runtime == "ort" and mostly_linear else ())


def try_recipes(
    network: Network, rule: Quantise, bench: Bench, meter: Meter[Network], examples: Examples
) -> list[Tried]:
    """All recipes of the target's runtime, timed in turns beside fp32 and judged by their artefacts' own answers.

    One that can't be built or run is left out. What was found is stored, so that a resumed run chooses alike.
    """

    def now() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="apportion-recipes-") as scratch:
            return {"tried": [one.to_json() for one in _measured(network, rule, bench, meter, examples, Path(scratch))]}

    stored = bench.store.get_or_make({"run": bench.run, "what": "int8 recipes", "target": bench.target.identity}, now)
    return [Tried.from_json(fields) for fields in stored["tried"]]


def can_mix(network: Network, rule: Quantise, bench: Bench) -> bool:
    """Whether the runtime can leave single modules of this network in float: tried with the first that would be."""

    def now() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="apportion-mixed-") as scratch:
            mixed = rule.quantised(network, 1)
            save(mixed, Path(scratch) / "mixed")
            try:
                bench.artefact(mixed, Path(scratch) / "mixed")
            except (MeasureError, TargetError):
                return {"can": False}
            return {"can": True}

    what = {"run": bench.run, "what": "mixed precision", "target": bench.target.identity}
    return bool(bench.store.get_or_make(what, now)["can"])


def _measured(
    network: Network, rule: Quantise, bench: Bench, meter: Meter[Network], examples: Examples, scratch: Path
) -> list[Tried]:
    recipes = recipes_for(network, bench.target.runtime)
    candidates = [bench.original]
    quantised = {}
    for place, recipe in enumerate(recipes):
        folder = scratch / str(place)
        quantised[str(place)] = network.replace(calibration=rule.inputs(network), int8=recipe)
        save(quantised[str(place)], folder)
        candidates.append(Candidate(name=str(place), ref=str(folder), factory=bench.factory))
    seconds = SECONDS_EACH * len(candidates)
    session = measure(candidates, bench.target, bench.shape, processes=PROCESSES, seconds=seconds)
    if bench.original.name in session.failures:
        session.require()
    tried = []
    for name, model in quantised.items():
        if name not in session.failures:
            quality = bench.read_quality(meter, examples, model, scratch / name)
            tried.append(Tried(model.int8, session.ratio(name, to=bench.original.name), quality))
    return tried
