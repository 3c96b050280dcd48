"""Protocols: which domains and classes may be seen in training, and which are judged as ID and as OOD, as data."""

from __future__ import annotations

import glob
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apportion.errors import DataError
from apportion.tasks.domain import Domain
from apportion.tasks.leakage import Judged

SIDES = ("train", "id", "ood")
NUM_FOLDS = 5


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A part of a domain: all of it, or some classes (names or patterns), folds of its classes, and splits.

    Fold ``f`` of the five holds every fifth class, from the ``f``-th on.
    """

    domain: str
    classes: tuple[str, ...] | None = None
    splits: tuple[str, ...] | None = None
    folds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.folds is not None and not (self.folds and set(self.folds) <= set(range(NUM_FOLDS))):
            raise DataError(f"folds {list(self.folds)} of {self.domain} are not possible; choose among 0 to 4")
        if self.folds is not None and self.classes is not None:
            raise DataError(f"{self.domain} is selected by classes and by folds; give one of them")

    def load(self, load: Callable[[str], Domain]) -> Domain:
        domain = load(self.domain)
        if self.folds is not None:
            some = [name for place, name in enumerate(domain.classes) if place % NUM_FOLDS in self.folds]
            return domain.select(classes=[glob.escape(name) for name in some], splits=self.splits)
        if self.classes is None and self.splits is None:
            return domain
        return domain.select(classes=self.classes, splits=self.splits)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What may be seen in training; ``id`` holds unseen classes or rows of those domains, ``ood`` unseen domains."""

    name: str
    train: tuple[Selection, ...]
    id: tuple[Selection, ...]
    ood: tuple[Selection, ...]

    def __post_init__(self) -> None:
        seen = {selection.domain for selection in self.train}
        both = seen & {selection.domain for selection in self.ood}
        if both:
            raise DataError(f"protocol {self.name} trains on {', '.join(sorted(both))}, which it also judges as OOD")
        if not self.train or not (self.id or self.ood):
            raise DataError(f"protocol {self.name} needs a domain to train on and one to judge on")


@dataclass(frozen=True)
class Loaded:
    """The domains of a protocol; ``num_dropped`` counts training rows left out because a judged side holds them too."""

    train: tuple[Domain, ...]
    id: tuple[Domain, ...]
    ood: tuple[Domain, ...]
    num_dropped: Mapping[str, int]


def load_protocol(protocol: Protocol, load: Callable[[str], Domain], *, on_leak: str = "drop") -> Loaded:
    """Reads a protocol's domains and makes sure that nothing judged was seen.

    Args:
        on_leak: ``drop`` leaves leaked rows out of training and counts them, ``refuse`` raises.
    """
    if on_leak not in ("drop", "refuse"):
        raise DataError(f"on_leak {on_leak!r} is not known; possible are drop and refuse")
    judged = {side: tuple(part.load(load) for part in getattr(protocol, side)) for side in ("id", "ood")}
    index = Judged((*judged["id"], *judged["ood"]))
    train, dropped = [], {}
    for selection in protocol.train:
        domain = selection.load(load)
        if on_leak == "refuse":
            index.refuse(domain)
        domain, dropped[domain.name] = index.without(domain)
        train.append(domain)
    return Loaded(tuple(train), judged["id"], judged["ood"], dropped)


def read_protocol(path: Path) -> Protocol:
    """A protocol from a TOML file: ``name``, and tables ``[[train]]``, ``[[id]]``, ``[[ood]]`` of selections."""
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
        sides = {side: tuple(_selection(part) for part in fields.get(side, [])) for side in SIDES}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} can't be read as a protocol ({error}); see docs/tasks.md") from None
    return Protocol(name=str(fields.get("name", path.stem)), **sides)


def _selection(fields: Mapping[str, Any]) -> Selection:
    unknown = set(fields) - {"domain", "classes", "splits", "folds"}
    if unknown:
        raise ValueError(f"unknown field {sorted(unknown)[0]!r}")
    return Selection(
        domain=str(fields["domain"]),
        classes=tuple(map(str, fields["classes"])) if "classes" in fields else None,
        splits=tuple(map(str, fields["splits"])) if "splits" in fields else None,
        folds=tuple(map(int, fields["folds"])) if "folds" in fields else None,
    )


def _whole(names: Iterable[str]) -> tuple[Selection, ...]:
    return tuple(Selection(domain=name) for name in names)


_PHOTOS = ("grocery", "fruits360", "plantdoc")
_SEEN = ("banking", "credit_cards", "kitchen_and_dining", "home", "auto_and_commute", "travel", "utility", "work")

PROTOCOLS: Mapping[str, Protocol] = {
    "text": Protocol(
        name="text",
        train=tuple(Selection(domain=f"clinc150/{part}", splits=("train",)) for part in _SEEN),
        id=tuple(Selection(domain=f"clinc150/{part}", splits=("test",)) for part in _SEEN),
        ood=_whole(("clinc150/small_talk", "clinc150/meta", "banking77", "snips", "trec")),
    ),
    "image": Protocol(
        name="image",
        train=_whole(("omniglot-vinyals-trainval",)),
        id=_whole(("omniglot-vinyals-test",)),
        ood=_whole(("grocery", "fruits360", "plantdoc", "sign_digits", "mnist", "fashion_mnist")),
    ),
    "vision": Protocol(
        name="vision",
        train=(
            Selection(domain="omniglot-vinyals-train"),
            *(Selection(domain=name, folds=(0, 1, 2)) for name in _PHOTOS),
        ),
        id=(
            Selection(domain="omniglot-vinyals-test"),
            *(Selection(domain=name, folds=(3, 4)) for name in _PHOTOS),
        ),
        ood=_whole(("sign_digits", "mnist", "fashion_mnist")),
    ),
}
