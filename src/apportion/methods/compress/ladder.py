"""The ladder of a run: certified rungs to switch between when the budget moves, without training or measuring again.

Nothing here needs torch, so that ``apportion retarget`` answers at once; ``serve`` holds the rungs open.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from apportion.core.budget import Budget, format_quantity
from apportion.core.certificate import Certificate
from apportion.errors import ApportionError, InfeasibleError
from apportion.methods.compress.rundir import RunDir


@dataclass(frozen=True)
class Step:
    """One rung: its number in the run folder and what its certificate says."""

    rung: int
    certificate: Certificate

    @property
    def quality(self) -> float:
        return self.certificate.quality["after"].value


@dataclass(frozen=True)
class Ladder:
    """The certified rungs of a run, from the first (largest) to the last."""

    rundir: RunDir
    steps: tuple[Step, ...]

    @classmethod
    def load(cls, run: Path) -> Ladder:
        """Reads the certificates of a run's rungs."""
        rundir = RunDir(run)
        rundir.config()  # says what is wrong with a folder that is no run
        steps, place = [], 1
        while (rundir.rung(place).path / "certificate.json").is_file():
            steps.append(Step(place, rundir.rung(place).certificate()))
            place += 1
        if not steps:
            raise ApportionError(f"{run} has no certified rung; start the run again to go on")
        return cls(rundir, tuple(steps))

    def choose(self, budget: Budget) -> Step:
        """The rung of the highest quality among those whose certified readings meet a budget.

        Raises:
            InfeasibleError: none does; the message says what the smallest one measured of the limit that it breaks.
        """
        meeting = [step for step in self.steps if self._meets(step, budget)]
        if meeting:
            return max(meeting, key=lambda step: (step.quality, -step.rung))
        last = self.steps[-1].certificate
        slack = self._resolved(self.steps[-1], budget).slack(last.measured, last.z)
        broken = last.measured[min(slack, key=lambda key: slack[key] >= 0)]
        raise InfeasibleError(
            f"no rung meets {budget}: the smallest measures up to "
            f"{format_quantity(broken.upper(last.z), broken.unit)}; fit again with the smaller budget"
        )

    def _meets(self, step: Step, budget: Budget) -> bool:
        return self._resolved(step, budget).met(step.certificate.measured, step.certificate.z)

    def _resolved(self, step: Step, budget: Budget) -> Budget:
        """Absolute limits on the run's target; a limit on another one can't be judged by these certificates."""
        named = {limit.target for limit in budget.limits if limit.target}
        known = {key.partition("@")[0]: key for key in step.certificate.measured}
        if named - {step.certificate.target}:
            other = sorted(named - {step.certificate.target})[0]
            raise ApportionError(f"the run was measured on {step.certificate.target}, not on {other}; fit it there")
        missing = [limit.quantity for limit in budget.limits if limit.quantity not in known]
        if missing:
            raise ApportionError(f"the run did not measure {missing[0]}; it measured {', '.join(sorted(known))}")
        targets = {quantity: key.partition("@")[2] or None for quantity, key in known.items()}
        limits = tuple(replace(limit, target=targets[limit.quantity]) for limit in budget.limits)
        return Budget(limits).resolve(step.certificate.baseline)


def retarget(run: Path, budget: str) -> dict[str, Any]:
    """Makes the best rung that meets a budget the one in use; takes milliseconds, trains and measures nothing."""
    ladder = Ladder.load(run)
    step = ladder.choose(Budget.parse(budget))
    ladder.rundir.use(step.rung)
    certificate = step.certificate
    return {
        "budget": budget,
        "rung": step.rung,
        "of": len(ladder.steps),
        "target": certificate.target,
        "measured": {key: reading.to_json() for key, reading in certificate.measured.items()},
        "quality": certificate.quality["after"].to_json(),
        "model": str(ladder.rundir.model),
        "run": str(run),
    }
