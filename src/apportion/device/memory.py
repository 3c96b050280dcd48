"""Peak activation memory: torch's allocations as they happen, liveness on the exported graph, and CUDA's allocator."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from apportion.core.meter import Meter, Reading
from apportion.device.target import Target
from apportion.models.network import Network, forward


class AllocatedPeak:
    """Most bytes of storage alive at once in an eager forward pass, beyond parameters, buffers and inputs.

    Every storage that an operation returns is counted from then until it is freed.
    """

    unit = "B"

    def read(self, model: Network) -> Reading:
        return Reading(value=float(max(_alive(model).alive)), unit=self.unit)


class SpreadPeak:
    r"""A peak to plan with, which falls with every part that nears it: a power mean of what is alive (eq. M7).

    .. math:: m = c \,\Bigl(\tfrac1T \textstyle\sum_t a_t^p\Bigr)^{1/p}, \quad p = 8

    The peak itself stays as it is until the last of the parts that share it is cut, so that no single cut seems to
    save anything. :math:`c` makes both read the same of the original; of others it is an estimate.
    """

    unit = "B"
    power = 8

    def __init__(self, original: Network, peak: Meter[Network]) -> None:
        self.factor = 1.0
        self.factor = peak.read(original).value / self.read(original).value

    def read(self, model: Network) -> Reading:
        alive = _alive(model).alive
        largest = max(alive)
        mean = sum((bytes_ / largest) ** self.power for bytes_ in alive) / len(alive)
        return Reading(value=self.factor * largest * mean ** (1 / self.power), unit=self.unit)


def _alive(model: Network) -> _Storages:
    fixed = [*model.module.parameters(), *model.module.buffers(), *model.inputs.values()]
    with torch.inference_mode(False), torch.no_grad(), _Storages(fixed) as storages:
        forward(model.module, model.inputs)
    return storages


class _Storages(TorchDispatchMode):
    """Counts the storages that operations make, until they are freed."""

    def __init__(self, fixed: list[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in fixed}
        self.alive_bytes = 0
        self.alive = [0]  # after every storage that was made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return output

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key in self.known:
            return
        size_bytes = storage.nbytes()
        self.known.add(key)
        self.alive_bytes += size_bytes
        self.alive.append(self.alive_bytes)

        def freed() -> None:
            self.known.discard(key)
            self.alive_bytes -= size_bytes

        weakref.finalize(storage, freed)


class LivenessPeak:
    """Most bytes of intermediate values alive at once on the graph of ``torch.export``, in its order of operations.

    A value lives from the operation that makes it to the last that reads it; views live in what they look at. It is
    what a runtime without fusion, that frees at once, has to hold.
    """

    unit = "B"

    def read(self, model: Network) -> Reading:
        named = {key: value for key, value in model.inputs.items() if not key.isdigit()}
        positional = tuple(model.inputs[key] for key in sorted(model.inputs) if key.isdigit())
        program = torch.export.export(model.module, positional, named, strict=False)
        return Reading(value=float(peak_of_graph(program.graph_module.graph)), unit=self.unit)


class CudaPeak:
    """Most bytes that torch held on the GPU at once in a pass as the target runs it, beyond those held before."""

    unit = "B"

    def __init__(self, target: Target) -> None:
        self.target = target

    def read(self, model: Network) -> Reading:
        from apportion.device.runtimes.eager import RUNTIME

        step = RUNTIME.open_network(model, self.target)
        try:
            step()  # what is compiled or reserved on first use is not of the pass
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            return Reading(value=float(torch.cuda.max_memory_allocated() - before), unit=self.unit)
        finally:
            model.module.to("cpu")  # where everything else looks for it


def peak_on(target: Target | None) -> Meter[Network]:
    """The peak that a limit on a target is about: what CUDA's allocator held, or torch's storages in an eager pass."""
    return CudaPeak(target) if target is not None and target.device == "cuda" else AllocatedPeak()


def peak_of_graph(graph: torch.fx.Graph) -> int:
    """Peak bytes of intermediate values over a graph whose nodes carry example values in ``meta['val']``."""
    nodes = list(graph.nodes)
    home: dict[Any, Any] = {}  # a view's storage belongs to the node that made it
    last_use: dict[Any, int] = {}
    for position, node in enumerate(nodes):
        home[node] = home[node.args[0]] if _is_view(node) and node.args[0] in home else node
        for used in node.all_input_nodes:
            last_use[home[used]] = position
    alive = peak = 0
    for position, node in enumerate(nodes):
        if node.op == "call_function" and home[node] is node:
            alive += _bytes(node)
            peak = max(peak, alive)
        for used in {home[used] for used in node.all_input_nodes}:
            if used.op == "call_function" and last_use[used] == position:
                alive -= _bytes(used)
    return peak


def _is_view(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(ret.alias_info is not None for ret in schema.returns)


def _bytes(node: Any) -> int:
    leaves = tree_leaves(node.meta.get("val"))
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor))
