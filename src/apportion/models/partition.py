"""A partition: the modules of a network that can shrink, each a set of groups with one order of importance.

Smaller budgets keep a prefix of that order, so models for smaller budgets are nested in those for larger ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from apportion.errors import ModelError
from apportion.models.channels import Side
from apportion.models.network import Network, float_outputs, forward
from apportion.models.skip import find_blocks
from apportion.models.trace import Coupled, trace

Kind = Literal["heads", "neurons", "channels", "blocks"]
DEFAULT_MULTIPLE: Mapping[str, int] = {"heads": 1, "neurons": 32, "channels": 8, "blocks": 1}


@dataclass(frozen=True)
class Member:
    """One side of one layer: ``units[c]`` is the unit that channel ``c`` belongs to, -1 for none."""

    layer: str
    side: Side
    units: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Module:
    """A part that shrinks unit by unit: attention heads, neurons, channels, or the blocks of one list.

    ``order`` lists the units from the most to the least important; keeping ``n`` keeps its first ``n``. ``multiple``
    is the hardware-friendly step of ``n`` and ``minimum`` its least value. For blocks, ``blocks`` names them and their
    number of outputs.
    """

    name: str
    kind: Kind
    num_units: int
    members: tuple[Member, ...] = ()
    per_unit: Mapping[tuple[str, str], int] = field(default_factory=dict)
    blocks: tuple[tuple[str, int], ...] = ()
    order: tuple[int, ...] = ()
    multiple: int = 1
    minimum: int = 1

    def __post_init__(self) -> None:
        if not self.order:
            object.__setattr__(self, "order", tuple(range(self.num_units)))
        assert sorted(self.order) == list(range(self.num_units))

    def sizes(self, num_steps: int | None = None) -> tuple[int, ...]:
        """The numbers of units it may keep, ascending and ending with all; at most ``num_steps`` below that.

        All but the last are multiples of ``multiple``.
        """
        first = -(-self.minimum // self.multiple) * self.multiple
        sizes = list(range(first, self.num_units, self.multiple))
        if num_steps is not None and len(sizes) > num_steps:
            picks = [round(i * len(sizes) / num_steps) for i in range(num_steps)]
            sizes = [sizes[pick] for pick in picks]
        return (*sizes, self.num_units)

    def kept(self, num_kept: int) -> tuple[int, ...]:
        """The units kept when ``num_kept`` are."""
        if not self.minimum <= num_kept <= self.num_units:
            raise ModelError(f"{self.name} was asked to keep {num_kept} of its {self.num_units} {self.kind}")
        return tuple(sorted(self.order[:num_kept]))


@dataclass(frozen=True)
class Partition:
    """The modules of a network that can shrink, and the layers that can't, with the reason."""

    modules: tuple[Module, ...]
    refused: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, network: Network, *, multiple: Mapping[str, int] | None = None) -> Partition:
        """Traces a network and keeps the modules for which a masked and a sliced copy compute the same.

        Args:
            multiple: hardware-friendly step by kind, over the defaults (neurons 32, channels 8, heads and blocks 1).
        """
        steps = {**DEFAULT_MULTIPLE, **(multiple or {})}
        found = trace(network.module, network.inputs)
        refused = dict(found.refused)
        modules = [_from_coupled(coupled, steps) for coupled in found.coupled]
        if not same_when_sliced(network, modules):
            checked = []
            for coupled, module in zip(found.coupled, modules, strict=True):
                fitting = _first_fitting(network, coupled, module)
                if fitting is None:
                    refused[module.name] = "a sliced copy does not compute the same as a masked one"
                else:
                    checked.append(fitting)
            modules = checked
        for name, blocks in find_blocks(network.module, network.inputs).items():
            others = len(list(network.module.get_submodule(name).children())) - len(blocks)
            module = Module(
                name=f"{name}.blocks" if name else "blocks",
                kind="blocks",
                num_units=len(blocks),
                blocks=tuple(blocks.items()),
                multiple=steps["blocks"],
                minimum=0 if others else 1,
            )
            if module.num_units == module.minimum:
                continue
            if same_when_sliced(network, [module]):
                modules.append(module)
            else:
                refused[module.name] = "the model does not run without them"
        if not modules:
            layer, reason = next(iter(refused.items()))
            raise ModelError(f"no part of the model can be sliced: {layer}: {reason}")
        return cls(tuple(modules), refused)

    def __iter__(self) -> Iterator[Module]:
        return iter(self.modules)

    def __len__(self) -> int:
        return len(self.modules)

    def __getitem__(self, name: str) -> Module:
        for module in self.modules:
            if module.name == name:
                return module
        raise ModelError(f"the partition has no module {name!r}; it has {', '.join(m.name for m in self.modules)}")

    def ordered(self, orders: Mapping[str, Sequence[int]]) -> Partition:
        """The same partition with new orders of importance."""
        return replace(
            self,
            modules=tuple(
                replace(module, order=tuple(int(unit) for unit in orders[module.name]))
                if module.name in orders
                else module
                for module in self.modules
            ),
        )

    def keep(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """The units kept in every module named when it keeps as many as said."""
        return {name: self[name].kept(size) for name, size in sizes.items()}


def _from_coupled(coupled: Coupled, steps: Mapping[str, int]) -> Module:
    kind: Kind = coupled.kind  # type: ignore[assignment]
    multiple = steps[kind]
    while multiple > 1 and coupled.num_units < 2 * multiple:
        multiple //= 2  # narrow layers get a finer step rather than none
    return Module(
        name=coupled.name if kind != "heads" else f"{coupled.name}.heads",
        kind=kind,
        num_units=coupled.num_units,
        members=tuple(Member(layer, side, units) for (layer, side), units in coupled.units.items()),
        per_unit=dict(coupled.per_unit),
        multiple=multiple,
        minimum=multiple,
    )


def _first_fitting(network: Network, coupled: Coupled, module: Module) -> Module | None:
    for units in (coupled.units, *coupled.layouts):
        members = tuple(Member(layer, side, unit) for (layer, side), unit in units.items())
        candidate = replace(module, members=members)
        if same_when_sliced(network, [candidate]):
            return candidate
    return None


def same_when_sliced(network: Network, modules: Sequence[Module], tolerance: float = 1e-3) -> bool:
    """Whether masking and slicing every other unit of the modules give the same outputs on the example inputs."""
    from apportion.models.cut import mask, slice_network  # cut needs the types above

    partition = Partition(tuple(modules))
    keep = {module.name: tuple(range(module.num_units % 2, module.num_units, 2)) for module in modules}
    try:
        with torch.no_grad():
            masked = float_outputs(forward(mask(network, partition, keep).module, network.inputs))
            sliced = float_outputs(forward(slice_network(network, partition, keep).module, network.inputs))
    except Exception:  # a slice that does not run is a slice that is not offered
        return False
    return len(masked) == len(sliced) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=tolerance * (1 + a.abs().max().item()))
        for a, b in zip(masked, sliced, strict=True)
    )
