"""Choosing a mixture by a support set: the best single source, a greedy soup, or the oracle's weights and edits.

Shape letters: L blocks, S sources, K numbers of steps, N examples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from apportion.core.progress import Progress, Silent
from apportion.methods.compose.blend import Blend, module_groups
from apportion.methods.compose.prices import Prices
from apportion.methods.compose.support import Support, held_out_losses, support_accuracy
from apportion.numerics.frank_wolfe import frank_wolfe

_FOLDS = 4
_STEPS = (0, 1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Choice:
    """A mixture, edits by tensor, and what was seen on the way there."""

    weight_LS: Tensor
    loss: float
    edits: dict[str, Tensor] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


def best_single(blend: Blend, support: Support, progress: Progress | None = None) -> Choice:
    """The source of least support loss."""
    losses = _single_losses(blend, support, progress)
    best = int(losses.argmin())
    return Choice(_vertex(blend, best), float(losses[best]), notes={"single_losses": losses.tolist()})


def greedy_soup(blend: Blend, support: Support, progress: Progress | None = None) -> Choice:
    """Sources from the best to the worst; each joins the average where support accuracy does not fall (C29)."""
    losses = _single_losses(blend, support, progress)
    order = losses.argsort().tolist()
    chosen = [order[0]]
    blend.set_weights(_uniform(blend, chosen))
    best = support_accuracy(blend.network, support)
    for place in order[1:]:
        blend.set_weights(_uniform(blend, [*chosen, place]))
        accuracy = support_accuracy(blend.network, support)
        if accuracy >= best:
            chosen, best = [*chosen, place], accuracy
    weight_LS = _uniform(blend, chosen)
    return Choice(weight_LS, blend.loss(weight_LS, support), notes={"support_accuracy": best})


def oracle(
    blend: Blend,
    support: Support,
    *,
    max_active: int | None = None,
    max_steps: int = 12,
    tolerance: float = 1e-4,
    progress: Progress | None = None,
) -> Choice:
    """Frank-Wolfe on the support loss from the best single source, or from the uniform mixture where that is better.

    A start at the uniform mixture is only taken where all sources may be active. Steps are pairwise; each one costs a
    backward pass over the support and one reading of the sources.
    """
    losses = _single_losses(blend, support, progress)
    num_sources = len(blend.sources)
    start_LS = _vertex(blend, int(losses.argmin()))
    start_loss = float(losses.min())
    if max_active is None or max_active >= num_sources:
        uniform_LS = _uniform(blend, list(range(num_sources)))
        uniform_loss = blend.loss(uniform_LS, support)
        if uniform_loss < start_loss:
            start_LS, start_loss = uniform_LS, uniform_loss
    with (progress or Silent()).stage("choosing weights") as update:
        steps = 0

        def objective(weight_LS: Tensor) -> tuple[float, Tensor]:
            nonlocal steps
            steps += 1
            update(min(0.99, steps / (2 * max_steps + 1)))
            return blend.objective(support, weight_LS)

        found = frank_wolfe(objective, start_LS, max_steps=max_steps, tolerance=tolerance, max_active=max_active)
    notes = {"gap": found.gap, "steps": found.num_steps, "start_loss": start_loss, "single_losses": losses.tolist()}
    return Choice(found.weight_LS, found.value, notes=notes)


def with_residual(
    blend: Blend,
    support: Support,
    choice: Choice,
    num_blocks: int,
    *,
    scattered: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Choice:
    """Adds edits to the few modules where the support asks most for them, as far as examples held out agree (C30).

    The modules of largest gradient per number are freed, and gradient steps with backtracking are taken on them. How
    many steps is found by a cross-validation over the support, and there is no residual unless the held-out examples
    gain more than luck explains: twice the standard error of their mean. ``scattered`` frees as many single numbers
    instead, those of largest gradient anywhere.
    """
    folds = support.folds(_FOLDS, seed)
    if not folds or num_blocks < 1:
        return choice
    with (progress or Silent()).stage("cross-validating the residual") as update:
        held_losses: dict[int, list[Tensor]] = {steps: [] for steps in _STEPS}
        for place, (fitted, held) in enumerate(folds):
            blend.edits = {}
            blend.set_weights(choice.weight_LS)
            for steps in _descend(blend, fitted, num_blocks, _STEPS[-1], scattered):
                if steps in held_losses:
                    held_losses[steps].append(held_out_losses(blend.network, fitted, held))
            update((place + 1) / (len(folds) + 1))
        loss_KN = torch.stack([torch.cat(losses) for losses in held_losses.values()]).double().cpu()
        best = _STEPS[_safest(loss_KN)]
        blend.edits = {}
        blend.set_weights(choice.weight_LS)
        start = {name: parameter.clone() for name, parameter in blend.parameters.items()} if best else {}
        for _ in _descend(blend, support, num_blocks, best, scattered):
            pass
        edits = {name: blend.parameters[name] - old for name, old in start.items()}
    blend.edits = {name: edit for name, edit in edits.items() if bool(edit.any())}
    told = dict(zip(_STEPS, loss_KN.mean(-1).tolist(), strict=True))
    notes = {**choice.notes, "residual_steps": best, "held_out_loss": told}
    return Choice(choice.weight_LS, blend.loss(choice.weight_LS, support), dict(blend.edits), notes)


def within_budget(blend: Blend, support: Support, choice: Choice, prices: Prices, budget: float) -> Choice:
    """Drops sources from blocks, or edits of blocks, that lose least per cost saved until the budget holds (C18).

    Raises:
        InfeasibleError: even one source per block without edits costs more.
    """
    prices.refuse_below_floor(budget)
    weight_LS, edits, value = choice.weight_LS, dict(choice.edits), choice.loss
    while prices.cost_of(weight_LS, _edited_rows(blend, edits)) > budget:
        options: list[tuple[float, float, Tensor, dict[str, Tensor]]] = []
        for row in range(len(weight_LS)):
            for place in weight_LS[row].nonzero()[:, 0].tolist():
                if int((weight_LS[row] > 0).sum()) > 1:
                    trial_LS = weight_LS.clone()
                    trial_LS[row, place] = 0
                    trial_LS[row] /= trial_LS[row].sum()
                    options.append(_priced_option(blend, support, prices, value, weight_LS, edits, trial_LS, edits))
        for row in _edited_rows(blend, edits):
            fewer = {name: edit for name, edit in edits.items() if blend.row[name] != row}
            options.append(_priced_option(blend, support, prices, value, weight_LS, edits, weight_LS, fewer))
        _, value, weight_LS, edits = min(options, key=lambda option: option[0])
    blend.edits = edits
    cost = prices.cost_of(weight_LS, _edited_rows(blend, edits))
    return Choice(weight_LS, value, edits, {**choice.notes, "cost_ms": cost})


def _priced_option(
    blend: Blend,
    support: Support,
    prices: Prices,
    value: float,
    weight_LS: Tensor,
    edits: dict[str, Tensor],
    trial_LS: Tensor,
    trial_edits: dict[str, Tensor],
) -> tuple[float, float, Tensor, dict[str, Tensor]]:
    before = prices.cost_of(weight_LS, _edited_rows(blend, edits))
    saved = before - prices.cost_of(trial_LS, _edited_rows(blend, trial_edits))
    blend.edits = trial_edits
    loss = blend.loss(trial_LS, support)
    return (loss - value) / max(saved, 1e-12), loss, trial_LS, trial_edits


def _safest(loss_KN: Tensor) -> int:
    """The row whose gain over the first, less twice its standard error, is largest; the first where none has any."""
    gain_KN = loss_KN[0] - loss_KN
    lower_K = gain_KN.mean(-1) - 2 * gain_KN.std(-1, correction=0) / max(1, loss_KN.shape[-1] - 1) ** 0.5
    return int(lower_K.argmax()) if float(lower_K.max()) > 0 else 0


def _edited_rows(blend: Blend, edits: dict[str, Tensor]) -> list[int]:
    return sorted({blend.row[name] for name in edits})


def _descend(blend: Blend, support: Support, num_blocks: int, max_steps: int, scattered: bool) -> Any:
    """Gradient steps on what is free, with backtracking; yields the number of steps taken, zero first."""
    yield 0
    if not max_steps:
        return
    value, gradient = blend.gradients(support)
    score = {
        group: sum(float(gradient[n].square().sum()) for n in names if n in gradient)
        / max(1, sum(blend.parameters[n].numel() for n in names))
        for group, names in module_groups(list(blend.parameters)).items()
    }
    chosen = sorted(score, key=lambda group: -score[group])[:num_blocks]
    free = [name for group in chosen for name in module_groups(list(blend.parameters))[group] if name in gradient]
    keep = {name: torch.ones_like(gradient[name]) for name in free}
    if scattered:
        count = sum(gradient[name].numel() for name in free)
        least = torch.cat([slope.abs().reshape(-1) for slope in gradient.values()]).topk(count).values[-1]
        keep = {name: (slope.abs() >= least).to(slope.dtype) for name, slope in gradient.items()}
        free = [name for name, mask in keep.items() if bool(mask.any())]
    norm = sum(float((gradient[name] * keep[name]).square().sum()) for name in free) ** 0.5
    size = sum(float((blend.parameters[name] * keep[name]).square().sum()) for name in free) ** 0.5
    rate = 0.02 * size / max(norm, 1e-12)
    for step in range(1, max_steps + 1):
        before = {name: blend.parameters[name].clone() for name in free}
        for _ in range(8):
            with torch.no_grad():
                for name in free:
                    blend.parameters[name].copy_(before[name] - rate * gradient[name] * keep[name])
            new_value, new_gradient = blend.gradients(support)
            if new_value < value:
                break
            rate /= 2
        else:
            with torch.no_grad():
                for name in free:
                    blend.parameters[name].copy_(before[name])
            yield from range(step, max_steps + 1)
            return
        value, gradient, rate = new_value, new_gradient, 1.2 * rate
        yield step


def _single_losses(blend: Blend, support: Support, progress: Progress | None) -> Tensor:
    with (progress or Silent()).stage("judging single sources") as update:
        losses = []
        for place in range(len(blend.sources)):
            losses.append(blend.loss(_vertex(blend, place), support))
            update((place + 1) / len(blend.sources))
    return torch.tensor(losses, dtype=torch.float64)


def _vertex(blend: Blend, place: int) -> Tensor:
    return _uniform(blend, [place])


def _uniform(blend: Blend, chosen: list[int]) -> Tensor:
    weight_LS = torch.zeros(len(blend.groups), len(blend.sources), dtype=torch.float64)
    weight_LS[:, chosen] = 1 / len(chosen)
    return weight_LS
