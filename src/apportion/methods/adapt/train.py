r"""Primal-dual training: the family descends on its queries' losses, the prices of its constraints ascend.

.. math:: J_i = \mathcal L_{T_i}(\theta_i) + \sum_\ell \lambda_\ell (s_{i\ell} - b_\ell(\rho_i)) +
    \mu \big(\widehat{\mathrm{Lat}}(b(\rho_i)) - \rho_i\big) \quad \text{(eq. A12; the paper's eq. 14 to 17)}

A module's price :math:`\lambda_\ell` rises while tasks want more of it than the policy allows, and pulls the policy up;
the price of time :math:`\mu` pulls it down by what the module costs. Where both rest, :math:`\lambda_\ell = \mu\,
\partial_\ell \widehat{\mathrm{Lat}}`. Prices are kept for every device and range of budgets. Each step runs every
episode twice: whole, and at a budget drawn for it, which learns from the labels and from the whole network's answers.

Blocks are few and a step of them is large: after a share of the steps the depths that a budget allows are judged (eq.
A17), then widths of the same bound are searched for at these depths (eq. A26), and the rest of the training runs slices
of those that were chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from apportion.errors import DataError
from apportion.methods.adapt.depth import (
    LEAST_USE,
    Depth,
    balanced_depths,
    every_depth,
    near_depths,
    nested_depths,
    sizes_by_depth,
)
from apportion.methods.adapt.episodes import episode_features, frozen_means, logits
from apportion.methods.adapt.family import UNSETTLED, Family, Plan
from apportion.methods.adapt.masked import PRECISIONS, Pass
from apportion.methods.adapt.policy import unsquash
from apportion.methods.adapt.pool import Pool
from apportion.methods.adapt.solve import along_path, left_out, sizes_at
from apportion.methods.adapt.variation import varied
from apportion.methods.adapt.widths import SliceLoss, search_widths
from apportion.numerics.multipliers import Multipliers
from apportion.numerics.robust import GroupWeights, cvar_weights, kl_weights
from apportion.tasks.episode import Episode, Sampler
from apportion.tasks.heads import cosines

NUM_BINS = 8
Objective = Literal["mean", "cvar", "group", "kl"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a family is trained; rates are of Adam, for the delta and for the small parts (policy, router, gates).

    A slice learns from the whole network's answers with weight ``distil`` and from its features with weight
    ``likeness``: answers are soon right on the training tasks, features go on telling what a slice has lost. The whole
    network learns from the labels with weight ``whole`` and from the frozen one with weight ``anchor``, which keeps it
    usable on tasks unlike those trained on; ``hold`` is the weight of its features' likeness to the frozen one's.
    ``vary`` is the share of episodes whose images are all changed in one way (``variation``).
    ``even`` pulls mixtures towards even ones, so that no expert is left to the tasks of a few domains alone.

    ``gains`` (proportional and integral), ``window`` and ``damping`` are those of ``Multipliers``; damping after a
    window with slack makes budgets break on average (``benchmarks/adapt_theory``), so the window is 0, which is never.

    With ``precision`` ``bf16`` the network's products are in half the bits; losses and the small networks stay in fp32.
    With ``checkpoint`` blocks run again for their slopes, which saves memory and takes more time.

    Without ``slices`` the whole network alone is trained; ``settle`` is the share of the steps after which depths are
    settled, and ``near`` the share of the slices after it that run one block less or more, so that a support set may
    choose among depths (``specialise``). ``search`` is how many widths are tried for every budget once its depth is
    settled; those found stay, and what goes on learning is how far devices and experts lean from them.

    ``capacity`` is the most that the open delta gates may be of the groups kept;
    ``objective`` with ``beta`` is the mean, the tail mean of the worst ``1 - beta``, the worst domain, or the worst
    case within a divergence of ``beta``.
    """

    steps: int = 2000
    episodes: int = 4
    rate: float = 2e-4
    small_rate: float = 1e-2
    weight_decay: float = 0.01
    distil: float = 1.0
    likeness: float = 2.0
    whole: float = 0.5
    anchor: float = 0.5
    hold: float = 0.0
    vary: float = 0.0
    even: float = 0.1
    slices: bool = True
    settle: float = 0.6
    near: float = 0.0
    search: int = 0
    capacity: float = 0.9
    price_rate: float = 1.0
    max_price: float = 20.0
    gains: tuple[float, float] = (0.0, 1.0)
    window: int = 0
    damping: float = 0.5
    precision: str = "fp32"
    checkpoint: bool = False
    objective: str = "mean"
    beta: float = 0.7
    warmup: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.steps, self.episodes) < 1 or min(self.rate, self.small_rate, self.price_rate) <= 0:
            raise DataError(
                f"{self.steps} steps of {self.episodes} episodes at rate {self.rate:g} are not possible; give one or "
                "more of both, and rates above 0"
            )
        if self.objective not in OBJECTIVES:
            raise DataError(f"objective {self.objective!r} is not known; possible are {', '.join(OBJECTIVES)}")
        if self.objective == "cvar" and not 0 <= self.beta < 1:
            raise DataError(f"beta {self.beta:g} is no share of tasks to leave out; give one from 0 to less than 1")
        if self.objective == "kl" and not 0 <= self.beta < math.inf:
            raise DataError(f"beta {self.beta:g} is no divergence; give 0 or more")
        if self.seed < 0:
            raise DataError(f"seed {self.seed} is not possible; give 0 or more")
        if self.precision not in PRECISIONS:
            raise DataError(f"precision {self.precision!r} is not known; possible are {', '.join(PRECISIONS)}")
        if len(self.gains) != 2 or not all(0 <= gain < math.inf for gain in self.gains) or not any(self.gains):
            raise DataError(f"gains {self.gains} are not possible; give two of 0 or more, one above 0, such as 0.5,1")
        if self.window < 0 or not 0 <= self.damping < 1:
            raise DataError(
                f"a window of {self.window} and a damping of {self.damping:g} are not possible; give a window of 0 "
                "(off) or more, and a damping from 0 (prices start anew) to less than 1"
            )
        for name in ("vary", "settle", "near"):
            if not 0 <= getattr(self, name) <= 1:
                raise DataError(f"{name} {getattr(self, name):g} is not a share; give one from 0 to 1")
        if self.search < 0:
            raise DataError(f"{self.search} widths can't be searched through; give 0 (no search) or more, such as 40")
        if not 0 < self.capacity <= 1:
            raise DataError(f"capacity {self.capacity:g} is not possible; give a share above 0 and at most 1")


