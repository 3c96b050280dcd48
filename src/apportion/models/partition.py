"""A partition: the modules of a network that can shrink, each a set of groups with one order of importance.

Smaller budgets keep a prefix of that order, so models for smaller budgets are nested in those for larger ones.
"""

from __future__ import annotations

import copy
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
    base: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

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
        base = dict(network.edits.keep)
        probe = _in_double(network)
        if not same_when_sliced(probe, modules, base):
            checked = []
            for coupled, module in zip(found.coupled, modules, strict=True):
                fitting = _first_fitting(probe, coupled, module, base)
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
            if _mixed_cache(network.module):
                refused[module.name] = "its layers keep caches of different kinds"
            elif same_when_sliced(probe, [module], base):
                modules.append(module)
            else:
                refused[module.name] = "the model does not run without them"
        if not modules:
            layer, reason = _telling(refused)
            raise ModelError(f"no part of the model can be sliced: {layer}: {reason}")
        return cls(tuple(modules), refused, base)

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

    def kept_in(self, network: Network) -> dict[str, tuple[int, ...]]:
        """The units of every module that a network sliced by this partition still has, numbered as they are here.

        A network's own record counts units of the original; this partition may have been traced on a slice of it.
        """
        kept = {}
        for module in self.modules:
            base = self.base.get(module.name) or range(module.num_units)
            left = set(network.edits.keep.get(module.name, base))
            kept[module.name] = tuple(unit for unit in range(module.num_units) if base[unit] in left)
        return kept

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


def _first_fitting(
    network: Network, coupled: Coupled, module: Module, base: Mapping[str, tuple[int, ...]]
) -> Module | None:
    for units in (coupled.units, *coupled.layouts):
        members = tuple(Member(layer, side, unit) for (layer, side), unit in units.items())
        candidate = replace(module, members=members)
        if same_when_sliced(network, [candidate], base):
            return candidate
    return None


def _telling(refused: Mapping[str, str]) -> tuple[str, str]:
    return next(((k, v) for k, v in refused.items() if "leave the model" not in v), next(iter(refused.items())))


def _mixed_cache(module: torch.nn.Module) -> bool:
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)  # ResNet uses the name for something else
    return kinds is not None and hasattr(config, "use_cache") and len(set(kinds)) > 1


def _in_double(network: Network) -> Network:
    """The network in double precision on as small an input as it takes, so that the check is strict and quick."""
    module = copy.deepcopy(network.module).eval()
    for precise, short in ((True, True), (True, False), (False, False)):
        inputs = {
            name: (tensor.double() if precise and tensor.is_floating_point() else tensor)[_first(name, tensor, short)]
            for name, tensor in network.inputs.items()
        }
        try:
            with torch.no_grad():
                forward(module.double() if precise else module.float(), inputs)
        except Exception:
            continue
        return network.replace(module=module, inputs=inputs)
    return network


def _first(name: str, tensor: torch.Tensor, short: bool) -> tuple[slice, ...]:
    """The first two examples, and of texts the first sixteen tokens."""
    if not short:
        return (slice(None),)
    is_text = name in ("input_ids", "attention_mask") and tensor.dim() == 2
    return (slice(2), slice(16)) if is_text else (slice(2),)


def _trials(modules: Sequence[Module]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Every other unit, the others, and random sets of different sizes."""
    for start in (0, 1):
        keep = {m.name: tuple(range((m.num_units + start) % 2, m.num_units, 2)) for m in modules}
        yield {m.name: kept for m in modules if len(kept := keep[m.name]) >= (m.minimum if m.kind == "blocks" else 1)}
    if len(modules) > 1:
        for seed in (0, 1):
            generator = torch.Generator().manual_seed(seed)
            keep = {}
            for m in modules:
                size = int(torch.randint(1, m.num_units + 1, (1,), generator=generator))
                keep[m.name] = tuple(sorted(torch.randperm(m.num_units, generator=generator)[:size].tolist()))
            yield keep


def same_when_sliced(
    network: Network, modules: Sequence[Module], base: Mapping[str, tuple[int, ...]], tolerance: float = 1e-9
) -> bool:
    """Whether masking and slicing parts of the modules give the same outputs on the example inputs."""
    from apportion.models.cut import mask, slice_network  # cut needs the types above

    partition = Partition(tuple(modules), base=base)
    try:
        with torch.no_grad():
            whole = float_outputs(forward(network.module, network.inputs))
            for keep in _trials(modules):
                pair = [cut(network, partition, keep, share_weights=True) for cut in (mask, slice_network)]
                masked, sliced = (float_outputs(forward(copied.module, network.inputs)) for copied in pair)
                if len(masked) != len(sliced):
                    return False
                for a, b, w in zip(masked, sliced, whole, strict=True):
                    if a.shape != b.shape:
                        return False
                    effect = 1e-3 * (a - w).abs().max().item() if len(modules) == 1 else 0.0
                    if (a - b).abs().max().item() > max(tolerance * (1e-3 + a.abs().max().item()), effect):
                        return False
    except Exception:  # a slice that does not run is a slice that is not offered
        return False
    return True
