"""Examples in exactly the shape of a network's inputs, as artefacts of a fixed shape take them."""

from __future__ import annotations

from torch import Tensor, nn, stack

from apportion.models.network import Network
from apportion.tasks.batches import Examples

NUM_EXAMPLES = 32  # that int8 ranges are set by


def shaped(examples: Examples, network: Network, count: int | None = NUM_EXAMPLES) -> list[dict[str, Tensor]]:
    """Examples in batches of exactly the shape of the network's inputs; texts are padded or cut to its length.

    A last batch that would not be full is filled up with copies of the last example.
    """
    size = len(next(iter(network.inputs.values())))
    batches: list[dict[str, Tensor]] = []
    rows = [row for batch in examples.batches for row in _rows(batch, network)][:count]
    while rows:
        chosen, rows = rows[:size], rows[size:]
        chosen += [chosen[-1]] * (size - len(chosen))
        batches.append({name: stack([row[name] for row in chosen]) for name in network.inputs})
    return batches


def _rows(batch: dict[str, Tensor], network: Network) -> list[dict[str, Tensor]]:
    count = len(next(iter(batch.values())))
    return [
        {name: _fitted(batch[name][i], like[0]) if name in batch else like[0] for name, like in network.inputs.items()}
        for i in range(count)
    ]


def _fitted(row: Tensor, like: Tensor) -> Tensor:
    if row.dim() == 1 and not row.is_floating_point():
        row = row[: len(like)]
        return nn.functional.pad(row, (0, len(like) - len(row)))
    return row
