"""Knobs (named decisions with an ordered domain) and settings (one value for every knob)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from apportion.errors import KnobError

Value: TypeAlias = int | float | str
Granularity: TypeAlias = Literal["global", "module"]


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One named decision and its domain, ordered from the cheapest value to the dearest.

    A run starts at the dearest value; policies move towards the cheapest. A knob that ``restores`` spends something
    else, such as training, to win quality back: its moves are accepted when they raise quality at no more cost.
    """

    name: str
    values: tuple[Value, ...]
    granularity: Granularity = "module"
    restores: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            raise KnobError("a knob has an empty name; name it after the part it changes")
        if not self.values:
            raise KnobError(f"knob {self.name!r} has no values; give at least one")
        if len(set(self.values)) != len(self.values):
            raise KnobError(f"knob {self.name!r} repeats a value in {self.values!r}; list each once")

    @property
    def dearest(self) -> Value:
        return self.values[-1]

    @property
    def cheapest(self) -> Value:
        return self.values[0]

    def check(self, value: Value) -> None:
        """Raises unless ``value`` is in the domain."""
        if value not in self.values:
            raise KnobError(f"knob {self.name!r} was set to {value!r}, but takes one of {self.values!r}")

    def cheaper(self, value: Value) -> Value | None:
        """The next cheaper value, or None at the end of the domain."""
        self.check(value)
        index = self.values.index(value)
        return self.values[index - 1] if index else None

    def depth(self, value: Value) -> float:
        """How far ``value`` lies on the way from the dearest (0) to the cheapest (1)."""
        self.check(value)
        last = len(self.values) - 1
        return (last - self.values.index(value)) / last if last else 0.0


def Choice(name: str, values: Iterable[Value], *, granularity: Granularity = "module", restores: bool = False) -> Knob:
    """A knob from its name and its values, cheapest first.

    Example:
        >>> Choice("conv1.bits", (4, 8, 16)).cheaper(16)
        8
    """
    return Knob(name=name, values=tuple(values), granularity=granularity, restores=restores)


class Setting(Mapping[str, Value]):
    """A frozen value for every knob; hashable, so readings can be looked up by it.

    Example:
        >>> start = Setting({"a": 4, "b": 2})
        >>> start.replace("a", 3)
        Setting({'a': 3, 'b': 2})
    """

    __slots__ = ("_items",)

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._items = dict(sorted(values.items()))

    @classmethod
    def dearest(cls, knobs: Iterable[Knob]) -> Setting:
        return cls({knob.name: knob.dearest for knob in knobs})

    @classmethod
    def cheapest(cls, knobs: Iterable[Knob]) -> Setting:
        return cls({knob.name: knob.cheapest for knob in knobs})

    def replace(self, name: str, value: Value) -> Setting:
        if name not in self._items:
            raise KnobError(f"no knob is called {name!r}; the knobs are {', '.join(self._items) or 'none'}")
        return Setting({**self._items, name: value})

    def __getitem__(self, name: str) -> Value:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Setting) and self._items == other._items

    def __repr__(self) -> str:
        return f"Setting({self._items!r})"
