r"""The clock of shared mode: what side branches cost, and which of them to open within a budget.

.. math:: \widehat{\mathrm{Lat}}(s) = \beta_0 + \sum_\ell c_\ell(s_\ell), \qquad
    c_\ell(s) = J_\ell \mathbb 1\{s > 0\} + \sum_j d_j \max(0, s - k_j) \quad \text{(eq. A21; the paper's eq. 19)}

:math:`s_\ell` is a module's work as a share of running it whole (eq. A24), :math:`\beta_0` the backbone and
:math:`J_\ell` the jump at the first activation. The law, its fit and its bound are those of ``cost``; a part is one
module's branches, and modules of one kind and size have one curve. Shape letters: G groups, L modules.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from apportion.cost.profile import Profile
from apportion.cost.sample import CostError
from apportion.errors import InfeasibleError
from apportion.methods.adapt.groups import Groups, places
from apportion.methods.adapt.shared import WHOLE_RATIO, SharedTasks, cost_shares
from apportion.models.network import Network

BRANCH = "branch:"
_TINY = 1e-9


def branch_signatures(network: Network, groups: Groups) -> dict[str, str]:
    """The parts that shared mode prices, one for each module, and what makes two of them cost alike."""
    number_L = torch.zeros(len(groups.partition) + 1, dtype=torch.long)
    module_G = torch.cat([groups.module_G(), torch.tensor([len(groups.partition)])])
    parameters = dict(network.module.named_parameters())
    for name, place in places(network, groups).items():
        group_C = torch.tensor(place.group)
        each_C = torch.full((len(group_C),), parameters[name].numel() // len(group_C))
        number_L.index_add_(0, module_G[group_C], each_C)
    return {
        f"{BRANCH}{module.name}": (
            f"branch {module.kind} {groups.size(module)} groups {number} numbers whole from {WHOLE_RATIO:g}"
        )
        for module, number in zip(groups.partition, number_L.tolist(), strict=False)
    }


@dataclass(frozen=True)
class Opened:
    """What a budget opened: the groups, and what the clock is predicted to show at these, and bounded by."""

    open_G: Tensor
    predicted_ms: float
    upper_ms: float

    @property
    def num_open(self) -> int:
        return int(self.open_G.sum())


@dataclass(frozen=True)
class SharedClock:
    """A profile of shared mode over the groups it prices."""

    profile: Profile
    parts: tuple[str, ...]
    module_G: Tensor

    @classmethod
    def of(cls, profile: Profile, network: Network, groups: Groups) -> SharedClock:
        """Raises:
        CostError: the profile is of merged mode, or of another network.
        """
        wanted, given = branch_signatures(network, groups), dict(profile.cost.law.signature_of)
        if not all(part.startswith(BRANCH) for part in given):
            raise CostError(f"the profile of {profile.model} prices slices; shared mode needs calibrate_shared's")
        if given != wanted:
            raise CostError(f"the profile of {profile.model} prices other branches than this network has; make it anew")
        return cls(profile, tuple(wanted), groups.module_G())

    @property
    def name(self) -> str:
        return self.profile.target.name

    def shares(self, open_G: Tensor) -> dict[str, float]:
        """The work of every module as a share of running it whole."""
        return dict(zip(self.parts, cost_shares(open_G.bool(), self.module_G).tolist(), strict=True))

    def predict_ms(self, open_G: Tensor) -> float:
        return self.profile.cost.predict(self.shares(open_G))

    def upper_ms(self, open_G: Tensor) -> float:
        """What the clock will not exceed for a batch whose tasks have these groups open, at the bound's confidence."""
        return self.profile.cost.upper(self.shares(open_G))

    def floor_ms(self) -> float:
        """The bound of the backbone with every branch closed."""
        return self.upper_ms(torch.zeros(len(self.module_G), dtype=torch.bool))

    def choose(self, value_G: Tensor, budget_ms: float) -> Opened:
        r"""The groups to open: most value for time first, while the bound keeps the budget.

        .. math:: \max_{z \in \{0,1\}^G} \sum_k v_k z_k \quad \text{s.t. } U(s(z)) \le B \quad \text{(eq. A23)}

        In a module the most valuable groups go first. A jump makes a few groups dear and many cheap, so modules are
        opened along the concave hull of value over price, steepest step first over all modules; what is left of the
        budget then goes to whatever single step adds most and fits. It falls short of the optimum by less than the
        value of one step of the hull.

        Raises:
            InfeasibleError: the budget is under the bound of the backbone alone.
        """
        floor_ms = self.floor_ms()
        if budget_ms < floor_ms:
            raise InfeasibleError(
                f"budget {budget_ms:.3g} ms is under the floor of {floor_ms:.3g} ms on {self.name} (the bound of the "
                "backbone with every side branch closed); raise the budget, or specialise a slice"
            )
        ladders = [self._ladder(place, value_G) for place in range(len(self.parts))]
        count_L = [0] * len(ladders)

        def opened(counts: list[int]) -> Tensor:
            open_G = torch.zeros(len(value_G), dtype=torch.bool)
            for ladder, count in zip(ladders, counts, strict=True):
                open_G[ladder.order[:count]] = True
            return open_G

        def fits(place: int, count: int) -> bool:
            counts = [*count_L[:place], count, *count_L[place + 1 :]]
            return self.upper_ms(opened(counts)) <= budget_ms

        steps = sorted((-slope, place, count) for place, ladder in enumerate(ladders) for slope, count in ladder.hull())
        full: set[int] = set()
        for _, place, count in steps:
            if place not in full and fits(place, count):
                count_L[place] = count
            else:
                full.add(place)  # the steps of a module are taken one after the other
        while True:
            best = max(
                (
                    (ladder.gain(count_L[place], count), -count, place)
                    for place, ladder in enumerate(ladders)
                    for count in ladder.counts()
                    if ladder.gain(count_L[place], count) > 0 and fits(place, count)
                ),
                default=None,
            )
            if best is None:
                break
            count_L[best[2]] = -best[1]
        open_G = opened(count_L)
        return Opened(open_G, self.predict_ms(open_G), self.upper_ms(open_G))

    def open_within(self, shared: SharedTasks, budget_ms: float, names: tuple[str, ...] | None = None) -> Opened:
        """Opens the same groups for some tasks, for all by default, so that any batch of these keeps the budget."""
        chosen = names or shared.names
        opened = self.choose(shared.values(chosen), budget_ms)
        for name in chosen:
            shared.open(name, opened.open_G)
        return opened

    def _ladder(self, place: int, value_G: Tensor) -> Ladder:
        own = (self.module_G == place).nonzero()[:, 0]
        order = own[value_G[own].argsort(descending=True, stable=True)]
        useful = int((value_G[order] > 0).sum())
        value, price = [0.0], [0.0]
        for count in range(1, useful + 1):
            run_G = torch.zeros(len(value_G), dtype=torch.bool)
            run_G[order[:count]] = True
            share = self.shares(run_G)[self.parts[place]]
            value.append(value[-1] + float(value_G[order[count - 1]]))
            price.append(self.profile.cost.price(self.parts[place], share))
        return Ladder(order, tuple(value), tuple(price))


@dataclass(frozen=True, eq=False)
class Ladder:
    """One module's groups from the most to the least valuable, with the value and the price of the first few."""

    order: Tensor
    value: tuple[float, ...]
    price: tuple[float, ...]

    def counts(self) -> range:
        return range(1, len(self.value))

    def gain(self, now: int, then: int) -> float:
        return self.value[then] - self.value[now]

    def hull(self) -> list[tuple[float, int]]:
        """Steps up the concave hull of value over price, as (slope, how many groups are open then), steepest first."""
        steps, now = [], 0
        while now < len(self.value) - 1:
            slope, then = max(
                (self.gain(now, count) / max(self.price[count] - self.price[now], _TINY), count)
                for count in range(now + 1, len(self.value))
            )
            steps.append((slope, then))
            now = then
        return steps
