"""Multi-fidelity racing: cheap evaluations first, and nobody leaves before all were compared at the same fidelity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from apportion.core.knob import Setting
from apportion.methods.search.evidence import Evidence, Radius
from apportion.methods.search.select import Draw


@dataclass(frozen=True)
class Fidelity:
    """A cheaper way to evaluate.

    ``slack`` bounds by how much differences at this fidelity can stray from differences at the full one; with a slack
    that is right, whoever leaves is no better than the incumbent and the claim stays about all neighbours. ``price``
    is in full evaluations; ``num_pulls`` is spent on every arm.
    """

    name: str
    radius: Radius
    price: float
    slack: float
    num_pulls: int = 1


def race(
    incumbent: Setting, rivals: Sequence[Setting], evidence: Evidence, draw: Draw, fidelity: Fidelity
) -> list[Setting]:
    r"""The rivals that stay after one fidelity (eq. I18).

    .. math:: z \text{ leaves if } \mathrm{UCB}_t(z) + b_t < \mathrm{LCB}_t(x)

    ``fidelity.slack`` is :math:`b_t`. Judged against the incumbent only, when every arm has the same number of samples.
    """
    arms = [incumbent, *rivals]
    while True:
        short = [arch for arch in arms if evidence.num_pulls(arch) < fidelity.num_pulls]
        if not short:
            break
        if not draw(short):
            return list(rivals)  # not all could be compared, so nobody leaves
    low = evidence.interval(incumbent).low
    return [arch for arch in rivals if evidence.interval(arch).high + fidelity.slack >= low]
