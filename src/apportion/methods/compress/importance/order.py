"""From scores to orders: one per module, or one over the units of all modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from torch import Tensor

from apportion.errors import KnobError
from apportion.methods.compress.importance.activation import activation
from apportion.methods.compress.importance.curvature import hessian
from apportion.methods.compress.importance.magnitude import magnitude
from apportion.methods.compress.importance.slope import fisher, taylor
from apportion.models.channels import mixes_channels, side_weight
from apportion.models.network import Network
from apportion.models.partition import Module, Partition
from apportion.tasks.batches import Examples

Criterion = Literal["magnitude", "taylor", "fisher", "activation", "hessian"]
CRITERIA: tuple[str, ...] = get_args(Criterion)


def importance(network: Network, partition: Partition, criterion: Criterion, examples: Examples) -> dict[str, Tensor]:
    """The score of every unit of every module under a criterion."""
    if criterion == "magnitude":
        return magnitude(network, partition)
    by_data = {"taylor": taylor, "fisher": fisher, "activation": activation, "hessian": hessian}
    if criterion not in by_data:
        raise KnobError(f"unknown importance {criterion!r}; possible are {', '.join(CRITERIA)}")
    return by_data[criterion](network, partition, examples)


def order_by_importance(network: Network, partition: Partition, criterion: Criterion, examples: Examples) -> Partition:
    """The partition with every module's units ordered from the most to the least important."""
    return ordered_by(partition, importance(network, partition, criterion, examples))


def ordered_by(partition: Partition, scores: Mapping[str, Tensor]) -> Partition:
    """The partition with every module's units ordered by falling score; of equal ones the first stays first."""
    return partition.ordered(
        {name: score_U.argsort(descending=True, stable=True).tolist() for name, score_U in scores.items()}
    )


def global_sizes(
    network: Network, partition: Partition, scores: Mapping[str, Tensor], *, num_steps: int = 8
) -> dict[float, dict[str, int]]:
    r"""How many units every module keeps when the units of all modules stand in one order (eq. P6).

    Steps of every module (its ``sizes``) are taken away by the score lost per parameter saved,

    .. math:: \arg\min_m \frac{\sum_{u \in step(m)} I_u}{\sum_{u \in step(m)} |\theta_u|},

    the modules' own orders being those of the scores. A parameter between two units counts for both.

    Args:
        scores: of a criterion in ``rulenames.COMPARABLE``; those of the others don't compare between modules.

    Returns:
        For shares of the parameters from 1 down, the sizes of all modules; smaller ones are nested in larger ones.
    """
    partition = ordered_by(partition, scores)
    sizes = {part.name: part.num_units for part in partition}
    weights = {part.name: unit_parameters(network, part) for part in partition}
    total = sum(sum(weight_U) for weight_U in weights.values())
    left = float(total)
    path = [(1.0, dict(sizes))]
    while True:
        best: tuple[float, str, int, float] | None = None
        for part in partition:
            smaller = [size for size in part.sizes() if size < sizes[part.name]]
            if not smaller:
                continue
            gone = part.order[smaller[-1] : sizes[part.name]]
            saved = sum(weights[part.name][unit] for unit in gone)
            ratio = sum(scores[part.name][unit].item() for unit in gone) / max(saved, 1e-12)
            if best is None or ratio < best[0]:
                best = (ratio, part.name, smaller[-1], saved)
        if best is None:
            break
        _, name, size, saved = best
        sizes[name], left = size, left - saved
        path.append((left / total, dict(sizes)))
    chosen = {1.0: path[0][1]}
    for step in range(1, num_steps + 1):  # evenly spaced down to the smallest; each takes the first point at or below
        goal = 1.0 - step / num_steps * (1.0 - path[-1][0])
        share, here = next(((share, here) for share, here in path if share <= goal + 1e-12), path[-1])
        chosen[round(share, 6)] = here
    return chosen


def unit_parameters(network: Network, part: Module) -> list[float]:
    """Parameters that hang on every unit of a module: of the layers that read and write it, or of the block."""
    if part.blocks:
        return [
            float(sum(p.numel() for p in network.module.get_submodule(name).parameters())) for name, _ in part.blocks
        ]
    counts = [0.0] * part.num_units
    for member in part.members:
        layer = network.module.get_submodule(member.layer)
        if mixes_channels(layer):
            weight, dim = side_weight(layer, member.side)
            for unit in member.units:
                if unit >= 0:
                    counts[unit] += weight.numel() / weight.shape[dim]
    return counts
