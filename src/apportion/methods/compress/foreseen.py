"""What a run plans with of the quantities that only the device can tell: predictions, the original and the floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from apportion.core.knob import Knob
from apportion.core.meter import Meter, Reading
from apportion.cost.calibrate import Anchored
from apportion.cost.predicted import PredictedLatency
from apportion.device.measure import Session
from apportion.methods.compress.bench import BASELINE
from apportion.methods.compress.least import clock_floor
from apportion.models.network import Network


@dataclass(frozen=True)
class Foreseen:
    """A quantity of a measured limit: a meter that predicts it, and what the original and the smallest network read.

    The floor is zero where it is not known.
    """

    meter: Meter[Network]
    baseline: Reading
    floor: Reading


@dataclass(frozen=True)
class PredictedEnergy:
    r"""Energy as the loop reads it: the original's, times the predicted ratio of the latencies (eq. M8).

    .. math:: \hat e = e_0 \, \hat t / t_0

    As if the device drew the same power whatever it runs: a model to plan with, which the checks correct. ``latency``
    predicts :math:`\hat t`; ``baseline`` and ``baseline_ms`` are :math:`e_0` and :math:`t_0`.
    """

    latency: Meter[Network]
    baseline: Reading
    baseline_ms: float
    unit: str = "mJ"

    def read(self, model: Network) -> Reading:
        ratio = self.latency.read(model).value / self.baseline_ms
        return Reading(value=self.baseline.value * ratio, unit=self.unit)


def foresee_latency(fp32: Anchored, int8: Anchored | None, knobs: Sequence[Knob]) -> Foreseen:
    """Latency by the cost model, and by that of the int8 networks where there may be such."""
    in_int8 = None if int8 is None else PredictedLatency(int8.cost, int8.parts)
    calibrations = [fp32] if int8 is None else [fp32, int8]
    meter = PredictedLatency(fp32.cost, fp32.parts, int8=in_int8)
    return Foreseen(meter, fp32.baseline, clock_floor(knobs, calibrations))


def foresee_energy(latency: Foreseen, session: Session) -> Foreseen:
    """Energy by the latency.

    Args:
        session: the original beside the smallest networks, in float and int8, where these are known.
    """
    baseline = session.energy(BASELINE)
    ratios = [session.ratio(name, BASELINE, "energy") for name in session.timings if name != BASELINE]
    least = min(ratios, key=lambda ratio: ratio.value, default=Reading(value=0.0, unit="ratio"))
    floor = Reading(value=least.value * baseline.value, unit="mJ", stderr=least.stderr * baseline.value)
    return Foreseen(PredictedEnergy(latency.meter, baseline, latency.baseline.value), baseline, floor)
