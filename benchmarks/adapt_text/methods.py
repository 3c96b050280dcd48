"""The methods of the adapt benchmarks: ours and its baselines, as settings of one code path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from apportion.methods.adapt.clock import Clock
from apportion.methods.adapt.family import budget_knots


@dataclass(frozen=True, kw_only=True)
class Method:
    """How a method allocates, how many experts it has, what it trains on and how it starts.

    ``start`` names the fractions it begins with: the same for all modules, modules in proportion to their price or
    their sensitivity, widths alone, or blocks alone. ``targets`` are those it trains for, all if none are named.
    With ``near`` it trains slices of depths next to the settled ones, and the support set chooses among them.
    ``search`` widths are tried for every budget at its settled depth.
    ``masks`` says what delta gates are of; with ``half`` it trains in bf16 and blocks run again for their slopes.
    ``of`` names the method whose training it takes; with ``int8`` slices are quantised where the runtime has int8.
    """

    says: str
    allocation: str = "learned"
    experts: int = 4
    start: str = "uniform"
    train: bool = True
    slices: bool = True
    distil: float = 1.0
    capacity: float = 0.9
    objective: str = "mean"
    targets: tuple[str, ...] = ()
    near: float = 0.0
    search: int = 0
    masks: str = "groups"
    half: bool = False
    of: str = ""
    int8: bool = False


METHODS = {
    "ours": Method(
        says="per-module budgets by primal-dual training; router sees support and budget; the support set chooses "
        "among depths; slices in int8 where the runtime has it",
        near=0.5,
        int8=True,
    ),
    "ours-float": Method(says="the same, slices in float alone", near=0.5, of="ours"),
    "ours-settled": Method(says="the same in float, depths by the budget alone"),
    "ours-search": Method(says="as ours-settled, widths searched for at settled depths", search=40),
    "ours-weights": Method(says="as ours-settled, delta gates over single numbers", masks="weights"),
    "ours-half": Method(says="as ours-settled, trained in bf16 with blocks run again", half=True),
    "ours-cvar": Method(says="as ours-settled, trained on the worst 30 % of episodes", objective="cvar"),
    "ours-two": Method(
        says="as ours-settled, one target left out of training and priced by a few points",
        targets=("ort-cpu-1t", "openvino-cpu-1t"),
    ),
    "ours-no-ort": Method(says="the same, another target left out", targets=("openvino-cpu-1t", "torch-cpu-1t")),
    "ours-no-openvino": Method(says="the same, the third left out", targets=("ort-cpu-1t", "torch-cpu-1t")),
    "global": Method(says="one gate for all modules, trained", allocation="uniform"),
    "template": Method(says="one factor on a learned template", allocation="template"),
    "unconditional": Method(says="one vector of budgets for all B", allocation="unconditional"),
    "uniform": Method(says="fixed, spread evenly over widths and blocks", allocation="fixed"),
    "searched": Method(says="widths searched for from there, nothing else learned", allocation="fixed", search=40),
    "cost": Method(says="fixed, in inverse proportion to price", allocation="fixed", start="cost"),
    "sensitivity": Method(says="fixed, in proportion to sensitivity", allocation="fixed", start="sensitivity"),
    "slimmable": Method(says="widths by one schedule, no experts", allocation="fixed", start="widths", experts=1),
    "shallow": Method(says="smaller backbone: fewer blocks, no experts", allocation="fixed", start="blocks", experts=1),
    "smat": Method(says="global sparsity 0.5, then sliced evenly", allocation="fixed", slices=False, capacity=0.5),
    "smat-25": Method(says="global sparsity 0.25", allocation="fixed", slices=False, capacity=0.25),
    "smat-75": Method(says="global sparsity 0.75", allocation="fixed", slices=False, capacity=0.75),
    "pruned": Method(says="frozen weights pruned evenly, prototypes", allocation="fixed", train=False, experts=1),
    "pruned-int8": Method(
        says="pruned, in int8; where it fits the whole frozen network in int8",
        allocation="fixed",
        train=False,
        experts=1,
        of="pruned",
        int8=True,
    ),
    "template-int8": Method(says="template, with our int8", allocation="template", of="template", int8=True),
    "unconditional-int8": Method(
        says="unconditional, with our int8", allocation="unconditional", of="unconditional", int8=True
    ),
}


def start_fractions(start: str, clocks: Sequence[Clock], floor: float, sensitivity_L: Tensor) -> Tensor | None:
    """Fractions at the policy's knots for a start; None for the usual one."""
    modules = list(clocks[0].parts.partition)
    blocks_L = torch.tensor([bool(module.blocks) for module in modules])
    price_L = torch.stack([clock.prices() for clock in clocks]).mean(0)
    if start == "uniform":
        return None
    shape_L = {
        "cost": (1 / price_L.clamp_min(1e-4)),
        "sensitivity": sensitivity_L.clamp_min(1e-9).sqrt(),
        "widths": torch.ones(len(modules)),
        "blocks": torch.ones(len(modules)),
    }[start]
    moving_L = blocks_L if start == "blocks" else ~blocks_L
    shape_L = shape_L / shape_L[moving_L].mean()
    rows = []
    for rho in budget_knots(floor):
        low, high = 0.0, float((1 / shape_L[moving_L]).max())
        for _ in range(40):
            middle = 0.5 * (low + high)
            fraction_L = torch.where(moving_L, (middle * shape_L).clamp(0, 1), torch.ones(()))
            cost = sum(float(clock.ratio(fraction_L)) for clock in clocks) / len(clocks)
            low, high = (middle, high) if cost < rho else (low, middle)
        rows.append(torch.where(moving_L, (low * shape_L).clamp(0, 1), torch.ones(())))
    return torch.stack(rows)
