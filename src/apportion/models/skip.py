"""Residual blocks that can be left out: finding them, and the module that stands in for one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from apportion.models.network import forward, traceable

_RESHAPES = ("TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "ReshapeAliasBackward0")


class Skip(nn.Module):
    """Stands in for a block that was left out: returns its input."""

    def __init__(self, num_outputs: int = 0) -> None:
        super().__init__()
        self.num_outputs = num_outputs  # 0: a bare tensor; n: a tuple of n, the first being the input

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return as_output(first_tensor(args, kwargs), self.num_outputs)


def first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The stream that a block transforms: its first argument."""
    return args[0] if args else next(iter(kwargs.values()))


def as_output(stream: Any, num_outputs: int) -> Any:
    return (stream, *[None] * (num_outputs - 1)) if num_outputs else stream


def find_blocks(module: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, dict[str, int]]:
    """Runs the model once and finds the residual blocks in its lists of modules.

    A residual block returns the shape it is given, and its input reaches its output past every weight matrix.

    Returns:
        For every list (``encoder.layer``) with such blocks, the block names and how many outputs each returns (0 for a
        bare tensor). Blocks that run more or less often than once are left out.
    """
    lists = {
        name: container
        for name, container in module.named_modules()
        if isinstance(container, nn.ModuleList | nn.Sequential)
    }
    candidates = {
        f"{list_name}.{child_name}" if list_name else child_name: (list_name, child)
        for list_name, container in lists.items()
        for child_name, child in container.named_children()
        if any(True for _ in child.children()) and any(True for _ in child.parameters())
    }
    calls: dict[str, list[int | None]] = {name: [] for name in candidates}

    def hook(name: str) -> Any:
        def record(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            stream = first_tensor(args, kwargs) if args or kwargs else None
            bare = isinstance(output, Tensor)
            main = output if bare else output[0] if isinstance(output, tuple) and output else None
            fits = isinstance(stream, Tensor) and isinstance(main, Tensor) and stream.shape == main.shape
            residual = fits and _reaches(main.grad_fn, stream.grad_fn)  # type: ignore[union-attr]
            calls[name].append((0 if bare else len(output)) if residual else None)

        return record

    handles = [child.register_forward_hook(hook(name), with_kwargs=True) for name, (_, child) in candidates.items()]
    try:
        with traceable(module):
            forward(module, inputs)
    finally:
        for handle in handles:
            handle.remove()
    blocks: dict[str, dict[str, int]] = {}
    for name, (list_name, _) in candidates.items():
        (num_outputs,) = calls[name] if len(calls[name]) == 1 else (None,)
        if num_outputs is not None:
            blocks.setdefault(list_name, {})[name] = num_outputs
    for outer in list(blocks):  # a stage of blocks passes its input through, too; its blocks are the finer choice
        for name in list(blocks[outer]):
            if any(f"{inner}.".startswith(f"{name}.") for inner in blocks):
                del blocks[outer][name]
        if not blocks[outer]:
            del blocks[outer]
    return blocks


def _reaches(output: Any, stream: Any) -> bool:
    """Whether autograd leads from one node to another without passing a product with a weight matrix."""
    stack, seen = [output], {output}
    while stack:
        node = stack.pop()
        if node is stream:
            return node is not None
        if node is None or _multiplies_weights(node):
            continue
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return False


def _multiplies_weights(node: Any) -> bool:
    for following, _ in node.next_functions:
        while following is not None and following.name() in _RESHAPES:  # a transposed or reshaped weight
            following = following.next_functions[0][0]
        variable = getattr(following, "variable", None)
        if variable is not None and (variable.squeeze().dim() >= 2 or variable.dim() >= 4):
            return True
    return False


def skip_blocks(module: nn.Module, blocks: Mapping[str, int]) -> None:
    """Replaces the blocks named by ``Skip`` in place, and renumbers ``layer_idx`` so that caches stay without gaps."""
    for name, num_outputs in blocks.items():
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, Skip(num_outputs))
    for container_name in {name.rpartition(".")[0] for name in blocks}:
        kept = [child for child in module.get_submodule(container_name).children() if not isinstance(child, Skip)]
        for index, block in enumerate(kept):
            for part in block.modules():
                if isinstance(getattr(part, "layer_idx", None), int):
                    part.layer_idx = index  # type: ignore[assignment]
