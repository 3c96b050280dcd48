"""Many tasks on one resident network: a batch may mix them, and each example gets the answer of its task's own network.

Shape letters: N examples, T tasks, G groups, L modules, M experts, F features, W classes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from apportion.errors import ApportionError, DataError, ModelError
from apportion.methods.adapt.branches import Plan, delta_norms, sites_of
from apportion.methods.adapt.family import Family
from apportion.methods.adapt.groups import Groups
from apportion.models.network import Network, read_out
from apportion.tasks.heads import Cosine, Head

WHOLE_RATIO = 0.8  # of a module's groups; from there on, running all of them is no slower than picking some
MAX_PLANS = 8


@dataclass(frozen=True, eq=False)
class TaskHead:
    """What classifies a task's features: weights, biases and the names of the classes."""

    weight_FW: Tensor
    bias_W: Tensor
    classes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Task:
    """One task's gates on the shared delta, the groups it has open, and its head where one was fitted."""

    gate_G: Tensor
    open_G: Tensor
    head: TaskHead | None = None

    @property
    def gates(self) -> Tensor:
        return self.gate_G * self.open_G

    @property
    def size_bytes(self) -> int:
        held = [self.gate_G, self.open_G, *((self.head.weight_FW, self.head.bias_W) if self.head else ())]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


