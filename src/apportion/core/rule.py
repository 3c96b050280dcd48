"""A rule is how a knob's value changes a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from apportion.core.knob import Knob, Value
from apportion.errors import KnobError

M = TypeVar("M")


class Rule(Protocol[M]):
    """Turns a model and a knob's value into a new model.

    Pure: the model given is left as it was, and the same model, knob and value give the same result, so a run can be
    rebuilt from its ledger alone.
    """

    def apply(self, model: M, knob: Knob, value: Value) -> M: ...


def rule_for(knob: Knob, rules: Mapping[str, Rule[M]]) -> Rule[M]:
    """The rule registered under the knob's own name, or under the longest prefix of it that ends at a dot."""
    parts = knob.name.split(".")
    for end in range(len(parts), 0, -1):
        rule = rules.get(".".join(parts[:end]))
        if rule is not None:
            return rule
    raise KnobError(f"knob {knob.name!r} has no rule; rules are registered for {', '.join(rules) or 'nothing'}")


def check_rules(knobs: Sequence[Knob], rules: Mapping[str, Rule[M]]) -> None:
    """Raises unless every knob has a rule and no two knobs share a name."""
    names = [knob.name for knob in knobs]
    if len(set(names)) != len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise KnobError(f"two knobs are called {repeated!r}; give each its own name")
    for knob in knobs:
        rule_for(knob, rules)
