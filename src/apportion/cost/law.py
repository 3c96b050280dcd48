"""The additive law: what is always there, plus one curve per part, shared by parts of the same signature.

Shape letters: ``P`` parts; a tensor's leading dimensions are a batch of configurations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from apportion.cost.curve import Curve
from apportion.cost.sample import CostError, Shares, check_share, number

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AdditiveLaw:
    r"""Latency as a sum over parts (eq. K1).

    .. math:: \hat c(s) = \beta_0 + \sum_p c_{\sigma(p)}(s_p), \qquad \beta_0 \ge 0

    ``intercept_ms`` is :math:`\beta_0`, ``curves`` maps signatures to :math:`c`, ``signature_of`` maps parts to
    signatures, :math:`\sigma`. ``fixed`` names the signatures whose parts never moved in the samples: their cost is in
    the intercept and their price reads 0.
    """

    intercept_ms: float
    curves: Mapping[str, Curve]
    signature_of: Mapping[str, str]
    fixed: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.intercept_ms) and self.intercept_ms >= 0.0):
            raise CostError(f"the intercept is {self.intercept_ms!r} ms; it must be finite and at least 0, fit again")
        missing = sorted(set(self.signature_of.values()) - set(self.curves))
        if missing or not self.signature_of:
            raise CostError(
                f"{len(self.signature_of)} parts, no curve for signature {missing[0]!r}; fit one"
                if missing
                else "a cost model has no parts; name at least one part and its signature"
            )

    def check(self, parts: Iterable[str]) -> None:
        """Refuses a configuration that does not name exactly the parts of the law."""
        given = set(parts)
        if given == self.signature_of.keys():
            return
        absent, unknown = sorted(self.signature_of.keys() - given), sorted(given - self.signature_of.keys())
        wrong = f"lacks part {absent[0]!r}" if absent else f"has the unknown part {unknown[0]!r}"
        raise CostError(
            f"a configuration of {len(given)} parts {wrong}; "
            f"give a share for each of the {len(self.signature_of)} parts that were calibrated"
        )

    def totals(self, shares: Shares) -> dict[str, float]:
        """Milliseconds by signature."""
        self.check(shares)
        total = dict.fromkeys(self.curves, 0.0)
        for part, share in shares.items():
            check_share(part, share)
            signature = self.signature_of[part]
            total[signature] += self.curves[signature](share)
        return total

    def predict(self, shares: Shares) -> float:
        """Predicted latency in milliseconds."""
        return math.fsum((self.intercept_ms, *self.totals(shares).values()))

    def full_totals(self) -> dict[str, float]:
        """Milliseconds by signature of the untouched network."""
        return self.totals(dict.fromkeys(self.signature_of, 1.0))

    def totals_tensor(self, share_P: Tensor, parts: Sequence[str], ramp: float = 0.0) -> dict[str, Tensor]:
        """Milliseconds by signature for shares of shape ``(..., P)``, in the order of ``parts``, with gradients."""
        self.check(parts)
        if len(set(parts)) != share_P.shape[-1]:
            raise CostError(f"{share_P.shape[-1]} shares for {len(set(parts))} parts; the last dimension is the parts")
        total = {}
        for signature, curve in self.curves.items():
            columns = [index for index, part in enumerate(parts) if self.signature_of[part] == signature]
            total[signature] = curve.tensor(share_P[..., columns], ramp).sum(-1)
        return total

    def to_json(self) -> dict[str, Any]:
        return {
            "intercept_ms": self.intercept_ms,
            "curves": {signature: curve.to_json() for signature, curve in self.curves.items()},
            "signature_of": dict(self.signature_of),
            "fixed": sorted(self.fixed),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> AdditiveLaw:
        return cls(
            number(fields["intercept_ms"], "intercept_ms"),
            {str(name): Curve.from_json(curve) for name, curve in fields["curves"].items()},
            {str(part): str(signature) for part, signature in fields["signature_of"].items()},
            frozenset(str(name) for name in fields["fixed"]),
        )