class SharedTasks:
    """The frozen network of a family, its delta, and the gates and heads of many tasks.

    Hooks are put on the network once. They do nothing outside of the calls here, and ``close`` takes them off; as a
    context manager it closes itself. Calls from several threads take turns. What a combination of tasks has open is
    gathered at its first batch and kept for the last few combinations.

    Example::

        with SharedTasks.of(family) as shared:
            shared.add("banking", alpha_M)
            shared.fit_head("banking", inputs, label_S, classes)
            shared.classify(inputs, ["banking", "travel", "banking"])
    """

    def __init__(
        self,
        network: Network,
        groups: Groups,
        stacks: nn.ModuleList,
        gate_MG: Tensor,
        *,
        scale: float = 10.0,
        max_plans: int = MAX_PLANS,
    ) -> None:
        """Args:
        stacks: the deltas, as ``groups.bundles`` lays them out.
        gate_MG: the gates of every expert.
        scale: of the scores of cosine heads.
        max_plans: for how many combinations of tasks what is open is kept gathered.
        """
        self.network, self.groups, self.scale = network, groups, scale
        self._gate_MG, self._max_plans = gate_MG.detach().cpu(), max_plans
        self._sites = sites_of(network, groups, stacks)
        self._tasks: dict[str, Task] = {}
        self._plans: OrderedDict[tuple[str, ...], Plan] = OrderedDict()
        self._now: tuple[Plan, Tensor] | None = None
        self._turn = threading.RLock()
        self._handles = [site.layer.register_forward_hook(self._hook(site.name)) for site in self._sites]

    @classmethod
    def of(cls, family: Family) -> SharedTasks:
        """The backbone of a trained family, without tasks; the family itself is no longer needed afterwards."""
        if family.config.masks != "groups":
            raise ModelError(f"masks over {family.config.masks} have no groups to run apart; adapt with --masks groups")
        gate_MG = family.gates(torch.eye(family.config.num_experts))
        scale = float(family.log_scale.detach().exp())
        return cls(family.network, family.groups, family.stacks, gate_MG, scale=scale)

    def __enter__(self) -> SharedTasks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the network as it was found."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tasks)

    def task(self, name: str) -> Task:
        """The task of a name."""
        if name not in self._tasks:
            known = ", ".join(self._tasks) or "none"
            raise ApportionError(f"no task {name!r} on this backbone; it holds {known}; add it first")
        return self._tasks[name]

    def add(self, name: str, alpha_M: Tensor) -> None:
        """Adds a task by its mixture over experts, with every group open whose gate is.

        Raises:
            ApportionError: the name is taken, or this is no mixture over the experts.
        """
        if name in self._tasks:
            raise ApportionError(f"the task {name!r} is there already; remove it first, or choose another name")
        num_experts = len(self._gate_MG)
        alpha_M = torch.as_tensor(alpha_M, dtype=torch.float32).detach().cpu()
        if alpha_M.shape != (num_experts,) or not (alpha_M >= 0).all() or abs(float(alpha_M.sum()) - 1) > 1e-2:
            raise ApportionError(
                f"task {name!r} has the mixture {alpha_M.tolist()}; give {num_experts} shares that sum to one"
            )
        gate_G = alpha_M @ self._gate_MG
        self._tasks[name] = Task(gate_G, gate_G > 0)

    def remove(self, name: str) -> None:
        """Takes a task off the backbone, with all that was kept for it."""
        self.task(name)
        with self._turn:
            del self._tasks[name]
            self._forget(name)

    def open(self, name: str, open_G: Tensor) -> None:
        """Opens these groups of a task and closes the others; its head saw other features, so it is dropped."""
        if open_G.shape != (self.groups.count,):
            raise ApportionError(f"{len(open_G)} groups were named for {name!r}; there are {self.groups.count}")
        task = self.task(name)
        with self._turn:
            self._tasks[name] = replace(task, open_G=open_G.bool() & (task.gate_G > 0), head=None)
            self._forget(name)

    def values(self, names: Sequence[str] | None = None) -> Tensor:
        r"""What every group is worth to some tasks, to all by default: its gate times the norm of its delta, summed.

        .. math:: v_k = \sum_t |a^{(t)}_k| \, \|\Delta_k\| \quad \text{(eq. A22)}
        """
        gate_TG = torch.stack([self.task(name).gate_G for name in (names or self.names)])
        return gate_TG.abs().sum(0) * delta_norms(self._sites, self.groups.count)

    def running(self, names: Sequence[str]) -> Tensor:
        """The groups that run in a batch of some tasks: those that any has open, or all of a module that is nearly so.

        Groups that run and are closed for an example's task add nothing to it.
        """
        open_G = torch.stack([self.task(name).open_G for name in names]).any(0)
        return rounded_up(open_G, self.groups.module_G())

    def fit_head(
        self,
        name: str,
        inputs: Mapping[str, Tensor],
        label_S: Tensor,
        classes: Sequence[str],
        head: Head | None = None,
    ) -> None:
        """Fits a task's head to labelled examples, by cosine to class means unless another is given."""
        if len(label_S) == 0 or int(label_S.max()) >= len(classes) or int(label_S.min()) < 0:
            raise DataError(f"{len(label_S)} labels for {len(classes)} classes of {name!r}; give labels from 0 on")
        feature_SF = self.embed(inputs, name).clone()  # out of inference mode, since a head may be trained
        weight_FW, bias_W = (head or Cosine(scale=self.scale)).linear(feature_SF, label_S, len(classes))
        self._tasks[name] = replace(self.task(name), head=TaskHead(weight_FW, bias_W, tuple(classes)))

    @torch.inference_mode()
    def embed(self, inputs: Mapping[str, Tensor], names: str | Sequence[str]) -> Tensor:
        """Unit features of a batch, shape (N, F); ``names`` is the task of all examples or of each."""
        count = len(next(iter(inputs.values())))
        each = [names] * count if isinstance(names, str) else list(names)
        if len(each) != count or not self._handles:
            given = "the backbone is closed" if not self._handles else f"{len(each)} tasks for {count} examples"
            raise ApportionError(f"{given}; name one task for each example, on an open backbone")
        with self._turn:
            plan = self._plan(tuple(sorted(set(each))))
            device = next(iter(inputs.values())).device
            self._now = plan, torch.tensor([plan.row_of[name] for name in each], device=device)
            try:
                return functional.normalize(read_out(self.network, inputs).float(), dim=-1)
            finally:
                self._now = None

    def scores(self, inputs: Mapping[str, Tensor], names: str | Sequence[str]) -> list[Tensor]:
        """The scores of every example over its own task's classes."""
        feature_NF = self.embed(inputs, names)
        each = [names] * len(feature_NF) if isinstance(names, str) else names
        return [
            feature_F @ head.weight_FW + head.bias_W
            for feature_F, head in zip(feature_NF, map(self._head, each), strict=True)
        ]

    def classify(self, inputs: Mapping[str, Tensor], names: str | Sequence[str]) -> list[str]:
        """The class of every example, in its own task's words."""
        scores = self.scores(inputs, names)
        each = [names] * len(scores) if isinstance(names, str) else names
        return [self._head(name).classes[int(score_W.argmax())] for name, score_W in zip(each, scores, strict=True)]

    def size_bytes(self) -> dict[str, int]:
        """Bytes held by the backbone, by the delta, by all tasks, and by what was gathered for their last batches."""
        parameters = self.network.module.parameters()
        return {
            "backbone": sum(p.numel() * p.element_size() for p in parameters),
            "delta": sum(t.numel() * t.element_size() for site in self._sites for t in site.tensors),
            "tasks": sum(task.size_bytes for task in self._tasks.values()),
            "gathered": sum(plan.size_bytes for plan in self._plans.values()),
        }

    def _head(self, name: str) -> TaskHead:
        head = self.task(name).head
        if head is None:
            raise ApportionError(f"the task {name!r} has no head for the groups it has open; fit_head gives it one")
        return head

    def _plan(self, names: tuple[str, ...]) -> Plan:
        if names not in self._plans:
            gate_TG = torch.stack([self.task(name).gates for name in names])
            self._plans[names] = Plan.of(self._sites, names, gate_TG, self.running(names))
            while len(self._plans) > self._max_plans:
                self._plans.popitem(last=False)
        self._plans.move_to_end(names)
        return self._plans[names]

    def _forget(self, name: str) -> None:
        for names in [names for names in self._plans if name in names]:
            del self._plans[names]

    def _hook(self, name: str) -> Any:
        def run(_layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            if self._now is None or name not in self._now[0].branches:
                return None
            plan, task_N = self._now
            if len(args[0]) != len(task_N):
                raise ModelError(f"{name} sees {len(args[0])} rows of {len(task_N)} examples; merge this one's tasks")
            return plan.branches[name](args[0], output, task_N)

        return run


def cost_shares(open_G: Tensor, module_G: Tensor) -> Tensor:
    r"""The work of every module as a share of running it whole, shape (L,).

    .. math:: s_\ell = \min\Big(1, \frac{o_\ell}{\rho\, g_\ell}\Big) \quad \text{(eq. A24)}

    :math:`o_\ell` of :math:`g_\ell` groups are open. ``WHOLE_RATIO`` is :math:`\rho`: a picked row costs more than one
    of a module that runs whole, so this share of picked groups costs what all do, and from there on all run.
    """
    size_L = torch.bincount(module_G)
    opened_L = torch.bincount(module_G[open_G], minlength=len(size_L))
    return (opened_L / (WHOLE_RATIO * size_L)).clamp(max=1.0)


def rounded_up(open_G: Tensor, module_G: Tensor) -> Tensor:
    """These groups, with all of a module where nearly all are among them."""
    return open_G | (cost_shares(open_G, module_G) >= 1.0)[module_G]
