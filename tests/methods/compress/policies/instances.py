"""Random small problems and toys whose best choice is found by trying every one."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from apportion.core.budget import Budget, Limit
from apportion.core.knob import Choice
from apportion.methods.compress.policies.problem import Option, Problem
from apportion.testing.toys import Additive, Toy


@st.composite
def problems(draw, max_limits=2):
    """Whole numbers over limits of 64, which are exact in binary, so that ties and limits just reached are drawn."""
    num_limits = draw(st.integers(1, max_limits))
    per_knob = []
    for index in range(draw(st.integers(1, 4))):
        options = [Option(f"part{index}", 9, 0.0, (0.0,) * num_limits)]
        for value in range(draw(st.integers(0, 3))):
            costs = draw(st.lists(st.integers(-24, 8), min_size=num_limits, max_size=num_limits))
            if min(costs) < 0:
                loss = float(draw(st.integers(-5, 60)))
                options.append(Option(f"part{index}", value, loss, tuple(cost / 64 for cost in costs)))
        per_knob.append(tuple(options))
    room = draw(st.lists(st.integers(-64, 8), min_size=num_limits, max_size=num_limits).filter(lambda r: min(r) < 0))
    return _problem(per_knob, tuple(r / 64 for r in room))


@st.composite
def solvable_problems(draw, max_limits=2):
    """Problems whose limits are met by at least one choice: the room is what a drawn choice needs, and some more."""
    loose = draw(problems(max_limits))
    per_knob = list(loose.options)
    if not choices(loose):
        per_knob[0] = (*per_knob[0], Option("part0", 0, 1.0, (-1 / 64,) * len(loose.room)))
    every = choices(_problem(per_knob, loose.room))
    costs = [_costs(per_knob, choice) for choice in every]
    cheaper = [cost for cost in costs if min(cost) < 0]  # one move alone always is
    needed = draw(st.sampled_from(cheaper))
    more = draw(st.lists(st.integers(0, 8), min_size=len(needed), max_size=len(needed)))
    first = min(range(len(needed)), key=needed.__getitem__)
    more[first] = min(more[first], round(-needed[first] * 64) - 1)  # the start must not be within the limits
    return _problem(per_knob, tuple(cost + extra / 64 for cost, extra in zip(needed, more, strict=True)))


def _problem(per_knob, room):
    return Problem(tuple(f"limit{i}" for i in range(len(room))), tuple(per_knob), room)


def _costs(per_knob, choice):
    taken = [options[index].costs for options, index in zip(per_knob, choice, strict=True)]
    return tuple(map(sum, zip(*taken, strict=True)))


def choices(problem):
    """Every choice but staying."""
    every = itertools.product(*(range(len(options)) for options in problem.options))
    return [choice for choice in every if choice != problem.stay]


def least_loss(problem):
    """The least loss of a choice within the limits, or None."""
    return min((problem.loss(choice) for choice in choices(problem) if problem.excess(choice) == 0.0), default=None)


@st.composite
def additive_toys(draw):
    """Two costs and a quality that add up over up to four knobs; cheaper values are not always cheaper."""
    knobs = tuple(Choice(f"part{i}", range(draw(st.integers(2, 4)))) for i in range(draw(st.integers(1, 4))))

    def terms(low, high):
        return {knob.name: {value: float(draw(st.integers(low, high))) for value in knob.values} for knob in knobs}

    return Toy(
        knobs,
        {
            "latency": Additive(terms(0, 16), unit="ms", base=4.0),
            "size": Additive(terms(0, 16), unit="B", base=4.0),
            "quality": Additive(terms(-60, 60), unit="points"),
        },
    )


def limits(latency_ms=None, size_bytes=None):
    asked = []
    if latency_ms is not None:
        asked.append(Limit(quantity="latency", value=latency_ms, unit="ms"))
    if size_bytes is not None:
        asked.append(Limit(quantity="size", value=size_bytes, unit="B"))
    return Budget(tuple(asked))
