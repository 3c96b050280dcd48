r"""The model family: one frozen network, one shared delta, experts that gate it, and sizes for every budget.

.. math:: \theta = \theta^{pre} + \sum_m \alpha_m (z_m \odot \Delta) = \theta^{pre} + a \odot \Delta, \qquad
    a_k = \sum_m \alpha_m z_{mk} \quad \text{(eq. A1; the paper's eq. 8 and 11)}

.. math:: s_\ell = \sum_m \alpha_m \, \mathrm{squash}(x_\ell(\rho) + \varphi_{m\ell}) \quad \text{(eq. A2, eq. 18)}

An expert is a set of delta gates :math:`z_m` over the groups and a lean :math:`\varphi_m` towards modules. The keep
gates follow from the fractions :math:`s_\ell` and the order of groups in a module, so smaller networks are nested in
larger ones. Shape letters: L modules, G groups, M experts, W classes, F features.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from apportion.device.target import is_sibling
from apportion.errors import ModelError
from apportion.methods.adapt.clock import Clock, Sizes, spread_start
from apportion.methods.adapt.groups import Bundle, Groups, bundles, keep_of, merge_all, start_logits
from apportion.methods.adapt.masked import PLAIN, Pass, masked_features
from apportion.methods.adapt.policy import ALLOCATIONS, BudgetPolicy, squash
from apportion.methods.adapt.router import Router
from apportion.models.cut import slice_network
from apportion.models.network import Network
from apportion.models.partition import Partition
from apportion.numerics.hard_concrete import mean_gates, open_probability, sample_gates

KNOTS = 9
UNSETTLED = -1
Masks = Literal["groups", "weights"]
MASKS: tuple[str, ...] = get_args(Masks)


@dataclass(frozen=True, kw_only=True)
class FamilyConfig:
    """``num_experts`` M, ``allocation`` of the policy, and the ``tightest`` budget trained for, as a share.

    ``masks`` says what a delta gate is of: a group, or as an ablation every single number of the delta (``weights``),
    which takes as many logits as experts times numbers. ``seed`` is of where router and gates begin.
    """

    num_experts: int = 4
    allocation: str = "learned"
    tightest: float = 0.15
    masks: str = "groups"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_experts < 1:
            raise ModelError(f"{self.num_experts} experts were asked for; give at least one")
        if self.allocation not in ALLOCATIONS:
            raise ModelError(f"allocation {self.allocation!r} is not known; possible are {', '.join(ALLOCATIONS)}")
        if not 0 < self.tightest < 1:
            raise ModelError(f"the tightest budget is {self.tightest:g}; give a share between 0 and 1")
        if self.masks not in MASKS:
            raise ModelError(f"masks over {self.masks!r} are not known; possible are {', '.join(MASKS)}")


def budget_knots(floor: float) -> tuple[float, ...]:
    """Budgets at which the policy's curves may bend, from the tightest to the whole: evenly in the logarithm.

    Example:
        >>> [round(rho, 3) for rho in budget_knots(0.16)]
        [0.16, 0.201, 0.253, 0.318, 0.4, 0.503, 0.632, 0.795, 1.0]
    """
    return tuple(floor ** (1 - place / (KNOTS - 1)) for place in range(KNOTS))


@dataclass(frozen=True, eq=False)
class Plan:
    """What router and policy say for one task, budget and device."""

    alpha_M: Tensor
    fraction_L: Tensor
    budget_L: Tensor


class Family(nn.Module):
    """All that is learned. The network itself is frozen and not among its parameters.

    The delta lives where the network does, and so do gates of its single numbers; policy, router and gates of groups
    are small and stay on the CPU. ``depth_KJ`` is how many blocks a budget at each knot keeps of each of J sequences of
    blocks, where training settled it.
    """

    gate_logit_MG: nn.Parameter | None

    depth_KJ: Tensor

    def __init__(
        self,
        network: Network,
        partition: Partition,
        clocks: Sequence[Clock],
        num_features: int,
        config: FamilyConfig | None = None,
        start_KL: Tensor | None = None,
    ) -> None:
        super().__init__()
        config = config or FamilyConfig()
        self.config, self.partition, self.groups = config, partition, Groups(partition)
        self._network = (network,)  # in a tuple, so that it is not registered
        self.clocks = {clock.name: clock for clock in clocks}
        self._prices = {clock.name: clock.prices() for clock in clocks}
        self._features = {clock.name: clock.features() for clock in clocks}
        for clock in clocks:
            if not clock.floor_ms() < clock.whole_ms:
                raise ModelError(
                    f"on {clock.name} the smallest network is bounded by {clock.floor_ms():.3g} ms and the whole takes "
                    f"{clock.whole_ms:.3g} ms: there is nothing to save; leave that target out, or calibrate it again"
                )
        floor = max(config.tightest, *(clock.floor_ms() / clock.whole_ms for clock in clocks))
        self.knots = budget_knots(floor)
        least_L = torch.tensor([module.sizes()[0] / module.num_units for module in partition])
        start_KL = spread_start(clocks, self.knots) if start_KL is None else start_KL
        self.policy = BudgetPolicy(
            start_KL, self.knots, least_L, torch.stack([*self._prices.values()]), config.allocation
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.router = Router(num_features, config.num_experts)
        self.stacks, self._blocks = bundles(network, self.groups), self.groups.blocks()
        generator = torch.Generator().manual_seed(config.seed)
        if config.masks == "groups":
            self.gate_logit_MG = nn.Parameter(start_logits((config.num_experts, self.groups.count), generator))
        else:
            self.gate_logit_MG = None
            for bundle in self.bundles:
                bundle.gate_each(config.num_experts, generator)
        self.lean_ML = nn.Parameter(torch.zeros(config.num_experts, len(partition)))
        self.log_scale = nn.Parameter(torch.tensor(2.3))
        self.module_G, self.rank_G = self.groups.module_G(), self.groups.rank_G()
        self.size_L = torch.tensor([float(self.groups.size(module)) for module in partition])
        self.block_places = tuple(place for place, module in enumerate(partition) if module.blocks)
        self.register_buffer("depth_KJ", torch.full((KNOTS, len(self.block_places)), UNSETTLED))

    @property
    def network(self) -> Network:
        return self._network[0]

    @property
    def bundles(self) -> list[Bundle]:
        return [bundle for bundle in self.stacks if isinstance(bundle, Bundle)]

    @property
    def floor(self) -> float:
        """The least budget that is trained for, as a share."""
        return self.knots[0]

    def known(self, clock: Clock) -> str:
        """The device that was trained for and stands for a clock: itself, its float sibling, or the first."""
        if clock.name in self.clocks:
            return clock.name
        siblings = (name for name, one in self.clocks.items() if is_sibling(one.profile.target, clock.profile.target))
        return next(siblings, next(iter(self.clocks)))

    def prices(self, device: str) -> Tensor:
        """Shares of a device's time by module."""
        return self._prices[device]

    @property
    def settled(self) -> bool:
        """Whether training settled depths."""
        return bool((self.depth_KJ != UNSETTLED).any())

    def depth(self, rho: float) -> tuple[int, ...] | None:
        """How many blocks of each sequence a budget keeps; None where that was not settled, or the whole fits."""
        if rho >= 1:
            return None
        knot = round((KNOTS - 1) * (1 - math.log(max(rho, self.floor)) / math.log(self.floor)))
        depth_J: list[int] = self.depth_KJ[knot].tolist()
        return None if UNSETTLED in depth_J else tuple(depth_J)

    def plan(self, mean_WF: Tensor, rho: float, device: str) -> Plan:
        """Routing and sizes for a task's class means (of the frozen network's features) and a budget."""
        alpha_M = self.router(mean_WF, rho, self._features[device]).softmax(-1)
        return self.plan_with(alpha_M, rho, device)

    def plan_with(self, alpha_M: Tensor, rho: float, device: str) -> Plan:
        """The same for a given mixture."""
        level_L = self.policy.level(rho, self._prices[device])
        budget_L = self.policy.squash(level_L)
        fraction_L = budget_L
        if self.config.allocation == "learned":
            fraction_L = torch.maximum(alpha_M @ squash(level_L + self.lean_ML), self.policy.least_L)
        return Plan(alpha_M, fraction_L, budget_L)

    def gates(self, alpha_M: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The delta gates a of eq. A1; sampled with a generator, their mean without.

        One for every group, or with masks over weights one for every number of the delta, bundle after bundle.
        """
        if self.gate_logit_MG is not None:
            logit_MG = self.gate_logit_MG
            return alpha_M @ (mean_gates(logit_MG) if generator is None else sample_gates(logit_MG, generator))
        if generator is not None:  # these are many: drawn where they live, from a seed that the generator draws
            seed = int(torch.randint(2**62, (), generator=generator))
            generator = torch.Generator(self.bundles[0].delta.device).manual_seed(seed)
        found = []
        for bundle in self.bundles:
            assert bundle.gate_logit is not None
            logit_MN = bundle.gate_logit.flatten(1)
            gate_MN = mean_gates(logit_MN) if generator is None else sample_gates(logit_MN, generator)
            found.append(alpha_M.to(gate_MN) @ gate_MN)
        return torch.cat(found)

    def open_share(self, alpha_M: Tensor, keep_G: Tensor) -> Tensor:
        """Expected share of the groups with an open gate, or of the delta's numbers, among those kept."""
        if self.gate_logit_MG is not None:
            open_G = alpha_M @ open_probability(self.gate_logit_MG)
            return (open_G * keep_G).sum() / keep_G.sum()
        device = self.bundles[0].delta.device
        alpha_M, keep_G = alpha_M.to(device), torch.cat([keep_G, keep_G.new_ones(1)]).to(device)
        opened, kept = alpha_M.new_zeros(()), alpha_M.new_zeros(())
        for bundle in self.bundles:
            assert bundle.gate_logit is not None
            kept_N = bundle.kept(keep_G).flatten()
            opened = opened + alpha_M @ (open_probability(bundle.gate_logit.flatten(1)) @ kept_N)
            kept = kept + kept_N.sum()
        return (opened / kept).cpu()

    def keep(self, fraction_L: Tensor, generator: torch.Generator | None = None) -> Tensor:
        r"""Keep gates of fractions, :math:`r_k = \mathrm{clip}(s_\ell K_\ell - k, 0, 1)` (eq. A5).

        With a generator the one group in between is on or off at random, with the gradient of the value in between, so
        that training runs what can be run.
        """
        soft_G = ((fraction_L * self.size_L)[self.module_G] - self.rank_G).clamp(0, 1)
        if generator is None:
            return soft_G
        draw_L = torch.rand(len(self.size_L), generator=generator)
        hard_G = (soft_G > draw_L[self.module_G]).float()
        return hard_G + soft_G - soft_G.detach()

    def embed(self, inputs: Mapping[str, Tensor], gate_G: Tensor, keep_G: Tensor, how: Pass = PLAIN) -> Tensor:
        """Features of examples under the task's network, masked; shape (N, F), unit length."""
        return masked_features(self.network, self.stacks, self._blocks, inputs, gate_G, keep_G, how)

    def sliced(self, alpha_M: Tensor, sizes: Sizes) -> Network:
        """The task's network for real: merged weights, sliced to sizes."""
        with torch.no_grad():
            merged = merge_all(self.stacks, self.gates(alpha_M), torch.ones(self.groups.count))
            whole = copy.deepcopy(self.network.module)
            parameters = dict(whole.named_parameters())
            for name, tensor in merged.items():
                parameters[name].copy_(tensor)
        return slice_network(self.network.replace(module=whole), self.partition, self.partition.keep(sizes))

    def keep_of(self, sizes: Sizes) -> Tensor:
        return keep_of(self.groups, sizes)
