"""Toy models with known answers: small enough to try every setting, noisy only where a generator or a seed says so."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeAlias, TypeVar

from apportion.core.knob import Choice, Knob, Setting, Value
from apportion.core.meter import Meter, Reading

M = TypeVar("M")
Terms: TypeAlias = Mapping[str, Mapping[Value, float]]


class SetValue:
    """The rule of a model that is nothing but its own setting."""

    def apply(self, model: Setting, knob: Knob, value: Value) -> Setting:
        knob.check(value)
        return model.replace(knob.name, value)


@dataclass
class Additive:
    """Reads ``base`` plus one term per knob; a knob without terms adds nothing.

    Example:
        >>> Additive({"a": {1: 2.0, 2: 5.0}}, base=1.0).read(Setting({"a": 2, "b": 7})).value
        6.0
    """

    terms: Terms
    unit: str = "ms"
    base: float = 0.0

    def read(self, model: Setting) -> Reading:
        parts = (self.terms[name][value] for name, value in model.items() if name in self.terms)
        return Reading(value=math.fsum((self.base, *parts)), unit=self.unit)


@dataclass
class Scrambled:
    """Reads a number from ``low`` to ``high`` that depends on the whole setting: neither additive nor monotone."""

    seed: int
    low: float = 1.0
    high: float = 10.0
    unit: str = "ms"

    def read(self, model: Setting) -> Reading:
        return Reading(value=_generator(self.seed, self.unit, model).uniform(self.low, self.high), unit=self.unit)


@dataclass
class Jittered:
    """A meter with Gaussian noise that is a pure function of seed and setting.

    So a run that was killed and resumed reads what the undisturbed one did.
    """

    meter: Meter[Setting]
    stderr: float
    seed: int

    def __post_init__(self) -> None:
        self.unit = self.meter.unit

    def read(self, model: Setting) -> Reading:
        noise = _generator(self.seed, self.unit, model).gauss(0.0, self.stderr)
        exact = self.meter.read(model)
        return replace(exact, value=exact.value + noise, stderr=self.stderr)


@dataclass
class Noisy:
    """A meter with Gaussian noise from a generator: no two reads agree."""

    meter: Meter[Setting]
    stderr: float
    generator: random.Random

    def __post_init__(self) -> None:
        self.unit = self.meter.unit

    def read(self, model: Setting) -> Reading:
        exact = self.meter.read(model)
        return replace(exact, value=exact.value + self.generator.gauss(0.0, self.stderr), stderr=self.stderr)


@dataclass
class Scaled:
    """Reads ``factor`` times what another meter does: a device that is slower than predicted."""

    meter: Meter[Setting]
    factor: float

    def __post_init__(self) -> None:
        self.unit = self.meter.unit

    def read(self, model: Setting) -> Reading:
        exact = self.meter.read(model)
        return replace(exact, value=exact.value * self.factor, stderr=exact.stderr * self.factor)


@dataclass
class Counting(Generic[M]):
    """A meter that remembers every model it read."""

    meter: Meter[M]
    models: list[M] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unit = self.meter.unit

    def read(self, model: M) -> Reading:
        self.models.append(model)
        return self.meter.read(model)


@dataclass(frozen=True)
class Toy:
    """Knobs whose setting is the model, and meters over it; ``meters`` has ``latency`` and ``quality``."""

    knobs: tuple[Knob, ...]
    meters: Mapping[str, Meter[Setting]]

    @property
    def start(self) -> Setting:
        return Setting.dearest(self.knobs)

    @property
    def rules(self) -> dict[str, SetValue]:
        return {knob.name: SetValue() for knob in self.knobs}

    def settings(self) -> list[Setting]:
        """Every setting there is."""
        names = [knob.name for knob in self.knobs]
        return [
            Setting(dict(zip(names, values, strict=True)))
            for values in itertools.product(*(knob.values for knob in self.knobs))
        ]

    def best_quality(self, limit_ms: float) -> float:
        """The highest quality of any setting within the limit, by trying them all."""
        return max(
            self.meters["quality"].read(setting).value
            for setting in self.settings()
            if self.meters["latency"].read(setting).value <= limit_ms
        )


def concave_toy(generator: random.Random, *, num_knobs: int = 3, num_values: int = 4) -> Toy:
    """A separable toy on which greedy is optimal at every cost it passes through.

    Each step down a knob loses more quality per cost saved than the step before it, and no two steps lose alike; so
    the steps sorted by that ratio trace the upper concave hull of (cost, quality). All numbers are whole, hence exact.
    """
    num_steps = num_values - 1
    slopes = generator.sample(range(1, 100 * num_knobs * num_values), num_knobs * num_steps)
    knobs, cost_terms, quality_terms = [], {}, {}
    for index in range(num_knobs):
        knob = Choice(f"part{index}", range(num_values))
        cost, quality = {knob.dearest: 0.0}, {knob.dearest: 0.0}
        rising = sorted(slopes[index * num_steps : (index + 1) * num_steps])
        for value, slope in zip(range(num_steps - 1, -1, -1), rising, strict=True):
            saved = generator.randint(1, 9)
            cost[value] = cost[value + 1] - saved
            quality[value] = quality[value + 1] - slope * saved
        knobs.append(knob)
        cost_terms[knob.name], quality_terms[knob.name] = cost, quality
    saved_in_all = -sum(min(cost.values()) for cost in cost_terms.values())
    meters: dict[str, Meter[Setting]] = {
        "latency": Additive(cost_terms, unit="ms", base=1.0 + saved_in_all),
        "quality": Additive(quality_terms, unit="points"),
    }
    return Toy(tuple(knobs), meters)


def rough_toy(generator: random.Random, *, num_knobs: int = 3, num_values: int = 4) -> Toy:
    """A toy without structure: a cheaper value may cost more, every setting has a quality of its own."""
    knobs = tuple(Choice(f"part{index}", range(num_values)) for index in range(num_knobs))
    terms: Terms = {knob.name: {i: i + generator.uniform(0.0, 3.0) for i in range(num_values)} for knob in knobs}
    meters: dict[str, Meter[Setting]] = {
        "latency": Additive(terms, unit="ms", base=1.0),
        "quality": Scrambled(generator.randrange(2**32), low=0.0, high=1.0, unit="accuracy"),
    }
    return Toy(knobs, meters)


@dataclass
class LayeredQuality:
    """One minus a loss per knob that grows with the square of what is removed; within a layer losses add to more."""

    weights: Mapping[str, float]
    num_values: int
    coupling: float
    unit: str = "accuracy"

    def read(self, model: Setting) -> Reading:
        last = self.num_values - 1
        lost = {name: self.weights[name] * (1 - int(value) / last) ** 2 for name, value in model.items()}
        by_layer: dict[str, list[float]] = {}
        for name, loss in lost.items():
            by_layer.setdefault(name.rsplit(".", 1)[0], []).append(loss)
        together = (math.sqrt(a * b) for part in by_layer.values() for a, b in itertools.combinations(part, 2))
        return Reading(value=1.0 - math.fsum(lost.values()) - self.coupling * math.fsum(together), unit=self.unit)


def layered_toy(generator: random.Random, *, num_layers: int = 5, num_values: int = 5, coupling: float = 0.5) -> Toy:
    """A network of alike layers: heads lose less than neurons, the ends lose more than the middle, each a bit its own.

    Networks drawn by different generators have that much in common, so it can be learned from one for the next.
    """
    weights: dict[str, float] = {}
    terms: dict[str, dict[Value, float]] = {}
    knobs = []
    for index in range(num_layers):
        from_middle = abs(index / (num_layers - 1) - 0.5) if num_layers > 1 else 0.0
        for part, weight, cost_ms in (("heads", 0.02, 1.0), ("neurons", 0.06, 2.0)):
            knob = Choice(f"prune.layer{index}.{part}", range(num_values))
            knobs.append(knob)
            weights[knob.name] = weight * (0.5 + 2.0 * from_middle) * math.exp(generator.gauss(0.0, 0.4))
            terms[knob.name] = {value: cost_ms * value / (num_values - 1) for value in range(num_values)}
    meters: dict[str, Meter[Setting]] = {
        "latency": Additive(terms, unit="ms", base=1.0),
        "quality": LayeredQuality(weights, num_values, coupling),
    }
    return Toy(tuple(knobs), meters)


@dataclass(frozen=True)
class Layer:
    """One layer of a network that can be pruned (fewer channels) and quantised (fewer bits)."""

    num_channels: int
    num_bits: int


Network: TypeAlias = dict[str, Layer]
"""Layers by name; mutable, so that leaving it as it was is a promise a rule can break."""


class PruneLayer:
    """``prune.<layer>``: keep that many channels."""

    def apply(self, model: Network, knob: Knob, value: Value) -> Network:
        name = knob.name.removeprefix("prune.")
        return {**model, name: replace(model[name], num_channels=int(value))}


class QuantiseLayer:
    """``quantise.<layer>``: store the weights in that many bits."""

    def apply(self, model: Network, knob: Knob, value: Value) -> Network:
        name = knob.name.removeprefix("quantise.")
        return {**model, name: replace(model[name], num_bits=int(value))}


class NetworkBytes:
    """Channels times bits of every layer: pruning and quantising multiply, so costs do not add up over knobs."""

    unit = "B"

    def read(self, model: Network) -> Reading:
        return Reading(value=sum(layer.num_channels * layer.num_bits / 8 for layer in model.values()), unit=self.unit)


@dataclass
class NetworkQuality:
    """One minus the share of channels and of bits removed, weighted by how much each layer matters."""

    weights: Mapping[str, float]
    whole: Layer
    unit: str = "accuracy"

    def read(self, model: Network) -> Reading:
        lost = 0.0
        for name, layer in model.items():
            kept = layer.num_channels / self.whole.num_channels + layer.num_bits / self.whole.num_bits
            lost += self.weights[name] * (2.0 - kept)
        return Reading(value=1.0 - lost, unit=self.unit)


@dataclass(frozen=True)
class ComposedToy:
    """Two methods on one network (Algorithm 10): knobs ``prune.*`` and ``quantise.*``, rules by that prefix."""

    model: Network
    knobs: tuple[Knob, ...]
    meters: Mapping[str, Meter[Network]]

    @property
    def rules(self) -> dict[str, PruneLayer | QuantiseLayer]:
        return {"prune": PruneLayer(), "quantise": QuantiseLayer()}


def composed_toy(
    num_layers: int = 2, *, channels: Sequence[int] = (2, 4, 8), bits: Sequence[int] = (4, 8, 16)
) -> ComposedToy:
    """A network of equal layers, later ones mattering more."""
    whole = Layer(channels[-1], bits[-1])
    names = [f"conv{index}" for index in range(1, num_layers + 1)]
    knobs = [Choice(f"prune.{name}", channels) for name in names]
    knobs += [Choice(f"quantise.{name}", bits) for name in names]
    quality = NetworkQuality({name: 0.1 * index for index, name in enumerate(names, start=1)}, whole)
    return ComposedToy(dict.fromkeys(names, whole), tuple(knobs), {"size": NetworkBytes(), "quality": quality})


def _generator(seed: int, unit: str, setting: Setting) -> random.Random:
    """A generator that depends on nothing but its arguments, in this process and in any other."""
    return random.Random(f"{seed} {unit} {setting!r}")
