"""The cost model: predicts what the clock will say, bounds it, prices every part, and lives in a JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from apportion.cost.bound import Method, Spread, UpperBound
from apportion.cost.fit import KNOTS, RIDGE, FitOptions, Knots, Loss, fit_sweeps
from apportion.cost.launches import Launches, fit_launches
from apportion.cost.law import AdditiveLaw
from apportion.cost.recalibrate import How, Recalibration, recalibrate, recalibration_from_json
from apportion.cost.residual import Residual, choose_residual
from apportion.cost.sample import CostError, Sample, Shares, check_share

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 2
READABLE = (1, 2)  # the first knew no floor of launches


@dataclass(frozen=True)
class CostModel:
    r"""Law plus residual, over a floor, through a recalibration, under a bound (eq. K1, K8, K28, K17 to K19, K13).

    .. math:: \hat c(s) = g\Big(\max\big(\beta_0 + \sum_p c_{\sigma(p)}(s_p) + r(s),\; f(s)\big)\Big), \qquad
        U(s) = \hat c(s)(1 + q\,\sigma)

    ``recalibration`` is :math:`g`, ``residual`` :math:`r` and ``launches`` the floor :math:`f`; each changes nothing
    when None. A new recalibration drops the bound, because the bound was calibrated on other predictions.
    """

    law: AdditiveLaw
    residual: Residual | None = None
    recalibration: Recalibration | None = None
    bound: UpperBound | None = None
    loss: str = "least_squares"
    num_samples: int = 0
    launches: Launches | None = None

    @classmethod
    def fit(
        cls,
        samples: Sequence[Sample],
        signature_of: Mapping[str, str],
        *,
        loss: Loss = "least_squares",
        tau: float = 0.9,
        knots: Knots = KNOTS,
        ridge: float = RIDGE,
        residual: Literal["auto", "off"] = "auto",
        sweeps: bool = False,
        launches: bool = False,
        work: Mapping[str, float] | None = None,
    ) -> CostModel:
        """Fits the law to whole-network samples, jointly, or to module sweeps alone with ``sweeps``.

        A residual is added to a least-squares fit where cross-validation says that it helps; the other losses get none,
        since it would spoil what they promise. With ``launches`` a floor of launches is fitted under the law; with
        ``work``, the operations of a part of every signature, what the samples leave open follows these.
        """
        options = FitOptions(loss=loss, tau=tau, knots=knots, ridge=ridge, launches=launches, work=work)
        if sweeps:
            if launches:
                raise CostError("a sweep of one module is never bound by launches; fit either sweeps or a floor")
            return cls(fit_sweeps(samples, signature_of, options), loss=loss, num_samples=len(samples))
        law, floor = fit_launches(samples, signature_of, options)
        wanted = residual == "auto" and loss == "least_squares"
        extra = choose_residual(law, samples, options, floor) if wanted else None
        return cls(law, extra, loss=loss, num_samples=len(samples), launches=floor)

    @property
    def monotone(self) -> bool:
        """Whether the prediction never falls when work is added."""
        return self.residual is None or self.residual.monotone

    def predict(self, shares: Shares) -> float:
        """Predicted latency in milliseconds."""
        totals = self.law.totals(shares)
        raw = math.fsum((self.law.intercept_ms, *totals.values()))
        if self.residual is not None:
            raw += self.residual(totals)
        if self.launches is not None:
            raw = max(raw, self.launches(shares))
        return raw if self.recalibration is None else self.recalibration(raw)

    def predict_tensor(self, share_P: Tensor, parts: Sequence[str], ramp: float = 0.0) -> Tensor:
        """Predicted latency of shares of shape ``(..., P)``, the parts in the given order, with gradients.

        Where the floor of launches holds, only parts that are about to go (under ``ramp``) have a gradient.
        """
        totals = self.law.totals_tensor(share_P, parts, ramp)
        raw = self.law.intercept_ms + sum(totals.values(), start=share_P.new_zeros(share_P.shape[:-1]))
        if self.residual is not None:
            raw = raw + self.residual(totals)
        if self.launches is not None:
            raw = raw.maximum(self.launches.tensor(share_P, ramp))
        return raw if self.recalibration is None else self.recalibration.tensor(raw)

    def upper(self, shares: Shares) -> float:
        """What the clock will not exceed, at the bound's confidence; infinite where the bound has too few samples."""
        if self.bound is None:
            raise CostError("this cost model has no upper bound; give it one with bounded() and held-out samples")
        return self.bound(self.predict(shares))

    def price(self, part: str, share: float) -> float:
        """Milliseconds that a part costs at a share, recalibrated; 0 for a part in ``fixed``.

        It is the law's alone: :meth:`saving` knows the residual, too, and the floor, on which narrowing saves nothing.
        """
        check_share(part, share)
        return self._scale() * self.law.curves[self._signature(part)](share)

    def marginal(self, part: str, share: float) -> float:
        """Milliseconds per unit of share for the last bit of a part's work; taking the part out saves the jump too."""
        check_share(part, share)
        return self._scale() * self.law.curves[self._signature(part)].slope(share)

    def saving(self, shares: Shares, part: str, share: float) -> float:
        """How much the prediction falls when one part goes to a new share, with all that the model has."""
        self._signature(part)
        return self.predict(shares) - self.predict({**shares, part: share})

    def recalibrated(self, samples: Sequence[Sample], how: How = "affine") -> CostModel:
        """Corrected by a handful of runs on the device as it is now; the old correction and the bound are dropped."""
        plain = replace(self, recalibration=None, bound=None)
        predictions, latencies_ms = plain.pairs(samples)
        return replace(plain, recalibration=recalibrate(predictions, latencies_ms, how))

    def bounded(
        self,
        samples: Sequence[Sample],
        alpha: float = 0.05,
        *,
        spread: Spread | None = None,
        edges_ms: Sequence[float] = (),
        num_menu: int = 1,
        method: Method | None = None,
        drift: float = 0.0,
    ) -> CostModel:
        """With a split-conformal bound from samples that neither fit nor recalibration has seen."""
        bound = UpperBound.fit(
            *self.pairs(samples), alpha, spread=spread, edges_ms=edges_ms, num_menu=num_menu, method=method, drift=drift
        )
        return replace(self, bound=bound)

    def pairs(self, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
        """Predictions and latencies of samples, side by side."""
        return [self.predict(sample.shares) for sample in samples], [sample.latency_ms for sample in samples]

    def to_json(self) -> dict[str, Any]:
        def optional(piece: Residual | Launches | Recalibration | UpperBound | None) -> dict[str, Any] | None:
            return None if piece is None else piece.to_json()

        return {
            "apportion_cost": VERSION,
            "law": self.law.to_json(),
            "residual": optional(self.residual),
            "launches": optional(self.launches),
            "recalibration": optional(self.recalibration),
            "bound": optional(self.bound),
            "loss": self.loss,
            "num_samples": self.num_samples,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> CostModel:
        """Reads a saved model and checks all of it: lengths, finite numbers, slopes that never fall."""
        try:
            if (given := fields["apportion_cost"]) not in READABLE:
                raise CostError(f"the cost model has version {given!r}; this program reads {READABLE}, calibrate again")
            floor = fields["launches"] if given > 1 else None
            residual, correction, bound = fields["residual"], fields["recalibration"], fields["bound"]
            model = cls(
                AdditiveLaw.from_json(fields["law"]),
                None if residual is None else Residual.from_json(residual),
                None if correction is None else recalibration_from_json(correction),
                None if bound is None else UpperBound.from_json(bound),
                str(fields["loss"]),
                int(fields["num_samples"]),
                None if floor is None else Launches.from_json(floor),
            )
        except CostError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CostError(f"not a saved cost model ({type(error).__name__}: {error}); calibrate again") from error
        if model.residual is not None and not model.residual.totals_ms.keys() <= model.law.curves.keys():
            raise CostError("the saved residual names a signature without a curve; calibrate again")
        return model

    def save(self, path: Path) -> None:
        """Writes the model as JSON."""
        path.write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> CostModel:
        """Reads a model that :meth:`save` wrote."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CostError(f"can't read a cost model from {path} ({error}); calibrate again") from error
        return cls.from_json(fields)

    def _scale(self) -> float:
        return 1.0 if self.recalibration is None else self.recalibration.scale

    def _signature(self, part: str) -> str:
        if part not in self.law.signature_of:
            some = ", ".join(sorted(self.law.signature_of)[:3])
            raise CostError(f"no part {part!r} among the {len(self.law.signature_of)} of this cost model ({some}, ...)")
        return self.law.signature_of[part]
