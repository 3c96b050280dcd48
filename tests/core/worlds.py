"""Toys to run the budgeted loop on: some with a known answer, and worlds drawn at random."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import strategies as st

from apportion.core.budget import Budget, Limit
from apportion.core.knob import Choice, Setting
from apportion.core.ledger import Ledger
from apportion.core.loop import budgeted_loop
from apportion.core.policy import Greedy, Scheduled
from apportion.testing.toys import Additive, Jittered, Noisy, Scaled, Scrambled, Toy

STAGED = Scheduled(stages=("prune.*", "quantise.*"))


def run(toy, budget, policy=None, *, ledger=None, **options):
    """Runs the loop on a toy, returning its result and its rows."""
    ledger = Ledger() if ledger is None else ledger
    result = budgeted_loop(
        getattr(toy, "model", None) or toy.start,
        knobs=toy.knobs,
        rules=toy.rules,
        meters=options.pop("meters", toy.meters),
        budget=Budget.parse(budget) if isinstance(budget, str) else budget,
        policy=policy or Greedy(),
        ledger=ledger,
        **options,
    )
    return result, list(ledger)


def accepted(rows):
    return [row for row in rows if row.accepted and row.kind == "move"]


def ladder(num_values=10, quality_per_step=1.0):
    """One knob; its value is the latency in milliseconds, from ``num_values`` down to one."""
    values = range(1, num_values + 1)
    return Toy(
        (Choice("depth", values),),
        {
            "latency": Additive({"depth": {value: float(value) for value in values}}),
            "quality": Additive({"depth": {value: quality_per_step * value for value in values}}, unit="points"),
        },
    )


def table(costs, qualities=None):
    """A toy from the cost of every value of every knob, cheapest value first."""
    knobs = tuple(Choice(name, range(len(terms))) for name, terms in costs.items())
    qualities = qualities or {name: range(len(terms)) for name, terms in costs.items()}
    as_terms = [
        {name: dict(enumerate(map(float, terms))) for name, terms in side.items()} for side in (costs, qualities)
    ]
    return Toy(knobs, {"latency": Additive(as_terms[0]), "quality": Additive(as_terms[1], unit="points")})


def measure(meter, key="latency"):
    return lambda model: {key: meter.read(model)}


@dataclass(frozen=True)
class World:
    """A toy with its budget and the way it is run, drawn at random."""

    toy: Toy
    budget: Budget
    options: dict

    def __repr__(self):
        return f"World({[len(knob.values) for knob in self.toy.knobs]}, {self.budget}, {self.options})"


@st.composite
def meters(draw, knobs, unit):
    """Additive and falling, additive and not monotone, or a number of its own for every setting; with noise or not."""
    kind = draw(st.sampled_from(["falling", "rough", "scrambled"]))
    meter = Scrambled(draw(st.integers(0, 999)), low=10.0, high=30.0, unit=unit)
    if kind != "scrambled":
        terms = {}
        for knob in knobs:
            # eighths are exact in binary, so that equal costs are drawn often and are equal
            drawn = draw(st.lists(st.integers(0, 80), min_size=len(knob.values), max_size=len(knob.values)))
            eighths = sorted(drawn) if kind == "falling" else drawn
            terms[knob.name] = {value: eighth / 8 for value, eighth in zip(knob.values, eighths, strict=True)}
        meter = Additive(terms, unit=unit, base=10.0)  # ten times the noise, so that no reading is negative
    noise = draw(st.sampled_from(["none", "none", "jittered", "noisy"]))
    if noise == "jittered":
        meter = Jittered(meter, draw(st.sampled_from([0.01, 1.0])), draw(st.integers(0, 999)))
    elif noise == "noisy":
        meter = Noisy(meter, draw(st.sampled_from([0.01, 1.0])), random.Random(draw(st.integers(0, 999))))
    return meter


def start_cost(meter, knobs):
    """What a meter reads at the start, without its noise."""
    return getattr(meter, "meter", meter).read(Setting.dearest(knobs)).value


@st.composite
def worlds(draw, checked):
    knobs = tuple(
        Choice(f"{draw(st.sampled_from(['prune', 'quantise']))}.{index}", range(draw(st.integers(1, 5))))
        for index in range(draw(st.integers(1, 4)))
    )
    quantities = draw(st.sampled_from([{"latency": "ms"}, {"latency": "ms", "size": "B"}]))
    read_by = {quantity: draw(meters(knobs, unit)) for quantity, unit in quantities.items()}
    shares = {quantity: draw(st.integers(60, 105)) / 100 for quantity in quantities}
    limits = tuple(
        Limit(quantity=quantity, value=shares[quantity] * start_cost(read_by[quantity], knobs), unit=unit)
        for quantity, unit in quantities.items()
    )
    options = {
        "policy": draw(st.sampled_from([Greedy(), Scheduled(), STAGED])),
        "z": draw(st.sampled_from([0.0, 1.645])),
        "max_steps": draw(st.sampled_from([500] * 6 + [5, 1, 0])),
        "quality_floor": draw(st.sampled_from([None, None, 12.0, 15.0, 20.0])),
        "break_on_reject": draw(st.sampled_from([False, False, True])),
    }
    if checked:
        factors = {quantity: draw(st.sampled_from([1.02, 1.05, 1.3, 1.0, 0.9])) for quantity in quantities}
        fresh = {quantity: Jittered(Scaled(read_by[quantity], factors[quantity]), 0.05, 7) for quantity in quantities}
        options["check"] = lambda model: {quantity: meter.read(model) for quantity, meter in fresh.items()}
        options["max_checks"] = draw(st.integers(1, 5))
    toy = Toy(knobs, {**read_by, "quality": draw(meters(knobs, "points"))})
    return World(toy, Budget(limits), options)
