"""A toy space with a known answer: operations at a few layers, one width that pays for them, optional precision."""

from __future__ import annotations

import math
import random

from apportion.core.knob import Setting
from apportion.core.meter import Reading
from apportion.methods.search.proxy import Request
from apportion.methods.search.space import Ladder, Proposal, Rung, SpaceError

LAYERS = ("a", "b", "c")
OPS = (0, 1, 2)
WIDTHS = tuple(range(8, 129, 4))
COST = {"a": (1.0, 1.3, 2.0), "b": (1.0, 0.8, 1.1), "c": (1.0, 1.5, 1.2)}
GAIN = {"a": (0.0, 0.6, 0.2), "b": (0.0, 0.5, 0.1), "c": (0.0, 0.1, 0.9)}


class Toy:
    """Cost is a sum over layers times the width; utility a sum of gains plus a little for width."""

    name = "toy"
    layers = LAYERS

    def __init__(self, precisions=("fp32",), step=4):
        self.precisions, self.widths = precisions, tuple(range(8, 129, step))

    def start(self):
        return Setting({**dict.fromkeys(LAYERS, 0), "width": 64, "precision": self.precisions[0]})

    def check(self, arch):
        if arch["width"] not in self.widths:
            raise SpaceError("no such width")

    def proposals(self, arch, layer):
        return [Proposal(layer, {layer: op}) for op in OPS if op != arch[layer]]

    def ladders(self, arch, layer):
        return [
            Ladder(
                tuple(
                    Rung(Setting({**arch, "width": width, "precision": p}), abs(math.log(width / arch["width"])))
                    for width in self.widths
                ),
                ordered=True,
                label=p,
            )
            for p in self.precisions
        ]

    def random(self, rng: random.Random):
        choices = {layer: rng.choice(OPS) for layer in LAYERS}
        return Setting({**choices, "width": rng.choice(self.widths), "precision": self.precisions[0]})


def cost(arch):
    scale = {"fp32": 1.0, "int8": 0.5}[arch["precision"]]
    value = scale * arch["width"] / 64 * sum(COST[layer][arch[layer]] for layer in LAYERS)
    return {"latency": Reading(value=value, unit="ms")}


def utility(arch):
    return sum(GAIN[layer][arch[layer]] for layer in LAYERS) + 0.3 * math.log(arch["width"] / 64)


class NoisyProxy:
    """Utility plus normal noise that depends on the request and the seed alone."""

    def __init__(self, sigma=0.1, seed=0):
        self.sigma, self.seed = sigma, seed

    def evaluate(self, request: Request):
        text = f"{self.seed} {sorted(request.arch.items())} {request.fidelity} {request.replicate}"
        return utility(request.arch) + self.sigma * random.Random(text).gauss(0, 1)