class Trainer:
    """Trains a family step by step; a step depends on the state and its number alone, so runs resume exactly."""

    def __init__(self, family: Family, pools: Mapping[str, Pool], sampler: Sampler, config: TrainConfig) -> None:
        self.family, self.pools, self.sampler, self.config = family, pools, sampler, config
        self.names, self.how = tuple(family.clocks), Pass(config.precision, config.checkpoint)
        shape = (len(self.names), NUM_BINS)
        rates: dict[str, Any] = {
            "rate": config.price_rate,
            "limit": config.max_price,
            "pi": config.gains,
            "window": config.window,
            "damping": config.damping,
        }
        self.nu = Multipliers((1,), **rates)
        rates["rate"] *= max(1.0, len(self.names) * NUM_BINS / config.episodes)  # each is seen once in so many steps
        self.mu = Multipliers(shape, **rates)
        self.lam = Multipliers((*shape, len(family.partition)), **rates)
        self.value_BL = torch.zeros(NUM_BINS, len(family.partition))  # what a bit more of a module is worth
        domains = [domain.name for domain in sampler.domains]
        self.group = GroupWeights(len(domains), rate=0.05)
        self.group_of = {name: place for place, name in enumerate(domains)}
        large = [bundle.delta for bundle in family.bundles]
        small = [p for name, p in family.named_parameters() if not name.startswith("stacks.") and p.requires_grad]
        each = [bundle.gate_logit for bundle in family.bundles if bundle.gate_logit is not None]
        slow = {"lr": config.rate, "weight_decay": config.weight_decay, "base": config.rate}
        fast = {"lr": config.small_rate, "weight_decay": 0.0, "base": config.small_rate}
        sets: list[dict[str, Any]] = [{"params": large, **slow}, {"params": small, **fast}]
        if each:  # of millions of gates each has a slope so small that Adam's usual eps would hide it
            sets.append({"params": each, **fast, "eps": 1e-15})
        self.optimiser = torch.optim.AdamW(sets, betas=(0.9, 0.98))
        self.large, self.small = large, [*small, *each]
        self.searches = config.slices and config.search > 0
        self.settles = config.slices and (family.config.allocation != "fixed" or self.searches)
        if self.searches and family.config.allocation not in ("learned", "fixed"):
            raise DataError(
                f"widths of allocation {family.config.allocation} can't be searched for, since its modules share one "
                "curve; use learned, or a search of 0"
            )
        self.num_settle = min(int(config.settle * config.steps), config.steps - 1)

    def step(self, number: int) -> dict[str, Any]:
        """One step of descent and ascent; returns what is logged."""
        config = self.config
        settled: dict[str, Any] = {}
        if self.settles and number == self.num_settle:
            settled = {"depths": self.settle(_few(config))}
            if self.searches:
                settled |= {"widths": self.search(_few(config))}
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + number)
        for group in self.optimiser.param_groups:
            group["lr"] = group["base"] * schedule(number, config)
        runs = [self._run(number, place, generator) for place in range(config.episodes)]
        weight_E = torch.from_numpy(self._weights(runs)).float()
        prices = []
        for run in runs:
            lam_L = torch.from_numpy(self.lam.values[run.index]).float()
            prices.append(lam_L @ run.v_L + float(self.mu.values[run.index]) * run.u)
        open_share = torch.stack([run.open_share for run in runs]).mean()
        priced = torch.stack(prices).mean() + float(self.nu.values[0]) * (open_share - config.capacity)
        device = runs[0].loss.device
        total = (torch.stack([run.loss for run in runs]) * weight_E.to(device)).sum() + priced.to(device)
        self.optimiser.zero_grad(set_to_none=True)
        total.backward()
        slope = float(torch.nn.utils.clip_grad_norm_(self.large, 1.0))
        small_slope = float(torch.nn.utils.clip_grad_norm_(self.small, 5.0))
        if self.searches and number >= self.num_settle:
            self.family.policy.start_L.grad = self.family.policy.rise_KL.grad = None
        if math.isfinite(slope + small_slope):  # one that is not would stay in what modules are worth
            self._ascend(runs, weight_E, float(open_share.detach()))
            self.optimiser.step()
        row = self._row(number, runs, slope, small_slope, float(open_share.detach()))
        return row | {name: rows for name, rows in settled.items() if rows}

    def _run(self, number: int, place: int, generator: torch.Generator) -> _Run:
        config, family = self.config, self.family
        count = number * config.episodes + place
        pool, episode = self._drawn(count, generator)
        name = self.names[(number + place) % len(self.names)]  # so that every device meets every range of budgets
        spread = (place + float(torch.rand((), generator=generator))) / config.episodes
        rho = family.floor ** (1 - spread) if config.slices else 1.0  # evenly in the logarithm
        mean_WF = frozen_means(pool, episode)
        label_Q = torch.from_numpy(episode.query.label_N).to(pool_device(pool))
        whole = family.plan(mean_WF, 1.0, name)
        ones_G = torch.ones(family.groups.count)
        whole_NF = episode_features(family, pool, episode, family.gates(whole.alpha_M, generator), ones_G, self.how)
        whole_QW = logits(family, episode, whole_NF)
        plan = family.plan(mean_WF, rho, name)
        wanted_L = self._wanted(plan, rho, name, generator)
        if not wanted_L.requires_grad:
            wanted_L.requires_grad_(True)
        wanted_L.retain_grad()
        keep_G = family.keep(wanted_L, generator) if config.slices else ones_G
        slice_NF = episode_features(family, pool, episode, family.gates(plan.alpha_M, generator), keep_G, self.how)
        slice_QW = logits(family, episode, slice_NF)
        loss = functional.cross_entropy(slice_QW, label_Q)
        learned = self._unlike(episode, slice_NF, whole_NF.detach())
        uneven = -(plan.alpha_M * len(plan.alpha_M)).clamp_min(1e-9).log().mean()  # divergence of the even mixture
        whole_loss = functional.cross_entropy(whole_QW, label_Q)
        frozen_QW = self._frozen(pool, episode, mean_WF).to(whole_QW.device)
        answers = functional.kl_div(whole_QW.log_softmax(-1), frozen_QW.softmax(-1), reduction="batchmean")
        anchored = config.anchor * answers
        if config.hold:
            rows = torch.from_numpy(np.concatenate([episode.support.row_N, episode.query.row_N]))
            frozen_NF = pool.feature_NF[rows].to(whole_NF)
            anchored = anchored + config.hold * (1 - functional.cosine_similarity(whole_NF, frozen_NF)).mean()
        return _Run(
            episode=episode,
            plan=plan,
            index=(self.names.index(name), budget_bin(rho, family.floor)),
            loss=loss + learned + config.whole * whole_loss + anchored + config.even * uneven.to(loss),
            slice_loss=float(loss.detach()),
            whole_loss=float(whole_loss.detach()),
            accuracy=float((slice_QW.detach().argmax(-1) == label_Q).float().mean()),
            wanted_L=wanted_L,
            v_L=plan.fraction_L - plan.budget_L,
            u=family.clocks[name].ratio(plan.budget_L) - rho,
            open_share=family.open_share(plan.alpha_M, keep_G.detach()),
        )

    def _drawn(self, count: int, generator: torch.Generator) -> tuple[Pool, Episode]:
        """An episode by its number and the pool of its rows, changed or not."""
        episode = self.sampler.episode(count)
        pool = self.pools[episode.domain]
        if self.config.vary and float(torch.rand((), generator=generator)) < self.config.vary:
            return varied(self.family.network, pool, episode, generator)
        return pool, episode

    def _frozen(self, pool: Pool, episode: Episode, mean_WF: Tensor) -> Tensor:
        """Scores of the queries by the frozen network."""
        query_QF = pool.feature_NF[torch.from_numpy(episode.query.row_N)]
        return self.family.log_scale.detach().exp() * cosines(query_QF, mean_WF)

    def _unlike(self, episode: Episode, slice_NF: Tensor, whole_NF: Tensor) -> Tensor:
        """How far a slice is from the whole network, in answers and in features, weighted."""
        config, family = self.config, self.family
        slice_QW, whole_QW = logits(family, episode, slice_NF), logits(family, episode, whole_NF).detach()
        answers = functional.kl_div(slice_QW.log_softmax(-1), whole_QW.softmax(-1), reduction="batchmean")
        return config.distil * answers + config.likeness * (1 - functional.cosine_similarity(slice_NF, whole_NF)).mean()

    def _wanted(self, plan: Plan, rho: float, name: str, generator: torch.Generator) -> Tensor:
        """The fractions that a slice runs with: the policy's, or these at the settled depth or one near it."""
        depth, clock = self.family.depth(rho), self.family.clocks[name]
        if depth is None:
            return plan.fraction_L.clone()
        limit_ms = rho * clock.whole_ms
        if self.config.near and float(torch.rand((), generator=generator)) < self.config.near:
            near = near_depths(self.family, rho)
            other = near[int(torch.randint(len(near), (), generator=generator))] if near else depth
            other_L = along_path(self.family, plan.alpha_M, clock, limit_ms, name, other)
            most_L = along_path(self.family, plan.alpha_M, clock, math.inf, name, other)
            upper_ms = clock.relaxed_upper_ms(other_L)
            if upper_ms <= limit_ms and (upper_ms >= LEAST_USE * limit_ms or torch.equal(other_L, most_L)):
                return other_L
        return along_path(self.family, plan.alpha_M, clock, limit_ms, name, depth)

    @torch.no_grad()
    def settle(self, num_episodes: int) -> list[dict[str, Any]]:
        r"""Settles how many blocks every budget keeps, by judging all depths that it allows (eq. A17).

        .. math:: d = \arg\min_{d(\rho_1) \le \dots \le d(\rho_K)} \sum_k \Delta_k \big[\Delta_k > \sigma_k\big],
            \quad \Delta_k = \hat{\mathbb E} \big(\mathcal L(s(d(\rho_k))) - \mathcal L(s(d^*_k))\big),
            \quad \overline{\mathrm{Lat}}(s(d(\rho))) \le \rho \, \mathrm{Lat}_0

        :math:`d^*_k` loses least at a budget and :math:`\sigma_k` is the standard error of the mean; :math:`s(d)` has
        :math:`d` blocks and the widths of the policy's path that fill the budget on the first device. Budgets are the
        knots, and for those near the whole the least of them. Of paths that are as good the most balanced is taken
        (``nested_depths``). Episodes are training ones that come after the last step.

        Returns:
            What every depth lost at every budget.
        """
        family, drawn = self.family, self._later(num_episodes)
        clock = family.clocks[self.names[0]]
        learned = family.config.allocation == "learned"
        mean_of = [frozen_means(pool, episode) for pool, episode in drawn]
        rows: list[dict[str, Any]] = []
        judged: list[dict[Depth, np.ndarray]] = []
        for rho in (*family.knots[:-1], math.sqrt(family.knots[-2])):
            alpha_EM = torch.stack([family.plan(mean_WF, rho, clock.name).alpha_M for mean_WF in mean_of])
            value_L = module_values(self.value_BL, rho, family.floor) if learned else None
            judged.append({})
            for depth, sizes in sizes_by_depth(family, alpha_EM.mean(0), rho, clock, value_L).items():
                keep_G = family.keep_of(sizes)
                loss_E = np.array([self._lost(*one, a_M, keep_G) for one, a_M in zip(drawn, alpha_EM, strict=True)])
                rows.append({"rho": round(rho, 4), "depth": depth, "loss": round(float(loss_E.mean()), 4)})
                judged[-1][depth] = loss_E
        if rows:
            chosen = nested_depths(every_depth(family), judged, balanced_depths(family))
            for knot, settled in enumerate(chosen):
                family.depth_KJ[knot] = torch.tensor(UNSETTLED if settled is None else settled)
        return rows

    @torch.no_grad()
    def search(self, num_episodes: int) -> list[dict[str, Any]]:
        """Lays the policy's curves through the best widths found at every knot (eq. A26), the loosest first.

        Each knot's widths lie within those of the next, so that networks stay nested; blocks keep their curves.

        Returns:
            The sizes found for every budget, with their loss and that of the policy's.
        """
        family, policy, rows = self.family, self.family.policy, []
        clock, learned = family.clocks[self.names[0]], family.config.allocation == "learned"
        drawn = self._later(num_episodes)
        mixtures = [family.plan(frozen_means(*one), family.floor**0.5, clock.name).alpha_M for one in drawn]
        alpha_M = torch.stack(mixtures).mean(0)
        loss, generator = SliceLoss(family, alpha_M, drawn), np.random.default_rng(self.config.seed)
        modules = list(family.partition)
        whole = {module.name: module.num_units for module in modules}
        within, fractions = whole, [torch.ones(len(modules))]
        for rho in reversed(family.knots[:-1]):
            budget_ms = rho * clock.whole_ms
            value_L = module_values(self.value_BL, rho, family.floor) if learned else None
            start = sizes_at(family, alpha_M, budget_ms, clock, value_L, depth=family.depth(rho), within=within)
            if start is None:
                fractions.append(torch.minimum(family.plan_with(alpha_M, rho, clock.name).fraction_L, fractions[-1]))
                continue
            count = self.config.search
            sizes, least, first = search_widths(clock, start, budget_ms, loss, count, generator, within)
            rows.append({"rho": round(rho, 4), "sizes": sizes, "loss": round(least, 4), "before": round(first, 4)})
            free = [*left_out(clock, sizes), *(modules[place].name for place in family.block_places)]
            within = sizes | {name: within[name] for name in free}  # of the next, which may be deeper on another device
            fractions.append(torch.tensor([within[module.name] / module.num_units for module in modules]))
        level_KL = unsquash(torch.stack(fractions[::-1])) - alpha_M @ family.lean_ML
        if learned:
            level_KL += policy.lean * (family.prices(clock.name).clamp_min(1e-6).log() - policy.usual_L)
        for place in family.block_places:
            level_KL[:, place] = torch.stack([policy.level(rho, policy.usual_L.exp())[place] for rho in family.knots])
        policy.put(level_KL)
        return rows

    def _later(self, count: int) -> list[tuple[Pool, Episode]]:
        """Training episodes that come after the last step."""
        first = self.config.steps * self.config.episodes
        generator = torch.Generator().manual_seed(self.config.seed)
        return [self._drawn(first + number, generator) for number in range(count)]

    def _lost(self, pool: Pool, episode: Episode, alpha_M: Tensor, keep_G: Tensor) -> float:
        """The loss of an episode's queries by a slice."""
        feature_NF = episode_features(self.family, pool, episode, self.family.gates(alpha_M), keep_G, self.how)
        label_Q = torch.from_numpy(episode.query.label_N).to(feature_NF.device)
        return float(functional.cross_entropy(logits(self.family, episode, feature_NF), label_Q))

    def _weights(self, runs: list[_Run]) -> np.ndarray:
        loss_E = np.array([run.slice_loss for run in runs])
        if self.config.objective == "cvar":
            return cvar_weights(loss_E, self.config.beta)
        if self.config.objective == "kl":
            return kl_weights(loss_E, self.config.beta)
        if self.config.objective == "group":
            return self.group.update(loss_E, np.array([self.group_of[run.episode.domain] for run in runs]))
        return np.full(len(runs), 1 / len(runs))

    def _ascend(self, runs: list[_Run], weight_E: Tensor, open_share: float) -> None:
        seen: dict[tuple[int, int], list[_Run]] = {}
        for run, weight in zip(runs, weight_E.tolist(), strict=True):
            seen.setdefault(run.index, []).append(run)
            if run.wanted_L.grad is not None and weight > 0:
                worth_L = (-run.wanted_L.grad / weight).clamp_min(0)
                bin_L = self.value_BL[run.index[1]]
                bin_L += 0.02 * (worth_L - bin_L)
        for index, some in seen.items():
            where = np.zeros(self.mu.values.shape, dtype=bool)
            where[index] = True
            u = float(np.mean([float(run.u.detach()) for run in some]))
            v_L = torch.stack([run.v_L.detach() for run in some]).mean(0).numpy().astype(np.float64)
            self.mu.update(np.full(self.mu.values.shape, u), where)
            self.lam.update(np.broadcast_to(v_L, self.lam.values.shape), where[..., None])
        self.nu.update([open_share - self.config.capacity])

    def _row(
        self, number: int, runs: list[_Run], slope: float, small_slope: float, open_share: float
    ) -> dict[str, Any]:
        u = np.array([float(run.u.detach()) for run in runs])
        v = np.array([run.v_L.detach().numpy() for run in runs])
        mu = np.array([self.mu.values[run.index] for run in runs])
        lam = np.array([self.lam.values[run.index] for run in runs])
        over, nu = open_share - self.config.capacity, float(self.nu.values[0])
        return {
            "step": number,
            "loss": round(float(np.mean([run.slice_loss for run in runs])), 4),
            "whole_loss": round(float(np.mean([run.whole_loss for run in runs])), 4),
            "accuracy": round(float(np.mean([run.accuracy for run in runs])), 4),
            "u": round(float(u.mean()), 4),
            "mu": round(float(mu.mean()), 4),
            "lambda": round(float(lam.mean()), 5),
            "nu": round(nu, 4),
            "open": round(open_share, 4),
            "kkt": {
                "stationarity": round(slope + small_slope, 4),
                "feasibility": round(float(max(u.max(), v.max(), over, 0.0)), 4),
                "complementarity": round(float(max(abs(mu * u).max(), abs(lam * v).max(), abs(nu * over))), 4),
            },
        }

    def state(self) -> dict[str, Any]:
        """What a resumed run needs besides tensors."""
        return {
            "mu": self.mu.state(),
            "lambda": self.lam.state(),
            "nu": self.nu.state(),
            "values": self.value_BL.tolist(),
            "groups": self.group.weight_G.tolist(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name, multipliers in (("mu", self.mu), ("lambda", self.lam), ("nu", self.nu)):
            multipliers.load(state[name])
        self.value_BL = torch.tensor(state["values"])
        self.group.weight_G = np.array(state["groups"])

    def tensors(self) -> dict[str, Tensor]:
        """The family's learned tensors, and the optimiser's moments under ``adam.``."""
        found = {name: tensor.detach().cpu().contiguous() for name, tensor in self.family.state_dict().items()}
        for place, moments in self.optimiser.state_dict()["state"].items():
            for name, tensor in moments.items():
                found[f"adam.{place}.{name}"] = tensor.detach().cpu().contiguous()
        return found

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.family.load_state_dict({k: v for k, v in tensors.items() if not k.startswith("adam.")})
        saved = self.optimiser.state_dict()
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("adam."):
                _, place, moment = name.split(".")
                state.setdefault(int(place), {})[moment] = tensor
        self.optimiser.load_state_dict({**saved, "state": state})


@dataclass(frozen=True, eq=False, kw_only=True)
class _Run:
    """One episode of a step: its loss and residuals, with gradients."""

    episode: Episode
    plan: Plan
    index: tuple[int, int]
    loss: Tensor
    slice_loss: float
    whole_loss: float
    accuracy: float
    wanted_L: Tensor
    v_L: Tensor
    u: Tensor
    open_share: Tensor


def _few(config: TrainConfig) -> int:
    """How many episodes depths are judged on."""
    return max(4, min(32, config.steps // 12))


def schedule(number: int, config: TrainConfig) -> float:
    """A linear rise, then a cosine down to a twentieth."""
    if number < config.warmup:
        return (number + 1) / config.warmup
    share = (number - config.warmup) / max(1, config.steps - config.warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def budget_bin(rho: float, floor: float) -> int:
    """The range of budgets that a budget is in; ranges are even in the logarithm, as budgets are drawn."""
    return min(NUM_BINS - 1, max(0, int(NUM_BINS * (1 - math.log(min(rho, 1.0)) / math.log(floor)))))


def module_values(value_BL: Tensor, rho: float, floor: float) -> Tensor:
    """What a bit more of every module is worth around a budget; never nothing."""
    value_L = value_BL[budget_bin(rho, floor)]
    return value_L.clamp_min(0.05 * float(value_L.mean()) + 1e-6)


def pool_device(pool: Pool) -> torch.device:
    return next(iter(pool.inputs.values())).device
